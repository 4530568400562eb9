"""One process of the job: rank, device, and the start, time-outs, flight record and end of its process group.

State of the process: PyTorch's default time-out of a new group is the time-out of the job. Also the current GPU, and
the variables that PyTorch's flight recorder reads; for the run.
"""

import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _world  # no public name as of torch 2.13

from longshard.sharding.exchange import group_timeout
from trainer.config.errors import ConfigError
from trainer.config.schema import Comm
from trainer.runtime.console import logger
from trainer.runtime.rank_processes import flight_record


@dataclass(frozen=True)
class Process:
    """The place of this process in the job, from torchrun's variables; without them rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    wanted_device: str = "auto"
    """`job.device`."""

    @classmethod
    def from_environment(cls, wanted_device: str = "auto") -> "Process":
        """Return the process that torchrun's variables describe: rank 0 of 1 without them.

        Args:
            wanted_device: `job.device`.
        """
        defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
        return cls(
            *(int(os.environ.get(name, default)) for name, default in defaults.items()),
            wanted_device,
        )

    @property
    def device(self) -> torch.device:
        """This rank's GPU if one is visible, else the CPU.

        ConfigError if `job.device` asks for an invisible GPU, or if fewer GPUs are visible than ranks of this machine
        need.
        """
        if self.wanted_device == "cpu":
            return torch.device("cpu")
        if not torch.cuda.is_available():
            if self.wanted_device == "cuda":
                build = (
                    "sees no GPU"
                    if torch.version.cuda or torch.version.hip
                    else "is a build without GPUs"
                )
                raise ConfigError(
                    f"job.device = 'cuda' needs a GPU, and this PyTorch {torch.__version__} {build}; install one for "
                    "your GPUs and look at CUDA_VISIBLE_DEVICES, or use job.device = 'auto'"
                )
            return torch.device("cpu")
        if self.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"{torch.cuda.device_count()} GPUs are visible, too few for rank {self.local_rank} of this machine; "
                "start as many ranks as there are GPUs (NGPU), or use job.device = 'cpu'"
            )
        return torch.device("cuda", self.local_rank)


def backend_settings(device: torch.device, *, cpu_tensors: bool) -> dict[str, object]:
    """Return `backend` and `device_id` of the job's process group; all groups of a mesh inherit them.

    On GPUs NCCL is alone: with gloo in addition, each group of each rank would open sockets that nobody uses. With the
    device, NCCL connects at once, and splits groups off instead of connecting each again.

    Args:
        device: The device of this rank.
        cpu_tensors: With offloaded parameters, gradients may be reduced in host memory. This needs both back ends, and
            PyTorch cannot split groups off them.
    """
    if device.type != "cuda":
        return {"backend": "gloo"}
    return (
        {"backend": "cpu:gloo,cuda:nccl"}
        if cpu_tensors
        else {"backend": "nccl", "device_id": device}
    )


@contextmanager
def process_group(
    process: Process,
    comm: Comm,
    records: Path | None = None,
    store: dist.Store | None = None,
    *,
    cpu_tensors: bool = False,
):
    """Start the process group of the whole job (gloo on CPUs, NCCL on GPUs), and destroy it after success.

    After an error it is destroyed only on CPUs: NCCL could wait for ever for its peers. If a collective fails and
    `comm.trace_buf_size` is not 0, the last collectives of this rank are written to rank_R in the folder `records`, and
    the path is logged. NCCL's watchdog writes there at a time-out, too.

    Args:
        process: This process.
        comm: Table `[comm]`.
        records: Folder of the records. None: a temporary one.
        store: Where the ranks meet; by default the store of the launcher's variables.
        cpu_tensors: Whether a job on GPUs also reduces tensors in host memory.

    Yields:
        None.
    """
    device = process.device
    _set_up_flight_recorder(comm.trace_buf_size, records if device.type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if process.world_size == 1:
        store = dist.HashStore()  # alone: no port is taken
    dist.init_process_group(
        **backend_settings(device, cpu_tensors=cpu_tensors),
        rank=process.rank,
        world_size=process.world_size,
        store=store and dist.PrefixStore("process_group", store),
        timeout=timedelta(seconds=comm.init_timeout_seconds),
    )
    try:
        with _time_out_inherited(device):
            yield
    except Exception as error:
        if comm.trace_buf_size and is_peer_failure(error):
            with suppress(OSError):  # a full disk
                logger.warning(_dump_flight_record(process.rank, records, device))
        if device.type == "cpu":  # NCCL could wait for ever for its peers
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def _time_out_inherited(device: torch.device) -> Iterator[None]:
    """Let a group that is made without a time-out take the current time-out of the job's group.

    PyTorch's default is half an hour, also where it makes groups itself (DeviceMesh), and the first wait in a new group
    comes before its time-out can be set.
    """
    before = distributed_c10d._get_default_timeout
    distributed_c10d._get_default_timeout = lambda _backend: group_timeout(
        dist.group.WORLD, device
    )
    try:
        yield
    finally:
        distributed_c10d._get_default_timeout = before


def is_peer_failure(error: Exception) -> bool:
    """Return whether a collective failed because another rank is gone or late: the cause is elsewhere.

    Args:
        error: The error.
    """
    return isinstance(
        error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError
    ) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def set_timeout(seconds: float, *, except_group: dist.ProcessGroup | None = None) -> None:
    """Set the time-out of every process group of this rank, after the GPU has finished its work. Not a collective.

    Args:
        seconds: The time-out.
        except_group: A group that keeps its time-out.
    """
    # CUDA work still in flight would be judged by the new time-out.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group, (backend, _) in list(_world.pg_map.items()):
        if group is not except_group and backend != "fake":  # one rank, which waits for nobody
            set_group_timeout(group, timedelta(seconds=seconds))


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the time-out of one process group.

    Args:
        group: The group.
        timeout: The time-out.
    """
    # public since torch 2.14
    set_timeout_of = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout_of(timeout, group)


def _set_up_flight_recorder(size: int, watchdog_folder: Path | None) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(size)
    if size and watchdog_folder is not None:
        watchdog_folder.mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(
            watchdog_folder.absolute() / flight_record("")
        )  # c10d adds the rank


def _dump_flight_record(rank: int, folder: Path | None, device: torch.device) -> str:
    """Write the last collectives of this rank as a pickled dictionary, and return a line for the log.

    If this build of PyTorch has no flight recorder, nothing is written, and the line says so.
    """
    recorders = torch._C._distributed_c10d
    general = getattr(recorders, "_dump_fr_trace", None)
    dump = getattr(recorders, "_dump_nccl_trace", None) if device.type == "cuda" else general
    if dump is None:
        return f"rank {rank}: this build of torch has no flight recorder"
    path = (folder or Path(tempfile.mkdtemp(prefix="flight_record_"))) / flight_record(rank)
    record = dump()
    entries = pickle.loads(record)["entries"]
    last = entries[-1]["profiling_name"] if entries else "none"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record)
    return (
        f"rank {rank}: its last collective was {last}; the last {len(entries):,} are in {path}"
    )
