"""Entries of `config.json` that some architectures have. One part reads and writes each of them. Torch-free.

An architecture is a list of such parts, see `HFDecoder`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.args import windows_of
from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import ExpertArgs
from trainer.families.rotary_entries import FULL, SLIDING, rotary, write_local_tables
from trainer.hugging_face.config_json import Entries, entries_of

Fields = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Some entries, in both directions."""

    read: Callable[[Entries], Fields]
    """Entries -> fields of `TransformerArgs`, and as "layers" fields of `LayerKind`, each with its values for all
    layers. It raises a ConfigError, by key and value, if a value cannot be computed here."""
    write: Callable[[TransformerArgs], Fields] = lambda args: {}
    """The entries of these fields."""
    needs: tuple[str, str] = ("", "")
    """A field that a model needs to be written with this part, and its name in messages."""


def only(key: str, *supported: Any, written: bool = False) -> Part:
    """Return the part of a key that must have one of these values, the first by default. Others raise a ConfigError.

    Args:
        key: The key.
        *supported: The supported values.
        written: Whether to write the first value.
    """

    def read(config: Entries) -> Fields:
        config.only(key, *supported)
        return {}

    return Part(read, lambda args: {key: supported[0]} if written else {})


def always(**fields: Any) -> Part:
    """Return the part of fields that the architecture has without an entry.

    Args:
        **fields: Fields of `TransformerArgs`.
    """
    return Part(lambda config: fields)


def switch(key: str, *fields: str) -> Part:
    """Return the part of a switch. All these fields get its value.

    Args:
        key: The key of the switch.
        *fields: Fields of `TransformerArgs`. The first one is written.
    """
    return Part(
        lambda config: dict.fromkeys(fields, config.switch(key)),
        lambda args: {key: getattr(args, fields[0])},
    )


def renamed(part: Part, names: dict[str, str]) -> Part:
    """Return a part whose entries have other names in the file.

    Args:
        part: The part.
        names: Names in the file -> names of the part.
    """
    known = {ours: there for there, ours in names.items()}

    def read(config: Entries) -> Fields:
        content = config.content
        entries = {ours: content[there] for there, ours in names.items() if there in content}
        return part.read(Entries(config.file, content | entries))

    return Part(
        read,
        lambda args: {known.get(key, key): value for key, value in part.write(args).items()},
        part.needs,
    )


BIASES = switch("attention_bias", "attention_bias", "output_bias")
"""One switch for all biases of attention."""


def number(key: str, field: str, missing: float | None = None) -> Part:
    """Return the part of a number above 0.

    Args:
        key: The key.
        field: Field of `TransformerArgs`.
        missing: The field's value, None too, if the file has no entry or null.
    """
    return Part(
        lambda config: {
            field: missing if config.content.get(key) is None else float(config.number(key))
        },
        lambda args: {key: getattr(args, field)},
    )


# ---- kinds of layers


def read_layer_types(
    config: Entries, names: Sequence[str], assumed: Sequence[str], key: str = "layer_types"
) -> list[str]:
    """Return the kind of each layer.

    Args:
        config: The entries of the file.
        names: The supported kinds.
        assumed: The kinds if the file has no entry.
        key: Key of the kinds.

    Raises:
        ConfigError: There is another kind, or the entry does not have one kind for each layer.
    """
    n_layers = config.whole("num_hidden_layers")
    kinds = config.content.get(key)
    kinds = list(assumed) if kinds is None else kinds
    if (
        not isinstance(kinds, list)
        or len(kinds) != n_layers
        or not {*names}.issuperset(map(str, kinds))
    ):
        raise ConfigError(
            f"{config.file}: {key} = {kinds!r} is not supported; it must be {' or '.join(map(repr, names))} for each "
            f"of {n_layers} layers"
        )
    return kinds


def full_every(config: Entries, other: str, every: int) -> list[str]:
    """Return kinds of layers: every n-th layer has full attention.

    Args:
        config: Has the number of layers.
        other: The kind of the other layers.
        every: n.
    """
    return [
        other if (i + 1) % every else FULL for i in range(config.whole("num_hidden_layers"))
    ]


