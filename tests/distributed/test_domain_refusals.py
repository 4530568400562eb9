"""Law: what a sharded `DomainTensor` cannot do is refused on every rank, and nothing is sent."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from longshard.domain.domain import Domain
from longshard.domain.tensor import DomainOperatorError, DomainTensor
from longshard.sharding import exchange as door
from tests.distributed.domain_cases import meshes
from tests.distributed.domain_ones import X, made
from tests.distributed.pool import WorkerPool

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
    "rows by a mask": (lambda x, _: x[:, :, torch.arange(6) > 2], "a boolean mask must be the only index; index by it"),
    "rows by a tensor, changed": (
        lambda x, y: x.__setitem__(torch.tensor([0]), 1),
        "tensors of numbers can only be read",
    ),
    "a part in place": (lambda x, y: x[:, :1].__setitem__(0, 1), "change a `clone` of it"),
    "numbers of each element": (
        lambda x, y: x.scatter_add(2, torch.arange(240).view(X) % 6, y),
        "numbers that differ along other dimensions; expand them",
    ),
    "numbers of some rows": (lambda x, y: x.gather(1, torch.zeros(1, 4, 6, 5).long()), "numbers of some rows only"),
    "classes of data": (lambda x, y: F.one_hot(x.long()), "a number of classes that depends on data"),
    "repeats by a tensor": (lambda x, y: x.repeat_interleave(torch.tensor([1, 2]), 0), "repeats by a tensor"),
    "number of channels": (lambda x, y: F.prelu(x.transpose(1, 2), torch.ones(6).double()), "sharded channels"),
    "numpy": (lambda x, _: np.asarray(x), "array of a tensor of shape"),
}


def refusals() -> dict[str, str]:
    """Return the error of each use, and the number of collectives."""
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


def torch_errors() -> dict[str, str]:
    """Return torch's error of each use, and the number of collectives; all rows are on rank 0."""
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


def test_what_is_not_handled_is_refused_on_every_rank_and_nothing_is_sent(pool: WorkerPool) -> None:
    for said in pool.run(2, refusals):
        assert said.pop("calls") == "0"
        for name, text in said.items():
            assert all(part in text for part in USES[name][1].split(" .* ")), f"{name}: {text}"
            assert "`gather`ed tensors, or give it a rule" in text


def other_errors() -> list[str]:
    """Return errors of uses that call no function: iteration, a missing attribute, a shard that does not fit."""
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
        assert twice == "the dimensions [1, 2] of a domain share their ranks; give each dimension ranks of its own"
        assert "must not be negative" in negative
        assert ["cannot be pickled or saved" in text and "save the shard `x.local`" in text for text in saved] == [
            True
        ] * 2
