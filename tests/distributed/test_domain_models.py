"""Law: unchanged models of transformers and diffusers run on sharded inputs.

Outputs, every gradient and the running statistics equal one process. A model that cannot run is refused first.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from longshard.domain.domain import Axis, Domain, sized
from longshard.domain.modules import NeighborhoodAttention, parallelize
from longshard.domain.tensor import DomainOperatorError, DomainTensor
from longshard.sharding import exchange as door
from longshard.sharding import rows as sharded_rows
from longshard.sharding.layout import AxisLayout
from scripts.gpu_blocks.block import largest
from tests.distributed.domain_cases import error, local, meshes
from tests.distributed.domain_models import MODELS, SHAPE, Circular
from tests.distributed.pool import WorkerPool

TOLERANCE = 1e-11


def run(model: nn.Module, x: torch.Tensor | DomainTensor, others: tuple) -> list:
    """Return the outputs of a training step."""
    torch.manual_seed(3)
    return outputs(model(x, *others))


def outputs(out: Any) -> list:
    """The tensors of a result: the last hidden state, pooled ones, a sample."""
    if isinstance(out, torch.Tensor | DomainTensor):
        return [out]
    return [value for value in out.to_tuple() if isinstance(value, torch.Tensor | DomainTensor)]


def domain_on(mesh: DeviceMesh, width: int = SHAPE[3]) -> Domain:
    """Uneven: rows are 11 + 21, and on 2 x 2 ranks columns 27 and the others."""
    h, *w = mesh.get_all_groups()
    columns = [(3, Axis(sized([27, width - 27]), group)) for group in w]
    return Domain(dict([(2, Axis(sized([11, 21]), h)), *columns]))


def piece_domain(mesh: DeviceMesh, _: int) -> Domain:
    """Return a domain in which the first rank has both ends, and the second rank the middle."""
    layout = AxisLayout("pieces", 32, (((0, 5), (25, 32)), ((5, 25),)))
    return Domain({2: Axis(layout, mesh.get_all_groups()[0])})


def compare(name: str, mesh: DeviceMesh, domain: Domain, fault: bool) -> dict[str, float]:
    """Return the errors of outputs, gradients and buffers, relative to the largest of their kind."""
    torch.manual_seed(0)
    case = MODELS[name]
    ours, theirs = (case.make().double().train() for _ in range(2))
    keys = [*ours.state_dict()]
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(case.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, shard = x.clone().requires_grad_(), local(x, domain).requires_grad_()
    sharded = DomainTensor(shard, domain)
    predicted = outputs(parallelize(ours, sharded, *case.others)) if case.checked else None
    errors = {"keys": float([*ours.state_dict()] != keys)}
    expected, got = run(theirs, whole, case.others), run(ours, sharded, case.others)
    for number, (a, b, meta) in enumerate(zip(got, expected, predicted or got, strict=True)):
        errors[f"output {number}"] = error(a.local, local(b, a.domain).detach(), b)
        errors[f"told {number}"] = float((meta.domain, meta.shape, meta.dtype) != (a.domain, a.shape, a.dtype))
    cotangents = [torch.randn(b.shape, dtype=b.dtype, generator=torch.Generator().manual_seed(2)) for b in expected]
    sum((b * c).sum() for b, c in zip(expected, cotangents, strict=True)).backward()
    # An output that every rank has whole counts once a rank, so each rank takes its share.
    local_cotangents = [share(c, a.domain, domain) for a, c in zip(got, cotangents, strict=True)]
    lost = mock.patch.object(sharded_rows, "all_to_all", nothing_arrives) if fault else nullcontext()
    with lost:
        sum((a.local * c).sum() for a, c in zip(got, local_cotangents, strict=True)).backward()
    errors["gradient of the input"] = error(shard.grad, local(whole.grad, domain), whole.grad)
    scale = torch.stack([p.grad.norm() for p in theirs.parameters() if p.grad is not None]).max()
    for (key, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if q.grad is None:  # such as a token of masked patches
            errors[f"no gradient of {key}"] = float(p.grad is not None)
            continue
        torch.distributed.all_reduce(p.grad)
        # A gradient may be zero up to rounding, as for a bias before a norm. Compare it with the largest gradient.
        errors[f"gradient of {key}"] = error(p.grad, q.grad, q.grad if q.grad.norm() > 1e-9 * scale else scale)
    for (key, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        a, b = a.double(), b.double()
        errors[f"buffer {key}"] = error(a, b, b if b.norm() > 1e-6 else torch.ones(()))  # a mean may be rounding alone
    return errors


def share(cotangent: torch.Tensor, result: Domain, domain: Domain) -> torch.Tensor:
    local_cotangent = local(cotangent, result)
    for axis in domain.axes.values():
        if all(a.group is not axis.group for a in result.axes.values()):
            local_cotangent = local_cotangent * (axis.rank + 1) / sum(range(axis.degree + 1))
    return local_cotangent


all_to_all = door.all_to_all


def nothing_arrives(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, door.Pending]:
    received, pending = all_to_all(*args, **kwargs)
    pending.wait()
    return torch.zeros_like(received), door.Pending()


DOMAINS: dict[str, Callable[[DeviceMesh, int], Domain]] = {"sizes": domain_on, "pieces": piece_domain}


def models(names: list[str], layout: str, fault: bool = False) -> dict[str, dict[str, float]]:
    """Errors of each model, on the mesh with most dimensions."""
    with meshes() as all_meshes:
        mesh = all_meshes[-1]
        return {name: compare(name, mesh, DOMAINS[layout](mesh, MODELS[name].shape[3]), fault) for name in names}


def check(results: list[dict[str, dict[str, float]]]) -> None:
    for errors_by_model in results:
        for name, errors in errors_by_model.items():
            assert len(errors) > 5, name
            assert {key: value for key, value in errors.items() if not value <= TOLERANCE} == {}, name


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_one_process_on_two_ranks(pool: WorkerPool, name: str) -> None:
    check(pool.run(2, models, [name], "sizes"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_equal_one_process_on_a_square_of_ranks(pool: WorkerPool, name: str) -> None:
    check(pool.run(4, models, [name], "sizes"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "convnext", "Circular", "vit", "swin", "segformer", "fourier"])
def test_models_equal_one_process_with_two_ranges_a_rank(pool: WorkerPool, name: str) -> None:
    check(pool.run(2, models, [name], "pieces"))


@pytest.mark.slow
def test_the_comparison_sees_that_gradients_of_halos_are_lost(pool: WorkerPool) -> None:
    for errors_by_model in pool.run(2, models, ["resnet"], "sizes", True):
        errors = errors_by_model["resnet"]
        assert errors["output 0"] <= TOLERANCE
        assert errors["gradient of the input"] > 1e-3
        assert max(value for key, value in errors.items() if key.startswith("gradient of e")) > 1e-3


class Refused(nn.Module):
    """A model with one submodule that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(nn.ReLU(inplace=True), nn.LocalResponseNorm(3)))

    def forward(self, x):
        return self.blocks(self.stem(x))


