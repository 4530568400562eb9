"""Cross entropy of each token from hidden states, chunk by chunk: the logits of all tokens never exist at once.

    at once  forward   for each chunk: logits = hidden @ weight.T -> losses, softmax - one-hot -> gradients of their sum
             backward  these gradients x the gradient of the sum
    in two   forward   for each chunk: logits -> log-sum-exp and the label's logit of each token are kept
             backward  for each chunk: logits again -> (softmax - one-hot) x gradient of each loss -> gradients

"In two" is for losses that are not simply summed, and for pipelines, whose forwards wait for their backward. It is also
for ranks that have parts of the vocabulary (Shoeybi et al., arXiv 1909.08053): one all-gather, after all chunks, makes
the losses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from longshard.sharding.exchange import all_gather
from longshard.sharding.forward import replace_forward
from longshard.sharding.tensors import wide_type
from trainer.data.packing import IGNORE_INDEX
from trainer.job.transforms import CompileOptions
from trainer.models.chunked_loss_functions import EAGER, ChunkFunctions, Place
from trainer.transforms.compile import rows_vary


@dataclass(frozen=True)
class Chunks:
    """How the losses of many tokens are computed."""

    tokens: int
    """Largest number of tokens of a chunk; all chunks have about the same size."""
    over: DeviceMesh | None = None
    """Ranks that each have a part of the vocabulary, in order; None: the weight is whole."""
    functions: ChunkFunctions = EAGER
    in_forward: bool = True
    """Make the gradients in the forward, if it can be useful. For each forward in flight they take memory until the
    backward: a float32 sum of the size of the weight, and the size of the hidden states."""
    softcap: float = 0.0
    """Bound of the logits, see `CappedOutput`; 0: none."""
    z_loss: float = 0.0
    """Gradients are taken of loss + z_loss x (log-sum-exp)^2, which keeps logits small (PaLM, arXiv 2204.02311, 5)."""
    factors: tuple[float, ...] = (1.0,)
    """Factors of the gradients: the tokens are divided into len(factors) equal parts, one after another."""

    def with_factors(self, *tensors: Tensor) -> list[tuple[float, tuple[Tensor, ...]]]:
        """Return the chunks in the order of the tokens, each as (factor of its part, rows), see `factors`.

        The tokens are divided into len(factors) equal parts, and each part into the same number of chunks. The rows are
        views.

        Args:
            *tensors: They have a row for each token, (tokens, ...).
        """
        parts = len(self.factors)
        number = max(-(-len(tensors[0]) // parts // self.tokens), 1)
        split = [
            [rows for part in x.tensor_split(parts) for rows in part.tensor_split(number)]
            for x in tensors
        ]
        if self.functions.compiled:
            rows_vary(*chain(*split))  # the numbers of rows of chunks differ by one
        chunks = zip(*split, strict=True)
        return [(self.factors[i // number], rows) for i, rows in enumerate(chunks)]

    def place(self, weight: Tensor) -> Place:
        """Return how the logits of a chunk are made.

        Args:
            weight: This rank's rows of the vocabulary, (rows, dim).
        """
        return Place(self.softcap, self.first_label(weight), self.over is None)

    def first_label(self, weight: Tensor) -> int:
        """Return the id of the first token for which this rank has a row of the vocabulary.

        Args:
            weight: This rank's rows of the vocabulary, (rows, dim).
        """
        return 0 if self.over is None else self.over.get_local_rank() * len(weight)


def apply_chunked_loss(
    output: nn.Linear,
    tokens: int,
    compilation: CompileOptions,
    *,
    in_forward: bool = True,
    z_loss: float = 0.0,
) -> None:
    """Let the projection to logits also return losses, in place: `output(hidden, labels=labels)` -> (B, S).

    The loop over the chunks is one forward of the module: FSDP gathers the weight once, and reduces its gradient once.
    Without labels the module returns logits as before; with labels it also takes `factors`, see `Chunks`. Call it
    before `fully_shard`. With tensor parallelism the module has the style `VOCABULARY_PARALLEL`.

    Args:
        output: The projection.
        tokens: Largest number of tokens of a chunk.
        compilation: Compilation of the job.
        in_forward: See `Chunks`.
        z_loss: See `Chunks`.

    Raises:
        ValueError: The projection has a bias.
    """
    if output.bias is not None:
        raise ValueError(
            "the loss in chunks has no bias for logits; set training.loss_chunk_tokens = 0 for this model"
        )
    to_logits = output.forward
    functions = ChunkFunctions.of(compilation)

    def forward(
        hidden: Tensor, labels: Tensor | None = None, factors: tuple[float, ...] = (1.0,)
    ) -> Tensor:
        if labels is None:
            return to_logits(hidden)
        weight = output.weight
        over = None
        if isinstance(weight, DTensor):
            over = weight.device_mesh
            # Each rank finds the part of the gradient that comes from its logits.
            hidden = hidden.to_local(grad_placements=[Partial()])
            weight = weight.to_local()
        softcap = getattr(output, "softcap", 0.0)
        chunks = Chunks(tokens, over, functions, in_forward, softcap, z_loss, factors)
        return chunked_token_losses(hidden, weight, labels, chunks)

    replace_forward(output, "loss in chunks", forward)


def chunked_token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunks: Chunks
) -> Tensor:
    """Return the cross entropy of each token, (B, S), in float32 or wider, zero where there is no label.

    The gradient of the weight is summed over the chunks in float32 or wider, and rounded once. If ranks have parts of
    the vocabulary, the gradient of `hidden` is a partial sum, and the losses are equal on all ranks.

    Args:
        hidden: (B, S, dim).
        weight: (vocab, dim), or this rank's rows of it, with the dtype of `hidden`.
        labels: (B, S).
        chunks: How to compute them.
    """
    at_once = chunks.in_forward and chunks.over is None and torch.is_grad_enabled()
    losses = _TokenLosses.apply(hidden.flatten(0, 1), weight, labels.flatten(), chunks, at_once)
    return losses.unflatten(0, labels.shape)


class _Gradients:
    """Gradients of hidden states and weight, if they are needed. Chunks are added in order."""

    def __init__(self, hidden: Tensor, weight: Tensor, needed: Sequence[bool]) -> None:
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = (
            torch.zeros_like(weight, dtype=wide_type(weight.dtype)) if needed[1] else None
        )
        self.done = 0

    def add(self, grad_logits: Tensor, hidden: Tensor, weight: Tensor, factor: float) -> None:
        """Write the next rows of the hidden states' gradient, and add to the weight's gradient; both times `factor`.

        A token whose row of `hidden` is zero adds nothing to the weight's gradient.
        """
        if self.hidden is not None:
            rows = self.hidden[self.done : self.done + len(hidden)]
            torch.mm(grad_logits, weight, out=rows)
            if factor != 1:
                rows.mul_(factor)
        if self.weight is not None:
            _add_product(self.weight, grad_logits.T, hidden, factor)
        self.done += len(hidden)

    def scale(self, by: Tensor, missing: Tensor) -> None:
        """Multiply both gradients in place by a number, (1,), in the precision of each gradient.

        Tokens without a label, missing (tokens,) bool, get a gradient of zero.
        """
        if self.hidden is not None:
            self.hidden.mul_(by).masked_fill_(missing[:, None], 0)
        if self.weight is not None:
            self.weight.mul_(by)

    def rounded(self, weight: Tensor) -> tuple[Tensor | None, ...]:
        rounded = None if self.weight is None else self.weight.to(weight.dtype)
        return self.hidden, rounded, None, None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunks: Chunks,
        at_once: bool,
    ) -> Tensor:
        missing = labels == IGNORE_INDEX
        pieces = []
        ctx.chunks = chunks
        ctx.gradients = None
        if at_once:
            ctx.gradients = _Gradients(hidden, weight, ctx.needs_input_grad)
            for factor, (h, y, out) in chunks.with_factors(hidden, labels, missing):
                *statistics, grad_logits = chunks.functions.at_once(
                    h, weight, y, chunks.softcap, chunks.z_loss
                )
                ctx.gradients.add(grad_logits, h.masked_fill(out[:, None], 0), weight, factor)
                del grad_logits  # before the next chunk makes its own
                pieces.append(statistics)
        else:
            place = chunks.place(weight)
            pieces += [
                chunks.functions.statistics(h, weight, y, place)
                for _, (h, y) in chunks.with_factors(hidden, labels)
            ]
        lse, label_logit = (torch.cat(column) for column in zip(*pieces, strict=True))
        if chunks.over is not None:
            parts = all_gather(torch.stack([lse, label_logit]), chunks.over)
            lse = parts[:, 0].logsumexp(0)
            label_logit = parts[:, 1].sum(0)
        ctx.save_for_backward(hidden, weight, labels, lse)
        return (lse - label_logit).masked_fill(missing, 0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, lse = ctx.saved_tensors
        chunks = ctx.chunks
        # The forward's gradients fit a backward of summed losses: then `grad` is one number in memory for all tokens.
        gradients = ctx.gradients
        ctx.gradients = None
        missing = labels == IGNORE_INDEX
        if gradients is not None and not any(grad.stride()):
            gradients.scale(grad[:1], missing)
            return gradients.rounded(weight)
        place = chunks.place(weight)
        grad = grad.masked_fill(missing, 0)
        gradients = _Gradients(hidden, weight, ctx.needs_input_grad)
        for factor, (h, *rows) in chunks.with_factors(hidden, labels, lse, grad):
            gradients.add(
                chunks.functions.gradient(h, weight, *rows, place, chunks.z_loss),
                h,
                weight,
                factor,
            )
        return gradients.rounded(weight)


def _add_product(total: Tensor, a: Tensor, b: Tensor, alpha: float) -> None:
    """Add alpha a @ b to `total`, in place. The product is never rounded to a dtype narrower than `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=alpha)
    elif a.is_cuda:
        torch.addmm(total, a, b, alpha=alpha, out_dtype=total.dtype, out=total)
    else:  # only CUDA returns a product of half-precision matrices in float32
        total.addmm_(a.to(total.dtype), b.to(total.dtype), alpha=alpha)
