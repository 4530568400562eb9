"""Physics of the solver: exact waves, conservation, convergence, symmetries; and states that a seed fixes."""

import sys

import numpy as np
import pytest

if sys.version_info < (3, 11):
    pytest.skip("fields need Python 3.11", allow_module_level=True)

from examples.fields.solver import ShallowWater, energy, initial_state, solve
from trainer.config.errors import ConfigError

SMALL = ShallowWater(32, 32)


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def smooth(height: int = 32, width: int = 32, amplitude: float = 0.05) -> np.ndarray:
    """The same smooth state on any grid of the unit box."""
    y, x = np.meshgrid(2 * np.pi * np.arange(height) / height, 2 * np.pi * np.arange(width) / width, indexing="ij")
    fields = [np.sin(y) + np.cos(2 * x + y), np.cos(x) - np.sin(x - 2 * y), np.sin(x) * np.cos(2 * y)]
    return amplitude * np.stack(fields)


def poincare_wave(at: ShallowWater, waves: tuple[int, int], time: float) -> np.ndarray:
    """A small plane wave with (kx, ky) waves in the box: it travels with omega^2 = f^2 + g H k^2."""
    kx, ky = 2 * np.pi * waves[0], 2 * np.pi * waves[1] * at.width / at.height
    k = np.hypot(kx, ky)
    omega = np.sqrt(at.coriolis**2 + at.gravity * at.depth * k**2)
    y, x = np.meshgrid(at.spacing * np.arange(at.height), at.spacing * np.arange(at.width), indexing="ij")
    phase = kx * x + ky * y - omega * time
    along, across = omega / (k * at.depth) * np.cos(phase), at.coriolis / (k * at.depth) * np.sin(phase)
    u, v = (kx * along - ky * across) / k, (ky * along + kx * across) / k
    return 1e-7 * np.exp(-at.nu * k**4 * time) * np.stack([u, v, np.cos(phase)])


@pytest.mark.parametrize("coriolis", [0.0, 10.0])
@pytest.mark.parametrize(("grid", "waves"), [((16, 16), (2, 0)), ((16, 16), (0, 3)), ((24, 16), (1, -2))])
def test_a_small_wave_travels_with_the_analytic_phase_speed(coriolis, grid, waves) -> None:
    at = ShallowWater(*grid, gravity=1.5, depth=0.8, coriolis=coriolis, viscosity=1e-6)
    got = solve(at, poincare_wave(at, waves, 0), [0, 0.2, 1.0], tolerance=1e-12)
    for state, time in zip(got, (0, 0.2, 1.0), strict=True):
        assert error(state, poincare_wave(at, waves, time)) < 1e-5
    assert error(got[1], poincare_wave(at, waves, 0)) > 0.1  # it has moved


def test_a_small_balanced_vortex_stays() -> None:
    at = ShallowWater(24, 24, viscosity=0.0)
    h = 1e-6 * np.sin(2 * np.pi * np.arange(24) / 24)[:, None] * np.ones(24)
    u = -1e-6 * 2 * np.pi / at.coriolis * np.cos(2 * np.pi * np.arange(24) / 24)[:, None] * np.ones(24)
    balanced = np.stack([u, 0 * u, h])
    assert error(solve(at, balanced, [0, 1], tolerance=1e-9)[1], balanced) < 1e-5
    assert error(solve(at, np.stack([-u, 0 * u, h]), [0, 1])[1], balanced) > 0.1


def test_mass_is_conserved_and_energy_does_not_grow() -> None:
    states = solve(SMALL, initial_state(SMALL, 0, 0), np.arange(20) * 0.05)
    assert np.abs(states[:, 2].mean((1, 2)) - states[0, 2].mean()).max() < 1e-16
    energies = energy(SMALL, states)
    assert (np.diff(energies) < 0).all()
    assert energies[-1] > 0.5 * energies[0]


def test_energy_is_conserved_without_damping() -> None:
    at = ShallowWater(32, 32, viscosity=0.0)
    energies = energy(at, solve(at, smooth(), [0, 0.2, 0.4], tolerance=1e-8))
    assert np.abs(energies / energies[0] - 1).max() < 1e-6


def test_a_finer_grid_and_a_finer_tolerance_give_the_same() -> None:
    coarse, fine = (ShallowWater(n, n, viscosity=1e-6) for n in (32, 64))
    times = [0, 0.3]
    exact = solve(coarse, smooth(), times, tolerance=1e-10)[1]
    assert error(solve(fine, smooth(64, 64), times, tolerance=1e-8)[1][:, ::2, ::2], exact) < 1e-5
    errors = [error(solve(coarse, smooth(), times, tolerance=tolerance)[1], exact) for tolerance in (1e-3, 1e-6)]
    assert errors[1] < 1e-5
    assert errors[1] < errors[0] / 30


def test_the_box_is_periodic_and_has_no_preferred_place_or_axis() -> None:
    """Shifted states give shifted solutions; a turn by 90 degrees gives the turned solution."""
    start, times = smooth(), [0, 0.3]
    end = solve(SMALL, start, times)[1]
    shifted = solve(SMALL, np.roll(start, (5, -9), (1, 2)), times)[1]
    assert error(shifted, np.roll(end, (5, -9), (1, 2))) < 1e-9

    def turned(state: np.ndarray) -> np.ndarray:  # the point (x, y) comes to (-y, x)
        u, v, h = np.roll(np.flip(state.swapaxes(1, 2), 2), 1, 2)
        return np.stack([-v, u, h])

    assert error(solve(SMALL, turned(start), times)[1], turned(end)) < 1e-5
    assert error(turned(start), start) > 0.1


def test_products_have_no_aliases() -> None:
    """Waves above two thirds of the largest wavenumber are zero at any time."""
    end = solve(SMALL, initial_state(SMALL, 3, 0), [0, 0.5])[1]
    waves = np.abs(np.fft.rfft2(end))
    assert waves[:, ~SMALL.kept()].max() < 1e-12 * waves.max()
    assert SMALL.kept().sum() == 21 * 11


def test_initial_states_are_fixed_by_seed_and_trajectory_and_have_vortices_and_waves() -> None:
    states = [initial_state(SMALL, seed, number) for seed, number in ((0, 0), (0, 1), (1, 0))]
    assert (states[0] == initial_state(SMALL, 0, 0)).all()
    assert all(abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.3 for a, b in ((states[0], s) for s in states[1:]))
    for u, v, h in states:
        assert np.sqrt(np.mean(u**2 + v**2)) == pytest.approx(0.15)
        assert 0.07 < h.std() < 0.12
        assert np.abs(h).max() < 0.5


def test_what_cannot_be_solved_is_refused() -> None:
    with pytest.raises(ConfigError, match="could not be solved beyond time"):
        solve(ShallowWater(16, 16, viscosity=0.0), 30 * smooth(16, 16), [0, 20.0])
