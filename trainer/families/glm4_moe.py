"""What transformers calls GLM-4.5, 4.6 and 4.7; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, layer_kinds
from trainer.families.decoder_tensors import FURTHER_AS_LAYERS
from trainer.families.sigmoid_experts import NAMES, read_sigmoid_experts, write_sigmoid_experts
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("glm4_moe")


def _read(config: Entries) -> dict[str, Any]:
    """The first layers are dense; a router has sigmoids, a bias for the choice, and groups of experts."""
    experts, sparse = read_sigmoid_experts(config)
    return {
        "qk_norm": config.switch("use_qk_norm"),
        "attention_bias": config.switch("attention_bias"),
        "experts": experts,
        **layer_kinds(len(sparse), experts=sparse),
    }


def _write(args: TransformerArgs) -> dict[str, Any]:
    return {
        **write_sigmoid_experts(args, HF.architecture),
        "use_qk_norm": args.qk_norm,
        "attention_bias": args.attention_bias,
        "num_nextn_predict_layers": args.mtp_layers,
    }


HF = HFDecoder(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _read,
    _write,
    names=NAMES,
    rotates_a_share=True,
    further=FURTHER_AS_LAYERS,
)
