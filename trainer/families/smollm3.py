"""What transformers calls SmolLM3; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import FULL, SLIDING, HFDecoder, layer_kinds, read_windows, write_windows
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("smollm3")


def _read(config: Entries) -> dict[str, Any]:
    """By default every fourth layer rotates nothing; windows, if they are switched on, are of these layers."""
    config.only("mlp_bias", False)
    n_layers, key = config.whole("num_hidden_layers"), "no_rope_layers"
    step = config.whole("no_rope_layer_interval", 4)
    rotated = config.content.get(key)
    rotated = [int((i + 1) % step != 0) for i in range(n_layers)] if rotated is None else rotated
    if not isinstance(rotated, list) or len(rotated) < n_layers or any(x not in (0, 1) for x in rotated):
        raise ConfigError(f"{config.file}: {key} = {rotated!r} must have a 0 or a 1 for each of {n_layers} layers")
    switch = config.switch("use_sliding_window") and config.content.get("sliding_window") is not None
    window, windows = read_windows(config, [SLIDING if switch and not rotated[i] else FULL for i in range(n_layers)])
    if window is not None and not switch:
        raise ConfigError(f"{config.file}: layer_types has windows, and needs use_sliding_window and sliding_window")
    biases = config.switch("attention_bias")
    return {
        "attention_bias": biases,
        "output_bias": biases,
        "sliding_window": window,
        **layer_kinds(n_layers, rope=[bool(x) for x in rotated], window=windows),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {
        "attention_bias": args.attention_bias,
        "mlp_bias": False,
        "no_rope_layers": [int(args.layer(layer).rope) for layer in range(args.n_layers)],
        "use_sliding_window": args.sliding_window is not None,
        **write_windows(args),
    }


HF = HFDecoder("smollm3", "SmolLM3ForCausalLM", _read, _write)
