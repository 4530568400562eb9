"""Laws of commands that read a finished run: whose weights they use, and that nothing else changes what these mean."""

import shutil
from pathlib import Path

import pytest

from tests.hf_decoders import LLAMA, saved
from tests.unit.saved_runs import saved_run
from trainer.commands.finished_run import weights_of
from trainer.commands.main import main as lct

LORA = "--lora.rank=2"


def small_run(folder: Path, *arguments: str, **settings: object) -> Path:
    """A run of the debug model whose steps are small."""
    saved_run(folder, "--training.seq_len=64", *arguments, **settings)
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert lct([*map(str, arguments)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1, message
    return message


@pytest.mark.parametrize("adapters", [False, True])
def test_a_run_that_has_saved_nothing_has_no_weights(tmp_path: Path, capsys, adapters: bool) -> None:
    hf, run, out = saved(tmp_path / "hf", LLAMA), tmp_path / "run", tmp_path / "out"
    saved_run(run, f"--model.path={hf}", "--training.seq_len=64", *[LORA] * adapters)
    shutil.rmtree(run / "checkpoint")
    ways = ["convert to-hf RUN OUT", "generate RUN", "evaluate RUN", "chat RUN", "serve RUN"]
    ways += ["convert to-peft RUN OUT"] * adapters
    for way in ways:
        arguments = way.replace("RUN", str(run)).replace("OUT", str(out)).split()
        message = refusal(capsys, *arguments)
        assert "holds no checkpoint; train with --checkpoint.enable to save the last step" in message, way
        assert message.endswith(f"; the weights that it started from are in {hf}\n")
    assert not out.exists()


def test_a_command_says_whose_weights_it_uses(tmp_path: Path, capsys) -> None:
    run = small_run(tmp_path / "run")
    assert lct(["generate", str(run), "--tokens", "1", "--prompt", "a"]) == 0
    assert f"weights: {run}/checkpoint/step-3\n" in capsys.readouterr().err
    hf = saved(tmp_path / "hf", LLAMA)
    config = saved_run(tmp_path / "adapted", f"--model.path={hf}", "--training.seq_len=64", LORA)
    assert weights_of(config) == f"{hf} with the adapters of {tmp_path}/adapted/checkpoint/step-3"
