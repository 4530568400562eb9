"""How a documented command is made short: one rule for each program, whatever the values of the command are.

A job takes a step for each fifty and a token for each sixteen that the page asks for. A preset of a model that does not
fit here is checked for as many ranks as the command starts. Other programs get the options of `APPENDED`. Only the
standard library is imported.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

STEPS_OF_ONE = 50
"""Steps of the page for which a job takes one; fewer than that are taken as they are."""
TOKENS_OF_ONE = 16
LEAST_TOKENS, MOST_TOKENS = 64, 512

BIG = {path.stem for path in (Path(__file__).parents[3] / "train_configs").glob("*.toml")}
BIG -= {"debug_model", "finetune", "sft", "lora", "dpo"}
_STEPS = ("--training.steps", "--checkpoint.interval", "--checkpoint.load_step", "--validation.freq")
_TOKENS = ("--training.seq_len", "--seq-len", "--lengths")
_ON_RANKS = ("lct generate", "lct chat", "lct evaluate")
_RANKS = ("--ngpu", "--context-parallel", "--parallelism.context_parallel_degree")
_JOB = {"--training.steps": "2", "--training.seq_len": "64"}
"""What a job has if its command does not say."""
_NEEDED = {
    "--float8.enable": "--float8.emulate",  # float8 needs a GPU
    "--validation.enable": "--validation.sequences=4",
}
_ONLY_LOOKS = ("--check-config", "--print-config", "--help", "-h")
_BIG_WITH_SMALL_WEIGHTS = ("--ngpu=2", "--parallelism.context_parallel_degree=2", "--training.seq_len=128")

_BENCHMARKS = {
    "activation_checkpointing": "--seq-len 64",
    "attention_launches": "--rounds 2",
    "balance": "--seq-len 1024 --mean 128",
    "calibrated": "--only 768",
    "checkpoints": "--dim 64 --layers 1 --rounds 1",
    "chunked_loss": "--tokens 64 --vocab 128 --rounds 1",
    "context_parallel": "--seq-len 64 --repeats 1",
    "data": "--megabytes 1 --batches 1 --rounds 1",
    "document_degrees": "--ranks 16 --tokens 24000 --steps 1",
    "domain_parallel": "--sides 16 --repeats 1",
    "experts": "--tokens 64 --layers 1 --rounds 1",
    "linear_attention": "--seq-len 64 --degrees 2 --repeats 1",
    "memory": "--only nothing",
    "memory_runs": "--help",
    "optimizers": "--seeds 0 --steps 10 --arguments='--training.seq_len=64 --training.global_batch_size=4'",
    "train": "--seq-len 32 --rounds 1 --no-memory --features kernel=cpu_flash",
}
APPENDED = {
    **{f"scripts/benchmarks/{name}.py": options for name, options in _BENCHMARKS.items()},
    "lct generate": "--tokens 4",
    "lct chat": "--tokens 4",
    "lct evaluate": "--sequences 2 --samples 1",
    "examples.fields.make_fields": "--trajectories 4 --frames 6 --height 32 --width 32",
    "examples.fields.forecast": "--steps 2",
    "examples/own_model/train.py": "--steps 2",
    "pytest": "--collect-only -q",
    "scripts/gpu_check.py": "--device cpu --blocks versions,tiles",
    "lct tokenizer": "--vocab-size 300",
    "tensorboard": "--inspect",
    "tests.fake_cuda": "--only 'one GPU'",
}
"""Options that come last, so that they count."""


def program_of(words: Sequence[str]) -> tuple[str, int]:
    """Return the name of the program that a command runs, and the index of its first argument.

    `lct train`, `tests.fake_cuda` and `scripts/proof.py` are such names; "" for others. For torchrun it is its ranks'
    program.
    """
    name, at = Path(words[0]).name, 1
    if name == "run_llama_train.sh":
        return "lct train", 1
    if name == "lct":
        return " ".join(["lct", *words[1:2]]), 2
    if name == "torchrun":
        at = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    elif name == "tensorboard":
        return name, 1
    elif name not in ("python", "python3"):
        return "", 1
    if at < len(words) and words[at] == "-u":
        at += 1
    if words[at : at + 1] != ["-m"]:
        is_script = at < len(words) and words[at].endswith(".py")
        return (words[at], at + 1) if is_script else ("", at)
    if words[at + 1] == "trainer":
        return " ".join(["lct", *words[at + 2 : at + 3]]), at + 3
    return words[at + 1], at + 2


def shorter(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return the command that runs in place of this one. variables: those that it has."""
    program, at = program_of(words)
    start, arguments = list(words[:at]), list(words[at:])
    nodes = int(variables.get("NNODES", "1"))
    ranks = nodes * int(value_of(arguments, "--ngpu") or variables.get("NGPU", "2"))
    if Path(words[0]).name == "torchrun":
        ranks = int(value_of(start, "--nnodes") or 1) * int(value_of(start, "--nproc-per-node") or 1)
        start = [word.replace("node-a", "localhost") for word in start]
        start = changed(start, {"--nnodes": lambda _: 1, "--nproc-per-node": lambda asked: min(asked, 2)})
    if any(word in _ONLY_LOOKS for word in arguments):
        return [*start, *arguments]
    if program in ("lct train", "train.py"):
        return [*start, *_job(arguments, ranks, is_big=_preset(program, arguments, variables) in BIG)]
    return [*start, *_other(program, arguments)]


