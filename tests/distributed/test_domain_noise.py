"""Law: random numbers of a `DomainTensor` are the same on every layout, and on one process that has it whole."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMScheduler, EulerAncestralDiscreteScheduler
from torch import nn
from torch.utils.checkpoint import checkpoint

from longshard.domain.domain import Axis, Domain, sized
from longshard.domain.gradients import average_gradients
from longshard.domain.tensor import DomainTensor
from longshard.domain.transfer import gather
from scripts.gpu_blocks.block import largest
from tests.distributed.domain_cases import error, layout_of, local, meshes
from tests.distributed.domain_models import MODELS
from tests.distributed.pool import WorkerPool
from tests.slow import slow

SHAPE = (3, 4, 8, 6)


def encoder(x: Any) -> Any:
    """An encoder with dropout of attention's weights, and of the results of attention and feed-forward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(6, 2, 8, 0.2, batch_first=True, dtype=torch.float64)
    return layer(x[:, 0]).unsqueeze(1)


def recomputed(x: Any) -> Any:
    return checkpoint(lambda x: F.dropout(x.sin() * x, 0.5), x, use_reentrant=False)


def in_place(x: Any) -> Any:
    y = x * 1
    return F.dropout(y, 0.4, inplace=True) + y


def grouped(x: Any) -> Any:
    q = x.unflatten(1, (4, 1)).flatten(1, 2)
    return F.scaled_dot_product_attention(q, x[:, :2], x[:, 2:], dropout_p=0.3, is_causal=True, enable_gqa=True)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3) + nn.Dropout(0.1)(x) * 2,
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3) + F.feature_alpha_dropout(x, 0.5),
    "channels": lambda x: F.dropout2d(x, 0.5) + F.dropout1d(x[:, 0], 0.5).unsqueeze(1),
    "like": lambda x: x * torch.randn_like(x) + torch.rand_like(x) + torch.randint_like(x, 2, 9),
    "float32": lambda x: x * torch.randn_like(x, dtype=torch.float32) + torch.rand_like(x.float()),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()) + torch.zeros_like(x).bernoulli(0.3),
    "filled": lambda x: torch.zeros_like(x).normal_(1, 2) * x + torch.ones_like(x).uniform_(-1, 3),
    "everything": lambda x: F.dropout(x, 1.0) + x,
    "in place": in_place,
    "recomputed": recomputed,
    "attention": grouped,
    "encoder": encoder,
}


def draws() -> dict[str, list[float]]:
    """Errors of each function's result and gradient, on random layouts, against one tensor that is whole."""
    errors: dict[str, list[float]] = {}
    rng, x = random.Random(1), torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with meshes() as all_meshes:
        for number, (name, function) in enumerate(FUNCTIONS.items()):
            mesh = all_meshes[number % len(all_meshes)]
            dims = rng.sample([0, 2, 3] if name not in ("encoder", "attention") else [0, 2], mesh.ndim)
            groups = zip(dims, mesh.get_all_groups(), strict=True)
            domain = Domain({d: Axis(layout_of(rng, SHAPE[d], group.size()), group) for d, group in groups})
            leaves = x.clone().requires_grad_(), local(x, domain).requires_grad_()
            results = []
            for leaf, of in zip(leaves, (Domain({}), domain), strict=True):
                torch.manual_seed(5)
                y = function(DomainTensor(leaf, of))
                results.append(gather(y).local)
                (results[-1] * results[0].detach().cos()).sum().backward()
            copies = mesh.size()  # what every rank has whole counts once a rank
            errors[name] = [
                error(results[1], results[0]),
                error(leaves[1].grad / copies, local(leaves[0].grad, domain), leaves[0].grad),
            ]
    return errors


@pytest.mark.parametrize("world_size", [3, *slow(1, 2, 4)])
def test_every_layout_draws_the_same(pool: WorkerPool, world_size: int) -> None:
    for errors_of_rank in pool.run(world_size, draws):
        assert errors_of_rank.keys() == FUNCTIONS.keys()
        assert {name: errors for name, errors in errors_of_rank.items() if max(errors) > 1e-12} == {}


SCHEDULERS = {
    "DDPM": DDPMScheduler(num_train_timesteps=20),
    "ancestral": EulerAncestralDiscreteScheduler(num_train_timesteps=20),
    "DDIM": DDIMScheduler(num_train_timesteps=20),
}