def preparations() -> dict[str, Any]:
    """Return observations of `parallelize`: its errors, its changes of a model, and its output."""
    with meshes() as all_meshes:
        mesh = all_meshes[-1]
        domain = domain_on(mesh)
        x = DomainTensor(local(torch.ones(SHAPE), domain), domain)
        door.calls.clear()
        results: dict[str, Any] = {}
        refused = Refused()
        with pytest.raises(DomainOperatorError) as error:
            parallelize(refused, x)
        results["refused"] = str(error.value)
        results["statistics"] = int(refused.blocks[0].num_batches_tracked)
        results["hooks"] = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in refused.modules())
        with pytest.raises(DomainOperatorError) as error:
            parallelize(MODELS["latents"].make(), x)
        results["value"] = str(error.value)
        model = Circular()
        parameters = [*model.named_parameters()]
        y = parallelize(model, x)
        results["classes"] = [type(layer).__name__ for layer in model.layers]
        results["parameters"] = all(a[1] is b[1] for a, b in zip(parameters, model.named_parameters(), strict=True))
        results["output"] = (y.is_meta, tuple(y.shape), y.domain.axes[2].layout.ranges)
        results["calls"] = sum(door.calls.values())
        one = nn.Conv2d(3, 3, 3, padding="same", padding_mode="circular")
        parallelize(one, x)
        results["layout"] = one(x).domain == x.domain
        results["whole"] = torch.equal(one(torch.ones(SHAPE)), nn.Conv2d.forward(one, torch.ones(SHAPE)))
        return results


