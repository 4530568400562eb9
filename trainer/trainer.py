"""The training loop: config in, falling loss out."""

import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from trainer.components.console import logger
from trainer.components.garbage import manual_garbage_collection
from trainer.components.grad_norm import clip_gradients, global_grad_norm, settle_gradients
from trainer.components.loss import count_valid, token_losses
from trainer.components.lr_scheduler import build_lr_scheduler
from trainer.components.metrics import MetricsLogger
from trainer.components.optimizer import build_optimizer
from trainer.config.degrees import Degrees
from trainer.config.loader import to_toml
from trainer.config.schema import JobConfig
from trainer.data.datasets import open_source
from trainer.data.loader import batch_hash, build_loader
from trainer.data.tokenizer import Tokenizer
from trainer.distributed.data_parallel import DataParallelOptions, reduce_across_replicas
from trainer.distributed.exchange import all_gather, all_reduce
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.process_group import set_timeout
from trainer.distributed.tensor_parallel import loss_context
from trainer.models.initialization import initialize
from trainer.models.registry import model_args, model_spec

# tokens, labels (already shifted), positions, document_ids: each (B, S) int64
Batch = dict[str, torch.Tensor]


class TrainingError(RuntimeError):
    """The run cannot go on, and its message says why: no trace is needed to understand it."""


