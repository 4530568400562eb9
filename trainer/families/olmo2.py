"""What transformers calls OLMo 2; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("olmo2")


def read(config: Entries) -> dict[str, Any]:
    """Return the fields of OLMo 2: norms behind branches, and of all heads. One switch is for all biases."""
    biases = config.switch("attention_bias")
    norms = {"norm_place": "after", "qk_norm": True, "qk_norm_of_all_heads": True}
    return norms | {"attention_bias": biases, "output_bias": biases}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias}


HF = HFDecoder("olmo2", "Olmo2ForCausalLM", read, _write)
