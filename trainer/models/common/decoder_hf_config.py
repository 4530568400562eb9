"""`config.json` of the decoders of transformers that are made of the same parts as Llama. Torch-free.

Since transformers 5 the rotary table is `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.models.common.decoder_args import TransformerArgs
from trainer.models.common.shapes import RopeScaling
from trainer.models.hf_config import Entries, HFConfig


@dataclass(frozen=True)
class HFDecoder:
    """One architecture of transformers: its names, and the entries by which it differs from the others."""

    model_type: str
    architecture: str
    read: Callable[[Entries], dict[str, Any]]
    """Entries -> fields of `TransformerArgs` that only some architectures have. It raises a ConfigError, by key and
    value, for what cannot be computed here."""
    write: Callable[[TransformerArgs], dict[str, Any]]
    """The entries of these fields."""
    head_size: int | None = None
    """What heads have if `head_dim` is missing; None: `hidden_size / num_attention_heads`."""

    def config(self) -> HFConfig:
        return HFConfig(self.model_type, self._read, self._write)

    def check_features(self, args: TransformerArgs) -> None:
        """Check that the architecture can compute what the model computes: what is written must be read as it was.

        Raises:
            ConfigError: a feature that it does not have.
        """
        there, ours = asdict(self._read(Entries(Path(), self._entries(args)))), asdict(args)
        for name, value in there.items():
            if name != "max_seq_len" and value != ours[name]:
                raise ConfigError(
                    f"{self.architecture} of Hugging Face's transformers has {name} = {value!r}, and this model "
                    f"{ours[name]!r}; leave out model.{name}"
                )

    def _read(self, config: Entries) -> TransformerArgs:
        config.only("model_type", self.model_type)
        config.only("architectures", [self.architecture])
        config.only("hidden_act", "silu")
        config.only("attention_dropout", 0.0)
        config.only("quantization_config", None)
        dim, n_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
        n_kv_heads = config.whole("num_key_value_heads", n_heads)
        divided = {"num_attention_heads": n_kv_heads}
        if config.content.get("head_dim") is None and self.head_size is None:
            divided["hidden_size"] = n_heads
        for whole, part in divided.items():
            if config.whole(whole) % part:
                raise ConfigError(f"{config.file}: {whole} = {config.whole(whole)} must be a multiple of {part}")
        head_dim = config.whole("head_dim", self.head_size or dim // n_heads)
        if head_dim % 2:
            raise ConfigError(f"{config.file}: head_dim = {head_dim} must be even, for rotary positions")
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
            head_size=None if head_dim * n_heads == dim else head_dim,
            **self.read(config),
        )

    def _write(self, args: TransformerArgs) -> dict[str, Any]:
        self.check_features(args)
        return self._entries(args)

    def _entries(self, args: TransformerArgs) -> dict[str, Any]:
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
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_size": args.dim,
            "intermediate_size": args.ffn_hidden_dim,
            "num_hidden_layers": args.n_layers,
            "num_attention_heads": args.n_heads,
            "num_key_value_heads": args.n_kv_heads,
            "head_dim": args.head_dim,
            "vocab_size": args.vocab_size,
            "max_position_embeddings": longest,
            "hidden_act": "silu",
            "rms_norm_eps": args.norm_eps,
            "tie_word_embeddings": args.tie_embeddings,
            "rope_theta": args.rope_theta,
            "rope_scaling": None if scaling is None else rope,
            "rope_parameters": rope | {"rope_theta": args.rope_theta},
            **self.write(args),
        }


def _rotary(config: Entries) -> tuple[float, RopeScaling | None]:
    """Return the base of the frequencies and their scaling."""
    table = config.table("rope_parameters" if config.content.get("rope_parameters") else "rope_scaling")
    theta = float((table if "rope_theta" in table.content else config).number("rope_theta", 10000.0))
    table.only("partial_rotary_factor", 1.0)
    if table.only("rope_type" if "rope_type" in table.content else "type", "default", "llama3") == "default":
        return theta, None
    factors = (float(table.number(key)) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return theta, RopeScaling(*factors, table.whole("original_max_position_embeddings"))
