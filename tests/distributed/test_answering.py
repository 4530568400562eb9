"""Law of served answers: scores are the model's own log-probabilities, and a request that fails ends itself alone."""

import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch

from lct_inference import answering
from lct_inference.answering import Writer
from lct_inference.http_server import Waiting
from lct_inference.openai_format import AnswerError, Ended, Piece, Score
from lct_inference.openai_request import Request
from tests.distributed.pool import WorkerPool
from tests.distributed.test_generation import opened
from trainer.config.schema import Model
from trainer.data.tokenizers.tokenizer import open_tokenizer
from trainer.runtime.agreement import control_group
from trainer.runtime.process_group import Process

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
ASKED = Request(PROMPT, 3, 0.0, 0, 1.0, 0, [], scores=2, echo=True)


def scores_case(cp: int) -> tuple[list[Score], list[float]]:
    """Return the scores of the prompt and of the answer, and their log-probabilities by one forward of all tokens."""
    with opened(Model(), cp=cp) as (part, job, dims):
        writer = Writer(part, job, dims, open_tokenizer(), (), control_group())
        parts: list = []
        writer.answer(Waiting(ASKED, parts.append if dims.rank("world") == 0 else lambda _: None))
        scores = [score for piece in parts if isinstance(piece, Piece) for score in piece.scores]
    wanted = []
    if scores and Process.from_environment().world_size == 1:
        with opened(Model()) as (part, _, _), torch.no_grad():
            tokens = torch.tensor([[score.token for score in scores]])
            values = part.output(part(tokens)).log_softmax(-1)[0, :-1]
            wanted = values.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    return scores, wanted


def test_scores_are_the_log_probabilities_of_one_forward(pool: WorkerPool) -> None:
    ((scores, wanted),) = pool.run(1, scores_case, 1)
    assert [score.token for score in scores[: len(PROMPT)]] == PROMPT
    assert len(scores) == len(PROMPT) + 3
    assert (scores[0].log_probability, scores[0].likeliest) == (None, ())
    assert [score.log_probability for score in scores[1:]] == pytest.approx(wanted, abs=1e-12)
    for score in scores[1:]:
        first, second = score.likeliest
        assert first[1] >= second[1]
        assert first[1] >= score.log_probability
    for score in scores[len(PROMPT) :]:
        assert score.likeliest[0] == (score.token, score.log_probability), "the likeliest token was taken"
    for cp in (1, 2):
        (shared, _), (others, _) = pool.run(2, scores_case, cp)
        assert not others
        assert [score.token for score in shared] == [score.token for score in scores]
        for ours, theirs in zip(shared[1:], scores[1:], strict=True):
            assert ours.log_probability == pytest.approx(theirs.log_probability, abs=1e-12)
            assert [token for token, _ in ours.likeliest] == [token for token, _ in theirs.likeliest]


def failing_case(failing_rank: int) -> list[list]:
    """Answer three requests: in one a rank fails, in one the client leaves, and one ends as usual."""
    pieces = []
    with opened(Model()) as (part, job, dims):
        rank, real = dims.rank("world"), answering.generate
        writer = Writer(part, job, dims, open_tokenizer(), (), control_group())

        def failing(*args: object) -> list[list[int]]:
            *others, how = args

            def put(number: int, token: int, logits: torch.Tensor) -> bool:
                if rank == failing_rank:
                    raise MemoryError("no room")
                return how.on_token(number, token, logits)

            return real(*others, replace(how, on_token=put))

        for kind in ("fails", "leaves", "usual"):
            asked, parts = replace(ASKED, tokens=6), []
            waiting = Waiting(asked, parts.append if rank == 0 else lambda _: None, threading.Event())
            if rank == 0 and kind == "leaves":
                waiting.gone.set()
            with mock.patch.object(answering, "generate", failing if kind == "fails" else real):
                writer.answer(waiting)
            pieces.append([str(p) if isinstance(p, AnswerError) else p for p in parts if not isinstance(p, Piece)])
    return pieces


@pytest.mark.parametrize(("ranks", "failing_rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_request_that_fails_ends_itself_alone(pool: WorkerPool, ranks: int, failing_rank: int) -> None:
    pieces, *others = pool.run(ranks, failing_case, failing_rank)
    (failed,), left, usual = pieces
    cause = "MemoryError: no room" if failing_rank == 0 else "_OtherRankError: another rank has failed in this request"
    assert failed == f"the answer could not be written ({cause})"
    assert left == [Ended(1, "stop")], "the first token tells all ranks that the client has left"
    assert usual == [Ended(6, "length")]
    assert others in ([], [[[], [], []]])
