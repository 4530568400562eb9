"""`config.json` of Hugging Face's `LlamaForCausalLM`. Torch-free.

Since transformers 5 the rotary table is `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`.
"""

from typing import Any

from trainer.config.errors import ConfigError
from trainer.models.common.shapes import RopeScaling
from trainer.models.hf_config import Entries, HFConfig
from trainer.models.llama3.args import TransformerArgs

_ARCHITECTURE = "LlamaForCausalLM"


def _read(config: Entries) -> TransformerArgs:
    config.only("model_type", "llama")
    config.only("architectures", [_ARCHITECTURE])
    config.only("hidden_act", "silu")
    for bias in ("attention_bias", "mlp_bias"):
        config.only(bias, False)
    config.only("attention_dropout", 0.0)
    for table in ("quantization_config", "sliding_window"):
        config.only(table, None)
    dim, n_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    n_kv_heads = config.whole("num_key_value_heads", n_heads)
    for whole, part in (("hidden_size", n_heads), ("num_attention_heads", n_kv_heads)):
        if config.whole(whole) % part:
            raise ConfigError(f"{config.file}: {whole} = {config.whole(whole)} must be a multiple of {part}")
    config.only("head_dim", dim // n_heads)
    theta, scaling = _rotary(config)
    return TransformerArgs(
        dim=dim,
        n_layers=config.whole("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_hidden_dim=config.whole("intermediate_size"),
        vocab_size=config.whole("vocab_size"),
        max_seq_len=config.whole("max_position_embeddings", 2048),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=config.switch("tie_word_embeddings"),
    )


def _rotary(config: Entries) -> tuple[float, RopeScaling | None]:
    """Return the base of the frequencies and their scaling."""
    table = config.table("rope_parameters" if config.content.get("rope_parameters") else "rope_scaling")
    theta = float((table if "rope_theta" in table.content else config).number("rope_theta", 10000.0))
    table.only("partial_rotary_factor", 1.0)
    if table.only("rope_type" if "rope_type" in table.content else "type", "default", "llama3") == "default":
        return theta, None
    factors = (float(table.number(key)) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return theta, RopeScaling(*factors, table.whole("original_max_position_embeddings"))


def check_features(args: TransformerArgs) -> None:
    """Check that `LlamaForCausalLM` can compute what the model computes.

    Raises:
        ConfigError: a feature that it does not have.
    """
    others = args.sliding_window is not None, args.attention_sinks, args.short_conv_kernel
    if args.norm_type != "rmsnorm" or any(others):
        raise ConfigError(
            "Hugging Face's Llama has RMSNorm, and neither sliding windows, attention sinks nor short convolutions; "
            "leave out model.norm_type, model.sliding_window, model.attention_sinks and model.short_conv_kernel"
        )


def _write(args: TransformerArgs) -> dict[str, Any]:
    check_features(args)
    longest = args.max_seq_len
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := args.rope_scaling) is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
        longest = max(longest, round(scaling.factor * scaling.original_max_seq_len))
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": args.dim,
        "intermediate_size": args.ffn_hidden_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": longest,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": args.norm_eps,
        "tie_word_embeddings": args.tie_embeddings,
        "rope_theta": args.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": args.rope_theta},
    }


HF_CONFIG = HFConfig("llama", _read, _write)
