"""Law: a function of torch gives for a sharded `DomainTensor` what it gives for the whole tensor, with its gradients.

Layouts are random, with shards of 0 and 1 rows and several ranges a rank. What has no rule is refused by name.
"""

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.distributed.domain_cases import DomainCase, check, error, layout_of, local, meshes, worst
from tests.distributed.pool import WorkerPool
from tests.distributed.tensor_cases import FAMILIES
from tests.slow import slow
from trainer.distributed.domain_parallel.domain import Axis, Domain, balanced, sized
from trainer.distributed.domain_parallel.tensor import DomainOperatorError, DomainTensor
from trainer.distributed.domain_parallel.transfer import gather
from trainer.distributed.sharding import exchange as door
from trainer.distributed.sharding.layout import AxisLayout

TIMES = (1, pytest.param(12, marks=pytest.mark.slow))


def draw(family: str, seed: int) -> DomainCase:
    """The next case, so that each comes as often as any other."""
    return FAMILIES[family][seed % len(FAMILIES[family])]


def cases(family: str, numbers: range) -> list[tuple[float, str]]:
    count = iter(numbers)

    def drawn(_: random.Random) -> DomainCase:
        return draw(family, next(count))

    return worst(drawn, numbers)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_equal_those_of_a_whole_tensor(pool: WorkerPool, family: str, world_size: int, times: int) -> None:
    number = times * len(FAMILIES[family])
    check(pool.run(world_size, cases, family, range(world_size * number, (world_size + 1) * number)))


X = (2, 4, 6, 5)  # rows of dimension 2 are 4 + 2, or 2 + 4 in `other`
USES: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "unhandled function": (lambda x, _: torch.fft.hfft(x), "fft_hfft of a tensor of shape (2, 4, 6, 5), sharded in d"),
    "unhandled method": (lambda x, _: x.nonzero(), "nonzero of a tensor of shape (2, 4, 6, 5), sharded in dimension 2"),
    "where of one": (lambda x, _: torch.where(x > 0), "where of"),
    "unhandled method in place": (lambda x, _: x.random_(), "random_ of a tensor of shape (2, 4, 6, 5), sharded in d"),
    "a plain tensor in place": (lambda x, _: torch.zeros(*X).double().add_(x), "add_ of .* not the result's axes"),
    "in place of a whole tensor": (
        lambda x, _: DomainTensor(torch.zeros(X).double(), Domain({})).add_(x),
        "add_ of .* not the result's axes",
    ),
    "out": (lambda x, _: torch.add(x, x, out=x), "add of .* the argument `out`"),
    "one number": (lambda x, _: float(x), "float of a tensor"),
    "truth of many": (lambda x, _: 1 if x else 0, "bool of a tensor"),
    "item": (lambda x, _: x[:1, :1, :1, :1].item(), "item of a tensor of shape (1, 1, 1, 1)"),
    "view as a type": (lambda x, _: x.view(torch.int64), "a view as another data type"),
    "zero elements": (lambda x, _: x[:0].view(0, 4, 30), "view of"),
    "argmax of all": (lambda x, _: x.argmax(), "it works along dimension None"),
    "sharded weight": (lambda x, _: F.conv2d(torch.zeros(1, 4, 9, 9), x), "only its first argument may be sharded"),
    "indices of a pool": (lambda x, _: F.max_pool2d(x, 2, return_indices=True), "max_pool2d_with_indices of"),
    "instances": (
        lambda x, _: F.instance_norm(x, torch.zeros(4), torch.ones(4), use_input_stats=False),
        "running stat",
    ),
    "bicubic": (lambda x, _: F.interpolate(x, (3, 3), mode="bicubic"), "mode 'bicubic', or an option"),
    "antialias": (lambda x, _: F.interpolate(x, (3, 3), mode="bilinear", antialias=True), "'bilinear', or an option"),
    "roll of all": (lambda x, _: x.roll(1), "a roll of the flattened tensor; name the dimensions"),
    "norm over rows": (lambda x, _: F.layer_norm(x, (6, 5)), "it normalises over a sharded dimension"),
    "channels of a norm": (lambda x, _: F.group_norm(x.transpose(1, 2), 2), "sharded channels"),
    "channels of a convolution": (
        lambda x, _: F.conv2d(x.transpose(1, 2), torch.ones(1, 6, 1, 1).double()),
        "sharded channels",
    ),
    "a view in place": (lambda x, _: x[:, :1].add_(1), "change a `clone` of it"),
    "norm": (lambda x, _: x.norm(p=-1), "order -1"),
    "old reduction": (lambda x, _: F.mse_loss(torch.ones(X), x, reduce=False), "`reduce`, `size_average`, or a red"),
    "classes": (lambda x, _: F.cross_entropy(x.transpose(1, 2), torch.zeros(2, 4, 5).long()), "sharded classes"),
    "diagonals": (lambda x, _: torch.einsum("bchc->bh", x[..., :4]), "an index that a tensor has twice"),
    "rows by a mask": (lambda x, _: x[:, :, torch.arange(6) > 2], "a mask of truths stands alone; index by it first"),
    "rows by a tensor, changed": (lambda x, y: x.__setitem__(torch.tensor([0]), 1), "tensors of numbers that are read"),
    "a part in place": (lambda x, y: x[:, :1].__setitem__(0, 1), "change a `clone` of it"),
    "numbers of each element": (
        lambda x, y: x.scatter_add(2, torch.arange(240).view(X) % 6, y),
        "numbers that differ beside the dimension; expand them",
    ),
    "numbers of some rows": (lambda x, y: x.gather(1, torch.zeros(1, 4, 6, 5).long()), "numbers of some rows only"),
    "classes of data": (lambda x, y: F.one_hot(x.long()), "a number of classes that depends on data"),
    "repeats by a tensor": (lambda x, y: x.repeat_interleave(torch.tensor([1, 2]), 0), "repeats by a tensor"),
    "number of channels": (lambda x, y: F.prelu(x.transpose(1, 2), torch.ones(6).double()), "sharded channels"),
    "numpy": (lambda x, _: np.asarray(x), "array of a tensor of shape"),
}
"""name -> (use of two tensors of which rows of dimension 2 are sharded, what the error says)."""


