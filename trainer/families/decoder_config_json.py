"""`config.json` of transformers' decoders that are made of the same parts as Llama. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.args import is_further, windows_of
from trainer.families.config_parts import Part
from trainer.families.decoder_args import TABLES, TransformerArgs
from trainer.families.decoder_tensors import hf_tensor
from trainer.families.layer_kinds import LayerKind, in_turns
from trainer.families.rotary_entries import (
    KINDS,
    rope_entries,
    rotary,
    rotary_share,
    rotary_table,
)
from trainer.hugging_face.config_json import Entries
from trainer.hugging_face.pairs import HFTensor
from trainer.hugging_face.stored import FLOAT8_BLOCK

_MOST_LAYERS = 10_000
"""Largest number of layers: a record of each layer is made before anything is computed."""
_ROPE = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class HFDecoder:
    """One architecture of transformers: its names, and the entries by which it differs from the others."""

    model_type: str
    architecture: str
    parts: Sequence[Part]
    """Entries that not all architectures have."""
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Modules of a layer here -> their names there, where they differ from the names of `decoder_tensors`."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The key and the name there of the activation of the gates in feed-forward networks."""
    rotates_a_share: bool = False
    """Whether the entry `partial_rotary_factor` counts."""
    other_classes: tuple[str, ...] = ()
    """Other names of the class in published files."""
    adjacent_pairs: bool = False
    """Whether the two rows of a rotary pair are adjacent there, too."""
    rope_types: Sequence[str] = KINDS
    """The supported types of rotary positions."""
    quantised: tuple[str, ...] = ("fp8",)
    """The values of `quant_method` with which published weights can be read."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer that predicts further tokens -> their names there, "" -> name prefix of its other modules; {}
    is its number, counted after the other layers. transformers does not read them. Empty: there are none."""

    images_type: str = ""
    """`model_type` of folders in which this model of text is a part of a model that reads images, too. Empty: none."""
    float32_in_float16: tuple[str, ...] = ()
    """Parts of the names of tensors that transformers keeps in float32 if weights are in float16."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Entries that the architecture's class assumes if the file lacks them, where they differ from Llama's."""
        return TABLES["assumed"].get(self.model_type, {})

    def tensor(self, args: TransformerArgs, name: str) -> HFTensor | None:
        """Return Hugging Face's tensor for a parameter, see `hf_tensor`. None if there is none.

        Args:
            args: The arguments of the model.
            name: Name of the parameter.
        """
        if not is_further(args, name):
            there = hf_tensor(args, name, self.names)
            if self.adjacent_pairs and there is not None and there.moves_rows:
                return HFTensor(there.name, first_row=there.first_row, all_rows=there.all_rows)
            return there
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
        """Return name prefixes of tensors that are not read.

        These tensors belong to layers for further tokens that the model lacks, or have shared values: such layers
        repeat the embedding and the output, and layers that share keys and values repeat their projections.

        Args:
            args: The arguments of the model.
        """
        if not self.further:
            unused = ("k_proj.", "v_proj.", "k_norm.")
            shared = [layer for layer, kind in enumerate(args.kinds) if kind.shares_keys]
            return tuple(
                f"model.layers.{n}.self_attn.{name}" for n in shared for name in unused
            )
        first = args.n_layers
        read = args.mtp_layers if self._has_further(args) else 0
        if "{}" not in self.further[""]:
            return () if read else ("mtp.",)
        shared = [
            f"model.layers.{first + i}.{x}."
            for i in range(read)
            for x in ("embed_tokens", "shared_head.head")
        ]
        return (*shared, f"model.layers.{first + read}.")

    def check_features(self, args: TransformerArgs) -> None:
        """Check that the architecture has all features of the model.

        To check this, the written entries are read again: they must give the same model. Values that the forward does
        not need are not compared.

        Args:
            args: The arguments of the model.

        Raises:
            ConfigError: The architecture lacks a feature.
        """
        there = self.read(Entries(Path(), self._entries(args)))
        computed = _computed(args)
        for name, value in _computed(there).items():
            if value != computed[name]:
                key = "sliding_window_every" if name == "layers" else name
                raise ConfigError(
                    f"{self.architecture} of Hugging Face's transformers has {name} = {getattr(there, name)!r}, and "
                    f"this model {getattr(args, name)!r}; leave out model.{key}"
                )

    def check_start(self, args: TransformerArgs) -> None:
        """Check the features of a model that starts from Hugging Face's weights. Its selection biases start at zero.

        Args:
            args: The arguments of the model.

        Raises:
            ConfigError: The architecture lacks a feature.
        """
        self.check_features(replace(args, router_bias_update_rate=0.0))

    def read(self, config: Entries) -> TransformerArgs:
        """Return the arguments of the model.

        Args:
            config: The entries of the file; ConfigError for a missing entry or an unsupported value.
        """
        # An empty table of RoPE counts as missing.
        entries = {
            key: value for key, value in config.content.items() if value or key not in _ROPE
        }
        config = Entries(config.file, {**self.defaults, **entries})
        config.only("model_type", self.model_type)
        other_classes = ([name] for name in self.other_classes)
        config.only("architectures", [self.architecture], *other_classes)
        config.only(*self.activation)
        config.only("attention_dropout", 0.0)
        dim = config.whole("hidden_size")
        n_heads, n_kv_heads, head_dim = _heads(config, dim)
        theta, scaling = rotary(config, self.rope_types)
        share = rotary_share(config) if self.rotates_a_share else 1.0
        if not self.rotates_a_share and "proportional" not in self.rope_types:
            for table in config, rotary_table(config):
                table.only("partial_rotary_factor", 1.0)
        fields = {
            "dim": dim,
            "n_layers": config.whole("num_hidden_layers", most=_MOST_LAYERS),
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
        kinds = {}
        for part in self.parts:
            part_fields = part.read(config)
            kinds |= part_fields.pop("layers", {})
            fields |= part_fields
        if kinds:
            layers = range(fields["n_layers"])
            fields["layers"] = in_turns(
                [LayerKind(**{name: of[i] for name, of in kinds.items()}) for i in layers]
            )
        self._check_quantization(config)
        return TransformerArgs(**fields)

    def _check_quantization(self, config: Entries) -> None:
        quantised = config.table("quantization_config")
        if quantised.content.get("quant_method") not in self.quantised:
            config.only("quantization_config", None)
        elif quantised.content["quant_method"] == "fp8":
            quantised.only("weight_block_size", [FLOAT8_BLOCK, FLOAT8_BLOCK])
            quantised.only("fmt", "e4m3")

    def write(self, args: TransformerArgs) -> dict[str, Any]:
        """Return the entries of a model.

        Args:
            args: The arguments of the model.

        Raises:
            ConfigError: The architecture lacks a feature.
        """
        self.check_features(args)
        return self._entries(args)

    def _entries(self, args: TransformerArgs) -> dict[str, Any]:
        longest = args.max_seq_len
        scaling = args.rope_scaling
        rope = rope_entries(scaling)
        part_entries = {}
        for part in self.parts:
            needed, words = part.needs
            if needed and getattr(args, needed) is None:
                raise ConfigError(
                    f"{self.architecture} of Hugging Face's transformers needs {words}, and this model has none"
                )
            part_entries |= part.write(args)
        share = {"partial_rotary_factor": args.rope_share} if self.rotates_a_share else {}
        rope |= share
        old = {"rope_theta": args.rope_theta, "rope_scaling": None if scaling is None else rope}
        if self.rope_types is not KINDS:  # an architecture of transformers 5
            old = {}
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
            **old,
            **share,
            "rope_parameters": rope | {"rope_theta": args.rope_theta},
            **part_entries,
        }


