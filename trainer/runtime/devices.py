"""The GPUs that a job may use. They are found without torch, so that the launcher can count ranks at once."""

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from trainer.config.errors import ConfigError

_OTHER_GPUS = ("/dev/kfd", "/dev/dxg")  # of AMD, of Windows' Linux: PyTorch counts these
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Machine:
    """The GPUs of this machine that this process may use, and the memory of its devices.

    Attributes:
        gpus: Number of GPUs.
        gpu_memory: Memory of the smallest GPU in bytes. None if not known.
        host_memory: Host memory in bytes. None if not known.
    """

    gpus: int
    gpu_memory: int | None
    host_memory: int | None
    note: str = ""
    """A line for the log, if CUDA_VISIBLE_DEVICES names GPUs that do not exist."""

    def device_type(self, wanted: str) -> str:
        """Return 'cuda' or 'cpu' for `job.device`; 'auto' is 'cuda' if there is a GPU.

        Args:
            wanted: `job.device`.

        Raises:
            ConfigError: `wanted` is 'cuda', and no GPU is visible.
        """
        if wanted == "cuda" and not self.gpus and not any(map(os.path.exists, _OTHER_GPUS)):
            raise ConfigError(
                "job.device = 'cuda' needs a GPU, and this machine shows none (nvidia-smi, /dev/nvidia0, "
                f"{_VISIBLE}); use job.device = 'auto', or 'cpu'"
            )
        return ("cuda" if self.gpus else "cpu") if wanted == "auto" else wanted

    def memory(self, device_type: str) -> int | None:
        """Return the memory of one device of this type in bytes. None if not known.

        Args:
            device_type: 'cuda' or 'cpu'.
        """
        return self.gpu_memory if device_type == "cuda" else self.host_memory


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """Return the GPUs that are visible by CUDA_VISIBLE_DEVICES, and the memory of the devices.

    Args:
        environ: Environment variables.
    """
    memories = _gpu_memories()
    present = len(memories) or _gpu_files()
    named = environ.get(_VISIBLE)
    gpus, note = present, ""
    if named is not None:
        words = filter(None, map(str.strip, named.split(",")))
        # CUDA reads up to the first wrong number: -1 hides all GPUs
        wanted = [*takewhile(lambda word: word[0] != "-", words)]
        usable = takewhile(lambda word: not word.isdecimal() or int(word) < present, wanted)
        gpus = min(present, len([*usable]))
        if len(wanted) > gpus:
            note = f"{_VISIBLE} = {named!r} names {len(wanted)}, and this machine has {gpus or 'none'} of them"
            if not gpus:
                note += ": training runs on the CPU (job.device = 'cuda' refuses that)"
    return Machine(gpus, min(memories) if memories else None, _host_memory(), note)


def _gpu_memories() -> list[int]:
    """Return the memory of each GPU in bytes, reported by nvidia-smi; empty if that program is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    sizes = result.stdout.split() if result.returncode == 0 else []
    return [int(size) * 2**20 for size in sizes if size.isdecimal()]


def _gpu_files() -> int:
    """Return the number of GPUs by their files: containers may lack nvidia-smi."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _host_memory() -> int | None:
    """Return the bytes of memory that processes may use: of the machine, or its container if less; None if unknown."""
    limits = []
    for file in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        with suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    with suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)