def refusals() -> dict[str, str]:
    """What each use says, and how many collectives ran."""
    said = {}
    with meshes() as (mesh, *_):
        x, other = (made(sizes, mesh) for sizes in ((4, 2), (2, 4)))
        door.calls.clear()
        for name, (use, _) in USES.items():
            try:
                use(x, other)
                said[name] = "nothing"
            except DomainOperatorError as error:
                said[name] = str(error)
        said["calls"] = str(sum(door.calls.values()))
    return said


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "sizes": (lambda x: F.scaled_dot_product_attention(x, x, x[:, :, :3]), "size"),
    "channels": (lambda x: F.conv2d(x, torch.ones(1, 3, 2, 2).double()), "channel"),
    "norm of one value": (lambda x: F.instance_norm(x[:, :, :1, :1]), "more than 1 spatial element when training"),
    "no output": (lambda x: F.interpolate(x, (0, 3)), "greater than 0"),
    "mean of truths": (lambda x: (x > 0).mean(), "could not infer output dtype|must be either a floating point"),
    "a view of another size": (lambda x: x.view(7, -1), "invalid for input of size 240"),
    "sizes beside": (lambda x: torch.cat([x, x[:, :, 1:]], 1), "Sizes of tensors must match except in dimension 1"),
    "no such dimension": (lambda x: x.sum(4), "Dimension out of range"),
}
"""name -> (use that torch refuses for the whole tensor, what torch says)."""


def torch_errors() -> dict[str, str]:
    """What torch says of each use, and how many collectives ran; all rows are on rank 0."""
    said = {}
    with meshes() as (mesh, *_):
        x = made((6, 0), mesh)
        door.calls.clear()
        for name, (use, _) in WRONG.items():
            try:
                use(x)
                said[name] = "nothing"
            except (RuntimeError, ValueError, IndexError) as error:
                said[name] = str(error)
        said["calls"] = str(sum(door.calls.values()))
    return said


def test_what_torch_refuses_is_refused_on_every_rank_and_nothing_is_sent(pool: WorkerPool) -> None:
    first, second = pool.run(2, torch_errors)
    assert first == second
    assert first.pop("calls") == "0"
    for name, text in first.items():
        assert any(part in text for part in WRONG[name][1].split("|")), f"{name}: {text}"


def made(sizes: tuple[int, ...], mesh: DeviceMesh) -> DomainTensor:
    axis = Axis(sized(sizes), mesh.get_group())
    return DomainTensor(torch.ones(2, 4, axis.rows, 5, dtype=torch.float64), Domain({2: axis}))


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
    found = {}
    with meshes() as (mesh, *_):
        whole = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        domain = Domain({2: Axis(sized((3, 4)), mesh.get_group())})
        for name, function in ROWS.items():
            x, local_x = whole.clone().requires_grad_(), local(whole, domain).requires_grad_()
            shards = (DomainTensor(part, domain) for part in (local_x, local_x.sin()))
            expected, got = function(x, x.sin()), function(*shards)
            found[name] = (gather(got).local - expected).abs().max().item()
            (expected * expected.detach().cos()).sum().backward()
            shares = 1 if got.domain.axes else 2  # what every rank has whole counts once a rank
            ((got.local * local(expected.detach().cos(), got.domain)).sum() / shares).backward()
            found[f"gradient of {name}"] = (local_x.grad - local(x.grad, domain)).abs().max().item()
    return found


