"""Continue texts with a model, token by token. Keys and values of earlier tokens are kept."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trainer.components.loss import whole_logits, whole_sequence
from trainer.config.errors import SharedConfigError
from trainer.distributed.context_parallel.context import context_parallel
from trainer.distributed.parallel_dims import ParallelDims
from trainer.job.record import ResolvedJob
from trainer.models.attention import InnerAttention
from trainer.models.short_convolution import ShortConvolution

_CHUNK = 256  # queries whose scores exist at once, when a prompt is read


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
        chances, tokens = torch.softmax(logits.double() / self.temperature, 0).cpu().sort(descending=True, stable=True)
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
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return for each prompt, of one token at least, what the model writes after it: at most `tokens` tokens.

    A text ends before a token of `ends`. What is drawn for a prompt depends on `seed` and on its number, not on the
    other prompts. The model sees at most `training.seq_len` tokens: the older half of a longer text is dropped.
    on_token: called with the number of a prompt and each token when it is written.

    Raises:
        SharedConfigError: on every rank, if logits are not numbers.
    """
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    texts, open_texts = [list(prompt) for prompt in prompts], list(range(len(prompts)))
    again = any(isinstance(m, ShortConvolution) for m in model.modules())
    written: list[list[int]] = [[] for _ in prompts]
    most = min(job.config.training.seq_len, max(map(len, texts)) + tokens)
    reading = _again(model, job, dims, texts) if again else _cached(model, job, dims, texts, most)
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
                if on_token is not None:
                    on_token(i, token)
        if not open_texts:
            break
        for i, text in enumerate(texts):  # an ended text continues with any token, which nobody reads
            text.append(written[i][-1] if i in open_texts else text[-1])
    return written


def _cached(
    model: nn.Module, job: ResolvedJob, dims: ParallelDims, texts: list[list[int]], most: int
) -> Iterator[torch.Tensor]:
    """Yield the logits (B, V) of the token after each of the texts, which grow by a token in between.

    most: tokens that the cache has room for.
    """
    longest, device = job.config.training.seq_len, torch.device(job.device_type)
    while True:
        read = [text[-longest:] if len(text) <= longest else text[-max(longest // 2, 1) :] for text in texts]
        length = max(map(len, read))
        padding = torch.tensor([length - len(text) for text in read], device=device)
        rows = [[0] * (length - len(text)) + text for text in read]
        cache = KeyValueCache(padding, most, dims["tp"])
        with cache.used_by(model):
            hidden = cache.run(model, torch.tensor(rows, device=device))
            while True:
                yield whole_logits(model, hidden[:, -1:], dims["tp"])[:, -1]
                if cache.length == most:
                    break  # read the younger half of the texts again
                hidden = cache.run(model, torch.tensor([text[-1:] for text in texts], device=device))


def _again(model: nn.Module, job: ResolvedJob, dims: ParallelDims, texts: list[list[int]]) -> Iterator[torch.Tensor]:
    """Do what `_cached` does and keep nothing: short convolutions read the tokens before."""
    longest, device = job.config.training.seq_len, torch.device(job.device_type)
    while True:
        rows = []
        for text in texts:
            read = text[-longest:]
            tokens = torch.tensor([[*read, *[0] * (-len(read) % dims.size("tp"))]], device=device)
            if job.attention is None:
                hidden = model(tokens)
            else:  # windows and sinks exist in planned attention only; on one rank the plan has one stage
                settings = {"buffers": [tokens], "buffer_seq_dims": [1], "options": job.attention, "sequences": 1}
                with context_parallel(dims["cp"], **settings) as cp:
                    hidden = model(tokens, attention_plan=cp.attention_plan)
            last = whole_sequence(hidden, dims["tp"])[:, len(read) - 1 : len(read)]
            rows.append(whole_logits(model, last, dims["tp"])[0, -1])
        yield torch.stack(rows)


class KeyValueCache:
    """Keys and values of the tokens so far, of all attention modules of a model, for the heads of this rank.

    padding: (B,) number of tokens before the first one of each text; capacity: the most tokens; tp: the ranks that
    divide the heads.
    """

    def __init__(self, padding: torch.Tensor, capacity: int, tp: DeviceMesh) -> None:
        self.length, self._padding, self._capacity, self._tp = 0, padding, capacity, tp
        self._kept: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def used_by(self, model: nn.Module) -> Iterator[None]:
        """Let the attention of the model use the cache inside."""
        modules = [module for module in model.modules() if isinstance(module, InnerAttention)]
        before = [vars(module).get("forward") for module in modules]
        try:
            for module in modules:
                module.forward = partial(self._attend, module)
            yield
        finally:
            for module, forward in zip(modules, before, strict=True):
                del module.forward
                if forward is not None:
                    module.forward = forward

    def run(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of new tokens (B, S), chunk by chunk, the last chunk's: (B, at most S, dim).

        Tensor-parallel ranks divide a chunk, so it is filled up at its end. No token sees those behind it, and their
        keys and values are overwritten by the next chunk.
        """
        for chunk in tokens.split(_CHUNK, dim=1):
            new = chunk.shape[1]
            filled = F.pad(chunk, (0, -new % self._tp.size()))
            places = torch.arange(self.length, self.length + filled.shape[1], device=tokens.device)
            positions = (places.clamp(max=self._capacity - 1) - self._padding[:, None]).clamp(min=0)
            hidden = whole_sequence(model(filled, positions=positions), self._tp)[:, :new]
            self.length += new
        return hidden

    def _attend(
        self,
        module: InnerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        plan: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do what the module does, with the keys and values of all tokens so far; shapes as there."""
        keys, values = self._with_new(module, k, v)
        b, _, new, d = q.shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        q = q.unflatten(1, (k.shape[1], -1)).to(dtype)  # (B, K, G, S, D)
        scores = q @ keys.to(dtype)[:, :, None].transpose(-1, -2) * (d**-0.5 if scale is None else scale)
        if module.softcap is not None:
            scores = module.softcap * torch.tanh(scores / module.softcap)
        scores = scores.masked_fill(~self._visible(new, module.sliding_window)[:, None, None], -torch.inf)
        if sinks is not None:
            logits = sinks.to(dtype).view(1, k.shape[1], -1, 1, 1).expand(b, -1, -1, new, 1)
            scores = torch.cat((scores, logits), dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[2]]
        return (weights @ values.to(dtype)[:, :, None]).flatten(1, 2).to(v.dtype)

    def _with_new(self, module: nn.Module, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep new keys and values, (B, K, S, D), and return all of them."""
        b, kv_heads, new, d = k.shape
        if module not in self._kept:
            most = self._capacity + self._tp.size() - 1  # including the padding of the last chunk
            self._kept[module] = k.new_empty(b, kv_heads, most, d), v.new_empty(b, kv_heads, most, d)
        end = self.length + new
        for kept, x in zip(self._kept[module], (k, v), strict=True):
            kept[:, :, self.length : end] = x
        return tuple(kept[:, :, :end] for kept in self._kept[module])

    def _visible(self, new: int, window: int | None) -> torch.Tensor:
        """Return which keys each new token sees: (B, S, T). A token before a text sees itself, so that it is finite."""
        end = self.length + new
        keys = torch.arange(end, device=self._padding.device)
        queries = keys[self.length :, None]
        seen = (keys <= queries) & (keys > queries - (window or end))
        return (seen & (keys >= self._padding[:, None, None])) | (keys == queries)
