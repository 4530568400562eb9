"""Table of what works with what: the cells of docs/support_matrix.md, the record of those that ran, and its page.

A cell is a layout of ranks and a feature. `tests/distributed/test_support_matrix.py` runs them; the record keeps for
each what came out and a digest of its arguments, so that a cell that changed counts as not tested.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from scripts.provenance import commit, versions
from tests.distributed.harness import BASE, FAMILY_FLAVORS, STEPS, TEST_FLAVORS, TINY, VOCAB
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.families.decoder_args import TransformerArgs
from trainer.job import resolve
from trainer.job.degrees import Degrees

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD = DOCS / "measurements" / "support_matrix.json"
PAGE = DOCS / "support_matrix.md"
DEVICE = "CPU, gloo"
COMMAND = "pytest tests/distributed/test_support_matrix.py --record-support"

_DIMENSIONS = {
    "ddp": "data_parallel_replicate",
    "fsdp": "data_parallel_shard",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
}
# By number of ranks; a number behind a dimension is its degree.
LAYOUTS = (
    ("ddp2", "fsdp2", "cp2", "tp2", "pp2"),
    (
        *("ddp2+fsdp2", "ddp2+cp2", "ddp2+tp2", "ddp2+pp2", "fsdp2+cp2", "fsdp2+tp2", "fsdp2+pp2"),
        *("cp2+tp2", "cp2+pp2", "tp2+pp2", "cp4"),
    ),
    ("ddp2+fsdp2+cp2", "ddp2+fsdp2+tp2", "fsdp2+cp2+tp2", "fsdp2+cp2+pp2", "fsdp2+tp2+pp2", "cp2+tp2+pp2"),
)
# Features tested on several dimensions at once; test_pairs.py has every two settings together.
OF_PAIRS = (
    *(
        "as it is",
        "packed documents",
        "documents assigned by cost",
        "sliding window in every 2nd layer",
        "attention sinks",
        "short convolution, packed documents",
    ),
    *("CP all_to_all", "CP hybrid", "PP Interleaved1F1B", "PP InterleavedZeroBubble", "recompute operators", "compile"),
    "tied embeddings",
    "sequences in chunks, offloaded; packed documents",
    *("Muon", "multi-token prediction", "multi-token prediction of DeepSeek-V3"),
    *("experts divided over ranks", "gpt-oss: experts, windows, sinks, documents"),
    *("Gemma 2: soft-caps, norms around, windows", "GLM-4.5: sigmoid router, shared expert, a dense layer"),
    *("DeepSeek-V3: latent attention, documents", "DeepSeek-V3.2: sparse attention, documents"),
    "Kimi Linear: Kimi Delta and latent attention, documents",
    *("Granite 4: Mamba-2 and experts, documents", "Qwen3-Next: Gated DeltaNet and experts, documents"),
)
OF_TRIPLES = ("as it is", "packed documents", "recompute operators", "Muon", "multi-token prediction")
# Of the harness's model of two layers: four stages, for schedules with two a rank.
_FOUR_STAGES = ("--parallelism.pipeline_parallel_module_fqns", "tok_embeddings", "layers.0", "layers.1", "norm,output")
_DIVIDED = ("--model.name=qwen3_moe", "--parallelism.expert_parallel_degree=2")
_FURTHER = ("--model.mtp_layers=2", "--training.mtp_loss_weight=0.5", "--training.attention_mask=document")
_COMPILE = ("--compile.enable", "--compile.backend=aot_eager")


@dataclass(frozen=True)
class Feature:
    """Arguments on top of a layout's; needs: dimensions that must be there, one of several where a tuple names them."""

    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    in_reference: bool = False
    """The single process has it too."""
    degree: int = 2
    """Least degree of what it needs."""
    dtype: str = "float64"
    tolerance: float = 1e-10


def _method(name: str, *options: str, degree: int = 2) -> Feature:
    return Feature((f"--parallelism.context_parallel_method={name}", *options), ("cp",), degree=degree)


def _schedule(name: str, *options: str) -> Feature:
    return Feature((f"--parallelism.pipeline_parallel_schedule={name}", *options), ("pp",))


