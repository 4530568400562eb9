"""What a documented command prints and writes: by its program and its options, whatever their values are."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.repository.documented.pages import Command
from tests.repository.documented.shortened import program_of, shorter, value_of

_TRAINED, _CHECKED = r"training done|nothing to train: the checkpoint has", r"the settings are valid"
_PRINTED = {
    "lct train": _TRAINED,
    "train.py": _TRAINED,
    "lct check": "at its peak a step of a rank needs",
    "lct estimate": "tokens a second",
    "lct plan": "[Rr]ank",
    "lct verify": r"step-\d+: whole: \d+ files",
    "lct evaluate": "positions|needle",
    "lct data": r"all +[\d,]+(?s:.*)document 0: ",
    "lct tokenize": "tokens of",
    "lct convert to-hf": "transformers loads it",
    "lct convert to-peft": "peft loads them",
    "lct convert add-tokens": "name it in model.path to train them",
    "examples.fields.forecast": "error of the model",
    "examples/own_model/train.py": r"2 ranks, 1024 bytes a sequence: loss \d",
    "examples.fields.make_fields": r"\d+ trajectories of \d+ frames of",
    "examples.fields.netcdf": "has mean 1",
    "tensorboard": "loss",
    "scripts/benchmarks/planner.py": r"tested: \d+ runs",
    "scripts/benchmarks/calibrated.py": "median error",
    "scripts/benchmarks/block_memory.py": "KiB  attention, backward",
    "scripts/benchmarks/optimizers.py": "after equal time",
    "scripts/benchmarks/experts.py": "of_dense_model",
    "scripts/check_model.py": "gradients  equal",
    "examples/own_module.py": "gradients over 2 ranks equal",
    "examples/regions.py": "gradients over 2 ranks equal",
    "examples/domain_tensors.py": "output and gradients equal one process",
    "examples/transformers_model.py": "gradients  equal",
    "scripts/compare.py": "the same: ",
    "scripts/compare_shard_tensor.py": r"ours: (\d+) of \1 exact",
    "scripts/gpu_check.py": "no block failed",
    "lct tokenizer": r"\d+ tokens",
}
_PRINTED_WITH = {
    "--model.path": "the weights are read from",
    "--checkpoint.last_save_in_hf": "weights saved for Hugging Face",
    "--checkpoint.load_step": r"resumed after step \d+",
    "--validation.enable": r"validation after step \d+: loss",
    "--mixture.names": r"\d+\.\d%, \w+ \d+\.\d%",
}
"""Options of jobs that train."""
_WRITTEN = ("--output", "--json", "--html", "--picture", "--out", "--suggest")


_MEASURE = ("scripts/benchmarks/", "scripts/compare_shard_tensor.py", "scripts/gpu_check.py", "tests.fake_cuda")
"""Programs that measure: tests of their own run their parts (`test_benchmark_*.py` and others)."""
_TRACE_MUCH = ("--training.sequence_chunks", "--max-seq-len", "--suggest")
_LONG_TRACES = re.compile(r"_1m |deepseek|granite|kimi|qwen3_next|qwen3_moe")
"""Traces of a million tokens, of experts and of linear attention."""


def is_slow(command: Command) -> bool:
    """Return whether a command takes more than about ten seconds of a core: it measures, compiles or traces much.

    One whose output the page shows is not slow because of its model.
    """
    program, _, arguments = parts(command.text)
    if program in ("lct check", "lct estimate"):
        traces_long = command.shown is None and _LONG_TRACES.search(f"{' '.join(arguments)} ")
        return bool(traces_long) or any(value_of(arguments, option) is not None for option in _TRACE_MUCH)
    if program == "lct train":
        return value_of(arguments, "--compile.enable") is not None
    return program.startswith(_MEASURE) and "--help" not in arguments


def expected(command: str, tree: Path) -> Iterator[str]:
    """Yield a regular expression for each thing that a command prints."""
    program, words, arguments = parts(command)
    if "--help" in arguments:
        return
    if program in ("lct train", "lct check", "train.py") and {"--check-config", "--print-config"} & {*arguments}:
        yield _CHECKED if "--check-config" in arguments else r"^\[training\]"
        return
    key = " ".join([program, *arguments[:1]]) if program == "lct convert" else program
    yield _PRINTED.get(key, "")
    if program == "lct generate" and (prompt := value_of(arguments, "--prompt")) and "--chat" not in arguments:
        yield rf"^{re.escape(prompt)}"
    if program != "lct train":
        return
    yield from (printed for option, printed in _PRINTED_WITH.items() if value_of(words, option) is not None)
    folder = tree / (value_of(words, "--job.dump_folder") or "outputs/debug_model") / "checkpoint"
    if value_of(words, "--checkpoint.enable") is not None and [*folder.glob("step-*")]:
        yield r"resumed after step \d+"


def written(command: str) -> list[str]:
    """Return the files that a command writes."""
    program, _, arguments = parts(command)
    if "--help" in arguments:
        return []
    files = [value_of(arguments, option) for option in _WRITTEN]
    if value_of(arguments, "--profiling.enable_profiling") is not None:
        steps = value_of(arguments, "--profiling.profile_freq")
        files.append(f"outputs/debug_model/profile_trace/iteration_{steps}/rank0_trace.json")
    return [file for file in files if file and program not in ("lct convert",)]


def parts(command: str) -> tuple[str, list[str], list[str]]:
    """Return the program of a command, its words, and its arguments in short form; of a line, the first program."""
    words = shlex.split(command)
    variables = {}
    while words and (match := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
        variables[match[1]] = match[2]
        words = words[1:]
    for number, word in enumerate(words):
        if word in ("|", ";", "&&"):
            words = words[:number]
            break
    if not words or not program_of(words)[0]:
        return "", words, words
    short = shorter(words, variables)
    program, at = program_of(short)
    return program, words, short[at:]
