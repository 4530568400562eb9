"""What transformers calls the dense Qwen3 models; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, read_windows, write_windows
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("qwen3")


def _read(config: Entries) -> dict[str, Any]:
    """One switch is for all biases of attention."""
    biases = config.switch("attention_bias")
    return {"qk_norm": True, "attention_bias": biases, "output_bias": biases, **read_windows(config)}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias, **write_windows(args)}


HF = HFDecoder("qwen3", "Qwen3ForCausalLM", _read, _write)
