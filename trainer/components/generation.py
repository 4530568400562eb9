"""Continue texts with a model, token by token, each new one by one forward of one token."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from longshard.context.regions import context_parallel
from longshard.sharding.placement import rows_on
from trainer.components.generation_cache import GenerationCache
from trainer.components.loss import whole_logits
from trainer.config.errors import SharedConfigError
from trainer.job.record import ResolvedJob
from trainer.models.decoder import rotated_until
from trainer.parallel.parallel_dims import ParallelDims

_PROMPT_PART = 256
"""Tokens of a prompt whose logits are in memory at once."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    temperature: 0 takes the likeliest token, 1 draws by the model's probabilities; top_k: of the k likeliest tokens,
    0 for all; top_p: of the fewest likeliest tokens that together have this probability (arXiv 1904.09751), 0 for one.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Return a token by its logits (V,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        # of a tiny temperature too the largest is finite
        below = logits.double() - logits.max()
        chances, tokens = (
            torch.softmax(below / self.temperature, 0).cpu().sort(descending=True, stable=True)
        )
        if self.top_k:
            chances[self.top_k :] = 0
        behind = chances.cumsum(0) - chances >= self.top_p * chances.sum()
        behind[0] = False  # with top_p = 0, too
        chances[behind] = 0
        return int(tokens[torch.multinomial(chances, 1, generator=generator)])


@dataclass(frozen=True)
class Writing:
    """How texts are continued."""

    tokens: int
    """The most tokens that are written to each."""
    sampling: Sampling
    seed: int
    """What is drawn for a prompt depends on it and on the number of the prompt, not on the other prompts."""
    ends: Collection[int] = ()
    """A text ends before one of these tokens."""
    on_token: Callable[[int, int, torch.Tensor], bool | None] | None = None
    """Called with the number of a prompt, each token when it is drawn, also one of `ends`, and the logits (V,) that it
    was drawn by. True ends the text, on all ranks."""
    on_prompt: Callable[[int, torch.Tensor], None] | None = None
    """Called with parts of the logits (B, N, V) of the tokens of the prompts, and the position of the first token."""


@torch.no_grad()
def generate(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    prompts: Sequence[Sequence[int]],
    how: Writing,
) -> list[list[int]]:
    """Return for each prompt, of one token at least, what the model writes after it.

    The model sees at most `training.seq_len` tokens: the older half of a longer text is dropped.

    Raises:
        SharedConfigError: on every rank, if logits are not numbers.
    """
    # the frequencies depend on the length of each text
    if len(prompts) > 1 and rotated_until(model, 1) < math.inf:
        return _one_by_one(model, job, dims, prompts, how)
    texts = [list(prompt) for prompt in prompts]
    most = min(job.config.training.seq_len, max(map(len, texts)) + how.tokens)
    reading = _logits(model, job, dims, texts, most, how.on_prompt)
    if how.on_prompt is not None and not how.tokens:
        next(reading)
    generators = [torch.Generator().manual_seed(how.seed + i) for i in range(len(prompts))]
    open_texts = list(range(len(prompts)))
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(how.tokens):
        logits = next(reading)
        if logits.isnan().any():
            raise SharedConfigError(
                "the model's logits are not numbers, so its weights are damaged or diverged in training; `lct verify` "
                "checks a run's steps, and --step chooses an earlier one"
            )
        for i in tuple(open_texts):
            token = how.sampling.draw(logits[i], generators[i])
            stops = how.on_token is not None and how.on_token(i, token, logits[i])
            if token not in how.ends:
                written[i].append(token)
            if token in how.ends or stops:
                open_texts.remove(i)
        if not open_texts:
            break
        # an ended text continues with any token, which nobody reads
        for i, text in enumerate(texts):
            text.append(written[i][-1] if i in open_texts else text[-1])
    return written


def _one_by_one(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    prompts: Sequence[Sequence[int]],
    how: Writing,
) -> list[list[int]]:
    """Continue each prompt alone, as `generate` does; `on_prompt` gets the logits (1, N, V) of each in turn."""
    found = []
    for number, prompt in enumerate(prompts):

        def tell(_: int, token: int, logits: torch.Tensor, number: int = number) -> bool | None:
            return None if how.on_token is None else how.on_token(number, token, logits)

        alone = replace(how, seed=how.seed + number, on_token=tell)
        found += generate(model, job, dims, [prompt], alone)
    return found


def _logits(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    texts: list[list[int]],
    most: int,
    on_prompt: Callable[[int, torch.Tensor], None] | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the logits (B, V) of the token after each text. They grow by a token in between, up to `most` tokens.

    on_prompt: see `generate`; called when the texts are read for the first time.
    """
    longest = job.config.training.seq_len
    device = torch.device(job.device_type)
    tp = dims["tp"]
    while True:
        read = [
            text[-longest:] if len(text) <= longest else text[-max(longest // 2, 1) :]
            for text in texts
        ]
        length = max(map(len, read))
        until = int(min(most, rotated_until(model, max(map(len, texts)))))
        lengths = torch.tensor([len(text) for text in read], device=device)
        positions = None
        if on_prompt is not None:
            positions = torch.arange(length, device=device).expand(len(texts), -1)
        cache, hidden = _read(model, job, dims, read, until - length, positions)
        if on_prompt is not None:
            for start in range(0, length, _PROMPT_PART):
                part = hidden[:, start : start + _PROMPT_PART]
                on_prompt(start, whole_logits(model, part, tp))
            last = (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
            hidden = hidden.gather(1, last)
            on_prompt = None
        for written in range(until - length + 1):
            yield whole_logits(model, hidden, tp)[:, -1]
            if written < until - length:
                newest = torch.tensor([text[-1:] for text in texts], device=device)
                hidden = cache.run(model, newest)
        # The texts are full: read their younger half again. Or all of them, with frequencies for longer texts.


def _read(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    texts: Sequence[Sequence[int]],
    more: int,
    positions: torch.Tensor | None,
) -> tuple[GenerationCache, torch.Tensor]:
    """Read texts; return what is kept of them, with room for `more` tokens, and the hidden states at `positions`."""
    device = torch.device(job.device_type)
    cp = dims["cp"]
    tp = dims["tp"]
    unit = tp.size() * (2 * cp.size() if cp.size() > 1 else 1)
    length = max(map(len, texts))
    filled = length + -length % unit
    filled_texts = [[*text, *[0] * (filled - len(text))] for text in texts]
    tokens = torch.tensor(filled_texts, device=device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    capacity = filled // cp.size() + -(-more // cp.size())
    cache = GenerationCache(lengths, capacity, cp, tp)
    if job.attention is None:
        rows = torch.arange(filled, device=device)
        return cache, cache.read(model, tokens, rows, None, positions)
    # windows and sinks exist in planned attention only; on one rank the plan has one stage
    with context_parallel(
        cp,
        buffers=[tokens],
        buffer_seq_dims=[1],
        options=job.attention,
        sequences=len(texts),
        local_attention=True,
    ) as context:
        rows = rows_on(context.layout, cp.get_local_rank(), device)
        return cache, cache.read(model, tokens, rows, context.attention_plan, positions)
