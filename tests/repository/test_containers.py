"""Laws of docker/, without docker: copied files exist, extras are declared, and the installed program runs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import trainer
from longshard.context.planning.capabilities import FLASH_PACKAGES
from trainer.config.toml import tomllib

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TORCH = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]


@dataclass(frozen=True)
class Container:
    """The instructions of a Dockerfile: their names and their texts, in their order."""

    instructions: list[tuple[str, str]] = field(default_factory=list)

    def texts(self, name: str) -> list[str]:
        return [text for instruction, text in self.instructions if instruction == name]

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command that RUN has."""
        return [shlex.split(part) for text in self.texts("RUN") for part in re.split(r"&&|\|\|", text)]

    @property
    def copied(self) -> list[tuple[str, str]]:
        """Each source that is copied out of the context, with its target in the working folder."""
        pairs = [shlex.split(text) for text in self.texts("COPY")]
        return [(source, words[-1]) for words in pairs for source in words[:-1]]

    @property
    def image(self) -> str:
        """The image that it begins with."""
        (default,) = [text.partition("=")[2] for text in self.texts("ARG") if text.startswith("IMAGE=")]
        assert self.texts("FROM") == ["${IMAGE}"]
        return default


def parsed(path: Path) -> Container:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return Container([tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()])


def is_ignored(path: str, rules: str) -> bool:
    """Whether .dockerignore leaves a file out: the last rule that matches it or a folder of it decides."""
    ignored = False
    parts = path.split("/")
    for rule in (line.strip() for line in rules.splitlines() if line.strip() and not line.startswith("#")):
        pattern = rule.removeprefix("!")
        for end in range(1, len(parts) + 1):
            above = parts[:end]
            anywhere = pattern.startswith("**/") and fnmatchcase(above[-1], pattern[3:])
            same_depth = pattern.count("/") == end - 1 and fnmatchcase("/".join(above), pattern)
            if anywhere or same_depth:
                ignored = not rule.startswith("!")
                break
    return ignored


def context() -> list[str]:
    """The files of the repository that docker sees."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    rules = (ROOT / ".dockerignore").read_text()
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file() and not is_ignored(name, rules)]


def copy_out_of_context(pairs: list[tuple[str, str]], folder: Path) -> None:
    """Copy sources to their targets in a folder, which stands for the working folder."""
    files = context()
    for source, target in pairs:
        for name in (name for name in files if name == source or name.startswith(f"{source}/")):
            place = folder / target / os.path.relpath(name, source if (ROOT / source).is_dir() else Path(source).parent)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place)


def test_what_is_ignored() -> None:
    rules = "# all\n*\n!trainer\n**/__pycache__\n**/*.pyc\n"
    assert not is_ignored("trainer/assets/a.tiktoken", rules)
    assert is_ignored("trainer/data/__pycache__/a.pyc", rules)
    assert is_ignored("trainer/a.pyc", rules)
    assert is_ignored("README.md", rules)
    assert is_ignored("docs/trainer/a.md", rules)


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def container(request: pytest.FixtureRequest) -> Container:
    return parsed(request.param)


def test_every_source_exists_and_is_not_ignored(container: Container) -> None:
    files = context()
    assert len(container.copied) > 5
    for source, _ in container.copied:
        assert (ROOT / source).exists(), source
        assert any(name == source or name.startswith(f"{source}/") for name in files), f"{source} is ignored"
    packages = {Path(name).parts[0] for name in files if "/" in name}
    assert packages == {source for source, _ in container.copied if (ROOT / source).is_dir()}
    assert {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]} == packages


def test_every_extra_exists(container: Container) -> None:
    installed = [word for words in container.commands for word in words if word.startswith(".[")]
    assert len(installed) == 1
    extras = installed[0][2:-1].split(",")
    assert set(extras) <= PROJECT["project"]["optional-dependencies"].keys()
    assert {"hub", "serve"} <= {*extras}


def test_every_file_that_pip_reads_is_copied_before(container: Container) -> None:
    there: set[str] = set()
    for instruction, text in container.instructions:
        if instruction == "COPY":
            there |= {*shlex.split(text)[:-1]}
        elif instruction == "RUN":
            there |= {*re.findall(r"> (\S+\.txt)", text)}
            read = re.findall(r"pip install[^&|]* -[rc] (\S+)", text)
            assert {*read} <= there, text


def test_the_python_and_the_torch_of_the_image_fit() -> None:
    cpu, gpu = (parsed(ROOT / "docker" / f"{name}.Dockerfile") for name in ("cpu", "gpu"))
    least = PROJECT["project"]["requires-python"].removeprefix(">=").split(".")
    version = re.fullmatch(r"python:(\d+)\.(\d+)-slim-\w+", cpu.image)
    assert [*map(int, version.groups())] >= [*map(int, least)]
    pin = shlex.split(cpu.texts("RUN")[1].partition(">")[0])
    shown = subprocess.run(pin, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == f"torch=={TORCH}\n"
    torch_there, cuda = re.fullmatch(r"pytorch/pytorch:([\d.]+)-cuda([\d.]+)-cudnn9-devel", gpu.image).groups()
    assert torch_there == TORCH
    (flash,) = [package for package in FLASH_PACKAGES if package.name == "FlashAttention-3"]
    assert f"cu{cuda.replace('.', '')}" == flash.install.rpartition("/")[2]


def test_flash_attention_is_installed_as_the_program_says_and_only_as_a_wheel() -> None:
    (command,) = [words for words in parsed(ROOT / "docker" / "gpu.Dockerfile").commands if "flash-attn-3" in words]
    (flash,) = [package for package in FLASH_PACKAGES if package.name == "FlashAttention-3"]
    assert {*flash.install.split()} <= {*command}
    assert command[command.index("--only-binary") + 1] == ":all:"


def test_the_user_is_not_root_and_the_program_is_the_entry(container: Container) -> None:
    order = [name for name, _ in container.instructions]
    assert "RUN" not in order[order.index("USER") :]
    assert int(container.texts("USER")[0]) >= 1000
    entry = json.loads(container.texts("ENTRYPOINT")[0])
    assert entry == ["lct"]
    assert entry[0] in PROJECT["project"]["scripts"]


def test_a_comment_names_this_file() -> None:
    for path in FILES:
        named = re.findall(r"docker build -f (\S+) -t \S+ \.", path.read_text())
        assert named == [str(path.relative_to(ROOT))]


def test_the_copied_files_install_and_the_program_runs(container: Container, tmp_path: Path) -> None:
    """The step that installs the repository, with the packages of this environment instead of the network's."""
    build = tmp_path / "build"
    copy_out_of_context(container.copied, build)
    (install,) = [words for words in container.commands if any(word.startswith(".[") for word in words)]
    (there,) = [word for word in install if word.startswith(".[")]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--no-warn-script-location"]
    options = [*offline, "--quiet", "--prefix", str(tmp_path / "prefix"), there]
    command = [sys.executable, "-m", *install[: install.index("-c")], *options]
    installed = subprocess.run(command, cwd=build, capture_output=True, text=True, timeout=180)
    assert installed.returncode == 0, installed.stderr
    (packages,) = (tmp_path / "prefix" / "lib").glob("python*/site-packages")
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(packages)}
    work = tmp_path / "work"
    work.mkdir()

    def run(*arguments: str) -> str:
        script = str(tmp_path / "prefix" / "bin" / json.loads(container.texts("ENTRYPOINT")[0])[0])
        command = [sys.executable, script, *arguments]
        return subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, timeout=120).stdout

    assert run("--version") == f"lct {trainer.__version__}\n"
    assert "the settings are valid" in run("check", "debug_model", "--world-size", "2")
    # This environment may have the packages, too; each must come from the copied files.
    names = sorted(source for source, _ in container.copied if (ROOT / source).is_dir())
    program = f"import {', '.join(names)}\nfor module in ({', '.join(names)}): print([*module.__path__][0])"
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, timeout=120)
    assert shown.stdout.splitlines() == [str(packages / name) for name in names], shown.stderr


