"""The shim that gives a CPU build of PyTorch a CUDA device that does nothing (`hooks.cpp`)."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

_SOURCE = Path(__file__).with_name("hooks.cpp")
COMPILER = os.environ.get("CXX", "g++")


def has_compiler() -> bool:
    """Return whether there is a compiler of C++."""
    return shutil.which(COMPILER) is not None


def build(folder: Path) -> Path:
    """Compile the shim for the installed PyTorch into a folder, and return the library.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its output is on stderr.
    """
    library, torch_lib = folder / "libhooks.so", Path(torch.__file__).parent / "lib"
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-O0", "-fPIC", "-shared", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    includes = [f"-I{path}" for path in include_paths()]
    links = [f"-L{torch_lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_lib}"]
    subprocess.run([COMPILER, *flags, *includes, str(_SOURCE), "-o", str(library), *links], check=True)
    return library


def environment(library: Path) -> Mapping[str, str]:
    """Return the environment of a process that has the shim."""
    return os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
