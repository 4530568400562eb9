"""Run the quick tests under other versions of PyTorch, each in an environment of its own: `make test-versions`.

    python scripts/test_versions.py 2.11.0 2.14.1                     # all quick tests of one and of several ranks
    python scripts/test_versions.py 2.11.0 --tests tests/unit         # some of them
    PIP_INDEX_URL=... python scripts/test_versions.py 2.11.0+cpu      # a build without CUDA: less to download

An environment is made in versions/VERSION/ from requirements-dev.txt with this one pin changed, and kept.
The outputs of pip and pytest go to files in this folder. Exit code 1: pip failed for a version, or a test failed.
"""

import argparse
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "versions"
TESTS = ("tests/unit", "tests/distributed", "tests/fake_cuda")


def requirements(version: str) -> str:
    """Return the lines of requirements.txt, with another version of torch, and of requirements-dev.txt.

    Args:
        version: The version of torch.

    Raises:
        ValueError: The file does not pin torch once.
    """
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    changed, pins = re.subn(r"^torch==\S+", f"torch=={version}", text, flags=re.MULTILINE)
    if pins != 1:
        raise ValueError(f"requirements.txt has {pins} lines that pin torch; it must have one")
    dev = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    return changed + dev.replace("-r requirements.txt\n", "")


def environment(version: str) -> Path:
    """Return the Python of a version's environment. Make the environment if it is missing or the pins have changed.

    Args:
        version: The version of torch.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    folder = FOLDER / version
    python = folder / "bin" / "python"
    installed = folder / "installed.txt"
    wanted = requirements(version)
    if not installed.exists() or installed.read_text(encoding="utf-8") != wanted:
        print(f"{version}: installing into {folder}", flush=True)
        venv.create(folder, with_pip=True)
        pins = folder / "requirements.txt"
        pins.write_text(wanted, encoding="utf-8")
        with (folder / "pip.log").open("w") as log:
            pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-r", pins]
            subprocess.run(pip, check=True, stdout=log, stderr=subprocess.STDOUT)
            # Tests start programs in other folders, which import the package.
            this = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--editable", ROOT]
            subprocess.run(this, check=True, stdout=log, stderr=subprocess.STDOUT)
        installed.write_text(wanted, encoding="utf-8")
    return python


def tested(version: str, tests: Sequence[str]) -> bool:
    """Run tests under a version of torch; print each failure and the last line of pytest.

    Args:
        version: The version of torch.
        tests: Files or folders of tests.

    Returns:
        Whether all tests passed.
    """
    try:
        python = environment(version)
    except subprocess.CalledProcessError:
        print(f"{version}: pip failed; see {FOLDER / version / 'pip.log'}", flush=True)
        return False
    log = FOLDER / version / "pytest.log"
    with log.open("w") as output:
        # From this folder, so that the tests import this tree.
        command = [python, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        if line.startswith(("FAILED ", "ERROR ")):
            print(f"{version}: {line}")
    print(f"{version}: {lines[-1] if lines else 'no output'} ({log})", flush=True)
    return code == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Test each version.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code: 0 if all tests passed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="versions of torch, as pip writes them")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help=f"default: {' '.join(TESTS)}")
    args = parser.parse_args(argv)
    passed = [tested(version, args.tests) for version in args.versions]  # a failed version does not stop the others
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
