"""Laws of commands that read a finished run: whose weights they use, and that nothing else changes what these mean."""

import re
import shutil
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hf_decoders import LLAMA, saved
from tests.unit import saved_runs
from tests.unit.saved_runs import saved_run
from trainer.commands.finished_run import step_configuration, weights_of
from trainer.commands.main import main as lct
from trainer.config.loader import parse_command_line
from trainer.config.schema import Model
from trainer.hugging_face.folder import HFFolder
from trainer.runtime.dump_folder import save_configuration
from trainer.stores.state import parse_state, state_text
from trainer.stores.store import STATE_FILE, Store

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


LATER = {
    "tokenizer": lambda tmp: f"--model.tokenizer_path={other_tokenizer(tmp)}",
    "rope": lambda tmp: "--model.rope_theta=1000.0",
    "norm": lambda tmp: "--model.norm_type=layernorm",
    "type": lambda tmp: "--training.dtype=bfloat16",
}


def other_tokenizer(folder: Path) -> str:
    """The shipped tokenizer with its ranks in another order."""
    lines = Path(Model().tokenizer_file).read_text().splitlines()
    tokens, ranks = zip(*(line.split() for line in lines), strict=True)
    file = folder / "other.tiktoken"
    reordered = (*tokens[:256], *tokens[:255:-1])
    file.write_text("\n".join(map(" ".join, zip(reordered, ranks, strict=True))))
    return str(file)


@pytest.mark.parametrize("changed", LATER)
def test_a_later_run_does_not_change_what_a_step_means(tmp_path: Path, capsys, changed: str) -> None:
    """The later run saves nothing; it replaces the folder's config.toml."""

    def everything() -> tuple[str, str, object]:
        assert lct(["generate", str(run), "--tokens", "8", "--prompt", "import", "--temperature", "0"]) == 0
        text = capsys.readouterr().out
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert lct(["convert", "to-hf", str(run), str(tmp_path / "out")]) == 0
        capsys.readouterr()
        assert lct(["verify", str(run)]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return text, re.sub(r"\(.* s\)", "", printed.out), HFFolder(tmp_path / "out").entries.content

    run = small_run(tmp_path / "run")
    before = everything()
    later = ["--training.seq_len=64", f"--job.dump_folder={run}", LATER[changed](tmp_path)]
    save_configuration(parse_command_line(later).config)
    assert everything() == before
    (run / "config.toml").unlink()
    assert lct(["verify", f"{run}/checkpoint/step-3"]) == 0
    assert capsys.readouterr().err == ""


def test_each_step_has_its_own_configuration(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    small_run(run, "--model.rope_theta=1000.0", step=5)
    read = {step: step_configuration(run / "config.toml", step).model.rope_theta for step in (3, 5, -1)}
    assert read == {3: None, 5: 1000.0, -1: 1000.0}


def test_an_older_step_has_the_configuration_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_runs, "configuration_text", lambda config: None)
    run = small_run(tmp_path / "run", "--model.rope_theta=1000.0")
    assert not (run / "checkpoint" / "step-3" / "config.toml").exists()
    assert step_configuration(run / "config.toml", -1).model.rope_theta == 1000.0


def test_a_damaged_configuration_of_a_step_is_found(tmp_path: Path, capsys) -> None:
    run = small_run(tmp_path / "run")
    file = run / "checkpoint" / "step-3" / "config.toml"
    file.write_bytes(file.read_bytes().replace(b"3", b"4", 1))
    assert "the check sum of config.toml is wrong" in refusal(capsys, "generate", run)
    assert lct(["verify", str(run)]) == 1
    assert "step-3: damaged: " in capsys.readouterr().out


READS = (
    "verify stranger",
    "verify stranger/checkpoint",
    "verify stranger/checkpoint/step-3",
    "generate stranger --tokens 1 --prompt a",
    "evaluate stranger --tasks needle --lengths 256 --samples 1 --depths 50 --output out",
    "convert to-hf stranger out",
    "check stranger/config.toml --training.steps 1",
    "data show stranger/config.toml",
    "train stranger/config.toml --print-config",
    "estimate stranger/config.toml",
)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of somebody else. Its configuration names a package in its folder, which leaves a mark if it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    small_run(tmp_path / "stranger")
    (tmp_path / "stranger" / "evil.py").write_text("import pathlib\npathlib.Path('mark').touch()\n")
    files = [tmp_path / "stranger" / "config.toml", tmp_path / "stranger" / "checkpoint" / "step-3" / "config.toml"]
    content = files[0].read_text().replace("imports = []", 'imports = ["stranger.evil"]').encode()
    assert b"evil" in content
    for file in files:
        file.write_bytes(content)
    folder = Store(tmp_path / "stranger" / "checkpoint")
    state = parse_state(folder.read(folder.step(3) / STATE_FILE), 3)
    sizes = {**state.files, "config.toml": len(content)}
    state = replace(state, files=sizes, sums={**state.sums, "config.toml": zlib.crc32(content)})
    folder.write(folder.step(3) / STATE_FILE, state_text(state))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "stranger"]:
        del sys.modules[name]


def test_an_older_checkpoint_with_rslora_has_a_larger_alpha(tmp_path: Path) -> None:
    """Such a run divided by the square root of the rank, 4."""
    store = Store(small_run(tmp_path / "run") / "checkpoint")
    state = parse_state(store.read(store.step(3) / STATE_FILE), 3)
    older = replace(state, model=state.model | {"lora.rank": 16, "lora.alpha": 8.0, "lora.rslora": True})
    assert parse_state(state_text(older), 3).model["lora.alpha"] == 32.0


@pytest.mark.parametrize("command", READS)
def test_reading_a_run_runs_none_of_its_code(stranger: Path, capsys, command: str) -> None:
    arguments = command.split()
    if arguments[0] == "verify":
        assert lct(arguments) == 0
        note, line = capsys.readouterr()[::-1]
        assert note == (
            "note: entries are not compared with a model (job.imports in its config.toml names code, and lct verify "
            "runs none)\n"
        )
        assert line.startswith("step-3: whole: ")
    else:
        message = refusal(capsys, *arguments)
        assert "job.imports = 'stranger.evil' in the config.toml of a run names code" in message
        assert "add --allow-imports if you trust it" in message
    assert not (stranger / "mark").exists()


@pytest.mark.parametrize(
    "command",
    [
        "train stranger/config.toml --print-config --allow-imports",
        "train mine.toml --print-config",
        "train stranger/config.toml --print-config --job.imports stranger.evil",
        "generate stranger --tokens 1 --prompt a --allow-imports",
    ],
)
def test_what_the_user_names_is_imported(stranger: Path, capsys, command: str) -> None:
    (stranger / "mine.toml").write_text('base = "stranger/config.toml"\n')
    assert lct(command.split()) == 0
    assert (stranger / "mark").exists()
