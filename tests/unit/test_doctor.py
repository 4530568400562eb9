"""`lct doctor`: each line has a state and, unless all is well, a remedy; a failing check is a line."""

import json
from collections.abc import Iterator

import pytest

from lct_tools import doctor
from lct_tools.doctor import CHECKS, Finding, findings
from trainer.commands.main import main
from trainer.runtime.devices import Machine, this_machine

pytestmark = pytest.mark.about("lct_tools/collective.py")
NAMED = {check.__name__: check for check in CHECKS}


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    output = capsys.readouterr()
    lines = [Finding(**line) for line in json.loads(output.out)]
    assert output.err.splitlines() == [str(line) for line in lines]
    subjects = {line.subject for line in lines}
    assert subjects >= {"python", "torch", "package", "gpu", "attention", "memory", "disk", "network", "sum"}
    (total,) = (line for line in lines if line.subject == "sum")
    assert float(total.text.removesuffix(" GB/s").rpartition(" ")[2]) > 0


def test_the_state_follows_from_remedy_and_failure() -> None:
    assert str(Finding("disk", "50 GiB free")).split() == ["ok", "disk", "50", "GiB", "free"]
    assert str(Finding("disk", "1 GiB free", "make room")).startswith("note  disk")
    assert str(Finding("disk", "1 GiB free", "make room", is_bad=True)).endswith("1 GiB free; make room")


def test_a_check_that_fails_is_a_bad_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def _broken(machine: Machine) -> Iterator[Finding]:
        yield Finding("first", "well")
        raise OSError("the driver is gone\nsecond line")

    assert [line.text for line in findings((_broken,))] == ["well", "the driver is gone"]
    monkeypatch.setattr(doctor.findings, "__defaults__", ((_broken,),))
    assert main(["doctor"]) == 1
    assert "bad   broken     the driver is gone; report this line" in capsys.readouterr().out


def test_gpus_that_pytorch_does_not_reach_are_bad() -> None:
    machine = Machine(2, 80 * 2**30, 2**40, "")
    (line,) = (line for line in NAMED["_versions"](machine) if line.is_bad)
    assert "reaches none of 2 GPUs" in line.text
    assert "install a build for the driver's CUDA" in line.remedy


def test_a_sum_that_fails_names_its_command() -> None:
    """NCCL fails where PyTorch has no GPU."""
    (line,) = NAMED["_sum"](Machine(2, 80 * 2**30, 2**40, ""))
    assert line.is_bad
    assert line.text.startswith("two ranks by nccl failed (")
    assert "-m lct_tools.collective nccl 256" in line.remedy


def test_a_machine_without_a_name_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(name: str) -> str:
        raise OSError(f"{name} is not known")

    monkeypatch.setattr("socket.gethostbyname", no_address)
    first = next(iter(NAMED["_network"](this_machine())))
    assert (first.is_bad, first.remedy) == (False, "add it to /etc/hosts")
