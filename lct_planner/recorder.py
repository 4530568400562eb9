"""Records a traced job: each kernel, copy and message of a device, and the blocks of its memory with their purpose."""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lct_planner import stack
from lct_planner.device import pinned
from lct_planner.events import AFTER, BEFORE, Block, Change, Event, Events
from lct_planner.messages import bytes_sent, group_of, mesh_names
from lct_planner.operators import (
    direction,
    flops,
    has_stages,
    is_handle,
    kernel_name,
    moved,
    parallel_rows,
    shapes,
)
from lct_planner.stand_ins import ATTENTION, kernel_of, kernel_of_one_rank
from lct_planner.traced_trainer import TracedTrainer
from longshard.context.live import LivePlan
from longshard.context.live import resolve as resolve_plan
from longshard.context.planning.capabilities import FlashPackage
from longshard.context.planning.cost import AttentionShape, Cost, LatentShape, attention_cost
from longshard.sharding import exchange
from longshard.sharding.tensors import local_part

_FOLLOWED = (FakeTensor, DTensor)
_NO_KERNEL = frozenset(
    {
        "detach",
        "alias",
        "lift_fresh",
        "lift_fresh_copy",
        "_unsafe_view",
        "_reshape_alias",
        "set_",
        "resize_",
        "is_pinned",
        "record_stream",
    }
)
_NO_MESSAGE = frozenset({"wait_tensor", "recv_", "barrier", "_wrap_tensor_autograd"})
_GLOO_COPIES = frozenset({"_allgather_base_", "_reduce_scatter_base_"})
_DIRECTIONS = {
    "context_parallel_attention": "forward",
    "context_parallel_attention_backward": "backward",
}


