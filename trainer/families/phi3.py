"""What transformers calls Phi-3 and Phi-4; sizes.toml has the sizes and their sources. Torch-free."""

from typing import Any

from trainer.families.decoder_args import TransformerArgs, sizes
from trainer.families.decoder_config_json import HFDecoder, rotary_table
from trainer.hugging_face.config_json import Entries

FLAVORS = sizes("phi3")


def _read(config: Entries) -> dict[str, Any]:
    """All layers have the window, if there is one; transformers takes any scaling for LongRoPE."""
    for rate in ("resid_pdrop", "embd_pdrop"):
        config.only(rate, 0.0)
    table = rotary_table(config)
    table.only("rope_type" if "rope_type" in table.content else "type", "default", "longrope")
    without = config.content.get("sliding_window") is None
    return {"sliding_window": None if without else config.whole("sliding_window")}


def _write(args: TransformerArgs) -> dict[str, Any]:
    long = args.rope_scaling
    original = {} if long is None else {"original_max_position_embeddings": long.original_max_seq_len}
    return {"sliding_window": args.sliding_window, **original}


_QKV, _GATES = "self_attn.qkv_proj", "mlp.gate_up_proj"
HF = HFDecoder(
    "phi3",
    "Phi3ForCausalLM",
    _read,
    _write,
    names={
        **{f"attention.{part}": _QKV for part in ("wq", "wk", "wv")},
        **{f"feed_forward.{part}": _GATES for part in ("w1", "w3")},
    },
    rotates_a_share=True,
)