def _computed(args: TransformerArgs) -> dict[str, Any]:
    """Return all values that a model's forward depends on, by field; the field `layers` has a value for each layer."""
    kinds = [
        (
            kind.linear,
            args.layer(i).mixer.rope_theta,
            args.experts is not None and kind.experts,
            kind.global_heads,
            kind.shares_keys,
            kind.ffn_factor,
        )
        for i, kind in enumerate(args.kinds)
    ]
    fields = asdict(args) | {
        "sliding_window": windows_of(args),
        "layers": kinds,
        "attention_scale": args.score_scale,
    }
    others = ["mtp_layers", "max_seq_len", "router_aux_loss_coef", "router_aux_loss_load"]
    if args.experts is not None and args.experts.sigmoid:
        others.append("router_bias_update_rate")  # the bias is one of the weights there
    return {name: value for name, value in fields.items() if name not in others}


def _heads(config: Entries, dim: int) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key/value heads, and the channels of a head.

    Raises:
        ConfigError: They do not divide each other, or the channels are odd.
    """
    n_heads = config.whole("num_attention_heads")
    n_kv_heads = config.whole("num_key_value_heads", n_heads)
    divided = {"num_attention_heads": n_kv_heads}
    if config.content.get("head_dim") is None:
        divided["hidden_size"] = n_heads
    for whole, part in divided.items():
        if config.whole(whole) % part:
            raise ConfigError(
                f"{config.file}: {whole} = {config.whole(whole)} must be a multiple of {part}"
            )
    head_dim = config.whole("head_dim", dim // n_heads)
    if head_dim % 2:
        raise ConfigError(
            f"{config.file}: head_dim = {head_dim} must be even, for rotary positions"
        )
    return n_heads, n_kv_heads, head_dim
