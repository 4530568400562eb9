"""Examine this machine: versions, GPUs, kernels of attention, memory, disk, network, and a sum over two ranks.

Each line begins with `ok`, `note` or `bad`. A note costs speed or a feature; with `bad`, training fails. Both end with
a remedy. The exit code is 1 if a line is bad.
"""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainer.commands.options import Parser
from trainer.config.errors import first_line
from trainer.runtime.devices import Machine, this_machine

_GIB = 2**30
_LEAST_DISK = 20 * _GIB
_LEAST_FILES = 4096
_SUM_SECONDS = 120
_OPTIONAL = {
    "transformers": "comparisons, GGUF files",
    "torchao": "float8",
    "pyarrow": "Parquet",
    "datasets": "data sets of the hub",
    "starlette": "lct serve",
    "fla-core": "fast linear attention on GPUs",
}
"""Packages that only some features need, and these features."""


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        subject: The part of the machine.
        text: What was found.
        remedy: What to do; empty if all is well.
        is_bad: Whether training fails because of this.
    """

    subject: str
    text: str
    remedy: str = ""
    is_bad: bool = False

    def __str__(self) -> str:
        state = "bad" if self.is_bad else "note" if self.remedy else "ok"
        return f"{state:6}{self.subject:11}{self.text}{self.remedy and '; '}{self.remedy}"


def _versions(machine: Machine) -> Iterator[Finding]:
    import torch

    yield Finding("python", f"{platform.python_version()} at {sys.executable}")
    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    if torch.cuda.is_available() and torch.version.cuda:
        yield Finding("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    elif machine.gpus:
        remedy = "install a build for the driver's CUDA, which `nvidia-smi` shows"
        yield Finding("torch", f"reaches none of {machine.gpus} GPUs", remedy, is_bad=True)
    for name, purpose in _OPTIONAL.items():
        try:
            yield Finding("package", f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("package", f"no {name}, for {purpose}", f"pip install {name}")


def _gpus(machine: Machine) -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count()
    if not count:
        yield Finding("gpu", "none: training runs on the CPU", "use GPUs for real models")
    for index in range(count):
        free, whole = (size / _GIB for size in torch.cuda.mem_get_info(index))
        text = f"{torch.cuda.get_device_name(index)}, {free:.1f} of {whole:.1f} GiB free"
        yield Finding("gpu", text, "end other programs on it" if free < 0.9 * whole else "")
    pairs = [(a, b) for a in range(count) for b in range(a)]
    if slow := [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]:
        text = f"{len(slow)} of {len(pairs)} pairs of GPUs exchange through the host"
        yield Finding("links", text, "expect slow exchanges; `nvidia-smi topo -m` shows links")
    elif pairs:
        yield Finding("links", "all GPUs reach each other directly")


def _kernels(machine: Machine) -> Iterator[Finding]:
    import torch

    from longshard.context.execution.kernels.choose import choose_kernel
    from longshard.context.execution.kernels.flash import gpu_capability, newer_flash
    from longshard.context.planning.capabilities import FLASH_PACKAGES

    capability = gpu_capability()
    kernel = choose_kernel("cuda" if capability else "cpu", torch.bfloat16, 128).name
    text = f"{kernel} for heads of 128 in bfloat16"
    package = newer_flash(128) if capability else None
    faster = [each for each in FLASH_PACKAGES if capability and each.runs_on(capability)]
    remedy = faster[0].install if faster and package is None else ""
    yield Finding("attention", f"{text}, with {package.name}" if package else text, remedy)


def _memory_and_disk(machine: Machine) -> Iterator[Finding]:
    yield Finding("memory", f"{(machine.host_memory or 0) / _GIB:.1f} GiB for processes")
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < _GIB:
        yield Finding("memory", f"/dev/shm: {size / _GIB:.2f} GiB", "use --shm-size=8g")
    free = shutil.disk_usage(".").free
    remedy = "make room, or set job.dump_folder" if free < _LEAST_DISK else ""
    yield Finding("disk", f"{free / _GIB:.0f} GiB free in {Path.cwd()}", remedy)
    if not os.access(".", os.W_OK):
        yield Finding("disk", "read-only", "set job.dump_folder to another folder", is_bad=True)


def _network(machine: Machine) -> Iterator[Finding]:
    import resource

    name = socket.gethostname()
    try:
        yield Finding("network", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        yield Finding("network", f"{name} has no address", "add it to /etc/hosts")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Finding("network", f"ports are free, such as {server.getsockname()[1]}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    remedy = "ulimit -n 65536" if 0 <= files < _LEAST_FILES else ""
    yield Finding("network", f"{files} open files", remedy)


def _sum(machine: Machine) -> Iterator[Finding]:
    backend, size = ("nccl", 256) if machine.gpus > 1 else ("gloo", 16)
    command = [sys.executable, "-m", "lct_tools.collective", backend, str(size)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **streams)
    try:
        last = (process.communicate(timeout=_SUM_SECONDS)[0].strip() or "no output").split(
            "\n"
        )[-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        last = f"no answer after {_SUM_SECONDS} s"
    if process.returncode == 0:
        yield Finding("sum", f"two ranks by {backend}: {size} MiB at {last} GB/s")
        return
    remedy = f"run NCCL_DEBUG=INFO {' '.join(command)}"
    yield Finding("sum", f"two ranks by {backend} failed ({last})", remedy, is_bad=True)


CHECKS = (_versions, _gpus, _kernels, _memory_and_disk, _network, _sum)


def findings(
    checks: Iterable[Callable[[Machine], Iterator[Finding]]] = CHECKS,
) -> Iterator[Finding]:
    """Yield the lines of the report. If a check raises an error, the error is a line.

    Args:
        checks: The checks, in the order of the report.
    """
    machine = this_machine()
    for check in checks:
        try:
            yield from check(machine)
        except Exception as error:
            yield Finding(
                check.__name__.strip("_"), first_line(error), "report this line", is_bad=True
            )


def main(argv: list[str]) -> int:
    """Print the report.

    Args:
        argv: The words of the command line, without the command.

    Returns:
        The exit code: 1 if a line is bad.
    """
    parser = Parser("doctor", __doc__)
    parser.add_argument(
        "--json", action="store_true", help="print the lines as JSON at the end"
    )
    as_json = parser.parse_args(argv).json
    lines = []
    for finding in findings():
        lines.append(finding)
        print(finding, file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        print(json.dumps([asdict(finding) for finding in lines], indent=1))
    return int(any(finding.is_bad for finding in lines))
