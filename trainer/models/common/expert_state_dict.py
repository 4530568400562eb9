"""Names and layouts of experts at Hugging Face.

Qwen's have a tensor for each expert and matrix. gpt-oss has stacked and transposed ones, with the rows of gates and of
what they multiply in turn.
"""

import torch

from trainer.models.common.expert_args import ExpertArgs
from trainer.models.model_spec import Counterpart


def expert_counterpart(experts: ExpertArgs, layer: str, part: str) -> Counterpart | None:
    """Return the counterpart of a tensor of `MoE`, such as `experts.w13`; None: a buffer, which there is not."""
    mlp = f"model.layers.{layer}.mlp"
    if part in ("router.load", "router.selection_bias"):
        return None
    if part.startswith("router.gate."):
        return Counterpart(f"{mlp}.{'router' if experts.biases else 'gate'}.{part.removeprefix('router.gate.')}")
    if experts.biases:
        return _OF_GPT_OSS[part](f"{mlp}.experts.")
    names = {"experts.w13": ("gate_proj", "up_proj"), "experts.w2": ("down_proj",)}[part]
    rows = (tuple(f"{mlp}.experts.{expert}.{name}.weight" for name in names) for expert in range(experts.number))
    return Counterpart(stacked=tuple(rows))


def _in_turn(x: torch.Tensor) -> torch.Tensor:
    """(E, 2 * hidden, ...): rows of the first and of the second half in turn."""
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _in_halves(x: torch.Tensor) -> torch.Tensor:
    """Undo `_in_turn`."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


_OF_GPT_OSS = {
    "experts.w13": lambda prefix: Counterpart(
        f"{prefix}gate_up_proj", lambda x: _in_turn(x).mT, lambda x: _in_halves(x.mT), keeps_rows=True
    ),
    "experts.b13": lambda prefix: Counterpart(f"{prefix}gate_up_proj_bias", _in_turn, _in_halves, keeps_rows=True),
    "experts.w2": lambda prefix: Counterpart(f"{prefix}down_proj", _transposed, _transposed, keeps_rows=True),
    "experts.b2": lambda prefix: Counterpart(f"{prefix}down_proj_bias"),
}
