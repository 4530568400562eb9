"""Which rank computes which documents of a step, so that all ranks have equal work. Torch-free.

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
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_TILE = 128  # rows of a kernel's tile, which it computes whole


def document_costs(flops_per_token: Callable[[int], tuple[float, float]], longest: int) -> Callable[..., np.ndarray]:
    """Return a function from lengths of documents, (n,), to FLOPs of their forward and backward, (n,) float64.

    flops_per_token: of a model's arguments, (with full attention, with its own mask), for a sequence length. Attention
    is billed in whole tiles.
    """
    linear = 2 * flops_per_token(1)[0] - flops_per_token(2)[0]  # the first one grows by a constant
    ends = np.arange(_TILE, longest + _TILE, _TILE)
    attention = np.array([0.0, *(int(end) * (flops_per_token(int(end))[1] - linear) for end in ends)])

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
    lengths: np.ndarray, costs: np.ndarray, read: np.ndarray, *, micro_batches: int, ranks: int, most: int
) -> Assignment:
    """Assign the documents of a step.

    lengths, costs, read: (n,) of each document its tokens, its cost, and the bin in which it was read; of two documents
    the longer one costs more. most: tokens of a bin. The result is never worse than `read`, and the same on all ranks.
    """
    shape, order = (micro_batches, ranks), np.argsort(-lengths, kind="stable")
    mean, targets = costs.sum() / (micro_batches * ranks), _targets(costs[order], *shape)
    if not mean:
        return Assignment(read, 1.0, 1.0, 1.0)
    before, assigned = _time(read, costs, shape), np.empty(len(lengths), dtype=np.int64)
    bins = _assigned(lengths[order].tolist(), costs[order].tolist(), np.repeat(targets, ranks).tolist(), most)
    assigned[order] = read[order] if bins is None else bins
    after = _time(assigned, costs, shape)
    return Assignment(assigned if after < before else read, before, min(before, after), float(targets.mean() / mean))


def _time(bins: np.ndarray, costs: np.ndarray, shape: tuple[int, int]) -> float:
    """Return the mean over micro-batches of the largest cost of a rank, in the mean cost of all."""
    work = np.bincount(bins, costs, shape[0] * shape[1]).reshape(shape)
    return float(work.max(axis=1).mean() / work.mean())


def _assigned(lengths: list[int], costs: list[float], targets: list[float], most: int) -> list[int] | None:
    """Give each document, the longest first, to the bin with room that lacks most of its target; None: there is none.

    lengths, costs: descending.
    """
    lacking = [(-target, i) for i, target in enumerate(targets)]  # a heap
    heapq.heapify(lacking)
    without_room: list[tuple[int, float, int]] = []  # a heap of (-room, -lack, bin): shorter documents may fit
    room, bins = [most] * len(targets), []
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
    left, number = descending.sum() / ranks, micro_batches
    for first in firsts:  # descending
        if first * number <= left:
            break
        left, number = left - first, number - 1
    return np.maximum(firsts, left / number if number else 0.0)
