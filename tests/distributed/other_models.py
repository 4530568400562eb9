"""Tiny models of Hugging Face's transformers and a layer of attention, each run alone and over two ranks.

Models have random weights in float64, so that every gradient must agree to ten digits. These models compute norms in
float32: a difference in the seventeenth digit seldom becomes a difference in the eighth.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from longshard.context.planning.mask import documents
from longshard.context.planning.options import ContextParallelError
from longshard.context.regions import context_parallel
from longshard.integrations.calls import register_transformers_attention
from longshard.integrations.interception import intercept_sdpa
from tests.distributed.pool import WorkerPool
from trainer.config.loader import parse_command_line
from trainer.data.packing import IGNORE_INDEX
from trainer.runtime.process_group import Process, process_group

RANKS = 2
TOLERANCE = 1e-10
SEQ_LEN = 21
LAYERS = 2
VOCAB = 64


@dataclass(frozen=True)
class Case:
    """A model, and how it is run.

    route: the attention of the model that is sharded; reference: the attention of the unsharded run. mistake: a mistake
    that a user may make.
    """

    model: str
    method: str = "ring"
    load_balancer: str = "head_tail"
    route: str = "sdpa"
    reentrant: bool | None = None
    """`use_reentrant` of activation checkpointing; None: no activation checkpointing."""
    changes: dict[str, Any] = field(default_factory=dict)
    document_lengths: tuple[int, ...] | None = None
    mistake: str | None = None
    reference: str = "sdpa"
    reference_by_document: bool = False
    """Whether the reference runs the documents of a packed row one by one."""


@dataclass(frozen=True)
class Outcome:
    """Relative errors of logits, loss and every gradient on one rank, and the number of attention calls."""

    logits: float
    loss: float
    gradients: dict[str, float]
    attention_calls: int
    calls_of_modules: int

    @property
    def worst(self) -> float:
        return max(self.logits, self.loss, *self.gradients.values())


def build(case: Case) -> nn.Module:
    """Return the model of a case, the same on every rank."""
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
    config = getattr(transformers, f"{case.model}Config")(**(sizes | case.changes))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=case.reference).double().train()
    if any(type(module).__name__.endswith("Experts") for module in model.modules()):
        model.set_experts_implementation("eager")  # the other ones know no float64
    if case.reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.reentrant})
    return model


def batch_of(case: Case) -> dict[str, torch.Tensor]:
    """Return two whole rows; labels are shifted before the rows are cut, and some labels do not count."""
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
    """Return this rank's share of the mean over all valid labels."""
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
        intercept=None if case.mistake == "no interception" else intercept_sdpa(),
        local_attention=case.mistake == "no interception",
    ) as cp:
        logits = sharded_logits(case, model, batch, count)
        loss = loss_of(logits, batch, count)
        loss.backward()
    gradients = gradients_of(model)
    for x in (loss := loss.detach(), *gradients.values()):
        dist.all_reduce(x, group=mesh.get_group())
    own_rows = torch.from_numpy(cp.layout.indices(mesh.get_local_rank())).to(mesh.device_type)
    return Outcome(
        relative(logits, wanted_logits[:, own_rows]),
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
    """Return the outcome of each case on this rank, or its refusal."""
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
    """Return the errors of each rank, by case."""
    by_rank = pool.run(RANKS, cases_on_ranks, list(cases))
    for messages in by_rank:
        for case, message in zip(cases, messages, strict=True):
            assert isinstance(message, str), (case, message)
            assert len(message.splitlines()) == 1
    return [list(messages) for messages in zip(*by_rank, strict=True)]


class Attention(nn.Module):
    """Attention of another library: a projection and F.scaled_dot_product_attention, with the settings of the call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).split(2, dim=1)
        return F.scaled_dot_product_attention(q, k, v, **settings).transpose(1, 2).flatten(2)


def data(seq_len: int = 13) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, seq_len, 8, dtype=torch.float64, generator=generator, device="cpu")
    return x.to(torch.get_default_device())
