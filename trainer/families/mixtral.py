"""What transformers calls Mixtral; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.args import ExpertArgs
from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, check_choice, experts_to_write, read_balance
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("mixtral")
NAMES = {
    "feed_forward.router.gate": "block_sparse_moe.gate",
    "feed_forward.experts.w13": "block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3",
    "feed_forward.experts.w2": "block_sparse_moe.experts.{}.w2",
}


def read_experts(config: Entries, **fields: Any) -> dict[str, Any]:
    """Return the fields of experts. fields: of `ExpertArgs`, beside their number and width."""
    config.only("router_jitter_noise", 0.0)
    number, per_token = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
    experts = ExpertArgs(number, per_token, config.whole("intermediate_size"), **fields)
    return {"experts": check_choice(config, experts), "router_aux_loss_coef": read_balance(config)}


def write_experts(args: TransformerArgs, architecture: str) -> dict[str, Any]:
    """Return the entries that `read_experts` reads."""
    experts = experts_to_write(args, architecture)
    return {
        "intermediate_size": experts.hidden_dim,
        "num_local_experts": experts.number,
        "num_experts_per_tok": experts.per_token,
        "router_aux_loss_coef": args.router_aux_loss_coef,
    }


def _read(config: Entries) -> dict[str, Any]:
    """All layers have the window, if there is one."""
    without = config.content.get("sliding_window") is None
    return read_experts(config) | {"sliding_window": None if without else config.whole("sliding_window")}


def _write(args: TransformerArgs) -> dict[str, Any]:
    return write_experts(args, HF.architecture) | {"sliding_window": args.sliding_window}


HF = HFDecoder("mixtral", "MixtralForCausalLM", _read, _write, names=NAMES)
