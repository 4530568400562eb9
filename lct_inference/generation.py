"""Continue texts with a model. Each new token takes one forward of one token."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lct_inference.generation_cache import GenerationCache
from longshard.context.regions import context_parallel
from longshard.sharding.placement import rows_on
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

    Attributes:
        temperature: 0 takes the likeliest token; 1 draws by the model's probabilities.
        top_k: Draw from the k likeliest tokens; 0: from all tokens.
        top_p: Draw from the fewest likeliest tokens that together have this probability (arXiv 1904.09751); 0: from
            one.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw a token by its logits; at temperature 0 take the likeliest one.

        Args:
            logits: (V,).
            generator: The source of random numbers, on the CPU. Not used at temperature 0.

        Returns:
            The id of the token.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        # with a tiny temperature, too, the largest logit stays finite
        below = logits.double() - logits.max()
        chances, tokens = (
            torch.softmax(below / self.temperature, 0).cpu().sort(descending=True, stable=True)
        )
        if self.top_k:
            chances[self.top_k :] = 0
        unlikely = chances.cumsum(0) - chances >= self.top_p * chances.sum()
        unlikely[0] = False  # with top_p = 0, too
        chances[unlikely] = 0
        return int(tokens[torch.multinomial(chances, 1, generator=generator)])


@dataclass(frozen=True)
class Writing:
    """How texts are continued."""

    tokens: int
    """Largest number of tokens that are written to each text."""
    sampling: Sampling
    seed: int
    """The tokens of a prompt depend on the seed and on the number of the prompt, not on the other prompts."""
    ends: Collection[int] = ()
    """A text ends before one of these tokens."""
    on_token: Callable[[int, int, Tensor], bool | None] | None = None
    """Called for each drawn token, also for a token of `ends`, with the number of the prompt, the token and its logits,
    (V,). If it returns True, the text ends, on all ranks."""
    on_prompt: Callable[[int, Tensor], None] | None = None
    """Called with the position of the first token of a part of the prompts, and the logits (B, N, V) of the part."""


@torch.no_grad()
def generate(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    prompts: Sequence[Sequence[int]],
    how: Writing,
) -> list[list[int]]:
    """Return for each prompt the tokens that the model writes after it, without a token that ends it. A collective.

    The model sees at most `training.seq_len` tokens: the older half of a longer text is dropped.

    Args:
        model: The model.
        job: The resolved job.
        dims: The meshes of the run.
        prompts: Prompts of at least one token.
        how: How texts are continued.

    Raises:
        SharedConfigError: On every rank, if logits are not numbers.
    """
    if len(prompts) > 1 and rotated_until(model, 1) < math.inf:
        return _one_by_one(model, job, dims, prompts, how)
    texts = [list(prompt) for prompt in prompts]
    most = min(job.config.training.seq_len, max(map(len, texts)) + how.tokens)
    reading = _logits(model, job, dims, texts, most, how.on_prompt)
    if how.on_prompt is not None and not how.tokens:
        next(reading)
    generators = [torch.Generator().manual_seed(how.seed + i) for i in range(len(prompts))]
    open_texts = list(range(len(prompts)))
    written = [[] for _ in prompts]
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
        for i, text in enumerate(texts):  # an ended text gets any token, which nobody reads
            text.append(written[i][-1] if i in open_texts else text[-1])
    return written


def _one_by_one(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    prompts: Sequence[Sequence[int]],
    how: Writing,
) -> list[list[int]]:
    """Continue each prompt alone, as `generate` does, because the frequencies depend on the length of each text.

    `on_prompt` gets the logits, (1, N, V), of each prompt in turn.
    """
    written = []
    for number, prompt in enumerate(prompts):

        def on_token(_: int, token: int, logits: Tensor, number: int = number) -> bool | None:
            return None if how.on_token is None else how.on_token(number, token, logits)

        alone = replace(how, seed=how.seed + number, on_token=on_token)
        written += generate(model, job, dims, [prompt], alone)
    return written


def _logits(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    texts: list[list[int]],
    most: int,
    on_prompt: Callable[[int, Tensor], None] | None = None,
) -> Iterator[Tensor]:
    """Yield the logits of the token after each text, (B, V).

    Between two yields, the caller adds a token to each text. The cache holds up to `most` tokens of a text.

    on_prompt: see `Writing`; called when the texts are read for the first time.
    """
    longest = job.config.training.seq_len
    device = torch.device(job.device_type)
    tp = dims["tp"]
    while True:
        read = [
            text if len(text) <= longest else text[-max(longest // 2, 1) :] for text in texts
        ]
        length = max(map(len, read))
        until = int(min(most, rotated_until(model, max(map(len, texts)))))
        positions = None
        if on_prompt is not None:
            positions = torch.arange(length, device=device).expand(len(texts), -1)
        cache, hidden = _read(model, job, dims, read, until - length, positions)
        if on_prompt is not None:
            for start in range(0, length, _PROMPT_PART):
                part = hidden[:, start : start + _PROMPT_PART]
                on_prompt(start, whole_logits(model, part, tp))
            last = (cache.lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
            hidden = hidden.gather(1, last)
            on_prompt = None
        for written in range(until - length + 1):
            yield whole_logits(model, hidden, tp)[:, -1]
            if written < until - length:
                newest = torch.tensor([text[-1:] for text in texts], device=device)
                hidden = cache.run(model, newest)
        # Either the texts are full: read their newer half again. Or read them whole, with frequencies for longer texts.


def _read(
    model: nn.Module,
    job: ResolvedJob,
    dims: ParallelDims,
    texts: Sequence[Sequence[int]],
    new_tokens: int,
    positions: Tensor | None,
) -> tuple[GenerationCache, Tensor]:
    """Read texts; return the cache, with room for `new_tokens` tokens, and the hidden states, (B, N, dim).

    positions: The positions of the hidden states, (B, N); None for the last token of each text.
    """
    device = torch.device(job.device_type)
    cp = dims["cp"]
    tp = dims["tp"]
    unit = tp.size() * (2 * cp.size() if cp.size() > 1 else 1)
    length = max(map(len, texts))
    filled = length + -length % unit
    filled_texts = [[*text, *[0] * (filled - len(text))] for text in texts]
    tokens = torch.tensor(filled_texts, device=device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    capacity = filled // cp.size() + -(-new_tokens // cp.size())
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
