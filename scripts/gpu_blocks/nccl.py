"""Features of NCCL that the trainer uses besides collectives, on one rank: split groups, priorities, flight record."""

import pickle
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from longshard.context.execution import build
from scripts.gpu_blocks.block import Check
from trainer.config.schema import Comm
from trainer.runtime import process_group as groups


def nccl(check: Check) -> None:
    """Start one rank as the trainer does, split off a group of high priority, use it, and read the flight record.

    What must hold: they work.

    Args:
        check: The run of the block.
    """
    process = groups.Process(0, 0, 1, check.device)
    folder = Path(tempfile.mkdtemp())
    with groups.process_group(process, Comm(), folder):
        group = dist.group.WORLD
        check.note(backend=str(dist.get_backend(group)), can_split=build._can_split(group))
        # Gloo has no priorities.
        with mock.patch.object(build, "_high_priority", return_value=None) if check.is_dry else nullcontext():
            own = build.same_ranks(group, "check")
        x = torch.arange(4.0, device=process.device)
        dist.all_reduce(x, group=own)
        work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        check.expect(x.tolist() == [0.0, 1.0, 2.0, 3.0], f"a sum over one rank is {x.tolist()}")
        check.expect(own.size() == 1 and own is not group, "the new group is not one of one rank")
        if not check.is_dry:
            check.expect(build._can_split(group), "the group of the job is not bound to its GPU, so it cannot be split")
            options = getattr(own._get_backend(process.device), "options", None)
            priority = getattr(options, "is_high_priority_stream", "not known")
            check.note(high_priority=priority)
            check.expect(priority is not False, "the new group's streams have no high priority")
        groups.set_timeout(100.0)
        line = groups._dump_flight_record(0, folder, process.device)
        file = folder / groups.flight_record(0)
        check.expect(file.exists(), f"there is no flight record: {line}")
        if file.exists():
            entries = pickle.loads(file.read_bytes())["entries"]
            check.note(recorded=[entry["profiling_name"] for entry in entries])
            names = [name for name in check.facts["recorded"] if name.endswith(("all_reduce", "allreduce"))]
            check.expect(len(names) >= 2, f"two all-reduces ran, and the flight record has {check.facts['recorded']}")
    made = "split off" if check.facts["can_split"] else "made"
    check.headline(f"{check.facts['backend']}: one group {made}, {len(check.facts.get('recorded', ()))} recorded")
