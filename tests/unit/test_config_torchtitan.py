"""torchtitan's own Llama files, of October 2024, January 2025 and February 2026, are read; docs/torchtitan.md is true.

`torchtitan_configs/` has the tables, keys and values of these files.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.config.keys import keys_of
from trainer.config.loader import CommandLine, parse_command_line
from trainer.config.schema import JobConfig
from trainer.config.toml import tomllib
from trainer.config.torchtitan import ABSENT, OLDER, OLDER_VALUES, Absent
from trainer.job import resolve

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "tests/unit/torchtitan_configs").glob("*.toml"))
PAGE = (ROOT / "docs" / "torchtitan.md").read_text()
# What the files name is not on this disk, or would be downloaded.
OWN_DATA = ["--training.dataset", "python_stdlib", "--model.tokenizer_path", "None"]


@dataclass(frozen=True)
class Wanted:
    """Settings of one size of the model, the same in all three years."""

    ranks: int
    flavor: str
    lr: float
    steps: int
    warmup_steps: int
    seq_len: int
    batch: int
    tp: int
    recompute: tuple[str, str]
    interval: tuple[int, int, int] = (500, 500, 500)
    compiled: bool = False


SIZES = {
    "debug_model": Wanted(8, "debugmodel", 8e-4, 10, 2, 2048, 8, 1, ("selective", "2"), (5, 10, 10)),
    "llama3_8b": Wanted(64, "8B", 3e-4, 1000, 200, 8192, 1, 1, ("selective", "op")),
    "llama3_70b": Wanted(64, "70B", 1.5e-4, 1000, 200, 8192, 8, 8, ("full", "op")),
    "llama3_405b": Wanted(128, "405B", 8e-5, 3000, 600, 8192, 2, 8, ("full", "op"), compiled=True),
}
YEARS = ("2024_10", "2025_01", "2026_02")


def read(path: Path, *arguments: str) -> CommandLine:
    return parse_command_line(["--job.config_file", str(path), *arguments])


def refused(config: JobConfig, ranks: int) -> str:
    with pytest.raises(ConfigError) as error:
        resolve(config, ranks)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_there_are_twelve_files():
    assert [path.stem for path in FILES] == sorted(f"{year}_{size}" for year in YEARS for size in SIZES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_means_here_what_it_means_there(path: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    year, wanted = path.stem[:7], SIZES[path.stem[8:]]
    config = read(path).config
    assert (config.model.name, config.model.flavor, config.model.norm_type) == ("llama3", wanted.flavor, "rmsnorm")
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.eps) == ("AdamW", wanted.lr, 1e-8)
    assert (config.lr_scheduler.warmup_steps, config.training.steps) == (wanted.warmup_steps, wanted.steps)
    assert config.lr_scheduler.decay_ratio == (0.8 if path.stem == "2026_02_debug_model" else None)
    assert (config.training.seq_len, config.training.local_batch_size) == (wanted.seq_len, wanted.batch)
    assert (config.training.max_norm, config.training.global_batch_size) == (1.0, -1)
    assert (config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option) == wanted.recompute
    assert (config.compile.enable, config.compile.components) == (wanted.compiled, ("model", "loss"))
    on = wanted.compiled
    assert (config.float8.enable, config.float8.enable_fsdp_float8_all_gather) == (on, on)
    assert config.float8.filter_fqns == ("output",)
    assert config.parallelism.enable_async_tensor_parallel == on
    checkpoint = config.checkpoint
    interval = wanted.interval[YEARS.index(year)]
    assert (checkpoint.enable, checkpoint.folder, checkpoint.interval) == (False, "checkpoint", interval)
    assert config.profiling.enable_profiling == (wanted.flavor != "debugmodel")

    # Asynchronous tensor parallelism and float8 together are the one thing that has to be left out.
    arguments = [*OWN_DATA, *(["--parallelism.no-enable_async_tensor_parallel"] if wanted.compiled else [])]
    command = read(path, *arguments)
    job = resolve(command.config, wanted.ranks)
    degrees = job.degrees
    assert (degrees.dp_replicate, degrees.dp_shard) == (1, wanted.ranks // wanted.tp)
    assert (degrees.tp, degrees.cp, degrees.pp) == (wanted.tp, 1, 1)
    unused = job.notes
    in_vain = ["profiling.profile_freq", "checkpoint.interval"] if wanted.flavor == "debugmodel" else []
    if path.stem == "2026_02_debug_model":
        in_vain.insert(1, "parallelism.pipeline_parallel_schedule")
    in_vain += ["checkpoint.last_save_model_only"] * ("last_save_model_only = true" in path.read_text())
    in_vain += ["validation.freq"] * ("[validation]" in path.read_text())  # its validation is off
    assert [note.partition(" = ")[0] for note in unused] == in_vain
    for note in (*command.notes, *unused):
        assert "\n" not in note


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_word_that_changes_is_in_a_note(path: Path):
    command = read(path)
    keys = list(flat(tomllib.loads(path.read_text())))
    moved = [key for key in keys if key in OLDER]
    assert len([note for note in command.notes if "is an older spelling" in note]) == len(moved)
    for key in moved:
        assert any(note.startswith(f"{key} = ") and OLDER[key].key in note for note in command.notes)
    ignored = [note for note in command.notes if note.startswith("ignored (in ")]
    assert len(ignored) == 1  # one line for all of them
    for key in keys:
        is_replaced = any(note.startswith(f"{key} = true") and "has no counterpart" in note for note in command.notes)
        assert (f"{key} = " in ignored[0]) == (key in ABSENT and not is_replaced)
    assert set(keys) <= set(OLDER) | set(ABSENT) | set(keys_of(JobConfig))


def flat(tables: dict, prefix: str = "") -> list[str]:
    keys = []
    for name, value in tables.items():
        keys += flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return keys


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_missing_is_told_before_anything_starts(path: Path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = SIZES[path.stem[8:]]
    config = read(path, "--parallelism.no-enable_async_tensor_parallel").config
    assert re.search(r"model.tokenizer_path = '\./.* does not exist; get one with", refused(config, wanted.ranks))
    config = read(path, "--parallelism.no-enable_async_tensor_parallel", "--model.tokenizer_path", "None").config
    message = refused(config, wanted.ranks)
    if config.training.dataset == "c4_test":
        assert message.startswith(
            "training.dataset = 'c4_test' is a file in torchtitan's repository; clone it, and use"
        )
    else:
        wanted = r"training.dataset = 'c4' lies on the Hugging Face hub; use .* training.dataset_path = 'allenai/c4:en'"
        assert re.match(wanted, message)


SPRING_2024 = """
[job]
dump_folder = "./outputs"
[profiling]
run_profiler = true
save_traces_folder = "profile_trace"
profile_every_x_iter = 5
[metrics]
enable_tensorboard = true
save_tb_folder = "tb"
log_freq = 10
[model]
name = "llama"
flavor = "debugmodel"
norm_type = "rmsnorm"
[optimizer]
name = "AdamW"
lr = 8e-4
[training]
batch_size = 8
seq_len = 2048
warmup_steps = 2
max_norm = 1.0
steps = 10
data_parallel_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
compile = false
checkpoint_interval = 3600
checkpoint_interval_type = "steps"
checkpoint_folder = ""
"""


def test_a_file_of_march_2024_is_read(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(SPRING_2024)
    config = read(tmp_path / "old.toml", *OWN_DATA).config
    assert (config.model.name, config.model.flavor) == ("llama3", "debugmodel")
    assert (config.profiling.enable_profiling, config.profiling.profile_freq) == (True, 5)
    assert (config.checkpoint.enable, config.checkpoint.interval) == (False, 3600)
    resolve(config, 8)
    (tmp_path / "old.toml").write_text(SPRING_2024.replace('checkpoint_folder = ""', 'checkpoint_folder = "there"'))
    with pytest.raises(ConfigError, match=r"set checkpoint\.enable and checkpoint\.folder"):
        read(tmp_path / "old.toml", *OWN_DATA)


def test_float8_settings_are_ignored_while_it_is_off(tmp_path: Path) -> None:
    """`filter_fqns` was one string once; lists of experts stand below a converter that is commented out."""
    tables = '[float8]\nfilter_fqns = "output, router.gate"\n[quantize.grouped_mm.float8]\nfqns = ["experts"]\n'
    (tmp_path / "off.toml").write_text(tables)
    command = read(tmp_path / "off.toml")
    assert command.config.float8.filter_fqns == ("output", "router.gate")
    assert any("float8.filter_fqns = 'output, router.gate'" in note for note in command.notes)
    assert any('fqns = ["experts"]' in note or "fqns = ['experts']" in note for note in command.notes)
    assert read(tmp_path / "off.toml", "--float8.filter_fqns", "wq").config.float8.filter_fqns == ("wq",)
    with pytest.raises(ConfigError, match="tensor parallelism does not divide experts"):
        read(tmp_path / "off.toml", "--float8.enable")


def test_a_mixture_of_experts_under_the_name_of_the_dense_family_is_told_its_own() -> None:
    config = parse_command_line(["--model.name=qwen3", "--model.flavor=debugmodel_moe"]).config
    assert "mixtures of experts are of model.name = 'qwen3_moe'" in refused(config, 1)


@pytest.mark.parametrize("year", YEARS)
def test_float8_beside_asynchronous_tensor_parallelism_is_refused(year: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(read(ROOT / f"tests/unit/torchtitan_configs/{year}_llama3_405b.toml", *OWN_DATA).config, 128)
    assert "float8.enable = true and parallelism.enable_async_tensor_parallel = true" in message
    assert "leave one of them out" in message


# ---- settings without counterpart


@pytest.mark.parametrize("key", ABSENT)
def test_a_setting_that_asks_for_nothing_is_ignored_with_a_note(key: str):
    known = ABSENT[key]
    value = words_that_ask(known) if known.off is None else list(map(str, as_words(known.off[0])))
    command = parse_command_line(option(key, known, value))
    assert command.config == JobConfig()
    (note,) = command.notes
    assert note.startswith("ignored (on the command line)") or known.replaced in note
    assert f"{key} = " in note


@pytest.mark.parametrize("key", [key for key, known in ABSENT.items() if known.off is not None])
def test_a_setting_that_asks_for_something_is_refused_with_what_to_do_instead(key: str):
    known = ABSENT[key]
    argv = option(key, known, words_that_ask(known))
    if known.needs:
        (note,) = parse_command_line(argv).notes
        assert f"{key} = " in note
        argv.append(f"--{known.needs}={'x' if known.needs.endswith('_path') else 'true'}")
    with pytest.raises(ConfigError) as error:
        parse_command_line(argv)
    message = str(error.value)
    assert message.startswith(f"{key} = ")
    assert message.endswith(f"has no counterpart here; {known.instead}")
    assert known.instead
    assert "\n" not in message


def as_words(value: object) -> list[object]:
    return list(value) if isinstance(value, tuple) else [value]


def words_that_ask(known: Absent) -> list[str]:
    """Return words that set a key to a value with an effect."""
    if known.kind is bool:
        return ["false" if known.off and known.off[0] else "true"]
    return ["7"] if known.kind in (int, float) else ["something"]


def option(key: str, known: Absent, words: list[str]) -> list[str]:
    return [f"--{key}={words[0]}"] if len(words) == 1 else [f"--{key}", *words]


def test_the_command_line_goes_over_a_file_for_them_too(tmp_path):
    (tmp_path / "run.toml").write_text("[metrics]\nsave_for_all_ranks = true\n")
    with pytest.raises(ConfigError, match=r"save_for_all_ranks = true \(in .*run.toml\) .*; rank 0 writes"):
        read(tmp_path / "run.toml")
    assert (
        read(tmp_path / "run.toml", "--metrics.no-save_for_all_ranks").config
        == read(tmp_path / "run.toml", "--metrics.save_for_all_ranks=false").config
    )


def test_what_a_base_asks_for_is_judged_with_what_the_file_says(tmp_path):
    (tmp_path / "base.toml").write_text('[checkpoint]\ninterval_type = "seconds"\n[validation]\nsteps = 3\n')
    (tmp_path / "run.toml").write_text('base = "base.toml"\n[checkpoint]\ninterval_type = "steps"\n')
    assert len(read(tmp_path / "run.toml").notes) == 2
    with pytest.raises(ConfigError, match=r"validation.steps = 3 .*base.toml\)"):
        read(tmp_path / "run.toml", "--validation.enable")
    read(tmp_path / "run.toml", "--validation.enable", "--validation.steps=-1")


# ---- values and folders


def test_older_values(tmp_path):
    (tmp_path / "run.toml").write_text('[model]\nnorm_type = "fused_rmsnorm"\n')
    command = read(tmp_path / "run.toml", "--checkpoint.initial_load_path", "")
    assert (command.config.model.norm_type, command.config.checkpoint.initial_load_path) == ("rmsnorm", None)
    assert len(command.notes) == 2
    for key, value in (("norm_type", "'rmsnorm'"), ("initial_load_path", "None")):
        assert any(key in note and note.endswith(value) for note in command.notes)


def test_only_linear_modules_in_float8_are_converted():
    for name in ("float8", "quantize.linear.float8"):
        assert parse_command_line(["--model.converters", name]).config.float8.enable
    with pytest.raises(ConfigError, match=r"'mx' has no counterpart here; use 'float8'"):
        parse_command_line(["--model.converters", "float8", "mx"])


@pytest.mark.parametrize("name", ["original/tokenizer.model", "tokenizer.model"])
def test_a_folder_of_assets_gives_its_tokenizer(name: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = (ROOT / "trainer/assets/python_4k.tiktoken").read_bytes()
    for folder, content in (("none", None), ("other", b"not of tiktoken"), ("good", shipped)):
        config = parse_command_line(["--model.hf_assets_path", f"{tmp_path}/{folder}"]).config
        assert config.model.tokenizer_path == f"{tmp_path}/{folder}"  # looked at when it is checked, not before
        file = tmp_path / folder / name
        file.parent.mkdir(parents=True)
        if content is not None:
            file.write_bytes(content)
        if content is shipped:
            resolve(config, 1)
        else:
            part = "is a folder without" if content is None else "is no tokenizer of tiktoken's format"
            assert part in refused(config, 1)


# ---- docs/torchtitan.md


def row(key: str) -> str:
    """Return the row of a key in the table of the page."""
    if key in OLDER:
        return f"| `{key}` | `{OLDER[key].key}`, {OLDER[key].words} |"
    return f"| `{key}` | {ABSENT[key].replaced} |"


def spelled(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value)).replace("'", '"')
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def test_the_page_has_every_key_that_is_more_than_renamed():
    table = PAGE.partition("## What becomes of each key")[2]
    rows = [line for line in table.splitlines() if re.match(r"\| `[a-z_0-9.]+\.[a-z_0-9.]+` \|", line)]
    lacking = {key for key, known in ABSENT.items() if not known.replaced}
    renamed = {key for key, older in OLDER.items() if not older.words}  # the log has a line for each
    others = [key for key in (*OLDER, *ABSENT) if key not in lacking | renamed]
    for key in others:
        assert row(key) in rows
    values = [
        f"| `{key}` | `{spelled(old)}` is {'the default' if new is None else f'`{spelled(new)}`'} |"
        for key, names in OLDER_VALUES.items()
        for old, new in names.items()
    ]
    assert len(rows) == len(others) + len(values)
    for line in values:
        assert line in rows


def test_the_page_names_defaults_that_are_ours():
    for key, default in re.findall(r"^\| `([a-z_.0-9]+)` \| [^|]* \| `([^`]*)` \|$", PAGE, re.MULTILINE):
        value = keys_of(JobConfig)[key].default
        assert default == spelled(value), key
    assert len(re.findall(r"^\| `([a-z_.0-9]+)` \| [^|]* \| `([^`]*)` \|$", PAGE, re.MULTILINE)) > 5
