"""Parameters on the host are updated during the backward: the parameters of a unit as soon as it has their gradients.

    device         ... | backward of unit 3 | backward of unit 2 | backward of unit 1 |
    copies                                  | gradients of 3     | gradients of 2     | ...
    worker thread                                                | update 3           | update 2 | ...
    main thread    launch the backward ...                                    loss, norm | wait | update the others

FSDP copies gradients without waiting only if no parameter has a hook, so the hooks are on the inputs of the units.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from longshard.sharding.tensors import fsdp_groups, local_part, version_of


class EarlyUpdates:
    """Updates of units of FSDP during the last backward of a step, with the same results bit for bit.

    FSDP reduces the gradients of a unit before autograd knows the gradient of the unit's input.

    Args:
        model: The model; its FSDP modules are the units.
        optimizer: An optimizer that updates each parameter by itself.
        device: The device of the backward.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        sets_device = (torch.cuda.set_device, (device,)) if device.type == "cuda" else ()
        self._optimizer = optimizer
        self._pool = ThreadPoolExecutor(1, "update", *sets_device)
        self._counts = False
        self._calls = Counter[FSDPModule]()
        """Forwards of each unit in the last micro-batch that wait for their backward."""
        self._jobs: list[Future] = []
        self._versions: dict[nn.Parameter, int] = {}
        """Versions of the gradients that the worker uses."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # before FSDP's hook
                module.register_forward_pre_hook(self._called, prepend=True)

    def start(self) -> None:
        """Let the next forward and backward update parameters. Call it before the last micro-batch of each step.

        Raises:
            RuntimeError: An earlier step failed after it had updated some parameters.
        """
        if self._versions:
            raise RuntimeError(
                "an earlier step failed after it had updated some parameters; "
                "end this process and start the same command again: it resumes from the last checkpoint"
            )
        self._calls.clear()
        self._counts = True
        self._part = copy.copy(self._optimizer)  # the copy has no hooks

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Wait for the updates, and hide the gradients of the updated parameters inside the context.

        The optimizer then updates only the parameters that still have gradients. The hidden gradients come back at
        the end, unless the block raises.

        Yields:
            None.

        Raises:
            Exception: The exception of an update, on entry.
            RuntimeError: A gradient has changed since its parameter was updated, on entry.
        """
        self._counts = False
        jobs = self._jobs
        self._jobs = []
        for job in jobs:
            job.result()
        gradients = {parameter: parameter.grad for parameter in self._versions}
        if any(
            version_of(local_part(grad)) != self._versions[p] for p, grad in gradients.items()
        ):
            raise RuntimeError(
                "a gradient has changed since the update; leave training.early_update out"
            )
        for parameter in gradients:
            parameter.grad = None
        yield
        for parameter, grad in gradients.items():
            parameter.grad = grad
        self._versions.clear()

    def close(self) -> None:
        """End the thread, after the update that runs."""
        self._pool.shutdown(cancel_futures=True)

    def _called(self, unit: FSDPModule, args: tuple[Any, ...]) -> None:
        if self._counts and torch.is_grad_enabled():
            self._calls[unit] += 1
            inputs = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
            for x in inputs[:1]:  # the optimizer updates a unit without such an input
                x.register_hook(lambda _: self._reduced(unit))

    def _reduced(self, unit: FSDPModule) -> None:
        self._counts = False  # from here on a forward recomputes
        self._calls[unit] -= 1
        if not self._calls[unit]:
            reduced = [
                x
                for group in fsdp_groups(unit)
                for x in group.fsdp_params
                if x.sharded_param.grad is not None
            ]
            parameters = {x.sharded_param for x in reduced}
            self._versions |= {p: version_of(local_part(p.grad)) for p in parameters}
            copied = [x.grad_offload_event for x in reduced if x.grad_offload_event is not None]
            self._jobs.append(self._pool.submit(self._update, parameters, copied))

    def _update(self, parameters: set[nn.Parameter], copied: list[torch.Event]) -> None:
        for event in copied:
            event.synchronize()
        groups = self._optimizer.param_groups
        self._part.param_groups = [
            {**g, "params": [p for p in g["params"] if p in parameters]} for g in groups
        ]
        self._part.step()
