"""Mixtures of experts of transformers: a random model of the shape of one of ours, computing wholly in float64."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from trainer.families.decoder_args import TransformerArgs
from trainer.families.registry import hf_config


def hf_experts(family: str, args: TransformerArgs) -> nn.Module:
    """A random model of the same shape, in float64; norms, biases and sinks are random, too."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    entries = hf_config(family).write(args)
    config = transformers.AutoConfig.for_model(**entries)
    attention = "eager" if args.attention_sinks else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
    model.set_experts_implementation("eager")  # the other ones know no float64
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        one = 1.0 if "norm" in name else 0.0
        nn.init.normal_(parameter, one, 0.5 if parameter.ndim == 1 else 0.2, generator=generator)
    return model.eval()


@contextmanager
def in_float64(model: nn.Module, angles: torch.Tensor, scale: float = 1.0) -> Iterator[None]:
    """Inside, the model normalises, rotates and routes in float64, where it says float32 of itself.

    angles: (S, D / 2), of the rotary table, which is multiplied by `scale`.
    """

    def normalise(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    def route(self: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(x.flatten(0, -2), self.weight, getattr(self, "bias", None))
        weights, chosen = logits.softmax(-1).topk(self.top_k)
        if getattr(self, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    kinds = {type(module).__name__: type(module) for module in model.modules()}
    halves = angles if "GptOssForCausalLM" in kinds else torch.cat((angles, angles), -1)
    table = scale * halves.cos()[None], scale * halves.sin()[None]
    forwards = {"RMSNorm": normalise, "TopKRouter": route, "RotaryEmbedding": lambda *_args, **_named: table}
    with ExitStack() as patches:
        for ending, forward in forwards.items():
            (kind,) = (kind for name, kind in kinds.items() if name.endswith(ending))
            patches.enter_context(mock.patch.object(kind, "forward", forward))
        yield
