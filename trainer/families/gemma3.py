"""What transformers calls Gemma 3, its models of text; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families import gemma2
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import FULL, SLIDING, HFDecoder, read_local_layers, read_windows, two_tables
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("gemma3")


def _read(config: Entries) -> dict[str, Any]:
    """By default every sixth layer has no window, and other rotary frequencies."""
    config.only("attn_logit_softcapping", None)
    n_layers, every = config.whole("num_hidden_layers"), config.whole("sliding_window_pattern", 6)
    windows = read_windows(config, [SLIDING if (i + 1) % every else FULL for i in range(n_layers)])
    local = read_local_layers(config, *windows, 10000.0, "rope_local_base_freq")
    return gemma2.read(config) | {"qk_norm": True, **local}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return gemma2.write(args) | two_tables(args)


HF = HFDecoder("gemma3_text", "Gemma3ForCausalLM", _read, _write, activation=gemma2.ACTIVATION)
