"""The stages of this rank and the schedule that runs them (torch.distributed.pipelining).

The shape of the hidden states is known, (sequences of a micro-batch, tokens of this rank, dim), so that the schedule
runs no extra forward to find it. Gradients are sums; they are not divided by the number of micro-batches.

State of the process: The level of a logger of PyTorch, as schedules warn of settings that are wanted here.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from longshard.sharding.exchange import Transfer, send_receive
from trainer.config.errors import ConfigError
from trainer.job.pipeline_stages import PipelinePlan

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # a rank has the first and the last stage

LossFunction = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states that one stage of a pipeline sends to the next: (sequences * rows, length / tp, dim)."""

    dim: int
    dtype: torch.dtype
    tp: int
    """Number of tensor-parallel ranks; they shard the hidden states along the sequence."""
    rows: int
    """Rows for each sequence of a step: one, and one for each further token."""

    def shape(self, sequences: int, length: int) -> tuple[int, int, int]:
        """Return the shape on one rank, without rows of further tokens.

        Args:
            sequences: Sequences of a micro-batch.
            length: Tokens of a sequence on a context-parallel rank.
        """
        return sequences, length // self.tp, self.dim


@dataclass
class Pipeline:
    """Runs batches through all stages, forward and backward, cut into micro-batches.

    Args:
        plan: The stages of all ranks, and their schedule.
        model_parts: The stages of this rank, in the order of `plan.stages_of(rank)`.
        mesh: The 1-D pipeline mesh.
        device: The device of this rank.
        hidden: Shape and dtype of the hidden states that stages send.

    Raises:
        ConfigError: This PyTorch cannot run the schedule.
    """

    plan: PipelinePlan
    model_parts: Sequence[nn.Module]
    mesh: DeviceMesh
    device: torch.device
    hidden: HiddenStates

    def __post_init__(self) -> None:
        self._numbers = self.plan.stages_of(self.mesh.get_local_rank())
        self.has_first = 0 in self._numbers
        self.has_last = len(self.plan.stages) - 1 in self._numbers
        self._shape: tuple[int, int] | None = None
        self._group = self.mesh.get_group()
        self._loss: LossFunction | None = None
        # On an error PyTorch would print the whole schedule on every rank.
        logging.getLogger(torch_schedules.__name__).setLevel(logging.CRITICAL)
        # any shape shows whether the schedule can run
        self._prepare((self.plan.micro_batches, self.hidden.tp))

    def step(
        self, tokens: Tensor, labels: Tensor, loss: LossFunction, **per_sequence: Tensor | None
    ) -> None:
        """Run forward and backward of the whole batch, and add to the gradients. A collective over the pipeline.

        Args:
            tokens: (B, S), used by the first stage.
            labels: (B, S), used by the last stage.
            loss: From (last model part, its hidden states, labels) of a micro-batch to the sum to differentiate.
            **per_sequence: Arguments of every model part's forward, (B, ...), also cut into micro-batches.
        """
        if self._shape != tokens.shape:
            self._prepare(tuple(tokens.shape))
        self._loss = loss
        present = {name: x for name, x in per_sequence.items() if x is not None}
        arguments = (tokens,) if self.has_first else ()
        try:
            self._schedule.step(
                *arguments,
                target=labels if self.has_last else None,
                return_outputs=False,
                **present,
            )
        except RuntimeError as error:
            # PyTorch wraps a stage's exception in an exception that only lists the stage's arguments.
            raise (error.__cause__ or error) from None
        finally:
            self._loss = None
            for stage in self._stages:
                # otherwise gradients of received tensors stay in memory until the next step
                stage.clear_runtime_states()

    def __call__(self, tokens: Tensor, **arguments: Tensor | None) -> Tensor | None:
        """Run the forward of a batch through all stages, one after another; return the last stage's hidden states.

        Returns None on the ranks without the last stage. Call it without gradients: none flow between ranks. Hidden
        states are sent in the order of the stages, for every schedule. A collective over the pipeline.
        """
        rank = self.mesh.get_local_rank()
        owners = {
            number: r for r in range(self.mesh.size()) for number in self.plan.stages_of(r)
        }
        shape = self.hidden.shape(*tokens.shape)
        sent = []
        hidden = None
        for number, part in zip(self._numbers, self.model_parts, strict=True):
            if number == 0:
                x = tokens
            elif owners[number - 1] == rank:
                x = hidden
            else:
                x = torch.empty(shape, dtype=self.hidden.dtype, device=self.device)
                arriving = Transfer(x, owners[number - 1], is_send=False)
                send_receive([arriving], self._group, kind="pipeline").wait()
            hidden = part(x, **arguments)
            if owners.get(number + 1, rank) != rank:
                leaving = Transfer(hidden.contiguous(), owners[number + 1], is_send=True)
                sent.append(send_receive([leaving], self._group, kind="pipeline"))
        for pending in sent:
            pending.wait()
        return hidden if self.has_last else None

    def set_timeout(self, seconds: float) -> None:
        """Set how long stages wait for each other's messages, if gloo sends them: a collective over the pipeline.

        `set_group_timeout` changes collectives only: for messages, a gloo group keeps the time-out that it was created
        with. So the stages get a new group. With another back end nothing happens.

        Args:
            seconds: The time-out.
        """
        if dist.get_backend(self._group) != "gloo":
            return
        ranks = dist.get_process_group_ranks(self._group)
        self._group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=seconds),
            use_local_synchronization=True,
            group_desc="pp_messages",
        )
        if self._shape is not None:
            self._prepare(self._shape)

    def _prepare(self, shape: tuple[int, int]) -> None:
        batch, length = shape
        sequences = batch // self.plan.micro_batches
        tokens = torch.empty(sequences, length, dtype=torch.int64, device="meta")
        hidden_shape = self.hidden.shape(sequences * self.hidden.rows, length)
        hidden = torch.empty(hidden_shape, dtype=self.hidden.dtype, device="meta")
        hidden.requires_grad_()
        self._stages = [
            PipelineStage(
                part,
                number,
                len(self.plan.stages),
                self.device,
                input_args=tokens if number == 0 else hidden,
                output_args=hidden,
                group=self._group,
            )
            for number, part in zip(self._numbers, self.model_parts, strict=True)
        ]
        self._schedule = self._build(self._stages)
        self._shape = shape

    def _build(self, stages: list[PipelineStage]) -> object:
        if (
            self.plan.schedule in V_SHAPED
            and torch.__version__ < (2, 12)
            and dist.get_backend(self._group) == "gloo"
        ):
            raise ConfigError(
                f"parallelism.pipeline_parallel_schedule = {self.plan.schedule!r} needs PyTorch 2.12 or newer on CPUs; "
                f"this is {torch.__version__}, whose ranks send themselves a message; use 'Interleaved1F1B'"
            )
        kind = torch_schedules.get_schedule_class(self.plan.schedule)
        single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
        return kind(
            stages[0] if single else stages,
            self.plan.micro_batches,
            loss_fn=lambda hidden, labels: self._loss(self.model_parts[-1], hidden, labels),
            scale_grads=False,
        )
