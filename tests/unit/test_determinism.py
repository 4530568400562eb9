"""Law: deterministic kernels cost no writes of new tensors, and another run of the process is as before."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.profiler import profile

from trainer.config.schema import JobConfig
from trainer.runtime.determinism import prepare_process, set_determinism


@pytest.fixture
def deterministic() -> Iterator[None]:
    set_determinism(True)
    yield
    set_determinism(False)


def fills_of_new_tensors() -> int:
    """The writes inside `aten::empty` and its like, in a forward and backward."""
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    with profile() as profiled:
        out = model(x)
        (out.new_empty(4, 8).copy_(out) + torch.empty_like(out).copy_(out)).sum().backward()
    fills = 0
    for event in profiled.events():
        parent = event.cpu_parent
        fills += event.name == "aten::fill_" and parent is not None and parent.name.startswith("aten::empty")
    return fills


def test_new_tensors_stay_as_they_are(deterministic: None) -> None:
    assert torch.are_deterministic_algorithms_enabled()
    assert fills_of_new_tensors() == 0


def test_pytorch_fills_them_by_default(deterministic: None) -> None:
    """So that the count above can fail."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert fills_of_new_tensors() >= 2


def test_without_determinism_the_process_is_as_before() -> None:
    set_determinism(True)
    set_determinism(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("seed", [3, 4])
def test_a_process_is_prepared_with_the_seed_and_determinism_of_its_job(seed: int, deterministic: None) -> None:
    training = JobConfig().training
    prepare_process(replace(training, seed=seed, deterministic=False))
    assert torch.initial_seed() == seed
    assert not torch.are_deterministic_algorithms_enabled()
    prepare_process(replace(training, deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
