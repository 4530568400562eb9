"""The process that traces: a question a line on standard input, an answer a line on standard output, both JSON.

    {"arguments": ["--job.config_file", ...], "ranks": 8, "gpu": {"name": ...}, "whole": false}
 -> {"profiles": {"0": {...}}}   or   {"error": "one sentence", "wrong": true}

It replaces functions of PyTorch for the whole process, so no other work runs in it. `Worker` starts one.

State of the process: Standard output takes answers alone, until the tracing process ends.
"""

import importlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from lct_planner import shim
from lct_planner.profile import Profile, deeper
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import Checkpoint, Profiling
from trainer.families.args import kind_of_layer
from trainer.job import ResolvedJob, resolve
from trainer.job.pipeline_stages import layers_of_stages, resolve_pipeline

SHALLOW = 4
"""Layers of the shallower traced model: two at each end, plus up to four leading layers of another kind."""
_OWNERS = 16
"""Up to this many owners share the matrices evenly; beyond it, the traced first rank has at least its share."""


def profiles(job: ResolvedJob, gpu: Any, *, whole: bool) -> dict[int, Profile]:
    """Return rank -> `Profile`, of the first rank at the first place of the pipeline, and at its last place.

    One of these two ranks should have the most memory. Each trace has a process of its own, a copy of this one, because
    PyTorch remembers groups of ranks.

    Args:
        job: The resolved job.
        gpu: The GPU. None for CPUs.
        whole: Trace all layers.

    Raises:
        RuntimeError: A trace has failed, or its process was killed.
    """
    depths = None if whole else shallow_depths(job)
    jobs = [job] if depths is None else [_with_depth(job, depth) for depth in depths]
    pp_ranks = sorted({0, job.degrees.pp - 1})
    results = _forked([(each, gpu, pp_rank) for pp_rank in pp_ranks for each in jobs])
    ranks_of_stage = job.degrees.world_size // job.degrees.pp
    return {
        pp_rank * ranks_of_stage: results[i]
        if depths is None
        else deeper(*results[2 * i : 2 * i + 2], len(_layers(job, pp_rank)))
        for i, pp_rank in enumerate(pp_ranks)
    }


def _with_depth(job: ResolvedJob, layers: int) -> ResolvedJob:
    model = replace(job.model, n_layers=layers)
    return replace(job, model=model, pipeline=resolve_pipeline(job.config, model))


def _layers(job: ResolvedJob, pp_rank: int) -> list[int]:
    """Return the indices of the layers of a pipeline rank; [] for a model of fields."""
    if job.config.task != "tokens":
        return []
    stages = layers_of_stages(job.pipeline, job.model)
    own = [0] if job.pipeline is None else job.pipeline.stages_of(pp_rank)
    return [layer for stage in own for layer in stages[stage]]


def _forked(arguments: list[tuple[ResolvedJob, Any, int]]) -> list[Profile]:
    """Return the profiles of these jobs, each of a copy of this process.

    Raises:
        RuntimeError: a copy was killed, mostly for lack of memory, or its trace has failed.
    """
    context = multiprocessing.get_context("fork")
    started = []
    for each in arguments:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send_profile, args=(sender, *each))
        process.start()
        sender.close()
        started.append((process, receiver))
    results = []
    for process, receiver in started:
        try:
            results.append(receiver.recv())
            process.join()
        except EOFError:
            process.join()
            results.append(
                RuntimeError(
                    f"the tracing process ended with code {process.exitcode}, -9 for lack of memory"
                )
            )
    for error in (x for x in results if isinstance(x, Exception)):
        raise error
    return results


