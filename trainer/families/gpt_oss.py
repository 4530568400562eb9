"""What transformers calls gpt-oss; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import (
    FULL,
    SLIDING,
    HFDecoder,
    layer_kinds,
    read_balance,
    read_experts,
    read_windows,
    write_experts,
    write_windows,
)
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("gpt_oss")
_EXPERTS = "num_local_experts", "intermediate_size"


def _read(config: Entries) -> dict[str, Any]:
    """Windows are switched on by being there; by default every second layer has one, from the first on."""
    config.only("attention_bias", True)
    config.only("swiglu_alpha", 1.702)
    config.only("swiglu_limit", 7.0)
    window, windows = read_windows(config, [(SLIDING, FULL)[i % 2] for i in range(config.whole("num_hidden_layers"))])
    return {
        "attention_sinks": True,
        "attention_bias": True,
        "output_bias": True,
        "experts": read_experts(config, *_EXPERTS, biases=True, clamped=True),
        "router_aux_loss_coef": read_balance(config),
        "sliding_window": window,
        **layer_kinds(len(windows), window=windows),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    windows = write_windows(args)
    return {
        **write_experts(args, HF.architecture, *_EXPERTS),
        "router_aux_loss_coef": args.router_aux_loss_coef,
        "attention_bias": True,
        # transformers makes a mask of the window also where no layer has it.
        "sliding_window": windows["sliding_window"] or HF.defaults["sliding_window"],
        "layer_types": windows["layer_types"],
    }


HF = HFDecoder("gpt_oss", "GptOssForCausalLM", _read, _write, quantised=("mxfp4",))
