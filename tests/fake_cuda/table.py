"""The rows of the table: calls of attention's operator, and steps of whole jobs, each on one rank."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from unittest import mock

from examples.fields.tests.drifting import write_drifting_fields
from lct_planner.device import Gpu
from tests.covering import Row, covering_array
from trainer.config.loader import parse_command_line
from trainer.families.registry import MODELS
from trainer.job import ResolvedJob, resolve

VOCABULARY = 128_256
FIELDS = "fields.zarr"
"""Stands for a small file of fields, which is written when a row needs it."""


@dataclass(frozen=True)
class Call:
    """One call of attention, forward and backward, on a rank."""

    ranks: int
    rank: int
    method: str
    mask: str
    """causal, documents, window (of 4,096 tokens), or sinks."""
    kernel: str
    balancer: str
    keep: bool = False
    flash: str = ""
    """FA3 or FA4, if one of them is behind the flash operators."""
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        parts = [f"{self.method}{self.ranks}", f"rank{self.rank}", self.mask, self.kernel, self.balancer]
        return " ".join(filter(None, [*parts, "kept" * self.keep, self.flash, self.dtype * (self.dtype != "bfloat16")]))


def calls() -> Iterator[Call]:
    """Yield calls in which every pair of values that can go together does, and every method with every mask."""
    whole = {"ranks": "8", "rank": "middle", "balancer": "auto"}
    pairs = [whole | {"method": x, "mask": y, "kernel": "auto"} for x in METHODS for y in MASKS]
    pairs += [whole | {"method": x, "mask": "causal", "kernel": "cuda_flash"} for x in METHODS]
    usual = {"keep": "", "flash": "", "dtype": "bfloat16"}
    for row in (*covering_array(_AXES, _allowed), *({**usual, **row} for row in pairs)):
        ranks = int(row["ranks"])
        rank = {"first": 0, "middle": ranks // 2 - 1, "last": ranks - 1}[row["rank"]]
        options = {"keep": row["keep"] == "kept", "flash": row["flash"], "dtype": row["dtype"]}
        yield Call(ranks, rank, row["method"], row["mask"], row["kernel"], row["balancer"], **options)


METHODS = ("ring", "all_gather", "all_to_all", "hybrid")
MASKS = ("causal", "documents", "window", "sinks")
KERNELS = ("cuda_flash", "cudnn", "varlen", "efficient")
_AXES = {
    "ranks": ("2", "4", "8", "64"),
    "rank": ("first", "middle", "last"),
    "method": METHODS,
    "mask": MASKS,
    "kernel": ("auto", *KERNELS),
    "balancer": ("auto", "contiguous", "head_tail", "balanced"),
    "keep": ("", "kept"),
    "flash": ("", "FA3", "FA4"),
    "dtype": ("bfloat16", "float32"),
}


def _allowed(row: Row) -> bool:
    """Return whether a call of these settings exists, as far as they are named."""
    ranks, method, mask, kernel = (row.get(name) for name in ("ranks", "method", "mask", "kernel"))
    if ranks == "64" and method not in (None, "hybrid"):  # 32 heads, and a ring of 64 takes seconds
        return False
    if ranks == "2" and method == "hybrid":
        return False
    if row.get("keep") == "kept" and method not in (None, "all_to_all", "hybrid"):
        return False
    if mask == "documents" and kernel not in (None, "auto", "varlen"):  # hundreds of launches
        return False
    if mask == "window" and kernel == "cudnn":
        return False
    if row.get("flash") and kernel not in (None, "cuda_flash", "varlen"):
        return False
    if row.get("dtype") == "float32" and kernel not in (None, "efficient"):
        return False
    return not (kernel == "efficient" and mask == "window")  # a dense mask over pieces


@dataclass(frozen=True)
class Job:
    """Steps of a job of one rank. args: of the command line; layers: of the model."""

    name: str
    ranks: int
    rank: int
    args: tuple[str, ...] = ()
    layers: int = 2
    gpu: Gpu = field(default_factory=Gpu)
    lora: int = 0
    memory: bool = False
    """Whether the peak of live bytes is one of the committed numbers."""
    steps: int = 1
    """A second one reads the outcome of the first."""

    def key(self, name: str, default: str) -> str:
        """Return the value of a key of the configuration, as the command line has it."""
        return dict(arg[2:].split("=", 1) for arg in (*_BASE, *self.args)).get(name, default)

    def resolved(self) -> ResolvedJob:
        """Return the job, with fewer layers and the vocabulary of Llama 3."""
        keys = dict(arg[2:].split("=", 1) for arg in (*_BASE, *self.args))
        flavors, flavor = MODELS[keys.get("model.name", "llama3")].flavors, keys["model.flavor"]
        if on_fields := keys.get("training.dataset_path") == FIELDS:
            del keys["training.seq_len"]
            keys["training.dataset_path"] = _small_fields()
        sizes = {"widths": (16, 32)} if hasattr(flavors[flavor], "widths") else {"n_layers": self.layers}
        with mock.patch.dict(flavors, {flavor: replace(flavors[flavor], **sizes)}):
            job = _resolved(keys, self.ranks)
        lora = replace(job.config.lora, rank=self.lora)  # of weights without values, so that none are named
        job = replace(job, config=replace(job.config, lora=lora))
        return job if on_fields else replace(job, model=replace(job.model, vocab_size=VOCABULARY))


@cache
def _small_fields() -> str:
    return write_drifting_fields(Path(mkdtemp()) / FIELDS, height=32, width=32, trajectories=3)


def _resolved(keys: dict[str, str], ranks: int) -> ResolvedJob:
    arguments = [part for name, x in keys.items() for part in (f"--{name}", *x.split(" "))]
    return resolve(parse_command_line(arguments).config, ranks, "cuda")


_BASE = (
    "--model.flavor=8B",
    "--training.seq_len=131072",
    "--training.local_batch_size=1",
    "--training.steps=4",
    "--job.dump_folder=outputs/fake_cuda",
)
_P = "--parallelism."
_CP = f"{_P}context_parallel_"


def _cp(degree: int, method: str = "ring", *options: str) -> tuple[str, ...]:
    return f"{_CP}degree={degree}", f"{_CP}method={method}", *options


WHOLE_ONLY = frozenset(
    {
        *("1M tokens, 8", "1M tokens, 8, parts", "1M tokens, 8, parts, 6 layers offloaded", "1M tokens, 64"),
        *("compiled, tp 2 x all_to_all 2, documents", "compiled, memory budget", "qwen2", "qwen3", "mistral", "LoRA"),
        *("U-Net on fields", "tp 4 x FSDP 2", "FSDP 8 x cp 8", "pp 2 x cp 4, rank 0", "ep 4", "all_to_all 8, kept"),
    }
)
"""Rows that `make test` leaves out: others run the same code, or nearly so."""
_DOCUMENTS = "--training.attention_mask=document"
_FULL = "--activation_checkpoint.mode=full"
_OFFLOADED = (_FULL, "--activation_checkpoint.offload=inputs")
_SELECTIVE = "--activation_checkpoint.mode=selective"
_SHORT, _MIDDLE = "--training.seq_len=8192", "--training.seq_len=32768"
_DEBUG = ("--model.flavor=debugmodel", _SHORT)
_TP2 = (f"{_P}tensor_parallel_degree=2",)
_HYBRID = f"{_CP}hybrid_degrees=4 2"
_MILLION = "--training.seq_len=1048576"


def jobs() -> Iterator[Job]:
    """Yield jobs that cover every parallelism, method, family and transformation."""
    yield Job("one GPU", 1, 0, (_SHORT,), memory=True)
    yield Job("FSDP 8", 8, 3, (_SHORT,), memory=True, steps=2)
    yield Job("ring 8, 8B at 131,072", 8, 2, _cp(8), memory=True)
    yield Job("ring 8, full recomputation", 8, 0, _cp(8, "ring", _FULL), memory=True)
    yield Job("ring 8, inputs offloaded", 8, 0, _cp(8, "ring", *_OFFLOADED), layers=4, memory=True)
    with_attention = (_SELECTIVE, "--activation_checkpoint.offload=inputs+attention")
    yield Job("ring 8, inputs and attention offloaded", 8, 0, _cp(8, "ring", *with_attention), layers=4, memory=True)
    yield Job("all_gather 8", 8, 7, _cp(8, "all_gather"), memory=True)
    yield Job("all_to_all 8", 8, 2, _cp(8, "all_to_all"), memory=True)
    yield Job("all_to_all 8, kept", 8, 2, _cp(8, "all_to_all", f"{_CP}keep_exchanged=true"), memory=True)
    yield Job("hybrid 4 x 2", 8, 5, _cp(8, "hybrid", _HYBRID), memory=True)
    yield Job("ring 8, documents", 8, 0, _cp(8, "ring", _DOCUMENTS, f"{_CP}load_balancer=balanced"), steps=2)
    yield Job("all_to_all 8, documents", 8, 4, _cp(8, "all_to_all", _DOCUMENTS), memory=True)
    yield Job("auto 8, documents", 8, 4, _cp(8, "auto", _DOCUMENTS))
    yield Job("HSDP 2 x cp 4", 8, 7, (_MIDDLE, *_cp(4), f"{_P}data_parallel_replicate_degree=2"))
    yield Job("FSDP 2 x cp 4, selective", 8, 1, _cp(4, "ring", _SELECTIVE, _MIDDLE))
    every_second = "--activation_checkpoint.selective_ac_option=2"
    yield Job("FSDP 4 x cp 2, every second layer", 8, 6, _cp(2, "ring", _SELECTIVE, every_second, _MIDDLE))
    yield Job("tp 2 x cp 4", 8, 3, (_MIDDLE, *_cp(4), f"{_P}tensor_parallel_degree=2"))
    yield Job("tp 4 x FSDP 2", 8, 3, (_SHORT, f"{_P}tensor_parallel_degree=4"))
    for rank in (0, 7):
        yield Job(f"pp 2 x cp 4, rank {rank}", 8, rank, (_MIDDLE, *_cp(4), *_pipeline(2)), layers=4)
    yield Job("pp 4, zero bubble, middle stage", 4, 2, (_SHORT, *_pipeline(4, "InterleavedZeroBubble")), layers=8)
    yield Job("window and sinks", 8, 2, _cp(8, "ring", "--model.sliding_window=4096", "--model.attention_sinks=true"))
    yield Job("short convolution", 4, 1, _cp(4, "ring", _MIDDLE, "--model.short_conv_kernel=4"))
    yield Job("LoRA", 8, 1, _cp(4, "all_to_all"), lora=16, memory=True)
    yield Job("CPU offload", 4, 1, (*_DEBUG, *_cp(2), "--training.enable_cpu_offload=true"))
    early = "--training.max_norm=inf", "--training.early_update=true"
    yield Job("CPU offload, updated early", 4, 1, (*_DEBUG, *_cp(2), "--training.enable_cpu_offload=true", *early))
    yield Job("accumulation, replicas", 4, 1, (_SHORT, f"{_P}data_parallel_replicate_degree=4", *_batch(8)))
    hybrid = _cp(64, "hybrid", _MILLION, f"{_CP}hybrid_degrees=8 8")
    yield Job("1M tokens, 64", 64, 0, hybrid, memory=True)
    yield Job("1M tokens, 64, documents", 64, 37, (*hybrid, _DOCUMENTS, f"{_CP}load_balancer=balanced"))
    yield Job("1M tokens, 8", 8, 2, _cp(8, "all_to_all", _MILLION, _FULL), memory=True)
    parts = "--activation_checkpoint.mlp_chunk_tokens=8192"
    yield Job("1M tokens, 8, parts", 8, 2, _cp(8, "all_to_all", _MILLION, _FULL, parts), memory=True)
    for layers in (4, 6):
        offloaded = _cp(8, "all_to_all", _MILLION, *_OFFLOADED, parts)
        yield Job(f"1M tokens, 8, parts, {layers} layers offloaded", 8, 2, offloaded, memory=True, layers=layers)
    yield Job("FSDP 8 x cp 8", 64, 63, _cp(8))
    compiled = ("--compile.enable=true", "--compile.backend=aot_eager")
    documents = (_MIDDLE, *_TP2, *_cp(2, "all_to_all", _DOCUMENTS))
    yield Job("compiled, tp 2 x all_to_all 2, documents", 4, 1, (*documents, *compiled), layers=1)
    budget = ("--activation_checkpoint.mode=memory_budget", "--activation_checkpoint.memory_budget=0.5")
    yield Job("compiled, memory budget", 4, 0, (_MIDDLE, *_cp(2, "all_to_all"), *compiled, *budget), layers=1)
    for family, flavor, options in (
        ("qwen2", "7B", ()),
        ("qwen3", "8B", ()),
        ("mistral", "7B", ("--model.sliding_window=4096",)),
        ("qwen3_moe", "30B-A3B", ()),
        ("gpt_oss", "20b", ()),
    ):
        arguments = (f"--model.name={family}", f"--model.flavor={flavor}", "--training.seq_len=32768", *options)
        yield Job(family, 8, 1, (*arguments, *_cp(4, "ring")))
    for family, flavor, layers in (
        ("qwen3_next", "80B-A3B", 4),
        ("kimi_linear", "48B-A3B", 4),
        ("granitemoehybrid", "H-Small", 6),
        ("deepseek_v3", "V3", 4),
    ):
        length = _MIDDLE if family == "qwen3_next" else _SHORT  # that chunks of a fragment are in runs
        arguments = (f"--model.name={family}", f"--model.flavor={flavor}", length, f"{_P}expert_parallel_degree=2")
        yield Job(family, 8, 1, (*arguments, *_cp(4, "all_to_all", _DOCUMENTS)), layers=layers)
    yield Job("U-Net on fields", 4, 1, (*_fields("unet", "debugmodel"), f"{_P}domain_parallel_degrees=2 2"))
    yield Job("neighbourhoods on fields", 4, 3, (*_fields("nat", "debugmodel"), f"{_P}domain_parallel_degrees=2"), 1)
    experts = ("--model.name=qwen3_moe", "--model.flavor=30B-A3B", "--training.seq_len=8192")
    yield Job("ep 4", 8, 1, (*experts, f"{_P}expert_parallel_degree=4"))
    yield Job("ep 2 x cp 4", 8, 1, (*experts, *_cp(4), f"{_P}expert_parallel_degree=2"))


def _pipeline(degree: int, schedule: str = "1F1B") -> tuple[str, ...]:
    micro = (f"--training.local_batch_size={degree}", "--training.global_batch_size=-1")  # a sequence a micro-batch
    return f"{_P}pipeline_parallel_degree={degree}", f"{_P}pipeline_parallel_schedule={schedule}", *micro


def _fields(family: str, flavor: str) -> tuple[str, ...]:
    data = ("--job.imports=examples.fields", "--training.dataset=fields", f"--training.dataset_path={FIELDS}")
    return f"--model.name={family}", f"--model.flavor={flavor}", *data


def _batch(size: int) -> tuple[str, ...]:
    return (f"--training.global_batch_size={size}",)
