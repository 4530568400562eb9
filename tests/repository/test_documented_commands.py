"""Law: every command and every program of the documentation runs as written in a fresh clone.

A table of rules, in documented_commands.py, says how each command is run: as written, or in a shorter form with the
reason. All share one copy of the repository with an environment of its own, in the order of the pages.
"""

import os
import re
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.doc_outputs import PAGES as PAGES_WITH_OUTPUT
from scripts.doc_outputs import commands as with_output
from scripts.doc_outputs import page as with_new_output
from tests.repository.documented_commands import PAGES, ROOT, RULES, Rule, all_commands, commands

COMMANDS = all_commands()
PROGRAMS = {
    "docs/data.md": 1,
    "examples/fields/README.md": 1,
    "docs/context_parallelism.md": 2,
    "docs/domain_parallelism.md": 2,
    "docs/transformers.md": 2,
}
"""Pages whose Python blocks are one program, and on how many ranks it runs."""
PACKAGE = "docs/your_own_model.md"
"""The page whose Python blocks are the files of a package, which test_your_own_model.py runs."""
_SCRIPT = "#!{python}\nimport sys\n\nfrom {module} import main\n\nsys.exit(main())\n"
_SCRIPTS = {"lct": "trainer.commands.main", "torchrun": "torch.distributed.run", "tensorboard": "tensorboard.main"}


def rule_of(command: str) -> Rule | None:
    """Return the first rule that a command matches."""
    return next((rule for rule in RULES if rule.text(command) is not None), None)


def blocks(page: str) -> str:
    """Return the Python blocks of a page as one program."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of what git has or would add, with its history and an environment as `make` installs it."""
    tree = tmp_path_factory.mktemp("clone") / "trainer-clone"
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, tree], check=True)
        for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    else:
        ignored = shutil.ignore_patterns(".venv", "outputs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
    _install(tree)
    yield tree
    shutil.rmtree(tree)


def _install(tree: Path) -> None:
    """Make `.venv` with the packages of this environment and the program of `tree`, without a download."""
    venv.create(tree / ".venv", with_pip=False)
    python = tree / ".venv" / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    (packages / "dependencies.pth").write_text(f"{tree}\n{sysconfig.get_path('purelib')}\n")
    for name, module in _SCRIPTS.items():
        function = "run_main as main" if name == "tensorboard" else "main"
        text = _SCRIPT.format(python=python, module=module).replace("import main", f"import {function}")
        (python.parent / name).write_text(text)
        (python.parent / name).chmod(0o755)
    (tree / ".venv" / ".installed").touch()


def run(text: str, clone: Path) -> subprocess.CompletedProcess:
    """Run bash in the copy, as after `source .venv/bin/activate`."""
    ours = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "PYTHONPATH",
        "NGPU",
        "CONFIG_FILE",
        "LOG_RANK",
        "PYTHON",
        "OMP_NUM_THREADS",
    ]
    ours += ["MAKEFLAGS", "MAKELEVEL", "MFLAGS"]  # of the make that runs the tests
    inherited = {key: value for key, value in os.environ.items() if key not in ours}
    path = os.pathsep.join([str(clone / ".venv" / "bin"), inherited["PATH"]])
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        cwd=clone,
        env=inherited | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def case(command: str) -> object:
    rule = rule_of(command)
    return pytest.param(command, id=command[:90], marks=[pytest.mark.slow] if rule is None or rule.slow else [])


def test_every_command_has_a_rule_and_every_rule_a_command() -> None:
    unruled = {command: pages for command, pages in COMMANDS.items() if rule_of(command) is None}
    assert not unruled, "add how to run them to RULES"
    used = {id(rule_of(command)) for command in COMMANDS}
    assert not [rule.pattern for rule in RULES if id(rule) not in used], "these rules have no command"
    assert not [rule.pattern for rule in RULES if (rule.run != r"\g<0>") != bool(rule.why)], (
        "say why it is not run as written"
    )


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


def test_commands_are_found() -> None:
    assert {page for pages in COMMANDS.values() for page in pages} > {
        "README.md",
        "CONTRIBUTING.md",
        "docs/checkpoints.md",
    }
    assert len(COMMANDS) > 80


def test_all_python_of_the_pages_is_run() -> None:
    assert {str(page.relative_to(ROOT)) for page in PAGES if "```python" in page.read_text()} == {*PROGRAMS, PACKAGE}


def test_outputs_are_those_of_the_commands(clone: Path) -> None:
    """The first test in the copy: later ones bring a tokenizer of their own."""
    for path in PAGES_WITH_OUTPUT:
        text = path.read_text()
        assert len(with_output(text)) > 5
        assert with_new_output(text, lambda command: run(command, clone).stdout) == text, "run scripts/doc_outputs.py"


@pytest.mark.parametrize("command", [case(command) for command in COMMANDS])
def test_a_documented_command_runs(command: str, clone: Path) -> None:
    rule = rule_of(command)
    assert rule is not None
    if rule.first:
        (clone / "docs" / "transformers.py").write_text(blocks("docs/transformers.md"))
        prepared = run(rule.first, clone)
        (clone / "docs" / "transformers.py").unlink()  # `make lint` reads every file
        assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    result = run(str(rule.text(command)).removeprefix("$ "), clone)
    output = result.stdout + result.stderr
    assert result.returncode == rule.code, f"{COMMANDS[command]}: {output[-5000:]}"
    assert re.search(rule.says, output, re.MULTILINE), output[-5000:]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "ranks"), PROGRAMS.items())
def test_the_python_of_a_page_is_a_program(page: str, ranks: int, clone: Path) -> None:
    (clone / "page.py").write_text(blocks(page))
    result = run("python page.py" if ranks == 1 else f"torchrun --nproc-per-node {ranks} page.py", clone)
    assert result.returncode == 0, result.stderr[-5000:]
