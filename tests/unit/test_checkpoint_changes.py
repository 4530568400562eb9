"""The table of docs/checkpoints.md, what may change between save and load, is what the program says of each change.

A row's settings are tried against a checkpoint of the debug model; the test prints the table that the page should have.
"""

import re
from pathlib import Path

import pytest

from tests.distributed.test_checkpoint_layouts import LAYOUTS, PAIRS
from tests.unit.test_checkpoint_folder import configured, save
from trainer.config.errors import ConfigError
from trainer.job import resolve

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- changes: a test compares them -->", "<!-- end of changes -->"
_ANEW = ("--checkpoint.load_step=4", "--checkpoint.exclude_from_loading")
_DEGREES = (
    *("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel"),
)
_REFUSED = re.compile(r"is not the .* of the checkpoint [^,;]*(, whose [^;]*)?; resume with ")
# Kind of change -> settings, each tried alone, and the number of ranks.
CHANGES: dict[str, tuple[tuple[tuple[str, ...], ...], int]] = {
    "number of ranks": (((),), 8),
    "every degree of parallelism": (tuple((f"--parallelism.{name}_degree=2",) for name in _DEGREES), 2),
    "batch: `training.local_batch_size`, `training.global_batch_size`": (
        (("--training.local_batch_size=2",), ("--training.global_batch_size=64",)),
        1,
    ),
    "`training.seq_len`, `training.attention_mask`": (
        (("--training.seq_len=64",), ("--training.attention_mask=document",)),
        1,
    ),
    "RoPE: `model.rope_theta`, `model.rope_scaling`": ((("--model.rope_theta=1e6",), ("--model.rope_scaling=4",)), 1),
    "`model.sliding_window`": ((("--model.sliding_window=64",),), 1),
    "`training.steps`, tables `[optimizer]`, `[muon]`, `[lr_scheduler]`, `training.max_norm`": (
        (
            ("--training.steps=7",),
            ("--optimizer.lr=1e-5",),
            ("--optimizer.beta2=0.99",),
            ("--optimizer.weight_decay=0",),
            ("--optimizer.implementation=fused",),
            ("--lr_scheduler.decay_type=cosine",),
            ("--training.max_norm=inf",),
        ),
        1,
    ),
    "computation: `training.mixed_precision_param`, recomputation, compilation, CPU offload": (
        (
            ("--training.mixed_precision_param=bfloat16",),
            ("--activation_checkpoint.mode=full",),
            ("--compile.enable", "--compile.backend=eager"),
            ("--training.enable_cpu_offload",),
        ),
        1,
    ),
    "other keys of `[checkpoint]`, `[metrics]`, `[comm]`, `[validation]`": (
        (("--checkpoint.interval=7",), ("--metrics.log_freq=3",), ("--validation.enable",)),
        1,
    ),
    "`training.seed`": ((("--training.seed=3",),), 1),
    "`training.data_streams`": ((("--training.data_streams=32",),), 1),
    'the two, with `checkpoint.exclude_from_loading = ["dataloader"]`': (
        ((*_ANEW, "dataloader", "--training.seed=3"), (*_ANEW, "dataloader", "--training.data_streams=32")),
        1,
    ),
    "`optimizer.name`, except between AdamW and Adam": ((("--optimizer.name=Muon",),), 1),
    '`optimizer.name`, with `checkpoint.exclude_from_loading = ["optimizer"]`': (
        ((*_ANEW, "optimizer", "--optimizer.name=Muon"),),
        1,
    ),
    "`training.dtype`": ((("--training.dtype=bfloat16",),), 1),
    "model: `model.name`, sizes of `model.flavor`, `model.norm_type`, `model.attention_sinks`, ...": (
        (
            ("--model.name=qwen3", "--model.flavor=debugmodel"),
            ("--model.flavor=1B",),
            ("--model.norm_type=layernorm",),
            ("--model.attention_sinks",),
            ("--model.short_conv_kernel=4",),
        ),
        1,
    ),
}


def outcome(tmp_path: Path, settings: tuple[tuple[str, ...], ...], ranks: int) -> str:
    """`yes`, or `no: ` and why, which is the same for all these settings."""
    said = set()
    for arguments in settings:
        try:
            resolve(configured(tmp_path, *arguments), ranks, "cpu")
            said.add("yes")
        except ConfigError as error:
            (why,) = _REFUSED.findall(str(error)) or [str(error)]
            said.add(f"no{why.replace(', whose', ': saved') or ': saved tensors would be others'}")
    (one,) = said
    return one


@pytest.fixture
def table(tmp_path: Path) -> str:
    save(tmp_path / "checkpoint", 4)
    rows = ["| what changes | may it change? |", "|---|---|"]
    rows += [f"| {name} | {outcome(tmp_path, *change)} |" for name, change in CHANGES.items()]
    return "\n".join(rows)


def test_the_page_says_what_may_change(table: str) -> None:
    layouts = f"Each of {', '.join(LAYOUTS)} loads what each other has saved: {len(PAIRS)} pairs."
    begin, end = (PAGE.read_text().index(marker) for marker in (BEGIN, END))
    content = PAGE.read_text()[begin + len(BEGIN) : end].strip()
    assert content == f"{table}\n\n{layouts}", f"the page should have\n\n{table}\n\n{layouts}"


def test_both_answers_stand_in_the_table(table: str) -> None:
    assert table.count("| yes |") > 5
    assert table.count("| no: ") == 5
