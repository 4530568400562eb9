"""The language task: the target of each token is the next token. Context-parallel ranks share a sequence.

`whole` keeps the tensors that are used. `sequence_context` cuts them over context-parallel ranks; `_chunks` cuts them
into chunks as well. `losses` computes the loss of each token from the hidden states of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from math import gcd

import torch
from torch import Tensor

from longshard.context.execution.chunks import KeptTensor, OnDevice
from longshard.context.hooks import AttentionHooks, ScoreFunction, Scores
from longshard.context.planning.options import BatchPlan
from longshard.context.regions import context_parallel, sequence_chunks
from longshard.sharding.layout import contiguous
from longshard.sharding.tensors import to_device
from trainer.components.loss import count_valid, row_losses, token_losses
from trainer.config.data import CONVERSATIONS
from trainer.data.contents import QUICK, lacking_parts, summary
from trainer.data.job_data import open_training_data, training_data
from trainer.data.loader import BatchLoader, Planner, TextBatch, batch_hash
from trainer.data.packing import NO_POSITION
from trainer.data.token_files.catalog import catalog_of
from trainer.job.record import ResolvedJob
from trainer.job.training import BALANCE_GROWTH
from trainer.models.model_spec import Decoder, model_spec
from trainer.observer import Observer
from trainer.parallel.parallel_dims import ParallelDims
from trainer.parallel.tensor_parallel import loss_context
from trainer.runtime.agreement import once_a_node, raise_on_all_ranks
from trainer.runtime.console import logger
from trainer.tasks.balanced_batches import BalancedBatches, Step, document_costs
from trainer.tasks.further_tokens import FurtherTokens, first_losses, further_targets
from trainer.tasks.observers import Padding, SourceLosses
from trainer.tasks.rank_batch import RankBatch, token_numbers
from trainer.tasks.task import RankInputs
from trainer.transforms.compile import compiled_loss
from trainer.transforms.offload import CopyStream, HostInputs


class LanguageTask:
    """The task of text on this rank. A batch is a `TextBatch`.

    Args:
        job: The resolved job.
        dims: The meshes of the run.
    """

    columns: tuple[str, ...] = ("tokens", "labels", "sources")
    """Entries of a batch that ranks compute with; each is optional."""

    def __init__(self, job: ResolvedJob, dims: ParallelDims) -> None:
        training = job.config.training
        model = job.config.model
        self.job = job
        self.config = job.config
        self.dims = dims
        self._device = torch.device(job.device_type)
        self.spec = model_spec(model.name)
        self.methods_reported: set[str] = set()
        rows = compiled_loss(row_losses, job.compilation)
        if training.z_loss and job.task.sums_losses:
            rows = partial(rows, z_loss=training.z_loss)
        self.token_losses = partial(token_losses, rows=rows)
        self.further: FurtherTokens | None = None
        if model.mtp_layers:
            self.further = FurtherTokens(model.mtp_layers, training.mtp_loss_weight, dims)
        self.keep_rows: Callable[[Tensor], KeptTensor] = OnDevice
        """Keeps the keys and values of a chunk until a later chunk needs them: on the device or in host memory."""
        if training.sequence_chunks_offload:
            reason = "training.sequence_chunks_offload = true"
            inputs = HostInputs(CopyStream(job.device_type, reason, dims.machine))
            self.keep_rows = partial(inputs.keep, is_first=True, to_host=True)

    def build_loader(self) -> BatchLoader:
        """Return the loader of this rank's share of the data. A collective over all ranks."""
        if not self.job.balances:
            return raise_on_all_ranks(lambda: self.open_loader(plan=self.batch_planner))
        training = self.config.training
        cp = self.dims.size("cp")
        tp = self.dims.size("tp")
        # float8 needs rows in multiples of 16 on each rank; use the largest such multiple that divides the sequence
        multiple_of = gcd(training.seq_len, 16 * cp * tp)
        most = int(training.local_batch_size * training.seq_len * BALANCE_GROWTH)
        step = Step(
            micro_batches=self.job.micro_batches,
            multiple_of=multiple_of,
            least=cp * tp * self.job.chunks,
            most=most // multiple_of * multiple_of,
            costs=document_costs(self.job.model.flops_per_token, training.seq_len),
            has_sources=bool(self.config.mixture.names),
        )
        timeout = timedelta(seconds=self.config.comm.init_timeout_seconds)
        group = self.dims.host_group("dp", timeout)
        exchange = BalancedBatches(step, group, self.batch_planner)
        return raise_on_all_ranks(lambda: self.open_loader(exchange=exchange))

    def open_loader(self, **how: Callable | None) -> BatchLoader:
        """Return the loader of this rank's batches. A collective over all ranks.

        The first rank logs a summary if the data set is small.

        Args:
            **how: `plan` and `exchange`, passed on to `BatchLoader`.
        """
        training = self.config.training
        dims = self.dims
        catalogs = [once_a_node(partial(catalog_of, one)) for one in training_data(self.config)]
        data = raise_on_all_ranks(lambda: open_training_data(self.config, catalogs))
        documents = data.items if isinstance(data.items, int) else sum(data.items)
        if dims.is_first and documents <= QUICK and (contents := data.contents()):
            logger.info(summary(contents, training.seq_len))
            for sentence in lacking_parts(contents):
                logger.warning(sentence)
        return BatchLoader(
            data, training, dp_rank=dims.rank("dp"), dp_degree=dims.size("dp"), **how
        )

    @property
    def batch_planner(self) -> Planner | None:
        """A function that plans the attention of a batch when the batch is made; None if documents are not masked."""
        if not self.config.masks_documents:
            return None
        settings = {"options": self.job.attention, "choose": self.job.method_chooser()}
        return partial(BatchPlan.of, degree=self.dims.size("cp"), **settings)

    def observers(self) -> list[Observer]:
        """Return the observers of padding, of the sources of a mixture, and of further tokens, if the job has them."""
        training = self.config.training
        names = self.config.mixture.names
        observers = []
        if (
            self.job.balances
            or training.dataset in CONVERSATIONS
            or training.packing not in (None, "concatenate")
        ):
            observers.append(Padding(self.job, self.dims))
        if names:
            observers.append(SourceLosses(names, training.seq_len, self.dims))
        if self.further:
            observers.append(self.further)
        return observers

    batch_hash = staticmethod(batch_hash)
    """The hash of a batch that its ranks compare."""

    def counts(self, batch: TextBatch) -> Tensor:
        """Return the number of labels of each whole sequence, (B,), int64, on the device.

        Args:
            batch: A text batch.
        """
        return to_device(count_valid(batch["labels"], dim=1), self._device)

    def size(self, batch: TextBatch) -> int:
        """Return the number of tokens of a batch, without padding.

        Args:
            batch: A text batch.
        """
        return batch["tokens"].numel() - batch.get("padding", 0)

    def losses(self, part: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each next token of this rank, (B, S / cp).

        With further tokens, their losses are added to the totals of the step. The backward of the result also gives the
        gradients of these losses, times their weight.

        Args:
            part: The model part that has the output.
            hidden: Hidden states, (B, S / cp, dim), or with K further tokens ((1 + K) * B, S / cp, dim).
            targets: Labels, (B, S / cp), or with K further tokens (B, S / cp, 1 + K).
        """
        in_chunks = bool(self.job.loss_chunk_tokens)
        if targets.ndim == 2:
            if in_chunks:
                return part.output(hidden, labels=targets)
            return self.token_losses(part.output(hidden), targets)
        labels = targets.movedim(-1, 0)  # of the next token, then of further tokens
        factors = self.further.factors
        if in_chunks:
            losses = part.output(hidden, labels=labels.flatten(0, 1), factors=factors)
        else:
            losses = self.token_losses(part.output(hidden), labels.flatten(0, 1))
        losses = losses.unflatten(0, labels.shape[:2])
        self.further.count(losses, labels)
        return first_losses(losses, (1.0,) * len(factors) if in_chunks else factors)

    @contextmanager
    def batch_context(
        self,
        batch: TextBatch,
        model_parts: Sequence[Decoder],
        on_scores: ScoreFunction | None = None,
    ) -> Iterator[RankInputs]:
        """Enter the context of forward and backward of a batch.

        Args:
            batch: A text batch.
            model_parts: The model parts of this rank.
            on_scores: Gets the largest attention scores (QK-clip). None if not needed.

        Yields:
            This rank's part of the batch, on the device. If a sequence is cut into chunks, `parts` has each chunk.
        """
        whole = self.whole(batch)
        scores = None
        if on_scores is not None:
            padding = batch["positions"] == NO_POSITION
            scores = Scores(on_scores, padding if padding.any() else None)
        disabled = self.config.parallelism.disable_loss_parallel
        with loss_context(self.dims["tp"], disabled=disabled):
            if self.job.chunks > 1:
                with self._chunks(whole, batch.get("plan"), scores) as share:
                    yield share
                return
            with self.sequence_context(whole, batch.get("plan"), model_parts, scores) as plan:
                yield whole.on(self._device).inputs(plan)

    def whole(self, batch: TextBatch) -> RankBatch:
        """Return the tensors of whole sequences that ranks compute with, still on the device of the batch.

        Args:
            batch: A text batch.
        """
        uses_positions = self.config.masks_documents or batch.get("uses_positions")
        names = (*self.columns, *(("positions",) if uses_positions else ()))
        columns = {name: batch[name] for name in names if name in batch}
        tokens = batch["tokens"]
        if self.config.lora.dropout and "numbers" in batch:
            columns["token_numbers"] = token_numbers(batch["numbers"], tokens.shape[1])
        if self.further and torch.is_grad_enabled():
            documents = batch["document_ids"].to(tokens.device)
            columns |= further_targets(tokens, batch["labels"], documents, self.further.layers)
        return RankBatch(columns)

    @contextmanager
    def _chunks(
        self, whole: RankBatch, plan: BatchPlan | None, scores: Scores | None
    ) -> Iterator[RankInputs]:
        """Enter a context with this rank's inputs. Their `chunks` are parts of the sequences, each with its plan.

        A short validation sequence is cut into fewer chunks than `job.chunks`.
        """
        own = whole.on(self._device)
        rows, seq_len = own.columns["tokens"].shape
        tp = self.dims.size("tp")
        if "positions" not in own.columns:
            positions = torch.arange(seq_len, device=self._device).expand(rows, -1)
            own = own.with_columns(positions=positions)
        layout = contiguous(seq_len, min(self.job.chunks, seq_len // tp), multiple_of=tp)
        with sequence_chunks(
            self.dims["cp"],
            layout,
            plan and plan.mask,
            self.job.attention,
            sequences=rows,
            keep=self.keep_rows,
            hooks=AttentionHooks(scores, self.dims.machine.gpu),
        ) as handles:
            chunks = own.split([stop - start for ((start, stop),) in layout.ranges])
            inputs = tuple(
                chunk.inputs(handle) for chunk, handle in zip(chunks, handles, strict=True)
            )
            yield own.inputs(None)._replace(chunks=inputs)

    @contextmanager
    def sequence_context(
        self,
        whole: RankBatch,
        plan: BatchPlan | None,
        model_parts: Sequence[Decoder],
        scores: Scores | None,
    ) -> Iterator[Tensor | None]:
        """Cut the sequences over context-parallel ranks, in place, while the context is open.

        Args:
            whole: Tensors of whole sequences; cut inside the context.
            plan: The attention plan of the batch. None if documents are not masked.
            model_parts: The model parts of this rank. If the batch has no positions, their tables with a row per
                position are cut, too.
            scores: Receives attention scores. None if not needed.

        Yields:
            The handle of the plan for the model's attention. None for plain causal attention on one rank.
        """
        options = self.job.attention
        if options is None:
            yield None
            return
        # If the batch has positions, they are cut. Otherwise the tables with a row per position are cut.
        tables = []
        if "positions" not in whole.columns:
            tables = [table for part in model_parts for table in self.spec.cp_buffers(part)]
        buffers, seq_dims = zip(*((x, 1) for x in whole.per_token), *tables, strict=True)
        if plan and plan.reason and plan.options.method not in self.methods_reported:
            self.methods_reported.add(plan.options.method)
            logger.info(f"attention: for the documents of this batch auto chose {plan.reason}")
        with context_parallel(
            self.dims.hybrid_mesh if options.spread.two_level else self.dims["cp"],
            buffers=buffers,
            buffer_seq_dims=seq_dims,
            mask=plan and plan.mask,
            load_balancer=plan and plan.layout,
            options=plan.options if plan else options,
            sequences=whole.columns["tokens"].shape[0],
            check_consistency=self.config.comm.check_consistency,
            # the models of this project pass the plan to their attention, and a stage may have no attention
            local_attention=True,
            hooks=AttentionHooks(scores, self.dims.machine.gpu),
        ) as cp:
            yield cp.attention_plan