FEATURES: dict[str, Feature] = {
    "as it is": Feature(),
    "without gradient accumulation": Feature(("--training.global_batch_size=-1",), in_reference=True),
    "packed documents": Feature(("--training.attention_mask=document",), in_reference=True),
    "documents assigned by cost": Feature(
        ("--training.attention_mask=document", "--parallelism.context_parallel_load_balancer=balanced"), ("cp",)
    ),
    "sliding window in every 2nd layer": Feature(
        ("--model.sliding_window=5", "--model.sliding_window_every=2"), in_reference=True
    ),
    "attention sinks": Feature(("--model.attention_sinks",), in_reference=True),
    "short convolution": Feature(("--model.short_conv_kernel=4",), in_reference=True),
    "short convolution, packed documents": Feature(
        ("--model.short_conv_kernel=4", "--training.attention_mask=document"), in_reference=True
    ),
    "uneven shards": Feature(("--training.seq_len=14", "--training.attention_mask=document"), ("cp",)),
    "CP all_gather": _method("all_gather"),
    "CP all_to_all": _method("all_to_all"),
    "CP hybrid": _method("hybrid", "--parallelism.context_parallel_hybrid_degrees", "2", "2", degree=4),
    "CP contiguous": Feature(("--parallelism.context_parallel_load_balancer=contiguous",), ("cp",)),
    "CP consistency checks": Feature(("--comm.check_consistency",), ("cp",)),
    "PP GPipe": _schedule("GPipe"),
    "PP Interleaved1F1B": _schedule("Interleaved1F1B", *_FOUR_STAGES),
    "PP LoopedBFS": _schedule("LoopedBFS", *_FOUR_STAGES),
    "PP InterleavedZeroBubble": _schedule("InterleavedZeroBubble", *_FOUR_STAGES),
    "PP ZBVZeroBubble": _schedule("ZBVZeroBubble", *_FOUR_STAGES),
    "PP DualPipeV": _schedule("DualPipeV", *_FOUR_STAGES, "--training.local_batch_size=4"),
    "PP zero bubble, compiled": _schedule("InterleavedZeroBubble", *_FOUR_STAGES, *_COMPILE),
    "recompute layers": Feature(("--activation_checkpoint.mode=full",)),
    "recompute every 2nd layer": Feature(
        ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2")
    ),
    "recompute layers, offload inputs": Feature(
        (
            "--activation_checkpoint.mode=full",
            "--activation_checkpoint.offload=inputs",
            "--activation_checkpoint.offload_keep_last=0",
        )
    ),
    "recompute by operator, offload inputs and attention": Feature(
        (
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.offload=inputs+attention",
            "--activation_checkpoint.offload_keep_last=0",
        )
    ),
    "recompute groups of layers": Feature(("--activation_checkpoint.mode=full", "--activation_checkpoint.group=2")),
    "feed-forward in parts": Feature(("--activation_checkpoint.mlp_chunk_tokens=5",)),
    "sequences in chunks": Feature(("--training.sequence_chunks=3",)),
    "sequences in chunks, offloaded; packed documents": Feature(
        ("--training.sequence_chunks=3", "--training.sequence_chunks_offload", "--training.attention_mask=document")
    ),
    "recompute operators": Feature(("--activation_checkpoint.mode=selective",)),
    "recompute within a budget": Feature(("--activation_checkpoint.mode=memory_budget", *_COMPILE)),
    "recompute operators, zero bubble": _schedule(
        "InterleavedZeroBubble", *_FOUR_STAGES, "--activation_checkpoint.mode=selective"
    ),
    "compile": Feature(_COMPILE),
    "asynchronous TP": Feature(
        ("--parallelism.enable_async_tensor_parallel", "--compile.enable"),
        ("tp",),
    ),
    "loss over whole logits": Feature(("--parallelism.disable_loss_parallel",), ("tp",)),
    "FSDP never reshards": Feature(("--parallelism.fsdp_reshard_after_forward=never",), ("fsdp",)),
    "FSDP always reshards": Feature(("--parallelism.fsdp_reshard_after_forward=always",), ("fsdp",)),
    "FSDP prefetches 2 layers": Feature(("--parallelism.fsdp_forward_prefetch=2",), ("fsdp",)),
    "float8, rowwise (emulated)": Feature(
        ("--float8.enable", "--float8.recipe_name=rowwise", "--float8.emulate"),
        in_reference=True,
        dtype="float32",
        tolerance=1e-2,
    ),
    "CPU offload": Feature(("--training.enable_cpu_offload",)),
    "tied embeddings": Feature(("--model.flavor=tiny_tied",), in_reference=True),
    "layernorm": Feature(("--model.norm_type=layernorm",), in_reference=True),
    "layernorm without parameters": Feature(("--model.norm_type=np_layernorm",), in_reference=True),
    "QK norm, heads of their own size": Feature(("--model.name=qwen3",), in_reference=True),
    "biases of attention": Feature(("--model.name=qwen3", "--model.flavor=tiny_biased"), in_reference=True),
    "scaled RoPE": Feature(("--model.rope_scaling=8", "--model.rope_theta=10000"), in_reference=True),
    "YaRN": Feature(
        ("--model.rope_scaling=8", "--model.rope_scaling_type=yarn", "--model.rope_original_seq_len=8"),
        in_reference=True,
    ),
    "experts": Feature(("--model.name=qwen3_moe",), in_reference=True),
    "experts divided over ranks": Feature(_DIVIDED, in_reference=True),
    "experts divided over ranks, in parts": Feature(
        (*_DIVIDED, "--activation_checkpoint.mlp_chunk_tokens=5"), in_reference=True
    ),
    "gpt-oss: experts, windows, sinks, documents": Feature(
        ("--model.name=gpt_oss", "--training.attention_mask=document"), in_reference=True
    ),
    "Gemma 2: soft-caps, norms around, windows": Feature(("--model.name=gemma2",), in_reference=True),
    "GLM-4.5: sigmoid router, shared expert, a dense layer": Feature(
        ("--model.name=glm4_moe", "--parallelism.expert_parallel_degree=2"), in_reference=True
    ),
    **{
        feature: Feature(
            (f"--model.name={family}", "--training.attention_mask=document", "--parallelism.expert_parallel_degree=2"),
            in_reference=True,
        )
        for feature, family in (
            ("DeepSeek-V3: latent attention, documents", "deepseek_v3"),
            ("DeepSeek-V3.2: sparse attention, documents", "deepseek_v32"),
            ("Kimi Linear: Kimi Delta and latent attention, documents", "kimi_linear"),
            ("Granite 4: Mamba-2 and experts, documents", "granitemoehybrid"),
            ("Qwen3-Next: Gated DeltaNet and experts, documents", "qwen3_next"),
        )
    },
    "moments in bfloat16": Feature(("--optimizer.state_dtype=bfloat16",), in_reference=True),
    "z-loss, in chunks": Feature(("--training.z_loss=0.1", "--training.loss_chunk_tokens=5"), in_reference=True),
    "Muon": Feature(("--optimizer.name=Muon",), in_reference=True),
    "multi-token prediction": Feature(_FURTHER, in_reference=True),
    "multi-token prediction, loss in chunks": Feature((*_FURTHER, "--training.loss_chunk_tokens=5"), in_reference=True),
    "multi-token prediction, sequences in chunks": Feature(
        (*_FURTHER, "--training.sequence_chunks=3", "--activation_checkpoint.mode=full"), in_reference=True
    ),
    "multi-token prediction of DeepSeek-V3": Feature(
        (*_FURTHER, "--model.name=deepseek_v3", "--optimizer.name=Muon"), in_reference=True
    ),
    "fused AdamW": Feature(("--optimizer.implementation=fused",)),
    "Adam, parameter by parameter": Feature(
        ("--optimizer.name=Adam", "--optimizer.implementation=for-loop"), in_reference=True
    ),
}


