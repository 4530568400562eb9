"""Tokens: the next one of each is the target. Context-parallel ranks share a sequence.

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437) has layers with targets and losses of further tokens:

tokens       t0 t1 t2 t3 | u0 u1 u2        two documents
labels       t1 t2 t3  - | u1 u2  -
next tokens  t1 t2 t3  . | u1 u2  .        of the first such layer; .: counts for nothing
its labels   t2 t3  -  - | u2  -  -

They are made of whole sequences, before these are cut over ranks, so that targets cross the borders of ranks and
chunks, and never those of documents.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from longshard.context.execution.chunks import KeptTensor, OnDevice
from longshard.context.planning.options import BatchPlan
from longshard.context.regions import context_parallel, sequence_chunks
from longshard.sharding.exchange import all_reduce
from longshard.sharding.layout import contiguous
from longshard.sharding.tensors import to_device
from trainer.components.loss import count_valid, row_losses, token_losses
from trainer.config.data import CONVERSATIONS
from trainer.data.loader import BatchLoader, Loader, TextBatch, batch_hash
from trainer.data.packing import IGNORE_INDEX, NO_POSITION
from trainer.data.text_data import (
    QUICK,
    contents_of,
    open_training_data,
    positions_of,
    summary,
    training_data,
    what_is_lacking,
)
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
from trainer.tasks.task import RankInputs
from trainer.transforms.compile import compiled_loss
from trainer.transforms.offload import CopyStream, HostInputs


class _Totals(Observer):
    """Adds up losses and labels, in some columns, on the device, from one logged step to the next."""

    def __init__(self, columns: int, dims: ParallelDims) -> None:
        self._dims = dims
        self._totals = torch.zeros(
            2, columns, dtype=torch.float64, device=dims["world"].device_type
        )
        self._of_step = torch.zeros_like(self._totals)

    def end_step(self, left_out: torch.Tensor) -> None:
        self._totals += torch.where(left_out.bool(), 0, self._of_step)
        self._of_step.zero_()


class FurtherTokens(_Totals):
    """Targets and losses of `layers` further tokens, whose mean counts `weight` times in the gradients."""

    def __init__(self, layers: int, weight: float, dims: ParallelDims) -> None:
        super().__init__(layers, dims)
        self._layers = layers
        self.factors = (1.0, *[weight / layers] * layers)
        """Of the gradients of the losses of tokens, and of those of each layer."""

    def add_targets(self, batch: TextBatch) -> None:
        """Add `next_tokens` and `next_labels`, (B, S, layers), to a batch of whole sequences."""
        tokens = batch["tokens"]
        labels = batch["labels"]
        documents = batch["document_ids"].to(batch["tokens"].device)
        next_tokens = []
        next_labels = []
        for distance in range(1, self._layers + 1):
            is_inside = _shifted(documents, distance, -1) == documents
            # Beyond the end of a document no token of another one, so that nothing depends on which one follows.
            next_tokens.append(_shifted(tokens, distance, 0).masked_fill(~is_inside, 0))
            next_labels.append(
                _shifted(labels, distance, IGNORE_INDEX).masked_fill(~is_inside, IGNORE_INDEX)
            )
        batch["next_tokens"] = torch.stack(next_tokens, -1)
        batch["next_labels"] = torch.stack(next_labels, -1)

    def count(self, losses: torch.Tensor, labels: torch.Tensor) -> None:
        """Add up the losses of further tokens, and what they are of: (1 + K, B, S), those of the model first."""
        number = (labels[1:] != IGNORE_INDEX).flatten(1).sum(1).double()
        self._of_step += torch.stack([losses[1:].detach().flatten(1).sum(1).double(), number])

    def record(self, positions: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
        """Return the mean loss of each layer since the last call, as `mtp_loss_1`. A collective over all ranks."""
        dims = self._dims
        totals = self._totals.clone()
        for name in ("pp", "cp", "dp"):
            totals = all_reduce(totals, dims[name])
        self._totals.zero_()
        found = enumerate(totals.T.tolist(), 1)
        return {
            f"mtp_loss_{number}": loss / labels for number, (loss, labels) in found if labels
        }


def _shifted(x: torch.Tensor, distance: int, fill: int) -> torch.Tensor:
    """Return of each position of (B, S) what is so many positions behind it, or `fill`."""
    return F.pad(x[:, distance:], (0, min(distance, x.shape[1])), value=fill)


class FirstLosses(torch.autograd.Function):
    """((1 + K, B, S), factors) -> the first ones (B, S), whose gradient times its factor each of the others has, too.

    A gradient that is one number in memory stays one, by which the loss in chunks knows that losses are summed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
        ctx.factors = factors
        return x[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        all_of_them = gradient.expand(len(ctx.factors), *gradient.shape)
        if set(ctx.factors) != {1.0}:
            all_of_them = all_of_them * gradient.new_tensor(ctx.factors)[:, None, None]
        return all_of_them, None


class LanguageTask:
    """The task on this rank. A batch is a `TextBatch`."""

    cut = ("token_numbers", "next_tokens", "next_labels")
    """What of a batch is cut as tokens are, beside labels and positions, if it is there."""

    def __init__(self, job: ResolvedJob, dims: ParallelDims) -> None:
        self.job = job
        self.config = job.config
        self.dims = dims
        self._device = torch.device(job.device_type)
        self.spec = model_spec(job.config.model.name)
        self.methods_reported: set[str] = set()
        rows = compiled_loss(row_losses, job.compilation)
        if job.config.training.z_loss and job.task.sums_losses:
            rows = partial(rows, z_loss=job.config.training.z_loss)
        self.token_losses = partial(token_losses, rows=rows)
        self.further: FurtherTokens | None = None
        if job.config.model.mtp_layers:
            self.further = FurtherTokens(
                job.config.model.mtp_layers, job.config.training.mtp_loss_weight, dims
            )
        self.keep_rows: Callable[[torch.Tensor], KeptTensor] = OnDevice
        """Lets keys and values of a sequence in chunks wait."""
        self.see_scores: Callable[[int, torch.Tensor], None] | None = None
        """Takes the log-sum-exp of attention's scores, see `LivePlan.see`."""
        if job.config.training.sequence_chunks_offload:
            inputs = HostInputs(
                CopyStream(job.device_type, "training.sequence_chunks_offload = true")
            )
            self.keep_rows = partial(inputs.keep, is_first=True, to_host=True)

    def build_loader(self) -> Loader:
        how: dict[str, Callable | None] = {"plan": self.batch_planner}
        if self.job.balances:
            group = self.dims.host_group(
                "dp", timedelta(seconds=self.config.comm.init_timeout_seconds)
            )
            how = {
                "exchange": BalancedBatches(self._balanced_step(), group, self.batch_planner)
            }
        return raise_on_all_ranks(lambda: self.open_loader(**how), self.dims["world"])

    def open_loader(self, **how: Callable | None) -> Loader:
        """Return the batches that this rank reads. how: `plan` and `exchange` of `BatchLoader`."""
        training = self.config.training
        dims = self.dims
        catalogs = [
            once_a_node(partial(catalog_of, one), dims["world"])
            for one in training_data(self.config)
        ]
        data = raise_on_all_ranks(
            lambda: open_training_data(self.config, catalogs), dims["world"]
        )
        documents = data.items if isinstance(data.items, int) else sum(data.items)
        if dims.rank("world") == 0 and documents <= QUICK and (found := contents_of(data)):
            logger.info(summary(found, training.seq_len))
            for sentence in what_is_lacking(found):
                logger.warning(sentence)
        return BatchLoader(
            data,
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            data_streams=training.data_streams,
            seed=training.seed,
            dp_rank=dims.rank("dp"),
            dp_degree=dims.size("dp"),
            **how,
        )

    def _balanced_step(self) -> Step:
        training = self.config.training
        cp = self.dims.size("cp")
        tp = self.dims.size("tp")
        # as even as the sequences are, up to what float8 asks for
        multiple_of = gcd(training.seq_len, 16 * cp * tp)
        most = int(training.local_batch_size * training.seq_len * BALANCE_GROWTH)
        return Step(
            micro_batches=self.job.micro_batches,
            multiple_of=multiple_of,
            least=cp * tp * self.job.chunks,
            most=most // multiple_of * multiple_of,
            costs=document_costs(self.job.model.flops_per_token, training.seq_len),
            has_sources=bool(self.config.mixture.names),
        )

    @property
    def batch_planner(self) -> Callable[[Mapping[str, np.ndarray]], BatchPlan] | None:
        """A function that plans the attention of a batch when the batch is made; None without packed documents."""
        if not self.config.masks_documents:
            return None
        settings = {"options": self.job.attention, "choose": self.job.method_chooser()}
        return partial(BatchPlan.of, degree=self.dims.size("cp"), **settings)

    def observers(self) -> list[Observer]:
        training = self.config.training
        names = self.config.mixture.names
        pads = (
            self.job.balances
            or training.dataset in CONVERSATIONS
            or training.packing not in (None, "concatenate")
        )
        padding = [Padding(self.job, self.dims)] if pads else []
        sources = [SourceLosses(names, training.seq_len, self.dims)] if names else []
        return [*padding, *sources, *([self.further] if self.further else [])]

    def batch_hash(self, batch: TextBatch) -> int:
        return batch_hash(batch)

    def counts(self, batch: TextBatch) -> torch.Tensor:
        return to_device(count_valid(batch["labels"], dim=1), self._device)

    def size(self, batch: TextBatch) -> int:
        return batch["tokens"].numel() - batch.get("padding", 0)

    def losses(
        self, part: Decoder, hidden: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        if targets.ndim == 3:  # with further tokens
            return self._losses_of_further(part, hidden, targets.movedim(-1, 0))
        if self.job.loss_chunk_tokens:
            return part.output(hidden, labels=targets)
        return self.token_losses(part.output(hidden), targets)

    def _losses_of_further(
        self, part: Decoder, hidden: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Return the losses of tokens, with the gradients of those of further ones; labels: (1 + K, B, S)."""
        factors = self.further.factors
        in_chunks = bool(self.job.loss_chunk_tokens)
        if in_chunks:
            losses = part.output(hidden, labels=labels.flatten(0, 1), factors=factors)
        else:
            losses = self.token_losses(part.output(hidden), labels.flatten(0, 1))
        losses = losses.unflatten(0, labels.shape[:2])
        self.further.count(losses, labels)
        return FirstLosses.apply(losses, (1.0,) * len(factors) if in_chunks else factors)

    @contextmanager
    def batch_context(
        self, batch: TextBatch, model_parts: Sequence[Decoder]
    ) -> Iterator[RankInputs]:
        if self.config.lora.dropout and "numbers" in batch:
            length = batch["tokens"].shape[1]
            batch["token_numbers"] = torch.tensor(batch["numbers"])[
                :, None
            ] * length + torch.arange(length)
        if self.further and torch.is_grad_enabled():
            self.further.add_targets(batch)
        with loss_context(
            self.dims["tp"], disabled=self.config.parallelism.disable_loss_parallel
        ):
            if self.job.chunks > 1:
                with self._on_device(batch), self._chunks(batch) as chunks:
                    yield RankInputs(batch["tokens"], {}, batch["labels"], chunks)
                return
            with self.sequence_context(batch, model_parts) as plan, self._on_device(batch):
                arguments = {
                    "positions": self._positions(batch),
                    "attention_plan": plan,
                    **of_tokens(batch),
                }
                yield RankInputs(batch["tokens"], arguments, targets_of(batch))

    @contextmanager
    def _on_device(self, batch: TextBatch) -> Iterator[None]:
        """Replace the rows of this rank, which are cut on the host, by their copies on the device."""
        positions = () if self._positions(batch) is None else ("positions",)
        names = ("tokens", "labels", "sources", *self.cut, *positions)
        on_host = {name: batch[name] for name in names if name in batch}
        batch.update({name: to_device(x, self._device) for name, x in on_host.items()})
        try:
            yield
        finally:
            batch.update(on_host)

    @contextmanager
    def _chunks(self, batch: TextBatch) -> Iterator[tuple[RankInputs, ...]]:
        """Yield the chunks of the sequences, each with its plan. A validation may have fewer tokens than chunks."""
        (rows, seq_len) = batch["tokens"].shape
        tp = self.dims.size("tp")
        positions = self._positions(batch)
        if positions is None:
            positions = torch.arange(seq_len, device=batch["tokens"].device).expand(rows, -1)
        layout = contiguous(seq_len, min(self.job.chunks, seq_len // tp), multiple_of=tp)
        mask = batch["plan"].mask if "plan" in batch else None
        how = {"sequences": rows, "keep": self.keep_rows}
        how |= {"see": self.see_scores, "padding": self._padding(batch)}
        with sequence_chunks(self.dims["cp"], layout, mask, self.job.attention, **how) as plans:
            sizes = [stop - start for ((start, stop),) in layout.ranges]
            per_token = {"positions": positions, **of_tokens(batch)}
            columns = (
                x.split(sizes, 1)
                for x in (batch["tokens"], targets_of(batch), *per_token.values())
            )
            yield tuple(
                RankInputs(
                    tokens,
                    dict(zip(per_token, rows, strict=True)) | {"attention_plan": plan},
                    labels,
                )
                for plan, tokens, labels, *rows in zip(plans, *columns, strict=True)
            )

    @contextmanager
    def sequence_context(
        self, batch: TextBatch, model_parts: Sequence[Decoder]
    ) -> Iterator[torch.Tensor | None]:
        """Cut the sequences over context-parallel ranks, in place, inside; yield the plan for the model's attention."""
        if self.job.attention is None:
            yield None
            return
        positions = self._positions(batch)
        # Either the given positions are cut, or the tables that have a row per position.
        tables = [table for part in model_parts for table in self.spec.cp_buffers(part)]
        per_token = tables if positions is None else [(positions, 1)]
        per_token = [*per_token, *((batch[name], 1) for name in self.cut if name in batch)]
        if self.job.balances and "sources" in batch:
            per_token = [*per_token, (batch["sources"], 1)]
        tensors, seq_dims = zip(
            (batch["tokens"], 1), (batch["labels"], 1), *per_token, strict=True
        )
        padding = self._padding(batch)
        plan: BatchPlan | None = batch.get("plan")
        if plan and plan.reason and plan.options.method not in self.methods_reported:
            self.methods_reported.add(plan.options.method)
            logger.info(f"attention: for the documents of this batch auto chose {plan.reason}")
        with context_parallel(
            self.dims.hybrid_mesh if self.job.attention.spread.two_level else self.dims["cp"],
            buffers=tensors,
            buffer_seq_dims=seq_dims,
            mask=plan and plan.mask,
            load_balancer=plan and plan.layout,
            options=plan.options if plan else self.job.attention,
            sequences=batch["tokens"].shape[0],
            check_consistency=self.config.comm.check_consistency,
            # the modules of our models know the plan, and a stage may have none
            local_attention=True,
        ) as cp:
            cp.live.see = self.see_scores
            cp.live.padding = padding
            yield cp.attention_plan

    def _positions(self, batch: TextBatch) -> torch.Tensor | None:
        """Return positions (B, S) in packed documents, or if the batch asks for them; None: the model counts from 0."""
        used = self.config.masks_documents or batch.get("uses_positions")
        return batch["positions"] if used else None

    def _padding(self, batch: TextBatch) -> torch.Tensor | None:
        """Return where a batch of whole sequences has padding, (B, S) bool; None if nowhere, or if nobody asks."""
        if self.see_scores is None:
            return None
        padding = batch["positions"] == NO_POSITION
        return padding if padding.any() else None


def of_tokens(batch: TextBatch) -> dict[str, torch.Tensor]:
    """Return the arguments of the model that dropout of adapters or layers for further tokens need."""
    return {name: batch[name] for name in ("token_numbers", "next_tokens") if name in batch}


def targets_of(batch: TextBatch) -> torch.Tensor:
    """Return labels, (B, S), or with those of further tokens behind them (B, S, 1 + K)."""
    labels = batch["labels"]
    return (
        torch.cat([labels[..., None], batch["next_labels"]], -1)
        if "next_labels" in batch
        else labels
    )


class Padding(Observer):
    """Counts the tokens that are of no document."""

    def __init__(self, job: ResolvedJob, dims: ParallelDims) -> None:
        self._dims = dims
        self._tokens = job.sequences_per_step * job.positions
        self._padding = self._of_step = 0

    def batch(self, batch: TextBatch) -> None:
        self._of_step += batch.get("padding", 0)

    def end_step(self, left_out: torch.Tensor) -> None:
        self._padding = self._of_step
        self._of_step = 0

    def record(self, positions: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
        """Return the share of the step's tokens. A collective over data-parallel ranks."""
        padding = torch.tensor(
            self._padding, dtype=torch.float64, device=self._dims["world"].device_type
        )
        return {"padding_fraction": all_reduce(padding, self._dims["dp"]).item() / self._tokens}


class SourceLosses(_Totals):
    """The losses and labels of each source."""

    def __init__(self, names: Sequence[str], seq_len: int, dims: ParallelDims) -> None:
        super().__init__(len(names), dims)
        self._names, self._seq_len = names, seq_len

    def losses(self, batch: TextBatch, losses: torch.Tensor) -> None:
        """Add a micro-batch, whose `sources` are numbers of sequences (B,), or of this rank's tokens (B, S)."""
        sources = batch["sources"]
        labels = batch["labels"] != IGNORE_INDEX
        sums = torch.stack([losses.double(), labels.double()])
        sums = sums.sum(-1) if sources.ndim == 1 else sums.flatten(1)
        self._of_step.index_add_(1, sources.flatten(), sums)

    def record(self, positions: Mapping[int, Mapping[str, int]]) -> dict[str, float]:
        """Return the metrics since the last call. A collective over all ranks.

        "loss/name": mean over labels, absent if there were none; "tokens/name", "epoch/name": of the whole job so far.
        """
        dims = self._dims
        n = next(iter(positions.values()))["data_streams"]
        totals = all_reduce(all_reduce(self._totals.clone(), dims["pp"]), dims["cp"])
        read = torch.tensor(
            positions_of(positions, self._names), dtype=torch.float64, device=totals.device
        )
        found = all_reduce(torch.cat([totals.T, read], 1), dims["dp"]).tolist()
        self._totals.zero_()
        ranks = dims.size("dp") // gcd(n, dims.size("dp"))  # that read each stream
        record = {}
        for name, (loss, number, samples, passes) in zip(self._names, found, strict=True):
            if number:
                record[f"loss/{name}"] = loss / number
            record |= {
                f"tokens/{name}": round(samples / ranks) * self._seq_len,
                f"epoch/{name}": passes / ranks / n,
            }
        return record
