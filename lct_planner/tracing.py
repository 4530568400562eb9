"""Traces a job: `trace(job, rank)` runs the trainer's own steps and returns each event of a device.

An event is a kernel, a copy between host and device, or a message of a collective. The trace also has the blocks of
device memory, each with its purpose and with the times when it was made and freed. Nothing is computed, so a step of a
million tokens takes seconds.

State of the process: This module replaces functions of PyTorch and turns Python's collector off. Nothing else runs in
the tracing process.
"""

import gc
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lct_planner.device import GPU, FakeDevice, Gpu, entered, machine
from lct_planner.events import Events
from lct_planner.recorder import Recorder
from lct_planner.stand_ins import stand_ins
from lct_planner.traced_trainer import TracedTrainer, installed_flash, kernels_of, patches
from trainer.components.optimizer import ensure_state
from trainer.job.record import ResolvedJob
from trainer.parallel.machine import Machine


def trace(
    job: ResolvedJob,
    rank: int,
    gpu: Gpu | None = GPU,
    steps: int = 1,
    recorder: Recorder | None = None,
) -> Events:
    """Return the events of one rank, after building its trainer and running some steps on a simulated device.

    Args:
        job: The resolved job.
        rank: The rank.
        gpu: The simulated GPU; None for ranks on CPUs.
        steps: Number of steps to run.
        recorder: Collects the events; None for a new recorder.

    Raises:
        AssertionError: The result of an operator differs from its promise.
        Exception: Any error of a path on this device: a host read, a shape, a device.
    """
    device = torch.device("cpu") if gpu is None else torch.device("cuda", 0)
    recorder = recorder or Recorder(device.type)
    recorder.package = installed_flash(gpu)
    mode = FakeDevice(device.type, recorder.observe, recorder.around)
    if gpu is not None:
        mode.checks = recorder.checks
        mode.stand_ins = stand_ins()
    with entered(
        machine(rank, job.degrees.world_size, gpu), *patches(gpu), *recorder.patches(), mode
    ):
        trainer = TracedTrainer(job, device, TracedMachine(recorder, gpu))
        # PyTorch would make the optimizer's state in the first step, after the peak.
        ensure_state(trainer.optimizer)
        recorder.mark(trainer)
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # so that the peak is the same in each trace
        try:
            for step in range(1, steps + 1):
                recorder.step = step
                trainer.train_step(step)
        finally:
            if collecting:
                gc.enable()
            trainer.metrics.close()
        recorder.mark_gradients(trainer.parameters)
        return recorder.events(trainer)


class TracedMachine(Machine):
    """A simulated machine. A recorder notes the regions of a step, and the host memory.

    Args:
        recorder: The recorder.
        gpu: The simulated GPU; None for CPUs.
    """

    def __init__(self, recorder: Recorder, gpu: Gpu | None) -> None:
        self._recorder = recorder
        self.gpu = kernels_of(gpu)

    def region(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a part of the step.

        Args:
            name: The name of the part.
        """
        return self._recorder.region(name)

    def host_like(self, tensor: Tensor, device_type: str, key: str) -> Tensor:
        """Return simulated host memory for a tensor, page-locked on GPUs.

        Args:
            tensor: A tensor of any shape.
            device_type: The device type of the job; not used.
            key: The setting that asks for the memory; not used.
        """
        return self._recorder.host_like(tensor)
