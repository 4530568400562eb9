"""Checkpoints by torch.distributed.checkpoint (DCP): tensors in shards that any layout reads, everything else as JSON.

Entries are named by parameter (`optimizer.<name>.<moment>`) or data stream, never by rank: every layout loads them.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LambdaLR

from trainer.checkpoint.dcp_files import WholeState, Writer, cause_of
from trainer.checkpoint.failed_save import not_written
from trainer.checkpoint.host_copies import HostCopies
from trainer.checkpoint.last_export import export_last
from trainer.checkpoint.run_folder import agreed_step, best_before, prepare
from trainer.checkpoint.weights import RunWeights, load_weights, model_tensors, names_of
from trainer.components.lr_scheduler import restart_lr_scheduler
from trainer.components.optimizer import ensure_state
from trainer.config.errors import SharedConfigError
from trainer.data.loader import BatchLoader
from trainer.hugging_face.reader import HFReader
from trainer.job.record import ResolvedJob
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.agreement import gather_values, raise_on_all_ranks, read_once
from trainer.runtime.console import logger, say_waiting
from trainer.runtime.dump_folder import configuration_text
from trainer.runtime.process_group import is_peer_failure, set_group_timeout
from trainer.stores.addresses import named_step
from trainer.stores.folder import checkpoint_folder, unreadable
from trainer.stores.initial_weights import check_initial_weights
from trainer.stores.state import RunState, model_description, states_of
from trainer.stores.store import Place, Store


def tensors_of(
    model_parts: Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return every saved tensor of this rank by name. The tensors are the model's and optimizer's own, not copies.

    Names are `model.NAME` and `optimizer.NAME.ENTRY`, and the same under every parallel layout. A shared parameter has
    the first of its names. Frozen parameters come from `checkpoint.initial_load_path`, and are left out. Missing states
    of the optimizer are created.

    Args:
        model_parts: The model parts of this rank.
        optimizer: The optimizer.
    """
    ensure_state(optimizer)
    named = {
        x: name
        for x, name in names_of(model_parts).items()
        if x.requires_grad or not isinstance(x, nn.Parameter)
    }
    tensors = model_tensors(named)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for entry, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{named[parameter]}.{entry}"] = value
    return tensors


