"""Laws of expert parallelism, on ranks that are threads: sums and gradients of one process, for any routing."""

from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch

from longshard.sharding import exchange
from tests.thread_ranks import ThreadMesh, run_ranks
from trainer.families.feed_forward_args import ExpertArgs
from trainer.job.experts import dispatch_bytes, ranks_of_a_token
from trainer.models.experts import CLAMPED, ExpertWeights, expert_sums
from trainer.parallel import expert_parallel
from trainer.parallel.expert_parallel import ROUTING, dispatched_sums

DIM, HIDDEN, EXPERTS, RANKS, ADAPTERS, SCALE = 6, 8, 8, 4, 3, 0.5
# Tokens of each rank, and the choices of all of them.
ROUTINGS = {
    "any": ((5, 3, 6, 4), 0),
    "a rank without tokens": ((5, 0, 6, 1), 0),
    "no token at all": ((0, 0, 0, 0), 0),
    "all on the experts of one rank": ((5, 3, 6, 4), 1),
    "all on one expert": ((5, 3, 6, 4), 2),
}


def problem(routing: str) -> tuple[list[torch.Tensor], ExpertWeights, torch.Tensor]:
    """x, choices, weights and cotangents of all tokens; all experts with their adapters; the tokens of each rank."""
    counts, kind = ROUTINGS[routing]
    generator = torch.Generator().manual_seed(4)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    tokens = sum(counts)
    x, scores, cotangent = draw(tokens, DIM), draw(tokens, EXPERTS), draw(tokens, DIM)
    if kind:
        scores[:, 4 : 4 + (2 if kind == 1 else 1)] += 100
    weights, chosen = scores.softmax(1).topk(1 if kind == 2 else 2)
    shapes = [(2 * HIDDEN, DIM), (DIM, HIDDEN), (2 * HIDDEN,), (DIM,)]
    shapes += [(ADAPTERS, DIM), (2 * HIDDEN, ADAPTERS), (ADAPTERS, HIDDEN), (DIM, ADAPTERS)]
    experts = ExpertWeights(*(draw(EXPERTS, *shape) for shape in shapes))
    return [x, chosen, weights, cotangent], experts, torch.tensor(counts)


def gradients(run, x: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights, cotangent: torch.Tensor):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weights, *experts)]
    out = run(leaves[0], leaves[1], ExpertWeights(*leaves[2:]))
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def rank_gradients(rank: int, mesh: ThreadMesh, routing: str) -> list[torch.Tensor]:
    tokens, experts, counts = problem(routing)
    x, chosen, weights, cotangent = (tensor.split(counts.tolist())[rank] for tensor in tokens)
    own_experts = ExpertWeights(*(w.chunk(mesh.size())[rank] for w in experts))

    def run(x: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights) -> torch.Tensor:
        def sums(*args, **sizes) -> torch.Tensor:
            return expert_sums(*args, experts, activation=CLAMPED, scale=SCALE, **sizes)

        plan = ROUTING.plan(chosen, len(experts.w13), mesh.get_group())
        return dispatched_sums(x, chosen, weights, sums, plan)[0]

    return gradients(run, x, weights, own_experts, cotangent)


def errors(routing: str, ranks: int = RANKS) -> list[float]:
    """Return relative errors of the outputs, and of the gradients of tokens, weights and experts."""
    (x, chosen, weights, cotangent), experts, _ = problem(routing)
    wanted = gradients(
        lambda x, w, e: expert_sums(x, chosen, w, e, activation=CLAMPED, scale=SCALE), x, weights, experts, cotangent
    )
    got = [torch.cat(parts) for parts in zip(*run_ranks(ranks, rank_gradients, routing), strict=True)]
    assert [a.shape for a in got] == [b.shape for b in wanted]
    return [((a - b).norm() / b.norm().clamp(min=1e-300)).item() for a, b in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_any_routing_gives_sums_and_gradients_of_one_process(routing: str) -> None:
    assert max(errors(routing)) < 1e-14


def test_a_dropped_token_is_seen() -> None:
    real = expert_parallel.added_rows

    def dropping(rows: torch.Tensor, places: torch.Tensor, number: int) -> torch.Tensor:
        return real(rows * (torch.arange(len(rows)) > 0).unsqueeze(1), places, number)

    with mock.patch.object(expert_parallel, "added_rows", dropping):
        assert min(errors("any")[:2]) > 1e-2


@pytest.mark.parametrize("routing", ["any", "all on the experts of one rank"])
def test_a_token_is_sent_once_to_a_rank(routing: str) -> None:
    """The bytes sent equal the formula; a token with two experts on a rank is one row."""
    (_, chosen, _, _), _, counts = problem(routing)
    before = exchange.bytes_sent.copy()
    run_ranks(RANKS, rank_gradients, routing)
    owner = torch.arange(RANKS).repeat_interleave(counts).tolist()
    peers = (chosen // (EXPERTS // RANKS)).tolist()
    out = sum(len({*row} - {rank}) for row, rank in zip(peers, owner, strict=True))
    shape = {"dim": DIM, "itemsize": 8, "per_token": chosen.shape[1], "weight_itemsize": 8}
    assert dict(exchange.bytes_sent - Counter(before)) == dispatch_bytes(out, out, **shape)


def test_the_mean_number_of_ranks_of_a_token() -> None:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(4000, 16, generator=generator).topk(3).indices
    peers = torch.zeros(4000, 4, dtype=torch.int64).scatter_(1, chosen // 4, 1)
    assert ranks_of_a_token(ExpertArgs(16, 3, 1), 4) == pytest.approx(peers[:, 1:].sum().item() / 4000, rel=0.02)
