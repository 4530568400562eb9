"""Communicators of K/V and of dK/dV. Over NCCL a communicator is a queue: what is posted runs one after another."""

from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

# Communicators outlive the contexts that use them; an entry goes with its group.
_gradient_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_started: WeakSet[dist.ProcessGroup] = WeakSet()


def started(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return the group, in which every rank has taken part: NCCL's may not begin with messages of some ranks only."""
    if _is_queue(group) and group not in _started:
        dist.all_reduce(torch.zeros(1, device=device_type), group=group)
        _started.add(group)
    return group


def gradient_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return the group over which dK and dV travel: another one of the same ranks where a communicator is a queue.

    A collective over the group at its first use.
    """
    if not _is_queue(group) or group.size() == 1:
        return group
    if group not in _gradient_groups:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, use_local_synchronization=True, group_desc="cp_gradients")
        _gradient_groups[group] = started(made, device_type)
    return _gradient_groups[group]


def _is_queue(group: dist.ProcessGroup) -> bool:
    return "nccl" in str(dist.get_backend(group))
