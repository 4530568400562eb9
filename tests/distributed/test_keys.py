"""Law: each key of the configuration has an effect, which is seen. `tests/keys.py` says how."""

import ast
import contextlib
import gc
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import train
from longshard.sharding import exchange
from tests.distributed.harness import whole
from tests.distributed.pool import WorkerPool, free_port
from tests.keys import EFFECTS, Observed, Seen
from tests.wide import WIDE
from trainer.config.keys import keys_of
from trainer.config.schema import JobConfig
from trainer.parallel import data_parallel
from trainer.runtime.console import logger
from trainer.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
BASE = [
    "--model.flavor=tiny",
    "--training.dataset=text",
    "--training.dataset_path={data}/text",
    "--training.data_streams=2",
    "--training.seq_len=16",
    "--training.local_batch_size=2",
    "--training.steps=3",
    "--training.max_norm=100",
    "--optimizer.lr=1e-3",
    "--lr_scheduler.warmup_steps=1",
    "--metrics.log_freq=1",
]

# Few enough for the patience of the pool on a busy machine.
RUNS_AT_ONCE = 8


# ---- one run, on each rank


def observe(arguments: list[str], folder: str, fail: str) -> Observed:
    """Run the program and return observations of the run."""
    seen, trainers = Observed(), []
    out = io.StringIO()
    out.isatty = lambda: True

    class Watched(Trainer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            trainers.append(self)
            watch(self, seen)

        def train_step(self, step: int) -> None:
            if fail:
                raise torch.distributed.DistNetworkError(fail)
            first = step == self.start_step + 1
            with watched_step(seen) if first else contextlib.nullcontext():
                super().train_step(step)
            if first:
                parameters = [p for part in self.model_parts for p in part.parameters() if p.grad is not None]
                seen.clipped = torch.stack([whole(p.grad).float().norm() for p in parameters]).norm().item()

    with (
        mock.patch("trainer.trainer.Trainer", Watched),
        mock.patch("trainer.commands.rank._GRACE_SECONDS", 0),
        mock.patch.dict(os.environ, {"TERM": "xterm"}),
        recorded(seen),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        seen.code = train.main([*arguments, f"--job.dump_folder={folder}"])
        logger.warning("a line in colour, where there is any")
        seen.remembered = os.environ["TORCH_FR_BUFFER_SIZE"]
    seen.out = out.getvalue()
    seen.files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    if trainers and (path := Path(folder, "metrics.jsonl")).exists():
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        seen.logged, seen.losses, seen.lrs = ([step[key] for step in steps] for key in ("step", "loss", "lr"))
    return seen


def watch(trainer: Trainer, seen: Observed) -> None:
    """Record facts known before the first step, and add hooks to layers and embedding that record their calls."""
    parts = trainer.model_parts
    seen.parameters = {
        name: ((p.to_local() if isinstance(p, DTensor) else p).numel(), str(p.dtype).removeprefix("torch."))
        for part in parts
        for name, p in part.named_parameters()
    }
    seen.initial = size_of(trainer)
    group = trainer.optimizer.param_groups[0]
    seen.optimizer = bool(group.get("foreach")), bool(group["fused"])
    seen.deterministic = torch.are_deterministic_algorithms_enabled()
    seen.float8 = sum(type(module).__name__ == "Float8Linear" for part in parts for module in part.modules())
    seen.timeouts = [timeout_of(torch.distributed.group.WORLD)]
    seen.timeouts += [timeout_of(trainer.checkpoint.group)] if trainer.checkpoint.group else []
    for part in parts:
        if part.tok_embeddings is not None:
            part.tok_embeddings.register_forward_pre_hook(lambda _, args: note(seen, "inputs", whole(args[0]).tolist()))
        for layer in part.layers.values():
            layer.attention_norm.register_forward_pre_hook(lambda *_: note(seen, "order", "F"))
            layer.feed_forward.register_full_backward_pre_hook(lambda *_: note(seen, "order", "B"))
            layer.attention.inner_attention.register_forward_pre_hook(
                lambda _, args: setattr(seen, "compute", str(args[0].dtype).removeprefix("torch."))
            )
    losses = trainer.task.token_losses

    def watched_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        local = logits.to_local() if isinstance(logits, DTensor) else logits
        seen.logits = ("a shard of " if local.shape != logits.shape else "") + str(local.shape[-1])
        return losses(logits, labels)

    trainer.task.token_losses = watched_losses
    steps = trainer.train

    def train_and_look() -> None:
        steps()
        seen.final = size_of(trainer)
        states = trainer.optimizer.state.values()
        moments = (state[next(name for name in state if name != "step")] for state in states)
        seen.moments = {str(moment.dtype).removeprefix("torch.") for moment in moments}
        seen.timeouts.append(timeout_of(torch.distributed.group.WORLD))

    trainer.train = train_and_look


def note(seen: Observed, attribute: str, event: object) -> None:
    """Append an event of the first step to a list."""
    if seen.watching:
        getattr(seen, attribute).append(event)


def size_of(trainer: Trainer) -> float:
    return sum(whole(p).double().abs().sum().item() for part in trainer.model_parts for p in part.parameters())


def timeout_of(group: torch.distributed.ProcessGroup) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


class Collectives(TorchDispatchMode):
    """Notes FSDP's all-gathers and reduce-scatters among the events of the first step."""

    def __init__(self, seen: Observed) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does inside comes here, too
        if func.name().startswith("c10d::_allgather"):
            note(self.seen, "order", "gather")
        elif func.name().startswith("c10d::_reduce_scatter"):
            note(self.seen, "order", f"reduce {str(args[0].dtype).removeprefix('torch.')}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched_step(seen: Observed) -> Iterator[None]:
    """Around the first step: only its inputs, order and collectives are kept."""
    exchange.calls.clear()
    seen.watching = True
    with Collectives(seen):
        yield
    seen.watching = False
    seen.calls = dict(exchange.calls)


@contextlib.contextmanager
def recorded(seen: Observed) -> Iterator[None]:
    """Inside, FSDP's policies, the collector, the compiler and the profiler are noted."""

    def noting(owner: Any, name: str, look: Callable[..., None]) -> Any:
        real = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return real(*args, **kwargs)

        return mock.patch.object(owner, name, wrapped)

    def compiled(function: Callable, *, backend: str, **_: Any) -> Callable:
        seen.compiled.append(f"{function.__name__.removeprefix('_')} {backend}")
        return function

    with (
        noting(
            data_parallel,
            "fully_shard",
            lambda *_, offload_policy, **__: seen.policies.append(type(offload_policy).__name__),
        ),
        mock.patch.object(torch, "compile", compiled),
        noting(torch.profiler.profile, "step", lambda self: seen.profiled.append(self.current_action.name)),
    ):
        yield


def observe_all(runs: list[tuple[str, str]], ports: list[int], data: str, folder: str) -> list[Observed]:
    """One run after the other, with (arguments, failure); they share nothing but the data."""
    results = []
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # each run is a job with a store of its own
    for i, ((arguments, fail), port) in enumerate(zip(runs, ports, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        words = [word.replace("{data}", data) for word in [*BASE, *arguments.split()]]
        results.append(observe(words, f"{folder}/{i}", fail))
        gc.collect()
    return results


# ---- the table


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of several lengths as text files and as JSON lines, a small tokenizer, a schedule."""
    folder = tmp_path_factory.mktemp("data")
    for name, sources in (
        ("text", ("ast.py", "gzip.py", "stat.py", "heapq.py")),
        ("lines", ("copy.py", "code.py", "cmd.py")),
    ):
        (folder / name).mkdir()
        for source in sources:
            text = Path(os.__file__).with_name(source).read_text()
            (folder / name / source).with_suffix(".txt").write_text(text[: 3000 if name == "text" else 60])
            with (folder / f"{name}.jsonl").open("a") as lines:
                lines.write(json.dumps({"text": text[1000:1040]}) + "\n")
    ranks = (ROOT / "trainer/assets/python_4k.tiktoken").read_text().splitlines()
    (folder / "tokenizer.model").write_text("\n".join(ranks[:512]))
    return folder


@pytest.fixture(scope="module")
def observed(
    request: pytest.FixtureRequest, pool: WorkerPool, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple, Observed]:
    """(ranks, arguments, failure) -> observations of rank 0, for the selected keys; each is run once."""
    specs = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    entries = [EFFECTS[spec["key"]] for spec in specs if spec.get("key") in EFFECTS]
    wanted = dict.fromkeys(
        (entry.ranks, arguments, entry.fail)
        for entry in entries
        if isinstance(entry, Seen)
        for arguments in (entry.off, entry.on)
    )
    results = {}
    for ranks in (1, 2):
        cases = [case for case in wanted if case[0] == ranks]
        for some in (cases[i : i + RUNS_AT_ONCE] for i in range(0, len(cases), RUNS_AT_ONCE)):
            runs, ports = [case[1:] for case in some], [free_port() for _ in some]
            folder = str(tmp_path_factory.mktemp(f"runs_{ranks}"))
            results |= zip(some, pool.run(ranks, observe_all, runs, ports, str(data), folder)[0], strict=True)
    return results


@pytest.mark.parametrize("key", [key for key, entry in EFFECTS.items() if isinstance(entry, Seen)])
def test_a_key_does_something(key: str, observed: dict[tuple, Observed]) -> None:
    entry = EFFECTS[key]
    off, on = (observed[entry.ranks, arguments, entry.fail] for arguments in (entry.off, entry.on))
    assert on.code == (3 if entry.fail else 0), on.out
    others = {name: (value, getattr(on, name)) for name, value in vars(off).items() if value != getattr(on, name)}
    assert entry.differs(off, on), f"what was seen without and with it: {others}"


@pytest.mark.parametrize("key", [key for key, entry in EFFECTS.items() if isinstance(entry, Seen) and entry.on])
def test_a_run_alone_is_not_different(key: str, observed: dict[tuple, Observed]) -> None:
    """The negative control: of a run and itself nothing differs."""
    entry = EFFECTS[key]
    for arguments in (entry.off, entry.on):
        same = observed[entry.ranks, arguments, entry.fail]
        assert not entry.differs(same, same)


def test_every_key_of_the_schema_is_in_the_table() -> None:
    assert set(EFFECTS) == set(keys_of(JobConfig))


@pytest.mark.parametrize("name", sorted({entry for entry in EFFECTS.values() if isinstance(entry, str)}))
def test_the_tests_that_are_named_exist_and_are_quick(name: str) -> None:
    assert WIDE.get(name) != ()
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    (definition,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    assert not any(re.fullmatch(r"pytest\.mark\.slow", ast.unparse(mark)) for mark in definition.decorator_list)


def test_settings_without_effect_change_nothing(pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    """Settings that a run only reports as ineffective (trainer/job/resolution.py) do not disturb a run on one rank."""
    in_vain = (
        "--float8.enable_fsdp_float8_all_gather",
        "--parallelism.context_parallel_method=hybrid --parallelism.context_parallel_hybrid_degrees 2 2",
        "--parallelism.context_parallel_heads_per_pass=1 --parallelism.enable_async_tensor_parallel",
        "--parallelism.disable_loss_parallel --parallelism.fsdp_forward_prefetch=2 --comm.check_consistency",
        "--parallelism.fsdp_reshard_after_forward=never --training.mixed_precision_reduce=bfloat16",
        "--parallelism.pipeline_parallel_schedule=GPipe --parallelism.pipeline_parallel_microbatch_size=2",
    )
    bfloat16 = (
        "--float8.enable --float8.emulate --training.mixed_precision_param=bfloat16 --training.global_batch_size=6"
    )
    runs = [(bfloat16, ""), (f"{bfloat16} {' '.join(in_vain)}", "")]
    plain, noted = pool.run(1, observe_all, runs, [0, 0], str(data), str(tmp_path))[0]
    assert (plain.code, noted.code) == (0, 0), noted.out
    reasons = noted.out.count("note: ") - plain.out.count("note: ")
    assert reasons == 5  # one for each
    assert (noted.losses, noted.final, noted.calls) == (plain.losses, plain.final, plain.calls)
