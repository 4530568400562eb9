"""Law: an exchange of heads takes as many copies for eight ranks as for two, in any layout."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longshard.context.attention_inputs import AttentionInputs, AttentionSettings
from longshard.context.execution.kernels.base import BackwardInputs, Terms
from longshard.context.live import LivePlan
from longshard.context.planning.options import ContextParallelOptions
from tests.distributed.attention_cases import Case
from tests.thread_ranks import ThreadMesh, run_ranks

COPIES = ("copy_", "cat", "add_", "add", "index_put_", "index_select", "sum")


class Copies(TorchDispatchMode):
    """Counts operators that read and write a whole tensor and compute nothing but sums."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in COPIES:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def copies(rank: int, mesh: ThreadMesh, case: Case) -> tuple[Counter[str], Counter[str]]:
    """Copies of one attention of this rank, forward and backward."""
    layout = case.options.layout(case.seq_len, mesh.size())
    own = torch.from_numpy(layout.indices(rank))
    q, k, v, dout = (x[:, :, own].transpose(1, 2).contiguous().transpose(1, 2) for x in case.inputs())
    run = LivePlan(mesh, layout, options=case.options).execution(AttentionInputs(q, k, v), AttentionSettings(1.0), (0,))
    with Copies() as forward:
        out, lse = run.forward(q, k, v, terms=Terms(0.3))
    with Copies() as backward:
        run.backward(BackwardInputs(dout, q, k, v, out, lse), Terms(0.3))
    return forward.counts, backward.counts


def most_copies(degree: int, kv_heads: int, load_balancer: str) -> tuple[int, int]:
    """Return the most copies on a rank, forward and backward, without the group's copy of each arriving piece."""
    options = ContextParallelOptions("all_to_all", load_balancer, kernel="cpu_flash")
    case = Case(64, (8, kv_heads), options=options)
    counts = zip(*run_ranks(degree, copies, case), strict=True)
    return tuple(max(count.total() for count in each) - 2 * degree for each in counts)


@pytest.mark.parametrize(("load_balancer", "orders"), [("head_tail", 1), ("contiguous", 0)])
def test_copies_do_not_grow_with_the_ranks(load_balancer: str, orders: int) -> None:
    """Each tensor into rows on one side and out of rows on the other; orders: from rows of ranks to the sequence."""
    copies = {degree: most_copies(degree, 8, load_balancer) for degree in (2, 4, 8)}
    assert len(set(copies.values())) == 1, copies
    forward, backward = copies[8]
    assert forward == (3 + orders) + (2 + orders + 2)
    tile_copies = 3 * 2 + 2  # dq, dk, dv are added to totals, and dk and dv leave a common buffer
    assert backward <= (6 + orders) + (3 + orders + 3) + tile_copies


def test_copies_of_replicated_heads_are_added_up_once() -> None:
    """8 ranks and two key/value heads: K and V are repeated before they are sent, which is no copy counted here."""
    plain, replicated = (most_copies(8, kv_heads, "head_tail") for kv_heads in (8, 2))
    assert replicated[0] - plain[0] == 0
    assert replicated[1] - plain[1] == 2 + 2  # sums over copies; back to the dtype of K and V
