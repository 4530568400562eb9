"""The functions that the loss in chunks calls for one chunk of tokens, eager or compiled.

Shapes of a chunk of T tokens: hidden (T, dim), weight (vocab, dim), labels and lse (T,).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longshard.sharding.tensors import wide_type
from trainer.data.packing import IGNORE_INDEX
from trainer.job.transforms import CompileOptions
from trainer.transforms.compile import compiled_loss


class Place(NamedTuple):
    """How the logits of a chunk are made, and which tokens of the vocabulary they belong to.

    Attributes:
        softcap: See `Chunks`.
        first: The first token of the vocabulary that the weight has a row for.
        whole: Whether the weight has rows for all tokens.
    """

    softcap: float
    first: int
    whole: bool


def chunk_statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, place: Place
) -> tuple[Tensor, Tensor]:
    """Compute the log-sum-exp and the label's logit of each token, over the given rows of the weight alone.

    Both are in float32 or wider. Nothing is exchanged between ranks.

    Args:
        hidden: (T, dim).
        weight: (rows, dim): the whole vocabulary, or the rows of this rank.
        labels: (T,), numbers in the whole vocabulary.
        place: See `Place`.

    Returns:
        The log-sum-exp, (T,), and the label's logit, (T,), which is 0 if the weight lacks the label's row.
    """
    logits, _ = _capped(hidden @ weight.T, place.softcap)
    index, elsewhere = _label_index(labels, place.first, len(weight), place.whole)
    highest = logits.amax(1).to(wide_type(logits.dtype))
    label_logit = logits.gather(1, index).squeeze(1).to(highest.dtype).masked_fill(elsewhere, 0)
    return _less(logits, highest).exp_().sum(1).log() + highest, label_logit


def chunk_gradient(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    lse: Tensor,
    grad: Tensor,
    place: Place,
    z_loss: float,
) -> Tensor:
    """Return the gradient of the logits of these rows, (T, rows), in the model's dtype.

    It is (softmax - one-hot) x gradient of the loss, with the factors of z-loss and soft-cap.

    Args:
        hidden: (T, dim).
        weight: (rows, dim): the whole vocabulary, or the rows of this rank.
        labels: (T,), numbers in the whole vocabulary.
        lse: (T,), of `chunk_statistics` over the whole vocabulary.
        grad: The gradient of each loss, (T,).
        place: See `Place`.
        z_loss: See `Chunks`.
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
    hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the statistics of a chunk, and softmax - one-hot, (T, vocab), in the model's dtype.

    Args:
        hidden: (T, dim).
        weight: (vocab, dim), the whole vocabulary.
        labels: (T,).
        softcap: See `Chunks`.
        z_loss: See `Chunks`.

    Returns:
        As `chunk_statistics`, and softmax - one-hot, with the factors of soft-cap and z-loss.
    """
    logits, slope = _capped(hidden @ weight.T, softcap)
    index, _ = _label_index(labels, 0, len(weight), whole=True)
    label_logit = logits.gather(1, index).to(wide_type(logits.dtype))
    logarithms = logits.to(label_logit.dtype)
    # in place: a row is read whole before it is written
    logarithms = torch.log_softmax(logarithms, 1, out=logarithms)
    at_label = logarithms.gather(1, index)
    grad_logits = torch.exp(logarithms, out=logits)
    if z_loss:
        square_factor = 1 + 2 * z_loss * (label_logit - at_label)
        grad_logits.mul_(square_factor.to(logits.dtype))
        grad_logits.scatter_(1, index, (at_label.exp() * square_factor - 1).to(logits.dtype))
    else:
        grad_logits.scatter_(1, index, at_label.expm1().to(logits.dtype))
    if slope is not None:
        grad_logits.mul_(slope)
    return (label_logit - at_label).squeeze(1), label_logit.squeeze(1), grad_logits


def _capped(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Return logits of `CappedOutput`, and their derivatives. With softcap 0, return the same logits and None."""
    if not softcap:
        return logits, None
    shares = torch.tanh(logits / softcap)
    return softcap * shares, 1 - shares.square()


def _less(logits: Tensor, by: Tensor) -> Tensor:
    """Return logits - by, by: (tokens,), in the dtype of `by`; in the memory of `logits` if they have this dtype."""
    return logits.sub_(by[:, None]) if logits.dtype == by.dtype else logits - by[:, None]


def _label_index(labels: Tensor, first: int, rows: int, whole: bool) -> tuple[Tensor, Tensor]:
    """Return the column of each label's logit, (tokens, 1), and whether there is none, (tokens,).

    first, rows: the weight has rows of the tokens [first, first + rows). If the weight is whole, only a missing label
    has no column, so a label out of range fails.
    """
    elsewhere = labels == IGNORE_INDEX if whole else (labels < first) | (labels >= first + rows)
    return (labels - first).masked_fill(elsewhere, 0)[:, None], elsewhere


@dataclass(frozen=True)
class ChunkFunctions:
    """The functions of a chunk, eager or compiled."""

    statistics: Callable[..., tuple[Tensor, ...]] = chunk_statistics
    gradient: Callable[..., Tensor] = chunk_gradient
    at_once: Callable[..., tuple[Tensor, ...]] = chunk_at_once
    compiled: bool = False

    @classmethod
    def of(cls, options: CompileOptions) -> "ChunkFunctions":
        """Return the functions, compiled if the options say so.

        Args:
            options: Compilation of the job.
        """
        functions = (chunk_statistics, chunk_gradient, chunk_at_once)
        return cls(*(compiled_loss(f, options) for f in functions), options.loss)


EAGER = ChunkFunctions()
