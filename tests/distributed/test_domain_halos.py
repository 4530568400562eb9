"""Law: a norm that sends the halo of the convolution behind it gives the numbers of one process, in fewer messages."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from longshard.domain import Axis, Domain, DomainTensor, parallelize, sized
from longshard.sharding import exchange as door
from tests.distributed.domain_cases import NUMBERS, TOLERANCE, error, layout_of, local, meshes, seeds
from tests.distributed.pool import WorkerPool
from tests.slow import slow

BETWEEN: tuple[Callable[[], nn.Module], ...] = (
    nn.Identity,
    nn.SiLU,
    lambda: nn.ReLU(inplace=True),
    lambda: nn.Sequential(nn.GELU(), nn.Hardtanh(inplace=True)),
)


class Chain(nn.Module):
    """Norm, functions by element, and a convolution or a pool, beside which the functions' result is used too."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.norm = rng.choice([nn.GroupNorm(2, 4), nn.GroupNorm(4, 4, affine=False), nn.BatchNorm2d(4)])
        self.between = rng.choice(BETWEEN)()
        stride, self.is_checkpointed = rng.choice([1, 1, 2, 3]), rng.random() < 0.3
        kernel, dilation = (rng.choice([1, 2, 3, 3, 5]), rng.choice([1, 3])), rng.choice([1, 1, 2])
        padding = rng.choice([0, (kernel[0] // 2, kernel[1] // 2)])
        mode = rng.choice(["zeros", "circular"])
        self.conv = nn.Conv2d(4, 2, kernel, stride, padding, (1, dilation), padding_mode=mode)
        if rng.random() < 0.2:
            self.conv = rng.choice([nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)])
        for p in self.parameters():
            nn.init.normal_(p)

    def block(self, x):
        y = self.between(self.norm(self.stem(x)))
        return self.conv(y), y

    def forward(self, x):
        out, y = checkpoint(self.block, x, use_reentrant=False) if self.is_checkpointed else self.block(x)
        return out.tanh(), y.square().mean(1, keepdim=True)


def compare(seed: int, all_meshes: list) -> dict[str, float]:
    """Return the errors of outputs, running statistics, gradients and second derivatives of a random chain."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    ours = Chain(rng).double()
    theirs = Chain(random.Random(seed)).double()
    theirs.load_state_dict(ours.state_dict())
    shape = rng.choice([1, 3]), 3, rng.randint(7, 14), rng.randint(7, 11)
    groups = rng.choice(all_meshes).get_all_groups()
    dims = rng.sample([2, 3, 0] if shape[0] > 1 else [2, 3], len(groups))
    domain = Domain({d: Axis(layout_of(rng, shape[d], g.size()), g) for d, g in zip(dims, groups, strict=True)})
    x, around = torch.randn(2, *shape, dtype=torch.float64).unbind()
    parallelize(ours, DomainTensor(local(x, domain), domain))
    whole, shard = x.clone().requires_grad_(), local(x, domain).requires_grad_()
    expected, got = theirs(whole), ours(DomainTensor(shard, domain))
    errors = {
        f"output {i}": error(a.local, local(b, a.domain), b) for i, (a, b) in enumerate(zip(got, expected, strict=True))
    }
    errors |= {
        f"buffer {key}": error(a.double(), b.double())
        for (key, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True)
    }
    cotangents = [torch.randn(b.shape, dtype=b.dtype) for b in expected]
    is_twice = seed % 2 == 0 and not ours.is_checkpointed

    def gradients(model: nn.Module, x: torch.Tensor, results: list, cotangents: list) -> list[torch.Tensor]:
        total = sum((a * c).sum() for a, c in zip(results, cotangents, strict=True))
        first = torch.autograd.grad(total, [x, *model.parameters()], create_graph=is_twice)
        if not is_twice:
            return [*first]
        rows = local(around, domain) if x is shard else around
        steepness = (first[0] * rows).sum()
        return [*first, *torch.autograd.grad(steepness, [x, *model.parameters()], materialize_grads=True)]

    wanted = gradients(theirs, whole, expected, cotangents)
    mine = [local(c, a.domain) for a, c in zip(got, cotangents, strict=True)]
    found = gradients(ours, shard, [a.local for a in got], mine)
    scale = max(g.norm() for g in wanted)
    number = len(wanted) // (2 if is_twice else 1)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if i % number:
            torch.distributed.all_reduce(a := a.contiguous())
            errors[f"gradient {i}"] = error(a, b, b if b.norm() > 1e-6 * scale else scale)
        else:
            errors[f"gradient {i}"] = error(a, local(b, domain), b)
    return errors


def chains(numbers: range) -> list[tuple[float, str]]:
    """The largest errors of random chains."""
    found = []
    with meshes() as all_meshes:
        for seed in numbers:
            found += [(value, f"seed {seed}, {name}") for name, value in compare(seed, all_meshes).items()]
    return sorted((f for f in found if not f[0] <= 10 * TOLERANCE), reverse=True)[:5]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("world_size", [2, *slow(3), 4])
def test_chains_equal_one_process(pool: WorkerPool, world_size: int, number: int) -> None:
    assert pool.run(world_size, chains, seeds(world_size, number)) == [[]] * world_size


def uneven(height: int = 9) -> tuple[Domain, torch.Tensor]:
    """Rows as 2 + the others, and the shard of a noise."""
    with_ranks = Axis(sized([2, height - 2]), torch.distributed.group.WORLD)
    x = torch.randn(2, 3, height, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(height))
    return Domain({2: with_ranks}), x


def network(padding_mode: str = "zeros") -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 2, 3, padding=1, padding_mode=padding_mode)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.SiLU(), conv).double()


def step(model: nn.Module, x: torch.Tensor, domain: Domain) -> tuple[torch.Tensor, Counter]:
    """Return the output, and the messages of forward and backward."""
    before = Counter(door.calls)
    y = model(DomainTensor(local(x, domain).requires_grad_(), domain))
    y.local.sum().backward()
    return y.local.detach(), door.calls - before


def messages() -> dict[str, Counter | int]:
    """Messages of a step before and after `parallelize`, with another layout, in inference, and of other chains."""
    found = {}
    with meshes():
        domain, x = uneven()
        model = network()
        plain, found["before"] = step(model, x, domain)
        parallelize(model, DomainTensor(local(x, domain), domain))
        fused, found["after"] = step(model, x, domain)
        assert error(fused, plain) < 1e-14
        _, found["another layout"] = step(model, uneven(12)[1], uneven(12)[0])
        before = Counter(door.calls)
        with torch.inference_mode():
            again = model(DomainTensor(local(x, domain), domain)).local
        found["inference"] = door.calls - before
        parallelize(model, DomainTensor(local(uneven(12)[1], uneven(12)[0]), uneven(12)[0]))
        found["both layouts"] = step(model, x, domain)[1] + step(model, uneven(12)[1], uneven(12)[0])[1]
        assert error(again, plain) < 1e-14
        alone = nn.Sequential(nn.GroupNorm(1, 3), nn.Conv2d(3, 2, (1, 3))).double()  # which needs no other rows
        parallelize(alone, DomainTensor(local(x, domain), domain))
        found["hooks"] = len(alone[0]._forward_pre_hooks)
    return found


def halves() -> tuple[bool, list[float]]:
    """In bfloat16: whether a halo of the norm leaves the bits of outputs; errors of gradients without and with it."""
    outputs, errors = [], []
    with meshes():
        domain, x = uneven()
        x = x.bfloat16()  # so that only what is computed is rounded
        truth = network().bfloat16().double()
        truth(x.double()).square().sum().backward()
        wanted = torch.cat([p.grad.flatten() for p in truth.parameters()])
        for prepares in (False, True):
            model = network().bfloat16()
            shard = DomainTensor(local(x, domain), domain)
            if prepares:
                parallelize(model, shard)
            outputs.append(model(shard).local)
            outputs[-1].float().square().sum().backward()
            gradients = torch.cat([p.grad.double().flatten() for p in model.parameters()])
            torch.distributed.all_reduce(gradients)
            errors.append(error(gradients, wanted))
    return torch.equal(*outputs), errors


def test_bfloat16(pool: WorkerPool) -> None:
    for same, (without, with_halo) in pool.run(2, halves):
        assert same
        assert with_halo < 1.5 * without < 0.1


def test_one_message_a_direction(pool: WorkerPool) -> None:
    for found in pool.run(2, messages):
        assert found["before"] == {"statistics": 2, "exchange": 2}
        assert found["after"] == {"statistics": 2}
        assert found["another layout"] == found["before"]
        assert found["both layouts"] == {"statistics": 4}
        assert found["inference"] == {"statistics": 1, "exchange": 1}
        assert found["hooks"] == 0


class Changed(nn.Module):
    """The result of a norm is changed between it and the convolution."""

    def __init__(self, change: Callable) -> None:
        super().__init__()
        self.network, self.change = network("circular"), change

    def forward(self, x):
        y = self.network[:2](x)
        return self.network[3](self.change(y))


def added(y):
    y += y.detach() * 0.5
    return y


def assigned(y):
    y[:, :2] = y[:, 2:].detach().clone()
    return y


def changed_twice(y):
    y.mul_(2.0).relu_()
    return y


def other_tensor(y):
    return y + y.mean((2, 3), keepdim=True)


CHANGES = (added, assigned, changed_twice, other_tensor)


def changes() -> dict[str, float]:
    """Errors of outputs where a result was changed in place, and hooks on what lies between."""
    found = {}
    with meshes():
        domain, x = uneven()
        for change in CHANGES:
            model = Changed(change)
            whole = model(x)
            parallelize(model, DomainTensor(local(x, domain), domain))
            y = model(DomainTensor(local(x, domain), domain))
            found[change.__name__] = error(y.local, local(whole, domain), whole)
        seen: list[torch.Tensor] = []

        def watched(y):
            if y.requires_grad:
                y.register_hook(lambda g: seen.append(getattr(g, "local", g)))
            return y

        model = Changed(watched)
        model(x).square().sum().backward()
        parallelize(model, DomainTensor(local(x, domain), domain))
        model(DomainTensor(local(x, domain), domain)).local.square().sum().backward()
        found["hook"] = error(seen[1], local(seen[0], domain))
        kept: list[DomainTensor] = []
        model = Changed(lambda y: kept.append(y) or y)
        parallelize(model, DomainTensor(local(x, domain), domain))
        out = model(DomainTensor(local(x, domain), domain)).square().sum()
        for late in (lambda: kept[-1].register_hook(print), lambda: torch.autograd.grad(out, kept[-1])):
            with pytest.raises(RuntimeError, match="register a hook on the tensor before the convolution is called"):
                late()
    return found


def test_changes_and_hooks_between_norm_and_convolution(pool: WorkerPool) -> None:
    for found in pool.run(2, changes):
        assert {name: value for name, value in found.items() if not value <= TOLERANCE} == {}
        assert len(found) == len(CHANGES) + 1
