"""`config.json` of the decoders of transformers that are made of the same parts as Llama. Torch-free.

Since transformers 5 the rotary table is `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.decoder_args import TABLES, RopeScaling, TransformerArgs
from trainer.hugging_face.config_json import Entries, HFConfig

_ROPE = ("rope_parameters", "rope_scaling")
_FULL, _SLIDING = "full_attention", "sliding_attention"


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

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Entries that the architecture's class assumes where the file lacks them, if they are not those of Llama's."""
        return TABLES["assumed"].get(self.model_type, {})

    def config(self) -> HFConfig:
        return HFConfig(self.model_type, self._read, self._write, self.check_start)

    def check_features(self, args: TransformerArgs) -> None:
        """Check that the architecture can compute what the model computes: what is written must be read as it was.

        Raises:
            ConfigError: a feature that it does not have.
        """
        there = self._read(Entries(Path(), self._entries(args)))
        computed = _computed(args)
        for name, value in _computed(there).items():
            if value != computed[name]:
                raise ConfigError(
                    f"{self.architecture} of Hugging Face's transformers has {name} = {getattr(there, name)!r}, and "
                    f"this model {getattr(args, name)!r}; leave out model.{name}"
                )

    def check_start(self, args: TransformerArgs) -> None:
        """As `check_features`, for a model that starts from there: its biases that choose experts begin at zero."""
        self.check_features(replace(args, router_bias_update_rate=0.0))

    def _read(self, config: Entries) -> TransformerArgs:
        # An empty table of RoPE is as good as none.
        given = {key: value for key, value in config.content.items() if value or key not in _ROPE}
        config = Entries(config.file, {**self.defaults, **given})
        config.only("model_type", self.model_type)
        config.only("architectures", [self.architecture])
        config.only("hidden_act", "silu")
        config.only("attention_dropout", 0.0)
        dim, n_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
        n_kv_heads = config.whole("num_key_value_heads", n_heads)
        divided = {"num_attention_heads": n_kv_heads}
        if config.content.get("head_dim") is None:
            divided["hidden_size"] = n_heads
        for whole, part in divided.items():
            if config.whole(whole) % part:
                raise ConfigError(f"{config.file}: {whole} = {config.whole(whole)} must be a multiple of {part}")
        head_dim = config.whole("head_dim", dim // n_heads)
        if head_dim % 2:
            raise ConfigError(f"{config.file}: head_dim = {head_dim} must be even, for rotary positions")
        theta, scaling = _rotary(config)
        fields = {
            "dim": dim,
            "n_layers": config.whole("num_hidden_layers"),
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "ffn_hidden_dim": config.whole("intermediate_size"),
            "vocab_size": config.whole("vocab_size"),
            "max_seq_len": config.whole("max_position_embeddings", 2048),
            "norm_eps": config.number("rms_norm_eps", 1e-6),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "tie_embeddings": config.switch("tie_word_embeddings"),
            "head_size": None if head_dim * n_heads == dim else head_dim,
        }
        of_family = self.read(config)
        config.only("quantization_config", None)  # a family may have more to say of it
        return TransformerArgs(**fields | of_family)

    def _write(self, args: TransformerArgs) -> dict[str, Any]:
        self.check_features(args)
        return self._entries(args)

    def _entries(self, args: TransformerArgs) -> dict[str, Any]:
        longest, scaling = args.max_seq_len, args.rope_scaling
        rope = {"rope_type": "default"} if scaling is None else _rope_entries(scaling)
        if "original_max_position_embeddings" in rope:
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
    kinds = "default", "linear", "llama3", "yarn"
    kind = table.only("rope_type" if "rope_type" in table.content else "type", *kinds)
    if kind == "default":
        return theta, None
    scaling = RopeScaling(float(table.number("factor")), kind=kind)
    if kind == "linear":
        return theta, scaling
    longest = config.content.get("max_position_embeddings")
    scaling = replace(scaling, original_max_seq_len=table.whole("original_max_position_embeddings", longest))
    if kind == "llama3":
        low, high = (float(table.number(key)) for key in ("low_freq_factor", "high_freq_factor"))
        return theta, replace(scaling, low_freq_factor=low, high_freq_factor=high)
    fast, slow = float(table.number("beta_fast", 32.0)), float(table.number("beta_slow", 1.0))
    truncate = bool(table.only("truncate", True, False))
    return theta, replace(
        scaling, beta_fast=fast, beta_slow=slow, truncate=truncate, attention_factor=_attention_factor(table)
    )


def _attention_factor(table: Entries) -> float | None:
    """Return YaRN's factor of attention where it is not that of the paper, said by itself or as DeepSeek's two."""
    both = [table.content.get(key) for key in ("mscale", "mscale_all_dim")]
    if table.content.get("attention_factor") is not None:
        return float(table.number("attention_factor"))
    if not all(both):
        return None
    log = math.log(table.number("factor"))
    over, under = (0.1 * table.number(key) * log + 1.0 for key in ("mscale", "mscale_all_dim"))
    return over / under


def _rope_entries(scaling: RopeScaling) -> dict[str, Any]:
    entries: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return entries
    entries["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        return entries | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    entries |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.attention_factor is not None:
        entries["attention_factor"] = scaling.attention_factor
    return entries if scaling.truncate else entries | {"truncate": False}


def read_windows(config: Entries) -> dict[str, Any]:
    """Return the fields of sliding windows from a switch, a window, and the layers that have it, as Qwen's are.

    Raises:
        ConfigError: other layers than every n-th one from the first have the window.
    """
    n_layers, key = config.whole("num_hidden_layers"), "layer_types"
    window = config.whole("sliding_window") if config.switch("use_sliding_window") else None
    kinds = value = config.content.get(key)
    if value is None:
        key = "max_window_layers"
        value = config.content.get(key, 28)  # the default of transformers
        first = n_layers if window is None else value
        kinds = [_SLIDING if layer >= first else _FULL for layer in range(n_layers)] if isinstance(first, int) else None
    if kinds == [_FULL] * n_layers:
        return {}
    for every in range(1, n_layers + 1):
        if window is not None and kinds == [_FULL if layer % every else _SLIDING for layer in range(n_layers)]:
            return {"sliding_window": window, "sliding_window_every": every}
    raise ConfigError(
        f"{config.file}: {key} = {value!r} is not supported; with use_sliding_window every n-th layer, from the first "
        "on, may have the window, and without it none"
    )


def write_windows(args: TransformerArgs) -> dict[str, Any]:
    """Return the entries that `read_windows` reads."""
    windows = [args.window_of_layer(layer) for layer in range(args.n_layers)]
    return {
        "use_sliding_window": args.sliding_window is not None,
        "sliding_window": args.sliding_window,
        "max_window_layers": args.n_layers if args.sliding_window is None else 0,
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
    }


def read_balance(config: Entries) -> float:
    """Return the coefficient of the loss that balances experts. transformers adds it with `output_router_logits` only.

    Published models have the switch off, and some a coefficient (gpt-oss: 0.9), which nobody trains with.
    """
    if not (config.switch("output_router_logits") and config.content.get("router_aux_loss_coef")):
        return 0.0
    return float(config.number("router_aux_loss_coef"))


def _computed(args: TransformerArgs) -> dict[str, Any]:
    """Return what a model's forward depends on, by the names of its fields: the windows of all layers as one."""
    windows = [args.window_of_layer(layer) for layer in range(args.n_layers)]
    fields = asdict(args) | {"sliding_window": windows}
    others = "max_seq_len", "sliding_window_every", "router_aux_loss_coef"
    return {name: value for name, value in fields.items() if name not in others}
