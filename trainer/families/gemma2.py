"""What transformers calls Gemma 2; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import (
    FULL,
    SLIDING,
    HFDecoder,
    layer_kinds,
    read_windows,
    write_windows,
)
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("gemma2")
ACTIVATION = "hidden_activation", "gelu_pytorch_tanh"


def read(config: Entries) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 share."""
    config.only("use_bidirectional_attention", False)
    biases, dim, scalar = config.switch("attention_bias"), config.whole("hidden_size"), "query_pre_attn_scalar"
    softcap, head_dim = "final_logit_softcapping", config.whole("head_dim")
    return {
        "norm_place": "around",
        "norm_offset": True,
        "activation": "gelu_tanh",
        "embedding_scale": dim**0.5,
        "attention_scale": None if config.whole(scalar) == head_dim else config.whole(scalar) ** -0.5,
        "logits_softcap": None if config.content.get(softcap) is None else float(config.number(softcap)),
        "attention_bias": biases,
        "output_bias": biases,
    }


def write(args: TransformerArgs) -> dict[str, Any]:
    """Return the entries that `read` reads, and those of windows."""
    scale = args.attention_scale
    return {
        "attention_bias": args.attention_bias,
        "query_pre_attn_scalar": args.head_dim if scale is None else round(scale**-2),
        "final_logit_softcapping": args.logits_softcap,
        **write_windows(args),
        # transformers makes a mask of the window also where no layer has it.
        "sliding_window": args.sliding_window or HF.defaults["sliding_window"],
    }


def _read(config: Entries) -> dict[str, Any]:
    """By default every second layer has a window, from the first on."""
    n_layers, softcap = config.whole("num_hidden_layers"), "attn_logit_softcapping"
    window, windows = read_windows(config, [(SLIDING, FULL)[i % 2] for i in range(n_layers)])
    return read(config) | {
        "attention_softcap": None if config.content.get(softcap) is None else float(config.number(softcap)),
        "sliding_window": window,
        **layer_kinds(n_layers, window=windows),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    return write(args) | {"attn_logit_softcapping": args.attention_softcap}


HF = HFDecoder("gemma2", "Gemma2ForCausalLM", _read, _write, activation=ACTIVATION)
