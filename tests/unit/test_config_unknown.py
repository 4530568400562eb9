"""Misspelled keys get the near name, keys of other programs what to write here, all others no guess; all at once."""

import re
from pathlib import Path

import pytest

from trainer.config.errors import ConfigError, nearest
from trainer.config.keys import keys_of
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.config.torchtitan import accepted_keys
from trainer.config.unknown import ADVICE, ELSEWHERE

pytestmark = pytest.mark.about("trainer/config/command_line.py")

KEYS = keys_of(JobConfig)
TYPOS = {
    "training.stpes": "training.steps",
    "training.step": "training.steps",
    "training.sed": "training.seed",
    "training.seqlen": "training.seq_len",
    "training.seqLen": "training.seq_len",
    "training.data_stream": "training.data_streams",
    "training.local_bacth_size": "training.local_batch_size",
    "training.globalbatchsize": "training.global_batch_size",
    "training.determinstic": "training.deterministic",
    "training.atention_mask": "training.attention_mask",
    "optimizer.weigth_decay": "optimizer.weight_decay",
    "optimizer.beta_1": "optimizer.beta1",
    "model.flavour": "model.flavor",
    "model.slidingwindow": "model.sliding_window",
    "parallelism.pipeline_degree": "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degre": "parallelism.context_parallel_degree",
    "parallelism.tensor_paralel_degree": "parallelism.tensor_parallel_degree",
    "checkpoint.intervall": "checkpoint.interval",
    "checkpoint.keep_latest": "checkpoint.keep_latest_k",
    "lr_scheduler.warmup": "lr_scheduler.warmup_steps",
    "metrics.tensorboard_enable": "metrics.enable_tensorboard",
    "compile.enabled": "compile.enable",
    "float8.recipe": "float8.recipe_name",
    "comm.trace_buffer_size": "comm.trace_buf_size",
    "job.dumpfolder": "job.dump_folder",
    # of another table
    "training.lr": "optimizer.lr muon.lr",
    "model.seq_len": "training.seq_len validation.seq_len",
    "training.warmup_step": "lr_scheduler.warmup_steps",
    "optimiser.lr": "optimizer.lr muon.lr",
    "traning.steps": "training.steps",
}
# Nothing here has a similar name.
UNRELATED = {
    "training": "temperature compiled patience shuffle criterion curriculum",
    "optimizer": "trust_ratio dampening lamb",
    "model": "bias experts init_std act",
    "checkpoint": "hub s3",
    "metrics": "url",
    "job": "user tags",
    "parallelism": "dualpipe",
    "comm": "ib zzz",
    "compile": "dynamic",
    "float8": "amax",
    "lr_scheduler": "cycles",
    "profiling": "nsys",
}
# What other programs call it, and the key that the message must name.
OTHERS = {
    "--per_device_train_batch_size": "training.local_batch_size",
    "--gradient_accumulation_steps": "training.global_batch_size",
    "--learning_rate": "optimizer.lr",
    "--num_train_epochs": "training.steps",
    "--max_steps": "training.steps",
    "--bf16": "training.mixed_precision_param",
    "--max_seq_length": "training.seq_len",
    "--seq-length": "training.seq_len",
    "--micro-batch-size": "training.local_batch_size",
    "--tensor-model-parallel-size": "parallelism.tensor_parallel_degree",
    "--pipeline-model-parallel-size": "parallelism.pipeline_parallel_degree",
    "--context-parallel-size": "parallelism.context_parallel_degree",
    "--train-iters": "training.steps",
    "--lr-warmup-iters": "lr_scheduler.warmup_steps",
    "--clip-grad": "training.max_norm",
    "--save": "checkpoint.enable",
    "--load": "checkpoint.enable",
    "--save-interval": "checkpoint.interval",
    "--sequence-parallel": "parallelism.tensor_parallel_degree",
    "--recompute-granularity": "activation_checkpoint.mode",
    "--sequence_len": "training.seq_len",
    "--deepspeed": "parallelism.data_parallel_shard_degree",
    "--zero_optimization.stage": "parallelism.data_parallel_shard_degree",
    "--training.gradient_clipping": "training.max_norm",
    "--training.epochs": "training.steps",
    "--optimizer.learning_rate": "optimizer.lr",
    # the same name as here, without its table
    "--lr": "optimizer.lr",
    "--global-batch-size": "training.global_batch_size",
    "--seed": "training.seed",
}


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_command_line(list(argv))
    return str(error.value)


@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_is_told_with_the_key_that_was_meant(typo: str):
    arguments = [f"--{typo}", "3"]
    message, meant = refused(*arguments), " or ".join(map(repr, TYPOS[typo].split()))
    assert message == f"{' '.join(arguments)} (on the command line) is not a known key; did you mean {meant}?"


