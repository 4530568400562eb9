"""Cross entropy of each token from hidden states, chunk by chunk: the logits of all tokens never exist at once.

    at once  forward   for each chunk: logits = hidden @ weight.T -> losses, softmax - one-hot -> gradients of their sum
             backward  these gradients x the gradient of the sum
    in two   forward   for each chunk: logits -> log-sum-exp and the label's logit of each token are kept
             backward  for each chunk: logits again -> (softmax - one-hot) x gradient of each loss -> gradients

In two is for losses that are not simply summed, for pipelines, whose forwards wait for their backward, and for ranks
that have parts of the vocabulary (Shoeybi et al., arXiv 1909.08053): one all-gather, after all chunks, makes the
losses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from longshard.sharding.exchange import all_gather
from longshard.sharding.forward import replace_forward
from trainer.data.packing import IGNORE_INDEX
from trainer.job.transforms import CompileOptions
from trainer.transforms.compile import compiled_loss, rows_vary


class Place(NamedTuple):
    """How logits of a chunk are made, and which tokens of the vocabulary they are for.

    softcap: see `Chunks`; first: the first token that the weight has a row for; whole: it has rows for all tokens.
    """

    softcap: float
    first: int
    whole: bool


def chunk_statistics(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, place: Place
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp of each token's logits, and its label's logit, zero if the weight has no such row."""
    logits, _ = _capped(hidden @ weight.T, place.softcap)
    index, elsewhere = _label_index(labels, place.first, len(weight), place.whole)
    highest = logits.amax(1).to(_precise(logits))
    label_logit = logits.gather(1, index).squeeze(1).to(highest.dtype).masked_fill(elsewhere, 0)
    return _less(logits, highest).exp_().sum(1).log() + highest, label_logit


def chunk_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    place: Place,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Return the gradient of the logits in the model's dtype: (softmax - one-hot) x gradient of the loss.

    z_loss: see `Chunks`, as in `chunk_at_once`.
    """
    logits, slope = _capped(hidden @ weight.T, place.softcap)
    index, elsewhere = _label_index(labels, place.first, len(weight), place.whole)
    shares = _less(logits, lse).exp_()
    if z_loss:
        shares.mul_((1 + 2 * z_loss * lse)[:, None])
    at_label = (shares.gather(1, index) - torch.where(elsewhere, 0, 1)[:, None]) * grad[:, None]
    grad_logits = torch.mul(shares, grad[:, None], out=logits).scatter_(
        1, index, at_label.to(logits.dtype)
    )
    return grad_logits if slope is None else grad_logits.mul_(slope)


def chunk_at_once(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    softcap: float,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the statistics of a chunk, and softmax - one-hot in the model's dtype; weight: of the whole vocabulary."""
    logits, slope = _capped(hidden @ weight.T, softcap)
    index, _ = _label_index(labels, 0, len(weight), whole=True)
    label_logit = logits.gather(1, index).to(_precise(logits))
    logarithms = logits.to(label_logit.dtype)
    # in place: a row is read whole before it is written
    logarithms = torch.log_softmax(logarithms, 1, out=logarithms)
    at_label = logarithms.gather(1, index)
    grad_logits = torch.exp(logarithms, out=logits)
    if z_loss:
        of_squares = 1 + 2 * z_loss * (label_logit - at_label)
        grad_logits.mul_(of_squares.to(logits.dtype))
        grad_logits.scatter_(1, index, (at_label.exp() * of_squares - 1).to(logits.dtype))
    else:
        grad_logits.scatter_(1, index, at_label.expm1().to(logits.dtype))
    if slope is not None:
        grad_logits.mul_(slope)
    return (label_logit - at_label).squeeze(1), label_logit.squeeze(1), grad_logits


