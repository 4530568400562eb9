"""Rotary positions in `config.json`. Torch-free.

Since transformers 5 their table is `rope_parameters`; before, they had the entries `rope_theta` and `rope_scaling`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.config.errors import ConfigError
from trainer.families.layer_kinds import RopeScaling
from trainer.hugging_face.config_json import Entries

FULL, SLIDING = "full_attention", "sliding_attention"


def rotary_table(config: Entries) -> Entries:
    """Return the table of rotary positions. If there are two, return the table of full attention; empty without one.

    Args:
        config: The entries of the file.
    """
    table = config.table(
        "rope_parameters" if config.content.get("rope_parameters") else "rope_scaling"
    )
    return table.table(FULL) if FULL in table.content else table


def _head_dim(config: Entries) -> int:
    heads = config.whole("num_attention_heads")
    return config.whole("head_dim", config.whole("hidden_size") // heads)


def rotary_share(config: Entries) -> float:
    """Return the share of a head's channels that is rotated, by default 1.

    Args:
        config: The entries of the file.

    Raises:
        ConfigError: The share is above 1, or an odd number of channels is rotated.
    """
    key = "partial_rotary_factor"
    table = rotary_table(config)
    share = float((table if key in table.content else config).number(key, 1.0))
    head_dim = _head_dim(config)
    if (
        key not in {**table.content, **config.content}
        and config.content.get("rotary_dim") is not None
    ):
        share = config.whole("rotary_dim") / head_dim
    if not share <= 1 or int(head_dim * share) % 2:
        raise ConfigError(
            f"{config.file}: {key} = {share} must rotate an even number of a head's {head_dim} channels, "
            f"at most {head_dim}; rotary_dim, if the file has it, is {key} x head_dim"
        )
    return share


KINDS = "default", "linear", "llama3", "yarn", "longrope"
"""Types of rotary positions that most architectures support."""
_NUMBERS = {
    "llama3": {"low_freq_factor": None, "high_freq_factor": None},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0},
}
"""Numbers of a kind, which are fields of `RopeScaling` too -> the usual one. None: the entry is needed."""


def rotary(config: Entries, kinds: Sequence[str] = KINDS) -> tuple[float, RopeScaling | None]:
    """Return the base of the frequencies, by default 10000, and their scaling; None for no scaling.

    Args:
        config: The entries of the file.
        kinds: The types that the architecture supports, the default one first.

    Raises:
        ConfigError: The type is another one, or an entry of the scaling is missing or no such number.
    """
    table = rotary_table(config)
    theta = float(
        (table if "rope_theta" in table.content else config).number("rope_theta", 10000.0)
    )
    kind = table.only("rope_type" if "rope_type" in table.content else "type", *kinds)
    if kind == "default":
        return theta, None
    if kind == "longrope":
        return theta, _longrope(config, table)
    if kind == "proportional":
        share = float(table.number("partial_rotary_factor", 1.0))
        return theta, RopeScaling(float(table.number("factor", 1.0)), kind=kind, share=share)
    scaling = RopeScaling(float(table.number("factor")), kind=kind)
    if kind == "linear":
        return theta, scaling
    longest = config.content.get("max_position_embeddings")
    original = table.whole("original_max_position_embeddings", longest)
    fields = {key: float(table.number(key, usual)) for key, usual in _NUMBERS[kind].items()}
    if kind == "yarn":
        fields["truncate"] = bool(table.only("truncate", True, False))
        fields["attention_factor"] = _attention_factor(table)
        if table.content.get("mscale_all_dim"):
            fields["mscale_all_dim"] = float(table.number("mscale_all_dim"))
    return theta, replace(scaling, original_max_seq_len=original, **fields)


def _longrope(config: Entries, table: Entries) -> RopeScaling:
    """Return the scaling of LongRoPE. Phi's files have the original length outside the table, and no factor.

    If a list of factors does not have one number above 0 for each rotated pair, a ConfigError is raised.
    """
    key = "original_max_position_embeddings"
    original = (config if key in config.content else table).whole(key)
    pairs = int(_head_dim(config) * rotary_share(config)) // 2
    factors = []
    for name in ("short_factor", "long_factor"):
        values = table.content.get(name)
        numbers = isinstance(values, list) and all(
            isinstance(x, (int, float)) and x > 0 for x in values
        )
        if not numbers or len(values) != pairs:
            raise ConfigError(
                f"{table.file}: {name} = {values!r} must be a list of {pairs} numbers above 0"
            )
        factors.append(tuple(map(float, values)))
    return RopeScaling(
        float(table.number("factor", config.whole("max_position_embeddings") / original)),
        kind="longrope",
        original_max_seq_len=original,
        attention_factor=None
        if table.content.get("attention_factor") is None
        else _attention_factor(table),
        short_factors=factors[0],
        long_factors=factors[1],
    )


def _attention_factor(table: Entries) -> float | None:
    """Return YaRN's factor of attention from its entry, or computed from DeepSeek's two entries.

    Without these entries, it is None: the factor of the paper.
    """
    if table.content.get("attention_factor") is not None:
        return float(table.number("attention_factor"))
    both = "mscale", "mscale_all_dim"
    if not all(map(table.content.get, both)):
        return None
    log = math.log(table.number("factor"))
    over, under = (0.1 * table.number(key) * log + 1.0 for key in both)
    return over / under


def rope_entries(scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the entries of a scaling as `rope_parameters` or `rope_scaling` has them, without theta.

    Args:
        scaling: The scaling. None: no scaling, which is `{"rope_type": "default"}`.
    """
    if scaling is None:
        return {"rope_type": "default"}
    entries = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "proportional":
        if scaling.factor == 1:
            del entries["factor"]
        return entries | {"partial_rotary_factor": scaling.share}
    if scaling.kind == "linear":
        return entries
    entries["original_max_position_embeddings"] = scaling.original_max_seq_len
    entries |= {key: getattr(scaling, key) for key in _NUMBERS.get(scaling.kind, ())}
    if scaling.kind == "longrope":
        entries |= {
            "short_factor": [*scaling.short_factors],
            "long_factor": [*scaling.long_factors],
        }
    if scaling.attention_factor is not None:
        entries["attention_factor"] = scaling.attention_factor
    if scaling.mscale_all_dim:
        entries["mscale_all_dim"] = scaling.mscale_all_dim
    return entries if scaling.truncate else entries | {"truncate": False}


def write_local_tables(args: Any, otherwise: float) -> dict[str, Any]:
    """Return a dict with one key, `rope_parameters`: the rotary tables of layers without and with a window.

    Args:
        args: The arguments of the model.
        otherwise: Theta of layers with a window, if no layer has its own.
    """
    own = {kind.rope_theta for kind in args.kinds} - {None}
    local = {"rope_type": "default", "rope_theta": own.pop() if own else otherwise}
    whole = rope_entries(args.rope_scaling) | {"rope_theta": args.rope_theta}
    return {"rope_parameters": {FULL: whole, SLIDING: local}}
