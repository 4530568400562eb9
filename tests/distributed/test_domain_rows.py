"""Law: rows of a sharded tensor stay at their owners, and rows by a mask are in their order."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from longshard.domain.domain import Axis, Domain, balanced, sized
from longshard.domain.tensor import DomainOperatorError, DomainTensor
from longshard.domain.transfer import gather
from longshard.sharding import exchange as door
from longshard.sharding.layout import AxisLayout
from scripts.gpu_blocks.block import largest
from tests.distributed.domain_cases import local, meshes
from tests.distributed.domain_ones import made
from tests.distributed.pool import WorkerPool


def added_over_the_same_ranks(x: Any, _: Any) -> Any:
    """Rows by numbers that are sharded over the ranks that share the columns."""
    x = x[0]
    return x.index_add(0, x[0].detach().abs().long().clamp(max=2), x.T @ x)


def sampled_over_the_same_ranks(x: Any, _: Any) -> Any:
    """Rows of fields are sharded over the ranks that share the samples of the grid."""
    products = torch.einsum("an,bh->nabh", x[:, 0], x[:, 0])
    grid = products.permute(0, 1, 3, 2).tanh()
    return F.grid_sample(products.permute(3, 1, 0, 2), grid, align_corners=False)


ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "added over the same ranks": added_over_the_same_ranks,
    "sampled over the same ranks": sampled_over_the_same_ranks,
    "put together": lambda x, y: torch.cat([y[:, :, :1], x, y], 2),
    "taken again": lambda x, y: torch.cat([y[:, :, :1], x], 2)[:, :, 1:] - y,
    "a row": lambda x, _: x[:, :, 3] + x[:, :, -1],
    "every second": lambda x, _: x[:, :, 1::2],
    "every third of two": lambda x, y: torch.cat([x, y], 2)[:, :, 2:-1:3],
}


def rows_case() -> dict[str, float]:
    """Largest errors of functions of rows that two ranks have as 3 + 4, and of their gradients."""
    errors = {}
    with meshes() as (mesh, *_):
        whole = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        domain = Domain({2: Axis(sized((3, 4)), mesh.get_group())})
        for name, function in ROWS.items():
            x, local_x = whole.clone().requires_grad_(), local(whole, domain).requires_grad_()
            shards = (DomainTensor(part, domain) for part in (local_x, local_x.sin()))
            expected, got = function(x, x.sin()), function(*shards)
            errors[name] = (gather(got).local - expected).abs().max().item()
            (expected * expected.detach().cos()).sum().backward()
            shares = 1 if got.domain.axes else 2  # what every rank has whole counts once a rank
            ((got.local * local(expected.detach().cos(), got.domain)).sum() / shares).backward()
            errors[f"gradient of {name}"] = (local_x.grad - local(x.grad, domain)).abs().max().item()
    return errors


def test_rows_stay_at_their_owners(pool: WorkerPool) -> None:
    for errors in pool.run(2, rows_case):
        assert errors.keys() >= ROWS.keys()
        assert largest(*errors.values()) < 1e-14, errors


def messages_of_attention() -> tuple[dict[str, int], int]:
    """Calls of collectives by kind, and bytes of K and V that this rank has sent, in a forward; then a backward."""
    with meshes() as (mesh, *_):
        x = made((5, 1, 0, 4), mesh)
        q = DomainTensor(x.local.requires_grad_(), x.domain)
        door.calls.clear()
        door.bytes_sent.clear()
        out = F.scaled_dot_product_attention(q, q * 2, q.sin())
        counts = dict(door.calls), sum(door.bytes_sent.values())
        out.local.sum().backward()
        return counts


def test_no_rank_has_all_keys_and_values(pool: WorkerPool) -> None:
    results = pool.run(4, messages_of_attention)
    assert all(set(kinds) <= {"kv"} for kinds, _ in results)
    rows, row = 10, 2 * 4 * 5 * 8 * 2  # of keys and values together, in bytes
    assert sum(sent for _, sent in results) == rows * row * 2  # each comes to the two other ranks that have queries


def rows_by_masks() -> list[bool]:
    """Return whether masked rows have the order of the whole tensor, if later rows are on earlier ranks."""
    results = []
    with meshes() as (mesh, *_):
        x = torch.arange(3 * 9 * 2.0).view(3, 9, 2)
        for ranges in ((((4, 9),), ((0, 4),)), (((0, 2), (7, 9)), ((2, 7),)), ((), ((0, 9),))):
            domain = Domain({1: Axis(AxisLayout("drawn", 9, ranges), mesh.get_group())})
            for mask in (x % 5 < 2, (x % 7 < 3)[..., 0], x < 0):
                shown = DomainTensor(local(x, domain), domain)[mask]
                results.append(torch.equal(gather(shown).local, x[mask]))
    return results


def rows_for_a_mask() -> list[str]:
    """Return the errors of rows that cannot be assigned to a mask, on ranks that share two of its dimensions or one."""
    messages = []
    with meshes() as (mesh, *_):
        groups = init_device_mesh("cpu", (2, mesh.size() // 2)).get_all_groups()
        domain = Domain({dim: Axis(balanced(4, group.size()), group) for dim, group in enumerate(groups)})
        x = DomainTensor(torch.zeros(domain.local_shape([4, 4])), domain)
        for mask, rows in ((torch.ones(4, 4) > 0, 16), (torch.ones(4) > 0, 3), (torch.ones(3) > 0, 3)):
            try:
                x[mask] = torch.zeros(rows, *[4] * (2 - mask.ndim))
            except (DomainOperatorError, IndexError) as error:
                messages.append(str(error))
    return messages


def test_rows_for_a_mask_fit_it(pool: WorkerPool) -> None:
    for messages in pool.run(4, rows_for_a_mask):
        assert "rows for a mask of several sharded dimensions; use torch.where" in messages[0]
        assert messages[1:] == [
            "a mask that shows 4 rows got 3 rows",
            "a mask of shape (3,) does not fit the first dimensions of (4, 4); use a whole mask, "
            "not the mask of a shard",
        ]


def test_rows_by_a_mask_are_in_their_order(pool: WorkerPool) -> None:
    assert pool.run(2, rows_by_masks) == [[True] * 9] * 2
