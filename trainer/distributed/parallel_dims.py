"""Degrees -> meshes.

For dp_replicate = 2, dp_shard = 2, tp = 2 (pp = cp = 1) the eight ranks stand so; tp neighbours are adjacent:

    dp_replicate 0:  dp_shard 0: [0 1]   dp_shard 1: [2 3]
    dp_replicate 1:  dp_shard 0: [4 5]   dp_shard 1: [6 7]
                                 tp                tp

    rank 0 shards its parameters with ranks 0, 2 (dp_shard_cp), replicates them with 4 (dp_replicate), cuts
    matrices with 1 (tp), reads other data than 2, 4, 6 (dp), and the same as 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.job.degrees import Degrees


@dataclass(frozen=True)
class Factorisation:
    """One way to write the number of ranks as a product of degrees, and the meshes that follow from it.

    dims: names of `Degrees.sizes`, outermost first: what talks most stands innermost, inside a node. flattened: 1-D
    meshes of several of them, always built, also at size one, so that no caller branches.
    """

    dims: tuple[str, ...]
    flattened: Mapping[str, tuple[str, ...]]


_DIMS = ("pp", "dp_replicate", "dp_shard", "cp_ring", "cp_a2a", "tp")
_CP = ("cp_ring", "cp_a2a")  # the ring over groups of ranks, and the ranks of a group, which divide the heads
# Another factorisation of the same ranks, such as one with experts, stands beside this one.
FACTORISATIONS = (
    Factorisation(
        _DIMS,
        {
            "cp": _CP,  # who shares a sequence
            "dp": ("dp_replicate", "dp_shard"),  # who reads which data
            "dp_shard_cp": ("dp_shard", *_CP),  # who shards parameters
            "dp_cp": ("dp_replicate", "dp_shard", *_CP),  # over what losses and token counts are summed
            "pp_cp_tp": ("pp", *_CP, "tp"),  # who reads the same batch
            "world": _DIMS,
        },
    ),
)


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh as one line of ranks."""
    return mesh._flatten(name)


class ParallelDims:
    """The meshes of one job. `dims["tp"]` is a 1-D mesh of any name in `FACTORISATIONS`.

    Needs an initialised process group of `degrees.world_size` ranks.
    """

    def __init__(
        self, degrees: Degrees, device_type: str, factorisations: Sequence[Factorisation] = FACTORISATIONS
    ) -> None:
        self.degrees = degrees
        self._meshes: dict[str, DeviceMesh] = {}
        self._roots: list[DeviceMesh] = []
        sizes = degrees.sizes()
        for way in factorisations:
            root = init_device_mesh(device_type, tuple(sizes[name] for name in way.dims), mesh_dim_names=way.dims)
            self._meshes |= {name: root[name] for name in way.dims}
            self._meshes |= {name: flattened(root[parts], name) for name, parts in way.flattened.items()}
            self._roots.append(root)

    def __getitem__(self, name: str) -> DeviceMesh:
        return self._meshes[name]

    def size(self, name: str) -> int:
        return self._meshes[name].size()

    def rank(self, name: str) -> int:
        """This process's place in the mesh of that name."""
        return self._meshes[name].get_local_rank()

    def group_names(self) -> str:
        """Return the names of this rank's process groups, which depend on the layout and the order of making."""
        return " ".join(mesh.get_group().group_name for mesh in self._meshes.values())

    @property
    def hybrid_mesh(self) -> DeviceMesh:
        """(ring, all-to-all) ranks that share a sequence: 2-D."""
        return self._roots[0][_CP]

    @property
    def parameter_mesh(self) -> DeviceMesh:
        """Mesh for `fully_shard`: 1-D (dp_shard_cp), or 2-D (dp_replicate, dp_shard_cp) with replicas.

        A 2-D mesh means HSDP to `fully_shard`; plain data parallelism is the same with a second size of one.
        """
        if self.size("dp_replicate") == 1:
            return self["dp_shard_cp"]
        return DeviceMesh._concatenate([self["dp_replicate"], self["dp_shard_cp"]])
