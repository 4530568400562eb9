"""Law: worker processes change nothing that is seen: order, state, errors. They end with what started them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from trainer.data.workers import WorkerSettings

from tests.numbered import failing, imported, opened, telling
from trainer.config.errors import ConfigError
from trainer.data.ahead import BatchesAhead
from trainer.data.loader import BatchLoader
from trainer.data.sources.bad_records import BadRecord

KEYS = ("tokens", "labels", "positions", "document_ids")
LENGTHS = [5, 90, 13, 150, 40, 8, 19, 61, 2, 1, 17, 33] * 4
DAMAGED = re.compile("^document 17 is damaged$")
DATA = partial(opened, LENGTHS)
_loaders: list[BatchLoader] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No worker outlives its test."""
    yield
    while _loaders:
        _loaders.pop()._stop()


def loader(workers: int, open_data: Callable = DATA, *, b: int = 2, n: int = 6, r: int = 0, d: int = 1) -> BatchLoader:
    """A loader with so many workers, which are a batch ahead."""
    shape = {"seq_len": 20, "local_batch_size": b, "data_streams": n, "seed": 0, "dp_rank": r, "dp_degree": d}
    data = opened(LENGTHS) if open_data in (imported, failing) else open_data()
    _loaders.append(BatchLoader(data, **shape, workers=WorkerSettings(workers, 1, open_data) if workers else None))
    return _loaders[-1]


def rows(batches) -> list[tuple]:
    return [
        tuple(tuple(batch[key][i].tolist()) for key in KEYS) for batch in batches for i in range(len(batch["tokens"]))
    ]


def pids(one: BatchLoader) -> list[int]:
    return [process.pid for process in one._workers._processes]


def seen(one: BatchLoader, batches: int) -> list:
    """Everything that a run sees of its data: each batch, and position and passes behind it."""
    return [(rows([batch]), batch["padding"], one.state_dict(), one.epoch) for batch in islice(iter(one), batches)]


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize(("workers", "n", "r", "d"), [(3, 6, 1, 2), (2, 3, 1, 4), (5, 2, 0, 1)])
def test_order_and_state_do_not_depend_on_workers(packing: str, workers: int, n: int, r: int, d: int) -> None:
    """Also where ranks share streams (3 streams on 4 ranks), and with fewer streams than workers."""
    data = partial(opened, LENGTHS, packing)
    assert seen(loader(workers, data, n=n, r=r, d=d), 12) == seen(loader(0, data, n=n, r=r, d=d), 12)


def test_a_run_resumes_with_other_workers_and_degrees_twice() -> None:
    """In the middle of documents, through JSON; the iterator that is in use goes on as well."""
    everything = rows(islice(iter(loader(0, b=1)), 48))
    states, done = None, 0
    for workers, d, steps in ((2, 1, 5), (0, 2, 3), (1, 2, 2), (3, 1, 9)):
        ranks = [loader(workers, r=r, d=d) for r in range(d)]
        for r, one in enumerate(ranks):
            batches = iter(one)
            if states is not None:
                if d == 1:
                    next(batches)  # workers that run are of another position
                one.load_state_dict(states)
            got = rows(islice(batches, steps))
            assert got == [everything[i] for i in range(done, done + 2 * d * steps) if i % d == r]
        merged = {s: entry for one in ranks for s, entry in one.state_dict().items()}
        states = {int(s): entry for s, entry in json.loads(json.dumps(merged)).items()}
        done += 2 * d * steps
    assert states == loader_at(done).state_dict()


def loader_at(samples: int) -> BatchLoader:
    """A loader of one process that has given so many samples."""
    one = loader(0, b=1)
    list(islice(iter(one), samples))
    return one


def test_batches_that_wait_are_not_in_the_state() -> None:
    one = loader(2)
    data = BatchesAhead(one, 3, lambda batch: batch)
    data.take()
    data.make()
    time.sleep(0.2)  # workers make more
    assert sum(entry["samples"] for entry in data.state_dict().values()) == 6


def test_workers_import_no_torch_and_find_what_the_run_finds() -> None:
    with pytest.raises(ConfigError, match=re.escape("imported: ['tests.numbered']")):
        next(iter(loader(1, imported)))


def test_an_error_arrives_as_itself_with_the_batch_that_it_belongs_to() -> None:
    alone, shared = (loader(workers, partial(opened, LENGTHS, bad=17)) for workers in (0, 2))
    for one in (alone, shared):
        data, done = BatchesAhead(one, 1, lambda batch: batch), 0
        while not data.failed:
            data.take()
            data.make()
            done += 1
        assert data.state_dict() == loader_at(2 * done).state_dict()
        with pytest.raises(BadRecord, match=DAMAGED):
            data.take()
    with pytest.raises(BadRecord, match=DAMAGED):
        next(iter(shared))


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    with pytest.raises(RuntimeError, match="a data worker raised Unsendable: the disk is gone") as error:
        next(iter(loader(1, failing)))
    assert "in failing" in str(error.value.__cause__)


def test_a_worker_that_dies_is_told_at_once_and_the_position_is_kept() -> None:
    one = loader(2)
    batches = iter(one)
    got = rows(islice(batches, 3))
    assert one._workers._connections[1].poll(60), "a batch lies ready, and is not taken from the dead"
    os.kill(pids(one)[1], signal.SIGKILL)
    one._workers._processes[1].wait()
    with pytest.raises(
        ConfigError, match=r"^data worker 2 of 2 of process \d+ ended by SIGKILL, as when memory runs out;"
    ):
        next(batches)
    got += rows(islice(iter(one), 7))
    assert got == rows(islice(iter(loader(0)), 10))


def test_the_log_of_workers_is_that_of_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    one = loader(2, partial(telling, LENGTHS))
    with caplog.at_level("WARNING", logger="trainer"):
        rows(islice(iter(one), 2))
    told = re.findall(r"document \d+ read by (\d+)", caplog.text)
    assert {int(pid) for pid in told} == set(pids(one))


def test_a_resumed_worker_reads_again_what_it_needs_only(caplog: pytest.LogCaptureFixture) -> None:
    (one := loader(2, partial(telling, LENGTHS))).load_state_dict(loader_at(150).state_dict())
    with caplog.at_level("WARNING", logger="trainer"):
        rows(islice(iter(one), 1))
    assert 2 <= caplog.text.count("read by") <= 8


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_ended(of: list[int], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while any(map(exists, of)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(exists, of))


def test_workers_end_with_their_loader() -> None:
    one = loader(2)
    next(iter(one))
    found = pids(one)
    assert all(map(exists, found))
    one.load_state_dict(one.state_dict())
    assert not any(map(exists, found))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_process_that_is_killed(sign: signal.Signals) -> None:
    """They do not end by SIGTERM or SIGINT themselves, which a batch system sends to all processes of a job."""
    code = (
        "from functools import partial; from tests.unit.test_data_workers import *; import time;"
        "one = loader(2); next(iter(one)); print(*pids(one), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        found = [int(word) for word in process.stdout.readline().split()]
        for pid in found:
            for harmless in (signal.SIGTERM, signal.SIGINT):
                os.kill(pid, harmless)
        time.sleep(0.2)
        assert len(found) == 2
        assert all(map(exists, found))
        process.send_signal(sign)
    assert all_ended(found)
