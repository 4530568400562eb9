"""An error that one rank finds is raised on all ranks: a rank that stops alone leaves its peers waiting."""

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from longshard.sharding.exchange import all_reduce, has_peers
from trainer.config.errors import ConfigError, SharedConfigError

_CONTROL_SECONDS = 300
T = TypeVar("T")
Over = DeviceMesh | ProcessGroup | None
"""A 1-D mesh, or a group. None: all ranks."""


def check_same(values: Mapping[str, int | str], subject: str) -> None:
    """Check that all ranks have the same values. A collective.

    Args:
        values: Values by name.
        subject: Plural noun for the message, such as "data".

    Raises:
        SharedConfigError: On every rank, if the values differ; it names the values that differ.
    """
    first, *others = gather_values(values)
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            both = {*first, *theirs}
            names = sorted(name for name in both if first.get(name) != theirs.get(name))
            raise SharedConfigError(
                f"rank {rank} has other {subject} than rank 0 ({', '.join(names)}); every machine must "
                "have the same configuration, the same tokenizer and the same files"
            )


def control_group() -> ProcessGroup:
    """Return a group of all ranks, in host memory, for agreements while texts are generated. A collective.

    The group has a time-out of its own: a rank that waits longer for a failed rank ends with an error.
    """
    if dist.get_world_size() == 1:
        return dist.group.WORLD
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=_CONTROL_SECONDS))


def highest(value: int, control: ProcessGroup) -> int:
    """Return the highest value of all ranks. A collective.

    Args:
        value: This rank's value.
        control: See `control_group`.
    """
    return int(all_reduce(torch.tensor(value), control, "max"))


def once_a_node(find: Callable[[], str]) -> str:
    """Return the result of `find` on the first rank of this node; no other rank calls it. A collective over all ranks.

    It raises as `raise_on_all_ranks`.

    Args:
        find: The function.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    text = raise_on_all_ranks(find if local_rank == 0 else str)
    return gather_values(text)[dist.get_rank() - local_rank]


def gather_values(value: Any, over: Over = None) -> list[Any]:
    """Return the values of all ranks, in the order of ranks. A collective.

    All values pass through JSON: a tuple becomes a list, and keys become strings.

    Args:
        value: This rank's value, of types that JSON has.
        over: The ranks.
    """
    group = _group_of(over)
    texts = [json.dumps(value)] * group.size()
    if has_peers(group):
        dist.all_gather_object(texts, texts[0], group)
    return [json.loads(text) for text in texts]


def raise_on_all_ranks(function: Callable[[], T], over: Over = None) -> T:
    """Call `function` on every rank and return this rank's result. A collective.

    Args:
        function: The function.
        over: The ranks.

    Returns:
        The result.

    Raises:
        SharedConfigError: On every rank, if a call raised a ConfigError; it has the message of the lowest such rank.
            Any other error is raised on this rank only, and its peers wait in vain.
    """
    result, message = None, ""
    try:
        result = function()
    except ConfigError as error:
        message = str(error) or "unknown"
    if messages := [text for text in gather_values(message, over) if text]:
        raise SharedConfigError(messages[0])
    return result


def _group_of(over: Over) -> ProcessGroup:
    return over.get_group() if isinstance(over, DeviceMesh) else over or dist.group.WORLD


def read_once(function: Callable[[], bytes], over: Over = None) -> bytes:
    """Return on every rank the result of `function` on the first rank. A collective; it raises as `raise_on_all_ranks`.

    Args:
        function: Reads some bytes.
        over: The ranks.
    """
    group = _group_of(over)
    content = [raise_on_all_ranks(function if group.rank() == 0 else bytes, group)]
    if has_peers(group):
        dist.broadcast_object_list(content, group=group, group_src=0)
    return content[0]
