"""Messages of a trace: the mesh over which a collective runs, its group, and the bytes that a rank sends."""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch.utils._pytree import tree_leaves

from lct_planner.traced_trainer import TracedTrainer


def mesh_names(trainer: TracedTrainer) -> dict[tuple[int, ...], str]:
    """Return the name of the mesh of each set of ranks. If several meshes have these ranks, the most telling name wins.

    Args:
        trainer: Has the meshes.
    """
    meshes = trainer.dims.meshes()
    first = (
        "tp",
        "ep",
        "cp",
        "cp_ring",
        "cp_a2a",
        "pp",
        "dp_replicate",
        "dp_shard_cp",
        "efsdp",
    )
    ordered = [*first, *(name for name in meshes if name not in first)]
    named = [(name, meshes[name]) for name in reversed(ordered) if name in meshes]
    return {tuple(dist.get_process_group_ranks(mesh.get_group())): name for name, mesh in named}


def group_of(args: tuple) -> ProcessGroup:
    """Return the group of a collective: an object, or for functional collectives the last name among the arguments.

    Args:
        args: The arguments of the collective.
    """
    leaves = tree_leaves(args)
    objects = (
        x
        for x in leaves
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
    )
    boxed = next(objects, None)
    if boxed is not None:
        return ProcessGroup.unbox(boxed)
    return _resolve_process_group([x for x in leaves if isinstance(x, str)][-1])


def bytes_sent(name: str, args: tuple, group: ProcessGroup) -> int:
    """Return the bytes that this rank sends to others in a collective.

    For an all-reduce and a collective unknown here, this is the size of the first tensor.

    Args:
        name: Name of the collective.
        args: Its arguments.
        group: Its group.
    """
    tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    size = group.size()
    if name == "_allgather_base_":
        return tensors[1].nbytes * (size - 1)
    if name == "_reduce_scatter_base_":
        return tensors[0].nbytes * (size - 1)
    if name == "all_gather_into_tensor":
        return tensors[0].nbytes * (size - 1)
    if name == "reduce_scatter_tensor":
        return tensors[0].nbytes // size * (size - 1)
    if name.startswith(("alltoall", "all_to_all")):
        sizes = (
            (args[4] or [tensors[1].numel() // size] * size)
            if name.startswith("alltoall")
            else args[2]
        )
        row = tensors[-1].nbytes // max(sum(sizes), 1)
        return (sum(sizes) - sizes[group.rank()]) * row
    return sum(x.nbytes for x in tensors) if name == "send" else tensors[0].nbytes