def test_what_parallelize_says_before_any_data(pool: WorkerPool) -> None:
    for results in pool.run(2, preparations):
        assert results["refused"].startswith(
            "module blocks.1.1: local_response_norm of a tensor of shape (2, 4, 32, 40), sharded in dimension 2, is "
            "not handled: it has no rule for sharded axes; call it on `gather`ed tensors, or give it a rule"
        )
        assert results["value"].startswith("module model: the forward reads the value of a tensor (Tensor.item()")
        assert "run the model without `parallelize`" in results["value"]
        assert results["classes"] == ["Conv2d", "DomainConv2d", "DomainConv2d", "Conv2d"]
        assert results["parameters"]
        assert results["output"] == (True, SHAPE, (((0, 11),), ((11, 32),)))
        assert (results["calls"], results["statistics"], results["hooks"]) == (3, 0, 0)  # a hash of each call
        assert results["layout"]
        assert results["whole"]


class Hooked(nn.Module):
    """A convolution, and a head on a tensor that every rank has whole."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.conv, self.head, self.use_reentrant = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 2), use_reentrant

    def forward(self, x):
        if self.use_reentrant is not None:
            return checkpoint(self.conv, x, use_reentrant=self.use_reentrant)
        return self.head(self.conv(x).mean((2, 3)).local)


class Swish(torch.autograd.Function):
    """A function as models bring it."""

    @staticmethod
    def forward(ctx, x):
        return x * x.sigmoid()


def lost_gradients() -> dict[str, str]:
    """Return the errors of uses that lose gradients or skip hooks in torch, by `parallelize` and at the first use."""
    said = {}
    with meshes() as all_meshes:
        domain = domain_on(all_meshes[-1])
        x = DomainTensor(local(torch.ones(SHAPE), domain).requires_grad_(), domain)

        def note(name: str, function: Callable, *args: Any) -> None:
            with pytest.raises(DomainOperatorError) as error:
                function(*args)
            said[name] = str(error.value)

        note("parallelize, reentrant", parallelize, Hooked(use_reentrant=True), x)
        note("reentrant", Hooked(use_reentrant=True), x)
        note("function", Swish.apply, x)
        model = Hooked()
        model.head.register_backward_hook(lambda *_: None)  # of plain tensors: torch runs it
        parallelize(model, x)
        model.conv.register_backward_hook(lambda *_: None)
        note("parallelize, an old hook", parallelize, model, x)
        with pytest.MonkeyPatch.context() as patch:  # one kind or the other for the life of a process
            patch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)
            everywhere = nn.modules.module.register_module_backward_hook(lambda *_: None)
            note("parallelize, an old hook of all modules", parallelize, Hooked(), x)
            everywhere.remove()
        kept = Hooked(use_reentrant=False)
        parallelize(kept, x)
        (kept(x).local.sum() + kept(x).local.sum()).backward()
        assert kept.conv.weight.grad.norm() > 0
        with torch.inference_mode():
            assert kept(x).shape == (2, 4, 32, 40)
    return said


def test_what_loses_gradients_is_refused(pool: WorkerPool) -> None:
    for said in pool.run(2, lost_gradients):
        assert len(said) == 5
        for name, text in said.items():
            about = "use `register_full_backward_hook`" if "hook" in name else "inside an autograd.Function"
            assert about in text, f"{name}: {text}"


class Drops(nn.Module):
    """Dropout of a tensor that every rank has whole."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x):
        return F.dropout(x.mean((2, 3)), self.p)


