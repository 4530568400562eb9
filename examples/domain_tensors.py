"""Tensors that are sharded along space: a model as it is, a rule, points, a halo, and a checkpoint, on two ranks.

    torchrun --nproc-per-node 2 examples/domain_tensors.py

docs/domain_parallelism.md explains each part. The output and the gradients of the model are compared with one process.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longshard.domain import (
    Domain,
    DomainTensor,
    average_gradients,
    balanced,
    from_dtensor,
    nearest,
    parallelize,
    rule,
    sized,
    to_dtensor,
    within,
)


def a_model_as_it_is(mesh: DeviceMesh) -> None:
    """Compare output and gradients over two ranks with one process."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    image = torch.randn(1, 3, 64, 48)
    rows = slice(0, 20) if dist.get_rank() == 0 else slice(20, 64)

    domain = Domain.on(mesh, {2: ("h", sized([20, 44]))})  # dimension 2, the height: of 64 rows rank 0 has 20
    x = DomainTensor(image[:, :, rows], domain)
    parallelize(model, x)  # refuses, by name, a function that cannot run on shards
    y = model(x)
    y.square().mean().backward()
    average_gradients(model, mesh)  # right with FSDP2, HSDP, DDP or, as here, no wrapper
    gradients = [p.grad.clone() for p in model.parameters()]

    model.zero_grad()
    whole = model(image)  # one process
    whole.square().mean().backward()
    torch.testing.assert_close(y.local, whole[:, :, rows])
    torch.testing.assert_close(gradients, [p.grad for p in model.parameters()])


def points(mesh: DeviceMesh) -> None:
    """Get the features of near points, also from the other rank."""
    cloud = Domain.on(mesh, {0: ("h", sized([30, 10]))})  # 40 points, in any order
    places = DomainTensor(torch.rand(cloud.axes[0].rows, 3), cloud)
    features = DomainTensor(torch.rand(cloud.axes[0].rows, 8), cloud)
    numbers, is_near = within(places, places, radius=0.3, at_most=16)  # both (40, 16), nearest first
    seen = features[numbers].masked_fill(~is_near[..., None], 0).amax(1)
    _, numbers = nearest(places, places, k=4)
    assert seen.shape == (40, 8)
    assert numbers.shape == (40, 4)


@rule("std_mean", first_only=True)  # tensors after the first argument must be whole
def std_mean(
    function: object, x: DomainTensor, dim: tuple[int, ...], **options: object
) -> tuple[DomainTensor, DomainTensor]:
    return x.std(dim, **options), x.mean(dim)


def a_halo_and_a_checkpoint(mesh: DeviceMesh) -> None:
    """Fetch rows of the other rank for a convolution, and save a field that any division loads."""
    field = Domain.on(mesh, {2: ("h", balanced(9, 2))})  # x: (N, C, 9, 12); 9 rows as 5 + 4
    x = DomainTensor(torch.randn(1, 3, field.axes[2].rows, 12), field)
    y = F.conv2d(x, torch.randn(4, 3, 3, 3), stride=2, padding=1)
    assert y.domain.axes[2].layout.ranges == (((0, 3),), ((3, 5),))  # 5 rows as 3 + 2
    assert torch.std_mean(y, (2, 3))[0].shape == (1, 4)  # by the rule above

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    checkpoint.save({"x": to_dtensor(x, mesh)}, checkpoint_id=folder[0])
    state = {"x": to_dtensor(torch.zeros_like(x), mesh)}  # of any division over any number of ranks
    checkpoint.load(state, checkpoint_id=folder[0])
    assert (from_dtensor(state["x"]) == x).all()


def main() -> None:
    """Run all parts on two ranks."""
    dist.init_process_group("gloo")  # on GPUs "nccl", and "cuda" in the mesh
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("h",))
    torch.manual_seed(0)  # the same weights and image on every rank
    a_model_as_it_is(mesh)
    points(mesh)
    a_halo_and_a_checkpoint(mesh)
    if dist.get_rank() == 0:
        print("output and gradients equal one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
