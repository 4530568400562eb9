"""The two loops that `train.py` compares, the rounds in which they alternate, and the memory of each."""

import copy
import ctypes
import gc
import itertools
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer.components.optimizer import build_optimizer
from trainer.components.out_of_memory import is_out_of_memory
from trainer.config.schema import JobConfig, Model
from trainer.data.job_data import open_training_data
from trainer.data.loader import BatchLoader
from trainer.families.args import ModelArgs
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.families.registry import flavor_args
from trainer.job import ResolvedJob, resolve
from trainer.models.initialization import initialize
from trainer.models.model_spec import model_spec
from trainer.runtime.console import logger, set_up_logging
from trainer.runtime.process_group import Process, process_group
from trainer.trainer import Trainer

WARMUP = 3
"""Steps before the first block; the compiler runs in them."""
_BATCHES = 32
"""Number of batches that the bare loop repeats."""
# Settings of glibc's mallopt, with values that return freed memory to the system, so that it no longer counts.
_GIVE_BACK = {-1: 1 << 16, -3: 1 << 16, -4: 1 << 16}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX

Row = dict[str, object]


@dataclass(frozen=True)
class Work:
    """The configuration that both loops share, the device, the steps of a block, and the number of rounds."""

    config: JobConfig
    device: torch.device
    steps: int
    rounds: int

    @cached_property
    def job(self) -> ResolvedJob:
        """The resolved job on this one device."""
        return resolve(self.config, 1, self.device.type)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        return getattr(torch, self.job.compute_dtype)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.training.local_batch_size * self.config.training.seq_len

    def shape(self) -> ModelArgs:
        """Return the arguments of the model."""
        return self.job.model


def with_layers(flavor: str, layers: int) -> str:
    """Register the flavor with another number of layers in this process.

    Args:
        flavor: A flavor of Llama 3.
        layers: Number of layers.

    Returns:
        The registered name, such as `8B:4`.

    Raises:
        ConfigError: The flavor does not exist.
    """
    flavor_args(Model(flavor=flavor))
    name = f"{flavor}:{layers}"
    FLAVORS[name] = replace(FLAVORS[flavor], n_layers=layers)
    return name


# ---- the loops


class Bare:
    """A plain PyTorch training loop, without the trainer.

    Args:
        work: The configuration, the device and the rounds to measure.
    """

    def __init__(self, work: Work) -> None:
        config = work.config
        storage = getattr(torch, config.training.dtype)
        with torch.device("meta"):
            self.model = model_spec(config.model.name).build(work.shape()).to(storage)
        initialize(self.model, seed=config.training.seed, device=work.device)
        self.working = self.model if work.compute_dtype == storage else _cast(self.model, work.compute_dtype)
        self.optimizer = build_optimizer([self.model], config)  # plain torch.optim
        self.max_norm = config.training.max_norm
        self.batches = itertools.cycle(list(_batches(work)))

    def step(self) -> torch.Tensor:
        """Run one optimizer step.

        Returns:
            The loss, a scalar on the device.
        """
        tokens, labels = next(self.batches)
        self.optimizer.zero_grad()
        if self.working is not self.model:
            torch._foreach_copy_(*([p.detach() for p in model.parameters()] for model in (self.working, self.model)))
        loss = self._loss(tokens, labels)
        loss.backward()
        if self.working is not self.model:
            for kept, computed in zip(self.model.parameters(), self.working.parameters(), strict=True):
                kept.grad = computed.grad.to(kept.dtype)
                computed.grad = None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return loss.detach()

    def _loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss. No name keeps the logits, so they are freed as soon as the loss has read them."""
        logits = self.working.output(self.working(tokens)).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten())


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy with parameters in `dtype`; rotary tables keep their type, as under FSDP."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = parameter.data.to(dtype)
    return other


def _batches(work: Work) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the first batches that the trainer reads: tokens and labels, (B, S) each."""
    loader = BatchLoader(open_training_data(work.config), work.config.training, dp_rank=0, dp_degree=1)
    for batch in itertools.islice(loader, _BATCHES):
        yield batch["tokens"].to(work.device), batch["labels"].to(work.device)


class _PacedTrainer(Trainer):
    """The trainer; it calls `pace(step)` before each step, so that other work can take turns."""

    pace: Callable[[int], None]

    def train_step(self, step: int) -> None:
        self.pace(step)
        super().train_step(step)


