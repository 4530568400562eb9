"""`config.json` of the decoders of transformers that are made of the same parts as Llama. Torch-free.

Since transformers 5 the rotary table is `rope_parameters`; before, `rope_theta` stood beside `rope_scaling`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.args import ExpertArgs, is_further
from trainer.families.decoder_args import TABLES, TransformerArgs
from trainer.families.decoder_tensors import hf_tensor
from trainer.families.layer_kinds import LayerKind, RopeScaling, in_turns
from trainer.hugging_face.config_json import Entries, HFConfig
from trainer.hugging_face.files import FLOAT8_BLOCK
from trainer.hugging_face.tensors import HFTensor

_ROPE = ("rope_parameters", "rope_scaling")
FULL, SLIDING = "full_attention", "sliding_attention"


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
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Modules of a layer here -> their names there, where they are not those of `decoder_tensors`."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The key and the name there of what it has in the gates of feed-forward networks."""
    rotates_a_share: bool = False
    """Whether the entry `partial_rotary_factor` counts."""
    quantised: tuple[str, ...] = ("fp8",)
    """The values of `quant_method` with which published weights can be read."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer that predicts further tokens -> their names there, "" -> how the names of its others begin; {}
    stands for its number, behind the other layers. transformers does not read them. Empty: there are none."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Entries that the architecture's class assumes where the file lacks them, if they are not those of Llama's."""
        return TABLES["assumed"].get(self.model_type, {})

    def config(self) -> HFConfig:
        return HFConfig(self.model_type, self._read, self._write, self.check_start)

    def tensor(self, args: TransformerArgs, name: str) -> HFTensor | None:
        """Return Hugging Face's tensor for a parameter, see `hf_tensor`."""
        if not is_further(args, name):
            return hf_tensor(args, name, self.names)
        table, layer, own = name.split(".", 2)
        module, _, kind = (own if table == "layers" else f"{table}.{own}").rpartition(".")
        if not self._has_further(args):
            return None
        if module in self.further:
            return HFTensor(f"{self.further[module].format(layer)}.{kind}")
        return hf_tensor(args, name, self.names, self.further[""])

    def _has_further(self, args: TransformerArgs) -> bool:
        several = "{}" in self.further.get("", "")
        return bool(self.further) and (several or args.mtp_layers == 1)

    def unread(self, args: TransformerArgs) -> tuple[str, ...]:
        """Return how the names of tensors begin that are not read: layers for further tokens, or what they share."""
        if not self.further:
            return ()
        first, read = args.n_layers, args.mtp_layers if self._has_further(args) else 0
        if "{}" not in self.further[""]:
            return () if read else ("mtp.",)
        shared = [f"model.layers.{first + i}.{x}." for i in range(read) for x in ("embed_tokens", "shared_head.head")]
        return (*shared, f"model.layers.{first + read}.")

    def check_features(self, args: TransformerArgs) -> None:
        """Check that the architecture can compute what the model computes: what is written must be read as it was.

        Raises:
            ConfigError: a feature that it does not have.
        """
        there = self._read(Entries(Path(), self._entries(args)))
        computed = _computed(args)
        for name, value in _computed(there).items():
            if value != computed[name]:
                key = "sliding_window_every" if name == "layers" else name
                raise ConfigError(
                    f"{self.architecture} of Hugging Face's transformers has {name} = {getattr(there, name)!r}, and "
                    f"this model {getattr(args, name)!r}; leave out model.{key}"
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
        config.only(*self.activation)
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
        (theta, scaling), share = _rotary(config), _rotary_share(config) if self.rotates_a_share else 1.0
        if not self.rotates_a_share:
            for table in config, rotary_table(config):
                table.only("partial_rotary_factor", 1.0)
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
            "rope_share": share,
            "tie_embeddings": config.switch("tie_word_embeddings"),
            "head_size": None if head_dim * n_heads == dim else head_dim,
        }
        of_family = self.read(config)
        quantised = config.table("quantization_config")
        if quantised.content.get("quant_method") not in self.quantised:
            config.only("quantization_config", None)
        elif quantised.content["quant_method"] == "fp8":
            quantised.only("weight_block_size", [FLOAT8_BLOCK, FLOAT8_BLOCK])
            quantised.only("fmt", "e4m3")
        return TransformerArgs(**fields | of_family)

    def _write(self, args: TransformerArgs) -> dict[str, Any]:
        self.check_features(args)
        return self._entries(args)

    def _entries(self, args: TransformerArgs) -> dict[str, Any]:
        longest, scaling = args.max_seq_len, args.rope_scaling
        rope = {"rope_type": "default"} if scaling is None else _rope_entries(scaling)
        if self.rotates_a_share:
            rope["partial_rotary_factor"] = args.rope_share
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
            self.activation[0]: self.activation[1],
            "rms_norm_eps": args.norm_eps,
            "tie_word_embeddings": args.tie_embeddings,
            "rope_theta": args.rope_theta,
            "rope_scaling": None if scaling is None else rope,
            **({"partial_rotary_factor": args.rope_share} if self.rotates_a_share else {}),
            "rope_parameters": rope | {"rope_theta": args.rope_theta},
            **self.write(args),
        }


