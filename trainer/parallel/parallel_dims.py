"""The meshes of a job, built from its degrees.

Eight ranks for dp_replicate = 2, dp_shard = 2, tp = 2 (pp = cp = 1); the ranks of a tp group are adjacent:

    dp_replicate 0:  dp_shard 0: [0 1]   dp_shard 1: [2 3]
    dp_replicate 1:  dp_shard 0: [4 5]   dp_shard 1: [6 7]
                                 tp                tp

    Rank 0 shards its parameters with rank 2 (dp_shard_cp), replicates them on rank 4 (dp_replicate) and cuts its
    matrices with rank 1 (tp). It reads the same data as rank 1, and other data than ranks 2, 4 and 6 (dp).

`factorisation` says who uses which flattened mesh. (dp_replicate, dp_shard_cp) is the 2-D mesh of HSDP; DDP is the same
with a shard degree of one. `world` has the gradient norm, speed and memory. Of a model with experts, `ep` divides the
experts of a layer, (dp_replicate,) efsdp shards the same experts, and loads of experts are summed over `dp_cp_tp`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # it registers the back end `fake`
from torch.distributed import DeviceMesh, ProcessGroup

from longshard.sharding.exchange import has_peers
from longshard.sharding.tensors import flattened
from trainer.job.degrees import Degrees
from trainer.parallel.machine import MACHINE, Machine
from trainer.runtime.agreement import gather_values
from trainer.runtime.console import logger


@dataclass(frozen=True)
class Factorisation:
    """One way to write the number of ranks as a product of degrees, and the meshes that follow from it.

    Attributes:
        dims: Names of `Degrees.sizes`, outermost first. The dimension that communicates most is innermost, inside a
            node.
        flattened: 1-D meshes over several dims. They also exist at size one, so that no caller branches.
    """

    dims: tuple[str, ...]
    flattened: Mapping[str, tuple[str, ...]]


_CP = ("cp_ring", "cp_a2a")  # the ring over head groups, and the ranks of a head group


def factorisation(shared: tuple[str, ...]) -> Factorisation:
    """Return the factorisation of the ranks for dims that divide a sample: a sequence, or a field along its axes.

    Its dims are `pp`, `dp_replicate`, `dp_shard`, the shared dims and `tp`, outermost first. It also names 1-D
    meshes over several of them. For example, `cp` is the mesh of the ranks that share a sample.

    Args:
        shared: Names of the dims that divide a sample.
    """
    dims = ("pp", "dp_replicate", "dp_shard", *shared, "tp")
    return Factorisation(
        dims,
        {
            "cp": shared,  # who shares a sample
            "dp": ("dp_replicate", "dp_shard"),  # who reads which data
            "dp_shard_cp": ("dp_shard", *shared),  # who shards parameters
            "dp_cp": ("dp_replicate", "dp_shard", *shared),  # who sums losses and token counts
            "pp_cp_tp": ("pp", *shared, "tp"),  # who reads the same batch
            "world": dims,
        },
    )


# The ranks of dp_shard x cp x tp once more, for the weights of experts: each has tokens of its own.
_EXPERT_DIMS = ("pp", "dp_replicate", "efsdp", "ep")
EXPERT_FACTORISATION = Factorisation(_EXPERT_DIMS, {"dp_cp_tp": _EXPERT_DIMS[1:]})


Rows = tuple[tuple[int, ...], ...]
"""The ranks of each group of a mesh: a partition of all ranks."""


def lines(dims: Sequence[str], along: Sequence[str], sizes: Mapping[str, int]) -> Rows:
    """Return the ranks of each group of a mesh over the dims `along`, in a grid of `dims`.

    Args:
        dims: All dims of the grid, outermost first.
        along: The dims of the mesh, in any order.
        sizes: Size of each dim.
    """
    shape = [sizes[name] for name in dims]
    grid = torch.arange(math.prod(shape)).view(shape)
    others = [place for place, name in enumerate(dims) if name not in along]
    inner = [place for place, name in enumerate(dims) if name in along]
    rows = grid.permute(others + inner).reshape(-1, math.prod(sizes[name] for name in along))
    return tuple(map(tuple, rows.tolist()))


def new_group(rows: Rows, description: str) -> ProcessGroup:
    """Return a new group of this rank's row. A collective of all ranks.

    One rank alone needs no communicator: its group has the back end `fake`, which copies inputs to outputs. NCCL splits
    the group of all ranks once for all rows. `new_group` would split it once for each row, even for a row of one rank.

    Args:
        rows: The ranks of each group.
        description: Name of the groups in traces.
    """
    (own_row,) = (row for row in rows if dist.get_rank() in row)
    world = dist.group.WORLD
    settings = {"use_local_synchronization": True, "group_desc": description}
    if len(own_row) == 1:
        return dist.new_group(list(own_row), backend="fake", **settings)
    if world.bound_device_id is not None:
        return dist.split_group(world, [list(row) for row in rows], group_desc=description)
    return dist.new_group(list(own_row), **settings)


class ParallelDims:
    """The meshes of one job.

    `dims["tp"]` is a 1-D mesh; the names are the dims and flattened meshes of its factorisations.

    Names whose groups have the same ranks are one mesh, so each set of ranks has one communicator.

    Needs an initialised process group of `degrees.world_size` ranks.

    Args:
        degrees: The degrees of parallelism.
        device_type: Type of the device of each rank.
        machine: The machine of this rank.
    """

    def __init__(self, degrees: Degrees, device_type: str, machine: Machine = MACHINE) -> None:
        self.degrees = degrees
        self.machine = machine
        self._meshes: dict[str, DeviceMesh] = {}
        self._roots: list[DeviceMesh] = []
        sizes = degrees.sizes()
        ways = [factorisation(tuple(degrees.domain_axes) if degrees.domain else _CP)]
        ways += [EXPERT_FACTORISATION] * (degrees.ep is not None)
        self._by_rows: dict[Rows, DeviceMesh] = {}
        self._own: dict[tuple[Rows, str], ProcessGroup] = {}
        started = time.monotonic()
        for way in ways:
            self._add(way, device_type, sizes)
        several = sum(1 < len(rows[0]) < degrees.world_size for rows in self._by_rows)
        if several:
            logger.info(
                f"process groups other than the group of all ranks: {several}, "
                f"made in {time.monotonic() - started:.1f} s"
            )

    def _add(self, way: Factorisation, device_type: str, sizes: Mapping[str, int]) -> None:
        """Add the meshes of a factorisation. New groups make it a collective of all ranks.

        If an earlier mesh has the same groups, the name refers to the earlier mesh.
        """
        dims = way.dims
        rows = {name: lines(dims, (name,), sizes) for name in dims}
        groups = {
            dim_rows: self._group(dim_rows, name)
            for dim_rows, name in {rows[name]: name for name in dims}.items()
        }
        grid = torch.arange(self.degrees.world_size).view([sizes[name] for name in dims])
        dim_groups = [groups[rows[name]] for name in dims]
        root = DeviceMesh.from_group(dim_groups, device_type, grid, mesh_dim_names=dims)
        for name in dims:
            self._meshes.setdefault(name, self._by_rows.setdefault(rows[name], root[name]))
        for name, parts in way.flattened.items():
            group_rows = lines(dims, parts, sizes)
            if group_rows not in self._by_rows:
                self._by_rows[group_rows] = flattened(root[parts], name)
            self._meshes[name] = self._by_rows[group_rows]
        self._roots.append(root)

    def _group(self, rows: Rows, name: str) -> ProcessGroup:
        """Return this rank's group of a partition of all ranks: the group of a mesh, or a new one."""
        if rows in self._by_rows:
            return self._by_rows[rows].get_group()
        return dist.group.WORLD if len(rows) == 1 else new_group(rows, f"mesh_{name}")

    def __getitem__(self, name: str) -> DeviceMesh:
        return self._meshes[name]

    def meshes(self) -> Mapping[str, DeviceMesh]:
        """Return all 1-D meshes by name; names whose groups have the same ranks share one."""
        return self._meshes

    def size(self, name: str) -> int:
        """Return the number of ranks of a mesh.

        Args:
            name: Name of the mesh.
        """
        return self._meshes[name].size()

    def rank(self, name: str) -> int:
        """Return this process's rank in a mesh.

        Args:
            name: Name of the mesh.
        """
        return self._meshes[name].get_local_rank()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.rank("world") == 0

    def zeros(self, *shape: int) -> torch.Tensor:
        """Return zeros in float64 on the device of this rank, for sums over ranks.

        Args:
            *shape: The shape.
        """
        return torch.zeros(shape, dtype=torch.float64, device=self["world"].device_type)

    def host_group(self, name: str, timeout: timedelta) -> ProcessGroup:
        """Return a group of the ranks of a mesh for tensors in host memory. A collective of all ranks.

        On CPUs, and for one rank, it is the group of the mesh; otherwise each call makes a new gloo group.

        Args:
            name: Name of the mesh.
            timeout: Time-out of a new group.
        """
        mesh = self[name]
        if mesh.device_type == "cpu" or mesh.size() == 1 or not has_peers(mesh):
            return mesh.get_group()
        return self._gloo_group(mesh, timeout)

    def _gloo_group(self, mesh: DeviceMesh, timeout: timedelta) -> ProcessGroup:
        ranks = dist.get_process_group_ranks(mesh.get_group())
        all_rows = {tuple(row) for row in gather_values(ranks)}
        group, _ = dist.new_subgroups_by_enumeration(
            [list(row) for row in sorted(all_rows)], timeout, backend="gloo"
        )
        return group

    def own_group(self, name: str, purpose: str) -> ProcessGroup | None:
        """Return a group of a mesh's ranks for one purpose alone; None if the mesh has one rank.

        NCCL runs the operations of a communicator one after another. The first call makes the group: a collective of
        all ranks, unless the mesh has one rank. A second call returns the same group.

        Args:
            name: Name of the mesh.
            purpose: Name of the purpose.
        """
        rows = next(rows for rows, mesh in self._by_rows.items() if mesh is self[name])
        if len(rows[0]) > 1 and (rows, purpose) not in self._own:
            self._own[rows, purpose] = new_group(rows, purpose)
        return self._own.get((rows, purpose))

    def stage_group(self) -> ProcessGroup:
        """Return the group of all ranks of this rank's pipeline stage, which share its parameters.

        A collective of all ranks, if no mesh has these ranks.
        """
        root = self._roots[0]
        rows = lines(root.mesh_dim_names, root.mesh_dim_names[1:], self.degrees.sizes())
        if (rows, "stage") not in self._own:
            self._own[rows, "stage"] = self._group(rows, "stage")
        return self._own[rows, "stage"]

    def group_names(self) -> str:
        """Return the names of this rank's process groups; they depend on the degrees and the order of creation."""
        return " ".join(mesh.get_group().group_name for mesh in self._meshes.values())

    @property
    def hybrid_mesh(self) -> DeviceMesh:
        """The 2-D mesh (ring, all-to-all) of the ranks that share a sequence."""
        return self._roots[0][_CP]

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`: 1-D (dp_shard_cp), or 2-D (dp_replicate, dp_shard_cp) with replicas.

        With a 2-D mesh `fully_shard` does HSDP; plain data parallelism is HSDP with a second size of one.
        """
        return self._with_replicas("dp_shard_cp")

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard` of experts: 1-D (efsdp), or 2-D (dp_replicate, efsdp) with replicas."""
        return self._with_replicas("efsdp")

    def _with_replicas(self, name: str) -> DeviceMesh:
        if self.size("dp_replicate") == 1:
            return self[name]
        return DeviceMesh._concatenate([self["dp_replicate"], self[name]])