def value_of(arguments: Sequence[str], option: str) -> str | None:
    """Return the first value of an option, or None if it is not there."""
    for number, word in enumerate(arguments):
        if word == option:
            return "".join(arguments[number + 1 : number + 2])
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def changed(arguments: Sequence[str], changes: Mapping[str, Callable[[int], int]]) -> list[str]:
    """Return the arguments with other whole numbers behind some options: option -> function of the number."""
    new, change = [], None
    for word in arguments:
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            change = changes.get(option)
            new.append(f"{option}={change(int(value))}" if change and equals and value.isdecimal() else word)
        else:
            new.append(str(change(int(word))) if change and word.isdecimal() else word)
    return new


def _preset(program: str, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the name of the preset of a job; "" for none."""
    if program == "lct train" and arguments and not arguments[0].startswith("-"):
        return Path(arguments[0]).stem
    return Path(value_of(arguments, "--job.config_file") or variables.get("CONFIG_FILE", "")).stem


def _steps(asked: int) -> int:
    return asked if asked < STEPS_OF_ONE else max(asked // STEPS_OF_ONE, 1)


def _tokens(asked: int) -> int:
    return min(asked, max(LEAST_TOKENS, min(MOST_TOKENS, asked // TOKENS_OF_ONE)))


def _job(arguments: list[str], ranks: int, *, is_big: bool) -> list[str]:
    if is_big:
        if value_of(arguments, "--model.path") is None:
            return [*arguments, "--check-config", f"--world-size={ranks}"]
        arguments = [*arguments, *_BIG_WITH_SMALL_WEIGHTS]
    arguments = changed(arguments, dict.fromkeys(_STEPS, _steps) | dict.fromkeys(_TOKENS, _tokens))
    job = _JOB | {"--training.steps": value_of(arguments, "--profiling.profile_freq") or _JOB["--training.steps"]}
    missing = [f"{key}={value}" for key, value in job.items() if value_of(arguments, key) is None]
    needed = [option for key, option in _NEEDED.items() if value_of(arguments, key) is not None]
    return [*arguments, *missing, *needed, "--training.global_batch_size=-1"]


def _other(program: str, arguments: list[str]) -> list[str]:
    if program.startswith("scripts/benchmarks/") and value_of(arguments, "--device") == "cuda":
        return [*arguments, "--help"]
    if program == "lct estimate" and {"--max-seq-len", "--suggest"} & {*arguments}:  # many jobs are traced
        return ["debug_model", *arguments[1:], "--world-size=2", "--training.seq_len=4096"]
    if program == "scripts/compare.py":
        end = arguments.index("--") if "--" in arguments else len(arguments)
        short = ["--training.seq_len=64", "--training.global_batch_size=4"]
        return [*arguments[:end], "--steps=1", "--tolerance=1e-3", "--", *arguments[end + 1 :], *short]
    if program == "scripts/compare_shard_tensor.py":  # ours alone: the packages of the other one are gigabytes
        at = arguments.index("--packages")
        return [*arguments[:at], *arguments[at + 2 :]]
    if program == "lct evaluate":
        changes = dict.fromkeys(_TOKENS, lambda asked: max(_tokens(asked), min(asked, 128)))
        arguments = changed(arguments, changes | {"--buckets": lambda asked: asked // TOKENS_OF_ONE})
    if program in _ON_RANKS:
        arguments = changed(arguments, dict.fromkeys(_RANKS, lambda asked: min(asked, 2)))
    return [*arguments, *shlex.split(APPENDED.get(program, ""))]
