"""Laws of stochastic rounding: without bias, the same bits for an element wherever it lies, small changes add up."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from longshard.sharding.random_bits import random_bits
from trainer.components.optimizer import build_optimizer, ensure_state, mask_update
from trainer.components.rounding import global_indices, round_stochastically
from trainer.config.schema import JobConfig, Optimizer, Training

SAMPLES = 2**18
BFLOAT16 = JobConfig(optimizer=Optimizer(state_dtype="bfloat16"))
VALUES = (1.0 + 2**-9, 1.0 + 2**-7 * 0.9, -3.3, 7e-5, -2e-30, 1e30, 0.1)


def bits(size: int, key: int = 5) -> torch.Tensor:
    return random_bits(torch.arange(size), key)


@pytest.mark.parametrize("field", [0, 16, 32])
@pytest.mark.parametrize("value", VALUES)
def test_the_mean_of_rounded_values_is_the_value(value: float, field: int) -> None:
    """The tolerance is 5 deviations of a mean of independent draws; each draw is one of two neighbours."""
    x = torch.full((SAMPLES,), value)
    rounded = round_stochastically(x, bits(SAMPLES) >> field).double()
    low, high = rounded.min().item(), rounded.max().item()
    assert torch.tensor([low, high]).bfloat16().double().tolist() == [low, high]
    exact, unit = x[0].double().item(), 2.0 ** (math.frexp(value)[1] - 8)
    assert high - low == unit
    assert low < exact < high
    share = (exact - low) / unit
    deviation = unit * math.sqrt(share * (1 - share) / SAMPLES)
    assert abs(rounded.mean().item() - exact) < 5 * deviation


def test_values_of_bfloat16_infinities_and_nan_stay() -> None:
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    fixed = torch.cat([torch.randn(999).bfloat16().float(), torch.tensor([0.0, -0.0, math.inf, -math.inf]), payloads])
    for draws in (bits(len(fixed)), torch.full((len(fixed),), 0xFFFF)):
        got = round_stochastically(fixed, draws)
        assert torch.equal(got.isnan(), fixed.isnan())
        assert torch.equal(got[:-3].float().view(torch.int32), fixed[:-3].view(torch.int32))


def test_bits_are_those_of_the_published_generator_and_independent() -> None:
    """The first numbers of SplitMix64 with the seed 0; bits are fair coins, independent of others."""
    wanted = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [x % 2**64 for x in random_bits(torch.arange(1, 4), 0).tolist()] == wanted
    drawn, bound = bits(SAMPLES), 5 / math.sqrt(SAMPLES)
    signs = torch.stack([((drawn >> place) & 1).float() * 2 - 1 for place in range(48)])
    assert signs.mean(1).abs().max() < bound
    for one, two in ((signs, signs), (signs[:, 1:], signs[:, :-1])):
        products = one @ two.T / SAMPLES
        assert (products - torch.eye(48) * (one is two)).abs().max() < 6 / math.sqrt(SAMPLES)
    other = ((bits(SAMPLES, 6) & 1).float() * 2 - 1) @ signs[0] / SAMPLES
    assert abs(other) < bound


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, size: int = 4096) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(size // 64, 64).to(dtype))
        self.bias = nn.Parameter(torch.ones(64, dtype=dtype))


def trained(model: Model, config: JobConfig, steps: int = 3, scale: float = 1.0) -> tuple[Model, torch.optim.Optimizer]:
    optimizer = build_optimizer([model], config)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_the_update_is_that_of_pytorch_but_for_the_rounding(name: str, implementation: str) -> None:
    """The first step has exact moments: weights in every bit; then moments within two units in the last place."""
    plain = JobConfig(optimizer=Optimizer(name=name, implementation=implementation, lr=0.01))
    half = replace(plain, optimizer=replace(plain.optimizer, state_dtype="bfloat16"))
    assert type(build_optimizer([Model()], plain)).__name__ == name
    for steps, tolerance in ((1, 0.0), (3, 2**-6)):
        model, optimizer = trained(Model(), half, steps)
        wanted, theirs = trained(Model(), plain, steps)
        for ours, other in zip(model.parameters(), wanted.parameters(), strict=True):
            assert (ours - other).abs().max() <= tolerance * 0.01 * steps
            got, exact = optimizer.state[ours], theirs.state[other]
            assert got["step"] == exact["step"] == steps
            for moment in ("exp_avg", "exp_avg_sq"):
                assert got[moment].dtype == torch.bfloat16
                assert (got[moment] - exact[moment]).abs().max() <= 2**-6 * exact[moment].abs().max()


@pytest.mark.parametrize(("rounding", "works"), [("stochastic", True), ("nearest", False)])
def test_an_update_below_half_a_unit_moves_the_mean_of_many_weights(rounding: str, works: bool) -> None:
    """Weights of one, whose neighbours are 2^-7 above and 2^-8 below; steps of 2^-12 down. To nearest none moves."""
    config = JobConfig(
        optimizer=Optimizer(lr=2**-12, weight_decay=0.0, eps=1e-30, rounding=rounding),
        training=Training(dtype="bfloat16"),
    )
    model, steps = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16), 20
    nn.init.ones_(model.weight)
    optimizer = build_optimizer([model], config)
    for _ in range(steps):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    moved, wanted = 1 - model.weight.double().mean().item(), steps * 2**-12
    deviation = math.sqrt(wanted * 2**-8 / model.weight.numel())  # of steps of 2^-8 with such a mean
    assert (abs(moved - wanted) < 5 * deviation) == works
    assert works or moved == 0


def test_a_moment_that_changes_little_follows_its_mean() -> None:
    """beta2 = 0.999: a gradient twice as large changes the second moment by less than half a unit in the last place."""
    for rounding, works in (("stochastic", True), ("nearest", False)):
        settings = Optimizer(beta2=0.999, state_dtype="bfloat16", rounding=rounding)
        model = nn.Linear(128, 128, bias=False)
        optimizer = build_optimizer([model], JobConfig(optimizer=settings))
        ensure_state(optimizer)
        moment = optimizer.state[model.weight]["exp_avg_sq"].fill_(1.0)
        for _ in range(50):
            model.weight.grad = torch.full_like(model.weight, 2**0.5)
            optimizer.step()
        wanted = 2 - 0.999**50
        assert (abs(moment.double().mean().item() - wanted) < 1e-3 * wanted) == works
        assert works or (moment == 1).all()


@pytest.mark.parametrize("piece", [1, 100, 64 * 64])
def test_pieces_change_nothing(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, states = trained(Model(torch.bfloat16), replace(BFLOAT16, training=Training(dtype="bfloat16")), 2)
    monkeypatch.setattr("trainer.components.rounding.PIECE_ON_CPU", max(piece, 8))
    model, optimizer = trained(Model(torch.bfloat16), replace(BFLOAT16, training=Training(dtype="bfloat16")), 2)
    for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert all(torch.equal(optimizer.state[ours][name], x) for name, x in states.state[theirs].items())


def test_a_masked_update_changes_nothing() -> None:
    config = JobConfig(optimizer=Optimizer(state_dtype="bfloat16", implementation="fused"))
    model, optimizer = trained(Model(), config)
    before = [x.clone() for p in model.parameters() for x in (p, *optimizer.state[p].values())]
    for parameter in model.parameters():
        parameter.grad.fill_(math.nan)
    mask_update(optimizer, torch.ones(()))
    optimizer.step()
    after = [x for p in model.parameters() for x in (p, *optimizer.state[p].values())]
    assert all(map(torch.equal, before, after))
    mask_update(optimizer, torch.zeros(()))
    for parameter in model.parameters():
        parameter.grad.fill_(1.0)
    optimizer.step()
    assert not torch.equal(before[0], model.weight)


def test_steps_parameters_and_seeds_have_other_bits() -> None:
    rounded = []
    for seed in (0, 1):
        model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in "ab"})
        config = replace(BFLOAT16, training=Training(seed=seed))
        optimizer = build_optimizer([model], config)
        for _ in range(2):
            ensure_state(optimizer)
            for parameter in model.parameters():
                for moment in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[parameter][moment].zero_()
                parameter.grad = torch.full_like(parameter, 0.3)
            optimizer.step()
            rounded += [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    for number, one in enumerate(rounded):
        assert len(one.unique()) == 2
        assert all(0.2 < (one != other).float().mean() < 0.8 for other in rounded[:number])


def test_indices_of_a_plain_parameter_are_its_own() -> None:
    assert global_indices(torch.empty(3, 5), 2, 9).tolist() == [*range(2, 9)]


def test_the_update_holds_copies_of_a_piece_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 60 bytes for each element of a piece, whatever the size; copies of the whole state would be 8 MiB."""
    monkeypatch.setattr("trainer.components.rounding.PIECE_ON_CPU", piece := 2**14)
    for dtype in ("float32", "bfloat16"):
        model = nn.Linear(1024, 1024, bias=False, dtype=getattr(torch, dtype))
        config = replace(BFLOAT16, training=Training(dtype=dtype))
        optimizer = build_optimizer([model], config)
        ensure_state(optimizer)
        assert sum(x.nbytes for name, x in optimizer.state[model.weight].items() if name != "step") == 4 * 2**20
        model.weight.grad = torch.ones_like(model.weight)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            optimizer.step()
        live = most = 0
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        assert 8 * piece < most <= 60 * piece
