"""Laws of the meshes of a job: who stands where, in one factorisation of the ranks and in two at once."""

from tests.distributed.pool import WorkerPool
from trainer.config import parse_command_line
from trainer.job.degrees import Degrees
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.process_group import Process, process_group


def meshes_case(degrees: Degrees) -> dict[str, list[int]]:
    """Mesh -> its ranks, as seen from this one."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        return {name: mesh.mesh.tolist() for name, mesh in ParallelDims(degrees, "cpu").meshes().items()}


def test_ranks_stand_as_the_picture_says(pool: WorkerPool) -> None:
    degrees = Degrees(dp_replicate=1, dp_shard=1, cp=2, tp=2, pp=1, world_size=4)
    meshes = pool.run(4, meshes_case, degrees)
    assert [each["tp"] for each in meshes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["cp"] for each in meshes] == [each["dp_shard_cp"] for each in meshes] == [[0, 2], [1, 3]] * 2
    assert all(each["pp_cp_tp"] == each["world"] == [0, 1, 2, 3] for each in meshes)
    assert [each["dp"] for each in meshes] == [[rank] for rank in range(4)]


def test_a_second_factorisation_stands_beside_the_first(pool: WorkerPool) -> None:
    """Experts factorise the ranks of dp_shard x cp x tp in another way."""
    degrees = Degrees(dp_replicate=1, dp_shard=2, cp=2, tp=1, pp=1, world_size=4, ep=2)
    both = pool.run(4, meshes_case, degrees)
    assert [each["ep"] for each in both] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["efsdp"] for each in both] == [[0, 2], [1, 3]] * 2
    assert all(each["dp_cp_tp"] == [0, 1, 2, 3] for each in both)
    assert [each["dp_shard"] for each in both] == [[0, 2], [1, 3]] * 2
    assert [each["cp"] for each in both] == [[0, 1], [0, 1], [2, 3], [2, 3]]
