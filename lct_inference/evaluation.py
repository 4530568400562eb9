"""Measurements of a trained model by forwards alone: loss by position, and the retrieval of a needle.

`lct evaluate` calls it. All functions of `Evaluation` are collectives over all ranks.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lct_inference.long_prompts import NeedlePrompt
from longshard.sharding.exchange import all_reduce
from trainer.components.loss import token_losses, whole_logits, whole_sequence
from trainer.components.step_metrics import perplexity
from trainer.data.loader import TextBatch, tensors_of
from trainer.data.packing import IGNORE_INDEX, PackedSequence
from trainer.models.decoder import rotated_until
from trainer.models.model_spec import Decoder
from trainer.parallel.parallel_dims import ParallelDims
from trainer.tasks.forward_pass import forward_only, own_batches
from trainer.tasks.language import LanguageTask
from trainer.tasks.task import RankInputs


@dataclass(frozen=True)
class Retrieved:
    """The answer to one prompt. Each token is predicted from the true tokens before it.

    Attributes:
        correct: Whether every token of the answer is the likeliest one.
        log_probability: Mean over the tokens of the answer.
    """

    correct: bool
    log_probability: float


@dataclass
class Evaluation:
    """Measurements with the model of a job.

    Attributes:
        task: The task of the job.
        dims: The meshes of the run.
        model: The model.
        rows: Sequences of a forward on each data-parallel rank.
    """

    task: LanguageTask
    dims: ParallelDims
    model: nn.Module
    rows: int

    def by_position(
        self, sequences: Iterable[PackedSequence], edges: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Measure the loss by position. A collective over all ranks.

        Args:
            sequences: The sequences, the same on every rank.
            edges: Rising positions; the first one is 0, the last one the length of the sequences.

        Returns:
            A row for each two neighboring edges, with the entries `first`; `last`, exclusive; `tokens`, the number of
                labels; `loss`, their mean cross entropy, 0.0 without labels; `perplexity`, None if it is too large for
                a float.
        """
        places = list(pairwise(edges))
        sums = self.dims.zeros(len(places), 2)

        def measure(part: Decoder, hidden: Tensor, share: RankInputs) -> None:
            losses = self.task.losses(part, hidden, share.targets).double()
            positions = share.arguments["positions"]  # of the tokens of this rank
            for number, (first, last) in enumerate(places):
                counted = (
                    (positions >= first) & (positions < last) & (share.targets != IGNORE_INDEX)
                )
                sums[number, 0] += losses.where(counted, 0).sum()
                sums[number, 1] += counted.sum()

        batches = (
            self._batch(arrays) for _, arrays in own_batches(sequences, self.rows, self.dims)
        )
        forward_only(self.task, [self.model], None, batches, measure)
        rows = []
        for (first, last), (total, n) in zip(places, self._total(sums).tolist(), strict=True):
            loss = total / max(n, 1)
            power = perplexity(loss)
            rows.append(
                {
                    "first": first,
                    "last": last,
                    "tokens": round(n),
                    "loss": loss,
                    "perplexity": power if math.isfinite(power) else None,
                }
            )
        return rows

    def needles(self, prompts: Sequence[NeedlePrompt]) -> list[Retrieved]:
        """Return how the model answers each prompt. A collective over all ranks.

        Only the logits of the answers are computed.

        Args:
            prompts: Prompts of one length.
        """
        most = max(prompt.answer_tokens for prompt in prompts)
        numbers = []
        rows = []

        def batches() -> Iterator[TextBatch]:
            for local_numbers, arrays in own_batches(
                (prompt.sequence for prompt in prompts), self.rows, self.dims
            ):
                numbers.append(local_numbers)
                yield self._batch(arrays)

        def measure(part: Decoder, hidden: Tensor, share: RankInputs) -> None:
            rows.append(answered(part, hidden, share.targets, most, self.dims))

        forward_only(self.task, [self.model], None, batches(), measure)
        sums = self.dims.zeros(len(prompts), 2)
        for local_numbers, local_sums in zip(numbers, rows, strict=True):
            # copies that fill up a forward have no number
            sums[local_numbers] = local_sums[: len(local_numbers)]
        return [
            Retrieved(round(hits) == prompt.answer_tokens, -loss / prompt.answer_tokens)
            for prompt, (hits, loss) in zip(prompts, self._total(sums).tolist(), strict=True)
        ]

    def _batch(self, arrays: dict) -> TextBatch:
        rotated_until(self.model, arrays["tokens"].shape[1])
        # then context parallelism cuts the positions, and each rank knows the positions of its tokens
        return tensors_of(arrays) | {"uses_positions": True}

    def _total(self, sums: Tensor) -> Tensor:
        """Sum over all ranks. Ranks of one tensor-parallel group have equal sums, so each counts 1 / tp of them."""
        return all_reduce(sums / self.dims.size("tp"), self.dims["world"])


def answered(
    part: Decoder, hidden: Tensor, targets: Tensor, most: int, dims: ParallelDims
) -> Tensor:
    """Count the correct tokens of each answer, and add up the losses of its tokens. A collective over `tp`.

    Args:
        part: The model part that has the output.
        hidden: Hidden states of this rank, (B, S / cp, dim).
        targets: (B, S / cp), with at most `most` labels in a row.
        most: Number of tokens that every rank takes from each row.
        dims: The meshes of the run.

    Returns:
        For each sequence (labels of this rank that have the largest logit, sum of their losses), (B, 2), float64.
    """
    hidden = whole_sequence(hidden, dims["tp"])
    # Labelled tokens first. Each rank takes `most` tokens, so that the output has one shape on all ranks of a group.
    taken = (
        (targets != IGNORE_INDEX).int().argsort(dim=1, descending=True, stable=True)[:, :most]
    )
    labels = targets.gather(1, taken)
    wanted = hidden.gather(1, taken[..., None].expand(-1, -1, hidden.shape[-1]))
    logits = whole_logits(part, wanted, dims["tp"])
    hits = (logits.argmax(-1) == labels).sum(1)
    return torch.stack([hits.double(), token_losses(logits, labels).double().sum(1)], dim=1)