@dataclass(frozen=True)
class Cell:
    """One feature on one layout."""

    layout: str
    feature: str

    @property
    def applies(self) -> bool:
        """Whether the layout has what the feature is about."""
        feature, degrees = FEATURES[self.feature], layout_degrees(self.layout)
        if self.feature not in {1: FEATURES, 2: OF_PAIRS, 3: OF_TRIPLES}[len(degrees)] and self.layout != "cp4":
            return False
        return all(degrees.get(dimension, 1) >= feature.degree for dimension in feature.needs)

    @property
    def world_size(self) -> int:
        product = 1
        for degree in layout_degrees(self.layout).values():
            product *= degree
        return product

    @property
    def arguments(self) -> list[str]:
        degrees = layout_degrees(self.layout)
        layout = [f"--parallelism.{key}_degree={degrees.get(name, 1)}" for name, key in _DIMENSIONS.items()]
        feature = FEATURES[self.feature]
        return [f"--training.dtype={feature.dtype}", *layout, *feature.arguments]

    @property
    def reference_arguments(self) -> list[str]:
        """Arguments of the single process: settings that change the model or its data, not the division of work."""
        feature = FEATURES[self.feature]
        not_parallel = [a for a in feature.arguments if not a.startswith("--parallelism.")]
        shared = [
            a for a in not_parallel if feature.in_reference or a.startswith(("--training.seq_len", "--training.att"))
        ]
        if "--training.global_batch_size=-1" in shared:  # the rows that all data-parallel ranks have together
            degrees = layout_degrees(self.layout)
            shared.append(f"--training.local_batch_size={2 * degrees.get('ddp', 1) * degrees.get('fsdp', 1)}")
        return [f"--training.dtype={feature.dtype}", *shared]

    @property
    def digest(self) -> str:
        """Changes with the arguments, the tolerance, and the settings and model of the harness."""
        tolerance = FEATURES[self.feature].tolerance
        flavors = {name: _set_fields(shape) for name, shape in TEST_FLAVORS.items()}
        for family, shapes in FAMILY_FLAVORS.items():
            if f"--model.name={family}" in self.arguments:
                flavors |= {f"{family} {name}": _set_fields(shape) for name, shape in shapes.items()}
        run = [*BASE, STEPS, VOCAB, flavors]
        text = json.dumps([self.arguments, self.reference_arguments, tolerance, run], default=_text_of)
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def check(self, arguments: list[str]) -> Degrees:
        """The program's own check of the settings.

        Raises:
            ConfigError: they are refused.
        """
        return resolve(parse_command_line(arguments).config, self.world_size).degrees


