"""Architectures of transformers in which an indexer chooses the keys of attention. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.families.config_parts import Fields, Part
from trainer.families.decoder_config_json import HFDecoder
from trainer.families.decoder_tensors import FURTHER_AS_LAYERS
from trainer.families.dense import NO_MLP_BIAS
from trainer.families.mixers import IndexArgs
from trainer.families.sparse import (
    FURTHER,
    LATENT,
    MLP_TYPES,
    NO_BIASES,
    SIGMOID_EXPERTS,
    SIGMOID_NAMES,
)
from trainer.hugging_face.config_json import Entries, entries_of

_INDEX = {"index_n_heads": "n_heads", "index_head_dim": "head_dim", "index_topk": "per_query"}
_KINDS = ("indexed_attention", "deepseek_sparse_attention")
"""Names of the only kind of layers: of transformers 5, and in some published files."""


def _decoder(model_type: str, architecture: str, *, adjacent_pairs: bool) -> HFDecoder:
    def read(config: Entries) -> Fields:
        n_layers = config.whole("num_hidden_layers")
        config.only("layer_types", None, *([kind] * n_layers for kind in _KINDS))
        config.only("indexer_types", None, ["full"] * n_layers)
        config.only("index_topk_freq", None, 1)
        config.only("index_topk_pattern", None, "F" * n_layers)
        config.only("indexer_rope_interleave", adjacent_pairs)
        sizes = config.wholes(_INDEX)
        rotated = config.whole("qk_rope_head_dim")
        config.whole("q_lora_rank")  # the indexer reads the latents of queries
        if sizes["head_dim"] < rotated:
            raise ConfigError(
                f"{config.file}: index_head_dim = {sizes['head_dim']} must be at least "
                f"qk_rope_head_dim = {rotated}"
            )
        return {"index": IndexArgs(**sizes, adjacent_pairs=adjacent_pairs)}

    index = Part(read, lambda args: entries_of(args.index, _INDEX), ("index", "an indexer"))
    return HFDecoder(
        model_type,
        architecture,
        (SIGMOID_EXPERTS, MLP_TYPES, NO_BIASES, NO_MLP_BIAS, LATENT, index, FURTHER),
        names=SIGMOID_NAMES,
        further=FURTHER_AS_LAYERS,
    )


FAMILIES = {
    "deepseek_v32": _decoder("deepseek_v32", "DeepseekV32ForCausalLM", adjacent_pairs=False),
    "glm_moe_dsa": _decoder("glm_moe_dsa", "GlmMoeDsaForCausalLM", adjacent_pairs=True),
}
