"""Law: what any division of a field saves, any other loads in every bit, and continues with the same losses."""

import json
from itertools import permutations
from pathlib import Path

import pytest

from examples.fields.tests.drifting import write_drifting_fields
from tests.distributed.checkpoint_cases import merged, same, trainer_in, whole_state
from tests.distributed.pool import WorkerPool

TRAINED, MORE = 2, 3
DOMAIN, ROWS = "--parallelism.domain_parallel_degrees", "--fields.rows"
SETTINGS = [
    f"--job.config_file={Path(__file__).parents[1]}/unet.toml",
    "--training.dtype=float64",
    "--training.steps=100",
]
SETTINGS += ["--training.data_streams=4", "--metrics.log_freq=1"]
DIVISIONS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "2 uneven": (2, [DOMAIN, "2", ROWS, "5,11"]),
    "fsdp and 2": (4, [DOMAIN, "2", "--parallelism.data_parallel_shard_degree=2"]),
}
QUICK = ("2 uneven", "one process")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_drifting_fields(tmp_path_factory.mktemp("fields") / "fields.zarr")


def saving_case(folder: str, arguments: list[str]) -> tuple[dict, list[float]]:
    """Load the latest checkpoint, or train and save one.

    Returns:
        The whole state then, and the losses of the next steps.
    """
    with trainer_in(folder, arguments, SETTINGS) as trainer:
        if not trainer.start_step:
            for step in range(1, TRAINED + 1):
                trainer.train_step(step)
            trainer.checkpoint.save(TRAINED, tokens_seen=7, last=True)
        state = {"state": whole_state(trainer)}
        for step in range(TRAINED + 1, TRAINED + 1 + MORE):
            trainer.train_step(step)
    lines = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
    return state, [line["loss"] for line in lines if line["step"] > TRAINED]


def state_and_losses(pool: WorkerPool, division: str, folder: Path, *arguments: str) -> tuple[dict, list[float]]:
    ranks, divided = DIVISIONS[division]
    results = pool.run(ranks, saving_case, str(folder), [*divided, *arguments])
    return merged([state for state, _ in results], "state"), results[0][1]


@pytest.mark.parametrize(
    ("first", "then"),
    [pytest.param(*pair, marks=[] if pair == QUICK else [pytest.mark.slow]) for pair in permutations(DIVISIONS, 2)],
)
def test_any_division_resumes_from_any_other(
    pool: WorkerPool, tmp_path: Path, path: str, first: str, then: str
) -> None:
    data = f"--training.dataset_path={path}"
    wanted, losses = state_and_losses(pool, first, tmp_path / "first", data)
    folder = f"--checkpoint.folder={tmp_path}/first/checkpoint"
    got, went_on = state_and_losses(pool, then, tmp_path / "then", data, folder)
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not same(wanted[name], got[name])] == []
    assert len(set(losses)) == MORE, "a control: the losses tell the steps apart"
    assert went_on == pytest.approx(losses, rel=1e-9)
