"""The rotating shallow-water equations in a doubly periodic box, from random smooth initial states. Torch-free.

    du/dt = (zeta + f) v - d/dx (g h + |u|^2 / 2) - nu laplacian^2 u        zeta = dv/dx - du/dy
    dv/dt = -(zeta + f) u - d/dy (g h + |u|^2 / 2) - nu laplacian^2 v
    dh/dt = -d/dx ((H + h) u) - d/dy ((H + h) v) - nu laplacian^2 h

u and v are velocities along the width (x) and the height (y), h is the elevation above the mean depth H. The state is
the Fourier coefficients up to two thirds of the largest wavenumber, so that products of two fields have no aliases
(Orszag 1971). SciPy's adaptive DOP853 integrates. The mean of h does not change: mass is conserved to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft2, rfft2
from scipy.integrate import solve_ivp
from threadpoolctl import threadpool_limits

from trainer.config.errors import ConfigError

CHANNELS = ("u", "v", "h")
_DAMPING = 10.0  # rate at the smallest kept wave
_SCALE, _WIDTH = 4.0, 1.5  # waves of an initial state in a box of length 1: mean number, standard deviation


@dataclass(frozen=True)
class ShallowWater:
    """The equations on a grid of square cells; the box has width 1.

    With the defaults, gravity waves have speed 1, and the deformation radius is a tenth of the box.

    Attributes:
        height: Cells along y.
        width: Cells along x.
        gravity: g.
        depth: H, the mean depth.
        coriolis: f.
        viscosity: nu of the biharmonic damping. None: the smallest kept wave decays at rate 10.
    """

    height: int = 64
    width: int = 64
    gravity: float = 1.0
    depth: float = 1.0
    coriolis: float = 10.0
    viscosity: float | None = None

    @property
    def spacing(self) -> float:
        """The size of a cell."""
        return 1 / self.width

    @property
    def nu(self) -> float:
        """The coefficient of the damping, in length^4 / time."""
        if self.viscosity is not None:
            return self.viscosity
        return _DAMPING / (2 * np.pi / (3 * self.spacing)) ** 4

    def wavenumbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the angular wavenumbers along x, (1, width // 2 + 1), and y, (height, 1)."""
        kx = 2 * np.pi * np.fft.rfftfreq(self.width, self.spacing)[None, :]
        ky = 2 * np.pi * np.fft.fftfreq(self.height, self.spacing)[:, None]
        return kx, ky

    def kept(self) -> np.ndarray:
        """Return which coefficients are kept, (height, width // 2 + 1): up to two thirds of the largest wavenumber."""
        kx, ky = self.wavenumbers()
        limit = 2 * np.pi / (3 * self.spacing) * (1 - 1e-9)
        return (np.abs(kx) < limit) & (np.abs(ky) < limit)


def solve(
    equations: ShallowWater, initial: np.ndarray, times: Sequence[float], *, tolerance: float = 1e-6
) -> np.ndarray:
    """Return the states at ascending times, (times, 3, height, width) in float64.

    Args:
        equations: The equations.
        initial: State at the first time, (3, height, width). Waves that would have aliases on the grid are removed.
        times: The ascending times.
        tolerance: Largest error of a step, relative to each coefficient. A coefficient below a hundredth of the
            tolerance counts as that large.

    Raises:
        ConfigError: The step size has become too small, because the solution is no longer smooth.
    """
    shape = (equations.height, equations.width)
    start = rfft2(initial, norm="forward") * equations.kept()
    # Threads do not speed up its small products; on a busy machine they make them ten times slower.
    with threadpool_limits(1, user_api="blas"):
        result = solve_ivp(
            _Tendency(equations),
            (times[0], times[-1]),
            start.ravel(),
            method="DOP853",
            t_eval=times,
            rtol=tolerance,
            atol=tolerance / 100,
        )
    if not result.success:
        raise ConfigError(
            f"the shallow-water equations could not be solved beyond time {result.t[-1]:g} ({result.message}); "
            "take a shorter interval, fewer frames or a finer grid"
        )
    return irfft2(result.y.T.reshape(-1, *start.shape), s=shape, norm="forward")


