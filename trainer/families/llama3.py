"""What transformers calls the Llama 3 family; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("llama3")


def _read(config: Entries) -> dict[str, Any]:
    """One switch is for all biases of attention."""
    config.only("mlp_bias", False)
    config.only("sliding_window", None)
    biases = config.switch("attention_bias")
    return {"attention_bias": biases, "output_bias": biases}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias, "mlp_bias": False}


HF = HFDecoder("llama", "LlamaForCausalLM", _read, _write)
