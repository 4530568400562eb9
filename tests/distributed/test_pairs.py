"""Law: whatever is combined, losses, gradients, norm and weights equal one process.

Every pair of degrees and features that work together is in some row of a covering array, on at most four ranks. The
support matrix (make test-all) has each feature on each single layout, up to eight ranks.
"""

import math
from itertools import combinations

import pytest
import torch

from tests.covering import Row, covering_array, pairs_of
from tests.distributed.harness import assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_balance import same_rows
from tests.distributed.test_parity import degrees, reference
from trainer.parallel.pipeline_parallel import V_SHAPED

_STAGES = "--parallelism.pipeline_parallel_module_fqns"
_FOUR_STAGES = [_STAGES, "tok_embeddings", "layers.0", "layers.1", "norm,output"]
_DOCUMENTS = "--training.attention_mask=document"
_WINDOW = ["--model.sliding_window=5", "--model.sliding_window_every=2"]
_BALANCED = "--training.balance=step"
_COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
_PP = "--parallelism.pipeline_parallel_schedule="
_CP = "--parallelism.context_parallel_"

DEGREES = {"ddp": "12", "fsdp": "12", "cp": "1234", "tp": "12", "pp": "124"}
# What changes the model or its data, for the single process too.
OF_MODEL: dict[str, dict[str, list[str]]] = {
    "mask": {"causal": [], "document": [_DOCUMENTS], "window": _WINDOW, "document, window": [_DOCUMENTS, *_WINDOW]},
    "sinks": {"no": [], "yes": ["--model.attention_sinks"]},
    "convolution": {"no": [], "yes": ["--model.short_conv_kernel=4"]},
    "norm": {name: [f"--model.norm_type={name}"] for name in ("rmsnorm", "layernorm", "np_layernorm")},
    "tied": {"no": [], "yes": ["--model.flavor=tiny_tied"]},
    "length": {"16": [], "14": ["--training.seq_len=14"]},
    "rope": {"plain": [], "scaled": ["--model.rope_scaling=8", "--model.rope_theta=10000"]},
    "further": {"no": [], "yes": ["--model.mtp_layers=1", "--training.z_loss=0.01"]},
    "clip": {"no": [], "yes": ["--optimizer.qk_clip=0.5"]},
    "rates": {
        "no": [],
        "yes": [
            "--optimizer.groups",
            '{parameters = "layers.*.wq.weight", lr_factor = 0.5}',
            '{parameters = "tok_embeddings.*", weight_decay = 0.2}',
        ],
    },
    "optimizer": {
        "foreach": ["--optimizer.implementation=foreach"],
        "fused": ["--optimizer.implementation=fused"],
        "Adam": ["--optimizer.name=Adam", "--optimizer.implementation=for-loop"],
        "Muon": ["--optimizer.name=Muon"],
    },
}
# How the work is shared and done; "-": there is nothing that this is about.
OF_WORK: dict[str, dict[str, list[str]]] = {
    "method": {"-": []} | {m: [f"{_CP}method={m}"] for m in ("ring", "all_gather", "all_to_all", "auto")},
    "passes": {"-": [], "1 head": [f"{_CP}heads_per_pass=1"], "kept": [f"{_CP}keep_exchanged"]},
    "balancer": {"-": []} | {b: [f"{_CP}load_balancer={b}"] for b in ("head_tail", "contiguous", "balanced")},
    "kernel": {"auto": [], "math": [f"{_CP}kernel=math"]},
    "schedule": {"-": [], "1F1B": [], "GPipe": [f"{_PP}GPipe"]}
    | {
        name: [f"{_PP}{name}", *_FOUR_STAGES]
        for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    },
    "recompute": {
        "none": [],
        "full": ["--activation_checkpoint.mode=full"],
        "2": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
        "op": ["--activation_checkpoint.mode=selective"],
    },
    "reshard": {"default": []} | {h: [f"--parallelism.fsdp_reshard_after_forward={h}"] for h in ("always", "never")},
    "prefetch": {
        "no": [],
        "yes": ["--parallelism.fsdp_forward_prefetch=2"],
    },
    "offload": {"no": [], "yes": ["--training.enable_cpu_offload"]},
    "chunks": {
        "no": [],
        "3": ["--training.sequence_chunks=3"],
        "on the host": ["--training.sequence_chunks=2", "--training.sequence_chunks_offload"],
    },
    "logits": {"whole": [], "5 tokens": ["--training.loss_chunk_tokens=5"]},
    "kept": {
        "here": [],
        "inputs": ["--activation_checkpoint.offload=inputs", "--activation_checkpoint.offload_keep_last=0"],
        "attention": [
            "--activation_checkpoint.offload=inputs+attention",
            "--activation_checkpoint.offload_keep_last=0",
        ],
    },
    "network": {"whole": [], "3 tokens": ["--activation_checkpoint.mlp_chunk_tokens=3"]},
    "loss": {"-": [], "parallel": [], "whole": ["--parallelism.disable_loss_parallel"]},
    "step": {
        "as read": [],
        "balanced": [_BALANCED],
        "compiled": _COMPILED,
        "balanced, compiled": [_BALANCED, *_COMPILED],
    },
    "batch": {"accumulated": [], "at once": ["--training.global_batch_size=-1"]},
}
AXES = DEGREES | {axis: tuple(values) for axis, values in (OF_MODEL | OF_WORK).items()}
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def allowed(row: Row) -> bool:
    """Whether the settings that a row has so far go together: the program refuses the others, or they do nothing."""
    has = row.get

    def needs(axis: str, without: str, true: bool) -> bool:
        """An axis has a value other than `without` only where `true`."""
        return has(axis, without) == without or true

    degree = {axis: int(has(axis, "0")) for axis in DEGREES}  # 0: open
    # What other settings ask of those that are open.
    least = {"cp": 2 if {has("method", "-"), has("balancer", "-"), has("passes", "-")} != {"-"} else 1}
    least |= {"pp": 2 if has("schedule", "-") != "-" else 1, "tp": 2 if has("loss", "-") != "-" else 1}
    shards = max(degree["fsdp"], 1) * max(degree["cp"], 1)
    planned = degree["cp"] != 1 or has("mask") != "causal" or has("sinks") != "no"
    balanced = has("step", "").startswith("balanced")
    compiled = has("step", "").endswith("compiled")
    in_chunks = has("logits", "5 tokens") != "whole"
    resharded = has("reshard", "always") == "always" or (has("reshard") == "default" and degree["pp"] < 2)
    return all(
        (
            math.prod(d or least.get(axis, 1) for axis, d in degree.items()) <= 4,
            0 in degree.values() or math.prod(degree.values()) > 1,
            all(needs(axis, "-", degree["cp"] != 1) for axis in ("method", "balancer")),
            not (degree["cp"] > 1 and "-" in (has("method"), has("balancer"))),
            needs("passes", "-", degree["cp"] != 1 and has("method", "all_gather") in ("all_gather", "all_to_all")),
            has("passes", "-") != "kept" or has("method", "all_to_all") == "all_to_all",
            not (degree["cp"] == 3 and has("method") == "all_to_all"),  # of 16 heads
            needs("kernel", "auto", planned),
            needs("schedule", "-", degree["pp"] != 1) and not (degree["pp"] > 1 and has("schedule") == "-"),
            degree["pp"] != 4 or has("schedule", "GPipe") in ("1F1B", "GPipe"),
            degree["pp"] < 2 or has("tied", "no") == "no",
            has("schedule") not in V_SHAPED or torch.__version__ >= (2, 12),  # which refuses them before
            has("schedule") not in _SPLIT_BACKWARD or has("recompute", "none") == "none",
            has("schedule") not in _SPLIT_BACKWARD or has("reshard", "default") != "always",
            needs("reshard", "default", 0 in (degree["fsdp"], degree["cp"]) or shards > 1),
            needs("prefetch", "no", resharded and (0 in (degree["fsdp"], degree["cp"]) or shards > 1)),
            needs("loss", "-", degree["tp"] != 1) and not (degree["tp"] > 1 and has("loss") == "-"),
            needs("chunks", "no", degree["pp"] < 2 and degree["cp"] < 2 and has("convolution", "no") == "no"),
            needs("kept", "here", has("recompute") != "none"),
            has("kept") != "attention" or (has("recompute", "op") == "op" and not compiled and planned),
            has("kept", "here") == "here" or degree["pp"] < 4,  # a stage has a layer with a kept input
            has("kept", "here") == "here" or degree["pp"] < 2 or has("recompute") != "2",
            needs("network", "whole", has("recompute") != "op" and not compiled),
            has("further", "no") == "no" or degree["pp"] < 2,
            has("further", "no") == "no" or degree["tp"] < 2 or not (compiled and balanced),
            has("further", "no") == "no" or degree["tp"] < 2 or has("loss", "whole") == "whole" or in_chunks,
            not balanced or degree["pp"] < 2,
            not balanced or has("mask", "document").startswith("document"),
            not balanced or 0 in (degree["ddp"], degree["fsdp"]) or degree["ddp"] * degree["fsdp"] > 1,
        )
    )


