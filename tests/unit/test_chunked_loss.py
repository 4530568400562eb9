"""Laws of the loss in chunks: values and gradients of the dense loss, and never the logits of more than a chunk."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.benchmarks.chunked_loss import Passes
from trainer.components.loss import row_losses, token_losses
from trainer.config.loader import parse_command_line
from trainer.data.packing import IGNORE_INDEX
from trainer.job.transforms import resolve_compilation
from trainer.models.chunked_loss import Chunks, apply_chunked_loss, chunked_token_losses
from trainer.models.chunked_loss_functions import ChunkFunctions, chunk_at_once, chunk_gradient, chunk_statistics
from trainer.models.decoder import CappedOutput

VOCAB, DIM = 37, 8
EAGER = resolve_compilation(
    parse_command_line([]).config, fixed_shapes=False, splits_backward=False, planned_attention=False
)


def problem(rows: int, length: int, dtype: torch.dtype, *, missing: float = 0.3) -> tuple[torch.Tensor, ...]:
    """Return hidden states, weight, labels and cotangents of tokens.

    missing: share of the tokens without a label.
    """
    generator = torch.Generator().manual_seed(length)
    hidden = torch.randn(rows, length, DIM, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, DIM, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCAB, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < missing] = IGNORE_INDEX
    cotangent = torch.randn(rows, length, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    return hidden, weight, labels, cotangent


def dense(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return token_losses(hidden @ weight.T, labels)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("tokens", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_losses_and_gradients_are_those_of_the_dense_loss(tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels, cotangent = problem(3, 27, dtype)
    losses = chunked_token_losses(hidden, weight, labels, Chunks(tokens))
    wanted = dense(hidden, weight, labels)
    assert losses.dtype == wanted.dtype == cotangent.dtype
    assert relative(losses, wanted) < max(tolerance * 1e-3, 1e-12 if dtype == torch.float64 else 1e-6)
    got = torch.autograd.grad(losses, (hidden, weight), cotangent)
    for gradient, expected in zip(got, torch.autograd.grad(wanted, (hidden, weight), cotangent), strict=True):
        assert gradient.dtype == expected.dtype
        assert relative(gradient, expected) < tolerance


@pytest.mark.parametrize("in_forward", [True, False])
def test_capped_logits_have_the_loss_and_gradients_of_autograd(in_forward: bool) -> None:
    hidden, weight, labels, _ = problem(3, 27, torch.float64)
    output = CappedOutput(DIM, VOCAB, 1.5)
    output.weight = nn.Parameter(weight.detach())
    wanted = token_losses(output(hidden), labels)
    losses = chunked_token_losses(hidden, output.weight, labels, Chunks(7, in_forward=in_forward, softcap=1.5))
    assert relative(losses, wanted) < 1e-12
    assert relative(losses, dense(hidden, weight, labels)) > 0.01
    leaves = hidden, output.weight
    for gradient, expected in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (losses, wanted)), strict=True):
        assert relative(gradient, expected) < 1e-12


@pytest.mark.parametrize("in_forward", [True, False, None])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradients_of_the_z_loss_are_those_of_autograd(in_forward: bool | None, softcap: float) -> None:
    """Losses do not change. in_forward: None: all logits at once."""
    hidden, weight, labels, _ = problem(3, 27, torch.float64)
    logits = hidden @ weight.T if not softcap else softcap * torch.tanh(hidden @ weight.T / softcap)
    plain = token_losses(logits, labels)
    squares = logits.logsumexp(-1).square() * (labels != IGNORE_INDEX)
    wanted = torch.autograd.grad((plain + 0.3 * squares).sum(), (hidden, weight), retain_graph=True)
    if in_forward is None:
        losses = token_losses(logits, labels, rows=partial(row_losses, z_loss=0.3))
    else:
        chunks = Chunks(7, in_forward=in_forward, softcap=softcap, z_loss=0.3)
        losses = chunked_token_losses(hidden, weight, labels, chunks)
    assert relative(losses, plain) < 1e-12
    for gradient, expected in zip(torch.autograd.grad(losses.sum(), (hidden, weight)), wanted, strict=True):
        assert relative(gradient, expected) < 1e-12


@pytest.mark.slow
def test_gradcheck() -> None:
    hidden, weight, labels, _ = problem(1, 5, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: chunked_token_losses(h, w, labels, Chunks(2)), (hidden, weight))


@pytest.mark.parametrize("in_forward", [True, False])
def test_the_gradient_of_the_weight_is_summed_in_float32(in_forward: bool) -> None:
    """A bfloat16 sum over 512 chunks would be off by several per cent."""
    hidden, weight, labels, _ = problem(1, 512, torch.bfloat16)
    losses = chunked_token_losses(hidden, weight, labels, Chunks(1, in_forward=in_forward))
    (got,) = torch.autograd.grad(losses.sum(), weight)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    (wanted,) = torch.autograd.grad(dense(*exact, labels).sum(), exact[1])
    assert relative(got, wanted) < 5e-3


@pytest.mark.parametrize("in_forward", [True, False])
def test_the_gradient_of_the_weight_is_rounded_once(in_forward: bool) -> None:
    """Products of one token are as large as their sum here: a product that is rounded for itself would be seen."""
    hidden, weight, labels, _ = problem(1, 512, torch.bfloat16)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def noted(h: torch.Tensor, *arguments: torch.Tensor | int) -> torch.Tensor | tuple[torch.Tensor, ...]:
        result = (chunk_at_once if in_forward else chunk_gradient)(h, *arguments)
        seen.append(((result[-1] if in_forward else result).double(), h.detach().double()))
        return result

    functions = ChunkFunctions(at_once=noted) if in_forward else ChunkFunctions(gradient=noted)
    losses = chunked_token_losses(hidden, weight, labels, Chunks(16, None, functions, in_forward))
    (got,) = torch.autograd.grad(losses.sum(), weight)
    present = (labels.flatten() != IGNORE_INDEX).double().split(16)
    exact = sum(grad.T @ (h * here[:, None]) for (grad, h), here in zip(seen, present, strict=True))
    ulp = 2.0 ** (exact.abs().log2().floor() - 7)
    assert len(seen) == 32
    assert ((got.double() - exact).abs() <= 0.5 * ulp + 1e-6 * exact.abs().max()).all()


# ---- gradients that are made in the forward


class Counted:
    """The functions of a chunk, and how often each was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        functions = (chunk_statistics, chunk_gradient, chunk_at_once)
        self.functions = ChunkFunctions(*map(self._counted, functions))

    def _counted(self, function):
        def call(*args):
            self.calls.append(function.__name__.removeprefix("chunk_"))
            return function(*args)

        return call


