"""Direct preference optimization (DPO, arXiv 2305.18290): pairs of answers to a prompt, a chosen and a rejected one.

    change of an answer = sum over its tokens of (log p - log p of the reference)
    loss of a pair      = -log sigmoid(beta (change of the chosen answer - change of the rejected one))

With label smoothing e, the loss is (1 - e) times this loss plus e times the loss of the swapped pair (cDPO). The loss
`ipo` (arXiv 2310.12036) is (difference of the mean changes of a token - 1 / (2 beta))^2. All follow TRL.

The two sides of a pair are documents 2 i and 2 i + 1 of one sequence. Each context-parallel rank has some tokens of an
answer. The ranks all-reduce the sums in float64; the adjoint all-reduces the gradients. Afterwards each of these ranks
has the loss of every pair, and counts 1 / cp of it, so that each loss is counted once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longshard.context.hooks import ScoreFunction
from longshard.sharding.exchange import all_reduce
from longshard.sharding.placement import added_up
from longshard.sharding.tensors import to_device
from trainer.config.data import DPO
from trainer.data.loader import TextBatch
from trainer.data.packing import IGNORE_INDEX
from trainer.job.preferences import reference_of
from trainer.job.record import ResolvedJob
from trainer.models.model_spec import Decoder
from trainer.observer import Observer, Positions
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.console import logger
from trainer.tasks.forward_pass import reshard
from trainer.tasks.language import LanguageTask
from trainer.tasks.task import RankInputs
from trainer.transforms.lora import without_adapters


class PreferenceTask(LanguageTask):
    """The task of pairs on this rank. The loss of a sequence is the sum of the losses of its pairs.

    Args:
        job: The resolved job.
        dims: The meshes of the run.
    """

    columns = (*LanguageTask.columns, "document_ids")

    def __init__(self, job: ResolvedJob, dims: ParallelDims) -> None:
        super().__init__(job, dims)
        self._pairs = 0
        """Largest number of pairs of a sequence in the open batch."""
        self._rewards = Rewards(dims)

    def use_model(self, loop: Any) -> None:
        """Set up the reference model.

        It is the loop's own model without its adapters, or a frozen copy of the initial weights. To build and load the
        copy is a collective over all ranks.

        Args:
            loop: The `Trainer`.
        """
        self._reference = loop.model_parts
        self._reference_pipeline = loop.pipeline
        if reference_of(self.config) == "adapters":
            return
        self._reference = loop.build_model_parts()
        for part in self._reference:
            part.requires_grad_(False)
        loop.checkpoint.load_initial(self._reference)
        if self.job.pipeline is not None:
            self._reference_pipeline = loop.build_pipeline(self.job.pipeline, self._reference)
        logger.info(
            f"the reference is a frozen copy of the weights in {self.config.checkpoint.initial_load_path}"
        )

    def observers(self) -> list[Observer]:
        """Return the observers of text, and the rewards."""
        return [*super().observers(), self._rewards]

    def counts(self, batch: TextBatch) -> Tensor:
        """Return the number of pairs of each sequence, (B,), int64, on the device.

        Args:
            batch: A text batch of pairs.
        """
        return to_device(pairs_of(batch), self._device)

    @contextmanager
    def batch_context(
        self,
        batch: TextBatch,
        model_parts: Sequence[Decoder],
        on_scores: ScoreFunction | None = None,
    ) -> Iterator[RankInputs]:
        """Enter the context of `LanguageTask`, and compute the losses of the reference inside.

        Args:
            batch: A text batch of pairs.
            model_parts: The model parts of this rank.
            on_scores: Gets the largest attention scores (QK-clip). None if not needed.

        Yields:
            This rank's part of the batch; targets (B, S / cp, 3), float64: labels, documents, losses of the
            reference.
        """
        self._pairs = int(pairs_of(batch).max())
        with super().batch_context(batch, model_parts, on_scores) as share:
            columns = (
                share.targets,
                share.batch["document_ids"],
                self._reference_losses(share),
            )
            yield share._replace(
                targets=torch.stack([column.double() for column in columns], dim=-1)
            )

    @torch.no_grad()
    def _reference_losses(self, share: RankInputs) -> Tensor:
        """Return the loss of each token under the reference: (B, S / cp); zeros on ranks without the output."""
        copied = reference_of(self.config) == "copy"
        with nullcontext() if copied else without_adapters(self._reference):
            forward = self._reference_pipeline or self._reference[0]
            hidden = forward(share.inputs, **share.arguments)
            losses = torch.zeros_like(share.targets)
            if hidden is not None:
                losses = super().losses(self._reference[-1], hidden, share.targets)
        reshard(self._reference)
        return losses

    def losses(self, part: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return this rank's share of the loss of each sequence, (B, 1), float64. A collective over `cp`.

        With gradients, the rewards of the pairs are added to the totals of the step.

        Args:
            part: The model part that has the output.
            hidden: Hidden states, (B, S / cp, dim).
            targets: (B, S / cp, 3), see `batch_context`.
        """
        labels, documents, reference = targets.unbind(-1)
        labels = labels.long()
        documents = documents.long()
        changes = reference - super().losses(part, hidden, labels).double()
        per_token = torch.stack([changes, (labels != IGNORE_INDEX).double()], dim=-1)
        document_sums = sums_of_documents(per_token, documents, 2 * self._pairs)
        document_sums = added_up(document_sums, self.dims["cp"])
        losses, rewards, exists = pair_losses(
            document_sums.unflatten(1, (-1, 2)), self.config.dpo
        )
        share = 1 / self.dims.size("cp")
        if torch.is_grad_enabled():
            self._rewards.add(share * rewards, share * exists)
        return share * (losses * exists).sum(1, keepdim=True)


