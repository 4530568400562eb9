"""Models of Hugging Face's transformers, unmodified and unsharded, against the same models over two ranks.

Random tiny models from a configuration; in float64, so that every gradient must agree to ten digits. A model of theirs
computes norms in float32: what differs in the seventeenth digit there differs in the eighth only by a rare rounding.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.pool import WorkerPool
from trainer.config.loader import parse_command_line
from trainer.data.packing import IGNORE_INDEX
from trainer.distributed.context_parallel.context import ContextParallel, context_parallel
from trainer.distributed.context_parallel.planning.mask import documents
from trainer.distributed.context_parallel.planning.options import ContextParallelError
from trainer.integrations import interception
from trainer.integrations.transformers import register_transformers_attention
from trainer.runtime.process_group import Process, process_group

RANKS = 2
TOLERANCE = 1e-10
SEQ_LEN = 21
LAYERS = 2
VOCAB = 64


@dataclass(frozen=True)
class Case:
    """A model, and how it is run.

    route: which attention of the model is sharded; reference: which one of it is not. mistake: what a user may get
    wrong, or forget.
    """

    model: str
    method: str = "ring"
    load_balancer: str = "head_tail"
    route: str = "sdpa"
    reentrant: bool | None = None
    """Of activation checkpointing; None: without."""
    changes: dict[str, Any] = field(default_factory=dict)
    document_lengths: tuple[int, ...] | None = None
    mistake: str | None = None
    reference: str = "sdpa"
    reference_by_document: bool = False
    """Of packed rows, run the documents one by one."""


@dataclass(frozen=True)
class Outcome:
    """On one rank: relative errors of logits, loss and every gradient, and how much attention ran."""

    logits: float
    loss: float
    gradients: dict[str, float]
    attention_calls: int
    calls_of_modules: int

    @property
    def worst(self) -> float:
        return max(self.logits, self.loss, *self.gradients.values())


def build(case: Case) -> nn.Module:
    """The model of a case, the same on every rank."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if case.model == "GPT2":
        sizes = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 4}
        sizes |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "initializer_range": 0.2}
        sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{case.model}Config")(**sizes, **case.changes)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=case.reference).double().train()
    if case.model == "GptOss":
        model.set_experts_implementation("eager")  # the other ones know no float64
    if case.reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.reentrant})
    return model


def batch_of(case: Case) -> dict[str, torch.Tensor]:
    """Two whole rows, labels shifted before anything is cut; some labels do not count."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCAB, (2, SEQ_LEN + 1), generator=generator)
    labels = text[:, 1:].clone()
    labels[0, 4:9] = IGNORE_INDEX
    positions = torch.cat([torch.arange(n) for n in case.document_lengths or (SEQ_LEN,)])
    return {
        "tokens": text[:, :-1].clone(),
        "labels": labels,
        "positions": positions.expand(2, -1).clone(),
        "ones": torch.ones(2, SEQ_LEN, dtype=torch.int64),
    }


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor], **inputs: Any) -> torch.Tensor:
    return model(input_ids=batch["tokens"], use_cache=False, **inputs).logits


def loss_of(logits: torch.Tensor, batch: dict[str, torch.Tensor], count: torch.Tensor) -> torch.Tensor:
    """This rank's share of the mean over all valid labels."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / count


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@contextmanager
def ranks() -> Iterator[DeviceMesh]:
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        yield init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("cp",))


