"""Batches whose documents have been assigned over data-parallel ranks and micro-batches, see `balance.py`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainer.data.balance import Assignment, assign
from trainer.data.loader import Loader, tensors_of
from trainer.data.packing.sequence import IGNORE_INDEX, positions_of
from trainer.distributed.sharding.exchange import all_gather, all_reduce, all_to_all
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.console import logger


@dataclass(frozen=True)
class Step:
    """The sizes of an optimizer step.

    micro_batches: of each rank; multiple_of, least, most: of the tokens of a micro-batch; costs: lengths of documents
    (n,) -> their costs (n,); has_sources: batches are of a mixture.
    """

    micro_batches: int
    multiple_of: int
    least: int
    most: int
    costs: Callable[[np.ndarray], np.ndarray]
    has_sources: bool = False

    def padded(self, tokens: int) -> int:
        """Return the length of a row with so many tokens of documents."""
        return -(-max(tokens, self.least) // self.multiple_of) * self.multiple_of


class BalancedBatches:
    """The batches of a loader, whose documents are exchanged by the ranks of `group` for equal work in each step.

    A micro-batch is one row (1, S) of whole documents and padding, with another S in each. It has the arrays of a
    packed batch, and of a mixture the source of each token. Parts of a document in two sequences are two documents, as
    they are when nothing is exchanged. Those without a label are left out.

    group: the data-parallel ranks, for tensors in host memory; plan: as of `BatchLoader`. Making the first batch of a
    step is a collective.
    """

    def __init__(
        self,
        loader: Loader,
        step: Step,
        group: dist.ProcessGroup,
        plan: Callable[[Mapping[str, np.ndarray]], object] | None,
    ) -> None:
        self._loader, self._step, self._group, self._plan = loader, step, group, plan
        self._reported = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self._loader)
        while True:
            read = raise_on_all_ranks(lambda: [next(batches) for _ in range(self._step.micro_batches)], self._group)
            for documents in self._exchanged([documents_of_batch(batch) for batch in read]):
                arrays = row(documents, self._step)
                batch = tensors_of(arrays)
                batch["padding"] = arrays["tokens"].size - sum(map(len, documents))
                yield batch if self._plan is None else batch | {"plan": self._plan(arrays)}

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._loader.epoch

    def state_dict(self) -> dict[int, dict[str, int]]:
        """Return the position of each data stream of this rank, between two steps."""
        return self._loader.state_dict()

    def load_state_dict(self, states: Mapping[int, Mapping[str, int]]) -> None:
        """Resume from the merged states of all ranks."""
        self._loader.load_state_dict(states)

    def _exchanged(self, read: Sequence[list[np.ndarray]]) -> Iterator[list[np.ndarray]]:
        """Yield the documents of each micro-batch of this rank. read: those that it has read, for each."""
        rank, ranks, step = self._group.rank(), self._group.size(), self._step
        own = [document for documents in read for document in documents]
        places = [i * ranks + rank for i, documents in enumerate(read) for _ in documents]
        lengths, places, owners = self._of_all(own, places)
        assigned = assign(lengths, step.costs(lengths), places, micro_batches=len(read), ranks=ranks, most=step.most)
        self._report(assigned)
        to = assigned.bins % ranks
        mine = to[owners == rank]
        sent = [own[i] for i in np.argsort(mine, kind="stable")]
        width = 3 if step.has_sources else 2
        flat = torch.from_numpy(np.concatenate([np.empty((0, width), np.int32), *sent]).reshape(-1))
        numbers = width * lengths
        send_sizes = np.bincount(mine, numbers[owners == rank], ranks).astype(int).tolist()
        receive_sizes = np.bincount(owners[to == rank], numbers[to == rank], ranks).astype(int).tolist()
        received, pending = all_to_all(flat, send_sizes, receive_sizes, self._group, kind="documents")
        pending.wait()
        ends = np.cumsum(lengths[to == rank])  # the ranks' documents one after another, each rank's in its order
        documents = np.split(received.numpy().reshape(-1, width), ends[:-1]) if len(ends) else []
        micro_batches = (assigned.bins // ranks)[to == rank]
        for i in range(len(read)):
            yield [documents[j] for j in np.flatnonzero(micro_batches == i)]

    def _of_all(self, own: list[np.ndarray], places: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (n,) lengths, places and owners of the documents of all ranks, rank by rank."""
        number = all_reduce(torch.tensor(len(own)), self._group, "max").item()
        table = torch.zeros(number, 2, dtype=torch.int64)  # a length of 0: no document
        table[: len(own)] = torch.tensor([(len(x), place) for x, place in zip(own, places, strict=True)]).view(-1, 2)
        gathered = all_gather(table, self._group).numpy()
        owners, _ = np.nonzero(gathered[..., 0])
        lengths, places_of_all = gathered[gathered[..., 0] > 0].T
        return lengths, places_of_all, owners

    def _report(self, assigned: Assignment) -> None:
        if self._reported:
            return
        self._reported = True
        bound = f" (its longest documents alone take {assigned.least:.2f})" if assigned.least > 1.05 else ""
        logger.info(
            f"training.balance: the first step takes {assigned.after:.2f} times as long as with equal work on all ranks"
            f"{bound}, and {assigned.before:.2f} as it was read"
        )


def documents_of_batch(batch: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
    """Return each document of a batch that has a label, (n, 2) int32: tokens and labels; (n, 3) with its source."""
    found, columns = [], [batch["tokens"], batch["labels"]]
    if "sources" in batch:
        columns.append(batch["sources"][:, None].expand_as(batch["tokens"]))
    sequences = torch.stack(columns, -1).to(torch.int32).numpy()
    for numbers, sequence in zip(batch["document_ids"].numpy(), sequences, strict=True):
        documents = np.split(sequence, np.flatnonzero(np.diff(numbers)) + 1)
        found += [document for document in documents if (document[:, 1] != IGNORE_INDEX).any()]
    return found


def row(documents: Sequence[np.ndarray], step: Step) -> dict[str, np.ndarray]:
    """Return the arrays (1, S) int64 of a micro-batch of documents; the padding is a document without labels."""
    lengths = [len(document) for document in documents]
    padding = step.padded(sum(lengths)) - sum(lengths)
    names = ("tokens", "labels", "sources")[: 3 if step.has_sources else 2]
    filler = np.tile(np.array([(0, IGNORE_INDEX, 0)[: len(names)]], dtype=np.int64), (padding, 1))
    columns = np.concatenate([*documents, filler]).astype(np.int64)
    lengths.append(padding)
    arrays = {
        **{name: columns[:, i] for i, name in enumerate(names)},
        "positions": positions_of(lengths, padding=padding),
        "document_ids": np.repeat(np.arange(len(lengths)), lengths),
    }
    return {name: array.copy()[None] for name, array in arrays.items()}