def test_a_sum_of_losses_needs_the_logits_once() -> None:
    hidden, weight, labels, _ = problem(3, 27, torch.float64)
    counted = Counted()
    scale = torch.tensor(0.3, dtype=torch.float64)
    losses = chunked_token_losses(hidden, weight, labels, Chunks(27, None, counted.functions))
    got = torch.autograd.grad(losses.sum() * scale, (hidden, weight), retain_graph=True)
    assert counted.calls == ["at_once"] * 3
    wanted = torch.autograd.grad(dense(hidden, weight, labels).sum() * scale, (hidden, weight))
    again = torch.autograd.grad(losses.sum() * scale, (hidden, weight))
    assert counted.calls == ["at_once"] * 3 + ["gradient"] * 3, "the first backward has used up the gradients"
    for one, two, exact in zip(got, again, wanted, strict=True):
        assert max(relative(one, exact), relative(two, exact)) < 1e-12


@pytest.mark.parametrize(("dtype", "passes", "moved"), [(torch.float32, 5, 28), (torch.bfloat16, 7, 34)])
def test_the_logits_are_read_and_written_as_often_as_docs_performance_says(
    dtype: torch.dtype, passes: int, moved: int
) -> None:
    hidden, weight, labels, _ = problem(1, 16, dtype)
    with Passes(16 * VOCAB) as counted:
        chunked_token_losses(hidden, weight, labels, Chunks(16)).sum().backward()
    whole = {name: number for name, number in counted.seen.items() if name not in Passes.FEW}
    assert sum(whole.values()) == passes, whole
    assert counted.bytes == moved * 16 * VOCAB


def test_other_cotangents_need_the_logits_again() -> None:
    hidden, weight, labels, cotangent = problem(3, 27, torch.float64)
    counted = Counted()
    losses = chunked_token_losses(hidden, weight, labels, Chunks(27, None, counted.functions))
    got = torch.autograd.grad(losses, (hidden, weight), cotangent)
    assert counted.calls == ["at_once"] * 3 + ["gradient"] * 3
    wanted = torch.autograd.grad(dense(hidden, weight, labels), (hidden, weight), cotangent)
    assert all(relative(a, b) < 1e-12 for a, b in zip(got, wanted, strict=True))


def test_what_needs_no_gradient_has_no_product() -> None:
    """Without gradients none is made; of a frozen weight (LoRA) or of frozen hidden states only the other one."""
    for in_forward in (True, False):
        for frozen in ((True, True), (True, False), (False, True)):
            hidden, weight, labels, _ = problem(1, 8, torch.float32)
            hidden.requires_grad_(not frozen[0])
            weight.requires_grad_(not frozen[1])
            counted, products = Counted(), Products()
            with products:
                losses = chunked_token_losses(hidden, weight, labels, Chunks(8, None, counted.functions, in_forward))
                if not all(frozen):
                    losses.sum().backward()
            made = 0 if all(frozen) else 1
            logits = 1 if in_forward or all(frozen) else 2
            assert products.seen == logits + made, (in_forward, frozen)
            assert [x.grad is None for x in (hidden, weight)] == [*frozen]
    hidden, weight, labels, _ = problem(1, 8, torch.float32)
    with torch.no_grad(), Products() as products:
        chunked_token_losses(hidden, weight, labels, Chunks(8))
    assert products.seen == 1


