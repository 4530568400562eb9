"""Proof: tiny hybrids learn to copy, which takes state and attention both, and learn the same over four ranks."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.distributed import harness
from tests.distributed.pool import WorkerPool
from trainer.data.packing import IGNORE_INDEX
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.families.decoder_args import TransformerArgs
from trainer.families.layer_kinds import LayerKind
from trainer.families.linear_args import GatedDeltaArgs, KimiDeltaArgs, MambaArgs

LENGTH, ROWS = 16, 64
SHAPE = TransformerArgs(dim=64, n_layers=2, n_heads=4, n_kv_heads=4, ffn_hidden_dim=128, qk_norm=True)
LAYERS = LayerKind(linear=True, rope=False), LayerKind()
KINDS = {
    "gated_delta": replace(SHAPE, linear=GatedDeltaArgs(2, 4, 16, 16), layers=LAYERS),
    "kimi_delta": replace(SHAPE, linear=KimiDeltaArgs(4, 16), layers=LAYERS),
    "mamba2": replace(SHAPE, linear=MambaArgs(8, 16, 16), layers=LAYERS),
}
STEPS = 90


def copied_row(i: int, seq_len: int, **_: object) -> dict[str, torch.Tensor]:
    """Row i: random words, a mark, and the same words again, which alone are learned.

    All words of the vocabulary are used: unused ones are unlearned first, which takes many steps more.
    """
    generator = torch.Generator().manual_seed(i)
    words = torch.randint(1, harness.VOCAB, (LENGTH,), generator=generator)
    text = torch.cat([words, words.new_zeros(1), words])
    labels = text[1:].clone()
    labels[:LENGTH] = IGNORE_INDEX
    positions = torch.arange(seq_len)
    return {"tokens": text[:-1], "labels": labels, "positions": positions, "document_ids": torch.zeros_like(positions)}


def losses(kind: str, degree: int) -> list[float]:
    arguments = [
        "--model.flavor=copying",
        f"--training.seq_len={2 * LENGTH}",
        f"--training.steps={STEPS}",
        f"--training.local_batch_size={ROWS}",
        f"--training.global_batch_size={ROWS}",
        "--training.dtype=float64",
        "--training.max_norm=1.0",
        "--optimizer.lr=1e-2",
        "--optimizer.beta2=0.98",
        "--lr_scheduler.warmup_steps=30",
        "--lr_scheduler.decay_ratio=0.2",
        f"--parallelism.context_parallel_degree={degree}",
    ]
    rows, flavors = mock.patch.object(harness, "make_row", copied_row), mock.patch.dict(FLAVORS, copying=KINDS[kind])
    with rows, flavors, harness.trainer_of(arguments) as trainer:
        for step in range(1, STEPS + 1):
            trainer.train_step(step)
        folder = Path(trainer.config.job.dump_folder)
        trainer.metrics.close()
        file = folder / "metrics.jsonl"  # of rank 0
        return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_learns_to_copy_on_ranks_as_on_one(pool: WorkerPool, kind: str) -> None:
    (one,) = pool.run(1, losses, kind, 1, timeout=600)
    four = pool.run(4, losses, kind, 4, timeout=600)[0]
    assert one[0] > 4.8  # of 128 words
    assert one[-1] < 0.05
    for a, b in zip(four, one, strict=True):
        assert abs(a - b) < 1e-9 * b