ROWS = covering_array(AXES, allowed, tries=80)
# What every commit runs: the rows with a value that no row before them has.
QUICK = [row for i, row in enumerate(ROWS) if row.items() - {item for before in ROWS[:i] for item in before.items()}]


def world_size(row: Row) -> int:
    return math.prod(int(row[axis]) for axis in DEGREES)


def arguments(row: Row) -> tuple[list[str], list[str]]:
    """Return the arguments of the layout, and of the single process."""
    model = ["--training.dtype=float64", *(a for axis in OF_MODEL for a in OF_MODEL[axis][row[axis]])]
    rows = 2
    if row["pp"] == "4":
        model.append("--model.flavor=tiny4")
    if row["pp"] == "4" or row["schedule"] == "DualPipeV":
        rows = 4
    d = {axis: int(row[axis]) for axis in DEGREES}
    work = [a for axis in OF_WORK for a in OF_WORK[axis][row[axis]]]
    mesh = degrees(dp_replicate=d["ddp"], dp_shard=d["fsdp"], cp=d["cp"], tp=d["tp"], pp=d["pp"])
    if "compiled" in row["step"] and ("balanced" in row["step"] or row["chunks"] != "no"):
        model.append("--training.steps=8")  # so that a graph for each of the sizes that vary is made, or is too many
    one = [*model]
    if row["batch"] == "at once":  # the rows that all data-parallel ranks have together
        one += ["--training.global_batch_size=-1", f"--training.local_batch_size={rows * d['ddp'] * d['fsdp']}"]
    return [*model, f"--training.local_batch_size={rows}", *mesh, *work], one