def test_rows_stay_at_their_owners(pool: WorkerPool) -> None:
    for found in pool.run(2, rows_case):
        assert found.keys() >= ROWS.keys()
        assert max(found.values()) < 1e-14, found


def messages_of_attention() -> tuple[dict[str, int], int]:
    """Calls of collectives by kind, and bytes of K and V that this rank has sent, in a forward; then a backward."""
    with meshes() as (mesh, *_):
        x = made((5, 1, 0, 4), mesh)
        q = DomainTensor(x.local.requires_grad_(), x.domain)
        door.calls.clear()
        door.bytes_sent.clear()
        out = F.scaled_dot_product_attention(q, q * 2, q.sin())
        found = dict(door.calls), sum(door.bytes_sent.values())
        out.local.sum().backward()
        return found


def test_no_rank_has_all_keys_and_values(pool: WorkerPool) -> None:
    results = pool.run(4, messages_of_attention)
    assert all(set(kinds) <= {"kv"} for kinds, _ in results)
    rows, row = 10, 2 * 4 * 5 * 8 * 2  # of keys and values together, in bytes
    assert sum(sent for _, sent in results) == rows * row * 2  # each comes to the two other ranks that have queries


def test_what_is_not_handled_is_refused_on_every_rank_and_nothing_is_sent(pool: WorkerPool) -> None:
    for said in pool.run(2, refusals):
        assert said.pop("calls") == "0"
        for name, text in said.items():
            assert all(part in text for part in USES[name][1].split(" .* ")), f"{name}: {text}"
            assert "`gather`ed tensors, or give it a rule" in text


def other_errors() -> list[str]:
    """What is no call of a function: iteration, a missing attribute, a shard that does not fit."""
    with meshes() as (mesh, *_):
        x = made((4, 2), mesh)
        uses = [
            lambda: [*x],
            lambda: x.no_such_name,
            lambda: DomainTensor(x.local[:, :, 1:], x.domain),
            lambda: Domain({1: x.domain.axes[2], 2: x.domain.axes[2]}),
            lambda: Domain({-1: x.domain.axes[2]}),
            lambda: pickle.dumps(x),
            lambda: torch.save({"x": x}, io.BytesIO()),
        ]
        said = []
        for use in uses:
            with pytest.raises((TypeError, AttributeError, ValueError)) as error:
                use()
            said.append(str(error.value))
        return said


def test_other_wrong_uses(pool: WorkerPool) -> None:
    for said in pool.run(2, other_errors):
        iteration, name, shard, twice, negative, *saved = said
        assert "not iterable" in iteration
        assert name == "a DomainTensor has no attribute 'no_such_name'; its shard is the attribute `local`"
        assert "does not fit its domain" in shard
        assert twice == "the dimensions [1, 2] of a domain are sharded over the same ranks; give each its own"
        assert "count from 0" in negative
        assert ["cannot be pickled or saved" in text and "save the shard `x.local`" in text for text in saved] == [
            True
        ] * 2


def whole_tensors() -> list[str]:
    """A domain of one rank and a tensor that is sharded nowhere run every function, and keep what torch returns."""
    wrong = []
    with meshes() as (mesh, *_):
        plain = torch.randn(2, 4, 3, 5, dtype=torch.float64)
        of_one = [Domain({2: Axis(sized([3]), mesh.get_group())})] if mesh.size() == 1 else []
        for domain in [Domain({}), *of_one]:
            x = DomainTensor(plain, domain)
            pairs = {
                "fft": (torch.fft.fft(x).local, torch.fft.fft(plain)),
                "sort": (x.sort(2).values.local, plain.sort(2).values),
                "max": (x.max(2).indices.local, plain.max(2).indices),
                "index": (x[:, :, 1, plain[0, 0, 0] > 0].local, plain[:, :, 1, plain[0, 0, 0] > 0]),
                "split": (x.split(2, 2)[1].local, plain.split(2, 2)[1]),
                "softmax": (x.flatten(1, 2).softmax(1).local, plain.flatten(1, 2).softmax(1)),
                "number": (torch.tensor(float(x.sum())), plain.sum().float()),
            }
            wrong += [name for name, pair in pairs.items() if not torch.equal(*pair)]
            wrong += ["item"] * (x.sum().item() != plain.sum().item())
            y = x.clone()
            y += 1
            wrong += ["in place"] * (not torch.equal(y.local, plain + 1))
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_whole_tensors_run_every_function(pool: WorkerPool, world_size: int) -> None:
    assert pool.run(world_size, whole_tensors) == [[]] * world_size