def rotary_table(config: Entries) -> Entries:
    """Return the table of rotary positions, of two that of layers without a window."""
    table = config.table("rope_parameters" if config.content.get("rope_parameters") else "rope_scaling")
    return table.table(FULL) if FULL in table.content else table


def _rotary_share(config: Entries) -> float:
    """Return the share of a head's channels that is rotated."""
    key, table = "partial_rotary_factor", rotary_table(config)
    share = float((table if key in table.content else config).number(key, 1.0))
    head_dim = config.whole("head_dim", config.whole("hidden_size") // config.whole("num_attention_heads"))
    if key not in {**table.content, **config.content} and config.content.get("rotary_dim") is not None:
        share = config.whole("rotary_dim") / head_dim
    if not share <= 1 or int(head_dim * share) % 2:
        raise ConfigError(f"{config.file}: {key} = {share} must leave an even part of heads of {head_dim}")
    return share


def read_local_layers(
    config: Entries, window: int | None, windows: Sequence[bool], assumed: float, *keys: str
) -> dict[str, Any]:
    """Return the fields of a model whose layers with a window have frequencies of their own, see `_local_theta`.

    window, windows: of `read_windows`.
    """
    theta = None if window is None else _local_theta(config, assumed, *keys)
    thetas = [theta if has_window else None for has_window in windows]
    return {"sliding_window": window, **layer_kinds(len(windows), window=windows, rope_theta=thetas)}


def _local_theta(config: Entries, assumed: float, *keys: str) -> float | None:
    """Return the base of the frequencies of layers with a window; None: they have those of the others.

    assumed: where the file has none; keys: the entry's names before transformers 5.
    """
    table = config.table("rope_parameters").table(SLIDING)
    table.only("rope_type", "default")
    (old,) = [config.content[key] for key in keys if config.content.get(key)] or (assumed,)
    theta = float(table.number("rope_theta", old))
    return None if (theta, None) == _rotary(config) else theta


def two_tables(args: TransformerArgs) -> dict[str, Any]:
    """Return the entries of rotary positions of a model whose layers with a window have frequencies of their own."""
    own = {args.layer(i).rope_theta for i in range(args.n_layers) if args.layer(i).window} - {None}
    scaling = args.rope_scaling
    whole = {"rope_type": "default"} if scaling is None else _rope_entries(scaling)
    local = {"rope_type": "default", "rope_theta": own.pop() if own else args.rope_theta}
    return {"rope_parameters": {FULL: whole | {"rope_theta": args.rope_theta}, SLIDING: local}}


def _rotary(config: Entries) -> tuple[float, RopeScaling | None]:
    """Return the base of the frequencies and their scaling."""
    table = rotary_table(config)
    theta = float((table if "rope_theta" in table.content else config).number("rope_theta", 10000.0))
    kinds = "default", "linear", "llama3", "yarn", "longrope"
    kind = table.only("rope_type" if "rope_type" in table.content else "type", *kinds)
    if kind == "default":
        return theta, None
    if kind == "longrope":
        return theta, _longrope(config, table)
    scaling = RopeScaling(float(table.number("factor")), kind=kind)
    if kind == "linear":
        return theta, scaling
    longest = config.content.get("max_position_embeddings")
    scaling = replace(scaling, original_max_seq_len=table.whole("original_max_position_embeddings", longest))
    if kind == "llama3":
        low, high = (float(table.number(key)) for key in ("low_freq_factor", "high_freq_factor"))
        return theta, replace(scaling, low_freq_factor=low, high_freq_factor=high)
    fast, slow = float(table.number("beta_fast", 32.0)), float(table.number("beta_slow", 1.0))
    truncate, of_scores = bool(table.only("truncate", True, False)), table.content.get("mscale_all_dim")
    return theta, replace(
        scaling,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        attention_factor=_attention_factor(table),
        mscale_all_dim=float(table.number("mscale_all_dim")) if of_scores else 0.0,
    )


def _longrope(config: Entries, table: Entries) -> RopeScaling:
    """Return the scaling of LongRoPE. Phi's files have the original length outside the table, and no factor."""
    key = "original_max_position_embeddings"
    original = (config if key in config.content else table).whole(key)
    head_dim = config.whole("head_dim", config.whole("hidden_size") // config.whole("num_attention_heads"))
    pairs, factors = int(head_dim * _rotary_share(config)) // 2, []
    for name in ("short_factor", "long_factor"):
        values = table.content.get(name)
        numbers = isinstance(values, list) and all(isinstance(x, (int, float)) and x > 0 for x in values)
        if not numbers or len(values) != pairs:
            raise ConfigError(f"{table.file}: {name} = {values!r} must be a list of {pairs} numbers above 0")
        factors.append(tuple(map(float, values)))
    return RopeScaling(
        float(table.number("factor", config.whole("max_position_embeddings") / original)),
        kind="longrope",
        original_max_seq_len=original,
        attention_factor=None if table.content.get("attention_factor") is None else _attention_factor(table),
        short_factors=factors[0],
        long_factors=factors[1],
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
    if scaling.kind == "longrope":
        entries |= {"short_factor": [*scaling.short_factors], "long_factor": [*scaling.long_factors]}
        own = scaling.attention_factor
        return entries if own is None else entries | {"attention_factor": own}
    entries |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.attention_factor is not None:
        entries["attention_factor"] = scaling.attention_factor
    if scaling.mscale_all_dim:
        entries["mscale_all_dim"] = scaling.mscale_all_dim
    return entries if scaling.truncate else entries | {"truncate": False}


def layer_kinds(n_layers: int, **fields: Sequence[Any]) -> dict[str, Any]:
    """Return the field `layers` of a model. fields: of `LayerKind`, each with its values for all layers."""
    return {"layers": in_turns([LayerKind(**{name: of[i] for name, of in fields.items()}) for i in range(n_layers)])}


def read_layer_types(config: Entries, names: Sequence[str], assumed: Sequence[str]) -> list[str]:
    """Return the kind of each layer, one of `names`, from `layer_types`. assumed: where the file has none.

    Raises:
        ConfigError: another kind, or too few or too many.
    """
    n_layers, kinds = config.whole("num_hidden_layers"), config.content.get("layer_types")
    kinds = list(assumed) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != n_layers or not {*names}.issuperset(map(str, kinds)):
        raise ConfigError(
            f"{config.file}: layer_types = {kinds!r} is not supported; it must be {' or '.join(map(repr, names))} for "
            f"each of {n_layers} layers"
        )
    return kinds


def read_windows(config: Entries, assumed: Sequence[str]) -> tuple[int | None, list[bool]]:
    """Return the sliding window and which layers have it, from `layer_types`. assumed: where the file has none.

    Raises:
        ConfigError: as `read_layer_types`.
    """
    kinds = read_layer_types(config, (FULL, SLIDING), assumed)
    if SLIDING not in kinds:
        return None, [True] * len(kinds)
    return config.whole("sliding_window"), [kind == SLIDING for kind in kinds]


def read_switched_windows(config: Entries) -> tuple[int | None, list[bool]]:
    """Do what `read_windows` does for Qwen's entries: a switch, and the first layer with a window.

    Raises:
        ConfigError: also for layers with a window without the switch.
    """
    n_layers, switch = config.whole("num_hidden_layers"), config.switch("use_sliding_window")
    first = config.content.get("max_window_layers", 28)  # the default of transformers
    if not isinstance(first, int) and config.content.get("layer_types") is None:
        raise ConfigError(f"{config.file}: max_window_layers = {first!r} must be a number of layers")
    kinds = [SLIDING if switch and layer >= first else FULL for layer in range(n_layers)]
    window, windows = read_windows(config, kinds)
    if window is not None and not switch:
        value = config.content["layer_types"]
        raise ConfigError(f"{config.file}: layer_types = {value!r} is not supported without use_sliding_window")
    return window, windows


def write_windows(args: TransformerArgs) -> dict[str, Any]:
    """Return the entries that `read_windows` reads."""
    windows = [args.window_of_layer(layer) for layer in range(args.n_layers)]
    return {
        "sliding_window": args.sliding_window,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def write_switched_windows(args: TransformerArgs) -> dict[str, Any]:
    """Return the entries that `read_switched_windows` reads."""
    entries, some = write_windows(args), args.sliding_window is not None
    return entries | {"use_sliding_window": some, "max_window_layers": 0 if some else args.n_layers}


def read_sparse_layers(config: Entries) -> list[bool]:
    """Return which layers have experts: every n-th one, from number n - 1 on, but for those that are named."""
    n_layers, dense = config.whole("num_hidden_layers"), config.content.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError(f"{config.file}: mlp_only_layers = {dense!r} must be a list of layers")
    step = config.whole("decoder_sparse_step", 1)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers)]


def write_sparse_layers(args: TransformerArgs) -> dict[str, Any]:
    """Return the entries that `read_sparse_layers` reads."""
    dense = [layer for layer in range(args.n_layers) if not args.layer(layer).experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def read_experts(config: Entries, number: str, width: str, **fields: Any) -> ExpertArgs:
    """Return the experts. number, width: keys of how many there are, and of their hidden channels; fields: others.

    Raises:
        ConfigError: a token cannot choose so many of them.
    """
    experts = ExpertArgs(config.whole(number), config.whole("num_experts_per_tok"), config.whole(width), **fields)
    if experts.number % experts.groups or experts.groups_per_token > experts.groups:
        raise ConfigError(
            f"{config.file}: n_group = {experts.groups} must divide {experts.number} experts and be at least "
            f"topk_group = {experts.groups_per_token}"
        )
    if experts.per_token > (most := experts.number // experts.groups * experts.groups_per_token):
        raise ConfigError(
            f"{config.file}: num_experts_per_tok = {experts.per_token} must be at most num_experts = {most}"
        )
    return experts


def write_experts(args: TransformerArgs, architecture: str, number: str, width: str) -> dict[str, Any]:
    """Return the entries that `read_experts` reads for all architectures.

    Raises:
        ConfigError: the model has no experts.
    """
    if (experts := args.experts) is None:
        raise ConfigError(f"{architecture} of Hugging Face's transformers needs experts, and this model has none")
    return {number: experts.number, "num_experts_per_tok": experts.per_token, width: experts.hidden_dim}


def read_balance(config: Entries) -> float:
    """Return the coefficient of the loss that balances experts. transformers adds it with `output_router_logits` only.

    Published models have the switch off, and some a coefficient (gpt-oss: 0.9), which nobody trains with.
    """
    if not (config.switch("output_router_logits") and config.content.get("router_aux_loss_coef")):
        return 0.0
    return float(config.number("router_aux_loss_coef"))


def _computed(args: TransformerArgs) -> dict[str, Any]:
    """Return what a model's forward depends on, by the names of its fields: those of all layers as one."""
    layers = range(args.n_layers)
    kinds = [
        (args.layer(i).linear, args.theta_of_layer(i), args.experts is not None and args.layer(i).experts)
        for i in layers
    ]
    fields = asdict(args) | {"sliding_window": [args.window_of_layer(i) for i in layers], "layers": kinds}
    fields["attention_scale"] = args.score_scale
    others = ["mtp_layers", "max_seq_len", "router_aux_loss_coef", "router_aux_loss_load"]
    if args.experts is not None and args.experts.sigmoid:
        others.append("router_bias_update_rate")  # the bias is one of the weights there
    return {name: value for name, value in fields.items() if name not in others}