# ---- the whole image for CPUs, step by step


@contextmanager
def bound(folders: list[str], root: Path) -> Iterator[None]:
    """Show folders of this machine in a root folder, at the same paths."""
    mounted = []
    try:
        for folder in folders:
            place = Path(f"{root}{folder}")
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "--bind", folder, place], check=True)
            mounted.append(place)
        yield
    finally:
        for place in reversed(mounted):
            # at once, in use or not: what removes the root folder later must not reach this machine's folders
            subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
def test_the_steps_of_the_image_for_cpus_build_it_in_a_root_folder(tmp_path: Path) -> None:
    """Each RUN in a chroot of the image's Debian, with pip's settings of this machine; then a training by its user.

    A folder of wheels in PIP_FIND_LINKS takes the place of PyTorch's index, where the network has no such index.
    """
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap")
    container, root = parsed(ROOT / "docker" / "cpu.Dockerfile"), tmp_path / "root"
    python, _, suite = container.image.removeprefix("python:").split("-")
    packages = "--include=python3,python3-pip,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", packages, suite, root], check=True, stdout=subprocess.DEVNULL)
    for file in ("/etc/pip.conf", "/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"):
        if Path(file).exists():
            shutil.copy(file, f"{root}{file}")
    wheels = os.environ.get("PIP_FIND_LINKS", "").split()
    pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    variables = {"PATH": os.environ["PATH"], "HOME": "/root", "PIP_BREAK_SYSTEM_PACKAGES": "1"} | pip
    folder, user = "/", "0"

    def run(shell: str) -> str:
        words = ["chroot", f"--userspec={user}:{user}", root, "sh", "-ec", f"cd {folder}; {shell}"]
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, f"{shell}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    with bound(["/proc", "/dev", *wheels], root):
        assert run("python3 -V").startswith(f"Python {python}.")
        for instruction, text in container.instructions:
            if instruction == "RUN":
                run(text.replace(" --index-url https://download.pytorch.org/whl/cpu", "") if wheels else text)
            elif instruction == "COPY":
                pairs = [pair for pair in container.copied if pair[0] in shlex.split(text)]
                copy_out_of_context(pairs, Path(f"{root}{folder}"))
            elif instruction == "WORKDIR":
                folder = text
                Path(f"{root}{folder}").mkdir(parents=True, exist_ok=True)
            elif instruction == "ENV":
                variables |= dict(word.split("=") for word in shlex.split(text))
            elif instruction == "USER":
                user = text
        assert run("lct --version") == f"lct {trainer.__version__}\n"
        shown = run("lct train debug_model --ngpu 2 --training.steps 2")
        assert "training done: 2 steps" in shown
    shutil.rmtree(root)
