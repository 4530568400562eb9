"""Processes that `domain_parallel.py` compares: a rank with its rows of fields, and one process with whole fields."""

import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from examples.fields.nat import NAT
from examples.fields.nat_args import FLAVORS as NAT_FLAVORS
from examples.fields.unet import UNet
from examples.fields.unet_args import FLAVORS as UNET_FLAVORS
from longshard.domain.domain import Domain, balanced
from longshard.domain.modules import parallelize
from longshard.domain.tensor import DomainTensor
from longshard.sharding import exchange
from scripts.benchmarks.teams import PeakBytes, Times

FLAVORS = {"unet": UNET_FLAVORS, "nat": NAT_FLAVORS}
_MODELS = {"unet": UNet, "nat": NAT}


@dataclass(frozen=True)
class Problem:
    """A model on square fields, and the number of ranks that share the rows of a field."""

    model: str
    side: int
    degree: int
    flavor: str = "debugmodel"
    batch: int = 1
    channels: int = 3

    def build(self) -> nn.Module:
        """Return the model, with the same weights in every process."""
        args = FLAVORS[self.model][self.flavor].for_fields(self.channels, self.side, self.side)
        model = _MODELS[self.model](args)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                model.init_parameter(name, parameter, generator)
        return model

    def fields(self) -> list[torch.Tensor]:
        """Return the inputs and the gradient of the outputs, (B, channels, side, side)."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch, self.channels, self.side, self.side)
        return [torch.randn(shape, generator=generator) for _ in range(2)]


class Whole:
    """One process that computes whole fields by PyTorch's own functions.

    Args:
        problem: The model and its fields.
        threads: Number of threads.
    """

    def __init__(self, problem: Problem, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = problem.build()
        self.inputs, self.gradient = problem.fields()

    def close(self) -> None:
        """Close nothing: there is no context."""

    def forward(self) -> torch.Tensor:
        """Return the output of the model, (B, channels, side, side)."""
        return self.model.output(self.model(self.inputs))

    def reduce(self) -> None:
        """Do nothing: one process has the whole gradients."""

    def run(self) -> Times:
        """Return the times of one forward and backward."""
        self.model.zero_grad()
        cpu = time.process_time()
        start = time.monotonic()
        out = self.forward()
        middle = time.monotonic()
        out.backward(self.gradient)
        self.reduce()
        return Times(start, middle, time.monotonic(), time.process_time() - cpu)

    def account(self) -> dict[str, int]:
        """Return the peak of memory, bytes sent and calls of collectives of a step that is not timed."""
        self.model.zero_grad()
        sent = Counter(exchange.bytes_sent)
        calls = Counter(exchange.calls)
        with PeakBytes(*self.model.parameters(), self.inputs, self.gradient) as meter:
            self.run()
        sent = exchange.bytes_sent - sent
        calls = exchange.calls - calls
        return {"peak_bytes": meter.peak, "bytes_sent": sent.total(), "calls": calls.total()}


class Share(Whole):
    """One rank of a group that shares the rows.

    Args:
        problem: The model and its fields.
        threads: Number of threads.
    """

    def __init__(self, problem: Problem, threads: int) -> None:
        super().__init__(problem, threads)
        mesh = init_device_mesh("cpu", (problem.degree,), mesh_dim_names=("rows",))
        self.group = mesh.get_group()
        domain = Domain.on(mesh, {2: ("rows", balanced(problem.side, problem.degree))})
        rows = slice(*domain.ranges(2, problem.side)[0])
        self.inputs, self.gradient = (x[:, :, rows].contiguous() for x in (self.inputs, self.gradient))
        self.fields = DomainTensor(self.inputs, domain)
        parallelize(self.model, self.fields)
        parallelize(self.model.output, self.model(self.fields))

    def forward(self) -> torch.Tensor:
        """Return the rank's rows of the output, (B, channels, rows, side)."""
        return self.model.output(self.model(self.fields)).local

    def reduce(self) -> None:
        """Sum the gradients of the weights over the ranks, in one all-reduce."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        exchange.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), self.group)

    def run(self) -> Times:
        """Return the times of one forward and backward. A collective over the ranks."""
        dist.barrier()
        return super().run()
