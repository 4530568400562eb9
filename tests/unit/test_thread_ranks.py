"""Laws of ranks that are threads: collectives by their definition, failures end all ranks, mistakes are found."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.distributed_c10d import ReduceScatterOptions, _world

from longshard.sharding import placement
from longshard.sharding.exchange import (
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    gather_shards,
    reduce_shards,
    send_receive,
)
from longshard.sharding.layout import contiguous
from tests import thread_group
from tests.thread_group import LostRankError
from tests.thread_ranks import ThreadMesh, run_ranks


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(shape, dtype=torch.float64, generator=generator)).to(device, dtype)


# ---- collectives


def collectives(rank: int, mesh: ThreadMesh, dtype: torch.dtype) -> list[torch.Tensor]:
    group, size = mesh.get_group(), mesh.size()
    x, rows = (numbers(rank, *shape, dtype=dtype, device=mesh.device_type) for shape in ((2, 3), (size, 4)))
    gathered, pending = gather_shards(x, group, kind="test")
    summed, later = reduce_shards(rows, group, kind="test")
    later.wait()  # in another order than they were posted
    pending.wait()
    reduced = [all_reduce(x.clone(), over, op) for over, op in ((mesh, "sum"), (group, "max"), (group, "min"))]
    return [gathered, summed, *reduced, all_gather(x[0, 0], mesh)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_collectives_by_their_definition(size: int, dtype: torch.dtype, device: str) -> None:
    xs, rows = ([numbers(r, *shape, dtype=dtype) for r in range(size)] for shape in ((2, 3), (size, 4)))
    total, summed = xs[0], rows[0]
    for x, row in zip(xs[1:], rows[1:], strict=True):  # in the order of ranks: to the last bit
        total, summed = total + x, summed + row
    everything = torch.stack(xs)
    for rank, results in enumerate(run_ranks(size, collectives, dtype, device=device)):
        wanted = everything, summed[rank], total, everything.amax(0), everything.amin(0), everything[:, 0, 0]
        for got, wish in zip(results, wanted, strict=True):
            assert torch.equal(got.cpu(), wish)


def uneven(rank: int, mesh: ThreadMesh, sizes: list[list[int]]) -> torch.Tensor:
    x = numbers(rank, sum(sizes[rank]), device=mesh.device_type)
    received, pending = all_to_all(x, sizes[rank], [row[rank] for row in sizes], mesh.get_group(), kind="test")
    assert received.isnan().all()  # nothing arrives before the wait
    pending.wait()
    return received.cpu()


def test_pieces_of_any_size_also_none(device: str) -> None:
    sizes = [[2, 0, 3, 0], [0, 0, 0, 0], [1, 4, 0, 2], [0, 5, 1, 1]]
    pieces = [numbers(rank, sum(row)).split(row) for rank, row in enumerate(sizes)]
    for rank, received in enumerate(run_ranks(4, uneven, sizes, device=device)):
        assert torch.equal(received, torch.cat([row[rank] for row in pieces]))


def round_trips(rank: int, mesh: ThreadMesh, count: int) -> list[bool]:
    """Many messages under way, to and from every other rank, and to itself; waits in another order than posts."""
    transfers, wanted = [], []
    for number in range(count):
        for peer in range(mesh.size()):
            own, theirs = (numbers(100 * r + number, 5 + number, device=mesh.device_type) for r in (rank, peer))
            wanted.append((torch.zeros_like(theirs), theirs))
            transfers.append(Transfer(own, peer, is_send=True))
            transfers.append(Transfer(wanted[-1][0], peer, is_send=False))
    pending = [send_receive(part, mesh.get_group(), kind="test") for part in (transfers[:7], transfers[7:])]
    assert all(buffer.isnan().all() for buffer, _ in wanted)
    for each in reversed(pending):
        each.wait()
    return [torch.equal(*pair) for pair in wanted]


def test_messages_under_way_arrive_in_order(device: str) -> None:
    for results in run_ranks(3, round_trips, 4, device=device):
        assert len(results) == 12
        assert all(results)


def grid(rank: int, mesh: ThreadMesh) -> tuple[list[float], list[float], list[int]]:
    part = mesh.reshaped(2, 3)
    assert part._flatten("cp") is mesh
    assert (part.shape, part.size(), part.size(1), part.ndim) == ((2, 3), 6, 3, 2)
    x = torch.tensor([float(rank)])
    places = [part.get_local_rank(dim) for dim in (0, 1)]
    rows, columns = (all_gather(x, part.get_group(dim)).flatten().tolist() for dim in (0, 1))
    return rows, columns, places


def test_groups_of_a_mesh_with_two_dimensions() -> None:
    for rank, result in enumerate(run_ranks(6, grid)):
        row, column = divmod(rank, 3)
        assert result == ([column, 3 + column], [3 * row, 3 * row + 1, 3 * row + 2], [row, column])


def test_groups_are_not_left_in_the_tables_of_pytorch() -> None:
    before = dict(_world.pg_map), dict(_world.pg_group_ranks), torch.get_num_threads()
    run_ranks(4, grid_of_two)
    with pytest.raises(ValueError):
        run_ranks(4, failing, ValueError)
    assert (_world.pg_map, _world.pg_group_ranks, torch.get_num_threads()) == before


def grid_of_two(rank: int, mesh: ThreadMesh) -> None:
    mesh.reshaped(2, 2)


# ---- failures


def failing(rank: int, mesh: ThreadMesh, error: type[BaseException]) -> None:
    if rank == 1:
        raise error("a fault")
    try:
        all_reduce(torch.ones(1), mesh)
    except LostRankError as lost:
        assert "rank 1 failed" in str(lost)  # noqa: PT017, the main thread sees the first error
        raise


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_first_error_ends_all_ranks_with_its_rank(error: type[BaseException]) -> None:
    with pytest.raises(error, match="a fault") as caught:
        run_ranks(3, failing, error)
    assert caught.value.__notes__ == ["on rank 1 of 3 ranks that are threads"]


def returning(rank: int, mesh: ThreadMesh) -> None:
    if rank != 1:
        all_reduce(torch.ones(1), mesh)


def differing(rank: int, mesh: ThreadMesh) -> None:
    all_reduce(torch.ones(1), mesh, "sum" if rank else "max")


def send_other_size(rank: int, mesh: ThreadMesh) -> None:
    all_to_all(torch.ones(2), [1, 1], [1, 1 + rank], mesh.get_group(), kind="test")[1].wait()


def in_another_order(rank: int, mesh: ThreadMesh) -> None:
    group, x = mesh.get_group(), torch.ones(1)
    calls: list[Callable[[], Any]] = [lambda: all_reduce(x, group), lambda: gather_shards(x, group, kind="t")[1].wait()]
    for call in reversed(calls) if rank else calls:
        call()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (returning, "returned and never posted"),
        (differing, "the ranks differ"),
        (send_other_size, "1 of torch.float32 sent to 2"),
        (in_another_order, "the ranks differ"),
    ],
)
def test_ranks_that_do_different_things(case: Callable, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run_ranks(2, case)


def waiting(rank: int, mesh: ThreadMesh) -> None:
    """Each receives first, and nobody sends: on rank 0 forever."""
    send_receive([Transfer(torch.ones(1), 1 - rank, is_send=False)], mesh.get_group(), kind="test").wait()


def test_no_wait_outlives_the_limit() -> None:
    with pytest.raises(TimeoutError, match="did not post it in time"):
        run_ranks(2, waiting, limit=0.2)


# ---- mistakes


def forgetful(rank: int, mesh: ThreadMesh, kept: list[torch.Tensor]) -> None:
    kept.append(gather_shards(torch.ones(2, device=mesh.device_type), mesh.get_group(), kind="test")[0])


def hasty(rank: int, mesh: ThreadMesh) -> None:
    x, received = (torch.ones(2, device=mesh.device_type) for _ in range(2))
    transfers = [Transfer(x, 1 - rank, is_send=True), Transfer(received, 1 - rank, is_send=False)]
    pending = send_receive(transfers, mesh.get_group(), kind="test")
    x += 1
    pending.wait()


def test_an_operation_without_a_wait_is_found(device: str) -> None:
    kept: list[torch.Tensor] = []
    with pytest.raises(AssertionError, match=r"no wait for collective \(0,\) in group 0 of ranks \[0, 1\]"):
        run_ranks(2, forgetful, kept, device=device)
    assert all(x.isnan().all() for x in kept)


def test_a_send_buffer_that_is_overwritten_too_early_is_found(device: str) -> None:
    with pytest.raises(AssertionError, match=r"overwritten before the wait for message \((0, 1|1, 0), 0, 0\)"):
        run_ranks(2, hasty, device=device)


def elsewhere(rank: int, mesh: ThreadMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data that the rank's stream reads after another stream has waited, at once and at the end."""
    gathered, pending = gather_shards(torch.ones(2, device="cuda"), mesh.get_group(), kind="test")
    with torch.cuda.stream(torch.cuda.Stream()):
        pending.wait()
    at_once = gathered.clone()
    torch.cuda.synchronize()
    return at_once.cpu(), gathered.cpu()