_ADDED = {
    "ExpertArgs": ("activation", "beside_dense"),
    "GatedDeltaArgs": ("by_head",),
    "LayerKind": ("global_heads", "shares_keys", "ffn_factor"),
    "RopeScaling": ("share",),
}
"""Fields of the records of layers that are newer than the record of cells: a default leaves a cell as it is."""


def _text_of(value: object) -> str:
    """The text of a record, as `repr` without added fields that have their default."""
    if not is_dataclass(value):
        return repr(value)
    kind = type(value).__qualname__
    shown = [
        f"{field.name}={_text_of(content)}"
        for field in fields(value)
        if (content := getattr(value, field.name)) != field.default or field.name not in _ADDED.get(kind, ())
    ]
    return f"{kind}({', '.join(shown)})"


def _set_fields(shape: TransformerArgs) -> dict[str, Any]:
    """Those that are not at their default, so that a new field leaves cells as they are."""
    default = TransformerArgs()
    return {f.name: getattr(shape, f.name) for f in fields(shape) if getattr(shape, f.name) != getattr(default, f.name)}


def layout_degrees(layout: str) -> dict[str, int]:
    """`fsdp2+tp2` -> {"fsdp": 2, "tp": 2}."""
    return {part[:-1]: int(part[-1]) for part in layout.split("+")}


def cells() -> list[Cell]:
    """All that apply."""
    every = [Cell(layout, feature) for group in LAYOUTS for layout in group for feature in FEATURES]
    return [cell for cell in every if cell.applies]


