"""An error that one rank finds is raised on all ranks: a rank that stops alone leaves its peers waiting."""

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longshard.sharding.exchange import all_gather, all_reduce, broadcast, has_peers
from trainer.config.errors import ConfigError, SharedConfigError

_CONTROL_SECONDS = 300
T = TypeVar("T")
Over = DeviceMesh | dist.ProcessGroup | torch.device
"""A 1-D mesh; a group, for tensors in host memory; or, before there is a mesh, this rank's device, for all ranks."""


def check_same(values: Mapping[str, int | str], over: DeviceMesh, what: str) -> None:
    """Check that all ranks have the same values. A collective. what: "data", in the message.

    Raises:
        SharedConfigError: on every rank, if they differ; it has the names of the values that do.
    """
    found = gather_values(values, over)
    if other := next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None):
        names = sorted(
            name
            for name in {*found[0], *found[other]}
            if found[0].get(name) != found[other].get(name)
        )
        raise SharedConfigError(
            f"rank {other} has other {what} than rank 0 ({', '.join(names)}); every machine must have the same "
            "configuration, the same tokenizer and the same files"
        )


def control_group() -> dist.ProcessGroup:
    """Return a group of all ranks in which they agree between tokens, in host memory. A collective.

    Its time-out is its own: a rank that waits for one that has failed ends after it.
    """
    if dist.get_world_size() == 1:
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=_CONTROL_SECONDS))


def highest(value: int, control: dist.ProcessGroup) -> int:
    """Return the highest value of all ranks. A collective. control: see `control_group`."""
    return int(all_reduce(torch.tensor(value), control, "max"))


def once_a_node(find: Callable[[], str], over: DeviceMesh) -> str:
    """Return what `find` returns on the first rank of this node; no other rank calls it. A collective over all ranks.

    It raises as `raise_on_all_ranks`.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    rank = dist.get_rank()
    text = raise_on_all_ranks(find if local_rank == 0 else str, over)
    return gather_values(text, over)[rank - local_rank]


def gather_values(value: Any, over: Over) -> list[Any]:
    """Return the values of all ranks, in their order, as JSON has them. A collective."""
    group, device = _group_of(over)
    text = json.dumps(value).encode()
    if not has_peers(group):
        return [json.loads(text)] * group.size()
    padded = text.ljust(int(all_reduce(torch.tensor(len(text), device=device), group, "max")))
    rows = all_gather(torch.tensor(list(padded), dtype=torch.uint8, device=device), group).cpu()
    return [json.loads(bytes(row.tolist())) for row in rows]


def raise_on_all_ranks(function: Callable[[], T], over: Over) -> T:
    """Call `function` on every rank and return this rank's result. A collective.

    Raises:
        SharedConfigError: on every rank, if a call raised a ConfigError; it has the message of the lowest such rank.
    """
    result, message = None, ""
    try:
        result = function()
    except ConfigError as error:
        message = str(error) or "unknown"
    group, device = _group_of(over)
    failed = bool(message)
    if has_peers(group):
        found = torch.tensor(int(failed), dtype=torch.int32, device=device)
        failed = all_reduce(found, group, "max").item()
    if failed:
        raise SharedConfigError(next(filter(None, gather_values(message, over))))
    return result


def _group_of(over: Over) -> tuple[DeviceMesh | dist.ProcessGroup, torch.device | str]:
    if isinstance(over, torch.device):
        return dist.group.WORLD, over
    return over, "cpu" if isinstance(over, dist.ProcessGroup) else over.device_type


def read_once(function: Callable[[], bytes], over: DeviceMesh) -> bytes:
    """Return on every rank of a 1-D mesh what `function` returns on the first. It raises as `raise_on_all_ranks`."""
    first = over.get_local_rank() == 0
    content = raise_on_all_ranks(lambda: function() if first else b"", over)
    length = all_reduce(torch.tensor(len(content), device=over.device_type), over, "max")
    if not length:
        return b""
    copy = torch.frombuffer(bytearray(content.ljust(int(length))), dtype=torch.uint8).to(
        over.device_type
    )
    return broadcast(copy, over).cpu().numpy().tobytes()