class _Tendency:
    """The right-hand side, a function of time and of the coefficients, (3 * height * (width // 2 + 1),)."""

    def __init__(self, equations: ShallowWater) -> None:
        kx, ky = equations.wavenumbers()
        self._equations = equations
        self._shape = (equations.height, equations.width)
        self._ikx = 1j * kx
        self._iky = 1j * ky
        self._damping = equations.nu * (kx**2 + ky**2) ** 2
        self._kept = equations.kept()

    def __call__(self, time: float, state: np.ndarray) -> np.ndarray:
        at = self._equations
        waves = state.reshape(3, *self._kept.shape)
        curl = self._ikx * waves[1] - self._iky * waves[0]
        u, v, h, zeta = irfft2(np.stack([*waves, curl]), s=self._shape, norm="forward")
        spin = zeta + at.coriolis
        depth = at.depth + h
        products = [spin * v, -spin * u, at.gravity * h + (u * u + v * v) / 2, depth * u, depth * v]
        turn_u, turn_v, head, flux_x, flux_y = rfft2(np.stack(products), norm="forward")
        change = np.stack(
            [turn_u - self._ikx * head, turn_v - self._iky * head, -(self._ikx * flux_x + self._iky * flux_y)]
        )
        return (self._kept * change - self._damping * waves).ravel()


def at_points(equations: ShallowWater, states: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return states at points, (..., N). The values are exact, because the waves are evaluated at the points.

    Args:
        equations: The equations and their box.
        states: (..., height, width).
        points: x and y in the box, (N, 2).
    """
    waves = np.fft.fft2(states, norm="forward")
    height = equations.height * equations.spacing
    width = equations.width * equations.spacing
    sizes = ((points[:, 1] / height, equations.height), (points[:, 0] / width, equations.width))
    along_y, along_x = (np.exp(2j * np.pi * place[:, None] * np.fft.fftfreq(n, 1 / n)) for place, n in sizes)
    return np.einsum("...nw,nw->...n", np.einsum("nh,...hw->...nw", along_y, waves, optimize=True), along_x).real


def initial_state(equations: ShallowWater, seed: int, trajectory: int) -> np.ndarray:
    """Return a random smooth state, (3, height, width): vortices in geostrophic balance, and free gravity waves.

    The flow has a root-mean-square speed of 0.15, and the free waves an elevation of 0.08. The numbers come from raw
    bits, which do not change between versions of numpy.

    Args:
        equations: The equations.
        seed: Seed of all trajectories.
        trajectory: Number of the trajectory.
    """
    kx, ky = equations.wavenumbers()
    k = np.sqrt(kx**2 + ky**2) / (2 * np.pi)
    smooth = np.where(k > 0, np.exp(-((k - _SCALE) ** 2) / (2 * _WIDTH**2)) / np.maximum(k, 1), 0) * equations.kept()
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(trajectory,)))
    cells = (2, equations.height, equations.width)
    noise = bits.random_raw(int(np.prod(cells))).reshape(cells) / 2.0**64 - 0.5
    stream, waves = rfft2(noise, norm="forward") * smooth
    u, v, balanced = irfft2(
        np.stack([-1j * ky * stream, 1j * kx * stream, equations.coriolis / equations.gravity * stream]),
        s=cells[1:],
        norm="forward",
    )
    free = irfft2(waves, s=cells[1:], norm="forward")
    factor = 0.15 / np.sqrt(np.mean(u**2 + v**2))
    return np.stack([factor * u, factor * v, factor * balanced + 0.08 * free / free.std()])


def energy(equations: ShallowWater, state: np.ndarray) -> np.ndarray:
    """Return the mean kinetic and potential energy of states for each unit of area, (...).

    Args:
        equations: The equations.
        state: (..., 3, height, width).
    """
    u, v, h = np.moveaxis(state, -3, 0)
    density = (equations.depth + h) * (u**2 + v**2) / 2 + equations.gravity * h**2 / 2
    return density.mean((-2, -1))
