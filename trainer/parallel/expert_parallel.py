"""Expert parallelism: the ranks of `ep` divide the experts of a layer, and tokens are sent to their experts.

    4 experts on 2 ranks, 2 for each token          rank 0 has experts 0 1       rank 1 has experts 2 3
    tokens of rank 0 choose (0 1) (0 3) (2 3)       keeps the first two          gets the last two
    tokens of rank 1 choose (2 0)                   gets it                      keeps it

A token is sent once to a rank, however many of its experts are there, with its weights and the numbers of its experts.
One weighted sum comes back. The backward sends gradients on the same ways, and adds a token's gradients at its owner.

The expert that all tokens share needs no exchange. It is computed while tokens are sent, and its backward runs while
their gradients come back:

    forward    start dispatch | shared expert | wait, experts, combine
    backward   start dispatch | shared expert | wait        after the backward of combine and experts

Autograd runs ready nodes from the last of the forward to the first, and so in this order.

Only the routing knows how many rows are sent. Each forward gathers a small table of counts over the ranks, and the host
reads it: once per layer and forward (again if the layer is recomputed). The backward uses the same counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from longshard.sharding.exchange import Pending, all_gather, all_to_all
from longshard.sharding.forward import replace_forward
from longshard.sharding.ranges import aligned
from longshard.sharding.tensors import added_rows, with_adjoint
from trainer.parallel.data_parallel import REDUCE_SCATTER, InnerUnits
from trainer.parallel.parallel_dims import ParallelDims
from trainer.parallel.tensor_parallel import shard_rows

Tensors = Sequence[Tensor]
Meanwhile = Callable[[], Tensor | None]
Sums = tuple[Tensor, Tensor | None]
"""Weighted sums of experts, and the result of `meanwhile`."""


class ExpertParallel(ParallelStyle):
    """Style that divides stacked experts over a 1-D mesh, whose size divides their number.

    The module's parameters have a row for each expert, and its forward is `(x, chosen, weights, meanwhile=...)`, see
    `dispatched_sums`. It has a `Routing` as `routing`, and for parameters of some of the experts
    `sums(parameters, x, chosen, weights, sizes=...)`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def forward(
            self: nn.Module, *tokens: Tensor, meanwhile: Meanwhile = lambda: None
        ) -> Sums:
            parameters = {
                name: w.to_local() for name, w in self.named_parameters(recurse=False)
            }
            experts = len(next(iter(parameters.values())))
            plan = self.routing.plan(tokens[1], experts, group)
            return dispatched_sums(*tokens, partial(self.sums, parameters), plan, meanwhile)

        replace_forward(module, "expert parallelism", MethodType(forward, module))
        return distribute_module(module, device_mesh, shard_rows)


def expert_units(
    experts: Mapping[nn.Module, nn.Module], dims: ParallelDims
) -> InnerUnits | None:
    """Return how FSDP shards experts, over all ranks that have tokens for them. None without expert parallelism.

    The `efsdp` ranks divide the experts of a rank. If the number of experts cannot be divided, they divide the rows of
    each expert. With expert parallelism the call makes a group for reduce-scatters: a collective of all ranks.

    Args:
        experts: Block -> its experts.
        dims: The meshes of the run.
    """
    ep = dims.degrees.ep
    if ep is None:
        return None
    ranks = dims.degrees.efsdp

    def placement(parameter: nn.Parameter) -> Shard:
        whole_experts = parameter.shape[0] // ep % ranks == 0
        return Shard(0 if whole_experts or parameter.shape[1] % ranks else 1)

    return InnerUnits(
        dims.expert_mesh, experts, placement, dims.own_group("efsdp", REDUCE_SCATTER)
    )


def dispatched_sums(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    sums: Callable[..., Tensor],
    plan: "DispatchPlan",
    meanwhile: Meanwhile = lambda: None,
) -> Sums:
    """Return the weighted sums of the experts of all ranks for this rank's tokens, (N, dim). A collective.

    A rank may have no token.

    Args:
        x: (N, dim).
        chosen: (N, k), int64.
        weights: (N, k).
        sums: (x, chosen, weights, *, sizes) -> the sums of this rank's experts. `chosen` numbers them from 0 to E - 1,
            and is E for an expert of another rank.
        plan: The plan of `chosen`, see `Routing`.
        meanwhile: Called once, on every rank, while tokens are sent.

    Returns:
        The sums, (N, dim), and the result of `meanwhile`.
    """
    flight = []
    arriving = _StartDispatch.apply(x, weights, chosen, plan, flight)
    other = meanwhile()
    rows, row_weights, numbers = _Arrived.apply(*arriving, plan, flight)
    return _combined(sums(rows, numbers, row_weights, sizes=plan.pairs), plan), other


@dataclass(frozen=True)
class DispatchPlan:
    """Which tokens of this rank are sent where, and what arrives. A rank counts as its own peer.

    Attributes:
        tokens: Number of tokens of this rank.
        places: Tokens in the order of the ranks that they are sent to, (T,).
        peers: The rank that each token of `places` is sent to, (T,).
    """

    tokens: int
    places: Tensor
    peers: Tensor
    sent: list[int]
    """Number of tokens that are sent to each rank."""
    received: list[int]
    pairs: list[int]
    """Number of tokens that have chosen each expert of this rank."""
    group: ProcessGroup