def train(config: JobConfig, device: torch.device, steps: int, pace: Callable[[int], None]) -> list[Row]:
    """Train as `train.py` does, in a temporary folder; log lines go to a file.

    Args:
        config: Configuration of the trainer.
        device: Device of the trainer.
        steps: Number of steps.
        pace: Called with the step before each step.

    Returns:
        The lines of `metrics.jsonl`.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        config = replace(
            config, job=replace(config.job, dump_folder=folder), training=replace(config.training, steps=steps)
        )
        handlers = logger.handlers
        try:
            with redirect_stdout(log), process_group(Process(0, 0, 1), config.comm):
                set_up_logging(0)
                trainer = _PacedTrainer(resolve(config, 1, device.type), device)
                trainer.pace = pace
                trainer.train()
                del trainer
        finally:
            logger.handlers = handlers  # the file of the log lines is closed
            if dist.is_initialized():  # after an error on a GPU the group still exists
                dist.destroy_process_group()
            torch._dynamo.reset()
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def free(device: torch.device) -> None:
    """Free unused memory.

    Args:
        device: Device whose cache is emptied.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- time


@dataclass(frozen=True)
class Block:
    """Seconds, and CPU seconds of all threads, of several steps."""

    seconds: float
    cpu: float


class Clock:
    """Times blocks of steps, and waits for the device at both ends.

    Args:
        device: Device of the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> None:
        """Start the clocks, after the work of the device has ended."""
        self._wait()
        self._start = Block(time.perf_counter(), time.process_time())

    def read(self) -> Block:
        """Return the time since `start`."""
        self._wait()
        return Block(time.perf_counter() - self._start.seconds, time.process_time() - self._start.cpu)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Rounds:
    """Paces a trainer: blocks of steps after the warm-up, with as many bare steps before, between and after them.

    Args:
        work: The configuration, the device and the rounds to measure.
        bare: The bare loop.
    """

    def __init__(self, work: Work, bare: Bare) -> None:
        self.work = work
        self.bare = bare
        self.bare_blocks: list[Block] = []
        self.blocks: list[Block] = []
        self._clock = Clock(work.device)

    @property
    def total(self) -> int:
        """Steps of the trainer; the last one only ends the block before it."""
        return WARMUP + self.work.rounds * self.work.steps + 1

    def pace(self, step: int) -> None:
        """Between two blocks of the trainer, run a block of the bare loop.

        Args:
            step: The step that the trainer begins.
        """
        done = step - 1 - WARMUP
        if done < 0 or done % self.work.steps:
            return
        if done:
            self.blocks.append(self._clock.read())
        self.run_bare()
        self._clock.start()

    def run_bare(self) -> None:
        """Run and time a block of the bare loop."""
        self._clock.start()
        for _ in range(self.work.steps):
            self.bare.step()
        self.bare_blocks.append(self._clock.read())


# ---- memory


class PeakMemory:
    """Peak memory from `reset` to `read`, minus the memory when this object was created.

    On a GPU it counts PyTorch's allocations, on a CPU resident memory, on Linux only.

    Args:
        device: Device whose memory is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        _give_back()
        self._before = 0 if device.type == "cuda" else _resident("VmRSS")

    def reset(self) -> None:
        """Set the peak of the memory to the present use."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._before is not None:
            _give_back()  # the C library keeps some freed memory
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is reset

    def read(self) -> float | None:
        """Return the peak in GiB, or None if it is unknown."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _resident("VmHWM")
        return None if peak is None or self._before is None else round((peak - self._before) / 2**30, 4)


def _give_back() -> None:
    """Make glibc return freed memory to the system."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for setting, value in _GIVE_BACK.items():
            libc.mallopt(setting, value)
        libc.malloc_trim(0)


def _resident(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes, or None if there is no such file."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return next(int(line.split()[1]) * 2**10 for line in status.read_text().splitlines() if line.startswith(field))


def memory_of(work: Work, config: JobConfig | None) -> Row:
    """Return `memory_gib`, the peak memory of two steps after the warm-up, measured in a process of its own.

    Args:
        work: The configuration, the device and the rounds to measure.
        config: Configuration of the trainer. None: the bare loop.

    Raises:
        RuntimeError: The loop failed for another reason than memory.
    """
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure_memory, args=(theirs, torch.get_num_threads(), work, config), daemon=True)
    process.start()
    theirs.close()
    try:
        ok, answer = ours.recv()
    except EOFError:  # the system kills processes when it is out of memory
        return {"memory_error": "the process died"}
    finally:
        process.join()
    if not ok:
        raise RuntimeError(answer)
    return answer


def _measure_memory(connection: Connection, threads: int, work: Work, config: JobConfig | None) -> None:
    try:
        torch.set_num_threads(threads)
        flavor, _, layers = work.config.model.flavor.partition(":")
        if layers:
            with_layers(flavor, int(layers))
        memory = PeakMemory(work.device)
        result = {}

        def pace(step: int) -> None:
            if step == WARMUP + 1:
                gc.collect()
                memory.reset()
            elif step == WARMUP + 3:
                result["memory_gib"] = memory.read()

        if config is not None:
            train(config, work.device, WARMUP + 3, pace)
        else:
            bare = Bare(work)
            for step in range(1, WARMUP + 4):
                pace(step)
                bare.step()
        connection.send((True, result))
    except Exception as error:
        out = is_out_of_memory(error)
        connection.send((out, {"memory_error": "out of memory"} if out else traceback.format_exc()))
