"""Searches the settings with which a job is fastest. Torch-free.

    1. degrees      context and tensor parallelism and the method, with the least recomputation that fits
    2. refinement   of the two best: replicas of nodes, a larger micro-batch, weights that stay gathered, recomputation

Each try traces a step, which takes a second or two, and the product of all settings has thousands of entries. So the
search continues from the best settings so far. A change that does not pay, or does not fit, is not tried again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from lct_planner.estimate import Estimate
from lct_planner.search import Estimator
from longshard.context.planning.methods import METHODS
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig

Settings = Mapping[str, str]
"""Key of the configuration -> its value, as on the command line."""
_METHODS = sorted(
    (
        name
        for name, method in METHODS.items()
        if method.divides_heads != method.overlaps and not method.two_level
    ),
    key=lambda name: METHODS[name].overlaps,
)
"""Methods to try, those with fewer kernels first."""
_NEAR_SPEED = 0.05
"""Part of the speed that the model of time does not resolve."""
_GAIN = 0.01
"""Part of the speed that a refinement must gain."""
_MODE = "activation_checkpoint.mode"
_OPTION = "activation_checkpoint.selective_ac_option"
_IN_MEMORY = {
    "activation_checkpoint.offload": "none",
    "activation_checkpoint.mlp_chunk_tokens": "0",
}
_NO_RECOMPUTATION = {_MODE: "none", **_IN_MEMORY}
_BY_OPERATOR = {_MODE: "selective", _OPTION: "op", **_IN_MEMORY}
_FULL = {_MODE: "full", **_IN_MEMORY}
_OFFLOADED = {
    _MODE: "full",
    "activation_checkpoint.offload": "inputs",
    "activation_checkpoint.mlp_chunk_tokens": "8192",
    "compile.components": "loss",
}


@dataclass(frozen=True)
class Choice:
    """Settings and their estimate."""

    settings: Settings
    estimate: Estimate

    @property
    def speed(self) -> float:
        """Tokens a second of one rank."""
        return self.estimate.tokens_per_second

    @property
    def order(self) -> tuple[int, ...]:
        """The place among equally fast choices, the least first: fewer ranks a sequence, then fewer kernels."""
        degrees = self.estimate.job.degrees
        method = self.settings.get("parallelism.context_parallel_method", _METHODS[0])
        return degrees.cp * degrees.tp, degrees.tp, _METHODS.index(method), len(self.settings)

    def words(self, config: JobConfig) -> list[str]:
        """Return the settings that differ from a configuration, as words of the command line.

        Args:
            config: The configuration.
        """
        today = {key: attrgetter(key)(config) for key in self.settings}
        as_text = {
            key: ",".join(x) if isinstance(x, tuple) else str(x) for key, x in today.items()
        }
        return [
            f"--{key}={value}" for key, value in self.settings.items() if as_text[key] != value
        ]


def suggestions(
    estimate: Estimator,
    arguments: Sequence[str],
    ranks: int,
    host_memory: float,
    on_try: Callable[[int, float], None] = lambda count, best: None,
) -> list[Choice]:
    """Return the choices that fit, the fastest first.

    Speeds that differ by less than the accuracy of the model of time count as equal: then `Choice.order` decides.

    Args:
        estimate: Traces a job.
        arguments: Command line of the job; the settings of a choice override it.
        ranks: Number of GPUs.
        host_memory: Bytes for each rank, which offloaded inputs may take.
        on_try: Called after each try with the number of tries, and the best speed so far, tokens a second and rank.
    """
    search = _Search(estimate, arguments, ranks, host_memory, on_try)
    search.spread()
    starts = sorted(search.fitting, key=lambda choice: -choice.speed)
    for start in starts[:2]:
        search.refine(start)
    return _ranked(search.fitting)


def _ranked(choices: Sequence[Choice]) -> list[Choice]:
    left = sorted(choices, key=lambda choice: -choice.speed)
    ranked: list[Choice] = []
    while left:
        least = left[0].speed * (1 - _NEAR_SPEED)
        equal = [choice for choice in left if choice.speed >= least]
        ranked += sorted(equal, key=lambda choice: choice.order)
        left = left[len(equal) :]
    return ranked


class _Search:
    """One search: the jobs that were tried, and the jobs that fit."""

    def __init__(
        self,
        estimate: Estimator,
        arguments: Sequence[str],
        ranks: int,
        host_memory: float,
        on_try: Callable[[int, float], None],
    ) -> None:
        self._estimate = estimate
        self._arguments = arguments
        self._ranks = ranks
        self._host_memory = host_memory
        self._on_try = on_try
        self._tried: dict[tuple[tuple[str, str], ...], Choice | None] = {}

    @property
    def fitting(self) -> list[Choice]:
        """Return the choices that fit."""
        return [choice for choice in self._tried.values() if choice is not None]

    def spread(self) -> None:
        """Try degrees and methods, each with the least recomputation that fits. `fitting` then has the results."""
        best: Choice | None = None
        for tp in (n for n in (1, 2, 4, 8) if self._ranks % n == 0):
            if best is not None and best.order[0] == 1 and tp > 2:
                break  # a sequence fits on one rank, and tensor parallelism only costs
            least = 1 if best is None else max(best.order[0] // tp, 1)
            result = self._degrees(tp, least)
            best = max(
                (choice for choice in (best, result) if choice is not None),
                key=_speed,
                default=None,
            )

    def _degrees(self, tp: int, least: int) -> Choice | None:
        """Try context-parallel degrees from `least` on, ascending; return the best choice, None if no degree fits.

        Stop after two degrees in a row that are not faster than the best one before.
        """
        best: Choice | None = None
        slower = 0
        for cp in (
            n for n in range(least, self._ranks // tp + 1) if self._ranks // tp % n == 0
        ):
            choices = [
                self._least_recomputation(cp, tp, method)
                for method in _METHODS[: 1 if cp == 1 else None]
            ]
            result = max(
                (choice for choice in choices if choice is not None), key=_speed, default=None
            )
            if result is None:
                continue
            slower = 0 if best is None or result.speed > best.speed else slower + 1
            best = max((choice for choice in (best, result) if choice is not None), key=_speed)
            if slower == 2:
                break
        return best

    def _least_recomputation(self, cp: int, tp: int, method: str) -> Choice | None:
        degrees = {
            "parallelism.data_parallel_replicate_degree": "1",
            "parallelism.data_parallel_shard_degree": "-1",
            "parallelism.context_parallel_degree": str(cp),
            "parallelism.tensor_parallel_degree": str(tp),
        }
        if cp > 1:
            degrees["parallelism.context_parallel_method"] = method
        if choice := self._try(degrees | _BY_OPERATOR):
            return choice
        # if this one does not fit, full recomputation does not
        offloaded = self._try(degrees | _OFFLOADED)
        return offloaded and (self._try(degrees | _FULL) or offloaded)

    def refine(self, choice: Choice) -> None:
        """Change one setting after another, each time the one that gains most, until none gains; add to `fitting`."""
        changes: list[Callable[[Estimate], Settings]] = [
            *(partial(self._replicas, nodes=nodes) for nodes in (1, 2, 4)),
            _larger_batch,
            lambda result: _larger_batch(result) | _FULL,
            lambda result: {"parallelism.fsdp_reshard_after_forward": "never"},
            lambda result: _NO_RECOMPUTATION,
            lambda result: _BY_OPERATOR,
        ]
        while changes:
            tried = [
                (self._try(dict(choice.settings) | change(choice.estimate)), change)
                for change in changes
            ]
            least = choice.speed * (1 + _GAIN)
            better = [
                (result, change)
                for result, change in tried
                if result is not None and result.speed > least
            ]
            if not better:
                return
            choice = max((result for result, _ in better), key=_speed)
            changes = [change for _, change in better]

    def _replicas(self, result: Estimate, nodes: int) -> Settings:
        """Return the settings of replicas. Each replica is sharded over `nodes` nodes."""
        ranks_of_a_replica = nodes * result.device.node * result.job.degrees.pp
        replicas = max(self._ranks // ranks_of_a_replica, 1)
        return {"parallelism.data_parallel_replicate_degree": str(replicas)}

    def _try(self, settings: Settings) -> Choice | None:
        """Return the choice of these settings, and keep it: equal settings are estimated once.

        None if it does not fit in the memory of device and host, or if the settings do not go together with the job.
        """
        key = tuple(sorted(settings.items()))
        if key not in self._tried:
            answer = self._estimate_of(settings)
            self._tried[key] = None if answer is None else Choice(settings, answer)
            self._on_try(len(self._tried), max(map(_speed, self.fitting), default=0.0))
        return self._tried[key]

    def _estimate_of(self, settings: Settings) -> Estimate | None:
        words = [f"--{key}={value}" for key, value in settings.items()]
        try:
            answer = self._estimate([*self._arguments, *words])
        except ConfigError:
            return None
        fits = answer.fits and answer.profile.totals["host"] <= self._host_memory
        return answer if fits else None


def _speed(choice: Choice) -> float:
    return choice.speed


def _larger_batch(result: Estimate) -> Settings:
    return {"training.local_batch_size": str(2 * result.job.config.training.local_batch_size)}
