"""The keys of a batch of text."""

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import torch

    from trainer.distributed.context_parallel.planning.options import BatchPlan


class TextBatch(TypedDict, total=False):
    """Sequences of one data-parallel rank, (B, S) int64 each, the same on each of its context-parallel ranks."""

    tokens: "torch.Tensor"
    labels: "torch.Tensor"
    """The next token of each, already shifted; `IGNORE_INDEX` where there is none."""
    positions: "torch.Tensor"
    """Within each document, from 0; `NO_POSITION` of padding."""
    document_ids: "torch.Tensor"
    """Number of the document within its sequence; padding has a number of its own."""
    sources: "torch.Tensor"
    """Of a mixture: number of the source of each sequence (B,), or of each token (B, S) if documents were exchanged."""
    numbers: list[int]
    """Of each sequence how many sequences of the run come before it, on all ranks."""
    token_numbers: "torch.Tensor"
    """Of each token of the run, (B, S); made by the task for the dropout of adapters."""
    next_tokens: "torch.Tensor"
    """The tokens that follow each, (B, S, K), for layers that predict further tokens; made by the task."""
    next_labels: "torch.Tensor"
    """What these layers predict, (B, S, K)."""
    padding: int
    """Tokens of no document; absent if there are none."""
    plan: "BatchPlan"
    """With packed documents: the layout, mask and method of attention."""
    uses_positions: bool
    """Whether the model gets `positions` although documents see each other."""
