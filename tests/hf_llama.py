"""Llama of transformers: a random model of the same shape as one of ours, and its own arithmetic in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from trainer.models.common.decoder_args import TransformerArgs


def hf_llama(args: TransformerArgs) -> LlamaForCausalLM:
    """A random model of the same shape, in float64; its norms are random, too."""
    rope = {"rope_theta": args.rope_theta, "rope_type": "default"}
    if (scaling := args.rope_scaling) is not None:
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor}
        rope |= {"high_freq_factor": scaling.high_freq_factor}
        rope |= {"original_max_position_embeddings": scaling.original_max_seq_len}
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.ffn_hidden_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        max_position_embeddings=args.max_seq_len,
        rms_norm_eps=args.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=args.tie_embeddings,
        attn_implementation="sdpa",
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).to(torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5, 0.3)
    return model


@contextmanager
def in_float64(angles: torch.Tensor) -> Iterator[None]:
    """Inside, Llama of transformers also normalises and rotates in float64, where it says float32 of itself."""

    def normalise(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    table = angles.cos()[None], angles.sin()[None]
    with (
        mock.patch.object(modeling_llama.LlamaRMSNorm, "forward", normalise),
        mock.patch.object(modeling_llama.LlamaRotaryEmbedding, "forward", return_value=table),
    ):
        yield
