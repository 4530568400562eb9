"""Answer requests on all ranks, one request after the other. A failed request does not stop the following requests.

After each token the ranks agree, in a group of their own: continue, the client has left, or a rank has failed.

rank 0   forward  draw  send  agree(left)     agree(end)
rank 1   forward  draw        agree(on)       agree(end)     both end the answer
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lct_inference.generation import Sampling, Writing, generate
from lct_inference.http_server import Waiting
from lct_inference.openai_format import AnswerError, Ended, Piece, Score
from lct_inference.talk import Pieces
from trainer.config.errors import first_line
from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.job import ResolvedJob
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.agreement import highest
from trainer.runtime.process_group import is_peer_failure

_ON, _LEFT, _FAILED = range(3)


class _OtherRankError(Exception):
    """Another rank has failed in this request."""


@dataclass
class Writer:
    """Generates the answers of requests.

    Attributes:
        model: This rank's part of the model.
        job: The resolved job.
        dims: The meshes.
        tokenizer: The tokenizer.
        ends: Tokens that end a text.
        control: The group in which ranks agree after each token, see `control_group`.
    """

    model: nn.Module
    job: ResolvedJob
    dims: ParallelDims
    tokenizer: Tokenizer
    ends: Collection[int]
    control: ProcessGroup

    def answer(self, waiting: Waiting) -> None:
        """Generate the answer of a request. A collective over all ranks.

        If generation fails, the client of this request gets the error, and all ranks take the next request.

        Args:
            waiting: The request, and what takes the answer; only rank 0 sends it to the client.

        Raises:
            Exception: Another rank is lost (see `is_peer_failure`): the ranks cannot continue.
        """
        try:
            ended = self._written(waiting)
            self._agree(_ON)
        except Exception as error:
            if is_peer_failure(error):
                raise
            if not isinstance(error, _OtherRankError):
                highest(_FAILED, self.control)
            reason = f"{type(error).__name__}: {first_line(error)[:300]}"
            message = f"the answer could not be written ({reason})"
            if self.dims.is_first:
                print(f"error: {message}", file=sys.stderr, flush=True)
            waiting.send(AnswerError(message))
            return
        waiting.send(ended)

    def _written(self, waiting: Waiting) -> Ended:
        request = waiting.request
        text = Pieces(self.tokenizer.decode, request.stops)
        if request.echo and request.scores is None:
            waiting.send(Piece(self.tokenizer.decode(request.prompt)))

        def send_token(_: int, token: int, logits: Tensor) -> bool:
            piece = "" if token in self.ends else text.put(token)
            scores = (
                ()
                if request.scores is None
                else scores_of(logits[None], [token], request.scores)
            )
            waiting.send(Piece(piece, scores))
            left = waiting.gone.is_set()
            return self._agree(_LEFT if left else _ON) == _LEFT or text.stopped

        def send_prompt(start: int, logits: Tensor) -> None:
            tokens = request.prompt[start : start + logits.shape[1] + 1]
            first = () if start else (Score(tokens[0], None),)
            following = tokens[1:]
            scores = first + scores_of(logits[0, : len(following)], following, request.scores)
            waiting.send(
                Piece(self.tokenizer.decode(request.prompt) if not start else "", scores)
            )

        writing = Writing(
            tokens=request.tokens,
            sampling=Sampling(request.temperature, request.top_k, request.top_p),
            seed=request.seed,
            ends=self.ends,
            on_token=send_token,
            on_prompt=send_prompt if request.echo and request.scores is not None else None,
        )
        (written,) = generate(self.model, self.job, self.dims, [request.prompt], writing)
        waiting.send(Piece(text.finish()))
        is_full = len(written) == request.tokens and not text.stopped
        return Ended(len(written), "length" if is_full else "stop")

    def _agree(self, status: int) -> int:
        """Return the highest status of all ranks; raise _OtherRankError if a rank has failed. A collective."""
        agreed = highest(status, self.control)
        if agreed == _FAILED:
            raise _OtherRankError("another rank has failed in this request")
        return agreed


def scores_of(logits: Tensor, tokens: list[int], likeliest: int) -> tuple[Score, ...]:
    """Return a score for each token: its log-probability (natural logarithm), and the likeliest tokens with theirs.

    Probabilities are at temperature 1 and over the whole vocabulary.

    Args:
        logits: The logits from which each token was drawn, (N, V).
        tokens: N tokens.
        likeliest: Number of likeliest tokens to report with each token; at most V are reported.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    values = logits.to(dtype).log_softmax(-1)
    taken = values.gather(
        1, torch.tensor(tokens, device=values.device, dtype=torch.int64)[:, None]
    )[:, 0].tolist()
    top = values.topk(min(likeliest, values.shape[1]))
    pairs = [
        tuple(zip(*row, strict=True))
        for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return tuple(Score(*row) for row in zip(tokens, taken, pairs, strict=True))
