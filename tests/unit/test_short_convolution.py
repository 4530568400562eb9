"""Law: a short convolution of packed documents equals each document alone, by an explicit sum on one process."""

from dataclasses import replace

import pytest
import torch

from trainer.families.decoder_args import TransformerArgs
from trainer.models.decoder import Transformer
from trainer.models.initialization import initialize
from trainer.models.short_convolution import InnerConvolution, ShortConvolution

pytestmark = pytest.mark.about("trainer/models/initialization.py")

ARGS = TransformerArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=50, max_seq_len=16)
DOCUMENTS = [[16], [1, 1, 2, 3, 4, 5], [5, 11], [3] * 5 + [1]]


def positions_of(documents: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])


def by_sums(x: torch.Tensor, weight: torch.Tensor, documents: list[list[int]]) -> torch.Tensor:
    """Each document alone, one token and one tap at a time."""
    kernel = weight.shape[2]
    rows = []
    for row, lengths in zip(x, documents, strict=True):
        for document in row.split(lengths):
            for t in range(len(document)):
                taps = range(min(kernel, t + 1))
                rows.append(sum(weight[:, 0, kernel - 1 - j] * document[t - j] for j in taps))
    return torch.stack(rows).view_as(x)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("kernel", [2, 4, 7, 20])
def test_the_definition_and_its_gradients(kernel: int) -> None:
    x, weight, inner = draw(4, 16, 3), draw(3, 1, kernel, seed=1), InnerConvolution()
    wanted, got = by_sums(x, weight, DOCUMENTS), inner(x, weight, positions=positions_of(DOCUMENTS))
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    cotangent = draw(4, 16, 3, seed=2).detach()
    for gradient, expected in zip(
        *(torch.autograd.grad(y, (x, weight), cotangent) for y in (got, wanted)), strict=True
    ):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    # Without positions the sequence is one document; negative control: the others differ.
    torch.testing.assert_close(inner(x, weight)[0], wanted[0], rtol=1e-12, atol=1e-12)
    assert (inner(x, weight)[1:] - wanted[1:]).norm() > 0.1 * wanted[1:].norm()


def test_it_is_the_causal_convolution_of_torch() -> None:
    """It has the same weights, so the weights of an nn.Conv1d can be loaded."""
    x, weight = draw(2, 9, 3), draw(3, 1, 4, seed=1)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    wanted = torch.nn.functional.conv1d(padded, weight, groups=3).transpose(1, 2)
    torch.testing.assert_close(InnerConvolution()(x, weight), wanted, rtol=1e-12, atol=1e-12)


def test_other_documents_may_be_anything() -> None:
    """Values of other documents are not multiplied by zero: an infinite value does not spread."""
    x = draw(1, 6, 2).detach()
    x[0, :3] = torch.inf
    assert InnerConvolution()(x, draw(2, 1, 4, seed=1), positions=positions_of([[3, 3]]))[0, 3:].isfinite().all()


def test_sums_of_bfloat16_are_rounded_once() -> None:
    x, weight = draw(2, 64, 8, dtype=torch.bfloat16), draw(8, 1, 4, seed=1, dtype=torch.bfloat16)
    exact = InnerConvolution()(x.double(), weight.double())
    assert torch.equal(InnerConvolution()(x, weight), exact.float().bfloat16())


def test_queries_keys_and_values_keep_themselves() -> None:
    module = ShortConvolution(6, 2, 4).double()
    parts = [draw(2, 5, channels, seed=channels) for channels in (6, 2, 2)]
    for taps in (module.q, module.k, module.v):
        torch.nn.init.zeros_(taps.weight)
    for got, x in zip(module(*parts), parts, strict=True):
        assert torch.equal(got, x)
    torch.nn.init.ones_(module.k.weight)
    q, k, v = module(*parts)
    assert torch.equal(q, parts[0])
    assert torch.equal(v, parts[2])
    torch.testing.assert_close(k[:, 4], parts[1][:, 4] + parts[1][:, 1:].sum(1))


def test_a_model_counts_draws_and_wires_it() -> None:
    """Parameters, FLOPs, the scale of the initial weights, and the positions that reach each layer."""
    args = replace(ARGS, short_conv_kernel=4)
    with torch.device("meta"):
        model = Transformer(args).double()
    initialize(model, seed=0, device=torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) == args.n_params() == ARGS.n_params() + 2 * 64 * 4
    for flops, plain in zip(args.flops_per_token(16), ARGS.flops_per_token(16), strict=True):
        assert flops == plain + 6 * 2 * 64 * 4
    weights = [p for name, p in model.named_parameters() if "short_conv" in name]
    assert len(weights) == 6
    assert torch.cat([w.flatten() for w in weights]).std().item() == pytest.approx((1 / 12) ** 0.5, rel=0.1)
    seen = []
    for layer in model.layers.values():
        hook = layer.attention.short_conv.register_forward_pre_hook
        hook(lambda _, args, kwargs: seen.append(kwargs["positions"]), with_kwargs=True)
    tokens, positions = torch.zeros(1, 16, dtype=torch.int64), positions_of([[5, 11]])
    model(tokens, positions)
    assert len(seen) == 2
    assert all(x is positions for x in seen)
