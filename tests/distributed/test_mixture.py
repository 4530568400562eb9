"""Law: losses, tokens and passes of each source of a mixture equal one process on every layout."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.distributed.checkpoint_cases import trainer_in
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.components.loss import count_valid
from trainer.data.loader import TextBatch
from trainer.tasks.observers import SourceLosses

NAMES = ["web", "code", "none"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a job on three sources; the last source has the weight 0."""
    folder = tmp_path_factory.mktemp("mixture")
    for name in NAMES:
        lines = [json.dumps({"text": f"{name} {i} is {i * i} " * (i % 5 + 1)}) for i in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return [
        *("--training.dataset=jsonl", "--training.dtype=float64", "--training.steps=4", "--metrics.log_freq=2"),
        *("--mixture.names", *NAMES, "--mixture.paths", *(f"{folder}/{name}.jsonl" for name in NAMES)),
        *("--mixture.weights", "2", "1", "0"),
    ]


def train(folder: str, arguments: list[str]) -> list[list[torch.Tensor]]:
    """Train; return for each micro-batch its sources, its sums of losses and its labels, per sequence on this rank."""
    added, add = [], SourceLosses.losses
    with trainer_in(folder, arguments) as trainer:

        def adding(losses: SourceLosses, batch: TextBatch, token_losses: torch.Tensor) -> None:
            added.append([batch["sources"], token_losses.double().sum(1), count_valid(batch["labels"], dim=1)])
            add(losses, batch, token_losses)

        with mock.patch.object(SourceLosses, "losses", adding):
            trainer.train()
    return added


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


references: dict[str, list[dict]] = {}


@pytest.mark.parametrize("layout", ["fsdp2", *slow("cp2", "cp2+pp2")])
def test_a_layout_records_what_one_process_does(pool: WorkerPool, tmp_path: Path, data: list[str], layout: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    batch = ["--training.local_batch_size=2"] if "fsdp" in layout else ["--training.local_batch_size=4"]
    if "one" not in references:
        ((*added,),) = pool.run(1, train, str(tmp_path / "one"), [*data, "--training.local_batch_size=4"])
        references["one"] = lines_of(tmp_path / "one")
        assert [line["step"] for line in references["one"]] == [1, 2, 4]
        for line, steps in zip(references["one"], (added[:2], added[2:4], added[4:]), strict=True):
            sources, sums, counts = (torch.cat(column) for column in zip(*steps, strict=True))
            for number, name in enumerate(NAMES[:2]):
                is_own = sources == number
                assert line[f"loss/{name}"] == pytest.approx(
                    float(sums[is_own].sum() / counts[is_own].sum()), rel=1e-12
                )
    pool.run(world_size, train, str(tmp_path / "several"), [*data, *arguments, *batch])
    for one, several in zip(references["one"], lines_of(tmp_path / "several"), strict=True):
        keys = [key for key in one if "/" in key]
        assert keys == [key for key in several if "/" in key]
        assert "loss/none" not in keys
        assert one["tokens/none"] == one["epoch/none"] == 0
        assert one["tokens/web"] + one["tokens/code"] == one["tokens_seen"]
        for key in keys:
            assert several[key] == pytest.approx(one[key], rel=1e-10), key


BALANCED = {"fsdp2": LAYOUTS["fsdp2"], "fsdp2+cp2": LAYOUTS["fsdp2+cp2"]}


@pytest.mark.parametrize("layout", ["fsdp2", *slow("fsdp2+cp2")])
def test_sources_are_told_apart_where_documents_are_assigned(
    pool: WorkerPool, tmp_path: Path, data: list[str], layout: str
) -> None:
    """A row of a balanced step has documents of several sources."""
    world_size, arguments = BALANCED[layout]
    settings = [*data, *arguments, "--training.attention_mask=document", "--training.local_batch_size=2"]
    for folder, balance in (("off", "off"), ("step", "step")):
        pool.run(world_size, train, str(tmp_path / folder), [*settings, f"--training.balance={balance}"])
    for off, step in zip(lines_of(tmp_path / "off"), lines_of(tmp_path / "step"), strict=True):
        keys = [key for key in off if "/" in key]
        assert "loss/web" in keys
        assert keys == [key for key in step if "/" in key]
        for key in keys:
            assert step[key] == pytest.approx(off[key], rel=1e-10), key
