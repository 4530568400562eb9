"""Laws of `lct completion`: real shells complete the commands, presets and options that the program has."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lct_tools.completion import SCRIPTS
from tests.slow import slow
from trainer.commands.main import COMMANDS, main
from trainer.config.errors import ConfigError
from trainer.config.keys import keys_of
from trainer.config.schema import JobConfig

ROOT = Path(__file__).resolve().parents[2]
PRESETS = {path.stem for path in (ROOT / "train_configs").glob("*.toml")}
CASES = [
    ("lct che", {"check"}),
    ("lct to", {"tokenize", "tokenizer"} - {"to"}),
    ("lct train llama3_8b_l", {name for name in PRESETS if name.startswith("llama3_8b_l")}),
    ("lct data show deb", {"debug_model"}),
    (
        "lct train sft --parallelism.context",
        {key for key in keys_of(JobConfig) if key.startswith("parallelism.context")},
    ),
    ("lct check --world", {"world-size"}),
    ("lct train --checkpoint.no_en", {"checkpoint.no_enable"}),
    ("lct generate outp", {"outputs_here"}),
]
"""Words before the cursor -> what completes the last one, options without their dashes."""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a program `lct`, the script of each shell, and a folder that a run could have."""
    program = tmp_path / "bin" / "lct"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m trainer "$@"\n')
    program.chmod(0o755)
    (tmp_path / "outputs_here").mkdir()
    for shell, script in SCRIPTS.items():
        (tmp_path / f"completion.{shell}").write_text(script)
    return tmp_path


def environment(here: Path) -> dict[str, str]:
    path = f"{here / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(here), "TERM": "dumb", "LC_ALL": "C.UTF-8"}


def answer(shell: str, here: Path, program: str) -> list[str]:
    command = [shell, "-c", program]
    done = subprocess.run(command, cwd=here, env=environment(here), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def by_bash(here: Path, line: str) -> set[str]:
    """What the function of the script offers, or without an offer bash itself: files, as `-o default` says."""
    words = line.split(" ")
    listed = " ".join(f"'{word}'" for word in words)
    program = f"source completion.bash; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _lct; "
    offered = answer("bash", here, f'{program} printf "%s\\n" "${{COMPREPLY[@]}}"')
    registered = answer("bash", here, "source completion.bash; complete -p lct")
    assert " ".join(registered) == "complete -o default -F _lct lct"
    return {*(offered or answer("bash", here, f"compgen -f -- '{words[-1]}' || true"))}


def by_fish(here: Path, line: str) -> set[str]:
    offered = answer("fish", here, f"source completion.fish; complete -C '{line}'")
    return {word.removesuffix("/") for word in offered}


def by_terminal(shell: list[str], here: Path, line: str) -> set[str]:
    """Type a line and tabs into a shell with a terminal, and return the words that it shows and completes."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(here)
        os.execvpe(shell[0], shell, environment(here))
    text = ""

    def shown(until: str, seconds: float = 30) -> None:
        nonlocal text
        deadline = time.monotonic() + seconds
        while not re.search(until, text) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.2)[0]:
                text += os.read(terminal, 65536).decode(errors="replace")

    try:
        os.write(terminal, f"source completion.{Path(shell[0]).name}; echo rea''dy\n".encode())
        shown(r"\nready|\rready")
        text = ""
        os.write(terminal, f"{line}\t\t".encode())
        shown("never", seconds=6)
    finally:
        os.write(terminal, b"\x03exit\n")
        os.close(terminal)
        os.waitpid(process, 0)
    return {*re.findall(r"[\w.-]+", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", " ", text))}


def bare(words: set[str]) -> set[str]:
    return {word.removeprefix("--") for word in words}


@pytest.mark.parametrize(("line", "wanted"), CASES, ids=[line for line, _ in CASES])
def test_bash_completes(here: Path, line: str, wanted: set[str]) -> None:
    assert wanted
    assert bare(by_bash(here, line)) == wanted


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
@pytest.mark.parametrize(("line", "wanted"), CASES, ids=[line for line, _ in CASES])
def test_fish_completes(here: Path, line: str, wanted: set[str]) -> None:
    assert bare(by_fish(here, line)) == wanted


TYPED = [("lct che", {"check"}), ("lct train qwen3_8b", {name for name in PRESETS if name.startswith("qwen3_8b")})]
SHELLS = {"bash": ["bash", "--norc", "--noprofile"], "zsh": ["zsh", "-f"]}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("line", "wanted"), [TYPED[0], *slow(TYPED[1])])
def test_a_tab_in_a_terminal_completes(here: Path, shell: str, line: str, wanted: set[str]) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    assert wanted <= by_terminal(SHELLS[shell], here, line)


def test_the_first_word_is_any_command_and_an_option_any_key(here: Path) -> None:
    assert by_bash(here, "lct ") == {*COMMANDS}
    options = bare(by_bash(here, "lct train --"))
    assert {*keys_of(JobConfig)} <= options
    assert by_bash(here, "lct train --no.such") == set()
    assert by_bash(here, "lct train ") == PRESETS


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_command_prints_the_script(shell: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == f"{SCRIPTS[shell]}\n"


def test_another_shell_is_one_sentence() -> None:
    from lct_tools.completion import main as completion

    with pytest.raises(ConfigError, match=r"'tcsh' \(choose from"):
        completion(["tcsh"])
