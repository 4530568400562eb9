"""What generation keeps of the texts so far, and how layers compute new tokens from it.

The model's own forward reads a prompt, with planned attention if the job has it. Context-parallel ranks divide the
tokens of a prompt as in training, and each rank keeps the keys and values of its own tokens:

    head_tail, prompt of 8 on 2 ranks:   rank 0 keeps 0 1 6 7, then the tokens 8, 10, ...
                                         rank 1 keeps 2 3 4 5, then the tokens 9, 11, ...

All ranks compute the same new token. Each rank attends to the tokens that it keeps, and the partial results are merged
by their log-sum-exps, as in a ring. Tensor-parallel ranks keep their own heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from longshard.context.convolution import convolved
from longshard.context.execution.latent import absorbed
from longshard.context.execution.linear_chunks import Tokens, one_token
from longshard.context.execution.sparse_rows import Index, highest, index_scores
from longshard.context.linear_attention import linear_attention
from longshard.sharding.exchange import all_gather, all_reduce
from longshard.sharding.tensors import wide_type
from trainer.components.loss import whole_sequence
from trainer.models.attention import InnerAttention
from trainer.models.cached import cached
from trainer.models.linear_attention import InnerLinearAttention
from trainer.models.short_convolution import InnerConvolution
from trainer.models.sparse_attention import InnerSparseAttention

_LINEAR_INPUTS = 5
"""Number of the first fields of `Tokens` that have a row for each token: q, k, v, log_decay and beta."""


class GenerationCache:
    """Keys and values, or latents, of attention, states of linear attention, and last inputs of short convolutions.

    Args:
        lengths: Tokens of each text so far, (B,).
        capacity: Largest number of tokens of a text that a rank keeps.
        cp: The ranks that divide the tokens.
        tp: The ranks that divide the heads.
    """

    def __init__(self, lengths: Tensor, capacity: int, cp: DeviceMesh, tp: DeviceMesh) -> None:
        self.lengths = lengths.clone()
        self._capacity = capacity
        self._cp = cp
        self._tp = tp
        self._positions = torch.full((len(lengths), capacity), -1, device=lengths.device)
        """Positions of the kept tokens; -1: no token, or padding of a prompt."""
        self._used = self._runs = self._new = self._own_new = 0
        self._queries = self._rows = lengths
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._inputs: dict[nn.Module, Tensor] = {}
        self._states: dict[nn.Module, Tensor] = {}

    def read(
        self,
        model: nn.Module,
        tokens: Tensor,
        rows: Tensor,
        plan: Tensor | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Read this rank's tokens of the prompts, which are padded at their ends. A collective.

        Args:
            model: The model.
            tokens: (B, S), S the same on every rank and a multiple of the size of `tp`.
            rows: Positions of the tokens, (S,).
            plan: Handle of the open context, any shape. None without a context.
            positions: (B, N), by default the last token of each text, N = 1.

        Returns:
            The hidden states at the positions, (B, N, dim), the same on every rank.
        """
        self._rows = rows
        self._own_new = len(rows)
        self._positions[:, : len(rows)] = torch.where(rows < self.lengths[:, None], rows, -1)
        keep = {
            InnerAttention: self._keep_keys,
            InnerSparseAttention: self._keep_index,
            InnerLinearAttention: self._keep_state,
            InnerConvolution: self._keep_inputs,
        }
        with cached(model, keep):
            hidden = model(tokens) if plan is None else model(tokens, attention_plan=plan)
        self._used = len(rows)
        own = rows.chunk(self._tp.size())[self._tp.get_local_rank()]
        wanted = self.lengths[:, None] - 1 if positions is None else positions
        return all_reduce(self._rows_at(hidden, own, wanted), self._tp)

    def run(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Return the hidden states of new tokens, (B, S, dim), the same on every rank. A collective.

        Tensor-parallel ranks divide the tokens, so the tokens are padded at their end. No token sees later tokens. The
        cache then has these tokens, too.

        Args:
            model: The model.
            tokens: (B, S), the same on every rank.
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
            InnerSparseAttention: self._attend_to_chosen,
            InnerLinearAttention: self._change_state,
            InnerConvolution: self._convolve,
        }
        with cached(model, step):
            hidden = whole_sequence(model(filled, positions=self._queries), self._tp)[
                :, : self._new
            ]
        self.lengths += self._new
        self._used += self._own_new
        self._runs += 1
        return hidden

    def _rows_at(self, x: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return rows of x, (B, S, C), at positions (B, N), from the rank of `cp` that has them: (B, N, C).

        rows: (S,), the positions of the rows on this rank. Positions before a text give zeros.
        """
        order = rows.argsort()
        places = torch.searchsorted(rows[order], positions).clamp(max=len(rows) - 1)
        here = order[places]
        local = x.gather(1, here.unsqueeze(-1).expand(-1, -1, x.shape[2]))
        local = torch.where((rows[here] == positions).unsqueeze(-1), local, 0)
        return all_reduce(local.contiguous(), self._cp)

    def _keep(self, module: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Keep this rank's new ones of the keys and values, (B, K, S, D), and return all kept ones, (B, K, T, D)."""
        if module not in self._kept:
            self._kept[module] = tuple(
                x.new_empty(*x.shape[:2], self._capacity, x.shape[3]) for x in (k, v)
            )
        end = self._used + self._own_new
        for kept, x in zip(self._kept[module], (k, v), strict=True):
            kept[:, :, self._used : end] = x[:, :, : self._own_new]
        return tuple(kept[:, :, :end] for kept in self._kept[module])

    def _keep_keys(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **settings: Any
    ) -> Tensor:
        self._keep(module, k, v)
        return module(q, k, v, **settings)

    def _keep_index(
        self, module: nn.Module, q: Tensor, latent: Tensor, index: Index, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        self._keep(module, latent, index.keys.unsqueeze(1))
        return module(q, latent, index, **settings)

    def _keep_inputs(
        self, module: nn.Module, x: Tensor, weight: Tensor, **settings: Any
    ) -> Tensor:
        before = torch.arange(1 - weight.shape[2], 0, device=x.device)
        self._inputs[module] = self._rows_at(x, self._rows, self.lengths[:, None] + before)
        return module(x, weight, **settings)

    def _keep_state(self, module: nn.Module, tokens: Tokens, plan: Tensor | None) -> Tensor:
        """Return the module's output for the prompts, and keep its state after them. Padding changes no state."""
        real = self._rows < self.lengths[:, None]
        inputs = (
            None if x is None else x * real.view(*real.shape, *[1] * (x.ndim - 2))
            for x in tokens[:_LINEAR_INPUTS]
        )
        out, _, last = linear_attention(Tokens(*inputs, None, tokens.scale), plan)
        is_last = self._rows[-1] + 1 == len(self._rows) * self._cp.size()
        self._states[module] = all_reduce(last * is_last, self._cp)
        return out

    def _change_state(self, module: nn.Module, tokens: Tokens, plan: Tensor | None) -> Tensor:
        """Return the output of new tokens, and change the state, token by token. Padded tokens have the output 0."""
        v = tokens.v
        state = self._states.get(module)
        if state is None:
            shape = (v.shape[0], v.shape[2], tokens.q.shape[3], v.shape[3])
            state = v.new_zeros(shape, dtype=wide_type(v.dtype))
        out = torch.zeros_like(v)
        for t in range(self._new):
            inputs = (None if x is None else x[:, t] for x in tokens[:_LINEAR_INPUTS])
            state, out[:, t] = one_token(state, *inputs)
        self._states[module] = state
        return out * tokens.scale

    def _attend(
        self,
        module: InnerAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        plan: Tensor | None = None,
        up: Tensor | None = None,
    ) -> Tensor:
        """Keep the new keys and values; attend to the keys and values of all tokens so far. Shapes as in the module."""
        kept = self._keep(module, k, v)
        seen = self._visible(kept[0].shape[2], module.sliding_window)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return self._attended(
            q, kept, seen, scale=scale, softcap=module.softcap, sinks=sinks, up=up
        )

    def _attend_to_chosen(
        self,
        module: InnerSparseAttention,
        q: Tensor,
        latent: Tensor,
        index: Index,
        *,
        up: Tensor,
        scale: float,
        **_settings: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend to the chosen ones of all tokens so far; shapes as in the module. The loss is 0."""
        latents, keys = self._keep(module, latent, index.keys.unsqueeze(1))
        seen = self._visible(latents.shape[2], None)
        scores = index_scores(index.queries, keys.squeeze(1), index.weights)
        scores = scores.masked_fill(~seen, -torch.inf)
        seen = seen & self._chosen(scores, module.per_query)
        out = self._attended(q, (latents, latents), seen, scale=scale, up=up)
        return out, out.new_zeros(out.shape[0], out.shape[2])

    def _chosen(self, scores: Tensor, per_query: int) -> Tensor:
        """Return whether each kept token is among the highest scores of all ranks: (B, S, T), bool. A collective.

        scores: (B, S, T), for this rank's kept tokens. Of equal scores the earlier tokens count. per_query: number of
        tokens to choose.
        """
        places = self._positions[:, None, : scores.shape[2]].clamp(min=0).expand_as(scores)
        tokens = self._capacity * self._cp.size()
        whole = scores.new_full((*scores.shape[:2], tokens), -torch.inf)
        whole.scatter_reduce_(
            -1, places, scores.nan_to_num(torch.inf, neginf=-torch.inf), "amax"
        )
        all_reduce(whole, self._cp, "max")
        numbers = torch.arange(whole.shape[2], device=scores.device).expand_as(whole)
        _, chosen = highest(whole, numbers, per_query)
        return (
            torch.zeros_like(whole, dtype=torch.bool)
            .scatter_(-1, chosen, True)
            .gather(-1, places)
        )

    def _attended(
        self,
        q: Tensor,
        kept: tuple[Tensor, ...],
        seen: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        up: Tensor | None = None,
    ) -> Tensor:
        """Return attention to the kept tokens of all ranks; shapes as in the module.

        A collective. kept: keys and values of this rank's tokens, (B, K, T, D). seen: (B, S, T), which of
        them a new token sees.
        """
        keys, values = kept
        dtype = wide_type(q.dtype)
        if up is not None:
            q, value_projection = absorbed(q, keys, up)
            values = keys[..., : up.shape[2]]
        q = q.unflatten(1, (keys.shape[1], -1)).to(dtype)  # (B, K, G, S, D)
        scores = q @ keys.to(dtype)[:, :, None].mT * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = seen[:, None, None]
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
        return (out if up is None else out @ value_projection.to(dtype)).to(keys.dtype)

    def _visible(self, kept: int, window: int | None) -> Tensor:
        """Return whether each new token sees each kept token of this rank: (B, S, T), bool."""
        keys = self._positions[:, None, :kept]
        queries = self._queries[:, :, None]
        seen = (keys >= 0) & (keys <= queries)
        return seen if window is None else seen & (keys > queries - window)

    def _convolve(
        self, module: nn.Module, x: Tensor, weight: Tensor, **settings: Any
    ) -> Tensor:
        last = weight.shape[2] - 1
        before = self._inputs.get(module, x.new_zeros(x.shape[0], last, x.shape[2]))
        rows = torch.cat((before, x[:, : self._new]), 1)
        self._inputs[module] = rows[:, rows.shape[1] - last :]
        out = convolved(rows, weight, None, [(0, self._new)])
        return F.pad(out, (0, 0, 0, x.shape[1] - self._new))
