"""The optimizer: which parameters decay, and how fast the step runs."""

from collections.abc import Iterable

import torch
from torch import nn

from trainer.config.schema import Optimizer

_CLASSES = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that were never updated the state that Adam's first step would start from."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                device = parameter.device if group["fused"] else "cpu"
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }


def build_optimizer(model_parts: Iterable[nn.Module], config: Optimizer) -> torch.optim.Optimizer:
    """AdamW or Adam over the parameters of all model_parts of a model; norms and embeddings (also a tied output) do not
    decay."""
    whole = nn.ModuleList(model_parts)
    embeddings = {m.weight for m in whole.modules() if isinstance(m, nn.Embedding)}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in whole.parameters():
        (decaying if parameter.ndim > 1 and parameter not in embeddings else others).append(parameter)
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return _CLASSES[config.name](
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=config.implementation == "foreach",
        fused=config.implementation == "fused",
    )
