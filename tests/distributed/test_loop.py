"""What the loop promises beside parity: precision, stops, shared batches, counted collectives, time-outs."""

import copy
import itertools
import json
import re
from collections import Counter
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import harness
from tests.distributed.harness import Record, RecordingTrainer, assert_parity, run_layout
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.components import device_clock, metrics
from trainer.config.loader import parse_command_line
from trainer.distributed import data_parallel
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding import exchange
from trainer.runtime.process_group import Process, process_group, set_timeout
from trainer.trainer import TrainingError


def build(folder: str, *arguments: str):
    process = Process.from_environment()
    config = parse_command_line([*harness.BASE, f"--job.dump_folder={folder}", *arguments]).config
    return process, config, harness.resolved(config, process)


def bfloat16_case(folder: str, arguments: list[str]) -> dict:
    process, config, job = build(folder, *arguments)
    seen = {}
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        attention = trainer.model_parts[0].layers["0"].attention
        attention.inner_attention.register_forward_hook(lambda _m, args, out: seen.update(q=args[0].dtype))
        attention.register_forward_pre_hook(lambda _m, args: seen.update(freqs_cis=args[1].dtype))
        trainer.train_step(1)
        seen["storage"] = {p.dtype for p in trainer.model_parts[0].parameters()}
        seen["gradients"] = {p.grad.dtype for p in trainer.model_parts[0].parameters()}
        trainer.metrics.close()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2+tp2", "fsdp2", "one"])
def test_bfloat16_computes_and_float32_keeps(pool: WorkerPool, tmp_path, layout: str) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    seen = pool.run(world_size, bfloat16_case, str(tmp_path), [*arguments, "--training.mixed_precision_param=bfloat16"])
    assert seen[0]["q"] == torch.bfloat16
    assert seen[0]["freqs_cis"] == torch.float32
    assert seen[0]["storage"] == {torch.float32}
    assert seen[0]["gradients"] == {torch.float32}


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
    ahead = ["--parallelism.fsdp_forward_prefetch=2", "--parallelism.fsdp_backward_prefetch=2"]
    plain = pool.run(2, gathered_case, str(tmp_path), layout)[0]
    early = pool.run(2, gathered_case, str(tmp_path), [*layout, *ahead])[0]
    forward = [event for event in plain if "back" not in event][:8]
    assert forward == [f"{what} {layer}" for layer in range(4) for what in ("gather", "run")]
    assert early.index("gather 2") < early.index("run 0") < early.index("gather 3") < early.index("run 1")
    backward = early[early.index("run 3") + 1 :]
    assert backward.index("gather 1") < backward.index("back 3") < backward.index("gather 0") < backward.index("back 2")


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
    """They are bit for bit the same as over that of the gathers."""
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
    """Those of gathers in that of the mesh, those of reductions in that of their own; gloo has none."""
    world_size, arguments = LAYOUTS[layout]
    plain = pool.run(world_size, zero_copy_case, str(tmp_path), arguments)
    without = pool.run(world_size, reduced_case, str(tmp_path), [*arguments, "--parallelism.fsdp_zero_copy"], True)
    found = pool.run(world_size, zero_copy_case, str(tmp_path), [*arguments, "--parallelism.fsdp_zero_copy"])
    for (buffers, gradients), (none, wanted), (_, of_gloo, _) in zip(found, plain, without, strict=True):
        assert none == {}
        assert len(buffers) == 2
        assert "fsdp_reduce_scatter" in buffers
        for other in (wanted, of_gloo):
            assert all(torch.equal(gradient, other[name]) for name, gradient in gradients.items())


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_run_twice(pool: WorkerPool, deterministic: bool) -> None:
    world_size, arguments = LAYOUTS["hsdp2x2"]
    flag = "--training.deterministic" if deterministic else "--training.no-deterministic"
    one, two = (pool.run(world_size, run_layout, [flag, *arguments])[0] for _ in range(2))
    if deterministic:
        assert all(torch.equal(weight, two.weights[name]) for name, weight in one.weights.items())
    assert_parity(one, two, 1e-6)


def other_batch_case(folder: str, arguments: list[str]) -> str:
    process, config, job = build(folder, *arguments)
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        if process.rank == 1:
            trainer.data.take()  # as if this rank had read on
        with pytest.raises(TrainingError) as error:
            trainer.train_step(1)
        trainer.metrics.close()
    return str(error.value)