@dataclass
class Checkpointer:
    """Saves and loads the state of one run. Every rank calls the same methods at the same steps.

    With `checkpoint.enable` off it loads initial weights only. As a context manager it waits at the exit for a save in
    progress. `save` and `wait` raise CheckpointError on every rank if this checkpoint, or the previous one in the
    background, cannot be written.

    Attributes:
        job: The resolved job.
        dims: The meshes of the run.
        model_parts: The model parts of this rank.
        optimizer: The optimizer.
        lr_scheduler: The schedule of the learning rate.
        loader: The loader of this rank.
    """

    job: ResolvedJob
    dims: ParallelDims
    model_parts: Sequence[nn.Module]
    optimizer: torch.optim.Optimizer
    lr_scheduler: LambdaLR
    loader: BatchLoader

    def __post_init__(self) -> None:
        config = self.job.config
        self._config = config
        self._model = self.job.model
        self._weights = RunWeights(config, self.job.model, self._once)
        self.settings = config.checkpoint
        self.folder = checkpoint_folder(config)
        self._last_step = 0
        self._pending: Future | None = None
        pinned = self.settings.async_mode == "async_with_pinned_mem"
        self._copies = HostCopies(self.optimizer) if pinned else None
        self._saved_at = time.monotonic()
        """When the last save began; before the first save, when the run began."""
        self.best = math.inf
        """Validation loss of the best checkpoint in the history of this run, if the run keeps the best one."""
        # A background save has its own group, so that its collectives do not mix with collectives of a step.
        self.group = None
        if self.settings.enable:
            # The group is created with the time-out of the start, in case a rank hangs before this point.
            self.group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=config.comm.init_timeout_seconds)
            )
            set_group_timeout(
                self.group, timedelta(seconds=config.comm.checkpoint_timeout_seconds)
            )

    def load(self) -> tuple[int, int]:
        """Return (steps done, tokens seen), after resuming from the checkpoint that the configuration names.

        A collective. A run without a checkpoint of its own starts from `checkpoint.initial_load_path`, if it is set.
        If only weights are loaded, or nothing, the result is (0, 0).

        Raises:
            SharedConfigError: On every rank, if a checkpoint is missing, unreadable, or of another model or other data.
        """
        step = 0
        initial = self.settings.initial_load_path
        if self.settings.enable:
            step = agreed_step(self._config, self.folder, self.dims["world"])
            if not self.settings.load_only:
                raise_on_all_ranks(
                    lambda: prepare(self._config, self.folder) if self.dims.is_first else None
                )
        if step == 0 and initial is not None and not self.settings.initial_load_model_only:
            self._once(lambda: check_initial_weights(self._config, self._model) or b"")
            folder, step = named_step("checkpoint.initial_load_path", initial)
            return step, self._resume(folder, step, without=True)
        adapts = self._config.lora.rank > 0
        if initial is not None and (step == 0 or adapts):
            self.load_initial(self.model_parts)
            logger.info(
                f"the weights are read from {initial}{'; all else starts from step 0' * (step == 0)}"
            )
        if step == 0:
            return 0, 0
        if initial is not None and not adapts:
            logger.info(
                f"checkpoint.initial_load_path = {initial!r} is not read: this run has checkpoints of its own"
            )
        tokens_seen = self._resume(self.folder, step, without=self.settings.load_step != -1)
        # One value for all: a rank that sees an older file would save when the others do not.
        best_step, loss = json.loads(self._once(lambda: best_before(self.folder)))
        if best_step <= step:  # a later step belongs to another history
            self.best = loss
        self._last_step = step
        return step, tokens_seen

    def load_initial(self, model_parts: Sequence[nn.Module]) -> None:
        """Load the weights of `checkpoint.initial_load_path`, if it is set, into the parts of a model. A collective.

        Args:
            model_parts: The model parts of this rank.

        Raises:
            SharedConfigError: On every rank, if the weights are damaged, or of another model.
        """
        if self.settings.initial_load_path is None:
            return
        say_waiting(f"reading the weights in {self.settings.initial_load_path}")
        *peft, base = readers = raise_on_all_ranks(self._weights.initial)
        raise_on_all_ranks(lambda: load_weights(readers, model_parts, adapters=bool(peft)))
        if not isinstance(base, HFReader):
            return
        types = {name: x.dtype for x, name in names_of(model_parts).items()}
        if rounded := base.rounded_to(types):
            logger.info(
                f"training.dtype = {self._config.training.dtype!r} rounds {len(rounded)} tensors that have a wider "
                f"type there, such as {rounded[0]}; training.dtype = 'float32' keeps them"
            )
        if base.lacks_further:
            logger.info(
                f"the layers of model.mtp_layers = {self._model.mtp_layers} are not there: they start at random"
            )

    def _once(self, read: Callable[[], bytes]) -> bytes:
        """Return on every rank the bytes that rank 0 reads: a thousand ranks must not open files at once."""
        return read_once(read, self.dims["world"])

    def _resume(self, folder: Store, step: int, *, without: bool) -> int:
        """Load a saved step; return its tokens seen. A collective. without: obey `checkpoint.exclude_from_loading`."""
        world = self.dims["world"]
        started = time.monotonic()
        state, reader = raise_on_all_ranks(lambda: self._weights.to_resume(step, folder), world)
        excluded = {*self.settings.exclude_from_loading} if without else set()
        if state.model_only:
            excluded.add("optimizer")
        tensors = {
            name: x
            for name, x in tensors_of(self.model_parts, self.optimizer).items()
            if name.partition(".")[0] not in excluded
        }
        try:
            dcp.load(
                tensors,
                storage_reader=reader,
                planner=WholeState(without=excluded),
                process_group=self.group,
            )
        except CheckpointException as error:
            raise SharedConfigError(str(unreadable(folder, step, cause_of(error)))) from None
        if "optimizer" in excluded:
            self.optimizer.state.clear()
        if "dataloader" not in excluded:
            raise_on_all_ranks(lambda: self.loader.load_state_dict(state.streams), world)
        restart_lr_scheduler(self.lr_scheduler, step)
        new = f"; new: {', '.join(sorted(excluded))}" if excluded else ""
        logger.info(
            f"resumed after step {step} from {reader.path} ({time.monotonic() - started:.1f} s){new}"
        )
        return state.tokens_seen

    @property
    def saved(self) -> Place | None:
        """The folder of the last checkpoint that this run saved or resumed from. None if there is none."""
        return self.folder.step(self._last_step) if self._last_step else None

    def vote(self) -> float:
        """Return 1 if this rank's clock says that `checkpoint.interval_seconds` have passed, else 0.

        If the sum over all ranks is not zero, all ranks save after this step.
        """
        seconds = self.settings.interval_seconds
        return float(seconds is not None and time.monotonic() - self._saved_at >= seconds)

    def due(self, step: int) -> bool:
        """Return whether the settings save `step`. Votes, the last step and the best step do not count here.

        Args:
            step: Number of the step.
        """
        settings = self.settings
        first = step == 1 and self.settings.enable_first_step_checkpoint
        return (
            settings.enable
            and not settings.load_only
            and (first or step % settings.interval == 0)
        )

    def save(
        self,
        step: int,
        *,
        tokens_seen: int,
        last: bool = False,
        due: bool = False,
        best: float | None = None,
    ) -> bool:
        """Return whether `step` is saved or being saved. If settings or an argument say so, save it. A collective.

        Args:
            step: Number of the finished step.
            tokens_seen: Tokens of the whole job so far.
            last: Whether it is the last step, which is saved, and not in the background.
            due: Save now, by the votes of all ranks (`vote`).
            best: The validation loss, if the checkpoint is the best one so far, which is saved and kept.
        """
        if not self.settings.enable or self.settings.load_only:
            return False
        if step == self._last_step:
            return True
        if not (last or due or self.due(step)) and best is None:
            return False
        self.best = self.best if best is None else best
        self.wait()
        started = time.monotonic()
        self._saved_at = started
        writer = self._writer(step, tokens_seen, best)
        say_waiting(f"saving the checkpoint of step {step}")
        self._last_step = step
        tensors = tensors_of(self.model_parts, self.optimizer)
        if self._weights_alone(step):
            tensors = {name: x for name, x in tensors.items() if name.startswith("model.")}
        saving = {"storage_writer": writer, "process_group": self.group}
        if self.settings.async_mode != "disabled" and not last:
            self._pending = self._save_in_background(tensors, saving)
            logger.info(
                f"step {step} is copied for its checkpoint ({time.monotonic() - started:.1f} s)"
            )
            return True
        try:
            dcp.save(tensors, **saving)
        except CheckpointException as error:
            raise not_written(self.job, self.folder, step, error) from None
        logger.info(f"checkpoint of step {step} saved ({time.monotonic() - started:.1f} s)")
        if last and self.settings.last_save_in_hf and self.job.model.task == "tokens":
            export_last(self.job, self.dims, step, self.group)
        return True

    def _weights_alone(self, step: int) -> bool:
        return self.settings.last_save_model_only and step == self._config.training.steps

    def _writer(self, step: int, tokens_seen: int, best: float | None) -> Writer:
        """Return the writer of a step. A collective. best: see `save`."""
        rank_entries = gather_values(self.loader.state_dict(), self.dims["dp"])
        state = RunState(
            step,
            tokens_seen,
            model_description(self._config, self._model),
            {
                int(stream): position
                for entries in rank_entries
                for stream, position in entries.items()
            },
            files={},
            model_only=self._weights_alone(step),
            optimizer=states_of(self._config),
        )
        return Writer(
            self.folder,
            state,
            best=best,
            configuration=configuration_text(self.job.user_config),
            keep_latest_k=self.settings.keep_latest_k,
            keep_every=self.settings.keep_every,
        )

    def _save_in_background(
        self, tensors: Mapping[str, Tensor], saving: Mapping[str, Any]
    ) -> Future:
        """Start to copy the tensors; return a future that ends when a thread has saved the copies with `saving`."""
        copies = self._copies
        if copies is None:
            return dcp.async_save(tensors, **saving)
        buffers = {
            f"model.{name}"
            for x, name in names_of(self.model_parts).items()
            if not x.requires_grad
        }
        copies.start(tensors, updated=tensors.keys() - buffers)

        def write() -> None:
            copies.wait()
            dcp.save(copies.tensors, **saving)

        thread = ThreadPoolExecutor(1, "checkpoint")
        try:
            return thread.submit(write)
        finally:
            thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for a save in the background. Raise CheckpointError if it failed."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointException as error:
            raise not_written(self.job, self.folder, self._last_step, error) from None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if self._pending is not None and isinstance(error, Exception):
            if is_peer_failure(error):  # no peer is left to finish it with
                return
            logger.error(
                f"{kind.__name__}: {error}; the checkpoint of step {self._last_step} is finished first"
            )
        try:
            self.wait()
        except Exception as also:
            if kind is None:
                raise
            logger.error(str(also))  # the run ends with the error that is being raised