def disagreements() -> dict[str, str]:
    """Return the errors of `parallelize` for inputs that ranks describe differently."""
    said = {}
    with meshes() as all_meshes:
        group = all_meshes[-1].get_all_groups()[0]
        rank = group.rank()

        def shard(rows: tuple[int, int], columns: int = 8, dtype: torch.dtype = torch.float32) -> DomainTensor:
            return DomainTensor(
                torch.ones(2, 3, rows[rank], columns, dtype=dtype), Domain({2: Axis(sized(rows), group)})
            )

        inputs = {
            "layout": shard((5, 3) if rank else (5, 4)),
            "shape": shard((5, 3), 8 + rank),
            "type": shard((5, 3), dtype=torch.float64 if rank else torch.float32),
        }
        for name, x in inputs.items():
            with pytest.raises(ValueError) as error:
                parallelize(Circular(), x)
            said[name] = str(error.value)
        for name, p, seed in (("other seeds", 0.5, rank), ("other seeds, no draw", 0.0, rank), ("one seed", 0.5, 7)):
            torch.manual_seed(seed)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                parallelize(Drops(p), shard((5, 3)))
            said[name] = " ".join(str(w.message) for w in caught)
    return said


def test_inputs_that_ranks_describe_differently_are_refused(pool: WorkerPool) -> None:
    for rank, said in enumerate(pool.run(2, disagreements)):
        assert all("ranks of the domain describe their tensors diff" in said[n] for n in ("layout", "shape", "type"))
        assert str((2, 3, 8 if rank else 9, 8)) in said["layout"]
        assert "have different random states" in said["other seeds"]
        assert said["other seeds, no draw"] == said["one seed"] == ""


def attention_modules() -> dict[str, float]:
    """Return errors of NeighborhoodAttention on sharded tensors, and on mixtures of sharded and whole tensors."""
    errors = {}
    with meshes() as all_meshes:
        domain = domain_on(all_meshes[-1])
        axes = {dim - 1: axis for dim, axis in domain.axes.items()}
        q, k, v = (
            torch.randn(2, 32, 40, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(s))
            for s in range(3)
        )
        module = NeighborhoodAttention((5, 3), is_causal=(True, False))
        expected, shards = module(q, k, v), [local(t, Domain(axes)) for t in (q, k, v)]
        sharded = [DomainTensor(t, Domain(axes)) for t in shards]
        for name, inputs in {"all": sharded, "keys": [q, *sharded[1:]], "queries": [sharded[0], k, v]}.items():
            y = module(*inputs)
            errors[name] = error(y.local, local(expected, y.domain), expected)
        first = next(iter(axes.values()))
        one = Domain({0: Axis(sized([0, 1] + [0] * (first.degree - 2)), first.group)})
        y = module(DomainTensor(local(q[:1], one), one), k[:1], v[:1])
        errors["a batch of one"] = error(y.local, local(expected[:1], one), expected[:1])
        joined = torch.cat([DomainTensor(local(q[:1], one), one), k[:1]], -1)  # nothing is broadcast here
        whole = torch.cat([q[:1], k[:1]], -1)
        errors["a batch of one beside a whole one"] = error(joined.local, local(whole, one), whole)
    return errors


def test_neighborhood_attention_is_a_module(pool: WorkerPool) -> None:
    for errors in pool.run(2, attention_modules):
        assert largest(*errors.values()) <= 1e-12
