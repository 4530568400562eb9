"""Law: packed documents are computed as each document alone, also if states decay so slowly that a leak would last.

Drawn weights have decays that forget a document within a few tokens, so that a leak is easily overlooked. Here a state
loses about a thousandth with each token. No degree divides a document, and every rank has parts of several.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from longshard import ContextParallelOptions, context_parallel
from longshard.context.planning.mask import documents
from tests.distributed.harness import whole
from tests.distributed.pool import WorkerPool
from tests.distributed.test_generation import opened
from tests.hf_families import MODELS, hf_decoder, in_double
from tests.hf_tensors import to_hf
from tests.slow import slow
from tests.unit.test_expert_hugging_face import whole_folder
from trainer.checkpoint.weights import load_weights
from trainer.config.schema import Model
from trainer.data.packing import IGNORE_INDEX
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.reader import HFReader
from trainer.models import linear_attention
from trainer.models.model_spec import hf_model, model_spec
from trainer.runtime.process_group import Process

pytestmark = pytest.mark.about("trainer/models/linear_attention.py")
LENGTHS = (5, 13, 7, 11)
TOKENS = (torch.arange(sum(LENGTHS)) * 7 % 49 + 1)[None]  # 0 is padding in transformers, which has no gradient


def targets_of(tokens: torch.Tensor) -> torch.Tensor:
    """The next token of each token; a document ends without one."""
    parts = [F.pad(part[:, 1:], (0, 1), value=IGNORE_INDEX) for part in tokens.split(LENGTHS, 1)]
    return torch.cat(parts, 1)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def slowed(model: torch.nn.Module) -> torch.nn.Module:
    """The model with states that keep 0.999 of themselves, about."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(torch.tensor(1e-3).log())
    return model


def planted(fault: str) -> ExitStack:
    """Let documents leak into the next ones through the states, or through the short convolutions."""
    scan, convolve = linear_attention.linear_attention, linear_attention.LinearAttention.convolve
    faults: dict[str, Any] = {
        "states": mock.patch.object(
            linear_attention, "linear_attention", lambda tokens, plan: scan(tokens._replace(positions=None), plan)
        ),
        "convolution": mock.patch.object(
            linear_attention.LinearAttention,
            "convolve",
            lambda layer, parts, where: convolve(layer, parts, where | {"positions": None}),
        ),
    }
    stack = ExitStack()
    if fault:
        stack.enter_context(faults[fault])
    return stack


def packed_case(family: str, folder: str, fault: str = "") -> dict[str, torch.Tensor]:
    """Gradients of one packed sequence over all ranks, under the names of transformers."""
    spec, ranks = model_spec(family), Process.from_environment().world_size
    tokens, targets = TOKENS.clone(), targets_of(TOKENS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].clone()
    with planted(fault), opened(Model(name=family, flavor=folder), tokens.shape[1], cp=ranks) as (part, job, dims):
        load_weights([HFReader(HFFolder(Path(folder)), hf_model(spec, job.model))], [part])
        settings = {"options": job.attention or ContextParallelOptions(), "local_attention": True}
        settings |= {"mask": documents(LENGTHS, is_causal=True), "buffer_seq_dims": [1, 1, 1]}
        with context_parallel(dims["cp"], buffers=[tokens, targets, positions], **settings) as cp:
            hidden = part(tokens, positions=positions, attention_plan=cp.attention_plan)
            loss_of(part.output(hidden), targets).backward()
        return to_hf(spec, job.model, ((name, whole(p.grad)) for name, p in part.named_parameters()))


def wanted_of(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients of transformers, which computes each document alone; the weights are saved in `folder`."""
    with in_double():
        theirs = slowed(hf_decoder(*MODELS[name]))
        theirs.save_pretrained(folder / "weights")
        targets = targets_of(TOKENS).split(LENGTHS, 1)
        sum(
            loss_of(theirs(tokens).logits, own) for tokens, own in zip(TOKENS.split(LENGTHS, 1), targets, strict=True)
        ).backward()
        for parameter in theirs.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        theirs.save_pretrained(folder / "gradients")
    return {x: g for x, g in whole_folder(folder / "gradients").items() if "correction_bias" not in x}


def worst(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a gradient. Gradients near zero are compared with the largest one."""
    assert got.keys() == wanted.keys()
    largest = max(gradient.norm() for gradient in wanted.values())
    errors = ((got[x] - gradient).norm() / max(gradient.norm(), 1e-6 * largest) for x, gradient in wanted.items())
    return max(error.item() for error in errors)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3_5", 3),
        *slow(("qwen3_5_moe", 2), ("qwen3_next", 3), ("kimi_linear", 2), ("granitemoehybrid", 2), ("qwen3_5", 4)),
    ],
)
def test_packed_documents_are_computed_alone(pool: WorkerPool, tmp_path: Path, name: str, ranks: int) -> None:
    wanted = wanted_of(name, tmp_path)
    got = pool.run(ranks, packed_case, MODELS[name][0], str(tmp_path / "weights"))
    assert worst(got[0], wanted) < 1e-10


@pytest.mark.parametrize("fault", ["states", *slow("convolution")])
def test_a_leak_is_seen(pool: WorkerPool, tmp_path: Path, fault: str) -> None:
    wanted = wanted_of("qwen3_5", tmp_path)
    got = pool.run(2, packed_case, "qwen3_5", str(tmp_path / "weights"), fault)
    assert worst(got[0], wanted) > 1e-2