def test_ranks_that_share_a_batch_must_read_the_same(pool: WorkerPool, tmp_path) -> None:
    messages = pool.run(2, other_batch_case, str(tmp_path), LAYOUTS["tp2"][1])
    assert all(re.search(r"ranks \[0, 1\].*different batches", message) for message in messages)


def not_finite_case(folder: str, arguments: list[str]) -> tuple[str, bool, bool]:
    """The message, and whether weights, and values of the optimizer, are those of the step before."""
    process, config, job = build(folder, *arguments)
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        trainer.train_step(1)
        before = [p.detach().clone() for p in trainer.parameters]
        state = {p: {name: x.clone() for name, x in trainer.optimizer.state[p].items()} for p in trainer.parameters}
        if process.rank == 1:  # on one rank alone; all have to stop
            weight = trainer.model_parts[0].layers["0"].attention.wq.weight
            weight.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().fill_(torch.inf))
        with pytest.raises(TrainingError) as error:
            trainer.train_step(2)
        after = [p.detach() for p in trainer.parameters]
        same = all(torch.equal(harness.whole(a), harness.whole(b)) for a, b in zip(before, after, strict=True))
        same_state = all(
            torch.equal(harness.whole(x), harness.whole(trainer.optimizer.state[p][name]))
            for p, values in state.items()
            for name, x in values.items()
        )
        trainer.metrics.close()
    return str(error.value), same, same_state


@pytest.mark.parametrize(
    ("implementation", "layout"),
    [("foreach", "fsdp4"), ("fused", "fsdp2+tp2"), *slow(("fused", "fsdp4"), ("foreach", "fsdp2+tp2"))],
)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_and_changes_nothing(
    pool: WorkerPool, tmp_path, implementation: str, layout: str
) -> None:
    """With fused kernels the update is launched before the host knows, and masked."""
    arguments = [*LAYOUTS[layout][1], f"--optimizer.implementation={implementation}"]
    for message, weights_unchanged, state_unchanged in pool.run(4, not_finite_case, str(tmp_path), arguments):
        assert message.startswith("step 2: ")
        assert "those of step 1" in message
        assert weights_unchanged
        assert state_unchanged


def plain_case(folder: str) -> list[dict[str, float]]:
    """For each of two steps: how far loss, norm and gradients are from those of plain PyTorch code."""
    process, config, job = build(folder, "--training.dtype=float64")
    differences = []
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        for step in (1, 2):
            model = copy.deepcopy(trainer.model_parts[0])
            model.zero_grad()
            trainer.train_step(step)
            rows = [harness.make_row(i, 16, no_labels=i < 8 and i % 2 == 1) for i in range(8 * step - 8, 8 * step)]
            tokens, labels = (torch.stack([row[name] for row in rows]) for name in ("tokens", "labels"))
            logits = model.output(model(tokens)).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100)  # the mean over what has a label
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
            scale = min(1.0, config.training.max_norm / norm)
            got = {"loss": loss.item(), "norm": norm}
            metrics = json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])
            differences.append(
                {"loss": metrics["loss"] / got["loss"] - 1, "norm": metrics["grad_norm"] / got["norm"] - 1}
                | {
                    name: ((trainer.record.gradients[-1][name] - p.grad * scale).norm() / p.grad.norm() / scale).item()
                    for name, p in model.named_parameters()
                }
            )
        trainer.metrics.close()
    return differences


def test_a_step_is_that_of_plain_code(pool: WorkerPool, tmp_path) -> None:
    """What layouts are compared with: one process against cross entropy, a backward and clipping written out."""
    (steps,) = pool.run(1, plain_case, str(tmp_path))
    for differences in steps:
        assert len(differences) > 20
        assert max(map(abs, differences.values())) < 1e-10, differences


