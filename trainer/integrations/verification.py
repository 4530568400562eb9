"""One step of a model under context parallelism against one process: a table of what was verified and what differs."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from trainer.distributed.context_parallel.context import context_parallel
from trainer.distributed.context_parallel.planning.options import ContextParallelError
from trainer.distributed.sharding.exchange import all_gather, all_reduce
from trainer.integrations.inspection import is_model, window_of
from trainer.integrations.interception import intercept_sdpa

_WORST = 8  # parameters that differ and are named
Call = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One line of the table: what was compared, the result, and the numbers."""

    what: str
    result: Literal["equal", "DIFFERS", "REFUSED", "not seen"]
    detail: str


@dataclass(frozen=True)
class Verification:
    """What `check_model` found."""

    rows: tuple[Row, ...]

    @property
    def holds(self) -> bool:
        """Whether everything that was compared is equal to one process."""
        return all(row.result in ("equal", "not seen") for row in self.rows)

    def __str__(self) -> str:
        width = max(len(row.what) for row in self.rows)
        return "\n".join(f"{row.what:{width}}  {row.result:8}  {row.detail}" for row in self.rows)


def call_model(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits (B, S, V) of tokens (B, S): of a model of transformers, or of `model(tokens, positions)`."""
    if not is_model(model):
        return model(tokens, positions)
    ones = torch.ones_like(tokens)
    return model(input_ids=tokens, position_ids=positions, attention_mask=ones, use_cache=False).logits


def check_model(
    model: nn.Module,
    mesh: DeviceMesh,
    tokens: torch.Tensor,
    *,
    call: Call = call_model,
    tolerance: float = 1e-5,
    method: str = "ring",
    load_balancer: str = "auto",
    allow_modules: Sequence[type | str] = (),
) -> Verification:
    """Compare logits, loss and every gradient of one step over the ranks of a mesh with one process. A collective.

    model: with the same weights on every rank, best in float64; copies of it run, without dropout. tokens: (B, S + 1)
    ids, alike on every rank; each token's label is the next one. call: returns logits (B, S, V) of the tokens and their
    positions. A model of transformers runs over the ranks with the attention that it has; on one process it has `sdpa`
    in place of "context_parallel", or `eager` if it knows no other. tolerance: of relative errors.

    A model that cannot be context parallel is a row of the result that says why.
    """
    alone, spread = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    _use_own_attention(alone)
    text, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    positions = torch.arange(text.shape[1], device=text.device).expand_as(text).clone()
    whole, count = call(alone, text, positions), labels.numel()
    wanted = _loss(whole, labels, count)
    wanted.backward()
    settings = {"method": method, "load_balancer": load_balancer}
    intercept = intercept_sdpa(spread, allow_modules=allow_modules)
    buffers = [text, labels, positions]
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 3, intercept=intercept, **settings) as cp:
            logits = call(spread, text, positions)
            loss = _loss(logits, labels, count)
            loss.backward()
    except ContextParallelError as error:
        return Verification((Row("the model", "REFUSED", str(error)),))
    mine = torch.from_numpy(cp.layout.indices(mesh.get_local_rank())).to(text.device)
    of_ranks = all_gather(_relative(logits.detach(), whole.detach()[:, mine]).reshape(1), mesh)
    total = all_reduce(loss.detach().clone().reshape(1), mesh, "sum")
    rows = [
        Row(
            "attention",
            "equal",
            f"{cp.live.calls} calls ran over {mesh.size()} ranks by {method}, {cp.live.options.balancer}",
        ),
        _row("logits", of_ranks.max(), tolerance, f"shape {tuple(whole.shape)}"),
        _row("loss", _relative(total, wanted.detach()), tolerance, f"{wanted.item():.6f} on one process"),
        *_gradients(spread, alone, mesh, tolerance),
        *_unseen(model, text.shape[1]),
    ]
    return Verification(tuple(rows))


def _gradients(spread: nn.Module, alone: nn.Module, mesh: DeviceMesh, tolerance: float) -> list[Row]:
    """Return a row for all parameters, one for each of the worst that differ, and one for those without a gradient."""
    errors, without = {}, []
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    floor = max((x.norm().item() for x in wanted.values() if x is not None), default=0.0) * 1e-12
    for name, p in spread.named_parameters():
        sums = all_reduce(torch.zeros_like(p) if p.grad is None else p.grad.clone(), mesh, "sum")
        if wanted[name] is None and not sums.any():
            without.append(name)
            continue
        one = torch.zeros_like(p) if wanted[name] is None else wanted[name]
        errors[name] = ((sums - one).norm() / one.norm().clamp(min=floor)).item()
    if not errors:
        return [Row("gradients", "DIFFERS", "no parameter has one")]
    worst = sorted(errors, key=errors.__getitem__, reverse=True)
    rows = [_row("gradients", errors[worst[0]], tolerance, f"the worst of {len(errors)}: {worst[0]}")]
    wrong = [name for name in worst if not errors[name] <= tolerance]
    rows += [_row(f"  {name}", errors[name], tolerance, "") for name in wrong[:_WORST]]
    if len(wrong) > _WORST:
        rows.append(Row("  others", "DIFFERS", f"{len(wrong) - _WORST} more differ"))
    if without:
        rows.append(Row("no gradient", "not seen", f"{len(without)} parameters had none, among them {without[0]}"))
    return rows


def _unseen(model: nn.Module, seq_len: int) -> list[Row]:
    """Return rows for what this step could not show."""
    rows = []
    windows = [window_of(module.config) for module in model.modules() if is_model(module)]
    longest = max((window for window in windows if window), default=0)
    if longest >= seq_len:
        rows.append(
            Row("windows", "not seen", f"a window of {longest} hides nothing of {seq_len} tokens; give more tokens")
        )
    if dropouts := sum(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        rows.append(Row("dropout", "not seen", f"{dropouts} modules, switched off here; each rank draws its own"))
    return rows


def _row(what: str, error: torch.Tensor | float, tolerance: float, detail: str) -> Row:
    return Row(what, "equal" if error <= tolerance else "DIFFERS", f"{float(error):.1e}  {detail}".rstrip())


def _relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).norm() / b.norm()


def _use_own_attention(model: nn.Module) -> None:
    """Give a model of transformers an attention that runs on one process."""
    if is_model(model) and (model.config._attn_implementation or "") not in ("sdpa", "eager"):
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:
            model.set_attn_implementation("eager")


def _loss(logits: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
