"""Continue texts with a model, token by token. Keys and values of earlier tokens are kept."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.components.generation_cache import GenerationCache
from trainer.components.loss import whole_logits
from trainer.config.errors import SharedConfigError
from trainer.distributed.context_parallel.context import context_parallel
from trainer.distributed.parallel_dims import ParallelDims
from trainer.distributed.sharding.placement import rows_on
from trainer.job.record import ResolvedJob


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    temperature: 0 takes the likeliest token, 1 draws by the model's probabilities; top_k: of the k likeliest tokens,
    0 for all; top_p: of the fewest likeliest tokens that together have this probability (arXiv 1904.09751).
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Return a token by its logits (V,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        below = logits.double() - logits.max()  # of a tiny temperature too the largest is finite
        chances, tokens = torch.softmax(below / self.temperature, 0).cpu().sort(descending=True, stable=True)
        if self.top_k:
            chances[self.top_k :] = 0
        chances[chances.cumsum(0) - chances >= self.top_p * chances.sum()] = 0
        return int(tokens[torch.multinomial(chances, 1, generator=generator)])


@torch.no_grad()
def generate(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    sampling: Sampling,
    seed: int,
    ends: Collection[int] = (),
    on_token: Callable[[int, int], bool | None] | None = None,
) -> list[list[int]]:
    """Return for each prompt, of one token at least, what the model writes after it: at most `tokens` tokens.

    A text ends before a token of `ends`. What is drawn for a prompt depends on `seed` and on its number, not on the
    other prompts. The model sees at most `training.seq_len` tokens: the older half of a longer text is dropped.
    on_token: called with the number of a prompt and each token when it is written; True ends the text, on all ranks.

    Raises:
        SharedConfigError: on every rank, if logits are not numbers.
    """
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    texts, open_texts = [list(prompt) for prompt in prompts], list(range(len(prompts)))
    written: list[list[int]] = [[] for _ in prompts]
    most = min(job.config.training.seq_len, max(map(len, texts)) + tokens)
    reading = _logits(model, job, dims, texts, most)
    for _ in range(tokens):
        logits = next(reading)
        if logits.isnan().any():
            raise SharedConfigError(
                "the model's logits are not numbers, so its weights are damaged or diverged in training; `lct verify` "
                "checks a run's steps, and --step chooses an earlier one"
            )
        for i in tuple(open_texts):
            token = sampling.draw(logits[i], generators[i])
            if token in ends:
                open_texts.remove(i)
            else:
                written[i].append(token)
                if on_token is not None and on_token(i, token):
                    open_texts.remove(i)
        if not open_texts:
            break
        for i, text in enumerate(texts):  # an ended text continues with any token, which nobody reads
            text.append(written[i][-1] if i in open_texts else text[-1])
    return written


def _logits(
    model: nn.Module, job: ResolvedJob, dims: ParallelDims, texts: list[list[int]], most: int
) -> Iterator[torch.Tensor]:
    """Yield the logits (B, V) of the token after each of the texts, which grow by a token in between.

    most: tokens that the longest of them may have.
    """
    longest, device = job.config.training.seq_len, torch.device(job.device_type)
    cp, tp = dims["cp"], dims["tp"]
    unit = tp.size() * (2 * cp.size() if cp.size() > 1 else 1)
    while True:
        read = [text[-longest:] if len(text) <= longest else text[-max(longest // 2, 1) :] for text in texts]
        length = max(map(len, read))
        filled = length + -length % unit
        tokens = torch.tensor([text + [0] * (filled - len(text)) for text in read], device=device)
        capacity = filled // cp.size() + -(-(most - length) // cp.size())
        cache = GenerationCache(torch.tensor([len(text) for text in read], device=device), capacity, cp, tp)
        if job.attention is None:
            hidden = cache.read(model, tokens, torch.arange(filled, device=device), None)
        else:  # windows and sinks exist in planned attention only; on one rank the plan has one stage
            settings = {"buffer_seq_dims": [1], "options": job.attention, "sequences": len(texts)}
            with context_parallel(cp, buffers=[tokens], **settings) as context:
                rows = rows_on(context.layout, cp.get_local_rank(), device)
                hidden = cache.read(model, tokens, rows, context.attention_plan)
        for written in range(most - length + 1):
            yield whole_logits(model, hidden, tp)[:, -1]
            if written < most - length:
                hidden = cache.run(model, torch.tensor([text[-1:] for text in texts], device=device))
        # The texts are full: read their younger half again.
