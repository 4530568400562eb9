"""QK-clip: no attention logit stays above a bound (Kimi K2, arXiv 2507.20534).

S is the largest log-sum-exp of the logits of a head's queries in a step. If S is above `largest`, the head's queries
and keys are scaled after the update so that each logit is multiplied by largest / S. Kernels keep S for the backward:
it is the largest logit or more, by the logarithm of the number of keys at most.

    attention           keys x sqrt(f), f: least factor of the heads of a group; queries x the remaining part of f
    latent attention    keys and queries that are not rotated x sqrt(f), rotated queries x f: a head's own parts
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longshard.sharding.exchange import all_reduce
from longshard.sharding.tensors import local_part, wide_type
from trainer.models.attention import Attention
from trainer.models.latent_attention import LatentAttention
from trainer.observer import Observer, Positions
from trainer.parallel.ownership import rows_here
from trainer.parallel.parallel_dims import ParallelDims


class QKClip(Observer):
    """Scales the heads of these model parts after each step of the optimizer, by the log-sum-exps that `see` got in it.

    The heads of a tensor-parallel rank are on no other tensor-parallel rank; all other ranks see other tokens of the
    same heads.

    Args:
        model_parts: The model parts of this rank.
        optimizer: The optimizer, which gets a hook.
        dims: The meshes of the run.
        largest: Bound of the logits.
    """

    def __init__(
        self,
        model_parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        dims: ParallelDims,
        largest: float,
    ) -> None:
        self._dims = dims
        self._largest = largest
        self._layers = {
            int(n): layer.attention
            for part in model_parts
            for n, layer in part.layers.items()
            if isinstance(layer.attention, Attention | LatentAttention)
        }
        self._places = {layer: place for place, layer in enumerate(self._layers)}
        heads = max((layer.args.n_heads for layer in self._layers.values()), default=0)
        heads //= dims.size("tp")
        self._seen = dims.zeros(len(self._layers), heads).fill_(-torch.inf)
        self._rows: dict[nn.Parameter, Tensor] = {}
        """This rank's rows of each parameter, counted within its tensor-parallel rank; computed once."""
        # largest S of each head in the last step, and the factors
        self._last_step = torch.stack([self._seen, self._seen])
        optimizer.register_step_post_hook(
            lambda *_: self._clip(getattr(optimizer, "found_inf", None))
        )

    def start_step(self) -> None:
        """Forget the log-sum-exps of the last step."""
        self._seen.fill_(-torch.inf)

    def see(self, layer: int, lse: Tensor) -> None:
        """Take the log-sum-exp of the logits of some queries of a layer.

        Args:
            layer: Number of the layer.
            lse: (B, H, S).
        """
        if lse.numel() and layer in self._places:
            place = self._seen[self._places[layer]]
            torch.maximum(place, lse.amax((0, 2)).to(place.dtype), out=place)

    @torch.no_grad()
    def _clip(self, left_out: Tensor | None) -> None:
        """Scale heads whose largest logit is too large. A collective of data- and context-parallel ranks.

        left_out: 1 if the step has changed no weight; then no head is scaled.
        """
        seen = all_reduce(self._seen.clone(), self._dims["dp_cp"], "max")
        clips = seen > self._largest  # False for NaN
        if left_out is not None:
            clips = clips & (left_out == 0)
        factors = torch.where(clips, self._largest / seen, 1)
        self._last_step = torch.stack([seen, factors])
        for attention, head_factors in zip(self._layers.values(), factors, strict=True):
            for parameter, row_factors in _row_factors(attention, head_factors):
                self._scale(parameter, row_factors)

    def _scale(self, parameter: nn.Parameter, factors: Tensor) -> None:
        """Multiply the rows that this rank has. factors: factors of all rows of its tensor-parallel rank."""
        if parameter not in self._rows:
            ranges = [torch.arange(*part) for part in rows_here(parameter)]
            rows = torch.cat(ranges or [torch.arange(0)])
            rows = rows - self._dims.rank("tp") * len(factors)
            self._rows[parameter] = rows.to(factors.device)
        local = local_part(parameter)
        own = factors[self._rows[parameter]].view(-1, *[1] * (local.ndim - 1))
        local.mul_(own.to(local.device, wide_type(local.dtype)))

    def record(self, positions: Positions) -> dict[str, float]:
        """Return the last step's largest logit before clipping, and the number of clipped heads. A collective.

        Args:
            positions: Positions of the data streams; not used.
        """
        seen, factors = self._last_step
        dims = self._dims
        largest = all_reduce(
            torch.cat([seen.flatten(), seen.new_tensor([-torch.inf])]).amax(),
            dims["world"],
            "max",
        )
        clipped = all_reduce(all_reduce((factors < 1).sum(), dims["tp"]), dims["pp"])
        logit, heads = torch.stack([largest, clipped.to(largest)]).tolist()
        return {"attention_logit": logit, "clipped_heads": int(heads)}


def _row_factors(attention: nn.Module, factors: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters that make queries and keys, with the factor of each row of this tensor-parallel rank.

    factors: factors of the logits of its heads, (heads,). A head's factor is the product of its query's and its key's.
    """
    if isinstance(attention, LatentAttention):
        latent = attention.args.latent
        root = factors.sqrt()
        queries = _rows((latent.nope_dim, root), (latent.rope_dim, factors))
        keys = _rows((latent.nope_dim, root), (latent.value_dim, torch.ones_like(factors)))
        return [(attention.queries.weight, queries), (attention.wkv_b.weight, keys)]
    groups = factors.unflatten(0, (-1, attention.args.n_heads // attention.args.n_kv_heads))
    key_factors = groups.amin(1).sqrt()
    query_parts = [(attention.head_dim, (groups / key_factors[:, None]).flatten())]
    if attention.args.gate:
        query_parts.append((attention.head_dim, torch.ones_like(factors)))
    rows = {
        attention.wq: _rows(*query_parts),
        attention.wk: _rows((attention.head_dim, key_factors)),
    }
    return [
        (p, row_factors)
        for module, row_factors in rows.items()
        for p in (module.weight, module.bias)
        if p is not None
    ]


def _rows(*parts: tuple[int, Tensor]) -> Tensor:
    """Return the factor of each row: a head has the rows of all parts, (their number, factor of each head)."""
    return torch.cat(
        [factors[:, None].expand(-1, number) for number, factors in parts], 1
    ).flatten()
