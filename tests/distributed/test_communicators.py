"""Laws: one communicator for each set of ranks, none for one rank, and every collective works over a group of one."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from longshard.context.execution.build import same_ranks
from longshard.sharding.exchange import (
    all_gather,
    all_reduce,
    all_to_all,
    gather_shards,
    group_timeout,
    reduce_shards,
)
from tests.distributed.pool import WorkerPool
from trainer.config import parse_command_line
from trainer.config.parallelism import Parallelism
from trainer.job.degrees import KEYS, Degrees, resolve_degrees
from trainer.parallel.parallel_dims import ParallelDims, new_group
from trainer.runtime.process_group import Process, process_group, set_timeout

ONE = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1}


def degrees_of(world_size: int, **degrees: int) -> Degrees:
    parallelism = {KEYS[name].partition(".")[2]: degree for name, degree in (ONE | degrees).items() if name != "ep"}
    return resolve_degrees(Parallelism(**parallelism), world_size, degrees.get("ep"))


def made_groups(degrees: Degrees, rank: int) -> list[int]:
    """Return the sizes of the groups that one rank of a job creates, except the group of all ranks."""
    dist.init_process_group("fake", rank=rank, world_size=degrees.world_size, store=FakeStore())
    try:
        ParallelDims(degrees, "cpu")
        return sorted(group.size() for group in _world.pg_map if group is not dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "settings", "sizes"),
    [
        (8, {"dp_shard": 8}, []),
        (8, {"cp": 8}, []),
        (8, {"dp_shard": 2, "cp": 4}, [2, 4]),
        (64, {"dp_shard": 8, "cp": 8}, [8, 8]),
        (64, {"dp_shard": 2, "cp": 4, "tp": 4, "pp": 2}, [2, 2, 4, 4, 8, 32]),
        (64, {"dp_replicate": 2, "dp_shard": 32}, [2, 32]),
    ],
)
def test_a_set_of_ranks_has_one_communicator(world_size: int, settings: dict[str, int], sizes: list[int]) -> None:
    """All meshes of one rank share a group without a communicator."""
    degrees = degrees_of(world_size, **settings)
    for rank in (0, world_size - 1):
        assert made_groups(degrees, rank) == [1, *sizes]


def test_nccl_splits_the_group_of_all_ranks_once_for_a_mesh() -> None:
    """Every rank calls it with the same rows, in the same order; a rank alone takes no part in anything."""
    rows, alone = ((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    try:
        with (
            mock.patch.object(type(dist.group.WORLD), "bound_device_id", torch.device("cuda", 0)),
            mock.patch.object(dist, "split_group", return_value="split") as split,
            mock.patch.object(dist, "new_group", return_value="new") as new,
        ):
            assert new_group(rows, "mesh_tp") == "split"
            assert new_group(alone, "mesh_pp") == "new"
        split.assert_called_once_with(dist.group.WORLD, [[0, 1], [2, 3]], group_desc="mesh_tp")
        new.assert_called_once_with([2], backend="fake", use_local_synchronization=True, group_desc="mesh_pp")
    finally:
        dist.destroy_process_group()


def time_outs_case(degrees: Degrees) -> set[float]:
    """The time-outs in seconds of groups that are made at the start, and later when the job's group has another one."""
    process, comm = Process.from_environment(), parse_command_line(["--comm.init_timeout_seconds=50"]).config.comm
    with process_group(process, comm):
        dims = ParallelDims(degrees, "cpu")
        late = [dims.own_group("dp_shard", "reduce"), same_ranks(dims["cp"].get_group(), "late")]
        groups = [group for group in _world.pg_map if dist.get_backend(group) != "fake"]
        assert {*late} <= {*groups}
        timeouts = {group_timeout(group, process.device).total_seconds() for group in groups}
        set_timeout(60)
        last = dist.new_group(use_local_synchronization=True)
        return timeouts | {group_timeout(last, process.device).total_seconds()}


