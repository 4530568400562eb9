"""Which rank computes which documents of a step, so that all ranks have equal work.

Documents do not see each other, and losses are sums over the whole step, divided by its number of labels. So each
document of a step may be computed by any data-parallel rank, in any micro-batch: losses and gradients stay the same.

Ranks wait for each other in every micro-batch, because FSDP gathers each layer. So a step lasts as long as the sum,
over its micro-batches, of the costliest rank's work. Eight documents of a step of 2 ranks and 2 micro-batches, by cost:

                as read                       assigned
    rank 0      6 3 | 2 2                     6   | 3 2 1
    rank 1      3 2 | 5 1                     5 2 | 3 2
    time        9   + 6    = 15               7   + 6      = 13
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from longshard.sharding.exchange import all_gather, all_reduce, all_to_all
from trainer.data.loader import TextBatch, tensors_of
from trainer.data.packing import IGNORE_INDEX, NO_POSITION, positions_of
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.console import logger

_TILE = 128  # rows of a kernel's tile, which it computes whole


def document_costs(
    flops_per_token: Callable[[int], tuple[float, float]], longest: int
) -> Callable[..., np.ndarray]:
    """Return a function from lengths of documents, (n,), to FLOPs of their forward and backward, (n,) float64.

    flops_per_token: of a model's arguments, (with full attention, with its own mask), for a sequence length. Attention
    is billed in whole tiles.
    """
    # the first one grows by a constant
    linear = 2 * flops_per_token(1)[0] - flops_per_token(2)[0]
    ends = np.arange(_TILE, longest + _TILE, _TILE)
    attention = np.array(
        [0.0, *(int(end) * (flops_per_token(int(end))[1] - linear) for end in ends)]
    )

    def costs(lengths: np.ndarray) -> np.ndarray:
        return lengths * linear + attention[-(-lengths // _TILE)]

    return costs


@dataclass(frozen=True)
class Assignment:
    """Where the documents of a step are computed.

    bins: (n,) micro-batch * ranks + rank of each document. Times of the step, in that of ranks which all have the same
    work: before, as it was read; after, as it is assigned; least, which no assignment of whole documents is below.
    """

    bins: np.ndarray
    before: float
    after: float
    least: float


def assign(
    lengths: np.ndarray,
    costs: np.ndarray,
    read: np.ndarray,
    *,
    micro_batches: int,
    ranks: int,
    most: int,
) -> Assignment:
    """Assign the documents of a step.

    lengths, costs, read: (n,) of each document its tokens, its cost, and the bin in which it was read; of two documents
    the longer one costs more. most: tokens of a bin. The result is never worse than `read`, and the same on all ranks.
    """
    shape = (micro_batches, ranks)
    order = np.argsort(-lengths, kind="stable")
    mean = costs.sum() / (micro_batches * ranks)
    targets = _targets(costs[order], *shape)
    if not mean:
        return Assignment(read, 1.0, 1.0, 1.0)
    before = _time(read, costs, shape)
    assigned = np.empty(len(lengths), dtype=np.int64)
    bins = _assigned(
        lengths[order].tolist(), costs[order].tolist(), np.repeat(targets, ranks).tolist(), most
    )
    assigned[order] = read[order] if bins is None else bins
    after = _time(assigned, costs, shape)
    return Assignment(
        assigned if after < before else read,
        before,
        min(before, after),
        float(targets.mean() / mean),
    )


def _time(bins: np.ndarray, costs: np.ndarray, shape: tuple[int, int]) -> float:
    """Return the mean over micro-batches of the largest cost of a rank, in the mean cost of all."""
    work = np.bincount(bins, costs, shape[0] * shape[1]).reshape(shape)
    return float(work.max(axis=1).mean() / work.mean())


def _assigned(
    lengths: list[int], costs: list[float], targets: list[float], most: int
) -> list[int] | None:
    """Give each document, the longest first, to the bin with room that lacks most of its target; None: there is none.

    lengths, costs: descending.
    """
    lacking = [(-target, i) for i, target in enumerate(targets)]  # a heap
    heapq.heapify(lacking)
    # a heap of (-room, -lack, bin): shorter documents may fit
    without_room: list[tuple[int, float, int]] = []
    room = [most] * len(targets)
    bins = []
    for length, cost in zip(lengths, costs, strict=True):
        while without_room and -without_room[0][0] >= length:
            heapq.heappush(lacking, heapq.heappop(without_room)[1:])
        while lacking and room[lacking[0][1]] < length:
            lack, full = heapq.heappop(lacking)
            heapq.heappush(without_room, (-room[full], lack, full))
        if not lacking:
            return None
        lack, chosen = lacking[0]
        heapq.heapreplace(lacking, (lack + cost, chosen))
        room[chosen] -= length
        bins.append(chosen)
    return bins


def _targets(descending: np.ndarray, micro_batches: int, ranks: int) -> np.ndarray:
    """Return the cost (micro_batches,) that the ranks of each micro-batch should have.

    All the same, but where the costliest documents, each on a rank of its own, take longer: of those that share a
    micro-batch the first one sets its time, and the other micro-batches have less.
    """
    firsts = np.zeros(micro_batches)
    heads = descending[: micro_batches * ranks : ranks]
    firsts[: len(heads)] = heads
    left = descending.sum() / ranks
    number = micro_batches
    for first in firsts:  # descending
        if first * number <= left:
            break
        left = left - first
        number = number - 1
    return np.maximum(firsts, left / number if number else 0.0)


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


@dataclass
class BalancedBatches:
    """Makes batches of those that a loader reads: the ranks of `group` exchange documents for equal work in each step.

    A micro-batch is one row (1, S) of whole documents and padding, with another S in each. It has the arrays of a
    packed batch, and of a mixture the source of each token. Parts of a document in two sequences are two documents, as
    they are when nothing is exchanged.

    group: the data-parallel ranks, for tensors in host memory; plan: as of `BatchLoader`. Making the first batch of a
    step is a collective.
    """

    step: Step
    group: dist.ProcessGroup
    plan: Callable[[Mapping[str, np.ndarray]], object] | None
    _reported: bool = False

    def __call__(self, batches: Iterator[TextBatch]) -> Iterator[dict[str, Any]]:
        while True:
            read = raise_on_all_ranks(
                lambda: [next(batches) for _ in range(self.step.micro_batches)], self.group
            )
            for documents in self._exchanged([documents_of_batch(batch) for batch in read]):
                arrays = row(documents, self.step)
                batch = tensors_of(arrays)
                batch["padding"] = arrays["tokens"].size - sum(map(len, documents))
                yield batch if self.plan is None else batch | {"plan": self.plan(arrays)}

    def _exchanged(self, read: Sequence[list[np.ndarray]]) -> Iterator[list[np.ndarray]]:
        """Yield the documents of each micro-batch of this rank. read: those that it has read, for each."""
        rank = self.group.rank()
        ranks = self.group.size()
        step = self.step
        own = [document for documents in read for document in documents]
        places = [i * ranks + rank for i, documents in enumerate(read) for _ in documents]
        lengths, places, owners = self._of_all(own, places)
        assigned = assign(
            lengths,
            step.costs(lengths),
            places,
            micro_batches=len(read),
            ranks=ranks,
            most=step.most,
        )
        self._report(assigned)
        to = assigned.bins % ranks
        mine = to[owners == rank]
        sent = [own[i] for i in np.argsort(mine, kind="stable")]
        width = 3 if step.has_sources else 2
        flat = torch.from_numpy(
            np.concatenate([np.empty((0, width), np.int32), *sent]).reshape(-1)
        )
        numbers = width * lengths
        send_sizes = np.bincount(mine, numbers[owners == rank], ranks).astype(int).tolist()
        receive_sizes = (
            np.bincount(owners[to == rank], numbers[to == rank], ranks).astype(int).tolist()
        )
        received, pending = all_to_all(
            flat, send_sizes, receive_sizes, self.group, kind="documents"
        )
        pending.wait()
        # the ranks' documents one after another, each rank's in its order
        ends = np.cumsum(lengths[to == rank])
        documents = (
            np.split(received.numpy().reshape(-1, width), ends[:-1]) if len(ends) else []
        )
        micro_batches = (assigned.bins // ranks)[to == rank]
        for i in range(len(read)):
            yield [documents[j] for j in np.flatnonzero(micro_batches == i)]

    def _of_all(
        self, own: list[np.ndarray], places: list[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (n,) lengths, places and owners of the documents of all ranks, rank by rank."""
        number = all_reduce(torch.tensor(len(own)), self.group, "max").item()
        table = torch.zeros(number, 2, dtype=torch.int64)  # a length of 0: no document
        table[: len(own)] = torch.tensor(
            [(len(x), place) for x, place in zip(own, places, strict=True)]
        ).view(-1, 2)
        gathered = all_gather(table, self.group).numpy()
        owners, _ = np.nonzero(gathered[..., 0])
        lengths, places_of_all = gathered[gathered[..., 0] > 0].T
        return lengths, places_of_all, owners

    def _report(self, assigned: Assignment) -> None:
        if self._reported:
            return
        self._reported = True
        bound = (
            f" (its longest documents alone take {assigned.least:.2f})"
            if assigned.least > 1.05
            else ""
        )
        logger.info(
            f"training.balance: the first step takes {assigned.after:.2f} times as long as with equal work on all ranks"
            f"{bound}, and {assigned.before:.2f} as it was read"
        )


