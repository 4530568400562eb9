"""The shim that gives PyTorch a CUDA device that does nothing, on a machine without one (`hooks.cpp`). Torch-free."""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from trainer.data.sources.files import cache_folder

_SOURCE = Path(__file__).with_name("hooks.cpp")
COMPILER = os.environ.get("CXX", "g++")


def why_not() -> str:
    """Return why there can be no CUDA tensors without a GPU here; "" if there can."""
    return "" if shutil.which(COMPILER) else f"no compiler of C++ ({COMPILER})"


def install() -> None:
    """Replace the guard of PyTorch built for CUDA by the shim's guard, after PyTorch is imported."""
    if (guard := getattr(ctypes.CDLL(None), "lct_install_guard", None)) is not None:
        guard()


def build(folder: Path | None = None) -> Path:
    """Return the library of the shim, compiled for the installed PyTorch once per folder.

    Args:
        folder: The folder. None: the user's cache.

    Raises:
        subprocess.CalledProcessError: The compiler failed; its output is on stderr.
        FileNotFoundError: There is no compiler, see `why_not`.
    """
    torch = Path(importlib.util.find_spec("torch").origin).parent
    digest = hashlib.blake2b(
        _SOURCE.read_bytes() + (torch / "version.py").read_bytes(), digest_size=6
    ).hexdigest()
    folder = folder or cache_folder()
    library = folder / f"libhooks-{digest}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
    made = library.with_suffix(f".{os.getpid()}")
    command = [
        COMPILER,
        "-O0",
        "-fPIC",
        "-shared",
        "-std=c++20",
        *includes,
        str(_SOURCE),
        "-o",
        str(made),
        *links,
    ]
    subprocess.run(command, check=True)
    made.rename(library)  # whole, also if two processes build it
    return library


def environment(library: Path) -> Mapping[str, str]:
    """Return the environment of a process that has the shim, one thread for OpenMP, and no visible GPU.

    Args:
        library: The library of the shim.
    """
    return os.environ | {
        "LD_PRELOAD": str(library),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
