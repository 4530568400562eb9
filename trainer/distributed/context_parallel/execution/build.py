"""From a plan to what carries it out."""

import torch.distributed as dist

from trainer.distributed.context_parallel.execution.communicators import gradient_group, started
from trainer.distributed.context_parallel.execution.kernels.base import Kernel
from trainer.distributed.context_parallel.execution.ring import StagedExecution
from trainer.distributed.context_parallel.execution.ulysses import HeadExchange
from trainer.distributed.context_parallel.planning.lowering import lower
from trainer.distributed.context_parallel.planning.plan import RankPlan

# Both have `forward(q, k, v, scale)` and `backward(BackwardInputs, scale)`, which are collectives.
Execution = StagedExecution | HeadExchange


def build_execution(
    plan: RankPlan,
    kernel: Kernel,
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    device_type: str,
    heads_per_pass: int,
) -> Execution:
    """Bind a plan to a kernel and to communicators; plan and lowered calls are cached, so that this costs little.

    groups: over which K/V travel in stages, and over which heads are exchanged; the same one on a 1-D mesh.
    """
    stage_group, head_group = (started(group, device_type) for group in groups)
    staged = plan if plan.inner is None else plan.inner
    gradients = gradient_group(stage_group, device_type) if staged.degree > 1 else stage_group
    passes = heads_per_pass if plan.inner is None else 0
    run = StagedExecution(lower(staged, kernel.capabilities), kernel, stage_group, gradients, passes)
    return run if plan.inner is None else HeadExchange(plan, head_group, run, heads_per_pass)
