"""The tensors of a text batch that a rank computes with, as immutable records.

whole sequences      `LanguageTask.whole`: tokens, labels and the other columns that the job uses, in host memory
this rank's rows     the same tensors inside `context_parallel`, which cuts them in place and restores them
on the device        `on(device)`: a record of the copies
chunks               `split(sizes)`: records of consecutive tokens
the model's inputs   `inputs(plan)`
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longshard.sharding.tensors import to_device
from trainer.tasks.task import RankInputs

_ARGUMENTS = ("token_numbers", "next_tokens")
"""Optional columns that the model takes as arguments."""


@dataclass(frozen=True)
class RankBatch:
    """Tensors of a batch, by the names of `TextBatch`.

    Attributes:
        columns: Tensors of shape (B, S), or (B, S, K) for K further tokens; `sources` may be (B,).
    """

    columns: Mapping[str, Tensor]

    @property
    def per_token(self) -> list[Tensor]:
        """Return the columns that have a value for each token, tokens first."""
        return [x for x in self.columns.values() if x.ndim > 1]

    @property
    def targets(self) -> Tensor:
        """Return the labels, (B, S). With K further tokens: labels, then the further labels, (B, S, 1 + K)."""
        labels = self.columns["labels"]
        further = self.columns.get("next_labels")
        return labels if further is None else torch.cat([labels[..., None], further], -1)

    def with_columns(self, **columns: Tensor) -> "RankBatch":
        """Return a record with additional columns.

        Args:
            **columns: The new tensors, by name, (B, S) or (B, S, K).
        """
        return RankBatch({**self.columns, **columns})

    def on(self, device: torch.device) -> "RankBatch":
        """Return a record of copies on a device.

        Args:
            device: The device of the copies.
        """
        return RankBatch({name: to_device(x, device) for name, x in self.columns.items()})

    def split(self, sizes: Sequence[int]) -> list["RankBatch"]:
        """Return one record per run of consecutive tokens. Columns without a token dimension are left out.

        Args:
            sizes: Number of tokens of each record.
        """
        cut = {name: x.split(sizes, 1) for name, x in self.columns.items() if x.ndim > 1}
        parts = zip(*cut.values(), strict=True)
        return [RankBatch(dict(zip(cut, part, strict=True))) for part in parts]

    def inputs(self, plan: Tensor | None) -> RankInputs:
        """Return the inputs of the model and of its losses.

        Args:
            plan: The handle of the open attention plan, any shape. None if no context is open.
        """
        columns = self.columns
        arguments = {"positions": columns.get("positions"), "attention_plan": plan}
        arguments |= {name: columns[name] for name in _ARGUMENTS if name in columns}
        return RankInputs(columns["tokens"], arguments, self.targets, batch=columns)


def token_numbers(sequences: Sequence[int], length: int) -> Tensor:
    """Return the index of each token among all tokens of the run, (B, length), int64.

    Args:
        sequences: Indices of the B sequences among all sequences of the run.
        length: Number of tokens of a sequence.
    """
    return torch.tensor(sequences)[:, None] * length + torch.arange(length)