class Recorder:
    """Collects the events of one job.

    Args:
        device_type: "cuda" or "cpu".
        checks: Operator -> a function that takes its arguments, and raises where its CUDA code would.

    Attributes:
        step: Step of training; 0 while the trainer is made.
        layer: Number of the layer that runs, `BEFORE` or `AFTER`.
        package: The package of PyTorch's flash operators; None for FlashAttention-2.
        host_bytes: Bytes of page-locked memory for offloaded tensors.
    """

    def __init__(self, device_type: str, checks: dict[str, Any] | None = None) -> None:
        self._device_type = device_type
        self.checks = checks or {}
        self.step = 0
        self.layer = BEFORE
        self.package: FlashPackage | None = None
        self.host_bytes = 0
        self._events: list[Event] = []
        self._memory: list[Change] = []
        self._regions = ["start"]
        self._place = ""
        self._live: LivePlan | None = None
        self._paused = False
        # `parallel_rows` of each kernel of the attention operator that runs
        self._tiles: list[int] = []
        self._blocks: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._groups: dict[int, tuple[int, ...]] = {}

    def events(self, trainer: TracedTrainer) -> Events:
        """Return the collected events.

        Args:
            trainer: The trainer whose job was traced.
        """
        return Events(
            tuple(self._events), tuple(self._memory), mesh_names(trainer), self.host_bytes
        )

    def inside(self, operator: str) -> list[Event]:
        """Return the events that happened while an operator of this project ran.

        Args:
            operator: Name of the operator.
        """
        return [event for event in self._events if event.place == operator]

    @property
    def phase(self) -> str:
        """The part of the step: the innermost region of the training loop; in a pipeline, forward or backward."""
        region = self._regions[-1]
        if region != "pipeline":
            return region
        return "forward" if torch._C._current_graph_task_id() < 0 else "backward"

    def observe(
        self, func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Record one operation of PyTorch.

        Args:
            func: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.
            result: Its result.
        """
        if self._paused:
            return
        name = func._schema.name.removeprefix("aten::")
        self._alive(tree_leaves(result), name)
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._message(name.partition("::")[2], args)
        elif name in ("_to_copy", "copy_") and (way := direction(name, args, kwargs, result)):
            copied = args[1] if name == "copy_" else args[0]
            self._add("copy", way, copied.nbytes, where=stack.where() if "," in way else "")
        elif not (
            func.is_view or name in _NO_KERNEL or name.startswith(("empty", "new_empty"))
        ):
            in_plan = self._place in _DIRECTIONS
            options = {}
            work = 0 if in_plan else flops(func, name, args, result)
            if name in ATTENTION:
                tile = parallel_rows(
                    name, args, in_stages=in_plan and has_stages(self._live.latest)
                )
                self._tiles.append(tile)
                if not in_plan:
                    options = {
                        "kernel": kernel_of_one_rank(name, self.package),
                        "tails": work / tile,
                    }
            kind = "launch" if self._is_of_device(args, result) else "host"
            self._add(kind, name, 0, flops=work, moved=moved(args, result), **options)

    def _is_of_device(self, *values: Any) -> bool:
        tensors = (x for x in tree_leaves(values) if isinstance(x, Tensor))
        return self._device_type == "cpu" or any(
            x.device.type == self._device_type for x in tensors
        )

    def around(self, name: str, args: tuple, run: Any) -> Any:
        """Run one operator of this project, and record its start. For attention, also record the cost of the plan.

        Args:
            name: Name of the operator.
            args: Its arguments.
            run: Runs the operator; it takes no argument.

        Returns:
            The result of the operator.
        """
        name = name.removeprefix("longshard::")
        number = len(self._events)
        self._add("operator", name, 0)
        outer = self._place
        self._place = name
        counted = exchange.bytes_sent.copy()
        self._tiles = []
        if name in _DIRECTIONS:
            self._live, _ = resolve_plan(next(x for x in args if is_handle(x)))
        try:
            result = run()
        finally:
            self._place = outer
        if name in _DIRECTIONS:
            cost = self._cost(name, args)
            self.compare(name, cost, exchange.bytes_sent - counted, self._events[number + 1 :])
            kernel = kernel_of(kernel_name(self._live.latest), self.package)
            tails = cost.flops * len(self._tiles) / max(sum(self._tiles), 1)
            self._events[number] = replace(
                self._events[number], flops=cost.flops, kernel=kernel, tails=tails
            )
        return result

    def compare(self, name: str, cost: Cost, counted: Counter, events: Iterable[Event]) -> None:
        """Do nothing. Tests override this function, and compare the cost of a plan with the work of its operator.

        Args:
            name: Name of the operator of attention.
            cost: The cost of its plan.
            counted: The bytes that the operator has sent.
            events: The events of the operator.
        """

    def _cost(self, name: str, args: tuple) -> Cost:
        """Return the cost of the plan that ran. name, args: the operator of attention, and its arguments."""
        options = self._live.options
        q, k = shapes(name, args)
        sent = 2 if options.gradient_dtype == "bfloat16" else 0
        up = args[-1]
        latent = None
        # In both directions the last argument is the up-projection of latent attention, if there is one.
        if isinstance(up, Tensor) and up.ndim == 3:
            rotated = k[3] - up.shape[2]
            latent = LatentShape(up.shape[2], rotated, up.shape[1] + rotated - q[3])
        shape = AttentionShape(q[0], q[1], k[1], q[3], args[0].itemsize, sent, latent)
        return attention_cost(
            self._live.latest.plan,
            shape,
            _DIRECTIONS[name],
            options.heads_per_pass,
            keep_exchanged=options.keep_exchanged,
            query_heads=options.query_heads_per_pass,
        )

    def _message(self, name: str, args: tuple) -> None:
        if name in _NO_MESSAGE:
            return
        group = group_of(args)
        ranks = self._groups.setdefault(id(group), tuple(dist.get_process_group_ranks(group)))
        self._add(
            "message",
            name,
            bytes_sent(name, args, group),
            ranks=ranks,
            is_sharding=stack.kind() in ("gathered", "reduced"),
        )
        # While Gloo runs these collectives, it keeps a copy of the parts of all ranks.
        if self._device_type == "cpu" and name in _GLOO_COPIES:
            largest = max(x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor))
            block = Block(largest, "messages", stack.where(), name)
            self._changed(block, block.size)
            self._changed(block, 0)

    def _add(self, kind: str, name: str, size: int, **options: Any) -> None:
        self._events.append(
            Event(self.step, self._place, kind, name, size, self.phase, self.layer, **options)
        )

    # ---- memory

    def _alive(self, tensors: Iterable[Any], name: str) -> None:
        for x in tensors:
            if isinstance(x, Tensor) and x.device.type == self._device_type:
                storage = x.untyped_storage()
                if storage not in self._blocks:
                    self._blocks[storage] = block = Block(
                        storage.nbytes(),
                        stack.kind() or self.phase,
                        stack.where(),
                        f"{self._place} {name}".strip(),
                    )
                    weakref.finalize(storage, self._changed, block, 0)
                    self._changed(block, block.size)

    def _changed(self, block: Block, size: int) -> None:
        self._memory.append(Change(self.step, self.phase, self.layer, block, size))

    def mark(self, trainer: TracedTrainer) -> None:
        """Mark the memory of weights and of the optimizer's state, and follow the layers of the model.

        Args:
            trainer: The trainer.
        """
        for part in trainer.built_parts:
            self._mark("parameters", part.parameters())
            self._mark("tables", part.buffers())
        for part in trainer.model_parts:
            layers = getattr(part, "layers", {})
            for place, (number, layer) in enumerate(layers.items()):
                self._follow(int(number), layer, place == 0, place == len(layers) - 1)
        states = [x for state in trainer.optimizer.state.values() for x in state.values()]
        self._mark("optimizer", (x for x in states if isinstance(x, Tensor)))

    def mark_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Mark the memory of the gradients that the optimizer has read.

        Args:
            parameters: The parameters of the model.
        """
        self._mark("gradients", (p.grad for p in parameters if p.grad is not None))

    def _mark(self, kind: str, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            storage = local_part(x).untyped_storage()
            if storage in self._blocks:
                self._blocks[storage].kind = kind

    def _follow(self, number: int, layer: nn.Module, is_first: bool, is_last: bool) -> None:
        """Keep `self.layer` up to date while a layer runs, in forward and backward."""

        def at(place: int) -> None:
            self.layer = place

        def before(_module: nn.Module, args: tuple) -> None:
            at(number)
            if is_first and isinstance(args[0], _FOLLOWED) and args[0].requires_grad:
                args[0].register_hook(lambda grad: at(BEFORE))

        def after(_module: nn.Module, _args: tuple, result: Tensor) -> None:
            if isinstance(result, _FOLLOWED) and result.requires_grad:
                result.register_hook(lambda grad: at(number))
            if is_last and torch._C._current_graph_task_id() < 0:
                at(AFTER)

        layer.register_forward_pre_hook(before, prepend=True)
        layer.register_forward_hook(after)

    def patches(self) -> Iterator[Any]:
        """Yield patches that follow memory freed without an operator, and hide operations that no device runs."""
        real = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            real(storage, size)
            if storage in self._blocks:
                self._changed(self._blocks[storage], size)

        yield mock.patch.object(torch.UntypedStorage, "resize_", resize, create=True)

        real_propagation = ShardingPropagator._propagate_tensor_meta_non_cached

        # PyTorch computes shapes of a DTensor's results on a fake device of its own: no device runs these operations.
        def shapes_alone(*args: Any) -> Any:
            self._paused = True
            try:
                return real_propagation(*args)
            finally:
                self._paused = False

        yield mock.patch.object(
            ShardingPropagator, "_propagate_tensor_meta_non_cached", shapes_alone
        )

    def host_like(self, x: Tensor) -> Tensor:
        """Return simulated host memory for a tensor, and count its bytes.

        Nothing reads or writes the memory. On a CPU it does not count as memory of the allocator.

        Args:
            x: A tensor of any shape.
        """
        buffer = torch.empty_like(x, device="cpu")
        self.host_bytes += buffer.nbytes
        if (block := self._blocks.get(buffer.untyped_storage())) is not None:
            self._changed(block, 0)
        return pinned(buffer)

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Yield; the context is a part of the step.

        Args:
            name: The name of the part.
        """
        self._regions.append(name)
        try:
            yield
        finally:
            self._regions.pop()
