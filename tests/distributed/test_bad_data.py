"""Laws: bad data stop all ranks after a checkpoint of what was trained, or are left out.

Ranks that have different data stop before the first step.
"""

import os
from pathlib import Path

import pytest

from tests.distributed.checkpoint_cases import main_case, trainer_in
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.commands import tokenize_text
from trainer.config.errors import ConfigError
from trainer.config.schema import Comm
from trainer.data.order.shuffled import shuffled
from trainer.data.order.streams import assigned
from trainer.data.token_files.format import open_pair
from trainer.runtime.agreement import once_a_node
from trainer.runtime.process_group import Process, process_group
from trainer.stores.folder import read_state
from trainer.stores.store import Store

ALL = ["--training.data_streams=None", "--training.steps=12"]
JSONL = ["--training.dataset=jsonl", *ALL]
STREAMS = 10  # of 80 documents


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Lines of 40 tokens or so."""
    lines = [b'{"text": "%d is a number, %d its square%s"}' % (i, i * i, b", never less" * 8) for i in range(80)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    return tmp_path / "a.jsonl"


@pytest.fixture
def damaged(data: Path, tmp_path: Path) -> Path:
    """Token files of these lines. One document, the fourth that its stream reads, has another id than was written."""
    assert tokenize_text.main(["--path", str(data), "--output", str(tmp_path / "tokens"), "--processes", "1"]) == 0
    pair = open_pair(str(tmp_path / "tokens" / "shard-00000.idx"))
    with open(pair.ids, "r+b") as file:
        file.seek(int(pair.arrays[1][bad_document()]) + 6)
        file.write(b"\1\1")
    return tmp_path / "tokens"


def bad_document() -> int:
    _, items = next(assigned(80, STREAMS, 0, 0, 1))
    return int(items[shuffled(8, 0, 1, 0, 0)[3]])


def train(folder: str, arguments: list[str]) -> tuple[str, int, dict]:
    """Train to the end; return the error, the number of steps, and the position of the data."""
    done, state = [], {}
    try:
        with trainer_in(folder, [*ALL, *arguments]) as trainer:
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
def test_a_damaged_document_stops_or_is_left_out(pool: WorkerPool, tmp_path: Path, damaged: Path, ranks: int) -> None:
    """With 3 ranks the 10 streams are shared."""
    batch = ["--training.global_batch_size=-1", "--training.local_batch_size=3"] if ranks == 3 else []
    settings = ["--training.dataset=tokens", f"--training.dataset_path={damaged}", *batch]
    stopped = pool.run(ranks, train, str(tmp_path / "stop"), settings)
    steps = stopped[0][1]
    assert 1 < steps < 12
    (message,) = {message for message, *_ in stopped}
    assert message.startswith(
        f"{damaged}/shard-00000.bin, document {bad_document()}, is damaged: its check sum is wrong"
    )
    assert {done for _, done, _ in stopped} == {steps}
    folder = tmp_path / "stop" / "checkpoint"
    assert Store(folder).steps() == [steps]
    streams = read_state(Store(folder), steps).streams
    assert sorted(streams) == list(range(STREAMS))

    again = pool.run(ranks, train, str(tmp_path / "stop"), settings)  # nothing is trained, nothing lost
    assert [(message, done) for message, done, _ in again] == [(stopped[0][0], 0)] * ranks
    assert Store(folder).steps() == [steps]
    on = pool.run(ranks, train, str(tmp_path / "stop"), [*settings, "--training.on_bad_record=skip"])
    assert [(message, done) for message, done, _ in on] == [("", 12 - steps)] * ranks
    whole = pool.run(ranks, train, str(tmp_path / "skip"), [*settings, "--training.on_bad_record=skip"])
    assert [state for *_, state in whole] == [state for *_, state in on]


def test_without_checkpoints_it_stops_as_well(pool: WorkerPool, tmp_path: Path, damaged: Path) -> None:
    settings = ["--training.dataset=tokens", f"--training.dataset_path={damaged}", "--checkpoint.no-enable"]
    (message, done, _), (other, also, _) = pool.run(2, train, str(tmp_path / "stop"), settings)
    assert message == other
    assert f"document {bad_document()}, is damaged" in message
    assert 1 < done == also < 12


def test_a_bad_line_stops_all_ranks_before_the_first_step(pool: WorkerPool, tmp_path: Path, data: Path) -> None:
    data.write_bytes(data.read_bytes().replace(b"7 is", b"7 \xfc\xdf", 1))
    settings = ["--training.dataset=jsonl", f"--training.dataset_path={data}"]
    ((message, done, _), other) = pool.run(2, train, str(tmp_path / "stop"), settings)
    assert message == f'{data}, line 8, must be a JSON object with a string field "text", in UTF-8'
    assert (message, 0) == (message, done) == other[:2]
    on = pool.run(2, train, str(tmp_path / "skip"), [*settings, "--training.on_bad_record=skip"])
    assert [(message, done) for message, done, _ in on] == [("", 12)] * 2


def lose_the_ids(folder: str, tokens: str) -> tuple[str, int]:
    """Train; the file of ids becomes shorter after the second step."""
    arguments = ["--training.dataset=tokens", f"--training.dataset_path={tokens}", "--training.data_streams=None"]
    with trainer_in(folder, [*arguments, "--training.steps=99", "--training.on_bad_record=skip"]) as trainer:
        step = trainer.train_step

        def noted_step(number: int) -> None:
            step(number)
            if number == 2:
                os.truncate(f"{tokens}/shard-00000.bin", 1000)

        trainer.train_step = noted_step
        try:
            trainer.train()
        except ConfigError as error:
            return str(error), trainer.checkpoint._last_step
    return "", 0


def test_files_that_shrink_stop_all_ranks_after_a_checkpoint(pool: WorkerPool, tmp_path: Path, damaged: Path) -> None:
    ((message, saved), other) = pool.run(2, lose_the_ids, str(tmp_path / "run"), str(damaged))
    assert other == (message, saved)
    assert "shard-00000.bin is shorter than when the run began to read it" in message
    assert Store(tmp_path / "run" / "checkpoint").steps() == [saved]


@pytest.mark.slow
def test_changed_data_are_not_loaded_on_purpose(pool: WorkerPool, tmp_path: Path, data: Path) -> None:
    settings = ["--training.dataset=jsonl", f"--training.dataset_path={data}"]

    def run(folder: str, steps: int, *options: str) -> list[tuple[str, int, dict]]:
        return pool.run(2, train, str(tmp_path / folder), [*settings, f"--training.steps={steps}", *options])

    assert {message for message, *_ in run("run", 4)} == {""}
    data.write_bytes(b"\n".join(data.read_bytes().replace(b"number", b"figure").splitlines()[:41]))
    ((message, done, _), _) = run("run", 8)
    assert "the data set has 41 documents, and had 80 when the checkpoint was saved" in message
    keys = ["--checkpoint.load_step=4", "--checkpoint.exclude_from_loading", "dataloader"]
    assert message.endswith(
        'or read the data from its start with checkpoint.load_step and checkpoint.exclude_from_loading = ["dataloader"]'
    )
    assert done == 0
    assert [(message, done) for message, done, _ in run("run", 6, *keys)] == [("", 2)] * 2
    assert run("run", 8) == [("", 2, state) for *_, state in run("new", 4)]


def saved_positions(folder: str, data: str) -> dict:
    with trainer_in(folder, [*JSONL, "--checkpoint.enable", f"--training.dataset_path={data}"]) as trainer:
        state = trainer.data.state_dict
        trainer.data.state_dict = lambda: {s: entry | {"waiting": [*range(s, 1024)]} for s, entry in state().items()}
        trainer.checkpoint.save(1, tokens_seen=0, last=True)
        return dict(read_state(trainer.checkpoint.folder, 1).streams)


def test_positions_of_many_waiting_conversations_are_saved(pool: WorkerPool, tmp_path: Path, data: Path) -> None:
    """Up to 1,024 places a stream."""
    first, second = pool.run(2, saved_positions, str(tmp_path / "run"), str(data))
    assert first == second
    assert {s: entry["waiting"] for s, entry in first.items()} == {s: [*range(s, 1024)] for s in range(STREAMS)}


def one_rank_case(folder: str, arguments: list[str], different: list[str]) -> tuple[int, str]:
    """As `main_case`, with other arguments on rank 1, which is on another node."""
    os.environ["LOCAL_RANK"] = "0"
    return main_case(folder, [*arguments, *(different if os.environ["RANK"] == "1" else [])])


def test_ranks_that_read_different_data_stop_before_the_first_step(pool: WorkerPool, tmp_path: Path) -> None:
    """The ranks are two data-parallel ranks, so their batches differ in any case."""
    words = [f'{{"text": "some words that are read {i:02d}"}}\n' for i in range(20)]
    (tmp_path / "one.jsonl").write_text("".join(words))
    (tmp_path / "other.jsonl").write_text("".join([words[0], words[2], words[1], *words[3:]]))
    settings = ["--training.dataset=jsonl", f"--training.dataset_path={tmp_path}/one.jsonl", *LAYOUTS["fsdp2"][1]]
    for different, message in (
        (f"--training.dataset_path={tmp_path}/other.jsonl", "rank 1 has other data than rank 0 (content); every"),
        (
            "--training.packing=best_fit",
            "(pieces, seq_len, token, training.packing, waiting); every machine must have the same",
        ),
    ):
        results = pool.run(2, one_rank_case, str(tmp_path), settings, [different])
        assert [code for code, _ in results] == [2, 2]
        assert message in "".join(err for _, err in results)
    assert not Store(tmp_path / "checkpoint").steps()


def catalog_case(ranks_of_a_node: int) -> tuple[str, int]:
    """Return the catalog that this rank gets, and how often it searched for it."""
    process = Process.from_environment()
    os.environ["LOCAL_RANK"] = str(process.rank % ranks_of_a_node)
    looked: list[str] = []
    with process_group(process, Comm()):
        catalog = once_a_node(lambda: looked.append("") or "x" * process.rank + f"catalog of rank {process.rank}")
    return catalog, len(looked)


def test_one_process_of_each_node_looks_for_all_its_ranks(pool: WorkerPool) -> None:
    results = pool.run(4, catalog_case, 2)
    first, second = "catalog of rank 0", "xxcatalog of rank 2"
    assert results == [(first, 1), (first, 0), (second, 1), (second, 0)]
