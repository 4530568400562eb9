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


def read_scalars(config: Entries) -> dict[str, float]:
    """Return the fields of the four scalars, each one where the file has none."""
    return {field: float(config.number(key, 1.0)) for key, field in _SCALARS.items()}


def write_scalars(args: TransformerArgs) -> dict[str, float]:
    """Return the entries that `read_scalars` reads."""
    return {key: getattr(args, field) for key, field in _SCALARS.items()} | {"attention_multiplier": args.score_scale}


def _read(config: Entries) -> dict[str, Any]:
    config.only("mlp_bias", False)
    biases = config.switch("attention_bias")
    return {"attention_bias": biases, "output_bias": biases, **read_scalars(config)}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {"attention_bias": args.attention_bias, "mlp_bias": False, **write_scalars(args)}


HF = HFDecoder("granite", "GraniteForCausalLM", _read, _write)
