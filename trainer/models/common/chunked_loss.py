"""Cross entropy of each token from hidden states, chunk by chunk: the logits of all tokens never exist at once.

    forward    for each chunk: logits = hidden @ weight.T  -> log-sum-exp and the label's logit of each token are kept
    backward   for each chunk: logits again                -> softmax - one-hot -> gradients of hidden states and weight

The backward repeats one product of three. Nothing else grows with the sequence: two numbers a token are kept.
With tensor parallelism each rank has the logits of its part of the vocabulary (Shoeybi et al., arXiv 1909.08053), and
one all-gather of these two numbers, after all chunks, makes the losses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from trainer.data.packing import IGNORE_INDEX
from trainer.distributed.sharding.exchange import all_gather
from trainer.job.compilation import CompileOptions
from trainer.transforms.compile import compiled_loss, rows_vary
from trainer.transforms.forward import replace_forward


def chunk_statistics(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, first: int, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp of each token's logits, and its label's logit, zero if the weight has no such row."""
    logits = _logits(hidden, weight)
    index, elsewhere = _label_index(labels, first, len(weight), whole)
    label_logit = logits.gather(1, index).squeeze(1).masked_fill(elsewhere, 0)
    highest = logits.amax(1)
    return logits.sub_(highest[:, None]).exp_().sum(1).log() + highest, label_logit


def chunk_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    first: int,
    whole: bool,
) -> torch.Tensor:
    """Return the gradient of the logits in the model's dtype: (softmax - one-hot) x gradient of the loss."""
    grad_logits = _logits(hidden, weight).sub_(lse[:, None]).exp_().mul_(grad[:, None])
    index, elsewhere = _label_index(labels, first, len(weight), whole)
    at_label = grad_logits.gather(1, index) - grad.masked_fill(elsewhere, 0)[:, None]
    return grad_logits.scatter_(1, index, at_label).to(hidden.dtype)


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits of a chunk, rounded as the model rounds them, in at least float32; a new tensor."""
    return (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))


def _label_index(labels: torch.Tensor, first: int, rows: int, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each label's logit, (tokens, 1), and whether there is none, (tokens,).

    Of the whole vocabulary only a missing label has none, so that a wrong one fails.
    """
    elsewhere = labels == IGNORE_INDEX if whole else (labels < first) | (labels >= first + rows)
    return (labels - first).masked_fill(elsewhere, 0)[:, None], elsewhere


@dataclass(frozen=True)
class ChunkFunctions:
    """The two functions of a chunk, eager or compiled."""

    statistics: Callable[..., tuple[torch.Tensor, torch.Tensor]] = chunk_statistics
    gradient: Callable[..., torch.Tensor] = chunk_gradient
    compiled: bool = False

    @classmethod
    def of(cls, options: CompileOptions) -> "ChunkFunctions":
        return cls(*(compiled_loss(f, options) for f in (chunk_statistics, chunk_gradient)), options.loss)


@dataclass(frozen=True)
class Chunks:
    """How the losses of many tokens are computed."""

    tokens: int
    """Tokens of a chunk at most; all chunks have about as many."""
    over: DeviceMesh | None = None
    """Ranks that have a part of the vocabulary each, in its order; None: the weight is whole."""
    functions: ChunkFunctions = ChunkFunctions()

    def of(self, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return the rows of each chunk of these tensors, which have a row for each token."""
        number = max(-(-len(tensors[0]) // self.tokens), 1)
        chunks = list(zip(*(x.tensor_split(number) for x in tensors), strict=True))
        if self.functions.compiled:
            rows_vary(*chain(*chunks))  # their numbers of rows differ by one
        return chunks

    def first_label(self, weight: torch.Tensor) -> int:
        """Return the first token of the vocabulary that this rank has."""
        return 0 if self.over is None else self.over.get_local_rank() * len(weight)


def apply_chunked_loss(output: nn.Linear, tokens: int, compilation: CompileOptions) -> None:
    """Let the projection to logits also return losses, in place: `output(hidden, labels=labels)` -> (B, S).

    The loop over the chunks is one forward of the module: FSDP gathers the weight once, and reduces its gradient once.
    Without labels the module returns logits as before. Call it before `fully_shard`; with tensor parallelism the module
    has the style `VocabularyParallel`. tokens: of a chunk.

    Raises:
        ValueError: the projection has a bias.
    """
    if output.bias is not None:
        raise ValueError("the loss in chunks has no bias for logits; set training.loss_chunk_tokens = 0 for this model")
    logits, functions = output.forward, ChunkFunctions.of(compilation)

    def forward(hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return logits(hidden)
        weight, over = output.weight, None
        if isinstance(weight, DTensor):
            over = weight.device_mesh
            # Each rank finds the part of the gradient that comes from its logits.
            hidden, weight = hidden.to_local(grad_placements=[Partial()]), weight.to_local()
        return chunked_token_losses(hidden, weight, labels, Chunks(tokens, over, functions))

    replace_forward(output, "loss in chunks", forward)


def chunked_token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunks: Chunks
) -> torch.Tensor:
    """Return the cross entropy of each token in at least float32, zero where there is no label.

    hidden: (B, S, dim); weight: (vocab, dim), of one dtype, or this rank's rows of it; labels: (B, S) -> (B, S). The
    gradient of the weight is summed over the chunks in at least float32. If ranks have parts of the vocabulary, so is
    the gradient of `hidden` a part of it, and the losses are the same on each.
    """
    losses = _TokenLosses.apply(hidden.flatten(0, 1), weight, labels.flatten(), chunks)
    return losses.unflatten(0, labels.shape)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunks: Chunks,
    ) -> torch.Tensor:
        first, whole = chunks.first_label(weight), chunks.over is None
        pieces = [chunks.functions.statistics(h, weight, y, first, whole) for h, y in chunks.of(hidden, labels)]
        lse, label_logit = (torch.cat(column) for column in zip(*pieces, strict=True))
        if chunks.over is not None:
            parts = all_gather(torch.stack([lse, label_logit]), chunks.over)
            lse, label_logit = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)
        ctx.save_for_backward(hidden, weight, labels, lse)
        ctx.chunks = chunks
        return (lse - label_logit).masked_fill(labels == IGNORE_INDEX, 0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden, weight, labels, lse = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        first, whole = chunks.first_label(weight), chunks.over is None
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        grad = grad.masked_fill(labels == IGNORE_INDEX, 0)
        done = 0
        for h, *rows in chunks.of(hidden, labels, lse, grad):
            grad_logits = chunks.functions.gradient(h, weight, *rows, first, whole)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[done : done + len(h)])
            if total is not None:
                _add_product(total, grad_logits.T, h)
            done += len(h)
        return grad_hidden, None if total is None else total.to(weight.dtype), None, None


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to `total`, in place, in the type of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