@pytest.mark.gpu
def test_a_wait_on_another_stream_is_found() -> None:
    with mock.patch.object(thread_group, "_CYCLES", 200_000_000):  # 0.1 seconds, which the host does not take
        ((at_once, in_the_end),) = run_ranks(1, elsewhere, device="cuda")
    assert at_once.isnan().all()
    assert in_the_end.tolist() == [[1, 1]]


def old_names(rank: int, mesh: ThreadMesh) -> bool:
    """PyTorch 2.11 calls collectives by these names of a group."""
    group, x = mesh.get_group(), torch.arange(4.0) + rank
    gathered, summed, swapped = torch.empty(8), torch.empty(2), torch.empty(4)
    options = ReduceScatterOptions()
    for work in (
        group._allgather_base(gathered, x),
        group._reduce_scatter_base(summed, x, options),
        group.alltoall_base(swapped, x, [], []),
    ):
        assert work.wait(timedelta(seconds=1))
    first = 2.0 * rank
    return (
        gathered.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
        and summed.tolist() == [2 * first + 1, 2 * first + 3]
        and swapped.tolist() == [first, first + 1, first + 1, first + 2]
    )


def test_names_of_older_versions_of_pytorch() -> None:
    assert run_ranks(2, old_names) == [True, True]


# ---- threads


def kept_rows(rank: int, mesh: ThreadMesh) -> torch.Tensor:
    return placement.rows_on(contiguous(8, 2), 0, torch.device(mesh.device_type))


def test_ranks_share_no_tensors_of_caches(device: str) -> None:
    """A rank could read a tensor that another rank's stream has not written yet."""
    here = placement.rows_on(contiguous(8, 2), 0, torch.device(device))
    first, second = run_ranks(2, kept_rows, device=device)
    assert torch.equal(first, second)
    assert len({id(x) for x in (here, first, second)}) == 3
    assert placement.rows_on(contiguous(8, 2), 0, torch.device(device)) is here


class Meeting(torch.autograd.Function):
    """The identity; its backward sums over the ranks."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient.clone(), ctx.mesh), None


def backwards(rank: int, mesh: ThreadMesh) -> float:
    x = torch.ones(1, device=mesh.device_type, requires_grad=True)
    (Meeting.apply(x, mesh) * (rank + 1)).sum().backward()
    return x.grad.item()


def test_backwards_that_wait_for_each_other_end(device: str) -> None:
    assert run_ranks(4, backwards, device=device) == [10.0] * 4
