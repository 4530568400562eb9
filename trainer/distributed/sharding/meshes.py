"""Meshes of ranks."""

from torch.distributed.device_mesh import DeviceMesh


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the 1-D mesh of all ranks of a mesh."""
    return mesh._flatten(name)
