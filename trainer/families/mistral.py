"""What transformers calls Mistral 7B; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("mistral")


def _read(config: Entries) -> dict[str, Any]:
    """Without the entry all layers have a window of 4,096 tokens, with null none."""
    config.only("layer_types", None)
    without = config.content["sliding_window"] is None
    return {"sliding_window": None if without else config.whole("sliding_window")}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {"sliding_window": args.sliding_window}


HF = HFDecoder("mistral", "MistralForCausalLM", _read, _write)