def pairs_of(batch: TextBatch) -> Tensor:
    """Return the number of pairs of each whole sequence, (B,), int64.

    Padding counts as a document after the last pair, so an odd document is left out.

    Args:
        batch: A text batch of pairs.
    """
    return (batch["document_ids"].max(1).values + 1) // 2


def sums_of_documents(per_token: Tensor, documents: Tensor, number: int) -> Tensor:
    """Return the sums over the tokens of each document: (B, S, C) -> (B, number, C).

    Args:
        per_token: Values of each token, (B, S, C).
        documents: The number of each token's document, (B, S). Padding may have `number`; it counts as the last
            document.
        number: Number of documents.
    """
    rows, _, columns = per_token.shape
    places = documents.clamp(max=number - 1)[..., None].expand_as(per_token)
    return per_token.new_zeros(rows, number, columns).scatter_add(1, places, per_token)


def pair_losses(sums: Tensor, dpo: DPO) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss of each pair.

    Args:
        sums: (B, pairs, 2, 2): for the chosen and the rejected side, its change and its number of tokens.
        dpo: The configuration of DPO.

    Returns:
        The loss of each pair, (B, pairs); its rewards, (B, pairs, 2), without gradient; 1 if it exists, else 0, (B,
        pairs). The loss of a pair that does not exist means nothing.
    """
    changes, tokens = sums.unbind(-1)
    exists = (tokens.detach() > 0).all(-1).to(changes.dtype)
    rewards = dpo.beta * changes
    if dpo.loss == "ipo":
        chosen, rejected = (changes / tokens.detach().clamp(min=1)).unbind(-1)
        losses = (chosen - rejected - 1 / (2 * dpo.beta)) ** 2
    else:
        margin = rewards[..., 0] - rewards[..., 1]
        losses = -(1 - dpo.label_smoothing) * F.logsigmoid(
            margin
        ) - dpo.label_smoothing * F.logsigmoid(-margin)
    return losses, rewards.detach(), exists


class Rewards(Observer):
    """Reports the mean rewards of chosen and rejected answers, their difference, and how often it is above zero.

    Args:
        dims: The meshes of the run.
    """

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims
        self._sums = dims.zeros(4)
        self._step_sums = self._sums

    def add(self, rewards: Tensor, exists: Tensor) -> None:
        """Add the pairs of a forward to the sums of the step.

        Args:
            rewards: (B, pairs, 2), times the share that this rank counts.
            exists: (B, pairs), one for each pair that exists, times the share that this rank counts.
        """
        chosen, rejected = rewards.unbind(-1)
        correct = (chosen > rejected) * exists
        sums = [
            (chosen * (exists > 0)).sum(),
            (rejected * (exists > 0)).sum(),
            correct.sum(),
            exists.sum(),
        ]
        self._step_sums = self._step_sums + torch.stack(sums)

    def end_step(self, left_out: Tensor) -> None:
        """Keep the step's sums for `record`.

        Args:
            left_out: A scalar; not used.
        """
        self._sums = self._step_sums
        self._step_sums = torch.zeros_like(self._sums)

    def record(self, positions: Positions) -> dict[str, float]:
        """Return the means of the step's pairs. A collective over all ranks; tensor-parallel ranks have equal sums.

        Args:
            positions: Positions of the data streams; not used.
        """
        sums = all_reduce(self._sums / self._dims.size("tp"), self._dims["world"]).tolist()
        chosen, rejected, correct = (x / max(sums[3], 1e-300) for x in sums[:3])
        names = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")
        return dict(zip(names, (chosen, rejected, chosen - rejected, correct), strict=True))