def read_windows(config: Entries, assumed: Sequence[str]) -> Fields:
    """Return the fields of the sliding window, from `layer_types`: the window, and which layers have it.

    Args:
        config: The entries of the file.
        assumed: The kinds of layers if the file has no entry.
    """
    kinds = read_layer_types(config, (FULL, SLIDING), assumed)
    window = config.whole("sliding_window") if SLIDING in kinds else None
    return {
        "sliding_window": window,
        "layers": {"window": [window is None or kind == SLIDING for kind in kinds]},
    }


def write_windows(args: TransformerArgs, otherwise: int | None = None) -> Fields:
    """Return the entries that `read_windows` reads.

    Args:
        args: The arguments of the model.
        otherwise: The window that is written if no layer has a window: some models of transformers always build its
            mask.
    """
    kinds = [FULL if window is None else SLIDING for window in windows_of(args)]
    return {"sliding_window": args.sliding_window or otherwise, "layer_types": kinds}


def windows(full: int, otherwise: int, key: str = "") -> Part:
    """Return the part that reads and writes the sliding window, and which layers have it.

    If a file has no `layer_types`, every n-th layer has full attention, and the others have the window.

    Args:
        full: n; with `key`, the value of n if the file lacks the key.
        otherwise: The window that is written if no layer has one, see `write_windows`.
        key: The file's key of n, if it has one.
    """
    return Part(
        lambda config: read_windows(
            config, full_every(config, SLIDING, config.whole(key, full) if key else full)
        ),
        lambda args: write_windows(args, otherwise),
    )


def with_local_tables(part: Part, assumed: float, old_key: str = "") -> Part:
    """Return a part that adds to `windows` the base of the frequencies of the layers with a window.

    It is for models in which these layers have their own frequencies, without scaling.

    Args:
        part: The result of `windows`.
        assumed: Base of these frequencies if the file has no entry.
        old_key: The name of the entry of this base before transformers 5, if there was one.
    """

    def read(config: Entries) -> Fields:
        fields = part.read(config)
        theta = None
        layers = fields["layers"]
        if fields["sliding_window"] is not None:
            table = config.table("rope_parameters").table(SLIDING)
            table.only("rope_type", "default")
            old = config.content.get(old_key) or assumed
            theta = float(table.number("rope_theta", old))
            theta = None if (theta, None) == rotary(config) else theta
        layers["rope_theta"] = [theta if has else None for has in layers["window"]]
        return fields

    def write(args: TransformerArgs) -> Fields:
        return part.write(args) | write_local_tables(args, args.rope_theta)

    return Part(read, write)


WINDOW = Part(
    lambda config: {
        "sliding_window": None
        if config.content.get("sliding_window") is None
        else config.whole("sliding_window")
    },
    lambda args: {"sliding_window": args.sliding_window},
)
"""All layers have the window, if there is one."""


def check_switched(config: Entries, window: int | None, needed: str) -> None:
    """Check that layers with a window have the entry that switches it on, `use_sliding_window`.

    Args:
        config: The entries of the file.
        window: The window. None if no layer has one.
        needed: Names of the entries that such a file needs, only for the message.

    Raises:
        ConfigError: A layer has a window, and the switch is off or missing.
    """
    if window is not None and not config.switch("use_sliding_window"):
        raise ConfigError(
            f"{config.file}: layer_types = {config.content['layer_types']!r} is not supported "
            f"without {needed}"
        )


def _read_switched(config: Entries) -> Fields:
    """Read Qwen's entries: a switch, and the number, from 0, of the first layer with a window."""
    first = config.content.get("max_window_layers", 28)  # the default of transformers
    if config.content.get("layer_types") is not None:
        first = 0  # not read
    elif not isinstance(first, int):
        raise ConfigError(
            f"{config.file}: max_window_layers = {first!r} must be a number of layers"
        )
    on = config.switch("use_sliding_window")
    layers = range(config.whole("num_hidden_layers"))
    fields = read_windows(
        config, [SLIDING if on and layer >= first else FULL for layer in layers]
    )
    check_switched(config, fields["sliding_window"], "use_sliding_window")
    return fields


