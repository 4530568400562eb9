"""Law: the shared expert is computed while tokens are sent, and its backward while their gradients come back.

The order of calls is compared, not time.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from longshard.sharding.exchange import Pending
from tests.distributed.harness import assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_experts import COMPILED, ac, ep
from tests.distributed.test_parity import degrees, reference
from tests.slow import slow
from trainer.models.moe import MoE
from trainer.parallel import expert_parallel

SHARED = ["--model.name=qwen2_moe", "--training.dtype=float64"]
FORWARD = ["start dispatch", "shared", "wait dispatch"]
COMBINE = ["start combine", "wait combine"]
BACKWARD = ["start combine_backward", "wait combine_backward", "start dispatch_backward", "shared backward"]
BACKWARD += ["wait dispatch_backward"]


class Noted(torch.autograd.Function):
    """x -> x; its backward calls `note`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.note()
        return gradient, None


def order_case(arguments: list[str], waits_at_once: bool) -> list[str]:
    """Return the events of one step with one micro-batch, in order."""
    events: list[str] = []
    real, shared = expert_parallel.all_to_all, MoE.shared_output

    def noted(*args: Any, kind: str) -> tuple[torch.Tensor, Pending]:
        kind = kind.removeprefix("expert_")
        events.append(f"start {kind}")
        received, pending = real(*args, kind=kind)
        if waits_at_once:
            pending.wait()
            events.append(f"wait {kind}")
            return received, Pending()
        return received, Pending(arrived=lambda: (pending.wait(), events.append(f"wait {kind}")))

    def noted_shared(self: MoE, x: torch.Tensor) -> torch.Tensor:
        events.append("shared")
        return shared(self, Noted.apply(x, lambda: events.append("shared backward")))

    with (
        mock.patch.object(expert_parallel, "all_to_all", noted),
        mock.patch.object(MoE, "shared_output", noted_shared),
        trainer_of([*arguments, "--training.global_batch_size=4"]) as trainer,
    ):
        trainer.train_step(1)
        layers = sum(isinstance(block.feed_forward, MoE) for block in trainer.model_parts[0].layers.values())
    assert layers == 2
    return events


@pytest.mark.parametrize(("mode", "again"), [("none", []), ("full", FORWARD)])
def test_the_shared_expert_runs_while_tokens_and_gradients_are_sent(
    pool: WorkerPool, mode: str, again: list[str]
) -> None:
    """A layer is recomputed up to the experts: nothing of the combine is kept."""
    for events in pool.run(2, order_case, [*SHARED, *degrees(dp_shard=2), ep(2), ac(mode)], False):
        assert events == 2 * (FORWARD + COMBINE) + 2 * (BACKWARD[:2] + again + BACKWARD[2:])


def test_an_exchange_that_is_waited_for_at_once_is_seen(pool: WorkerPool) -> None:
    for events in pool.run(2, order_case, [*SHARED, *degrees(dp_shard=2), ep(2)], True):
        assert events[:3] == ["start dispatch", "wait dispatch", "shared"]
        assert events[-3:] == ["start dispatch_backward", "wait dispatch_backward", "shared backward"]


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (4, [*degrees(dp_shard=2, cp=2), ep(2), ac("full")]),
        *slow((2, [*degrees(tp=2), ep(2), *COMPILED, ac("selective")])),
    ],
)
def test_overlapped_layouts_equal_one_process(pool: WorkerPool, ranks: int, arguments: list[str]) -> None:
    assert_parity(pool.run(ranks, run_layout, [*SHARED, *arguments])[0], reference(pool, *SHARED), 1e-10)
