"""Law: with documents packed whole, training equals one process on every layout, and padding is counted."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.checkpoint_cases import trainer_in
from tests.distributed.harness import Record, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow

SEQ_LEN = 64
references: dict[str, Record] = {}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 10 to 130 tokens or so."""
    path = tmp_path_factory.mktemp("packing") / "a.jsonl"
    words = np.random.default_rng(0).integers(1, 12, 60)
    path.write_text("\n".join(json.dumps({"text": f"def f{i}(x): return {i} + x; " * n}) for i, n in enumerate(words)))
    return path


def arguments_of(data: Path, packing: str) -> list[str]:
    return [
        *("--training.dataset=jsonl", f"--training.dataset_path={data}", "--training.data_streams=4"),
        *(f"--training.packing={packing}", f"--training.seq_len={SEQ_LEN}", "--training.attention_mask=document"),
    ]


@pytest.mark.parametrize(
    ("layout", "packing"),
    [("fsdp2+cp2", "best_fit"), *slow(("cp2", "pad"), ("fsdp2+tp2", "pad"))],
)
def test_a_layout_trains_as_one_process(pool: WorkerPool, data: Path, layout: str, packing: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    settings = [*arguments_of(data, packing), "--training.dtype=float64"]
    if packing not in references:
        references[packing] = pool.run(1, run_layout, settings)[0]
    got = pool.run(world_size, run_layout, [*settings, *arguments])
    assert_parity(got[0], references[packing], 1e-10)


def padding_case(folder: str, arguments: list[str]) -> tuple[list[int], int]:
    """Tokens without a document in each step, counted in the batches: their document has token 0 alone."""
    padding, rows = [], 0
    with trainer_in(folder, [*arguments, "--training.steps=2", "--metrics.log_freq=1"]) as trainer:
        step = trainer.train_step

        def counted(number: int) -> None:
            trainer.data.make()
            padding.append(sum(int((batch["tokens"] == 0).sum()) for batch in trainer.data._made[0].batches))
            step(number)

        trainer.train_step = counted
        trainer.train()
        rows = trainer.job.sequences_per_step
    return padding, rows


@pytest.mark.parametrize("layout", ["fsdp2", *slow("cp2")])
def test_the_share_of_padding_is_that_of_all_ranks(pool: WorkerPool, tmp_path: Path, data: Path, layout: str) -> None:
    results = pool.run(2, padding_case, str(tmp_path), [*arguments_of(data, "pad"), *LAYOUTS[layout][1]])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    counts_of_ranks = [counts for counts, _ in results][: 2 if layout == "fsdp2" else 1]
    for line, counts in zip(lines, zip(*counts_of_ranks, strict=True), strict=True):
        assert line["padding_fraction"] == pytest.approx(sum(counts) / results[0][1] / SEQ_LEN)
        assert 0.1 < line["padding_fraction"] < 0.9