@pytest.mark.parametrize(("table", "word"), [(table, word) for table in UNRELATED for word in UNRELATED[table].split()])
def test_an_unrelated_word_gets_no_guess_but_the_keys_of_its_table(table: str, word: str):
    message = refused(f"--{table}.{word}", "3")
    assert "did you mean" not in message
    listed = message.partition(f"; the keys of [{table}] are ")[2].split(", ")
    assert [f"{table}.{key}" for key in listed] == [key for key in KEYS if key.startswith(f"{table}.")]


def test_a_bare_unrelated_word_gets_the_tables():
    for option in ("--verbose", "--zzz", "--hf"):
        assert "settings are table.key, with table one of job, profiling" in refused(option)


@pytest.mark.parametrize("option", OTHERS)
def test_a_key_of_another_program_is_told_with_the_key_here(option: str):
    message = refused(option, "3")
    assert message.startswith(f"{option} 3 (on the command line) is not a known key; ")
    assert OTHERS[option] in message.partition("; ")[2]


def test_the_table_of_other_programs_names_keys_that_exist_and_none_of_ours():
    assert sum(len(entry["names"].split()) for entry in ADVICE) == len(ELSEWHERE), "a name stands twice"
    ours = {name.partition(".")[2] for name in KEYS} | accepted_keys(JobConfig).keys()
    assert ELSEWHERE.keys() & ours == set()
    tables = {name.partition(".")[0] for name in KEYS}
    for advice in ELSEWHERE.values():
        named = [
            name for name in re.findall(r"[a-z0-9_]+\.(?!jsonl)[a-z0-9_]+", advice) if name.partition(".")[0] in tables
        ]
        assert set(named) <= KEYS.keys(), advice
        assert advice.startswith(("use ", "set ", "leave it out: ", "there is no ", "give ")), advice


def test_tables_of_other_programs_in_a_file(tmp_path: Path):
    (tmp_path / "run.toml").write_text("[zero_optimization]\nstage = 3\n")
    message = refused("--job.config_file", str(tmp_path / "run.toml"))
    assert "[zero_optimization]" in message
    assert "parallelism.data_parallel_shard_degree" in message


def test_near_is_few_letters_or_the_beginning_or_words():
    names = ["flavor", "tokenizer_path", "rope_theta", "lr", "flag"]
    for word, name in {
        "flavr": "flavor",  # missing
        "flavour": "flavor",  # added
        "flavir": "flavor",  # replaced
        "falvor": "flavor",  # swapped
        "flat": "flag",  # replaced in a short word
        "Tokenizer-Path": "tokenizer_path",
        "tokenizer": "tokenizer_path",
        "rope": "rope_theta",
    }.items():
        assert nearest(word, names) == name, word
    for word in ("", "x", "l", "lx", "ro", "favours", "path", "theta_path", "dropout"):
        assert nearest(word, names) is None, word


# ---- several at once


def test_all_wrong_settings_of_the_command_line_a_file_and_its_base_are_told_at_once(tmp_path: Path):
    (tmp_path / "base.toml").write_text("[training]\nstpes = 1\n[zzz]\na = 1\n")
    (tmp_path / "run.toml").write_text('base = "base.toml"\n[training]\nseq_len = "8k"\n[model]\nflavour = "1B"\n')
    message = refused("--job.config_file", str(tmp_path / "run.toml"), "--lrr", "3", "--training.steps", "x")
    first, *lines = message.split("\n")
    assert first == "6 settings are wrong:"
    expected = [
        "  --lrr 3 (on the command line) is not",
        "  training.steps = 'x' (on the command line) must be an int",
        f"  training.seq_len = '8k' (in {tmp_path}/run.toml) must be an int; write 8192 or 8000",
        f"  model.flavour = '1B' (in {tmp_path}/run.toml) is not a known key; did you mean 'model.flavor'?",
        f"  training.stpes = 1 (in {tmp_path}/base.toml) is not a known key; did you mean 'training.steps'?",
        f"  [zzz] (in {tmp_path}/base.toml) is not a known table",
    ]
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


def test_a_missing_file_is_told_beside_wrong_options():
    message = refused("--job.config_file", "nowhere.toml", "--training.stpes", "3")
    assert message.startswith("2 settings are wrong:\n")
    assert "nowhere.toml" in message
    assert "'training.steps'" in message


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--model=llama3_8b", "is a table of settings; its keys are --model.path, --model.name, --model.flavor"),
        ("--compile", "its keys are --compile.enable, "),
        ("--gpus=8", "--ngpu 8 for lct train (or NGPU=8)"),
        ("--module=llama3", "give a preset or a file first: lct train llama3_8b"),
    ],
)
def test_what_newcomers_write_is_answered(argument: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_command_line([argument])
    assert words in str(error.value)


def test_another_number_is_no_near_spelling() -> None:
    families = ["llama3", "qwen3", "gemma2"]
    assert [nearest(name, families) for name in ("llama4", "qwen2", "llama", "lama3")] == [
        None,
        None,
        "llama3",
        "llama3",
    ]
    assert nearest("h10", ["h100", "h200"]) == "h100"
