"""The rotating shallow-water equations in a doubly periodic box, from random smooth initial states. Torch-free.

    du/dt = (zeta + f) v - d/dx (g h + |u|^2 / 2) - nu laplacian^2 u        zeta = dv/dx - du/dy
    dv/dt = -(zeta + f) u - d/dy (g h + |u|^2 / 2) - nu laplacian^2 v
    dh/dt = -d/dx ((H + h) u) - d/dy ((H + h) v) - nu laplacian^2 h

u and v are velocities along the width (x) and the height (y), h is the elevation above the mean depth H. The state is
its Fourier coefficients up to two thirds of the largest wavenumber, so that products of two fields have no aliases
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
_DAMPING = 10.0  # rate at the smallest wave that is kept
_SCALE, _WIDTH = 4.0, 1.5  # waves of an initial state in a box of length 1: mean number, standard deviation


@dataclass(frozen=True)
class ShallowWater:
    """The equations on a grid of `height` x `width` square cells; the box has width 1.

    viscosity: nu, of the biharmonic damping; None: the smallest wave that is kept decays at rate 10.
    With the defaults, gravity waves have speed 1, and the deformation radius is a tenth of the box.
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
        """Return which coefficients (height, width // 2 + 1) are kept: those below two thirds of the largest one."""
        kx, ky = self.wavenumbers()
        limit = 2 * np.pi / (3 * self.spacing) * (1 - 1e-9)
        return (np.abs(kx) < limit) & (np.abs(ky) < limit)


def solve(
    equations: ShallowWater, initial: np.ndarray, times: Sequence[float], *, tolerance: float = 1e-6
) -> np.ndarray:
    """Return the states (times, 3, height, width) in float64 at ascending times, the first one at its initial state.

    initial: (3, height, width); what the grid cannot carry without aliases is cut off. tolerance: error of a step,
    relative to each coefficient; below a hundredth of the tolerance a coefficient counts as that large.

    Raises:
        ConfigError: the step size has become too small, because the solution is no longer smooth.
    """
    shape = (equations.height, equations.width)
    start = rfft2(initial, norm="forward") * equations.kept()
    # Its small products gain nothing by threads; on a busy machine threads make them ten times slower.
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
    """The right-hand side, as a function of time and coefficients (3 * height * (width // 2 + 1),)."""

    def __init__(self, equations: ShallowWater) -> None:
        kx, ky = equations.wavenumbers()
        self._equations, self._shape = equations, (equations.height, equations.width)
        self._ikx, self._iky = 1j * kx, 1j * ky
        self._damping = equations.nu * (kx**2 + ky**2) ** 2
        self._kept = equations.kept()

    def __call__(self, time: float, state: np.ndarray) -> np.ndarray:
        at = self._equations
        waves = state.reshape(3, *self._kept.shape)
        curl = self._ikx * waves[1] - self._iky * waves[0]
        u, v, h, zeta = irfft2(np.stack([*waves, curl]), s=self._shape, norm="forward")
        spin, depth = zeta + at.coriolis, at.depth + h
        products = [spin * v, -spin * u, at.gravity * h + (u * u + v * v) / 2, depth * u, depth * v]
        turn_u, turn_v, head, flux_x, flux_y = rfft2(np.stack(products), norm="forward")
        change = np.stack(
            [turn_u - self._ikx * head, turn_v - self._iky * head, -(self._ikx * flux_x + self._iky * flux_y)]
        )
        return (self._kept * change - self._damping * waves).ravel()


def at_points(equations: ShallowWater, states: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return states (..., height, width) at points (N, 2), x and y in the box: (..., N), exact by their waves."""
    waves = np.fft.fft2(states, norm="forward")
    height, width = equations.height * equations.spacing, equations.width * equations.spacing
    sizes = ((points[:, 1] / height, equations.height), (points[:, 0] / width, equations.width))
    along_y, along_x = (np.exp(2j * np.pi * place[:, None] * np.fft.fftfreq(n, 1 / n)) for place, n in sizes)
    return np.einsum("...nw,nw->...n", np.einsum("nh,...hw->...nw", along_y, waves, optimize=True), along_x).real


def initial_state(equations: ShallowWater, seed: int, trajectory: int) -> np.ndarray:
    """Return a random smooth state (3, height, width): vortices in geostrophic balance, and free gravity waves.

    The flow has a root-mean-square speed of 0.15, and the free waves an elevation of 0.08. The numbers come from raw
    bits, which numpy keeps from version to version.
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
    """Return the mean energy of states (..., 3, height, width) for each unit of area, kinetic and potential."""
    u, v, h = np.moveaxis(state, -3, 0)
    density = (equations.depth + h) * (u**2 + v**2) / 2 + equations.gravity * h**2 / 2
    return density.mean((-2, -1))
