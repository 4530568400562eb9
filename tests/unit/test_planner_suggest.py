"""Law: the search for the fastest settings finds what one change of a key finds, in few tries, and only what fits."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from lct_planner.suggest import Choice, suggestions
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line

RANKS = 32
NODE = 8


class Machine:
    """A made-up machine: needs of memory and speeds of settings that a reader can check by hand."""

    def __init__(self, memory: float = 80.0, activations: float = 20.0, weights: float = 128.0) -> None:
        self.memory, self.activations, self.weights = memory, activations, weights
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> SimpleNamespace:
        self.asked.append(list(arguments))
        config = parse_command_line(list(arguments)).config
        parallelism, recomputation = config.parallelism, config.activation_checkpoint
        cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
        replicas, batch = parallelism.data_parallel_replicate_degree, config.training.local_batch_size
        method = parallelism.context_parallel_method
        if RANKS % (replicas * cp * tp) or batch * RANKS // (cp * tp) > 128 or tp == 8:
            raise ConfigError("these degrees do not go together")
        shards = RANKS // replicas // tp
        kept = {"none": 2.0, "selective": 1.0, "full": 0.3}[recomputation.mode]
        on_host = recomputation.offload != "none"
        activations = self.activations * batch / (cp * tp) * (0.1 if on_host else kept)
        gathered = parallelism.fsdp_reshard_after_forward == "never"
        needed = self.weights / shards / tp + activations + 10.0 * gathered
        work = {"none": 1.0, "selective": 1.1, "full": 1.4}[recomputation.mode] + 0.2 * on_host
        messages = (2.0 if shards * tp > NODE else 0.5) / batch * (0.9 if gathered else 1.0)
        exchanges = 0.1 * (cp - 1) + 0.3 * (tp - 1) + 0.05 * (method == "ring" and cp > 1)
        job = SimpleNamespace(config=config, degrees=SimpleNamespace(cp=cp, tp=tp, pp=1))
        return SimpleNamespace(
            job=job,
            fits=needed <= self.memory,
            tokens_per_second=10_000 / (work + messages + exchanges),
            profile=SimpleNamespace(totals={"host": 50e9 * on_host}),
            device=SimpleNamespace(node=NODE),
        )


def search(machine: Machine, *arguments: str, host_memory: float = 100e9) -> list[Choice]:
    settings = ["--training.global_batch_size=128", "--training.local_batch_size=1"]
    return suggestions(machine, [*settings, *arguments], RANKS, host_memory)


def settings_of(choice: Choice) -> dict[str, str]:
    return {key.rpartition(".")[2]: value for key, value in choice.settings.items()}


def test_replicas_a_larger_batch_and_gathered_weights_are_found() -> None:
    machine = Machine()
    choices = search(machine)
    fastest = max(choices, key=lambda choice: choice.speed)
    everything = [
        machine([f"--training.local_batch_size={batch}", f"--activation_checkpoint.mode={mode}", *replicated, *kept])
        for batch in (1, 2, 4)
        for mode in ("none", "selective", "full")
        for replicated in ([], *([f"--parallelism.data_parallel_replicate_degree={n}"] for n in (1, 2, 4)))
        for kept in ([], ["--parallelism.fsdp_reshard_after_forward=never"])
    ]
    best = max(answer.tokens_per_second for answer in everything if answer.fits)
    assert fastest.speed > 0.97 * best
    assert choices[0].speed > 0.95 * fastest.speed
    assert len(machine.asked) - len(everything) <= 40


def test_only_what_fits_the_device_and_the_host_is_found() -> None:
    choices = search(Machine(activations=2_000.0), host_memory=10e9)
    assert choices
    assert all(choice.estimate.fits for choice in choices)
    assert all(settings_of(choice)["offload"] == "none" for choice in choices)
    with_host = search(Machine(activations=2_000.0))
    assert any(settings_of(choice)["offload"] == "inputs" for choice in with_host)
    assert with_host[0].speed > choices[0].speed  # fewer ranks for a sequence
    assert search(Machine(memory=1.0)) == []


def test_of_equal_speeds_fewer_ranks_for_a_sequence_and_fewer_kernels_come_first() -> None:
    choices = search(Machine(activations=150.0, weights=32.0))
    speeds = [choice.speed for choice in choices]
    assert all(later < 1.06 * earlier for earlier, later in itertools.pairwise(speeds))
    methods = [settings_of(choice).get("context_parallel_method") for choice in choices]
    assert methods.index("all_to_all") < methods.index("ring")


def test_words_are_what_differs_from_the_file() -> None:
    config = parse_command_line(["--training.local_batch_size=2"]).config
    choice = Choice({"training.local_batch_size": "2", "compile.components": "loss"}, estimate=None)
    assert choice.words(config) == ["--compile.components=loss"]
    assert Choice({"compile.components": "model,loss"}, estimate=None).words(config) == []


def test_each_try_is_told() -> None:
    reports: list[tuple[int, float]] = []
    suggestions(Machine(), [], RANKS, 100e9, lambda count, best: reports.append((count, best)))
    assert [count for count, _ in reports] == list(range(1, len(reports) + 1))
    assert reports[-1][1] == pytest.approx(max(best for _, best in reports))
