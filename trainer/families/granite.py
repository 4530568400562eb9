"""What transformers calls Granite 3, its dense models; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("granite")
_SCALARS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logits_divisor",
    "attention_multiplier": "attention_scale",
}


def _read(config: Entries) -> dict[str, Any]:
    """Each of the four scalars is one where the file has none."""
    config.only("mlp_bias", False)
    biases = config.switch("attention_bias")
    scalars = {field: float(config.number(key, 1.0)) for key, field in _SCALARS.items()}
    return {"attention_bias": biases, "output_bias": biases, **scalars}


def _write(args: TransformerArgs) -> dict[str, Any]:
    scalars = {key: getattr(args, field) for key, field in _SCALARS.items()}
    if scalars["attention_multiplier"] is None:
        scalars["attention_multiplier"] = args.head_dim**-0.5
    return {"attention_bias": args.attention_bias, "mlp_bias": False, **scalars}


HF = HFDecoder("granite", "GraniteForCausalLM", _read, _write)
