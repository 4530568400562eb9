"""The devices of a job: how they are found without torch, and how `job.device` selects them."""

import stat
from pathlib import Path

import pytest
import torch

from trainer.config.errors import ConfigError
from trainer.runtime import devices
from trainer.runtime.devices import Machine, this_machine
from trainer.runtime.process_group import Process


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine whose nvidia-smi lists GPUs with these MiB of memory."""

    def present(*sizes: int) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo {size}\n" for size in sizes))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(devices, "_gpu_files", lambda: 0)

    return present


@pytest.mark.parametrize(
    ("present", "variable", "count", "note"),
    [
        ((81559, 81559), None, 2, ""),
        ((81559, 81559), "1", 1, ""),
        ((81559, 81559), "", 0, ""),
        ((81559, 81559), "-1", 0, ""),
        ((81559, 81559), "1, -1, 0", 1, ""),
        ((81559, 81559), "GPU-0a1b,GPU-2c3d", 2, ""),
        ((), None, 0, ""),
        ((81559, 81559), "0,1,2,3", 2, "CUDA_VISIBLE_DEVICES = '0,1,2,3' names 4, and this machine has 2 of them"),
        ((81559, 81559), "1,5", 1, "CUDA_VISIBLE_DEVICES = '1,5' names 2, and this machine has 1 of them"),
        ((81559, 81559), "5", 0, "CUDA_VISIBLE_DEVICES = '5' names 1, and this machine has none of them: training"),
        ((), "0,1", 0, "CUDA_VISIBLE_DEVICES = '0,1' names 2, and this machine has none of them: training runs on"),
    ],
)
def test_the_gpus_that_are_here_and_visible(present, variable, count, note, gpus) -> None:
    gpus(*present)
    machine = this_machine({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable})
    assert machine.gpus == count
    assert machine.note.startswith(note)
    assert bool(machine.note) is bool(note)
    assert machine.memory("cuda") == (81559 * 2**20 if present else None)
    assert machine.memory("cpu") > 2**28


def test_auto_takes_gpus_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus, without = Machine(2, None, None), Machine(0, None, None)
    assert [with_gpus.device_type(wanted) for wanted in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    assert [without.device_type(wanted) for wanted in ("auto", "cpu")] == ["cpu", "cpu"]
    monkeypatch.setattr(devices, "_OTHER_GPUS", ())
    with pytest.raises(ConfigError, match=r"job\.device = 'cuda' needs a GPU, and this machine shows none"):
        without.device_type("cuda")
    monkeypatch.setattr(devices, "_OTHER_GPUS", ("/",))  # as of AMD, which PyTorch counts
    assert without.device_type("cuda") == "cuda"


def test_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Process(0, 0, 1).device == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"job\.device = 'cuda' needs a GPU, and this PyTorch .* use job\.device"):
        _ = Process(0, 0, 1, "cuda").device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Process(5, 1, 8).device == torch.device("cuda", 1)
    assert Process(5, 1, 8, "cpu").device == torch.device("cpu")
    with pytest.raises(ConfigError, match="2 GPUs are visible, too few for rank 2 of this machine"):
        _ = Process(6, 2, 8).device
