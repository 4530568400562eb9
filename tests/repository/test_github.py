"""Laws of the files that GitHub reads: they parse, what they run exists, and all files have one version."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import trainer
from scripts import set_version
from trainer.commands.main import COMMANDS
from trainer.config.toml import tomllib

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
INSTALLED = {"pip", "venv", "build", "twine"}
"""Modules that a workflow runs and that are not in the repository."""
PROGRAMS = {"bash", "python", "sed", "tail", "true"}


def workflow(name: str) -> dict:
    return yaml.safe_load((GITHUB / "workflows" / name).read_text())


def commands(jobs: dict) -> Iterator[list[str]]:
    """The words of each command of each step. A variable stays as it is."""
    for job in jobs.values():
        for step in job["steps"]:
            for line in step.get("run", "").splitlines():
                for command in re.split(r"\|\|", re.sub(r"^\w+=\$\((.*)\)$", r"\1", line.strip())):
                    yield shlex.split(command)


def unknown(words: list[str]) -> list[str]:
    """What a command names and the repository does not have."""
    program = words[0]
    if program.startswith("$RUNNER_TEMP/clean/bin/"):
        return []
    if program == "make":
        targets = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [word for word in words[1:] if word not in targets]
    if program not in PROGRAMS:
        return [program]
    if program == "python" and words[1] == "-m":
        return [] if words[2] in INSTALLED or (ROOT / words[2]).exists() else [words[2]]
    if program in ("python", "bash"):
        paths = [words[1], *(word for word in words[2:] if word.startswith(("tests/", "scripts/")))]
        return [path for path in paths if not (ROOT / path).exists()]
    return [word for word in words[1:] if word.startswith("requirements") and not (ROOT / word).exists()]


@pytest.mark.parametrize("path", [*GITHUB.rglob("*.yml"), ROOT / "CITATION.cff"], ids=lambda path: path.name)
def test_it_is_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


# ---- workflows


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_exists(path: Path) -> None:
    jobs = workflow(path.name)["jobs"]
    run = list(commands(jobs))
    assert run
    assert {tuple(words): unknown(words) for words in run if unknown(words)} == {}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("bash .ci/runs", ".ci/runs"),
        ("make teste", "teste"),
        ("python scripts/versions.py 2.13.0", "scripts/versions.py"),
        ("python scripts/test_versions.py 2.13.0 --tests tests/units", "tests/units"),
        ("python -m twin check", "twin"),
        ("cargo test", "cargo"),
    ],
)
def test_a_command_that_does_not_exist_is_seen(command: str, name: str) -> None:
    assert unknown(command.split()) == [name]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_ends(path: Path) -> None:
    """Only the job that uploads has a right more, and its steps run nothing of the repository."""
    text = workflow(path.name)
    assert text["permissions"] == {"contents": "read"}
    assert text["concurrency"]["group"]
    for name, job in text["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 90
        rights = job.get("permissions", {})
        assert rights == ({"id-token": "write"} if name == "publish" else {})
        used = [step["uses"] for step in job["steps"] if "uses" in step]
        assert used
        assert all(re.fullmatch(r"(actions/[\w-]+@v\d+|pypa/[\w-]+@release/v\d+)", action) for action in used)
        if rights:
            assert not [step for step in job["steps"] if "run" in step or "checkout" in step["uses"]]
            assert job["environment"] == "pypi"


def test_changes_run_what_the_project_runs() -> None:
    jobs = workflow("ci.yml")["jobs"]
    assert ["bash", ".ci/run"] in list(commands(jobs))
    versions = jobs["unit"]["strategy"]["matrix"]["python"]
    assert versions == ["3.10", "3.11", "3.12", "3.13"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={versions[0]}"
    assert workflow("ci.yml")["jobs"]["all"]["steps"][1]["with"]["python-version"] in versions


def test_the_pinned_torch_is_read_from_the_requirements() -> None:
    """The command of ci.yml, as it stands."""
    (step,) = [step for step in workflow("ci.yml")["jobs"]["unit"]["steps"] if "test_versions" in step.get("run", "")]
    first = step["run"].splitlines()[0]
    shown = subprocess.run(["bash", "-c", f'{first}; echo "$version"'], cwd=ROOT, capture_output=True, text=True)
    pins = (ROOT / "requirements.txt").read_text()
    assert f"torch=={shown.stdout.strip()} " in pins


def test_only_a_package_that_ran_is_uploaded() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert jobs["publish"]["needs"] == ["build", "try"]
    assert jobs["try"]["needs"] == "build"
    build = [" ".join(words) for words in commands({"build": jobs["build"]})]
    assert [*map(build.index, ["python -m build", "python -m twine check --strict dist/*"])] == [2, 3]
    assert yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text())[True] == {"push": {"tags": ["v*"]}}


def test_the_commands_of_the_readme_run_with_an_installed_program(tmp_path: Path) -> None:
    lct = tmp_path / "lct"
    lct.write_text(f"#!{sys.executable}\nimport sys\nfrom trainer.commands.main import main\nsys.exit(main())\n")
    lct.chmod(0o755)
    command = ["bash", str(ROOT / ".ci" / "try_package"), str(lct)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, (ended.stdout[-3000:], ended.stderr[-3000:])
    for line in (f"lct {trainer.__version__}", "the settings are valid", "training done: 2 steps", "step-2: whole"):
        assert line in ended.stdout
    assert "\nOnce upon a time" in ended.stdout
    assert [path.name for path in tmp_path.glob("tmp.*")] == []  # it removes its folder
    script = Path(command[1]).read_text()
    readme = (ROOT / "README.md").read_text()
    for name in re.findall(r'^"\$lct" (\w+)', script, re.MULTILINE):
        assert f"lct {name} " in readme
        assert name in COMMANDS


# ---- forms


def fields(path: Path) -> dict[str, dict]:
    return {field["id"]: field for field in yaml.safe_load(path.read_text())["body"] if "id" in field}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_asks_for_check_and_doctor_and_names_what_exists(path: Path) -> None:
    text = path.read_text()
    assert "`lct check" in text
    assert "`lct doctor`" in text
    named = re.findall(r"`((?:docs/)?\w+\.md)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert any(field["validations"]["required"] for field in fields(path).values() if "validations" in field)


def test_a_report_of_a_fault_has_what_the_documentation_asks_for() -> None:
    asked = fields(GITHUB / "ISSUE_TEMPLATE" / "fault.yml")
    needed = {name for name, field in asked.items() if field.get("validations", {}).get("required")}
    assert needed == {"what", "command", "config", "check", "doctor", "log"}
    page = (ROOT / "docs" / "when_it_fails.md").read_text()
    assert "the first 30 lines of the log" in page
    assert "first 30 lines of the log" in asked["log"]["attributes"]["label"]


def test_a_pull_request_names_targets_that_exist() -> None:
    named = re.findall(r"`make ([\w-]+)`", (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text())
    assert {"lint", "test"} <= {*named}
    assert unknown(["make", *named]) == []


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_of_a_page_exist(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
        path, _, anchor = target.partition("#")
        headings = re.findall(r"(?m)^#+ (.*)", (ROOT / path).read_text())
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings]


# ---- the version


def test_the_citation_has_the_version_and_the_licence_of_the_program() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == trainer.__version__
    assert citation["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_a_version_is_written_into_all_files(tmp_path: Path) -> None:
    names = [*set_version.PLACES, "CHANGELOG.md"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace(set_version.OPEN, f"{set_version.OPEN}\n### Added\n\n* A key.\n"))
    assert len(set_version.differences("9.8.7", tmp_path)) == len(names)
    set_version.write("9.8.7", tmp_path)
    assert set_version.differences("9.8.7", tmp_path) == []
    pattern = r"## Not released\n\n## 9\.8\.7 \(\d{4}-\d\d-\d\d\)\n\n### Added\n\n\* A key\.\n"
    assert re.search(pattern, changes.read_text())
    with pytest.raises(ValueError, match=r"no heading of 9\.8\.7"):
        set_version.write("9.8.7", tmp_path)
    (tmp_path / "CITATION.cff").write_text("title: x\n")
    assert set_version.differences("9.8.7", tmp_path) == [
        "CITATION.cff has no version, not 9.8.7; run python scripts/set_version.py 9.8.7"
    ]
    with pytest.raises(ValueError, match=r"CITATION\.cff has 0 lines with the version"):
        set_version.write("9.8.8", tmp_path)
    assert "9.8.8" not in (tmp_path / "trainer" / "__init__.py").read_text()
