"""Laws: bad data stop all ranks after a checkpoint of what was trained, or are left out.

Ranks that have different data stop before the first step.
"""

import os
from pathlib import Path

import pytest

from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint import main_case, trainer_in
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.checkpoint.folder import read_state
from trainer.checkpoint.store import LocalStore
from trainer.config.errors import ConfigError
from trainer.data.streams import dealt, shuffled

JSONL = ["--training.dataset=jsonl", "--training.data_streams=None", "--training.steps=12"]
STREAMS = 10  # of 80 documents
BROKEN = b'{"text": "gr\xfc\xdfe"}'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Lines of 40 tokens or so. One is no UTF-8, the fourth that its stream reads."""
    lines = [b'{"text": "%d is a number, %d its square%s"}' % (i, i * i, b", never less" * 8) for i in range(80)]
    _, items = next(dealt(80, STREAMS, 0, 0, 1))
    lines[items[shuffled(8, 0, 1, 0, 0)[3]]] = BROKEN
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    return tmp_path / "a.jsonl"


def bad_line(data: Path) -> int:
    return 1 + data.read_bytes().splitlines().index(BROKEN)


def train(folder: str, arguments: list[str]) -> tuple[str, int, dict]:
    """Train to the end; what stopped it, the steps that were done, the position of the data."""
    done, state = [], {}
    try:
        with trainer_in(folder, [*JSONL, *arguments]) as trainer:
            step = trainer.train_step
            trainer.train_step = lambda number: (step(number), done.append(number))
            try:
                trainer.train()
            finally:
                state = trainer.data.state_dict()
    except ConfigError as error:
        return str(error), len(done), state
    return "", len(done), state


@pytest.mark.parametrize("ranks", [2, *slow(1, 3)])
def test_a_bad_record_stops_or_is_left_out(pool: WorkerPool, tmp_path: Path, data: Path, ranks: int) -> None:
    """With 3 ranks the 10 streams are shared."""
    batch = ["--training.global_batch_size=-1", "--training.local_batch_size=3"] if ranks == 3 else []
    given = [f"--training.dataset_path={data}", *batch]
    stopped = pool.run(ranks, train, str(tmp_path / "stop"), given)
    steps = stopped[0][1]
    assert 1 < steps < 12
    (told,) = {told for told, *_ in stopped}
    assert told == f'{data}, line {bad_line(data)}, must be a JSON object with a string field "text", in UTF-8'
    assert {done for _, done, _ in stopped} == {steps}
    folder = tmp_path / "stop" / "checkpoint"
    assert LocalStore(folder).steps() == [steps]
    streams = read_state(LocalStore(folder), steps).streams
    assert sorted(streams) == list(range(STREAMS))

    again = pool.run(ranks, train, str(tmp_path / "stop"), given)  # nothing is trained, nothing lost
    assert [(told, done) for told, done, _ in again] == [(stopped[0][0], 0)] * ranks
    assert LocalStore(folder).steps() == [steps]
    on = pool.run(ranks, train, str(tmp_path / "stop"), [*given, "--training.on_bad_record=skip"])
    assert [(told, done) for told, done, _ in on] == [("", 12 - steps)] * ranks
    whole = pool.run(ranks, train, str(tmp_path / "skip"), [*given, "--training.on_bad_record=skip"])
    assert [state for *_, state in whole] == [state for *_, state in on]


def test_without_checkpoints_it_stops_as_well(pool: WorkerPool, tmp_path: Path, data: Path) -> None:
    given = [f"--training.dataset_path={data}", "--checkpoint.no-enable"]
    (told, done, _), (other, also, _) = pool.run(2, train, str(tmp_path / "stop"), given)
    assert told == other
    assert f"line {bad_line(data)}, must be" in told
    assert 1 < done == also < 12


def lose_a_file(folder: str, texts: str) -> tuple[str, int]:
    """Train; half of the files disappear after the second step."""
    path = Path(texts)
    arguments = ["--training.dataset=text", f"--training.dataset_path={texts}", "--training.data_streams=None"]
    with trainer_in(folder, [*arguments, "--training.steps=99"]) as trainer:
        step = trainer.train_step

        def noted_step(number: int) -> None:
            step(number)
            if number == 2:
                for i in range(0, 16, 2):
                    (path / f"{i}.txt").unlink(missing_ok=True)

        trainer.train_step = noted_step
        try:
            trainer.train()
        except ConfigError as error:
            return str(error), trainer.checkpoint._last_step
    return "", 0


def test_files_that_disappear_stop_all_ranks_after_a_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    for i in range(16):
        (tmp_path / f"{i}.txt").write_text(f"{i} is a number " * 30)
    ((told, saved), other) = pool.run(2, lose_a_file, str(tmp_path / "run"), str(tmp_path))
    assert other == (told, saved)
    assert "txt cannot be read (No such file or directory); restore it, or give files that you may read" in told
    assert LocalStore(tmp_path / "run" / "checkpoint").steps() == [saved]


def test_changed_data_start_anew_on_purpose(pool: WorkerPool, tmp_path: Path, data: Path) -> None:
    given = [f"--training.dataset_path={data}", "--training.on_bad_record=skip"]

    def run(folder: str, steps: int, *more: str) -> list[tuple[str, int, dict]]:
        return pool.run(2, train, str(tmp_path / folder), [*given, f"--training.steps={steps}", *more])

    assert {told for told, *_ in run("run", 4)} == {""}
    data.write_bytes(data.read_bytes().replace(b"number", b"figure")[: data.stat().st_size // 2])
    ((told, done, _), _) = run("run", 8)
    assert "the data set has 41 documents, and had 80 when the checkpoint was saved" in told
    keys = ["--checkpoint.load_step=4", "--checkpoint.exclude_from_loading", "dataloader"]
    assert told.endswith(
        'or start the data anew with checkpoint.load_step and checkpoint.exclude_from_loading = ["dataloader"]'
    )
    assert done == 0
    assert [(told, done) for told, done, _ in run("run", 6, *keys)] == [("", 2)] * 2
    assert run("run", 8) == [("", 2, state) for *_, state in run("new", 4)]


def saved_positions(folder: str, data: str) -> dict:
    with trainer_in(folder, [*JSONL, f"--training.dataset_path={data}"]) as trainer:
        state = trainer.data.state_dict
        trainer.data.state_dict = lambda: {s: entry | {"waiting": (1 << 900) + s} for s, entry in state().items()}
        return dict(trainer.checkpoint._all_streams())


def test_positions_of_many_waiting_conversations_are_saved(pool: WorkerPool, tmp_path: Path, data: Path) -> None:
    """There is a bit for each of up to 1,024; an int64 has 64."""
    first, second = pool.run(2, saved_positions, str(tmp_path / "run"), str(data))
    assert first == second
    assert {s: entry["waiting"] for s, entry in first.items()} == {s: (1 << 900) + s for s in range(STREAMS)}


def of_one_rank_case(folder: str, arguments: list[str], different: list[str]) -> tuple[int, str]:
    """As `main_case`, with other arguments on rank 1."""
    return main_case(folder, [*arguments, *(different if os.environ["RANK"] == "1" else [])])


def test_ranks_that_read_different_data_stop_before_the_first_step(pool: WorkerPool, tmp_path: Path) -> None:
    """Of another data-parallel rank, whose batches are others anyway."""
    words = [f'{{"text": "some words that are read {i:02d}"}}\n' for i in range(20)]
    (tmp_path / "one.jsonl").write_text("".join(words))
    (tmp_path / "other.jsonl").write_text("".join([words[0], words[2], words[1], *words[3:]]))
    given = ["--training.dataset=jsonl", f"--training.dataset_path={tmp_path}/one.jsonl", *LAYOUTS["fsdp2"][1]]
    for different, told in (
        (f"--training.dataset_path={tmp_path}/other.jsonl", "rank 1 has other data than rank 0 (content); every"),
        (
            "--training.packing=best_fit",
            "(seq_len, token, training.packing, waiting); every machine must have the same",
        ),
    ):
        results = pool.run(2, of_one_rank_case, str(tmp_path), given, [different])
        assert [code for code, _ in results] == [2, 2]
        assert told in "".join(err for _, err in results)
    assert not LocalStore(tmp_path / "checkpoint").steps()
