"""Law: every command and every program of the documentation runs as written in a fresh clone.

Bash runs a command as it stands. Its programs run in a shorter form, by one rule for each program (`shortened.py`), in
children of a process that has imported them (`warm_server.py`). The programs of the README, and all programs with
`--cold`, start as a user starts them. `brought.py` makes the files that a reader has. `exceptions.py` has the commands
that cannot run so, with reasons. The commands of a page share a copy of the repository, in the order of the page.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.doc_outputs import PAGES as PAGES_WITH_OUTPUT
from scripts.doc_outputs import commands as with_output
from tests.repository.documented.brought import BROUGHT, blocks, brought
from tests.repository.documented.clone import Clone
from tests.repository.documented.exceptions import EXCEPTIONS, exception_of
from tests.repository.documented.expected import expected, is_slow, written
from tests.repository.documented.pages import PAGES, README, ROOT, Command, all_commands, commands, group
from tests.repository.documented.shortened import APPENDED, program_of, shorter

COMMANDS = all_commands()
PROGRAMS = {
    "docs/data.md": 1,
    "examples/fields/README.md": 1,
    "docs/context_parallelism.md": 1,
}
"""Pages whose Python blocks are one program, and on how many ranks it runs."""


def cases() -> Iterator[object]:
    for text, command in COMMANDS.items():
        marks = [pytest.mark.slow] if exception_of(text) is None and is_slow(command) else []
        yield pytest.param(command, id=f"{command.page}: {text[:90]}", marks=marks)


# ---- the tables


def test_every_exception_is_about_a_command() -> None:
    used = {id(exception_of(command)) for command in COMMANDS}
    assert not [exception.pattern for exception in EXCEPTIONS if id(exception) not in used]
    assert all(exception.why for exception in EXCEPTIONS)


def test_every_short_form_is_of_a_command() -> None:
    words = [text.split() for text in COMMANDS if not exception_of(text)]
    programs = {program_of(some[i:])[0] for some in words for i in range(len(some))}
    assert APPENDED.keys() <= programs


def test_all_that_is_brought_is_read(tmp_path: Path) -> None:
    texts = [exception_of(text).text(text) if exception_of(text) else text for text in COMMANDS]
    paths = {path for text in texts for path, _ in brought(text, tmp_path / "tree")}
    assert BROUGHT.keys() <= paths


def test_what_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "lct is a program.\n\n    lct check a.toml \\\n        --world-size 8    # all of it\n    $ make train\n\n"
        "    step 1/100  loss 8.4\n    made by make\n    A=1 B=2 ./run_llama_train.sh\n"
        "* a list:\n\n      python -c 'print(1)\n          print(2)'\n\n"
        "```bash\ngit status\n```\n```python\npython = 3\nfor i in range(3):\n    lct = 4\n```\n"
        "    for i in 1 2; do sbatch x; done\n    for i in range(2):\n"
    )
    (tmp_path / "preset.toml").write_text('#   lct train preset   # at once\n# lctx\nname = "lct train"\n')
    assert list(commands(tmp_path / "page.md")) == [
        "lct check a.toml --world-size 8",
        "$ make train",
        "A=1 B=2 ./run_llama_train.sh",
        "python -c 'print(1)\nprint(2)'",
        "git status",
        "for i in 1 2; do sbatch x; done",
    ]
    assert list(commands(tmp_path / "preset.toml")) == ["lct train preset"]


@pytest.mark.parametrize(
    ("command", "short"),
    [
        (
            "lct train --training.steps 300 --training.seq_len=4096",
            "lct train --training.steps 6 --training.seq_len=256 --training.global_batch_size=-1",
        ),
        ("lct train llama3_8b --ngpu 8", "lct train llama3_8b --ngpu 8 --check-config --world-size=8"),
        ("torchrun --nproc-per-node 8 train.py --help", "torchrun --nproc-per-node 2 train.py --help"),
        ("lct generate outputs/a --ngpu 8 --tokens 100", "lct generate outputs/a --ngpu 2 --tokens 100 --tokens 4"),
        ("lct plan --seq-len 65536 --degree 4", "lct plan --seq-len 65536 --degree 4"),
        ("python -m trainer check a.toml", "python -m trainer check a.toml"),
        ("git status", "git status"),
    ],
)
def test_a_short_form(command: str, short: str) -> None:
    assert shorter(command.split(), {}) == short.split()


def test_commands_are_found() -> None:
    assert {command.page for command in COMMANDS.values()} > {"README.md", "CONTRIBUTING.md", "docs/checkpoints.md"}
    assert len(COMMANDS) > 80
    for path in PAGES_WITH_OUTPUT:
        shown = {text for text, command in COMMANDS.items() if command.shown is not None}
        text = path.read_text()
        commands = with_output(text)
        assert len(commands) == text.count("\n    $ ") > 3
        assert {*commands} <= shown


def test_all_python_of_the_pages_is_run() -> None:
    pages = {str(page.relative_to(ROOT)) for page in PAGES if "```python" in page.read_text()}
    assert pages == {*PROGRAMS}


# ---- the commands


@pytest.mark.parametrize("command", list(cases()))
def test_a_documented_command_runs(command: Command, clone: Clone, request: pytest.FixtureRequest) -> None:
    clone.turn_to(group(command.page))
    check(clone, command, cold=request.config.getoption("--cold") or command.page == str(README.relative_to(ROOT)))


def check(clone: Clone, command: Command, *, cold: bool) -> None:
    """Run a command. Check its exit code, its output and the files that it writes."""
    exception = exception_of(command.text)
    text = command.text if exception is None else exception.text(command.text)
    clone.bring(text)
    printed = [*expected(command.text, clone.tree)] if exception is None else [exception.says]
    result = clone.run(text, cold=cold)
    output = result.stdout + result.stderr
    refused = (command.shown or "").startswith("error: ")
    code = exception.code if exception else 2 if refused else 0
    assert result.returncode == code, f"{command.page}: {output[-5000:]}"
    if command.shown is not None:
        shown = result.stderr if refused else result.stdout
        if ROOT / command.page not in PAGES_WITH_OUTPUT:  # up to an empty line
            shown = shown[: len(command.shown)]
        assert shown == command.shown, "run `make docs`, or mend the page"
        return
    for pattern in printed:
        assert re.search(pattern, output, re.MULTILINE), f"no {pattern!r}: {output[-5000:]}"
    for name in [] if exception else written(command.text):
        path = clone.tree / name
        assert path.is_dir() or path.stat().st_size, f"{name} is not written"


@pytest.mark.parametrize(
    ("page", "ranks"), PROGRAMS.items(), ids=lambda value: f"{value}: " if value in PROGRAMS else ""
)
def test_the_python_of_a_page_is_a_program(page: str, ranks: int, clone: Clone) -> None:
    clone.turn_to(group(page))
    (clone.tree / "page.py").write_text(blocks(page))
    start = "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
    result = clone.run(f"{start} page.py", cold=False)
    assert result.returncode == 0, result.stderr[-5000:]


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_a_preset_is_checked_on_another_machine(cold: bool, clone: Clone) -> None:
    check(clone, Command("lct train llama3_8b --ngpu 8", "README.md", None), cold=cold)


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lct train --training.stpes 2", "did you mean 'training.steps'"),
        ("lct generate nowhere", "nowhere holds no run"),
        ("python nowhere.py", "nowhere.py"),
        ("lct check debug_model --world-size 2 --model.flavor 9B", "is not a flavor"),
    ],
)
def test_a_command_that_fails_is_seen(text: str, why: str, cold: bool, clone: Clone) -> None:
    with pytest.raises(AssertionError, match=why):
        check(clone, Command(text, "docs/configuration.md", None), cold=cold)
