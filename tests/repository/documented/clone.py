"""A copy of the repository and its environment. Its programs run warm and in short form (`warm_client.py`)."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

from lct_planner import shim
from tests.repository.documented.brought import brought
from tests.repository.documented.pages import ROOT
from tests.repository.documented.warm_client import PLAIN, SERVERS, SHORTENED, WITH_SHIM

_PROGRAMS = {"lct": "trainer.commands.main", "torchrun": "torch.distributed.run", "tensorboard": "tensorboard.main"}
_SCRIPT = "#!{python}\nimport sys\n\nfrom {module} import {function} as main\n\nsys.exit(main())\n"
_CLIENT = """#!{python} -ISE
import sys

sys.path.insert(0, {tree!r})
from tests.repository.documented.warm_client import run

run({name!r}, {real!r})
"""
_OURS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTHONPATH", "NGPU", "CONFIG_FILE", "LOG_RANK", "PYTHON", "OMP_NUM_THREADS"),
    *("MAKEFLAGS", "MAKELEVEL", "MFLAGS"),  # of the make that runs the tests
    *(SERVERS, SHORTENED),
)
_TYPED = "2 + 3?\n"
"""What a command reads on its standard input."""
_SECONDS = 900


class Clone:
    """The files that git has or would add, with their history, an environment as `make` installs it, and warm servers.

    folder: a new folder for all of it; the copy is in `tree`.
    """

    def __init__(self, folder: Path) -> None:
        self.tree, self._real = folder / "trainer-clone", folder / "environment"
        self._kept, self._sockets = folder / "brought", folder / "sockets"
        self._servers: list[subprocess.Popen] = []
        self._page: str | None = None
        _copy(self.tree)
        _install(self.tree, self._real)
        self._sockets.mkdir()
        self._kept.mkdir()

    def __enter__(self) -> "Clone":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.stdin.close()
            server.wait()

    def turn_to(self, page: str) -> None:
        """Remove what the commands of the previous page have written, if this is another page."""
        if self._page == page:
            return
        self._page = page
        subprocess.run(["git", "checkout", "--quiet", "."], cwd=self.tree, check=True)
        kept = ["-e", ".venv", "-e", "__pycache__"]
        subprocess.run(["git", "clean", "-fdxq", *kept], cwd=self.tree, check=True)

    def bring(self, command: str) -> None:
        """Make the files that a command reads and that the reader brings or an earlier command has made."""
        for path, script in brought(command, self.tree):
            kept = self._kept / hashlib.sha256(script.encode()).hexdigest()
            here = self.tree / path
            if not kept.exists() and (not here.exists() or script.startswith("rm ")):
                made = self.run(script, cold=False)
                assert made.returncode == 0, f"{path}: {made.stdout}{made.stderr}"
                subprocess.run(["cp", "-r", here, kept], check=True)
            elif not here.exists():
                here.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-r", kept, here], check=True)

    def run(self, text: str, *, cold: bool) -> subprocess.CompletedProcess:
        """Run bash in the copy, as after `source .venv/bin/activate`. cold: every program is started as usual."""
        variables = self._variables()
        if not cold:
            self._start_servers(variables)
            variables[SERVERS] = str(self._sockets)
        return _run(["bash", "-o", "pipefail", "-c", text], self.tree, variables)

    def warm(self) -> dict[str, str]:
        """Return the variables with which programs of the copy start warm, and as they are asked for."""
        self._start_servers(self._variables())
        return {SERVERS: str(self._sockets), SHORTENED: "1", "VIRTUAL_ENV": str(self.tree / ".venv")}

    def _variables(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key not in _OURS}
        folder = self.tree / ".venv"
        path = os.pathsep.join([str(folder / "bin"), inherited["PATH"]])
        return inherited | {"PATH": path, "VIRTUAL_ENV": str(folder), "CUDA_VISIBLE_DEVICES": ""}

    def _start_servers(self, variables: Mapping[str, str]) -> None:
        """Start the servers, if this is the first warm command."""
        if self._servers:
            return
        kinds = {PLAIN: variables}
        if not shim.why_not():
            kinds[WITH_SHIM] = {**variables, "LD_PRELOAD": shim.environment(shim.build())["LD_PRELOAD"]}
        for name, kind_variables in kinds.items():
            command = [self._real / "bin" / "python", "-m", "tests.repository.documented.warm_server", "new"]
            command[-1] = self._sockets / name
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._servers.append(subprocess.Popen(command, cwd=self.tree, env=kind_variables, **pipes))
        for server in self._servers:
            assert server.stdout.readline() == b"ready\n"


def _run(command: list[str], folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess:
    """As `subprocess.run`, and a command that takes too long is killed with all that it has started."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, env=variables, text=True, start_new_session=True, **pipes)
    try:
        stdout, stderr = process.communicate(_TYPED, timeout=_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _copy(tree: Path) -> None:
    git = ["git", "-c", "user.name=tests", "-c", "user.email=tests@localhost"]
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
        subprocess.run([*git, "init", "--quiet"], cwd=tree, check=True)
    # `turn_to` goes back to this commit.
    subprocess.run(["git", "add", "--all"], cwd=tree, check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "what is tested"], cwd=tree, check=True)


def installed_packages() -> list[str]:
    """Return the package folders of this environment. A .pth file may have added folders of another environment."""
    return [path for path in sys.path if "site-packages" in Path(path).parts]


def _install(tree: Path, real: Path) -> None:
    """Make an environment with the packages of this one and the program of `tree`, and clients of it in `.venv`."""
    venv.create(real, with_pip=False)
    venv.create(tree / ".venv", with_pip=False)
    python = real / "bin" / "python"
    (packages,) = (real / "lib").glob("*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join([str(tree), *installed_packages(), ""]))
    for name, module in _PROGRAMS.items():
        function = "run_main" if name == "tensorboard" else "main"
        (python.parent / name).write_text(_SCRIPT.format(python=python, module=module, function=function))
        (python.parent / name).chmod(0o755)
    for name in ("python", "python3", *_PROGRAMS):
        client = tree / ".venv" / "bin" / name
        client.unlink(missing_ok=True)  # a link to the interpreter
        words = {"python": Path(sys.executable).resolve(), "tree": str(tree), "name": name, "real": str(python.parent)}
        client.write_text(_CLIENT.format(**words))
        client.chmod(0o755)
    for name in (".installed", ".installed-dev"):
        (tree / ".venv" / name).touch()