def _capped(logits: torch.Tensor, softcap: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits of `CappedOutput` and their slopes; softcap 0: the same logits, and None."""
    if not softcap:
        return logits, None
    shares = torch.tanh(logits / softcap)
    return softcap * shares, 1 - shares.square()


def _precise(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _less(logits: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return logits - by, (tokens,), in the type of `by`, in the memory of `logits` if they have this type."""
    return logits.sub_(by[:, None]) if logits.dtype == by.dtype else logits - by[:, None]


def _label_index(
    labels: torch.Tensor, first: int, rows: int, whole: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each label's logit, (tokens, 1), and whether there is none, (tokens,).

    Of the whole vocabulary only a missing label has none, so that a wrong one fails.
    """
    elsewhere = labels == IGNORE_INDEX if whole else (labels < first) | (labels >= first + rows)
    return (labels - first).masked_fill(elsewhere, 0)[:, None], elsewhere


@dataclass(frozen=True)
class ChunkFunctions:
    """The functions of a chunk, eager or compiled."""

    statistics: Callable[..., tuple[torch.Tensor, ...]] = chunk_statistics
    gradient: Callable[..., torch.Tensor] = chunk_gradient
    at_once: Callable[..., tuple[torch.Tensor, ...]] = chunk_at_once
    compiled: bool = False

    @classmethod
    def of(cls, options: CompileOptions) -> "ChunkFunctions":
        functions = (chunk_statistics, chunk_gradient, chunk_at_once)
        return cls(*(compiled_loss(f, options) for f in functions), options.loss)


@dataclass(frozen=True)
class Chunks:
    """How the losses of many tokens are computed."""

    tokens: int
    """Tokens of a chunk at most; all chunks have about as many."""
    over: DeviceMesh | None = None
    """Ranks that have a part of the vocabulary each, in its order; None: the weight is whole."""
    functions: ChunkFunctions = ChunkFunctions()
    in_forward: bool = True
    """Make the gradients in the forward, if it is not known to be useless. They wait for the backward: a float32 sum as
    large as the weight, and as much as the hidden states, for each forward in flight."""
    softcap: float = 0.0
    """Of logits, see `CappedOutput`; 0: none."""
    z_loss: float = 0.0
    """Gradients are those of loss + z_loss x (log-sum-exp)^2, which keeps logits small (PaLM, arXiv 2204.02311, 5)."""
    factors: tuple[float, ...] = (1.0,)
    """Of the gradients of as many equal parts of the tokens, one after another."""

    def of(self, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return the rows of each chunk of these tensors, which have a row for each token. A part has whole chunks."""
        parts = len(self.factors)
        number = max(-(-len(tensors[0]) // parts // self.tokens), 1)
        split = [
            [rows for part in x.tensor_split(parts) for rows in part.tensor_split(number)]
            for x in tensors
        ]
        chunks = list(zip(*split, strict=True))
        if self.functions.compiled:
            rows_vary(*chain(*chunks))  # their numbers of rows differ by one
        return chunks

    def with_factors(
        self, *tensors: torch.Tensor
    ) -> list[tuple[float, tuple[torch.Tensor, ...]]]:
        """Return the same, each with its factor."""
        chunks = self.of(*tensors)
        of_part = len(chunks) // len(self.factors)
        return [(self.factors[number // of_part], rows) for number, rows in enumerate(chunks)]

    def place(self, weight: torch.Tensor) -> Place:
        """Return what a chunk's logits are of. weight: rows of the vocabulary that this rank has."""
        return Place(self.softcap, self.first_label(weight), self.over is None)

    def first_label(self, weight: torch.Tensor) -> int:
        """Return the first token of the vocabulary that this rank has."""
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

    It also takes `factors`, see `Chunks`.

    The loop over the chunks is one forward of the module: FSDP gathers the weight once, and reduces its gradient once.
    Without labels the module returns logits as before. Call it before `fully_shard`; with tensor parallelism the module
    has the style `VocabularyParallel`. tokens: of a chunk; in_forward, z_loss: see `Chunks`.

    Raises:
        ValueError: the projection has a bias.
    """
    if output.bias is not None:
        raise ValueError(
            "the loss in chunks has no bias for logits; set training.loss_chunk_tokens = 0 for this model"
        )
    logits = output.forward
    functions = ChunkFunctions.of(compilation)

    def forward(
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        factors: tuple[float, ...] = (1.0,),
    ) -> torch.Tensor:
        if labels is None:
            return logits(hidden)
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
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunks: Chunks
) -> torch.Tensor:
    """Return the cross entropy of each token in at least float32, zero where there is no label.

    hidden: (B, S, dim); weight: (vocab, dim), of one dtype, or this rank's rows of it; labels: (B, S) -> (B, S). The
    gradient of the weight is summed over the chunks in at least float32, and rounded once. If ranks have parts of the
    vocabulary, so is the gradient of `hidden` a part of it, and the losses are the same on each.
    """
    at_once = chunks.in_forward and chunks.over is None and torch.is_grad_enabled()
    losses = _TokenLosses.apply(hidden.flatten(0, 1), weight, labels.flatten(), chunks, at_once)
    return losses.unflatten(0, labels.shape)


class _Gradients:
    """Gradients of hidden states and weight, of those that are needed, to which chunks are added in their order."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, needed: Sequence[bool]
    ) -> None:
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=_precise(weight)) if needed[1] else None
        self.done = 0

    def add(
        self,
        grad_logits: torch.Tensor,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        factor: float = 1.0,
    ) -> None:
        """Add a chunk, whose hidden states are zero where the gradient of logits does not count for the weight."""
        if self.hidden is not None:
            rows = self.hidden[self.done : self.done + len(hidden)]
            torch.mm(grad_logits, weight, out=rows)
            if factor != 1:
                rows.mul_(factor)
        if self.weight is not None:
            _add_product(self.weight, grad_logits.T, hidden, factor)
        self.done += len(hidden)

    def scale(self, by: torch.Tensor, missing: torch.Tensor) -> None:
        """Multiply by a number, (1,), in its precision; tokens without a label get none."""
        if self.hidden is not None:
            self.hidden.mul_(by).masked_fill_(missing[:, None], 0)
        if self.weight is not None:
            self.weight.mul_(by)

    def rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (
            self.hidden,
            None if self.weight is None else self.weight.to(weight.dtype),
            None,
            None,
            None,
        )


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunks: Chunks,
        at_once: bool,
    ) -> torch.Tensor:
        missing = labels == IGNORE_INDEX
        pieces = []
        ctx.chunks, ctx.gradients = chunks, None
        if at_once:
            ctx.gradients = _Gradients(hidden, weight, ctx.needs_input_grad)
            for factor, (h, y, out) in chunks.with_factors(hidden, labels, missing):
                *statistics, grad_logits = chunks.functions.at_once(
                    h, weight, y, chunks.softcap, chunks.z_loss
                )
                ctx.gradients.add(grad_logits, h.masked_fill(out[:, None], 0), weight, factor)
                del grad_logits  # before those of the next chunk are made
                pieces.append(statistics)
        else:
            place = chunks.place(weight)
            pieces += [
                chunks.functions.statistics(h, weight, y, place)
                for h, y in chunks.of(hidden, labels)
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
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, lse = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        # Those of the forward serve one backward, of a sum: its gradient is one number in memory for all tokens.
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


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float) -> None:
    """Add alpha a @ b to `total`, in place and in the type of `total`, to which the product is never rounded before."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=alpha)
    elif a.is_cuda:
        torch.addmm(total, a, b, alpha=alpha, out_dtype=total.dtype, out=total)
    else:  # only CUDA has products of half precision that are not rounded to it
        total.addmm_(a.to(total.dtype), b.to(total.dtype), alpha=alpha)