def clock_case(folder: str, arguments: list[str]) -> tuple[list[dict], int]:
    """Two steps under a clock that advances by a second whenever it is looked at; tokens of a resumed run."""
    process, config, job = build(folder, *arguments)
    with process_group(process, config.comm):
        clock = mock.Mock(perf_counter=mock.Mock(side_effect=itertools.count(1.0)))
        with mock.patch.object(metrics, "time", clock), mock.patch.object(device_clock, "time", clock):
            trainer = RecordingTrainer(job, process.device, record=Record())
            for step in (1, 2):
                trainer.train_step(step)
        trainer.metrics.close()
        trainer.metrics.start_step, trainer.metrics.tokens_before = 5, 1000
        resumed = trainer.metrics.tokens_seen(7)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], resumed


@pytest.mark.parametrize("layout", ["cp2", *slow("fsdp2", "tp2")])
def test_speed_counts_each_token_of_the_job_once(pool: WorkerPool, tmp_path, layout: str) -> None:
    """8 rows of 16 tokens in a step; the clock is looked at before and after loading, and when the step is logged.

    The first step also makes the batches of the second one, on a CPU as a part of loading.
    """
    (lines, resumed), _ = pool.run(2, clock_case, str(tmp_path), LAYOUTS[layout][1])
    assert resumed == 1000 + 2 * 128
    for step, line in enumerate(lines, 1):
        loading, seconds = (2, 5) if step == 1 else (1, 3)
        assert line["tokens_per_second"] == pytest.approx(128 / seconds)
        assert line["tokens_per_second_per_device"] == pytest.approx(64 / seconds)
        assert line["data_loading_fraction"] == pytest.approx(loading / seconds)
        assert line["tokens_seen"] == 128 * step


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


def timeout_case(what: str) -> float:
    """Seconds that rank 0 waits for a collective, or a message, of a rank that does not come."""
    import time

    process = Process.from_environment()
    config = parse_command_line([]).config
    with process_group(process, config.comm):
        set_timeout(2.0)
        started, x = time.monotonic(), torch.ones(1)
        group = torch.distributed.group.WORLD
        if process.rank == 0:
            arriving = [exchange.Transfer(x, peer=1, is_send=False)]
            wait = {
                "collective": lambda: torch.distributed.all_reduce(x),
                "message": lambda: exchange.send_receive(arriving, group, kind="kv").wait(),
            }[what]
            with pytest.raises(RuntimeError, match="Timed out"):
                wait()
        else:
            time.sleep(4)
        return time.monotonic() - started


@pytest.mark.parametrize("what", ["message", *slow("collective")])
def test_a_lowered_timeout_is_in_force(pool: WorkerPool, what: str) -> None:
    """gloo keeps for messages the time-out that a group was made with, unless it is said again."""
    assert pool.run(2, timeout_case, what)[0] < 4


def stage_timeout_case(folder: str) -> float:
    """Seconds that rank 0 waits for a message of the other stage, which sends none, when steps have their time-out."""
    import time

    process, config, job = build(folder, *LAYOUTS["pp2"][1])
    with process_group(process, config.comm):
        trainer = RecordingTrainer(job, process.device, record=Record())
        trainer._set_timeout(2.0)
        started, group = time.monotonic(), trainer.pipeline._group
        if process.rank == 0:
            with pytest.raises(RuntimeError, match="Timed out"):
                torch.distributed.recv(torch.ones(1), group=group, group_src=1)
        else:
            time.sleep(4)
        waited = time.monotonic() - started
        trainer.metrics.close()
    return waited


def test_stages_wait_for_each_other_as_long_as_for_a_step(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, stage_timeout_case, str(tmp_path))[0] < 4


def init_timeout_case() -> timedelta:
    process = Process.from_environment()
    config = parse_command_line(["--comm.init_timeout_seconds=77"]).config
    with process_group(process, config.comm):
        group = torch.distributed.group.WORLD
        return group._get_backend(torch.device("cpu")).options._timeout


def test_the_first_timeout_is_the_setting(pool: WorkerPool) -> None:
    assert pool.run(1, init_timeout_case) == [timedelta(seconds=77)]


def raising_case(rank: int) -> None:
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        if process.rank == rank:
            raise ValueError(f"rank {rank} is the cause")
        torch.distributed.all_reduce(torch.ones(1))


def test_the_pool_names_the_rank_that_has_the_cause_and_starts_again(pool: WorkerPool) -> None:
    for rank in (0, 1):
        with pytest.raises(RankFailedError, match=f"rank {rank} is the cause"):
            pool.run(2, raising_case, rank)
    assert pool.run(1, init_timeout_case)