def name(row: Row) -> str:
    layout = "+".join(f"{axis}{row[axis]}" for axis in DEGREES if row[axis] != "1")
    unusual = [row[axis] for axis in OF_MODEL | OF_WORK if row[axis] not in (next(iter(AXES[axis])), "-", "yes", "no")]
    flags = [axis for axis in AXES if row[axis] == "yes"]
    return f"{layout}: {', '.join([*unusual, *flags]) or 'plain'}"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{i} {name(row)}", marks=[] if row in QUICK else [pytest.mark.slow])
        for i, row in enumerate(ROWS)
    ],
)
def test_a_combination_equals_one_process(pool: WorkerPool, row: Row) -> None:
    layout, one = arguments(row)
    got = pool.run(world_size(row), run_layout, layout, timeout=600)  # compiling takes minutes on a busy machine
    wanted = reference(pool, *one)
    is_balanced = row["step"].startswith("balanced")  # its rows are others, and with them the largest loss of a row
    assert_parity(same_rows(got[0], wanted) if is_balanced else got[0], wanted, 1e-10)


def test_every_pair_that_goes_together_is_in_a_row() -> None:
    """The quick rows have every value, and two thirds of the pairs."""
    everything, quick = ({pair for row in rows for pair in pairs_of(row)} for rows in (ROWS, QUICK))
    values = {(axis, value) for axis, axis_values in AXES.items() for value in axis_values}
    assert {value for pair in quick for value in pair} == values
    assert len(quick) > 2 / 3 * len(everything)
    for a, b in combinations(sorted(values), 2):
        if a[0] != b[0] and (a, b) not in everything:
            assert not any(allowed(dict(row) | dict((a, b))) for row in ROWS), (a, b)
