"""What transformers calls Mixtral; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, read_balance, read_experts, write_experts
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("mixtral")
EXPERTS = "num_local_experts", "intermediate_size"
NAMES = {
    "feed_forward.router.gate": "block_sparse_moe.gate",
    "feed_forward.experts.w13": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
    "feed_forward.experts.w2": "block_sparse_moe.experts.{}.w2",
}


def read_all_sparse(config: Entries, **fields: Any) -> dict[str, Any]:
    """Return the fields of a model whose layers all have experts. fields: of `ExpertArgs`."""
    config.only("router_jitter_noise", 0.0)
    return {"experts": read_experts(config, *EXPERTS, **fields), "router_aux_loss_coef": read_balance(config)}


def write_all_sparse(args: TransformerArgs, architecture: str) -> dict[str, Any]:
    """Return the entries that `read_all_sparse` reads."""
    return write_experts(args, architecture, *EXPERTS) | {"router_aux_loss_coef": args.router_aux_loss_coef}


def _read(config: Entries) -> dict[str, Any]:
    """All layers have the window, if there is one."""
    without = config.content.get("sliding_window") is None
    return read_all_sparse(config) | {"sliding_window": None if without else config.whole("sliding_window")}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return write_all_sparse(args, HF.architecture) | {"sliding_window": args.sliding_window}


HF = HFDecoder("mixtral", "MixtralForCausalLM", _read, _write, names=NAMES)