def run_case(case: Case, mesh: DeviceMesh) -> Outcome:
    reference, model = (build(case).to(mesh.device_type) for _ in range(2))  # a rotary table may remember a run
    batch = {name: x.to(mesh.device_type) for name, x in batch_of(case).items()}
    count = (batch["labels"] != IGNORE_INDEX).sum()
    wanted_logits = reference_logits(case, reference, batch)
    wanted_loss = loss_of(wanted_logits, batch, count)
    wanted_loss.backward()
    wanted = gradients_of(reference)
    if case.route == "registered":
        register_transformers_attention()
        model.set_attn_implementation("context_parallel")
    else:
        model.set_attn_implementation(case.route)
    seen = []
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(lambda *_: seen.append(1))
    with context_parallel(
        mesh,
        buffers=list(batch.values()),
        buffer_seq_dims=[1] * len(batch),
        mask=documents(case.document_lengths) if case.document_lengths and case.mistake != "no document mask" else None,
        method=case.method,
        load_balancer=case.load_balancer,
        intercept_sdpa=case.mistake != "no interception",
    ) as cp:
        logits = sharded_logits(case, model, batch, count)
        loss = loss_of(logits, batch, count)
        loss.backward()
    gradients = gradients_of(model)
    for x in (loss := loss.detach(), *gradients.values()):
        dist.all_reduce(x, group=mesh.get_group())
    mine = torch.from_numpy(cp.layout.indices(mesh.get_local_rank())).to(mesh.device_type)
    return Outcome(
        relative(logits, wanted_logits[:, mine]),
        relative(loss, wanted_loss),
        {name: relative(gradient, wanted[name]) for name, gradient in gradients.items()},
        cp.live.calls,
        len(seen),
    )


