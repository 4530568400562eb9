"""Processes that tokenize and pack the sequences of a rank ahead of the steps that train on them. Torch-free.

The streams of a rank are dealt to its workers. Every worker goes through all batches of the rank, makes the rows of its
own streams, and sends a message for each batch: these rows, and the states of those streams behind the batch. So the
state of the batches that were taken is known at any time, and neither order nor state depends on the number of workers.

    rank's streams  0 1 2 3      worker 0 of 2: streams 0 2      batch of 3 rows   0 1 2 | 3 0 1 | 2 3 0
                                 worker 1 of 2: streams 1 3      made by worker    0 1 0 | 1 0 1 | 0 1 0

Workers are programs of their own: a fork of a process with threads or CUDA is not safe, and without torch they start in
a fraction of a second. (torchdata's StatefulDataLoader imports torch in each worker, and its state is bound to their
number.) A worker ends when its connection does, in whatever way the process at the other end has ended.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.mixture import Mixture
from trainer.data.packing import PackedSequence, positions_of
from trainer.data.streams import StreamState, Turns
from trainer.data.text_data import TextData

_SECONDS_TO_END = 5
_PROGRAM = (
    "import signal; [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)]; "
    "import sys; sys.path[:] = {path!r}; from trainer.data.workers import serve; serve({file})"
)
"""Signals that stop a run are for the rank, which finishes its step and then ends the workers."""

logger = logging.getLogger("trainer")


@dataclass(frozen=True)
class WorkerSettings:
    """number: of workers; ahead: batches that each has ready; reopen: opens the data in another process."""

    number: int
    ahead: int
    reopen: Callable[[], TextData | Mixture]


@dataclass(frozen=True)
class WorkerTask:
    """What one worker makes. streams: number -> items and state; given: samples that all ranks have read."""

    settings: WorkerSettings
    seq_len: int
    seed: int
    batch_size: int
    turns: Turns
    given: int
    streams: Mapping[int, tuple[Any, StreamState]]

    def messages(self) -> Iterator[Message]:
        """Yield the message of each batch, without end."""
        build = self.settings.reopen().builder(self.seq_len, self.seed, self.turns.data_streams)
        streams, states, given = {}, {}, self.given
        for s, (items, state) in self.streams.items():
            streams[s] = build(items, stream=s)
            streams[s].restart(state)
            states[s] = streams[s].state
        while True:
            turns = self.turns.of(streams, given, self.batch_size)
            rows = [(place, _Row.of(stream.next_sequence())) for place, stream in turns]
            given += self.turns.degree * self.batch_size
            moved = {s: stream.state for s, stream in streams.items() if stream.samples != states[s]["samples"]}
            states |= moved
            yield Message(rows, moved)


class _Row(NamedTuple):
    """A sequence on its way: tokens and labels (seq_len,) int32, and the lengths of its documents."""

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    padding: int
    source: int

    @classmethod
    def of(cls, sequence: PackedSequence) -> _Row:
        """Return a quarter of the bytes of a sequence: positions and ids follow from the lengths of documents."""
        ids = sequence.document_ids
        starts = np.append(0, 1 + np.flatnonzero(ids[1:] != ids[:-1]))
        lengths = np.diff(starts, append=len(ids))
        tokens, labels = sequence.tokens.astype(np.int32), sequence.labels.astype(np.int32)
        return cls(tokens, labels, lengths, sequence.padding, sequence.source)

    def whole(self) -> PackedSequence:
        """Return the sequence."""
        return PackedSequence(
            tokens=self.tokens.astype(np.int64),
            labels=self.labels.astype(np.int64),
            positions=positions_of(self.lengths, padding=self.padding),
            document_ids=np.repeat(np.arange(len(self.lengths), dtype=np.int64), self.lengths),
            padding=self.padding,
            source=self.source,
        )


@dataclass(frozen=True)
class Message:
    """rows: (place in the batch, row) of one worker; states: of streams that have moved; notes: for the log."""

    rows: Sequence[tuple[int, _Row]]
    states: Mapping[int, StreamState]
    notes: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True)
class _Failure:
    """An error in place of a message, and where it happened."""

    error: Exception
    trace: str
    notes: Sequence[tuple[int, str]] = ()


# ---- in the process that trains


class Workers:
    """Running workers, one for each task, which end with this object or with this process."""

    def __init__(self, tasks: Sequence[WorkerTask]) -> None:
        self._batch_size = tasks[0].batch_size
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen] = []
        self.close = weakref.finalize(self, _end, self._connections, self._processes)
        """End all workers."""
        for _ in tasks:
            here, there = Pipe()
            program = _PROGRAM.format(path=sys.path, file=there.fileno())
            command = [sys.executable, "-c", program]
            self._processes.append(subprocess.Popen(command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL))
            self._connections.append(here)
            there.close()  # or the end of the worker would not be seen here
        for number, task in enumerate(tasks):
            try:
                self._connections[number].send(task)
            except OSError:
                raise self._died(number) from None

    def next(self) -> tuple[list[PackedSequence], dict[int, StreamState]]:
        """Return the rows of the next batch, and the states of the streams that have moved.

        Raises:
            ConfigError: a worker has ended.
            Exception: what a worker has raised.
        """
        for number, process in enumerate(self._processes):  # one that has raised an error is still there
            if process.poll() is not None:
                raise self._died(number)
        rows: list[Any] = [None] * self._batch_size
        states: dict[int, StreamState] = {}
        for message in [self._received(number) for number in range(len(self._connections))]:
            if isinstance(message, _Failure):
                cause = None if isinstance(message.error, ConfigError) else RuntimeError(message.trace)
                raise message.error from cause
            for place, row in message.rows:
                rows[place] = row.whole()
            states |= message.states
        return rows, states

    def _received(self, number: int) -> Message | _Failure:
        try:
            message = self._connections[number].recv()
        except (EOFError, OSError):
            raise self._died(number) from None
        for level, text in message.notes:
            logger.log(level, text)
        return message

    def _died(self, number: int) -> ConfigError:
        code = self._processes[number].wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        why = ", as when memory runs out" if code == -signal.SIGKILL else ""
        return ConfigError(
            f"data worker {number + 1} of {len(self._processes)} of process {os.getpid()} ended {how}{why}; run the "
            "same command again to resume, with fewer training.data_workers if memory is short"
        )


def _end(connections: Sequence[Connection], processes: Sequence[subprocess.Popen]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- in a worker


class _Notes(logging.Handler):
    """Keeps records until the next message takes them: the log is that of the rank."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append((record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[int, str]]:
        """Return what was logged since the last call."""
        found, self._found = self._found, []
        return found


