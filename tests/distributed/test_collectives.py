"""Laws of the collectives of a step: their number, their groups, and which layers are gathered ahead."""

import sys
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longshard.sharding import exchange
from tests.distributed.harness import Record, RecordingTrainer
from tests.distributed.loop_trainer import build
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.parallel import data_parallel
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.process_group import process_group


def gathered_case(folder: str, arguments: list[str]) -> list[str]:
    """The order in which layers are gathered and run in one forward and backward."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    process, config, job = build(folder, *arguments, "--training.global_batch_size=-1")
    order: list[str] = []
    real = FSDPParamGroup.unshard

    def unshard(group: FSDPParamGroup, *args: object, **kwargs: object) -> object:
        if "layers" in (group._module_fqn or "") and not group.is_unsharded and group._all_gather_result is None:
            order.append(f"gather {group._module_fqn[-1]}")
        return real(group, *args, **kwargs)

    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        for name, layer in trainer.model_parts[0].layers.items():
            layer.attention_norm.register_forward_pre_hook(lambda *_, name=name: order.append(f"run {name}"))
            layer.feed_forward.register_full_backward_pre_hook(lambda *_, name=name: order.append(f"back {name}"))
        with mock.patch.object(FSDPParamGroup, "unshard", unshard):
            trainer.train_step(1)
        trainer.metrics.close()
    return order


def test_prefetching_gathers_layers_ahead(pool: WorkerPool, tmp_path) -> None:
    layout = ["--model.flavor=tiny4", *LAYOUTS["fsdp2"][1]]
    ahead = ["--parallelism.fsdp_forward_prefetch=2"]
    plain = pool.run(2, gathered_case, str(tmp_path), layout)[0]
    early = pool.run(2, gathered_case, str(tmp_path), [*layout, *ahead])[0]
    forward = [event for event in plain if "back" not in event][:8]
    assert forward == [f"{action} {layer}" for layer in range(4) for action in ("gather", "run")]
    assert early.index("gather 2") < early.index("run 0") < early.index("gather 3") < early.index("run 1")


@pytest.mark.parametrize(("layout", "times"), [("one", 1), ("weights on the host", 2), ("fsdp2", 2)])
def test_one_rank_casts_each_weight_once_in_a_micro_batch(pool: WorkerPool, tmp_path, layout: str, times: int) -> None:
    """Ranks that shard gather a layer for the forward and for the backward, but the last one, which stays gathered.

    So does one rank whose weights are on the host: else all of them would be on the device.
    """
    host = ["--training.enable_cpu_offload"] if layout == "weights on the host" else []
    world_size, arguments = LAYOUTS.get(layout, (1, host))
    mixed = ["--model.flavor=tiny4", "--training.mixed_precision_param=bfloat16", *arguments]
    order = pool.run(world_size, gathered_case, str(tmp_path), mixed)[0]
    for layer in range(4):
        assert order.count(f"gather {layer}") == times * order.count(f"back {layer}") > 0


class Collectives(TorchDispatchMode):
    """Notes for each all-gather and reduce-scatter the name of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, set[str]] = {"allgather": set(), "reduce_scatter": set()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for kind, groups in self.groups.items():
            if kind in function.name():
                objects = (x for x in args if isinstance(x, torch.ScriptObject))
                (group,) = (x for x in objects if "ProcessGroup" in str(x._type()))
                groups.add(torch.distributed.ProcessGroup.unbox(group).group_name)
        return function(*args, **(kwargs or {}))


def reduced_case(folder: str, arguments: list[str], own: bool) -> tuple[dict, dict, list[str]]:
    """Groups of gathers and of reductions in a step, the gradients, and the group of the mesh."""
    process, config, job = build(folder, *arguments)
    with process_group(process, config.comm), mock.patch.object(ParallelDims, "own_group", own_group_or_none(own)):
        trainer = RecordingTrainer(job, process.device, record=Record())
        with Collectives() as seen:
            trainer.train_step(1)
        trainer.metrics.close()
        mesh = trainer.dims["dp_shard_cp"].get_group().group_name
        return seen.groups, trainer.record.gradients[-1], mesh


def own_group_or_none(own: bool):
    return ParallelDims.own_group if own else lambda *_: None


@pytest.mark.parametrize("layout", ["fsdp2", *slow("fsdp2+cp2", "hsdp2x2")])
def test_gradients_are_reduced_over_a_communicator_of_their_own(pool: WorkerPool, tmp_path, layout: str) -> None:
    """Reductions over their own group give the same bits as over the group of the gathers."""
    world_size, arguments = LAYOUTS[layout]
    own = pool.run(world_size, reduced_case, str(tmp_path), arguments, True)
    shared = pool.run(world_size, reduced_case, str(tmp_path), arguments, False)
    for (groups, gradients, mesh), (one, wanted, _) in zip(own, shared, strict=True):
        assert mesh in groups["allgather"]
        assert len(groups["reduce_scatter"]) == 1
        assert not groups["reduce_scatter"] & groups["allgather"]
        assert one["reduce_scatter"] == {mesh}
        assert gradients.keys() == wanted.keys()
        assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients.items())


