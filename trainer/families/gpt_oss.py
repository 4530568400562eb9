"""What transformers calls gpt-oss; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.args import ExpertArgs
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import (
    FULL,
    SLIDING,
    HFDecoder,
    experts_to_write,
    layer_kinds,
    read_balance,
    read_windows,
    write_windows,
)
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("gpt_oss")


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
        "experts": ExpertArgs(
            config.whole("num_local_experts"),
            config.whole("num_experts_per_tok"),
            config.whole("intermediate_size"),
            biases=True,
            clamped=True,
        ),
        "router_aux_loss_coef": read_balance(config),
        "sliding_window": window,
        **layer_kinds(len(windows), window=windows),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    experts, windows = experts_to_write(args, HF.architecture), write_windows(args)
    return {
        "intermediate_size": experts.hidden_dim,
        "num_local_experts": experts.number,
        "num_experts_per_tok": experts.per_token,
        "router_aux_loss_coef": args.router_aux_loss_coef,
        "attention_bias": True,
        # transformers makes a mask of the window also where no layer has it.
        "sliding_window": windows["sliding_window"] or HF.defaults["sliding_window"],
        "layer_types": windows["layer_types"],
    }


HF = HFDecoder("gpt_oss", "GptOssForCausalLM", _read, _write, quantised=("mxfp4",))
