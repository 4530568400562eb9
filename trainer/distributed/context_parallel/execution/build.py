"""The execution of a plan, bound to a kernel and to communicators of K/V and of dK/dV.

A communicator of NCCL is a queue, which runs one operation after another.
"""

from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from trainer.distributed.context_parallel.execution.kernels.base import Kernel
from trainer.distributed.context_parallel.execution.ring import StagedExecution
from trainer.distributed.context_parallel.execution.ulysses import HeadExchange
from trainer.distributed.context_parallel.planning.lowering import lower
from trainer.distributed.context_parallel.planning.plan import RankPlan

# Both have `forward(q, k, v, scale)` and `backward(BackwardInputs, scale)`, which are collectives.
Execution = StagedExecution | HeadExchange

# Communicators outlive the contexts that use them; an entry is deleted with its group.
_gradient_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_started_groups: WeakSet[dist.ProcessGroup] = WeakSet()


def build_execution(
    plan: RankPlan,
    kernel: Kernel,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    device_type: str,
    heads_per_pass: int,
) -> Execution:
    """Bind a plan to a kernel and to communicators; this is cheap, because lowered calls are cached.

    groups: the group over which K/V travel in stages, and the group that exchanges heads; the same on a 1-D mesh.
    """
    stage_group, head_group = (_started(group, device_type) for group in groups)
    staged = plan if plan.inner is None else plan.inner
    gradients = _gradient_group(stage_group, device_type) if staged.degree > 1 else stage_group
    passes = heads_per_pass if plan.inner is None else 0
    run = StagedExecution(lower(staged, kernel.capabilities), kernel, stage_group, gradients, passes)
    return run if plan.inner is None else HeadExchange(plan, head_group, run, heads_per_pass)


def _started(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return the group after a first collective of all ranks: NCCL's must not start with messages of some ranks."""
    if _is_queue(group) and group not in _started_groups:
        dist.all_reduce(torch.zeros(1, device=device_type), group=group)
        _started_groups.add(group)
    return group


def _gradient_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return the group over which dK and dV travel: a second group of the same ranks if a communicator is a queue.

    The first use is a collective over the group.
    """
    if not _is_queue(group) or group.size() == 1:
        return group
    if group not in _gradient_groups:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, use_local_synchronization=True, group_desc="cp_gradients")
        _gradient_groups[group] = _started(made, device_type)
    return _gradient_groups[group]


def _is_queue(group: dist.ProcessGroup) -> bool:
    return "nccl" in str(dist.get_backend(group))