def properties() -> dict[str, object]:
    """What a sharded tensor says of itself."""
    with meshes() as (mesh, *_):
        x = made((4, 2), mesh)
        values, _ = x.max(1)
        return {
            "shape": (tuple(x.shape), x.size(), x.size(-1), x.ndim, x.dim(), x.numel(), len(x)),
            "dtype": (x.dtype, x.long().sum().dtype, x.bool().max().dtype),
            "sum": (x.long() * 2**40 + 1).sum().item(),
            "names": type(x.max(1)).__name__ + str(tuple(values.shape)),
            "same": x.add_(0) is x,
            "one local row": made((1, 5), mesh).squeeze().shape,
            "numpy": torch.equal((np.float64(2) * x - np.float32(1)).local, x.local * 2 - 1),
            "copies": [
                (y.shape, y.domain == x.domain, torch.equal(y.local, x.local), y.local is x.local)
                for y in (copy.copy(x), copy.deepcopy({"x": [x]})["x"][0])
            ],
            "repr": repr(x).split(", local")[0],
        }


def test_a_sharded_tensor_looks_like_the_whole_one(pool: WorkerPool) -> None:
    for found in pool.run(2, properties):
        shape = torch.Size(X)
        assert found == {
            "shape": (X, shape, 5, 4, 4, 240, 2),
            "dtype": (torch.float64, torch.int64, torch.bool),
            "sum": 240 * (2**40 + 1),  # exact: not added up in floats
            "names": "max(2, 6, 5)",
            "same": True,
            "one local row": shape,
            "numpy": True,
            "copies": [(shape, True, True, True), (shape, True, True, False)],
            "repr": "DomainTensor(shape=(2, 4, 6, 5)",
        }


def running_statistics() -> list[float]:
    """Errors of the statistics of nn.BatchNorm2d and nn.BatchNorm1d after three steps."""
    errors = []
    with meshes() as (mesh, *_):
        rng = random.Random(5)
        for kind, shape in ((nn.BatchNorm2d, (3, 4, 8, 7)), (nn.BatchNorm1d, (3, 4, 9))):
            ours, theirs = (kind(4, momentum=m, dtype=torch.float64) for m in (None, None))
            for step in range(3):
                x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) + 10
                domain = Domain({2: Axis(layout_of(rng, shape[2], mesh.size()), mesh.get_group())})
                ours(DomainTensor(local(x, domain), domain))
                theirs(x)
            pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
            errors += [error(a.double(), b.double()) for a, b in pairs]
    return errors


def test_batch_norm_keeps_the_running_statistics_of_one_process(pool: WorkerPool) -> None:
    assert max(value for errors in pool.run(3, running_statistics) for value in errors) <= 1e-12


def rows_by_masks() -> list[bool]:
    """Whether what a mask shows is in the order of the whole tensor, where later rows are at earlier ranks."""
    found = []
    with meshes() as (mesh, *_):
        x = torch.arange(3 * 9 * 2.0).view(3, 9, 2)
        for ranges in ((((4, 9),), ((0, 4),)), (((0, 2), (7, 9)), ((2, 7),)), ((), ((0, 9),))):
            domain = Domain({1: Axis(AxisLayout("drawn", 9, ranges), mesh.get_group())})
            for mask in (x % 5 < 2, (x % 7 < 3)[..., 0], x < 0):
                shown = DomainTensor(local(x, domain), domain)[mask]
                found.append(torch.equal(gather(shown).local, x[mask]))
    return found


def rows_for_a_mask() -> list[str]:
    """What is said of rows that cannot be given to a mask, on ranks that share two of its dimensions or one."""
    told = []
    with meshes() as (mesh, *_):
        groups = init_device_mesh("cpu", (2, mesh.size() // 2)).get_all_groups()
        domain = Domain({dim: Axis(balanced(4, group.size()), group) for dim, group in enumerate(groups)})
        x = DomainTensor(torch.zeros(domain.local_shape([4, 4])), domain)
        for mask, rows in ((torch.ones(4, 4) > 0, 16), (torch.ones(4) > 0, 3), (torch.ones(3) > 0, 3)):
            try:
                x[mask] = torch.zeros(rows, *[4] * (2 - mask.ndim))
            except (DomainOperatorError, IndexError) as error:
                told.append(str(error))
    return told


def test_rows_for_a_mask_fit_it(pool: WorkerPool) -> None:
    for told in pool.run(4, rows_for_a_mask):
        assert "rows for a mask of several sharded dimensions; use torch.where" in told[0]
        assert told[1:] == [
            "a mask that shows 4 rows got 3 rows",
            "a mask of shape (3,) does not fit the first dimensions of (4, 4)",
        ]


def test_rows_by_a_mask_are_in_their_order(pool: WorkerPool) -> None:
    assert pool.run(2, rows_by_masks) == [[True] * 9] * 2
