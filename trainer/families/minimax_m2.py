"""What transformers calls MiniMax-M2; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.config.errors import ConfigError
from trainer.families import mixtral
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder
from trainer.families.decoder_tensors import SELECTION_BIAS
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("minimax_m2")


def _read(config: Entries) -> dict[str, Any]:
    """One norm is of the queries, or keys, of all heads; a router has sigmoids and a bias for the choice."""
    kinds = config.content.get("attn_type_list")
    if kinds is not None and any(kind != 1 for kind in kinds):
        raise ConfigError(f"{config.file}: attn_type_list = {kinds!r} is not supported; it must be 1 for each layer")
    return mixtral.read_all_sparse(config, sigmoid=True) | {"qk_norm": True, "qk_norm_of_all_heads": True}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return mixtral.write_all_sparse(args, HF.architecture) | {"rotary_dim": args.rotary_dim}


HF = HFDecoder(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    _read,
    _write,
    names={**mixtral.NAMES, SELECTION_BIAS: "block_sparse_moe.e_score_correction_bias"},
    rotates_a_share=True,
)
