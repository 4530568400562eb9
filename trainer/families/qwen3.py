"""What transformers calls the dense Qwen3 models; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, layer_kinds, read_switched_windows, write_switched_windows
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("qwen3")


def _read(config: Entries) -> dict[str, Any]:
    """One switch is for all biases of attention."""
    biases = config.switch("attention_bias")
    window, windows = read_switched_windows(config)
    layers = {"sliding_window": window, **layer_kinds(len(windows), window=windows)}
    return {"qk_norm": True, "attention_bias": biases, "output_bias": biases, **layers}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias, **write_switched_windows(args)}


HF = HFDecoder("qwen3", "Qwen3ForCausalLM", _read, _write)
