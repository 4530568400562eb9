"""Build the execution of a plan: bind it to a kernel and to communicators of K/V (and of heads) and of dK/dV.

A communicator of NCCL is a queue, which runs one operation after another.

State of the process: The groups of NCCL for keys and values and for their gradients. Each is made once; an entry goes
with its group.
"""

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from longshard.context.execution.chunks import ChunkExecution, ChunkRows
from longshard.context.execution.kernels.choose import (
    GPU_KERNELS,
    NO_NEEDS,
    GpuKernels,
    KernelNeeds,
    choose_kernel,
)
from longshard.context.execution.ring import StagedExecution
from longshard.context.execution.ulysses import HeadExchange
from longshard.context.planning.lowering import lower, shortest_side
from longshard.context.planning.options import ContextParallelOptions
from longshard.context.planning.plan import RankPlan
from longshard.sharding.exchange import group_timeout

# Both have `forward(q, k, v, terms=...)` and `backward(BackwardInputs, terms)`, which are collectives.
Execution = StagedExecution | HeadExchange

# Communicators by their purpose. They outlive the contexts that use them; an entry is deleted with its group.
_own_groups: WeakKeyDictionary[ProcessGroup, dict[str, ProcessGroup]] = WeakKeyDictionary()


def build_execution(
    plan: RankPlan,
    q: torch.Tensor,
    groups: tuple[ProcessGroup, ProcessGroup],
    options: ContextParallelOptions,
    waiting: ChunkRows | None = None,
    gpu: GpuKernels = GPU_KERNELS,
    needs: KernelNeeds = NO_NEEDS,
) -> Execution:
    """Return a plan bound to a kernel and to communicators.

    With NCCL and without `waiting`, the first call for a group is a collective, because it makes communicators. Later
    calls are cheap, because lowered calls are cached.

    Args:
        plan: The plan.
        q: Queries of the call, (B, H, S, D), for their type, size and device.
        groups: The group that sends K/V in stages, and the group that exchanges heads; the same on a 1-D mesh.
        options: How attention is spread.
        waiting: The rows that wait between the chunks of a sequence, if the plan is for a chunk. Else None.
        gpu: The GPU kernels of this process.
        needs: What the attention needs of the kernel; the plan sets `calls` and `largest`.

    Raises:
        OptionError: The kernel that the options name cannot compute the plan.
    """
    device_type = q.device.type
    calls = max(len(stage.tiles) for stage in plan.forward)
    no_window = [
        tile for stage in plan.forward for tile in stage.tiles if not tile.relation.lower
    ]
    largest = max(map(shortest_side, no_window), default=0)
    needs = needs._replace(calls=calls, largest=largest)
    kind = device_type, q.dtype, q.shape[3]
    kernel = choose_kernel(*kind, options.kernel, needs, gpu=gpu)
    if waiting is not None:
        how = {"merge": gpu.merge, "waiting": waiting}
        return ChunkExecution(lower(plan, kernel.capabilities), kernel, *groups, **how)
    staged = plan.inner or plan
    stage_group, head_group = (own_group(group, "kv", device_type) for group in groups)
    gradients = own_group(groups[0], "dkv", device_type) if staged.degree > 1 else stage_group
    passes = options.heads_per_pass if plan.inner is None else 0
    sent = torch.bfloat16 if options.gradient_dtype == "bfloat16" else None
    lowered = lower(staged, kernel.capabilities)
    run = StagedExecution(lowered, kernel, stage_group, gradients, passes, sent, gpu.merge)
    if plan.inner is None:
        return run
    return HeadExchange(
        plan, head_group, run, options.heads_per_pass, options.query_heads_per_pass
    )


def own_group(group: ProcessGroup, purpose: str, device_type: str) -> ProcessGroup:
    """Return a new NCCL group of the same ranks for one purpose. If the group is not NCCL or has one rank, return it.

    An NCCL communicator is a queue: in the default group, K/V would wait behind the collectives of FSDP. Kernels of the
    new group have high priority. The first call for a purpose is a collective over the group. Later calls return the
    same group.

    Args:
        group: The group.
        purpose: The purpose, such as `kv` or `dkv`.
        device_type: The type of the device.
    """
    if not _is_queue(group) or group.size() == 1:
        return group
    made = _own_groups.setdefault(group, {})
    if purpose not in made:
        made[purpose] = same_ranks(group, f"cp_{purpose}")
        dist.all_reduce(torch.zeros(1, device=device_type), group=made[purpose])
    return made[purpose]


def same_ranks(group: ProcessGroup, description: str) -> ProcessGroup:
    """Return a new communicator of high priority for the ranks of a group, with the same time-out.

    A collective over the group. If the group can be split, `split_group` makes the communicator: `new_group` would
    split the group of the job, and all ranks of the job would have to call it.

    Args:
        group: The group.
        description: The name of the communicator.
    """
    timeout = group_timeout(group, "cuda" if _is_queue(group) else "cpu")
    settings = {
        "group_desc": description,
        "pg_options": _high_priority(timeout),
        "timeout": timeout,
    }
    if _can_split(group):
        return dist.split_group(group, [list(range(group.size()))], **settings)
    return dist.new_group(
        dist.get_process_group_ranks(group), use_local_synchronization=True, **settings
    )


def _high_priority(timeout: timedelta | None) -> object:
    """Return options of NCCL with streams of high priority; None if PyTorch has no NCCL.

    timeout: Of the new group; None keeps NCCL's ten minutes.
    """
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        return None
    options = nccl.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options


def _can_split(group: ProcessGroup) -> bool:
    """Return whether the group is bound to this rank's GPU, as `backend_settings` says."""
    return group.bound_device_id is not None


def _is_queue(group: ProcessGroup) -> bool:
    return "nccl" in str(dist.get_backend(group))