class Trainer:
    """One training run of a checked configuration, on this rank. Needs an initialised process group.

    `train()` is the loop, `train_step` one optimizer step; the rest are their parts.
    """

    def __init__(self, config: JobConfig, degrees: Degrees, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.started = time.monotonic()
        self.dims = ParallelDims(degrees, device.type)
        self._prepare_process()

        self.batches, vocab_size = self.build_data()
        rows_per_micro_batch = config.training.local_batch_size * self.dims.size("dp")
        global_batch_size = config.training.global_batch_size
        if global_batch_size == -1:
            global_batch_size = rows_per_micro_batch
        self.micro_batches = global_batch_size // rows_per_micro_batch

        spec = model_spec(config.model.name)
        shape = model_args(config.model, vocab_size=vocab_size, max_seq_len=config.training.seq_len)
        with torch.device("meta"):
            self.model: nn.Module = spec.build(shape).to(getattr(torch, config.training.dtype))
        n_params = sum(p.numel() for p in self.model.parameters())
        spec.parallelize(self.model, self.dims, config)
        offload = config.training.enable_cpu_offload
        initialize(self.model, seed=config.training.seed, device=device, offload=offload)

        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.lr_scheduler = build_lr_scheduler(self.optimizer, config.lr_scheduler, config.training.steps)
        compute_dtype = DataParallelOptions.from_config(config, device.type).param_dtype
        self.metrics = MetricsLogger(
            config,
            self.dims,
            device,
            flops_per_token=spec.flops_per_token(shape, config.training.seq_len),
            tokens_per_step=global_batch_size * config.training.seq_len,
            compute_dtype=compute_dtype,
        )
        logger.info(
            f"{spec.name} {config.model.flavor}: {n_params:,} parameters in {config.training.dtype}, computing in "
            f"{str(compute_dtype).removeprefix('torch.')} on {dims_text(degrees)} ({device.type}); a step is "
            f"{global_batch_size} rows of {config.training.seq_len:,} tokens in {self.micro_batches} micro-batch(es)"
        )

    def _prepare_process(self) -> None:
        training = self.config.training
        torch.manual_seed(training.seed)
        torch.use_deterministic_algorithms(training.deterministic)
        # The sequence-parallel embedding returns a view; nothing here works on it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        if self.dims.rank("world") == 0:
            folder = Path(self.config.job.dump_folder)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.toml").write_text(to_toml(self.config), encoding="utf-8")

    def build_data(self) -> tuple[Iterator[Batch], int]:
        """Endless micro-batches of this rank's share of the data, and the size of the vocabulary."""
        training = self.config.training
        tokenizer = Tokenizer(self.config.model.tokenizer_file)
        loader = build_loader(
            open_source(training.dataset, training.dataset_path),
            tokenizer,
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            data_streams=training.data_streams,
            seed=training.seed,
            dp_rank=self.dims.rank("dp"),
            dp_degree=self.dims.size("dp"),
        )
        return iter(loader), tokenizer.vocab_size

    def train(self) -> None:
        """Run until `training.steps` or `job.max_minutes`.

        Raises:
            TrainingError: a loss or a gradient that is not finite.
        """
        training = self.config.training
        try:
            with manual_garbage_collection(training.gc_freq) as garbage:
                self.metrics.restart_clock(step=0)
                for step in range(1, training.steps + 1):
                    self.train_step(step)
                    garbage.step(step)
                    if step == 1:
                        set_timeout(self.config.comm.train_timeout_seconds)
                    if self.out_of_time():
                        limit = self.config.job.max_minutes
                        logger.info(f"job.max_minutes = {limit:g} passed: stopped after step {step}")
                        return
            logger.info(f"training done: {training.steps} steps")
        finally:
            self.metrics.close()

    def train_step(self, step: int) -> None:
        """One optimizer step over the whole global batch."""
        with self.metrics.loading_data():
            batches = [self._to_device(next(self.batches)) for _ in range(self.micro_batches)]
        if step == 1:
            self._check_same_batch(batches[0])
        # One count for the whole step, before any backward: a mean of means is wrong as soon as ranks differ.
        valid = all_reduce(sum(count_valid(batch["labels"]) for batch in batches), self.dims["dp"])

        self.optimizer.zero_grad()
        rows = [
            self.forward_backward(batch, valid.clamp(min=1), last=i == len(batches) - 1)
            for i, batch in enumerate(batches)
        ]
        row_sums, row_counts = (torch.cat(column) for column in zip(*rows, strict=True))
        loss = (all_reduce(row_sums.sum(), self.dims["dp_cp"]) / valid.clamp(min=1)).item()
        grad_norm = self.clip(step, loss)
        lr = self.lr_scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.lr_scheduler.step()
        if self.metrics.due(step):
            row_losses = row_sums / row_counts.clamp(min=1)
            self.metrics.log(step, loss=loss, row_losses=row_losses, grad_norm=grad_norm, lr=lr)

    def forward_backward(self, batch: Batch, valid: torch.Tensor, *, last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of one micro-batch; gradients add up.

        valid: labels of the whole step, over all ranks; last: no micro-batch of this step follows.
        Returns (sum of losses, number of labels) of each row: (B,) float64, (B,) int64.
        """
        reduce_across_replicas(self.model, last)
        disabled = self.config.parallelism.disable_loss_parallel
        with loss_context(self.dims["tp"], disabled=disabled):
            losses = token_losses(self.model.output(self.model(batch["tokens"])), batch["labels"])
            (losses.sum() / valid).backward()
        return losses.detach().double().sum(1), count_valid(batch["labels"], dim=1)

    def clip(self, step: int, loss: float) -> float:
        """Clip the gradients to `training.max_norm`; their norm before it.

        Raises:
            TrainingError: on every rank alike, if the loss or the norm is not finite; nothing is updated.
        """
        parameters = list(self.model.parameters())
        settle_gradients(parameters)
        norm = global_grad_norm(parameters, self.dims)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(
                f"step {step}: the loss is {loss}, the gradient norm {norm}, and both must be finite; the weights are "
                f"those of step {step - 1}; a lower optimizer.lr or a longer lr_scheduler.warmup_steps often helps"
            )
        clip_gradients(parameters, norm, self.config.training.max_norm)
        return norm

    def out_of_time(self) -> bool:
        """Whether `job.max_minutes` have passed for any rank; all ranks get the same answer."""
        limit = self.config.job.max_minutes
        if limit is None:
            return False
        over = torch.tensor(time.monotonic() - self.started > 60 * limit, dtype=torch.int32, device=self.device)
        return bool(all_reduce(over, self.dims["world"], "max").item())

    def _to_device(self, batch: Batch) -> Batch:
        return {name: x.to(self.device, non_blocking=True) for name, x in batch.items()}

    def _check_same_batch(self, batch: Batch) -> None:
        """Ranks that share a model replica's computation must read the same rows."""
        mine = torch.tensor([batch_hash(batch)], dtype=torch.int64, device=self.device)
        hashes = all_gather(mine, self.dims["cp_tp"]).flatten().tolist()
        if len(set(hashes)) > 1:
            raise TrainingError(
                f"the ranks {self.dims['cp_tp'].mesh.tolist()} of one data-parallel rank read different batches "
                f"(hashes {hashes}); the data set must be the same on all machines"
            )


def dims_text(degrees: Degrees) -> str:
    """`dp_replicate 2 x dp_shard 2 x tp 2`: the degrees above one."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    parts = [f"{name} {getattr(degrees, name)}" for name in names if getattr(degrees, name) > 1]
    return " x ".join(parts) or "one device"