def _send_profile(sender: Connection, job: ResolvedJob, gpu: Any, pp_rank: int) -> None:
    """Trace the first rank of a pipeline rank, and send its profile, or the error."""
    from lct_planner.profiling import added_up
    from lct_planner.tracing import trace

    try:
        rank = pp_rank * (job.degrees.world_size // job.degrees.pp)
        sender.send(added_up(trace(job, rank, gpu), 1, _layers(job, pp_rank)))
    except Exception as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"
        if type(error).__name__ in (
            "DataDependentOutputException",
            "DynamicOutputShapeException",
        ):
            said = f"what ranks send depends on values, which a trace does not have ({error}); ask for one rank"
        sender.send(RuntimeError(said))


def shallow_depths(job: ResolvedJob) -> tuple[int, int] | None:
    """Return two numbers of layers from which the model's depth follows. None if the model is not much deeper.

    Each stage of a pipeline has the same number of layers. Its numbers in the two shallow models differ by a period:
    the layers after which their kinds, checkpointing and offloading repeat. Leading layers of other kinds are in both
    models. So are the kinds of the last two layers. A model of fields is traced whole.

    Args:
        job: The resolved job.
    """
    if job.config.task != "tokens":
        return None
    settings = job.config.activation_checkpoint
    model = job.model
    special, turn = min(map(partial(_turn, model), range(SHALLOW + 1)), key=sum)
    period = math.lcm(turn, settings.whole_layers or 1, settings.group)
    if settings.offload != "none":
        period = math.lcm(
            period, Fraction(settings.offload_fraction).limit_denominator(8).denominator
        )
    owners = job.degrees.world_size // job.degrees.pp
    # each owner has the same number of matrices of every shape
    if job.config.optimizer.name == "Muon" and owners <= _OWNERS:
        period = math.lcm(period, owners)
    stages = 1 if job.pipeline is None else len(job.pipeline.stages)
    modules = job.config.parallelism.pipeline_parallel_module_fqns
    if stages > 1 and (period > 1 or special or modules):
        return None
    layers = model.n_layers // stages
    least = SHALLOW + special
    first = least + (layers - least) % period
    return (first * stages, (first + period) * stages) if first + period < layers else None


def _turn(model: Any, first: int) -> tuple[int, int]:
    """Return `first`, and the period of the kinds of layers from there on."""
    kinds = [kind_of_layer(model, layer) for layer in range(first, model.n_layers)]
    turns = (n for n in range(1, len(kinds)) if kinds[n:] == kinds[:-n])
    return first, next(turns, model.n_layers)


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a question: resolve its job, and trace it. An error is an answer, too.

    Args:
        question: The question, see the module.
    """
    try:
        config = parse_command_line(question["arguments"]).config
        device_type = "cpu" if question["gpu"] is None else "cuda"
        whole = resolve(
            config, question["ranks"], device_type, node=question["node"], missing=[]
        )
        gpu = None
        if question["gpu"] is not None:
            from lct_planner.device import Gpu

            gpu = Gpu(**question["gpu"] | {"capability": tuple(question["gpu"]["capability"])})
        with tempfile.TemporaryDirectory() as folder:
            job = _traceable(whole, folder)
            results = profiles(job, gpu, whole=question["whole"])
        factor = whole.sequences_per_step / job.sequences_per_step
        return {
            "profiles": {
                rank: asdict(profile.repeated(factor)) for rank, profile in results.items()
            }
        }
    except ConfigError as error:
        return {"error": str(error), "wrong": True}
    except Exception as error:
        return {"error": str(error), "wrong": False}


def _traceable(job: ResolvedJob, folder: str) -> ResolvedJob:
    """Return a copy of a job whose step takes the same memory, with few micro-batches.

    The copy has no checkpoints, validation, profiling and metrics sinks. Data settings stay: the traced trainer makes
    its own batches. A compiled job gets the backend `aot_eager` and no compiled loss; layers stay compiled only if the
    compiler decides which tensors are kept. In a pipeline at most 2 x ranks micro-batches are alive, except if all
    forwards run first. folder: the copy's dump folder. ConfigError if the job needs bitsandbytes and lacks it.
    """
    from trainer.transforms.quantized import check_quantization_package  # it imports torch

    config = job.config
    check_quantization_package(config.lora)  # its import must find this machine's own devices
    batch = config.training.local_batch_size
    plan = job.pipeline
    if plan is not None and plan.schedule not in ("GPipe", "LoopedBFS"):
        passes = min(plan.micro_batches, job.degrees.pp * (1 if plan.schedule == "1F1B" else 2))
        batch = batch // plan.micro_batches * passes
    rows = min(job.micro_batches, 2) * batch * job.degrees.dp
    nothing = replace(
        config,
        training=replace(config.training, local_batch_size=batch, global_batch_size=rows),
        job=replace(config.job, dump_folder=folder),
        checkpoint=Checkpoint(),
        validation=replace(config.validation, enable=False),
        profiling=Profiling(),
        metrics=replace(config.metrics, enable_tensorboard=False, enable_wandb=False),
    )
    compilation = job.compilation
    if compilation.any:
        # If activation checkpointing decides, eager code keeps the same tensors. Otherwise the compiler decides, and a
        # backend that needs no device shows it, except for tensor-parallel blocks.
        decides = (
            config.activation_checkpoint.mode in ("none", "memory_budget")
            and job.degrees.tp == 1
        )
        compilation = replace(
            compilation,
            model=compilation.model and decides,
            loss=False,
            backend="aot_eager",
            recomputes_every=0,
            overlaps_tensor_parallel=False,
        )
    return replace(
        job,
        config=nothing,
        user_config=nothing,
        compilation=compilation,
        pipeline=plan and resolve_pipeline(nothing, job.model),
    )


class Worker:
    """A process that traces. Close it, or use it as a context.

    Args:
        has_shim: Whether it has CUDA tensors, which needs a compiler of C++.
    """

    def __init__(self, *, has_shim: bool) -> None:
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "LOG_RANK": ""}
        if has_shim:
            environment |= shim.environment(shim.build())
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lct_planner.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def ask(
        self,
        arguments: Sequence[str],
        ranks: int,
        gpu: Mapping[str, Any] | None,
        *,
        whole: bool,
        node: int | None = None,
    ) -> dict[str, Any]:
        """Trace a job and return the answer.

        Args:
            arguments: Command line of the job.
            ranks: Number of ranks.
            gpu: Fields of `device.Gpu`. None for ranks on CPUs.
            whole: Trace all layers.
            node: Ranks on one node, see `resolve`.

        Returns:
            The answer, see the module.

        Raises:
            ConfigError: A setting is wrong, or the job cannot be traced; one sentence.
        """
        question = {
            "arguments": list(arguments),
            "ranks": ranks,
            "gpu": gpu,
            "whole": whole,
            "node": node,
        }
        with suppress(BrokenPipeError):  # the process has ended; the next lines say so
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(
                f"the process that traces the job ended with code {self._process.wait()}{self._why()}"
            )
        results = json.loads(line)
        if "error" in results:
            raise ConfigError(
                results["error"]
                if results["wrong"]
                else f"the job cannot be traced: {results['error']}"
            )
        return results

    def _why(self) -> str:
        """Return `: ` and the last line of the process's log; "" if the log is empty."""
        self._log.seek(0)
        written = self._log.read().strip().splitlines()
        return f": {written[-1]}" if written else ""

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def main() -> None:
    """Answer each line of standard input by a line of standard output, until standard input ends."""
    # output of the trainer is not an answer
    answers = sys.stdout
    sys.stdout = sys.stderr
    importlib.import_module("lct_planner.tracing")  # once, for all copies of this process
    shim.install()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
