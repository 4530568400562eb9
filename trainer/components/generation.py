"""Continue texts with a model, token by token, each new one by one forward of one token.

A prompt is read by the model's own forward, with planned attention where the job has it. Context-parallel ranks divide
its tokens as in training, and each keeps the keys and values of its own:

    head_tail, prompt of 8 on 2 ranks:   rank 0 keeps 0 1 6 7, then the tokens 8, 10, ...
                                         rank 1 keeps 2 3 4 5, then the tokens 9, 11, ...

A new token is computed by all of them alike. Each attends to what it keeps, and the partial results are merged by their
log-sum-exps, as those of a ring. Tensor-parallel ranks keep their own heads.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longshard.context.convolution import convolved
from longshard.context.execution.latent import absorbed
from longshard.context.execution.linear_chunks import one_token
from longshard.context.linear_attention import linear_attention
from longshard.context.regions import context_parallel
from longshard.sharding.exchange import all_gather, all_reduce
from longshard.sharding.placement import rows_on
from trainer.components.loss import whole_logits, whole_sequence
from trainer.config.errors import SharedConfigError
from trainer.job.record import ResolvedJob
from trainer.models.attention import InnerAttention
from trainer.models.decoder import rotated_until
from trainer.models.linear_attention import InnerLinearAttention
from trainer.models.short_convolution import InnerConvolution
from trainer.parallel.parallel_dims import ParallelDims

_PROMPT_PART = 256
"""Tokens of a prompt whose logits are in memory at once."""


class GenerationCache:
    """Keys and values, or latents, of attention, states of linear attention, and last inputs of short convolutions.

    lengths: (B,) tokens of each text so far; capacity: the most tokens that a rank keeps of one; cp, tp: the ranks that
    divide tokens and heads.
    """

    def __init__(
        self, lengths: torch.Tensor, capacity: int, cp: DeviceMesh, tp: DeviceMesh
    ) -> None:
        self.lengths = lengths.clone()
        self._capacity = capacity
        self._cp = cp
        self._tp = tp
        self._positions = torch.full((len(lengths), capacity), -1, device=lengths.device)
        """Of the kept tokens; -1: none, or what fills up a prompt."""
        self._used = self._runs = self._new = self._own_new = 0
        self._queries = self._rows = lengths
        self._kept: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        self._inputs: dict[nn.Module, torch.Tensor] = {}
        self._states: dict[nn.Module, torch.Tensor] = {}

    def read(
        self,
        model: nn.Module,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        plan: torch.Tensor | None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read this rank's tokens of the prompts, which are filled up at their ends; collective.

        tokens: (B, S), S as on every rank and divided by the size of `tp`; rows: (S,), their positions; plan: the
        handle of the open context, None without one; positions: (B, N), by default the last token of each text, N = 1
        -> the hidden states at the positions, (B, N, dim), the same on every rank.
        """
        self._rows = rows
        self._used = len(rows)
        self._positions[:, : self._used] = torch.where(rows < self.lengths[:, None], rows, -1)
        keep = {
            InnerAttention: self._keep_keys,
            InnerLinearAttention: self._keep_state,
            InnerConvolution: self._keep_inputs,
        }
        with _replaced(model, keep):
            hidden = model(tokens) if plan is None else model(tokens, attention_plan=plan)
        own = rows.chunk(self._tp.size())[self._tp.get_local_rank()]
        wanted = self.lengths[:, None] - 1 if positions is None else positions
        return all_reduce(self._rows_at(hidden, own, wanted), self._tp)

    def run(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of new tokens: (B, S) -> (B, S, dim), the same on every rank; collective.

        Tensor-parallel ranks divide the tokens, so they are filled up at their end. No token sees those behind it.
        """
        self._new = tokens.shape[1]
        self._own_new = (
            self._new if self._runs % self._cp.size() == self._cp.get_local_rank() else 0
        )
        filled = F.pad(tokens, (0, -self._new % self._tp.size()))
        self._queries = self.lengths[:, None] + torch.arange(
            filled.shape[1], device=tokens.device
        )
        self._positions[:, self._used : self._used + self._own_new] = self._queries[
            :, : self._own_new
        ]
        step = {
            InnerAttention: self._attend,
            InnerLinearAttention: self._change_state,
            InnerConvolution: self._convolve,
        }
        with _replaced(model, step):
            hidden = whole_sequence(model(filled, positions=self._queries), self._tp)[
                :, : self._new
            ]
        self.lengths += self._new
        self._used += self._own_new
        self._runs += 1
        return hidden

    def _rows_at(
        self, x: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return rows of x (B, S, C) by their positions (B, N), from whatever rank of `cp` has them: (B, N, C).

        rows: (S,), the positions of those that are here. Before a text there are zeros.
        """
        order = rows.argsort()
        places = torch.searchsorted(rows[order], positions).clamp(max=len(rows) - 1)
        here = order[places]
        found = x.gather(1, here.unsqueeze(-1).expand(-1, -1, x.shape[2]))
        found = torch.where((rows[here] == positions).unsqueeze(-1), found, 0)
        return all_reduce(found.contiguous(), self._cp)

    def _keep(
        self, module: nn.Module, k: torch.Tensor, v: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, ...]:
        """Keep keys and values, (B, K, S, D), behind the `first` ones, and return all of them."""
        if module not in self._kept:
            self._kept[module] = tuple(
                x.new_empty(*x.shape[:2], self._capacity, x.shape[3]) for x in (k, v)
            )
        end = first + k.shape[2]
        for kept, x in zip(self._kept[module], (k, v), strict=True):
            kept[:, :, first:end] = x
        return tuple(kept[:, :, :end] for kept in self._kept[module])

    def _keep_keys(
        self,
        module: nn.Module,
        forward: Callable,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **settings: Any,
    ) -> torch.Tensor:
        self._keep(module, k, v, 0)
        return forward(q, k, v, **settings)

    def _keep_inputs(
        self,
        module: nn.Module,
        forward: Callable,
        x: torch.Tensor,
        weight: torch.Tensor,
        **settings: Any,
    ) -> torch.Tensor:
        before = torch.arange(1 - weight.shape[2], 0, device=x.device)
        self._inputs[module] = self._rows_at(x, self._rows, self.lengths[:, None] + before)
        return forward(x, weight, **settings)

    def _keep_state(
        self,
        module: nn.Module,
        _: Callable,
        *inputs: torch.Tensor | None,
        scale: float,
        **settings: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the module over the prompts; what fills them up changes no state."""
        real = self._rows < self.lengths[:, None]
        q, *others = (
            None if x is None else x * real.view(*real.shape, *[1] * (x.ndim - 2))
            for x in inputs
        )
        out, _, last = linear_attention(q, *others, settings["plan"], None, scale)
        is_last = self._rows[-1] + 1 == len(self._rows) * self._cp.size()
        self._states[module] = all_reduce(last * is_last, self._cp)
        return out

    def _change_state(
        self,
        module: nn.Module,
        _: Callable,
        *inputs: torch.Tensor | None,
        scale: float,
        **settings: torch.Tensor | None,
    ) -> torch.Tensor:
        q, _, v, *_ = inputs
        dtype = torch.promote_types(v.dtype, torch.float32)
        state = self._states.get(module)
        if state is None:
            state = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3], dtype=dtype)
        out = torch.zeros_like(v)
        for t in range(self._new):
            state, out[:, t] = one_token(
                state, *(None if x is None else x[:, t] for x in inputs)
            )
        self._states[module] = state
        return out * scale

    def _attend(
        self,
        module: InnerAttention,
        _: Callable,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        plan: torch.Tensor | None = None,
        up: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Do what the module does, with the keys and values of all tokens so far; shapes as there."""
        keys, values = self._keep(
            module, k[:, :, : self._own_new], v[:, :, : self._own_new], self._used
        )
        dtype = torch.promote_types(q.dtype, torch.float32)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if up is not None:
            q, of_values = absorbed(q, keys, up)
            values = keys[..., : up.shape[2]]
        q = q.unflatten(1, (keys.shape[1], -1)).to(dtype)  # (B, K, G, S, D)
        scores = q @ keys.to(dtype)[:, :, None].mT * scale
        if module.softcap is not None:
            scores = module.softcap * torch.tanh(scores / module.softcap)
        seen = self._visible(keys.shape[2], module.sliding_window)[:, None, None]
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
        out = weights @ values.to(dtype)[:, :, None]
        parts = all_gather(torch.cat((out, scores.logsumexp(-1, keepdim=True)), -1), self._cp)
        totals = parts[..., -1:]  # (ranks, B, K, G, S, 1)
        if sinks is not None:
            logits = sinks.to(dtype).view(keys.shape[1], -1, 1, 1)
            totals = torch.cat((totals, logits.expand(1, *totals.shape[1:])))
        shares = totals.softmax(0)[: len(parts)]
        out = (shares * parts[..., :-1]).sum(0).flatten(1, 2)
        return (out if up is None else out @ of_values.to(dtype)).to(v.dtype)

    def _visible(self, kept: int, window: int | None) -> torch.Tensor:
        """Return which of the kept tokens each new token sees: (B, S, T)."""
        keys = self._positions[:, None, :kept]
        queries = self._queries[:, :, None]
        seen = (keys >= 0) & (keys <= queries)
        return seen if window is None else seen & (keys > queries - window)

    def _convolve(
        self,
        module: nn.Module,
        _: Callable,
        x: torch.Tensor,
        weight: torch.Tensor,
        **settings: Any,
    ) -> torch.Tensor:
        last = weight.shape[2] - 1
        before = self._inputs.get(module, x.new_zeros(x.shape[0], last, x.shape[2]))
        rows = torch.cat((before, x[:, : self._new]), 1)
        self._inputs[module] = rows[:, rows.shape[1] - last :]
        out = convolved(rows, weight, None, [(0, self._new)])
        return F.pad(out, (0, 0, 0, x.shape[1] - self._new))


@contextmanager
def _replaced(model: nn.Module, by_kind: Mapping[type, Callable]) -> Iterator[None]:
    """Let modules of some kinds run a function of (the module, its own forward, its arguments) inside."""
    modules = {
        module: run
        for module in model.modules()
        for kind, run in by_kind.items()
        if isinstance(module, kind)
    }
    before = {module: vars(module).get("forward") for module in modules}
    try:
        for module, run in modules.items():
            module.forward = partial(run, module, module.forward)
        yield
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward


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
    on_token: Callable[[int, int, torch.Tensor], bool | None] | None = None,
    on_prompt: Callable[[int, torch.Tensor], None] | None = None,
) -> list[list[int]]:
    """Return for each prompt, of one token at least, what the model writes after it: at most `tokens` tokens.

    A text ends before a token of `ends`. What is drawn for a prompt depends on `seed` and on its number, not on the
    other prompts. The model sees at most `training.seq_len` tokens: the older half of a longer text is dropped.
    on_token: called with the number of a prompt, each token when it is drawn, also one of `ends`, and the logits (V,)
    that it was drawn by; True ends the text, on all ranks.
    on_prompt: called with parts of the logits (B, N, V) of the tokens of the prompts, and the position of the first.

    Raises:
        SharedConfigError: on every rank, if logits are not numbers.
    """
    # the frequencies depend on the length of each text
    if len(prompts) > 1 and rotated_until(model, 1) < math.inf:
        one = partial(
            generate,
            model,
            job,
            dims,
            tokens=tokens,
            sampling=sampling,
            ends=ends,
            on_prompt=on_prompt,
        )
        return _one_by_one(one, prompts, seed, on_token)
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    texts = [list(prompt) for prompt in prompts]
    open_texts = list(range(len(prompts)))
    written: list[list[int]] = [[] for _ in prompts]
    most = min(job.config.training.seq_len, max(map(len, texts)) + tokens)
    reading = _logits(model, job, dims, texts, most, on_prompt)
    if on_prompt is not None and not tokens:
        next(reading)
    for _ in range(tokens):
        logits = next(reading)
        _check_numbers(logits)
        for i in tuple(open_texts):
            token = sampling.draw(logits[i], generators[i])
            stops = on_token is not None and on_token(i, token, logits[i])
            if token not in ends:
                written[i].append(token)
            if token in ends or stops:
                open_texts.remove(i)
        if not open_texts:
            break
        # an ended text continues with any token, which nobody reads
        for i, text in enumerate(texts):
            text.append(written[i][-1] if i in open_texts else text[-1])
    return written


def _check_numbers(logits: torch.Tensor) -> None:
    if logits.isnan().any():
        raise SharedConfigError(
            "the model's logits are not numbers, so its weights are damaged or diverged in training; `lct verify` "
            "checks a run's steps, and --step chooses an earlier one"
        )


def _one_by_one(
    generate_one: Callable[..., list[list[int]]],
    prompts: Sequence[Sequence[int]],
    seed: int,
    on_token: Callable[[int, int, torch.Tensor], bool | None] | None,
) -> list[list[int]]:
    """Continue each prompt alone, as `generate` does; its `on_prompt` gets the logits (1, N, V) of each in turn.

    generate_one: `generate`, which still takes prompts, seed and `on_token`.
    """
    found = []
    for number, prompt in enumerate(prompts):

        def tell(_: int, token: int, logits: torch.Tensor, number: int = number) -> bool | None:
            return None if on_token is None else on_token(number, token, logits)

        found += generate_one([prompt], seed=seed + number, on_token=tell)
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
    cp = dims["cp"]
    tp = dims["tp"]
    unit = tp.size() * (2 * cp.size() if cp.size() > 1 else 1)
    while True:
        read = [
            text[-longest:] if len(text) <= longest else text[-max(longest // 2, 1) :]
            for text in texts
        ]
        length = max(map(len, read))
        until = int(min(most, rotated_until(model, max(map(len, texts)))))
        filled = length + -length % unit
        tokens = torch.tensor(
            [text + [0] * (filled - len(text)) for text in read], device=device
        )
        capacity = filled // cp.size() + -(-(until - length) // cp.size())
        lengths = torch.tensor([len(text) for text in read], device=device)
        cache = GenerationCache(lengths, capacity, cp, tp)
        positions = (
            None
            if on_prompt is None
            else torch.arange(length, device=device).expand(len(texts), -1)
        )
        if job.attention is None:
            hidden = cache.read(
                model, tokens, torch.arange(filled, device=device), None, positions
            )
        else:
            # windows and sinks exist in planned attention only; on one rank the plan has one stage
            settings = {
                "buffer_seq_dims": [1],
                "options": job.attention,
                "sequences": len(texts),
            }
            settings["local_attention"] = True
            with context_parallel(cp, buffers=[tokens], **settings) as context:
                rows = rows_on(context.layout, cp.get_local_rank(), device)
                hidden = cache.read(model, tokens, rows, context.attention_plan, positions)
        if on_prompt is not None:
            for start in range(0, length, _PROMPT_PART):
                on_prompt(
                    start, whole_logits(model, hidden[:, start : start + _PROMPT_PART], tp)
                )
            hidden = hidden.gather(
                1, (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
            )
            on_prompt = None
        for written in range(until - length + 1):
            yield whole_logits(model, hidden, tp)[:, -1]
            if written < until - length:
                hidden = cache.run(
                    model, torch.tensor([text[-1:] for text in texts], device=device)
                )
        # The texts are full: read their younger half again. Or all of them, with frequencies for longer texts.
