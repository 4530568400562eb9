"""Law: a change in place of what may be a view is refused on every rank; another one does what it does in torch.

Shards cannot tell: a slice may be all rows of one rank, and some of another one's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from longshard.domain.domain import Axis, Domain, sized
from longshard.domain.tensor import DomainOperatorError, DomainTensor
from tests.distributed.domain_cases import error, local, meshes
from tests.distributed.pool import WorkerPool
from tests.slow import slow

pytestmark = pytest.mark.about("longshard/domain/whole.py")

ALIASES: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda x: x.contiguous(),
    "contiguous slice of rows": lambda x: x[:, :, :6].contiguous(),
    "contiguous transpose": lambda x: x.transpose(2, 3).contiguous(),
    "contiguous of a permuted result": lambda x: (x.permute(0, 2, 3, 1) * 1).permute(0, 3, 1, 2).contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "channels last by to": lambda x: x.to(memory_format=torch.channels_last),
    "channels last again": lambda x: x.clone(memory_format=torch.channels_last).contiguous(),
    "reshape": lambda x: x.reshape(6, 8, 7),
    "reshape of a slice": lambda x: x[:, :, 1:7].reshape(6, 6, 7),
    "reshape of a slice of channels": lambda x: x[:, 1:].reshape(4, 8, 7),
    "flatten of a transpose": lambda x: x.transpose(1, 2).flatten(2),
    "flatten of the rest": lambda x: x.movedim(2, 0).flatten(1),
    "flatten of columns": lambda x: x[..., :1].flatten(2),
    "view": lambda x: x.view(2, 3, 56)[:, 1],
    "to": lambda x: x.to(torch.float64),
    "type": lambda x: x.double().detach(),
    "pad": lambda x: F.pad(x, (0, 0)),
    "cut": lambda x: F.pad(x, (0, -1, 0, 0)),
    "expand": lambda x: x.expand(2, 3, 8, 7),
    "dropout": lambda x: F.dropout(x, 0.0),
    "select": lambda x: x.select(1, 1).unsqueeze(0),
    "double": lambda x: x.double(),
    "softmax": lambda x: x.softmax(1),
    "halves": lambda x: x.chunk(3, 1)[0],
}
VIEWS = ALIASES.keys() - {"to", "type", "pad", "cut", "dropout", "double", "softmax"}


def aliases() -> list[str]:
    """The functions whose result has other values than torch's, or is changed in place with another effect."""
    wrong, refused = [], {}
    with meshes() as (mesh, *_):
        for sizes in ((5, 3), (6, 2), (7, 1), (1, 7), (8, 0)):
            domain = Domain({2: Axis(sized(sizes), mesh.get_group())})
            for name, function in ALIASES.items():
                whole = torch.randn(2, 3, 8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
                part = local(whole, domain)
                leaves = [whole.requires_grad_(), part.requires_grad_()]
                pairs = []
                for x in (whole * 1, DomainTensor(part * 1, domain)):
                    y, is_sharded = function(x), isinstance(x, DomainTensor)
                    if is_sharded:
                        refused.setdefault(name, set()).add(is_refused(function, x))
                    if name in VIEWS:  # a clone is changed
                        y = y.clone()
                    y += 1
                    y *= x.sum().detach()
                    pairs.append((x, y))
                (x, y), (ours, result) = pairs
                for a, b in ((ours, x), (result, y)):
                    equal = torch.allclose(a.local, local(b, a.domain), rtol=1e-12, atol=0)
                    wrong += [f"{name}, rows {sizes}"] * (not equal)
                sums = [(a * a).sum() for a in (x, ours)]
                gradients = [torch.autograd.grad(s, leaf)[0] for s, leaf in zip(sums, leaves, strict=True)]
                same = error(gradients[1] / mesh.size(), local(gradients[0], domain)) <= 1e-12
                wrong += [f"gradient of {name}, rows {sizes}"] * (not same)
    return wrong + [f"refusal of {name}" for name, outcomes in refused.items() if outcomes != {name in VIEWS}]


def is_refused(function: Callable[[Any], Any], x: Any) -> bool:
    """Return whether the function's result may not be changed in place."""
    try:
        y = function(x.clone())
        y += 0
    except DomainOperatorError:
        return True
    return False


def test_changes_in_place_are_refused_or_reach_what_they_reach_in_the_whole_tensor(pool: WorkerPool) -> None:
    assert pool.run(2, aliases) == [[], []]


def copies() -> list[str]:
    """Return the errors of a `flatten(2)` that copies, where torch has a view: changed, or used after x changed."""
    with meshes() as all_meshes:
        mesh = all_meshes[-1]
        axes = {2 + i: Axis(sized([4, 2]), group) for i, group in enumerate(mesh.get_all_groups())}
        columns = axes[3].rows if 3 in axes else 6
        x = DomainTensor(torch.ones(2, 4, columns, axes[2].rows).transpose(2, 3), Domain(axes))  # its rows do not merge
        said = []
        for use in (lambda x, y: y.mul_(2), lambda x, y: y.detach()[1:].mul_(2), lambda x, y: [x.mul_(2), y + 1]):
            with pytest.raises(DomainOperatorError) as error:
                use(x, x.flatten(2))
            said.append(str(error.value))
        assert (x.flatten(2).clone().mul_(2) + x.flatten(2)).sum() == 2 * 4 * 36 * 6
        return said


@pytest.mark.parametrize("world_size", [2, *slow(4)])
def test_a_copy_in_place_of_a_view_is_neither_changed_nor_used_when_stale(pool: WorkerPool, world_size: int) -> None:
    for said in pool.run(world_size, copies):
        assert ["may be a copy where torch has a view" in text for text in said] == [True] * 3
        assert ["that tensor was changed in place since" in text for text in said] == [False, False, True]
