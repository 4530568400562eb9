"""Muon (Jordan et al., 2024; at scale arXiv 2502.16982): the momentum of a matrix, made orthogonal, is its update.

    m = lerp(m, g, 1 - momentum)                 on shards, as their gradients are
    u = lerp(g, m, momentum)                     with nesterov, else m
    X = newton_schulz(u)                         of whole matrices, each once in the job: `parallel/ownership.py`
    w = (1 - lr * weight_decay) w - lr * f X     f: by the shape of the matrix, see `rate_factor`

AdamW updates all other parameters. Ranks send data in the dtype of the products.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from longshard.sharding.ranges import Range
from longshard.sharding.tensors import local_part, wide
from trainer.components.rounding import Group, Rounding, add_state, store
from trainer.config.optimizer import Muon as Settings
from trainer.parallel.ownership import Matrix, Owners

_A = 3.4445
_B = -4.7750
_C = 2.0315
"""Coefficients of a quintic. Repeated, it brings all singular values near one (Jordan et al.)."""
_STEPS = 5
_LEAST = 1e-7

Block = tuple[Matrix, Range, Tensor]
"""See `Owners.give_back`."""


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices with about the singular vectors of x, and singular values of 0.7 to 1.2: (N, rows, columns).

    Args:
        x: Matrices, (N, rows, columns). The result has their dtype.
    """
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_LEAST)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def rate_factor(rows: int, columns: int, rule: str) -> float:
    """Return the factor of the learning rate for a matrix of this shape.

    Args:
        rows: Outputs of the matrix.
        columns: Inputs of the matrix.
        rule: "original" makes the change of an output's scale equal for all shapes; "match_rms_adamw" gives an update
            the root mean square of AdamW's updates, about 0.2 (arXiv 2502.16982).
    """
    if rule == "original":
        return max(1, rows / columns) ** 0.5
    return 0.2 * max(rows, columns) ** 0.5


class Muon(torch.optim.Optimizer):
    """Updates matrices as the module says. Another optimizer updates the other parameters.

    The groups and states of the other optimizer also belong to this one. A parameter without a gradient is updated with
    a gradient of zero.

    Args:
        groups: Groups of matrices, with `lr` and `weight_decay`.
        owners: Owners of these matrices, in the order of the groups.
        settings: Table `[muon]`.
        other: The other optimizer. None if all parameters are matrices.
        rounding: How values are stored in bfloat16.
        momenta: Dtype of stored momenta.
        fused: As in the other optimizer: the device can leave out an update, see `optimizer.mask_update`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        owners: Owners,
        settings: Settings,
        *,
        other: torch.optim.Optimizer | None,
        rounding: Rounding,
        momenta: torch.dtype,
        fused: bool,
    ) -> None:
        other_groups = [] if other is None else other.param_groups
        super().__init__([*({**group, "fused": fused} for group in groups), *other_groups], {})
        self.matrix_groups = self.param_groups[: len(groups)]
        self.other = other
        self._owners = owners
        self._settings = settings
        self._rounding = rounding
        self._momenta = momenta
        if other is not None:
            other.state = self.state

    def add_state(self) -> None:
        """Give matrices that were never updated their first state."""
        add_state(self, self.matrix_groups, ("momentum",), self._momenta)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters. A collective of the ranks that share them.

        If `found_inf` is 1, no parameter and no state changes.

        Args:
            closure: Not used.
        """
        self.add_state()
        is_skipped = getattr(self, "found_inf", None)
        # 0: the step must change nothing
        share = 1 if is_skipped is None else 1 - is_skipped.double()
        updates = [
            _Update(p, self.state[p], group)
            for group in self.matrix_groups
            for p in group["params"]
        ]
        for update in updates:
            self._advance(update, share)
        rounds = self._owners.rounds
        part = partial(self._part, updates)
        gathered = self._owners.gather(rounds[0], part) if rounds else None
        if self.other is not None:  # runs while the first matrices are sent
            if is_skipped is not None:
                self.other.found_inf = is_skipped
            self.other.step()
        returned = tuple
        for number, matrices in enumerate(rounds, 1):
            whole = gathered()
            if number < len(rounds):  # sent while this round is computed
                gathered = self._owners.gather(rounds[number], part)
            results = newton_schulz(whole) if len(whole) else whole
            before = returned
            returned = self._owners.give_back(matrices, results)
            self._change(updates, before(), share)
        self._change(updates, returned(), share)

    def _advance(self, update: "_Update", share: Tensor | int) -> None:
        """Move a momentum towards its gradient. If the step must change nothing, the gradient becomes 0 first.

        share: 0 if the step must change nothing, else 1. A tensor is not read by the host.
        """
        moved = wide(update.momentum)
        weight = 1 - self._settings.momentum
        if isinstance(share, Tensor):
            update.gradient = torch.where(share > 0, update.gradient, 0)
            weight = (weight * share).to(moved.dtype)
        update.step += share
        moved.lerp_(update.gradient.to(moved.dtype), weight)
        self._store(update, update.momentum, moved, first_row=0, bits_above=16)

    def _part(self, updates: Sequence["_Update"], number: int, rows: Range) -> Tensor:
        gradient = wide(updates[number].gradient[slice(*rows)])
        momentum = wide(updates[number].momentum[slice(*rows)])
        if not self._settings.nesterov:
            return momentum
        # weights of float64, momenta of bfloat16
        both = torch.promote_types(gradient.dtype, momentum.dtype)
        return gradient.to(both).lerp(momentum.to(both), self._settings.momentum)

    def _change(
        self, updates: Sequence["_Update"], blocks: Iterable[Block], share: Tensor | int
    ) -> None:
        for matrix, rows, block in blocks:
            update = updates[matrix.parameter]
            weights = update.weights[slice(*rows)]
            rate = update.group["lr"] * share
            factor = rate_factor(matrix.rows, matrix.columns, self._settings.lr_rule)
            changed = wide(weights).mul_(1 - rate * update.group["weight_decay"])
            changed.sub_(block.to(changed) * (rate * factor))
            self._store(update, weights, changed, first_row=rows[0], bits_above=0)

    def _store(
        self,
        update: "_Update",
        stored: Tensor,
        value: Tensor,
        *,
        first_row: int,
        bits_above: int,
    ) -> None:
        """Round `value` into `stored`, in place. If they are the same tensor, nothing happens.

        stored: rows of a shard. first_row: the number of their first row in the shard, which chooses the random bits.
        bits_above: number of low random bits of each element to skip, because the rounding of another tensor uses them.
        """
        if value is not stored:
            start = first_row * stored.shape[1]
            bits = self._rounding.bits(
                update.parameter, update.step, start, start + stored.numel()
            )
            store(
                stored, value, None if bits is None else bits.view(stored.shape) >> bits_above
            )


class _Update:
    """A parameter in a step: 2-D views of this rank's shards, (rows, columns).

    All dimensions except the last are rows.
    """

    def __init__(self, parameter: nn.Parameter, state: dict[str, Tensor], group: Group) -> None:
        self.parameter = parameter
        self.step = state["step"]
        self.group = group
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        shards = (local_part(x) for x in (parameter.detach(), gradient, state["momentum"]))
        self.weights, self.gradient, self.momentum = (
            x.view(x.shape[:-1].numel(), x.shape[-1]) for x in shards
        )