class Routing:
    """Reads on the host how many tokens have chosen which experts. A trace has a routing without values."""

    def plan(self, chosen: Tensor, experts: int, group: ProcessGroup) -> DispatchPlan:
        """Return the plan of one forward. A collective, and one reading by the host.

        Args:
            chosen: This rank's choices, (N, k), int64. Expert i of all experts is number i % E of rank i // E.
            experts: E, the number of experts of each rank.
            group: The ranks that divide the experts.
        """
        ranks = group.size()
        own = group.rank()
        tokens = len(chosen)
        goes = chosen.new_zeros(tokens, ranks)
        goes.scatter_(1, chosen.div(experts, rounding_mode="floor"), 1)
        counts = chosen.new_zeros(ranks * (1 + experts))
        counts[:ranks] = goes.sum(0)
        counts[ranks:].scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        table = all_gather(counts, group).tolist()
        sent = table[own][:ranks]
        received = [row[own] for row in table]
        first = ranks + own * experts
        pairs = [sum(row[i] for row in table) for i in range(first, first + experts)]
        order = goes.t().flatten().argsort(descending=True, stable=True)[: sum(sent)]
        peers = order.div(max(tokens, 1), rounding_mode="floor")
        places = order - peers * tokens
        return DispatchPlan(tokens, places, peers, sent, received, pairs, group)

    def pairs(self, owner: Tensor, experts: int) -> list[int]:
        """Return how many pairs each expert has; the host waits for it.

        Args:
            owner: The expert of each pair, (pairs,).
            experts: Number of experts.
        """
        return owner.bincount(minlength=experts).tolist()


ROUTING = Routing()


class _StartDispatch(torch.autograd.Function):
    """Tokens -> rows at the experts of this rank; `_Arrived` waits for them. A rank without tokens or rows joins too.

    flight: a list with the started exchange, of the forward or of the backward.
    """

    @staticmethod
    def forward(ctx, x, weights, chosen, plan, flight):
        experts = len(plan.pairs)
        numbers = chosen[plan.places] - plan.peers.unsqueeze(1) * experts
        numbers = numbers.masked_fill((numbers < 0) | (numbers >= experts), experts).to(
            torch.int32
        )
        ctx.plan = plan
        ctx.flight = flight
        parts = [x[plan.places], weights[plan.places], numbers]
        arriving, pending = _start_exchange(parts, plan, "expert_dispatch")
        flight.append(pending)
        ctx.mark_non_differentiable(arriving[2])
        ctx.set_materialize_grads(False)  # the backward does not read the incoming gradients
        return tuple(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx, *_sent):
        arrived, pending = ctx.flight.pop()
        pending.wait()
        gradients = (added_rows(part, ctx.plan.places, ctx.plan.tokens) for part in arrived)
        return *gradients, None, None, None


class _Arrived(torch.autograd.Function):
    """Rows that are being sent -> rows."""

    @staticmethod
    def forward(ctx, rows, weights, numbers, plan, flight):
        ctx.plan = plan
        ctx.flight = flight
        flight.pop().wait()
        numbers = numbers.long()
        ctx.mark_non_differentiable(numbers)
        return rows.contiguous(), weights.contiguous(), numbers

    @staticmethod
    @once_differentiable
    def backward(ctx, drows, dweights, _dnumbers):
        kind = "expert_dispatch_backward"
        ctx.flight.append(_start_exchange([drows, dweights], ctx.plan, kind, back=True))
        # for autograd alone; the exchange sends the tokens' gradients
        return drows, dweights, None, None, None


def _combined(sums: Tensor, plan: DispatchPlan) -> Tensor:
    """Send the sums of all ranks' experts back to the owners of the tokens: a collective.

    Returns (N, dim): for each token of this rank, the total of the sums that the ranks of its experts computed.
    """

    def combine(sums: Tensor) -> Tensor:
        (arrived,), pending = _start_exchange([sums], plan, "expert_combine", back=True)
        pending.wait()
        return added_rows(arrived, plan.places, plan.tokens)

    def dispatch(dout: Tensor) -> Tensor:
        kind = "expert_combine_backward"
        (drows,), pending = _start_exchange([dout[plan.places]], plan, kind)
        pending.wait()
        return drows.contiguous()

    return with_adjoint(sums, combine, dispatch)


def _start_exchange(
    tensors: Tensors, plan: DispatchPlan, kind: str, *, back: bool = False
) -> tuple[list[Tensor], Pending]:
    """Start sending rows of several tensors, (T, C) each, side by side, as bytes. A collective.

    Returns views of the arriving rows, valid after the wait, and a handle. kind: the name under which calls and bytes
    are counted. back: from the experts to the ranks of the tokens.
    """
    places = []
    width = 0
    for x in tensors:
        size = x.shape[1] * x.itemsize
        places.append(slice(width, width + size))
        width += aligned(size)
    message = tensors[0].new_empty(len(tensors[0]), width, dtype=torch.uint8)
    for x, place in zip(tensors, places, strict=True):
        message[:, place].view(x.dtype).copy_(x)
    counts = (plan.received, plan.sent) if back else (plan.sent, plan.received)
    sizes = ([rows * width for rows in rank_rows] for rank_rows in counts)
    arrived, pending = all_to_all(message.view(-1), *sizes, plan.group, kind=kind)
    rows = arrived.view(-1, width)
    return [
        rows[:, place].view(x.dtype) for x, place in zip(tensors, places, strict=True)
    ], pending
