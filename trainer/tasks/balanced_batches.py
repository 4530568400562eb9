"""Assigns the documents of a step to ranks, so that all ranks have equal work.

Documents do not see each other, and losses are sums over the whole step, divided by its number of labels. So any
data-parallel rank may compute a document, in any micro-batch: losses and gradients stay the same.

Ranks wait for each other in every micro-batch, because FSDP gathers each layer. So the time of a step is the sum, over
its micro-batches, of the costliest rank's work. Eight documents of a step of 2 ranks and 2 micro-batches, by cost:

                as read                       assigned
    rank 0      6 3 | 2 2                     6   | 3 2 1
    rank 1      3 2 | 5 1                     5 2 | 3 2
    time        9   + 6    = 15               7   + 6      = 13
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed import ProcessGroup

from longshard.sharding.exchange import all_gather, all_reduce, all_to_all
from trainer.data.loader import Batch, Planner, TextBatch, planned_batch
from trainer.data.packing import IGNORE_INDEX, NO_POSITION, positions_of
from trainer.runtime.agreement import raise_on_all_ranks
from trainer.runtime.console import logger

_TILE = 128  # rows of a kernel's tile; a kernel computes whole tiles


def document_costs(
    flops_per_token: Callable[[int], tuple[float, float]], longest: int
) -> Callable[..., np.ndarray]:
    """Return a function from lengths of documents, (n,), to the FLOPs of their forward and backward, (n,), float64.

    Args:
        flops_per_token: From a sequence length to the model's FLOPs per token: (with full attention, with its own
            mask).
        longest: Longest document that the function takes, in tokens.

    Returns:
        The function. Attention is counted in whole tiles.
    """
    # With full attention the FLOPs of a token grow by a constant for each token of the sequence.
    linear = 2 * flops_per_token(1)[0] - flops_per_token(2)[0]
    ends = range(_TILE, longest + _TILE, _TILE)
    attention = np.array([0.0, *(end * (flops_per_token(end)[1] - linear) for end in ends)])

    def costs(lengths: np.ndarray) -> np.ndarray:
        return lengths * linear + attention[-(-lengths // _TILE)]

    return costs


@dataclass(frozen=True)
class Assignment:
    """Where the documents of a step are computed.

    The unit of the times is the time of a step whose work is equal on all ranks.

    Attributes:
        bins: For each document micro-batch * ranks + rank, (n,).
        before: Time of the step as it was read.
        after: Time of the step as it is assigned.
        least: Lower bound for every assignment of whole documents.
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
    """Assign the documents of a step. All ranks get the same result, and it is never slower than `read`.

    Args:
        lengths: Tokens of each document, (n,).
        costs: Cost of each document, (n,). Of two documents the longer one costs more.
        read: The bin in which each document was read, (n,).
        micro_batches: Micro-batches of each rank.
        ranks: Number of data-parallel ranks.
        most: Largest number of tokens of a bin.

    Returns:
        The bins and the times before and after.
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
    """Return the mean over micro-batches of the largest cost of a rank, relative to the mean cost of all ranks."""
    work = np.bincount(bins, costs, shape[0] * shape[1]).reshape(shape)
    return float(work.max(axis=1).mean() / work.mean())


def _assigned(
    lengths: list[int], costs: list[float], targets: list[float], most: int
) -> list[int] | None:
    """Return the bin of each document, in the order of `lengths`; None if a document fits in no bin.

    Each document goes to the bin with room that is farthest below its target. lengths, costs: for each document,
    descending. targets: the cost that each bin should have. most: largest number of tokens of a bin.
    """
    # a heap of (-lack, bin)
    lacking = [(-target, i) for i, target in enumerate(targets)]
    heapq.heapify(lacking)
    # a heap of (-room, -lack, bin): bins that may have room for shorter documents
    without_room = []
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
    """Return the target cost of the ranks of each micro-batch, (micro_batches,).

    Micro-batch i begins with document i * ranks. If this document alone costs more than an equal share, its cost is the
    target of the micro-batch. The other micro-batches divide the remaining cost equally.

    Args:
        descending: The costs of all documents, the highest first.
        micro_batches: Number of micro-batches.
        ranks: Number of ranks.
    """
    firsts = np.zeros(micro_batches)
    heads = descending[: micro_batches * ranks : ranks]
    firsts[: len(heads)] = heads
    left = descending.sum() / ranks
    number = micro_batches
    for first in firsts:  # descending
        if first * number <= left:
            break
        left -= first
        number -= 1
    return np.maximum(firsts, left / number if number else 0.0)


@dataclass(frozen=True)
class Step:
    """The sizes of an optimizer step.

    Attributes:
        micro_batches: Micro-batches of each rank.
        multiple_of: The number of tokens of a micro-batch is a multiple of this.
        least: Smallest number of tokens of a micro-batch.
        most: Largest number of tokens of a micro-batch.
        costs: From lengths of documents, (n,), to their costs, (n,).
        has_sources: Whether the batches come from a mixture.
    """

    micro_batches: int
    multiple_of: int
    least: int
    most: int
    costs: Callable[[np.ndarray], np.ndarray]
    has_sources: bool = False

    def padded(self, tokens: int) -> int:
        """Return the padded length of a row.

        Args:
            tokens: Tokens of the documents in the row.
        """
        return -(-max(tokens, self.least) // self.multiple_of) * self.multiple_of


@dataclass
class BalancedBatches:
    """Makes balanced batches: in each step the ranks of `group` exchange the documents that their loaders read.

    A micro-batch is one row, (1, S), of whole documents and padding; S differs between micro-batches. It has the arrays
    of a packed batch, and with a mixture also the source of each token. If two sequences share a document, its two
    parts are two documents, as without an exchange.

    To make the first batch of a step is a collective.

    Attributes:
        step: The sizes of a step.
        group: The data-parallel ranks, for tensors in host memory.
        plan: As in `BatchLoader`. None without packed documents.
    """

    step: Step
    group: ProcessGroup
    plan: Planner | None
    _reported: bool = False

    def __call__(self, batches: Iterator[TextBatch]) -> Iterator[Batch]:
        """Yield the balanced micro-batches of this rank, without end. A collective for each step.

        Args:
            batches: The batches of this rank as they are read: `step.micro_batches` for each step.
        """
        while True:
            read = raise_on_all_ranks(
                lambda: [next(batches) for _ in range(self.step.micro_batches)], self.group
            )
            for documents in self._exchanged([documents_of_batch(batch) for batch in read]):
                arrays = row(documents, self.step)
                batch = planned_batch(arrays, self.plan)
                batch["padding"] = arrays["tokens"].size - sum(map(len, documents))
                yield batch

    def _exchanged(self, read: Sequence[list[np.ndarray]]) -> Iterator[list[np.ndarray]]:
        """Exchange the documents of a step, and yield the documents of each micro-batch of this rank. A collective.

        read: for each micro-batch, the documents that this rank read.
        """
        rank = self.group.rank()
        ranks = self.group.size()
        step = self.step
        own = [document for documents in read for document in documents]
        places = [i * ranks + rank for i, documents in enumerate(read) for _ in documents]
        lengths, places, owners = self._all_documents(own, places)
        assigned = assign(
            lengths,
            step.costs(lengths),
            places,
            micro_batches=len(read),
            ranks=ranks,
            most=step.most,
        )
        self._report(assigned)
        target_ranks = assigned.bins % ranks
        destinations = target_ranks[owners == rank]
        sent = [own[i] for i in np.argsort(destinations, kind="stable")]
        width = 3 if step.has_sources else 2
        flat = torch.from_numpy(
            np.concatenate([np.empty((0, width), np.int32), *sent]).reshape(-1)
        )
        numbers = width * lengths
        send_sizes, receive_sizes = (
            np.bincount(peers[here], numbers[here], ranks).astype(int).tolist()
            for peers, here in ((target_ranks, owners == rank), (owners, target_ranks == rank))
        )
        received, pending = all_to_all(
            flat, send_sizes, receive_sizes, self.group, kind="documents"
        )
        pending.wait()
        # the received documents: in the order of ranks, then in the order in which the rank read them
        ends = np.cumsum(lengths[target_ranks == rank])[:-1]
        documents = np.split(received.numpy().reshape(-1, width), ends)
        micro_batches = (assigned.bins // ranks)[target_ranks == rank]
        for i in range(len(read)):
            yield [documents[j] for j in np.flatnonzero(micro_batches == i)]

    def _all_documents(
        self, own: list[np.ndarray], places: list[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return lengths, places and owners of the documents of all ranks, (n,) each, in the order of ranks.

        A place is the bin in which a document was read. An owner is the rank that read the document. A collective.
        """
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
    """Return each document of a batch, (n, 2), int32: tokens and labels; with sources (n, 3).

    Padding is no document. A document without labels is one, because routers and QK-clip use its tokens.

    Args:
        batch: A text batch on the host.
    """
    batch_documents = []
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
        batch_documents += [
            document for document, in_document in documents if in_document.any()
        ]
    return batch_documents


def row(documents: Sequence[np.ndarray], step: Step) -> dict[str, np.ndarray]:
    """Pack documents into the arrays of one micro-batch, (1, S), int64 each.

    Padding follows the documents. It has the label IGNORE_INDEX, the position NO_POSITION, and its own document id.

    Args:
        documents: Tokens and labels of each document, (n, 2), or with sources (n, 3).
        step: The sizes of a step.

    Returns:
        tokens, labels, sources (in a mixture), positions and document ids, by name.
    """
    lengths = [len(document) for document in documents]
    padding = step.padded(sum(lengths)) - sum(lengths)
    names = ("tokens", "labels", "sources")[: 3 if step.has_sources else 2]
    filler = np.tile((0, IGNORE_INDEX, 0)[: len(names)], (padding, 1))
    columns = np.concatenate([*documents, filler])
    lengths.append(padding)
    arrays = {
        **{name: columns[:, i] for i, name in enumerate(names)},
        "positions": positions_of(lengths, padding=padding),
        "document_ids": np.repeat(np.arange(len(lengths)), lengths),
    }
    return {name: array.copy()[None] for name, array in arrays.items()}