def test_a_scale_is_not_rounded_to_the_type_of_the_model() -> None:
    """This scale is half way between two bfloat16 numbers: the gradients would all be off by 0.28 %."""
    hidden, weight, labels, _ = problem(4, 256, torch.bfloat16)
    scale = torch.tensor(1 + 47.5 / 128)
    got = torch.autograd.grad(chunked_token_losses(hidden, weight, labels, Chunks(64)).sum() * scale, (hidden, weight))
    one = torch.autograd.grad(chunked_token_losses(hidden, weight, labels, Chunks(64)).sum(), (hidden, weight))
    for scaled, plain in zip(got, one, strict=True):
        ratio = (scaled.double() * plain.double()).sum() / plain.double().square().sum()
        assert abs(ratio / scale.double() - 1) < 2**-11


class Products(TorchDispatchMode):
    """Notes the types of the matrices of each product. A product that only CUDA has, of halves to float32, is done."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[tuple[torch.dtype, ...]] = []

    @property
    def seen(self) -> int:
        return len(self.types)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" not in func.name():
            return func(*args, **(kwargs or {}))
        self.types.append(tuple(x.dtype for x in args if isinstance(x, torch.Tensor))[-2:])
        if func._overloadname != "dtype_out":
            return func(*args, **(kwargs or {}))
        total, a, b, dtype = args
        assert kwargs["out"] is total
        return total.add_(a.to(dtype) @ b.to(dtype), alpha=kwargs["alpha"])


@pytest.mark.parametrize(("in_forward", "number"), [(True, 3), (False, 4)])
def test_a_gpu_multiplies_matrices_of_the_type_of_the_model(
    in_forward: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states and head in bfloat16 meet in bfloat16: float32 products leave the tensor cores."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    hidden, weight, labels, _ = problem(1, 64, torch.bfloat16)
    with Products() as products:
        losses = chunked_token_losses(hidden, weight, labels, Chunks(16, in_forward=in_forward))
        got = torch.autograd.grad(losses.sum(), (hidden, weight))
    assert products.types == [(torch.bfloat16, torch.bfloat16)] * (4 * number)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    for gradient, expected in zip(got, torch.autograd.grad(dense(*exact, labels).sum(), exact), strict=True):
        assert relative(gradient, expected) < 1e-2


@pytest.mark.parametrize("missing", [0.0, 1.0])
def test_all_labels_or_none(missing: float) -> None:
    hidden, weight, labels, cotangent = problem(2, 9, torch.float64, missing=missing)
    losses = chunked_token_losses(hidden, weight, labels, Chunks(4))
    torch.testing.assert_close(losses, dense(hidden, weight, labels), rtol=1e-12, atol=0)
    grads = torch.autograd.grad(losses, (hidden, weight), cotangent)
    assert all(grad.any() == (missing == 0) and grad.isfinite().all() for grad in grads)


def test_a_missing_label_counts_nothing_whatever_its_cotangent() -> None:
    hidden, weight, labels, cotangent = problem(1, 9, torch.float64)
    losses = chunked_token_losses(hidden, weight, labels, Chunks(4))
    grads = [
        torch.autograd.grad(losses, (hidden, weight), c, retain_graph=True)
        for c in (cotangent, cotangent.masked_fill(labels == IGNORE_INDEX, 1e6))
    ]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels, _ = problem(1, 9, torch.float32)
    with torch.no_grad():
        weight.mul_(1e4)
    losses = chunked_token_losses(hidden, weight, labels, Chunks(4))
    torch.testing.assert_close(losses, dense(hidden, weight, labels))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(losses.sum(), (hidden, weight)))


def test_a_wrong_label_fails() -> None:
    hidden, weight, labels, _ = problem(1, 9, torch.float32)
    labels[0, 3] = VOCAB
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_token_losses(hidden, weight, labels, Chunks(4))


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def largest(length: int, loss) -> int:
    hidden, weight, labels, cotangent = problem(1, length, torch.float32)
    with Largest() as seen:
        loss(hidden, weight, labels).backward(cotangent)
    return seen.elements


def test_no_tensor_grows_with_the_sequence_but_hidden_states() -> None:
    def chunked(*tensors: torch.Tensor) -> torch.Tensor:
        return chunked_token_losses(*tensors, Chunks(8))

    for length in (8, 16, 32):
        assert largest(length, chunked) == max(8 * VOCAB, VOCAB * DIM)
    assert largest(640, chunked) == 640 * DIM  # the hidden states' gradient, less than a seventh of the logits
    assert largest(640, dense) == 640 * VOCAB  # the negative control


def test_a_projection_returns_logits_without_labels_and_has_no_bias() -> None:
    output = nn.Linear(DIM, VOCAB, bias=False)
    hidden, _, labels, _ = problem(2, 9, torch.float32)
    before = output(hidden)
    apply_chunked_loss(output, 4, EAGER)
    assert torch.equal(output(hidden), before)
    torch.testing.assert_close(output(hidden, labels=labels), token_losses(before, labels))
    assert [name for name, _ in output.named_parameters()] == ["weight"]
    with pytest.raises(ValueError, match=r"set training\.loss_chunk_tokens = 0"):
        apply_chunked_loss(nn.Linear(DIM, VOCAB), 4, EAGER)
