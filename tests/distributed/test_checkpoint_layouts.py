"""Law: what any layout saves, any other loads in every bit, and continues with the same losses.

Every ordered pair of the layouts below is a case, of a model with experts, so that expert parallelism is one of them.
"""

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.distributed.checkpoint_cases import SETTINGS, merged, same, trainer_in, whole_state
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_parity import degrees
from tests.slow import slow
from trainer.checkpoint import checkpointer

TRAINED, MORE = 2, 3
MODEL = ["--model.name=qwen3_moe", "--training.dtype=float64", "--model.router_bias_update_rate=0.01"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "fsdp2": (2, degrees(dp_shard=2)),
    "hsdp2x2": (4, degrees(dp_replicate=2, dp_shard=2)),
    "tp2": (2, degrees(tp=2)),
    "cp2": (2, degrees(cp=2)),
    "pp2": (2, degrees(pp=2)),
    "ep2": (2, [*degrees(dp_shard=2), "--parallelism.expert_parallel_degree=2"]),
}
PAIRS = list(permutations(LAYOUTS, 2))
QUICK = {("tp2", "ep2")}
assert len(PAIRS) == 42
assert set(PAIRS) >= QUICK


def saving_case(folder: str, arguments: list[str], steps: int) -> tuple[dict, list[float]]:
    """Load the latest checkpoint, or train and save one.

    Returns:
        The whole state then, and the losses of the next steps.
    """
    with trainer_in(folder, arguments) as trainer:
        if not trainer.start_step:
            for step in range(1, steps + 1):
                trainer.train_step(step)
            trainer.checkpoint.save(steps, tokens_seen=7, last=True)
        state = {"state": whole_state(trainer)}
        for step in range(steps + 1, steps + 1 + MORE):
            trainer.train_step(step)
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return state, [line["loss"] for line in lines if line["step"] > steps]


Saved = Callable[[str], tuple[Path, dict, list[float]]]


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Layout -> folder of its checkpoint, the state in it, and the losses of the steps after it; made once."""
    known: dict[str, tuple[Path, dict, list[float]]] = {}

    def get(layout: str) -> tuple[Path, dict, list[float]]:
        if layout not in known:
            folder = tmp_path_factory.mktemp("saved")
            known[layout] = folder / "checkpoint", *state_and_losses(pool, layout, folder)
        return known[layout]

    return get


def state_and_losses(pool: WorkerPool, layout: str, folder: Path, *arguments: str) -> tuple[dict, list[float]]:
    world_size, degrees_of_layout = LAYOUTS[layout]
    results = pool.run(world_size, saving_case, str(folder), [*MODEL, *degrees_of_layout, *arguments], TRAINED)
    return merged([state for state, _ in results], "state"), results[0][1]


@pytest.mark.parametrize(
    ("first", "then"),
    [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in PAIRS],
)
def test_any_layout_resumes_from_any_other(pool: WorkerPool, tmp_path: Path, saved: Saved, first: str, then: str):
    """Weights, buffers, the optimizer's state, learning rate and data in every bit; then losses to 1e-9."""
    checkpoint, wanted, losses = saved(first)
    got, went_on = state_and_losses(pool, then, tmp_path, f"--checkpoint.folder={checkpoint}")
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not same(wanted[name], got[name])] == []
    assert len(losses) == len(went_on) == MORE
    assert went_on == pytest.approx(losses, rel=1e-9)


def test_negative_control(saved: Saved) -> None:
    """The state has every kind of entry that the law compares, and the smallest changes are seen."""
    _, state, losses = saved("tp2")
    for part in ("experts.w13", "router.selection_bias", "wq.weight"):
        names = [name for name in state if name.startswith("model.") and part in name]
        assert names, part
        assert all(state[name].any() for name in names)
    moments = {name for name in state if name.startswith("optimizer.")}
    assert len(moments) % 3 == 0 < len(moments)
    moment = state["optimizer.norm.weight.exp_avg_sq"]
    assert not same(moment, moment.index_put((torch.tensor([0]),), moment[0] * (1 + 1e-15)))
    assert len(set(losses)) == MORE


def planted_case(folder: str, arguments: list[str], fault: str) -> None:
    """Save the state with an entry too many or too few, on one rank."""
    real = checkpointer.tensors_of

    def planted(*parts: object) -> dict[str, torch.Tensor]:
        tensors = real(*parts)
        if fault == "surplus":
            tensors["optimizer.layers.7.wq.weight.exp_avg"] = torch.ones(3)
        elif fault == "missing":
            tensors.pop("optimizer.norm.weight.exp_avg", None)
        else:
            tensors["model.norm.weight"] = torch.ones(3)
        return tensors

    with trainer_in(folder, arguments) as trainer, mock.patch.object(checkpointer, "tensors_of", planted):
        trainer.train_step(1)
        trainer.checkpoint.save(1, tokens_seen=7, last=True)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "surplus",
            "it holds optimizer.layers.7.wq.weight.exp_avg, which this model lacks; surplus entries: 1",
        ),
        *slow(
            ("missing", "Missing key in checkpoint state_dict: optimizer.norm.weight.exp_avg"),
            ("other shape", "Size mismatch between saved torch.Size"),
        ),
    ],
)
def test_an_entry_too_many_or_too_few_is_an_error(pool: WorkerPool, tmp_path: Path, fault: str, message: str) -> None:
    pool.run(1, planted_case, str(tmp_path), MODEL, fault)
    for layout in ("one process", "pp2"):  # no rank of a pipeline has all names
        with pytest.raises(RankFailedError, match="SharedConfigError") as error:
            state_and_losses(pool, layout, tmp_path)
        assert message in str(error.value)
        assert "use another with checkpoint.load_step" in str(error.value) or "remove it" in str(error.value)


assert "--metrics.log_freq=1" in SETTINGS
