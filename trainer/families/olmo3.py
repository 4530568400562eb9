"""What transformers calls OLMo 3; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families import olmo2
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import (
    FULL,
    SLIDING,
    HFDecoder,
    read_local_layers,
    read_windows,
    two_tables,
    write_windows,
)
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("olmo3")


def _read(config: Entries) -> dict[str, Any]:
    """By default every fourth layer has no window; scaling is for those alone."""
    n_layers = config.whole("num_hidden_layers")
    windows = read_windows(config, [FULL if i % 4 == 3 else SLIDING for i in range(n_layers)])
    return olmo2.read(config) | read_local_layers(config, *windows, 500000.0)


def _write(args: TransformerArgs) -> dict[str, Any]:
    entries = {"attention_bias": args.attention_bias, **write_windows(args), **two_tables(args)}
    # transformers makes a mask of the window also where no layer has it.
    return entries | {"sliding_window": args.sliding_window or HF.defaults["sliding_window"]}


HF = HFDecoder("olmo3", "Olmo3ForCausalLM", _read, _write)
