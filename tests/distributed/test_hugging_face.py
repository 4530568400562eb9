"""Law: a model of transformers trains here, on every layout, to the losses and weights of its own loop there."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from tests.distributed import harness
from tests.distributed.harness import BASE, Record, RecordingTrainer, make_row, resolved
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.hf_llama import hf_llama, in_float64
from trainer.checkpoint.export import export
from trainer.config.loader import parse_command_line
from trainer.data.packing import IGNORE_INDEX
from trainer.models.common.rotary import rope_frequencies
from trainer.models.common.shapes import RopeScaling
from trainer.models.llama3 import spec as llama3
from trainer.models.llama3.args import TransformerArgs
from trainer.models.state_dict import to_hf
from trainer.runtime.process_group import Process, process_group

STEPS, ROWS, SEQ_LEN = 3, 8, 16
LLAMA = TransformerArgs(
    dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_hidden_dim=96, vocab_size=4354, max_seq_len=SEQ_LEN, norm_eps=1e-6
)
MODELS = {
    "plain": LLAMA,
    "tied, scaled": replace(LLAMA, n_kv_heads=2, tie_embeddings=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8)),
}
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
# Adam makes a whole step of the rounding of a gradient near zero, so that weights may be further apart than losses.
SETTINGS = [*BASE, f"--training.steps={STEPS}", f"--training.seq_len={SEQ_LEN}", f"--training.global_batch_size={ROWS}"]


# ---- here


def train(folder: str, hf: str, dtype: str, arguments: list[str]) -> dict:
    """On each rank: start from the weights in `hf`, train, export; losses, weights, logits before the first step."""
    process = Process.from_environment()
    given = [f"--model.flavor={hf}", f"--checkpoint.initial_load_path={hf}", f"--training.dtype={dtype}"]
    given += [f"--job.dump_folder={folder}", f"--checkpoint.export_dtype={dtype}", *arguments]
    config = parse_command_line([*SETTINGS, *given]).config
    with mock.patch.object(harness, "VOCAB", LLAMA.vocab_size), process_group(process, config.comm):
        trainer = RecordingTrainer(resolved(config, process), process.device, record=Record())
        logits = None
        if process.world_size == 1:
            (part,) = trainer.model_parts
            with torch.no_grad():
                logits = part.output(part(rows(0)["tokens"]))
        for step in range(1, STEPS + 1):
            trainer.train_step(step)
        weights = trainer.of_all_stages(lambda p: p)
        output = export(trainer.job, trainer.dims, trainer.model_parts, STEPS)
        trainer.metrics.close()
    if process.rank:
        return {}
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {"metrics": [json.loads(line) for line in lines], "weights": weights, "output": output, "logits": logits}


# ---- there


def rows(step: int) -> dict[str, torch.Tensor]:
    """The batch of a step, from 0."""
    with mock.patch.object(harness, "VOCAB", LLAMA.vocab_size):
        numbers = range(ROWS * step, ROWS * (step + 1))
        made = [make_row(i, SEQ_LEN, no_labels=step == 0 and i % 2 == 1) for i in numbers]
    return {name: torch.stack([row[name] for row in made]) for name in made[0]}


@contextmanager
def precise(args: TransformerArgs, dtype: str) -> Iterator[None]:
    """Inside, transformers computes wholly in this data type, with the frequencies of float64 in float64."""
    frequencies = rope_frequencies(args.head_dim, args.rope_theta, args.rope_scaling)
    angles = torch.outer(torch.arange(SEQ_LEN, dtype=torch.float64), frequencies)
    with in_float64(torch.cat((angles, angles), -1)) if dtype == "float64" else nullcontext():
        yield


@cache
def initial(model: str) -> LlamaForCausalLM:
    theirs = hf_llama(MODELS[model])
    for parameter in theirs.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.1)
        else:
            nn.init.normal_(parameter, 1.0, 0.1)
    return theirs


def their_own(model: str, dtype: str, lrs: list[float]) -> tuple[list[float], LlamaForCausalLM, torch.Tensor]:
    """Losses and final weights of a plain loop over the model of transformers; logits before the first step."""
    theirs = hf_llama(MODELS[model])
    theirs.load_state_dict(initial(model).state_dict())
    theirs.to(getattr(torch, dtype)).train()
    embeddings = theirs.get_input_embeddings().weight
    decaying = [p for p in theirs.parameters() if p.ndim > 1 and p is not embeddings]
    others = [p for p in theirs.parameters() if p.ndim == 1 or p is embeddings]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    with precise(MODELS[model], dtype):
        before = logits_of(theirs)
        for step, lr in enumerate(lrs):
            batch = rows(step)
            valid = int((batch["labels"] != IGNORE_INDEX).sum())
            logits = theirs(batch["tokens"], use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / valid
            optimizer.zero_grad()
            loss.backward()
            gradients = [p.grad for p in theirs.parameters()]
            norm = torch.stack([g.double().norm() for g in gradients]).norm().item()
            for gradient in gradients:
                gradient *= min(0.5 / norm, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            losses.append(loss.item())
    return losses, theirs, before


def logits_of(theirs: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return theirs(rows(0)["tokens"], use_cache=False).logits


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check(pool: WorkerPool, folder: Path, model: str, dtype: str, layout: str) -> dict:
    """Train on a layout, compare with their loop, and load there what was exported."""
    hf = folder / "hf"
    initial(model).save_pretrained(hf, max_shard_size="300KB")
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    got = pool.run(world_size, train, str(folder / "run"), str(hf), dtype, arguments)[0]
    losses, theirs, before = their_own(model, dtype, [line["lr"] for line in got["metrics"]])
    for mine, wanted in zip(got["metrics"], losses, strict=True):
        assert abs(mine["loss"] - wanted) <= TOLERANCE[dtype] * wanted
    if got["logits"] is not None:
        assert error(got["logits"], before) < TOLERANCE[dtype]
    # The export: bit for bit the weights of the run.
    exported = safetensors.torch.load_file(got["output"] / "model.safetensors")
    wanted = dict(to_hf(llama3.SPEC, MODELS[model], got["weights"].items()))
    assert exported.keys() == wanted.keys()
    assert [name for name, x in wanted.items() if not torch.equal(x, exported[name])] == []
    loaded = LlamaForCausalLM.from_pretrained(got["output"], dtype=getattr(torch, dtype))
    assert loaded.config.tie_word_embeddings == MODELS[model].tie_embeddings
    with precise(MODELS[model], dtype):
        assert error(logits_of(loaded), logits_of(theirs)) < 30 * TOLERANCE[dtype]  # of weights after Adam
    return exported


CASES = [
    ("plain", "float64", "one"),
    ("plain", "float32", "one"),
    ("tied, scaled", "float64", "fsdp2+tp2"),
    ("plain", "float64", "cp2+tp2"),
    ("plain", "float64", "pp2"),
    ("plain", "float32", "tp2+pp2"),
    *(
        pytest.param("plain", "float64", layout, marks=pytest.mark.slow)
        for layout in ("fsdp2+tp2", "hsdp2x2", "fsdp2+pp2", "cp2+pp2", "fsdp2+cp2+tp2", "fsdp2+tp2+pp2")
    ),
]


@pytest.mark.parametrize(("model", "dtype", "layout"), CASES)
def test_a_model_trains_here_as_there(pool: WorkerPool, tmp_path: Path, model: str, dtype: str, layout: str) -> None:
    check(pool, tmp_path, model, dtype, layout)