def logged_case(folder: str, arguments: list[str]) -> tuple[set[str], set[str]]:
    """Groups of the reductions of a logged step's metrics, and of everything else in that step and the next one."""
    process, config, job = build(folder, *arguments, "--metrics.log_freq=1")
    groups: dict[bool, set[str]] = {True: set(), False: set()}
    real = torch.distributed.all_reduce

    def noted(x: torch.Tensor, *, op: object, group: torch.distributed.ProcessGroup) -> None:
        caller = sys._getframe(2).f_code.co_name
        groups[caller == "_reduce"].add(group.group_name)
        real(x, op=op, group=group)

    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        with Collectives() as seen, mock.patch.object(torch.distributed, "all_reduce", noted):
            for step in (1, 2):
                trainer.train_step(step)
            trainer.read_step()
        trainer.metrics.close()
    return groups[True], groups[False].union(*seen.groups.values())


@pytest.mark.parametrize("layout", ["fsdp2", *slow("fsdp2+cp2")])
def test_metrics_wait_behind_no_other_collective(pool: WorkerPool, tmp_path, layout: str) -> None:
    """The next step has begun when they are reduced, and a communicator is a queue."""
    world_size, arguments = LAYOUTS[layout]
    for metric_groups, others in pool.run(world_size, logged_case, str(tmp_path), arguments):
        assert len(metric_groups) == 1
        assert others
        assert not metric_groups & others


def zero_copy_case(folder: str, arguments: list[str]) -> tuple[dict[str, int], dict]:
    """Buffers by the group that allocated them, in a step; the gradients."""
    process, config, job = build(folder, *arguments)
    buffers: Counter[str] = Counter()

    def allocate(group: torch.distributed.ProcessGroup, size: tuple[int, ...], **settings: object) -> torch.Tensor:
        buffers[group.group_desc] += 1
        return torch.empty(*size, **settings)

    with (
        process_group(process, config.comm),
        mock.patch.object(data_parallel, "allocate", allocate),
    ):
        trainer = RecordingTrainer(job, process.device, record=Record())
        trainer.train_step(1)
        trainer.metrics.close()
        return dict(buffers), trainer.record.gradients[-1]


@pytest.mark.parametrize("layout", ["fsdp2", *slow("hsdp2x2")])
def test_buffers_lie_in_the_memory_of_a_group_that_has_some(pool: WorkerPool, tmp_path, layout: str) -> None:
    """Gathers run in the group of the mesh, reductions in a group of their own. With gloo there is one group."""
    world_size, arguments = LAYOUTS[layout]
    plain = pool.run(world_size, zero_copy_case, str(tmp_path), arguments)
    without = pool.run(world_size, reduced_case, str(tmp_path), [*arguments, "--parallelism.fsdp_zero_copy"], True)
    results = pool.run(world_size, zero_copy_case, str(tmp_path), [*arguments, "--parallelism.fsdp_zero_copy"])
    for (buffers, gradients), (none, wanted), (_, gloo_gradients, _) in zip(results, plain, without, strict=True):
        assert none == {}
        assert len(buffers) == 2
        assert "fsdp_reduce_scatter" in buffers
        for other in (wanted, gloo_gradients):
            assert all(torch.equal(gradient, other[name]) for name, gradient in gradients.items())


def counted_case(folder: str, arguments: list[str]) -> dict[str, int]:
    process, config, job = build(folder, *arguments)
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        trainer.train_step(1)
        exchange.calls.clear()
        trainer.train_step(2)
        trainer.metrics.close()
    return dict(exchange.calls)


def test_collectives_of_our_own_in_a_step(pool: WorkerPool, tmp_path) -> None:
    """Labels over dp; with TP partial gradients; loss, norm and stop over all at once; two for a logged step.

    However many micro-batches there are.
    """
    assert pool.run(2, counted_case, str(tmp_path), LAYOUTS["fsdp2"][1]) == [{"all_reduce": 4}] * 2
    assert pool.run(2, counted_case, str(tmp_path), LAYOUTS["tp2"][1]) == [{"all_reduce": 4}] * 2


class Gathers(TorchDispatchMode):
    """Notes each all-gather of FSDP among other events of a step."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "allgather" in function.name():
            self.events.append("gather")
        return function(*args, **(kwargs or {}))


def gathers_case(folder: str, arguments: list[str], prefetches: bool) -> str:
    """The all-gathers of a forward among the starts of its last layer's computation, and of the output projection."""
    process, config, job = build(folder, *arguments)
    with process_group(process, config.comm):
        real = data_parallel._prefetch

        def prefetch(units: list, options: object, *, last_is_apart: bool) -> None:
            real(units, options, last_is_apart=last_is_apart and prefetches)

        with mock.patch.object(data_parallel, "_prefetch", prefetch):
            trainer = RecordingTrainer(job, process.device, record=Record())
        events: list[str] = []
        (model,) = trainer.model_parts
        last = list(model.layers.values())[-1]
        last.attention_norm.register_forward_pre_hook(lambda *_: events.append("last layer"))
        model.output.register_forward_hook(lambda *_: events.append("logits"))
        trainer.train_step(1)
        events.clear()
        with Gathers(events):
            trainer.train_step(2)
        trainer.metrics.close()
    return " ".join(events[: events.index("logits") + 1])


def test_the_output_projection_is_gathered_while_the_last_layer_computes(pool: WorkerPool, tmp_path) -> None:
    """It runs after the model's forward, where FSDP would wait for all layers before it gathers."""
    ahead, exposed = (pool.run(2, gathers_case, str(tmp_path), LAYOUTS["fsdp2"][1], way)[0] for way in (True, False))
    assert ahead.endswith("gather last layer logits")
    assert exposed.endswith("last layer gather logits")
    assert ahead.count("gather") == exposed.count("gather")