def serve(file: int) -> None:
    """Be a worker: get a task from a connection, and send its messages until the connection ends."""
    connection = Connection(file)
    task: WorkerTask = connection.recv()
    ready: queue.Queue[bytes] = queue.Queue(task.settings.ahead)
    for target in (_end_with, _send_all):
        threading.Thread(target=target, args=(connection, ready), daemon=True).start()
    notes = _Notes()
    logger.addHandler(notes)
    logger.propagate = False
    try:
        for message in task.messages():
            ready.put(pickle.dumps(Message(message.rows, message.states, notes.taken()), pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        ready.put(_failure(error, notes.taken()))
    threading.Event().wait()  # the last message may be on its way


def _failure(error: Exception, notes: Sequence[tuple[int, str]]) -> bytes:
    trace = traceback.format_exc()
    try:
        found = pickle.dumps(_Failure(error, trace, notes))
        pickle.loads(found)
    except Exception:  # an error that cannot be sent
        return pickle.dumps(
            _Failure(RuntimeError(f"a data worker raised {type(error).__name__}: {error}"), trace, notes)
        )
    return found


def _send_all(connection: Connection, ready: queue.Queue[bytes]) -> None:
    while True:
        try:
            connection.send_bytes(ready.get())
        except OSError:
            os._exit(0)


def _end_with(connection: Connection, _: queue.Queue[bytes]) -> None:
    """End when the other end of the connection is closed: nothing is ever sent from there after the task."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(0)