def documents_of_batch(batch: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
    """Return each document of a batch, (n, 2) int32: tokens and labels; (n, 3) with its source.

    Padding is no document. A document without a label is one: routers and QK-clip look at its tokens.
    """
    found = []
    columns = [batch["tokens"], batch["labels"]]
    if "sources" in batch:
        columns.append(batch["sources"][:, None].expand_as(batch["tokens"]))
    sequences = torch.stack(columns, -1).to(torch.int32).numpy()
    is_token = batch["positions"].numpy() != NO_POSITION
    for numbers, sequence, real in zip(
        batch["document_ids"].numpy(), sequences, is_token, strict=True
    ):
        starts = np.flatnonzero(np.diff(numbers)) + 1
        documents = zip(np.split(sequence, starts), np.split(real, starts), strict=True)
        found += [document for document, in_document in documents if in_document.any()]
    return found


def row(documents: Sequence[np.ndarray], step: Step) -> dict[str, np.ndarray]:
    """Return the arrays (1, S) int64 of a micro-batch of documents; the padding is a document without labels."""
    lengths = [len(document) for document in documents]
    padding = step.padded(sum(lengths)) - sum(lengths)
    names = ("tokens", "labels", "sources")[: 3 if step.has_sources else 2]
    filler = np.tile(
        np.array([(0, IGNORE_INDEX, 0)[: len(names)]], dtype=np.int64), (padding, 1)
    )
    columns = np.concatenate([*documents, filler]).astype(np.int64)
    lengths.append(padding)
    arrays = {
        **{name: columns[:, i] for i, name in enumerate(names)},
        "positions": positions_of(lengths, padding=padding),
        "document_ids": np.repeat(np.arange(len(lengths)), lengths),
    }
    return {name: array.copy()[None] for name, array in arrays.items()}