def reference_logits(case: Case, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if case.reference_by_document:
        split = (x.split(case.document_lengths, 1) for x in batch.values())
        parts = [dict(zip(batch, x, strict=True)) for x in zip(*split, strict=True)]
        logits = [logits_of(model, x, position_ids=x["positions"], attention_mask=x["ones"]) for x in parts]
        return torch.cat(logits, 1)
    # Packed rows as transformers knows them: by positions that start again, and no mask given.
    mask = {} if case.document_lengths else {"attention_mask": batch["ones"]}
    return logits_of(model, batch, position_ids=batch["positions"], **mask)


def sharded_logits(case: Case, model: nn.Module, batch: dict[str, torch.Tensor], count: torch.Tensor) -> torch.Tensor:
    inputs = {"position_ids": batch["positions"], "attention_mask": batch["ones"]}
    if case.mistake == "permuted positions":
        inputs["position_ids"] = batch["positions"].flip(1)
    elif case.mistake == "local positions":
        inputs["position_ids"] = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
    elif case.mistake == "no positions":
        del inputs["position_ids"]
    elif case.mistake == "no attention mask":
        del inputs["attention_mask"]
    elif case.mistake == "padding":
        inputs["attention_mask"] = batch["ones"].index_fill(1, batch["ones"].new_zeros(1), 0)
    elif case.mistake == "shift after the cut":
        inputs |= {"labels": batch["tokens"], "num_items_in_batch": count}
    return logits_of(model, batch, **inputs)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def cases_on_ranks(cases: list[Case]) -> list[Outcome | str]:
    """What each case comes to on this rank, or its refusal."""
    outcomes = []
    with ranks() as mesh:
        for case in cases:
            try:
                outcomes.append(run_case(case, mesh))
            except ContextParallelError as error:
                outcomes.append(str(error))
    return outcomes


def assert_equal_to_one_process(pool: WorkerPool, cases: list[Case], tolerance: float = TOLERANCE) -> None:
    for outcomes in pool.run(RANKS, cases_on_ranks, cases):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert isinstance(outcome, Outcome), (case, outcome)
            assert outcome.worst < tolerance, (case, outcome)
            assert len(outcome.gradients) > 10
            passes = 1 if case.reentrant is None else 2
            assert outcome.attention_calls == outcome.calls_of_modules == LAYERS * passes, (case, outcome)


def refusals(pool: WorkerPool, *cases: Case) -> list[list[str]]:
    """By case: what each rank says."""
    by_rank = pool.run(RANKS, cases_on_ranks, list(cases))
    for messages in by_rank:
        for case, message in zip(cases, messages, strict=True):
            assert isinstance(message, str), (case, message)
            assert len(message.splitlines()) == 1
    return [list(messages) for messages in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("model", ["Llama", "Qwen3", "GPT2"])
def test_losses_and_gradients_are_those_of_one_process(pool: WorkerPool, model: str) -> None:
    """Every pair of method, layout, route and activation checkpointing; ranks hold different numbers of tokens."""
    choices = (
        ("ring", "head_tail", "sdpa", None),
        ("all_to_all", "contiguous", "registered", None),
        ("ring", "contiguous", "registered", False),
        ("all_to_all", "head_tail", "sdpa", False),
        ("ring", "contiguous", "sdpa", True),
        ("all_to_all", "head_tail", "registered", True),
    )
    others = [Case(model, "all_gather"), Case(model, load_balancer="balanced")]
    assert_equal_to_one_process(pool, [*(Case(model, *choice) for choice in choices), *others])


def test_packed_documents_are_those_of_transformers(pool: WorkerPool) -> None:
    """There by positions that start again, here by the context's mask; a boundary is at the end of a shard."""
    lengths = (8, 3, 10)
    cases = [
        Case("Llama", method, balancer, route, document_lengths=lengths)
        for method in ("ring", "all_to_all")
        for balancer in ("head_tail", "contiguous")
        for route in ("sdpa", "registered")
    ]
    assert_equal_to_one_process(pool, cases)


WINDOWED = [
    Case("Mistral", changes={"sliding_window": 5}),
    # Longer than what a rank holds: transformers makes no mask, and tells SDPA nothing.
    Case("Mistral", changes={"sliding_window": 16}),
    Case(
        "Qwen2",
        changes={"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    ),
]


def test_sliding_windows_are_honoured_by_the_registered_function(pool: WorkerPool) -> None:
    cases = [
        replace(case, route="registered", method=method, load_balancer=balancer)
        for case in WINDOWED
        for method in ("ring", "all_to_all")
        for balancer in ("head_tail", "contiguous")
    ]
    assert_equal_to_one_process(pool, cases)


def test_sliding_windows_are_refused_where_they_cannot_be_seen(pool: WorkerPool) -> None:
    for messages in refusals(pool, *WINDOWED):
        for message in messages:
            assert "got a mask of shape" in message or "register_transformers_attention" in message
    # As long as the sequence: it hides nothing.
    assert_equal_to_one_process(pool, [Case("Mistral", changes={"sliding_window": SEQ_LEN})])


@pytest.mark.parametrize("reentrant", [None, False])
def test_attention_sinks_are_honoured_by_the_registered_function(pool: WorkerPool, reentrant: bool | None) -> None:
    """GPT-OSS: sinks with gradients of their own, in layers with and without a window."""
    changes = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6, "head_dim": 8}
    case = Case("GptOss", route="registered", reference="eager", changes=changes, reentrant=reentrant)
    assert_equal_to_one_process(
        pool,
        [replace(case, method=m, load_balancer=b) for m in ("ring", "all_to_all") for b in ("head_tail", "balanced")],
    )


def test_attention_that_is_not_known_is_refused(pool: WorkerPool) -> None:
    """Chunks are longer than what a rank holds, so that no mask tells of them."""
    chunks = {"num_local_experts": 1, "attention_chunk_size": 16, "intermediate_size_mlp": 48, "head_dim": 8}
    cap = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64}
    *chunked, capped = refusals(
        pool,
        Case("Llama4Text", changes=chunks),
        Case("Llama4Text", changes=chunks, route="registered"),
        Case("Gemma2", changes=cap, route="registered", reference="eager"),
    )
    assert all("in chunks of 16 for 21 tokens" in message for messages in chunked for message in messages)
    assert all("passes 'softcap'" in message for message in capped)


def test_mistakes_that_show(pool: WorkerPool) -> None:
    """Controls: each of these is another model, by far more than the tolerance."""
    mistakes = ("no interception", "permuted positions")
    cases = [Case("Llama", load_balancer=b, mistake=m) for b in ("head_tail", "contiguous") for m in mistakes]
    for outcomes in pool.run(RANKS, cases_on_ranks, cases):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert min(outcome.gradients.values()) > 0.1, case


def test_mistakes_that_are_refused(pool: WorkerPool) -> None:
    """On every rank, also where only one of them sees the mistake."""
    for route in ("sdpa", "registered"):
        jumps, padded, *forgotten, labels = refusals(
            pool,
            Case("Llama", route=route, mistake="no attention mask"),
            Case("Llama", route=route, load_balancer="contiguous", mistake="padding"),
            Case("Llama", route=route, load_balancer="contiguous", mistake="no positions"),
            Case("GPT2", route=route, mistake="no positions"),
            Case("Llama", route=route, mistake="shift after the cut"),
        )
        assert "got a mask of shape" in jumps[0]
        assert "rank(s) [0] of the group" in jumps[1]
        assert all("an all-ones `attention_mask`" in message for message in padded)
        assert all("got no `position_ids`" in message for messages in forgotten for message in messages)
        assert all("got `labels`, which it shifts" in message for message in labels)
    # Documents that begin where a shard begins, without their mask: no jump to see on any rank.
    (boundary,) = refusals(
        pool, Case("Llama", load_balancer="contiguous", document_lengths=(11, 10), mistake="no document mask")
    )
    for message in boundary:
        assert "counts positions from 0 on rank(s) [1] of the group" in message
        assert "those of documents together with their mask" in message


def test_attention_that_is_not_sdpa_is_noticed(pool: WorkerPool) -> None:
    (messages,) = refusals(pool, Case("GPT2", route="eager"))
    assert all("attn_implementation='eager', which does not call" in message for message in messages)


def fsdp_case(reentrant: bool | None) -> tuple[float, int]:
    """The worst gradient of a model whose parameters are sharded over the same ranks, and how much attention ran."""
    with ranks() as mesh:
        case = Case("Llama", reentrant=reentrant)
        wanted, model = (build(case).to(mesh.device_type) for _ in range(2))
        batch = {name: x.to(mesh.device_type) for name, x in batch_of(case).items()}
        count = (batch["labels"] != IGNORE_INDEX).sum()
        inputs = {"position_ids": batch["positions"], "attention_mask": batch["ones"]}
        loss_of(logits_of(wanted, batch, **inputs), batch, count).backward()
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        with context_parallel(
            mesh, buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch), intercept_sdpa=True
        ) as cp:
            loss_of(sharded_logits(case, model, batch, count), batch, count).backward()
        pairs = zip(model.parameters(), wanted.parameters(), strict=True)
        return max(relative(a.grad.full_tensor(), b.grad) for a, b in pairs), cp.live.calls


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_with_sharded_parameters(pool: WorkerPool, reentrant: bool | None) -> None:
    for worst, attention_calls in pool.run(RANKS, fsdp_case, reentrant):
        assert worst < TOLERANCE
        assert attention_calls == LAYERS * (1 if reentrant is None else 2)


def not_entered_again_case(reentrant: bool) -> str:
    """With a backward in which the mode is off, as it is unless it is entered again."""
    with ranks() as mesh, mock.patch.object(interception, "_BACKWARD", {}):
        try:
            run_case(Case("Llama", reentrant=reentrant), mesh)
        except ContextParallelError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_needs_the_mode_entered_again(pool: WorkerPool, reentrant: bool) -> None:
    for message in pool.run(RANKS, not_entered_again_case, reentrant):
        assert "outside of the context's interception" in message


class Attention(nn.Module):
    """Attention of somebody else: a projection and F.scaled_dot_product_attention, with what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).split(2, dim=1)
        return F.scaled_dot_product_attention(q, k, v, **settings).transpose(1, 2).flatten(2)


@contextmanager
def intercepted(mesh: DeviceMesh, x: torch.Tensor, **settings: Any) -> Iterator[ContextParallel]:
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], intercept_sdpa=True, **settings) as cp:
        yield cp


def data(seq_len: int = 13) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, seq_len, 8, dtype=torch.float64, generator=generator, device="cpu")
    return x.to(torch.get_default_device())


CALLS = ({}, {"is_causal": True}, {"is_causal": True, "scale": 0.2, "dropout_p": 0.0})


def backward_case(how: str) -> list[float]:
    """Errors of the weights' gradients by one way to run backward, with activation checkpointing."""
    with ranks() as mesh, torch.device(mesh.device_type):
        wanted, model, x = Attention(), Attention(), data()
        for settings in CALLS:
            wanted(x, **settings).pow(2).sum().backward()
        totals = [torch.zeros_like(p) for p in model.parameters()]
        with intercepted(mesh, x) as cp:
            for settings in CALLS:
                with torch.no_grad():
                    seen = model(x, **settings)
                hidden = (x * 1).requires_grad_()
                out = checkpoint(model, hidden, **settings, use_reentrant=False)
                torch.testing.assert_close(out, seen, rtol=0, atol=0)
                for total, part in zip(totals, run_backward(how, model, hidden, out), strict=True):
                    total += part
            assert cp.live.calls == 3 * len(CALLS)
        for total in totals:
            dist.all_reduce(total, group=mesh.get_group())
        return [relative(total, p.grad) for total, p in zip(totals, wanted.parameters(), strict=True)]


def run_backward(how: str, model: nn.Module, hidden: torch.Tensor, out: torch.Tensor) -> Sequence[torch.Tensor]:
    """Gradients of the model's parameters of sum(out ** 2)."""
    parameters = list(model.parameters())
    loss = out.pow(2).sum()
    if how == "grad":
        return torch.autograd.grad(loss, parameters, torch.ones_like(loss))
    if how == "grad, materialized":
        unused = torch.ones(1, requires_grad=True)
        *found, zero = torch.autograd.grad(loss, [*parameters, unused], materialize_grads=True)
        assert zero.item() == 0
        return found
    if how == "backward of several":
        torch.autograd.backward([out, loss * 0], [2 * out.detach(), None])
    elif how == "backward of inputs":
        squares = out * 1
        squares.pow(2).sum().backward(inputs=[squares, *parameters])
        torch.testing.assert_close(squares.grad, 2 * out, rtol=0, atol=0)  # not a leaf
        assert hidden.grad is None
    else:
        loss.backward()
    found = [p.grad for p in parameters]
    model.zero_grad()
    return found


@pytest.mark.parametrize("how", ["backward", "backward of several", "backward of inputs", "grad", "grad, materialized"])
def test_every_way_to_run_backward(pool: WorkerPool, how: str) -> None:
    """Causal and full attention; forward without gradients is the same forward."""
    for errors in pool.run(RANKS, backward_case, how):
        assert max(errors) < 1e-12


def test_recomputation_on_one_rank(pool: WorkerPool) -> None:
    """With `--device cuda` backward runs in threads of its own: the mode must be in force there too."""
    ((*errors,),) = pool.run(1, backward_case, "backward")
    assert max(errors) < 1e-12


def compiled_case() -> list[float | str]:
    """A compiled model: compiled before the context too, and without breaks."""
    results = []
    with ranks() as mesh:
        wanted, x = (part.to(mesh.device_type) for part in (Attention(), data()))
        wanted(x, is_causal=True).pow(2).sum().backward()
        for is_warm, fullgraph in ((False, False), (True, False), (True, True)):
            torch._dynamo.reset()
            model, x = (part.to(mesh.device_type) for part in (Attention(), data()))
            compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
            if is_warm:
                compiled(x, is_causal=True)
            try:
                with intercepted(mesh, x) as cp:
                    compiled(x, is_causal=True).pow(2).sum().backward()
                    assert cp.live.calls == 1
            except Exception as error:
                results.append(str(error))
                continue
            for p in model.parameters():
                dist.all_reduce(p.grad, group=mesh.get_group())
            pairs = zip(model.parameters(), wanted.parameters(), strict=True)
            results.append(max(relative(a.grad, b.grad) for a, b in pairs))
    return results


def test_a_compiled_model_runs_as_it_is(pool: WorkerPool) -> None:
    """Not compiled inside the context; if it must be, that is said."""
    for *errors, message in pool.run(RANKS, compiled_case):
        assert max(errors) < 1e-12
        assert "cannot be compiled" in message


def compiled_function_case() -> bool:
    """A function that is first compiled inside the context, whose attention call then comes from a graph break."""
    with ranks() as mesh:
        layer, x = nn.Linear(8, 24).double(), torch.randn(1, 16, 8, dtype=torch.float64)

        def attend(x: torch.Tensor) -> torch.Tensor:
            q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        torch._dynamo.reset()
        compiled, results = torch.compile(attend, backend="eager"), []
        for function in (compiled, attend):
            with intercepted(mesh, x) as cp:
                results.append(function(x))
                assert cp.live.calls == 1
        return torch.equal(*results)


def test_a_compiled_function_does_not_wait_for_ever(pool: WorkerPool) -> None:
    assert pool.run(1, compiled_function_case, timeout=60) == [True]


def refused_calls_case() -> list[str]:
    """The messages of calls that cannot be honoured; nothing of a context is left after any of them."""
    messages = []
    with ranks() as mesh, torch.device(mesh.device_type):
        model, x = Attention(), data()
        for call in calls_to_refuse(model, x):
            before = x.clone()
            with pytest.raises(ContextParallelError) as error, intercepted(mesh, x):
                call()
            messages.append(str(error.value))
            assert torch.equal(x, before)
        for seq_len in (2, 3):
            with pytest.raises(ContextParallelError) as error, intercepted(mesh, short := data(seq_len)):
                model(short)
            messages.append(str(error.value))
        with intercepted(mesh, short := data(4)):
            model(short)
        alone = init_device_mesh(mesh.device_type, (RANKS, 1), mesh_dim_names=("a", "b"))["b"]
        with (
            pytest.raises(ContextParallelError) as error,
            intercepted(mesh, x),
            intercepted(alone, data()),
        ):
            pass
        messages.append(str(error.value))
        with intercepted(mesh, x):
            loss = model(x).sum()
        with pytest.raises(ContextParallelError) as error:
            loss.backward()
        messages.append(str(error.value))
        # Attention outside is that of one process again.
        assert model(x).shape == x.shape
        with pytest.raises(ZeroDivisionError), intercepted(mesh, x):
            raise ZeroDivisionError
        assert model(x, attn_mask=torch.ones(13, 13, dtype=torch.bool)).shape == x.shape
    return messages


def calls_to_refuse(model: nn.Module, x: torch.Tensor) -> list[Callable[[], Any]]:
    q = torch.zeros(1, 4, 7, 4)
    part = {name: torch.zeros(1, 2, 7, 4) for name in ("key", "value")}
    return [
        lambda: model(x, attn_mask=torch.ones(7, 7, dtype=torch.bool)),
        lambda: model(x, attn_mask=torch.zeros(7, 7, dtype=torch.float64)),
        lambda: model(x, dropout_p=0.1),
        lambda: F.scaled_dot_product_attention(q, **part),
        lambda: F.scaled_dot_product_attention(q, **(part | {"value": torch.zeros(1, 2, 7, 2)}), enable_gqa=True),
        lambda: F.scaled_dot_product_attention(q[:, :3], **part, enable_gqa=True),
        lambda: F.scaled_dot_product_attention(q[0], q[0], q[0]),
        lambda: nn.MultiheadAttention(8, 2, dtype=torch.float64)(x, x, x, need_weights=False),
        lambda: F.scaled_dot_product_attention(q.repeat(1, 1, 2, 1), q, q),
    ]


REFUSED = [
    "a mask of shape (7, 7)",
    "a mask of shape (7, 7)",
    "dropout 0.1",
    "4 query heads and 2 key/value heads need enable_gqa=True",
    "heads of size 4 for queries and 2 for values",
    "2 key/value heads do not divide 3 query heads",
    "of shapes (4, 7, 4)",
    "multi_head_attention_forward attends inside of one call",
    "got 14 rows of the sequence",
    "2 tokens leaves a rank 1",
    "3 tokens leaves a rank 1",
    "in force already",
    "outside its context",
]


def test_calls_that_cannot_be_honoured_are_refused(pool: WorkerPool) -> None:
    for messages in pool.run(RANKS, refused_calls_case):
        assert len(messages) == len(REFUSED)
        for message, words in zip(messages, REFUSED, strict=True):
            assert words in message
            assert len(message.splitlines()) == 1