def test_a_group_has_the_time_out_that_the_group_of_the_job_has_when_it_is_made(pool: WorkerPool) -> None:
    """A rank that stops while the model is built is waited for in a group that was just made."""
    assert pool.run(4, time_outs_case, degrees_of(4, dp_shard=2, cp=2)) == [{50.0, 60.0}] * 4
    assert distributed_c10d._get_default_timeout("gloo") == distributed_c10d.default_pg_timeout


def groups_case(degrees: Degrees) -> list[tuple[str, list[int], str]]:
    """Every mesh of a job: its name, its ranks, the name of its group."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        dims = ParallelDims(degrees, "cpu")
        set_timeout(60)  # of groups without a communicator too
        groups = {name: (mesh.mesh.tolist(), mesh.get_group()) for name, mesh in dims._meshes.items()}
        for ranks, group in groups.values():
            assert dist.get_process_group_ranks(group) == ranks
            assert (dist.get_backend(group) == "fake") == (len(ranks) == 1 < process.world_size)
            assert group in _world.pg_map
        return [(name, ranks, group.group_name) for name, (ranks, group) in groups.items()]


@pytest.mark.parametrize(
    "degrees",
    [
        degrees_of(4, dp_shard=2, cp=2),
        degrees_of(4, dp_shard=4),
        degrees_of(4, dp_replicate=2, dp_shard=2),
        degrees_of(4, cp=2, tp=2),
        Degrees(dp_replicate=1, dp_shard=2, cp=2, tp=1, pp=1, world_size=4, ep=2),
        Degrees(dp_replicate=2, dp_shard=2, cp=1, tp=1, pp=1, world_size=4, ep=2),
        degrees_of(1),
    ],
    ids=Degrees.text,
)
def test_names_with_the_same_ranks_share_a_group_and_others_do_not(pool: WorkerPool, degrees: Degrees) -> None:
    for names in pool.run(degrees.world_size, groups_case, degrees):
        groups = {tuple(ranks): group for _, ranks, group in names}
        assert all(groups[tuple(ranks)] == group for _, ranks, group in names)
        assert len({*groups.values()}) == len(groups)


def collectives_case(folder: str) -> None:
    """Every kind of collective that a job uses, over a mesh of one of two ranks."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        dims = ParallelDims(degrees_of(2, dp_shard=2), "cpu")
        mesh = dims["cp"]
        group, x = mesh.get_group(), torch.arange(6.0).view(2, 3) + process.rank
        assert dist.get_backend(group) == "fake"
        assert (group.rank(), mesh.get_local_rank(), mesh.size()) == (0, 0, 1)
        assert torch.equal(all_reduce(x.clone(), mesh), x)
        assert torch.equal(all_gather(x, mesh), x[None])
        for (result, pending), wanted in (
            (gather_shards(x, group, kind="test"), x[None]),
            (reduce_shards(x[None], group, kind="test"), x),
            (all_to_all(x.flatten(), [6], [6], group, kind="test"), x.flatten()),
        ):
            pending.wait()
            assert torch.equal(result, wanted)
        gathered: list[object] = [None]
        dist.all_gather_object(gathered, {"rank": process.rank}, group=group)
        assert gathered == [{"rank": process.rank}]

        shard = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
        assert torch.equal(shard.full_tensor(), x)
        assert torch.equal(shard.redistribute(placements=[Replicate()]).to_local(), x)
        assert torch.equal((shard @ shard.redistribute(placements=[Replicate()]).T).full_tensor(), x @ x.T)

        model, alone = nn.Linear(3, 2), nn.Linear(3, 2)
        alone.load_state_dict(model.state_dict())
        fully_shard(model, mesh=mesh)
        for module in (model, alone):
            module(x).square().sum().backward()
        for ours, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(ours.grad.full_tensor(), wanted.grad)

        rank_folder = f"{folder}/{process.rank}"
        before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
        dcp.save(dict(model.named_parameters()), checkpoint_id=rank_folder, process_group=group)
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().zero_()
        dcp.load(dict(model.named_parameters()), checkpoint_id=rank_folder, process_group=group)
        assert all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())
        assert dims.host_group("cp", None) is group


def test_collectives_over_one_rank(pool: WorkerPool, tmp_path) -> None:
    pool.run(2, collectives_case, str(tmp_path))
