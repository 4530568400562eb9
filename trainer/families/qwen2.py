"""What transformers calls Qwen2 and Qwen2.5; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import sizes
from trainer.families.decoder_config_json import HFDecoder, layer_kinds, read_switched_windows, write_switched_windows
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("qwen2")


def _read(config: Entries) -> dict[str, Any]:
    """Queries, keys and values always have a bias."""
    window, windows = read_switched_windows(config)
    return {"attention_bias": True, "sliding_window": window, **layer_kinds(len(windows), window=windows)}


HF = HFDecoder("qwen2", "Qwen2ForCausalLM", _read, write_switched_windows)