SWITCHED_WINDOWS = Part(
    _read_switched,
    lambda args: {
        **write_windows(args),
        "use_sliding_window": args.sliding_window is not None,
        "max_window_layers": args.n_layers if args.sliding_window is None else 0,
    },
)


def _read_sparse(config: Entries) -> Fields:
    layers = range(config.whole("num_hidden_layers"))
    dense = config.content.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError(
            f"{config.file}: mlp_only_layers = {dense!r} must be a list of layers"
        )
    step = config.whole("decoder_sparse_step", 1)
    have_experts = [layer not in dense and (layer + 1) % step == 0 for layer in layers]
    return {"layers": {"experts": have_experts}}


SPARSE_LAYERS = Part(
    _read_sparse,
    lambda args: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(args.kinds) if not kind.experts],
    },
)
"""Every n-th layer has experts, from number n - 1 on, except the layers that the file names."""


# ---- experts


def expert_keys(number: str, width: str) -> dict[str, str]:
    """Return the keys of three fields of `ExpertArgs`.

    Args:
        number: Key of the number of experts.
        width: Key of their hidden channels.
    """
    return {number: "number", "num_experts_per_tok": "per_token", width: "hidden_dim"}


def read_experts(config: Entries, keys: Mapping[str, str], **fields: Any) -> ExpertArgs:
    """Return the experts.

    Args:
        config: The entries of the file.
        keys: Keys of whole numbers -> fields of `ExpertArgs`.
        **fields: Other fields of `ExpertArgs`.

    Raises:
        ConfigError: The groups do not divide the experts, or a token cannot choose this many groups or experts.
    """
    routed = ExpertArgs(**config.wholes(keys), **fields)
    if routed.number % routed.groups or routed.groups_per_token > routed.groups:
        raise ConfigError(
            f"{config.file}: n_group = {routed.groups} must divide {routed.number} experts and be at least "
            f"topk_group = {routed.groups_per_token}"
        )
    if routed.per_token > (most := routed.number // routed.groups * routed.groups_per_token):
        raise ConfigError(
            f"{config.file}: num_experts_per_tok = {routed.per_token} must be at most num_experts = {most}"
        )
    return routed


def read_balance(config: Entries) -> Fields:
    """Return the coefficient of the loss that balances experts. transformers adds it only with `output_router_logits`.

    Published models have the switch off, and some have a coefficient (gpt-oss: 0.9) that nobody trains with.

    Args:
        config: The entries of the file.
    """
    on = config.switch("output_router_logits") and config.content.get("router_aux_loss_coef")
    return {"router_aux_loss_coef": float(config.number("router_aux_loss_coef")) if on else 0.0}


EXPERTS = "experts", "experts"
NORMALISE = {"norm_topk_prob": "normalise"}
SHARED = {"shared_expert_intermediate_size": "shared_dim"}


def experts(number: str, width: str, keys: dict[str, str] | None = None, **fields: Any) -> Part:
    """Return the part of routed experts, with the coefficient of their balance loss.

    Args:
        number: See `expert_keys`; since transformers 5 the number is `num_local_experts`.
        width: See `expert_keys`.
        keys: Other keys, a switch or a whole number -> fields of `ExpertArgs`.
        **fields: Fields of `ExpertArgs` without an entry.
    """
    keys = keys or {}

    def read(config: Entries) -> Fields:
        there = "num_local_experts" if "num_local_experts" in config.content else number
        values = {}
        for key, field in keys.items():
            if field == "normalise":
                values[field] = config.switch(key)
            elif config.content.get(key) != 0:
                values[field] = config.whole(key)
        routed = read_experts(config, expert_keys(there, width), **values, **fields)
        return {"experts": routed, **read_balance(config)}

    def write(args: TransformerArgs) -> Fields:
        entries = entries_of(args.experts, expert_keys(number, width) | keys)
        return entries | {"router_aux_loss_coef": args.router_aux_loss_coef}

    return Part(read, write, EXPERTS)