class Record:
    """The outcome of the last run of each cell, `tested` or `refused: message`, with the commit that ran it.

    The file: {"command", "made_with", "cells": layout -> feature -> [outcome, digest, commit]}.
    """

    def __init__(self, path: Path = RECORD) -> None:
        self.path = path
        content = json.loads(path.read_text()) if path.exists() else {}
        self.made_with: dict[str, str] = content.get("made_with", versions(DEVICE))
        self._entries: dict[str, dict[str, list[str]]] = content.get("cells", {})

    def outcome(self, cell: Cell) -> str | None:
        """None: it has not run with these arguments."""
        outcome, digest, _ = self._entries.get(cell.layout, {}).get(cell.feature, ("", "", ""))
        return outcome if digest == cell.digest else None

    def commits(self) -> list[str]:
        """Those at which cells ran, most cells first."""
        count = Counter(entry[2] for features in self._entries.values() for entry in features.values())
        return sorted(count, key=lambda name: (-count[name], name))

    def note(self, cell: Cell, outcome: str | None) -> None:
        """Set the outcome of a cell; None removes it."""
        entries = self._entries.setdefault(cell.layout, {})
        entries.pop(cell.feature, None)
        if outcome is not None:
            entries[cell.feature] = [outcome, cell.digest, commit()]

    def save(self) -> None:
        """Write the record, without cells that no longer exist."""
        kept = {(cell.layout, cell.feature) for cell in cells()}
        entries = {
            layout: {feature: entry for feature, entry in sorted(features.items()) if (layout, feature) in kept}
            for layout, features in sorted(self._entries.items())
        }
        lines = [
            f'"{layout}": {{\n' + ",\n".join(f"  {json.dumps(f)}: {json.dumps(e)}" for f, e in features.items()) + "\n}"
            for layout, features in entries.items()
        ]
        head = f'"command": {json.dumps(COMMAND)},\n"made_with": {json.dumps(versions(DEVICE))}'
        self.path.write_text(f"{{\n{head},\n" + '"cells": {\n' + ",\n".join(lines) + "\n}\n}\n")


def page(record: Record) -> str:
    """Return docs/support_matrix.md: for each number of ranks a table, where features with equal cells share a row.

    The layout cp4 stands in the first table: most features were tried alone on it and on two ranks.

    Args:
        record: The outcomes of all cells.
    """
    refusals: dict[str, int] = {}
    two, (*four, cp4), *others = LAYOUTS
    tables = [_table([*two, cp4], record, refusals)]
    tables += [_table(group, record, refusals) for group in (four, *others)]
    notes = "\n".join(f"{number}. {message}" for message, number in refusals.items())
    titles = ("Two ranks, and four", "Four ranks, two dimensions", "Eight ranks, three dimensions")
    body = "\n\n".join(f"## {title}\n\n{table}" for title, table in zip(titles, tables, strict=True))
    return _PAGE.format(
        command=COMMAND,
        body=body,
        notes=notes,
        model=TINY,
        vocab=VOCAB,
        **record.made_with,
    )


def _table(layouts: list[str], record: Record, refusals: dict[str, int]) -> str:
    features: dict[tuple[str, ...], list[str]] = {}
    for feature in FEATURES:
        cells = tuple(_shown(Cell(layout, feature), record, refusals) for layout in layouts)
        if any(cells):
            features.setdefault(cells, []).append(feature)
    rows = [f"| | {' | '.join(layouts)} |", f"|---|{'---|' * len(layouts)}"]
    rows += [f"| {'<br>'.join(names)} | {' | '.join(cells)} |" for cells, names in features.items()]
    return "\n".join(rows)


def _shown(cell: Cell, record: Record, refusals: dict[str, int]) -> str:
    if not cell.applies:
        return ""
    outcome = record.outcome(cell)
    if outcome is None:
        return "untested"
    if outcome == "tested":
        return "✓"
    return f"refused ({refusals.setdefault(outcome.removeprefix('refused: '), len(refusals) + 1)})"


_PAGE = """# What works with what

Tests made this page (`{command}`), and a test fails when it is out of date.

Every cell ran on a {device} (torch {torch}, Python {python}), with {model.n_layers} layers (4 for some pipelines) of
width {model.dim}, {model.n_heads} heads, {model.n_kv_heads} key/value heads, {vocab} words and sequences of 16 tokens.
It does not show that a kernel of a GPU is right. A layout lists its degrees: ddp (replicas), fsdp (shards), cp
(context), tp (tensor), pp (pipeline). By default pipelines run 1F1B, context parallelism runs the ring, and gradients
are accumulated. Features with equal cells share a row.

* ✓: the model trains for two steps. Losses, gradient norm, the gradient of every parameter and the weights match a
  single process, to 1e-10 in float64 (with float8 to 1e-2 in float32).
* refused: before training, the program prints the sentence with this number below.
* Empty: the feature has no meaning in this layout, or it was not tried alone there. `tests/distributed/test_pairs.py`
  trains every two settings together.

{body}

## Refused

{notes}
"""


def refusal(arguments: list[str], cell: Cell) -> str | None:
    """The sentence with which the settings are refused, if they are."""
    try:
        cell.check(arguments)
    except ConfigError as error:
        return f"refused: {error}"
    return None