def diffused(name: str) -> tuple[float, float, float]:
    """Errors of a loss of diffusion, of its gradients, and of a sample of four steps, on rows of two ranks."""
    scheduler, x = SCHEDULERS[name], torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(1)).double()
    with meshes() as (mesh, *_):
        domain = Domain({2: Axis(sized((5, 11)), mesh.get_group())})
        losses, gradients, samples = [], [], []
        for of in (Domain({}), domain):
            torch.manual_seed(0)
            scheduler.set_timesteps(20)
            model, steps = MODELS["unet"].make().double(), scheduler.timesteps[torch.tensor([3, 17])]
            clean = DomainTensor(local(x[:, :2], of), of)
            noise = torch.randn_like(clean)
            noisy = torch.cat([scheduler.add_noise(clean, noise, steps), clean[:, :1]], 1)
            loss = F.mse_loss(model(noisy, steps).sample, noise)
            loss.backward()
            if of.axes:
                average_gradients(model, mesh)
            losses.append(loss.local)
            gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
            scheduler.set_timesteps(4)
            state, generator = (
                clean,
                torch.Generator().manual_seed(2),
            )  # of the plain noise of a step, whole on each rank
            with torch.no_grad():
                for step in scheduler.timesteps:
                    seen = scheduler.scale_model_input(torch.cat([state, clean[:, :1]], 1), step)
                    state = scheduler.step(model(seen, step).sample, step, state, generator=generator).prev_sample
            samples.append(gather(state).local)
    return error(losses[1], losses[0]), error(gradients[1], gradients[0]), error(samples[1], samples[0])


@pytest.mark.parametrize("name", ["DDPM", *slow("ancestral", "DDIM")])
def test_a_diffusion_model_trains_and_samples_on_shards(pool: WorkerPool, name: str) -> None:
    for errors in pool.run(2, diffused, name):
        assert largest(*errors) <= 1e-11, errors


def moments(x: torch.Tensor) -> tuple[float, ...]:
    x = x.double()
    return x.mean().item(), x.std().item(), ((x - x.mean()) ** 3).mean().item(), ((x - x.mean()) ** 4).mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_are_distributed_as_their_names_say(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = DomainTensor(torch.ones(1000, 1000, dtype=dtype), Domain({}))
    normal, uniform = torch.randn_like(x).local, torch.rand_like(x).local
    assert moments(normal) == pytest.approx((0, 1, 0, 3), abs=0.02)
    assert moments(uniform) == pytest.approx((1 / 2, 12**-0.5, 0, 1 / 80), abs=0.003)
    assert (uniform.min() >= 0, uniform.max() <= 1) == (True, True)
    for numbers in (normal, uniform):  # no neighbour knows another one
        rows = (numbers.double() - numbers.double().mean())[:-1, :-1]
        for moved in (numbers[1:, :-1], numbers[:-1, 1:], numbers[1:, 1:]):
            assert abs((rows * moved.double()).mean().item()) < 0.005
    dropped = F.dropout(x, 0.3).local
    assert (dropped == 0).double().mean().item() == pytest.approx(0.3, abs=0.003)
    assert dropped[dropped > 0].unique().tolist() == pytest.approx([1 / 0.7], rel=0.01)
    channels = F.dropout2d(x.view(100, 100, 10, 10), 0.4).local.view(10_000, -1)
    assert (channels.amin(1) == channels.amax(1)).all()
    assert (channels == 0).double().mean().item() == pytest.approx(0.4, abs=0.02)
    selu = F.alpha_dropout(torch.randn_like(x), 0.2).local
    assert moments(selu)[:2] == pytest.approx((0, 1), abs=0.02)


def test_two_calls_draw_other_numbers() -> None:
    torch.manual_seed(0)
    x = DomainTensor(torch.ones(100, 100), Domain({}))
    a, b = F.dropout(x, 0.5).local, F.dropout(x, 0.5).local
    assert 0.4 < (a == b).float().mean().item() < 0.6


def test_bounds_and_moments_may_be_given_by_keyword() -> None:
    torch.manual_seed(0)
    x = DomainTensor(torch.zeros(50, 50), Domain({}))
    assert torch.randint_like(x, low=2, high=9).local.unique().tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert torch.randint_like(x, 2, high=9).local.unique().tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert x.clone().normal_(mean=5, std=0.1).local.mean().item() == pytest.approx(5, abs=0.02)
    assert x.clone().uniform_(**{"from": 3, "to": 4}).local.min().item() >= 3
    with pytest.raises(TypeError, match="a generator, because its numbers would depend on the rank's shard"):
        x.clone().normal_(generator=torch.Generator())
