"""Command line and TOML files: precedence, inheritance, strict types, one sentence for every wrong input."""

import math
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.commands.main import COMMANDS
from trainer.commands.main import main as lct
from trainer.config.errors import ConfigError
from trainer.config.keys import Key, keys_of
from trainer.config.loader import parse_command_line, to_toml
from trainer.config.schema import Job, JobConfig, LRScheduler, Metrics, Model, Optimizer, Training
from trainer.config.values import from_toml, from_words
from trainer.job import resolve

ROOT = Path(__file__).resolve().parents[2]
BOOLEANS = [name for name, key in keys_of(JobConfig).items() if key.kind is bool]


def parse(*argv: str) -> JobConfig:
    return parse_command_line(list(argv)).config


def value_of(config: JobConfig, name: str) -> object:
    table, key = name.split(".")
    return getattr(getattr(config, table), key)


def refused(*argv: str) -> str:
    """The one-line message with which these arguments are refused."""
    with pytest.raises(ConfigError) as error:
        parse_command_line(list(argv))
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- precedence


def test_nothing_given_means_the_defaults():
    command = parse_command_line([])
    assert command.config == JobConfig()
    assert (command.check_config, command.world_size, command.notes) == (False, None, ())


def test_command_line_over_file_over_base_over_defaults(toml):
    toml("[training]\nsteps = 1\nseq_len = 2\nseed = 3\n", "base.toml")
    path = toml('base = "base.toml"\n[training]\nsteps = 10\nseq_len = 20\n')
    training = parse("--training.steps", "100", "--job.config_file", path).training
    assert (training.steps, training.seq_len, training.seed) == (100, 20, 3)


def test_bases_are_chained_and_found_beside_the_file_that_names_them(tmp_path, toml):
    (tmp_path / "deep").mkdir()
    toml("[optimizer]\nlr = 0.5\n", "root.toml")
    toml('base = "../root.toml"\n[training]\nsteps = 7\n', "deep/middle.toml")
    config = parse("--job.config_file", toml('base = "deep/middle.toml"\n'))
    assert (config.optimizer.lr, config.training.steps) == (0.5, 7)


def test_of_an_option_given_twice_the_last_counts():
    assert parse("--training.steps", "1", "--training.steps", "2").training.steps == 2


# ---- spellings of the command line


@pytest.mark.parametrize("name", BOOLEANS)
def test_every_boolean_can_be_switched_on_and_off(name: str):
    table, key = name.split(".")
    for on in (f"--{name}", f"--{table}.{key.replace('_', '-')}", f"--{name}=true"):
        assert value_of(parse(f"--{table}.no_{key}", on), name) is True
    for off in (f"--{table}.no_{key}", f"--{table}.no-{key}", f"--no-{name}", f"--no_{name}", f"--{name}=false"):
        assert value_of(parse(f"--{name}", off), name) is False


@pytest.mark.parametrize(
    "argv",
    [["--training.seq_len", "64"], ["--training.seq_len=64"], ["--training.seq-len", "64"], ["--training.seq-len=64"]],
)
def test_values_are_given_with_space_or_equals_hyphen_or_underscore(argv: list[str]):
    assert parse(*argv).training.seq_len == 64


def test_values_of_every_kind():
    config = parse(
        *("--training.global_batch_size", "-1", "--optimizer.lr", "3", "--optimizer.eps", "1e-6"),
        *("--job.max_minutes", "2.5", "--optimizer.implementation", "for-loop", "--job.description=--odd = text"),
    )
    assert config.training.global_batch_size == -1
    assert (config.optimizer.lr, type(config.optimizer.lr)) == (3.0, float)
    assert (config.optimizer.eps, config.job.max_minutes) == (1e-6, 2.5)
    assert (config.optimizer.implementation, config.job.description) == ("for-loop", "--odd = text")


def test_none_unsets_an_optional_value(toml):
    path = toml("[job]\nmax_minutes = 3\n[model]\ntokenizer_path = 'x'\n")
    config = parse("--job.config_file", path, "--job.max_minutes", "None", "--model.tokenizer_path=None")
    assert config.job.max_minutes is None
    assert config.model.tokenizer_path is None


def test_print_config_is_an_action():
    assert parse_command_line(["--print-config"]).print_config
    assert not parse_command_line(["--print-config", "--no-print-config"]).print_config


def test_clipping_is_switched_off_by_inf(toml):
    for config in (
        parse("--training.max_norm", "inf"),
        parse("--job.config_file", toml("[training]\nmax_norm = inf\n")),
    ):
        assert config.training.max_norm == math.inf
        resolve(config, 1)
        assert parse("--job.config_file", toml(to_toml(config), "again.toml")).training.max_norm == math.inf


def test_an_option_given_twice_is_told_if_its_values_differ():
    (note,) = parse_command_line(["--training.steps=3", "--training.steps=4"]).notes
    assert note == "training.steps is given more than once on the command line; the last value counts: 4"
    assert parse_command_line(["--training.steps=3", "--training.steps=3"]).notes == ()
    assert parse_command_line(["--job.config_file=debug_model", "--job.config_file=llama3_8b"]).notes == ()


def test_a_run_may_be_shorter_than_its_warm_up():
    resolve(parse("--training.steps", "5", "--lr_scheduler.warmup_steps", "10"), 1)


def test_check_config_and_world_size():
    command = parse_command_line(["--check-config", "--world-size", "8"])
    assert (command.check_config, command.world_size) == (True, 8)
    assert "--check-config" in refused("--world-size", "8")
    assert "at least 1" in refused("--check-config", "--world-size", "0")
    assert "an int" in refused("--check-config", "--world-size", "many")


def test_arguments_of_a_template_may_be_a_table(toml):
    text = (
        '[chat]\ndate = "2026-01-31"\n[chat.arguments]\nenable_thinking = false\nlanguage = "English"\ntools = ["a"]\n'
    )
    chat = parse("--job.config_file", str(toml(text))).chat
    assert chat.values == {"enable_thinking": False, "language": "English", "tools": ["a"]}


def test_lists_from_both_sources():
    assert from_toml("a.b", [1, 2], Key(tuple[int, ...], ()), "in x") == (1, 2)
    assert from_words("a.b", ["1", "2"], Key(tuple[int, ...], ())) == (1, 2)
    assert from_words("a.b", [], Key(tuple[int, ...], ())) == ()
    for bad in ([1, "2"], 3):
        with pytest.raises(ConfigError, match="a list, each item an int"):
            from_toml("a.b", bad, Key(tuple[int, ...], ()), "in x")


# ---- round trip

words = st.text(st.characters(codec="utf-8"), max_size=20)
positive = st.floats(1e-300, 1e300)


@given(
    lr=positive,
    beta=st.floats(0, 1),
    description=words,
    minutes=st.none() | positive,
    seed=st.integers(0, 2**63 - 1),
    ratio=st.none() | st.floats(0, 1),
    tensorboard=st.booleans(),
    norm=st.sampled_from(["rmsnorm", "layernorm", "np_layernorm"]),
)
def test_the_effective_configuration_reads_back_as_itself(
    tmp_path_factory, lr, beta, description, minutes, seed, ratio, tensorboard, norm
):
    config = JobConfig(
        job=Job(description=description, max_minutes=minutes),
        metrics=Metrics(enable_tensorboard=tensorboard),
        model=Model(norm_type=norm),
        optimizer=Optimizer(lr=lr, beta1=beta),
        lr_scheduler=LRScheduler(decay_ratio=ratio),
        training=Training(seed=seed),
    )
    path = tmp_path_factory.getbasetemp() / "effective.toml"
    path.write_bytes(to_toml(config).encode())
    read = parse("--job.config_file", str(path))
    assert read == replace(config, job=replace(config.job, config_file=str(path)))


def test_the_effective_configuration_needs_no_base_and_no_file_name(toml):
    toml("[training]\nsteps = 11\n", "base.toml")
    effective = to_toml(parse("--job.config_file", toml('base = "base.toml"\n')))
    assert "steps = 11" in effective
    assert "base" not in effective
    assert "config_file" not in effective
    assert "None" not in effective


# ---- wrong input, one sentence each

OPTIONS = {
    ("--training.sequence_length", "512"): ["training.sequence_length 512", "use training.seq_len"],
    ("--training.seqlen", "512"): ["--training.seqlen 512", "'training.seq_len'"],
    ("--optimizer.steps", "3"): ["--optimizer.steps 3", "'training.steps'"],
    ("--seq_len", "3"): ["--seq_len 3", "'training.seq_len'"],
    ("--optimiser.lr", "3"): ["--optimiser.lr 3", "'optimizer.lr'"],
    ("--traning.foo", "3"): ["--traning.foo", "'training'"],
    ("--quantize.recipe", "x"): ["--quantize.recipe x", "training, mixture, chat, parallelism"],
    ("--comm.zzz", "3"): ["--comm.zzz", "init_timeout_seconds"],
    ("--zzz",): ["--zzz", "table.key", "lr_scheduler"],
    ("--check-confg",): ["--check-confg", "--check-config"],
    ("--print-confg",): ["--print-confg", "--print-config"],
    ("--training.no_steps",): ["--training.no_steps", "'training.steps'"],
    ("--training.steps", "4.5"): ["training.steps = '4.5'", "an int", "10000"],
    ("--training.steps", "1e4"): ["training.steps = '1e4'", "write 10000"],
    ("--training.steps",): ["training.steps", "one value", "10000"],
    ("--training.steps", "4", "5"): ["training.steps", "'4 5'", "one value"],
    ("--training.steps=",): ["training.steps = ''", "an int", "10000"],
    ("--optimizer.lr", "fast"): ["optimizer.lr = 'fast'", "float", "0.0008"],
    ("--optimizer.lr", "nan"): ["optimizer.lr = 'nan'", "finite"],
    ("--optimizer.lr", "None"): ["optimizer.lr = 'None'", "0.0008"],
    ("--job.max_minutes", "long"): ["job.max_minutes = 'long'", "leave it out"],
    ("--job.max_minutes", "2h"): ["job.max_minutes = '2h'", "such as 60.0"],
    ("--training.seq_len", "8k"): ["training.seq_len = '8k'", "write 8192 or 8000"],
    ("--training.seq_len", "1M"): ["training.seq_len = '1M'", "write 1048576 or 1000000"],
    ("--training.seq_len", "1.5K"): ["training.seq_len = '1.5K'", "write 1536 or 1500"],
    ("--training.seq_len", "8,192"): ["training.seq_len = '8,192'", "write 8192"],
    ("--training.seq_len", "8m"): ["training.seq_len = '8m'", "such as 2048"],
    ("--training.seq_len", "k"): ["training.seq_len = 'k'", "such as 2048"],
    ("--training.deterministic", "1"): ["training.deterministic = '1'", "true or false; write true"],
    ("--training.deterministic", "Yes"): ["training.deterministic = 'Yes'", "true or false; write true"],
    ("--training.deterministic", "off"): ["training.deterministic = 'off'", "true or false; write false"],
    ("--training.max_norm", "nan"): ["training.max_norm = 'nan'", "must be a float, such as 1.0"],
    ("--training.max_norm", "-inf"): ["training.max_norm = '-inf'", "must be a float, such as 1.0"],
    ("--training.steps", "5", "-v"): ["training.steps", "'5 -v'", "options begin with two hyphens"],
    ("--training.steps", "5", "-6"): ["training.steps", "'5 -6'", "one value: an int, such as 10000"],
    ("--job.description",): ["job.description", "write --job.description=VALUE for a value that begins with two"],
    ("--check-config", "--world-size", "-8"): ["--world-size -8", "at least 1, such as 8"],
    ("-lr", "3"): ["'-lr'", "--table.key value"],
    ("--optimizer.name", "adamw"): ["optimizer.name = 'adamw'", "'AdamW', 'Adam'", "did you mean 'AdamW'"],
    ("--optimizer.name", "SGD"): ["optimizer.name = 'SGD'", "one of 'AdamW', 'Adam'"],
    ("--training.deterministic", "maybe"): ["training.deterministic = 'maybe'", "true or false"],
    ("--training.no_deterministic", "true"): ["--training.no_deterministic", "no value"],
    ("train_configs/debug_model.toml",): ["train_configs/debug_model.toml", "--job.config_file"],
    ("--",): ["'--'", "--job.config_file"],
    ("--job.config_file", "train_configs/debug.toml"): ["train_configs/debug.toml", ".toml"],
    ("--job.config_file", "train_configs"): ["train_configs", "cannot be read"],
}


@pytest.mark.parametrize("argv", OPTIONS, ids=str)
def test_a_wrong_option_is_refused_in_one_sentence(argv: tuple[str, ...], monkeypatch):
    monkeypatch.chdir(ROOT)
    message = refused(*argv)
    for part in OPTIONS[argv]:
        assert part in message


FILES = {
    "[training]\nsequence_length = 512": ["training.sequence_length = 512", "use training.seq_len"],
    "[training]\nlr = 0.1": ["training.lr = 0.1", "'optimizer.lr'"],
    "[trainig]\nsteps = 1": ["[trainig]", "'training'"],
    "[quantise]\nrecipe = 'x'": ["[quantise]", "job, profiling, metrics, model"],
    "[quantize]\nrecipe = 'x'": ["quantize.recipe = 'x'", "in no known table"],
    "[training]\ncompiled = true": ["training.compiled = true", "not a known key"],
    "[activation_checkpoint]\nselective_ac_option = 2": ["selective_ac_option = 2 ", 'a string; write "2"'],
    "[activation_checkpoint]\nmode = 'ful'": ["activation_checkpoint.mode = 'ful'", "did you mean 'full'"],
    "[training]\non_nonfinite = 'stop_after_update'": ["one of 'stop', 'skip'", "set training.early_update = true"],
    "[parallelism]\npipeline_degree = 2": ["parallelism.pipeline_degree = 2", "pipeline_parallel_degree'"],
    "[parallelism]\npipeline_parallel_module_fqns = 'layers.1'": ["module_fqns = 'layers.1'", "a list", '["a", "b"]'],
    "seq_len = 512": ["seq_len = 512", "'training.seq_len'"],
    "training = 3": ["training = 3", "[training]"],
    "[[training]]\nsteps = 1": ["training = [", "[training]"],
    "[training.steps]\nx = 1": ["training.steps = {'x': 1}", "an int"],
    "[training.inner]\nx = 1": ["training.inner", "not a known key"],
    '[training]\nsteps = "4"': ["training.steps = '4'", "an int", "write 4 without quotes"],
    '[training]\ndeterministic = "true"': ["training.deterministic = 'true'", "without quotes"],
    "[training]\nsteps = true": ["training.steps = true", "an int", "10000"],
    "[training]\nsteps = 1e4": ["training.steps = 10000.0", "write 10000"],
    "[training]\nsteps = [1]": ["training.steps = [1]", "an int"],
    "[training]\ndeterministic = 1": ["training.deterministic = 1", "true or false", "write true"],
    "[optimizer]\nlr = inf": ["optimizer.lr = inf", "finite"],
    "[optimizer]\nlr = true": ["optimizer.lr = true", "float"],
    f"[optimizer]\nlr = 1{'0' * 400}": ["optimizer.lr = 1000", "finite"],
    "[job]\ndump_folder = 1979-05-27": ["job.dump_folder", "a string", "'./outputs'"],
    "[optimizer]\nname = 'adam'": ["optimizer.name = 'adam'", "one of 'AdamW', 'Adam'", "did you mean 'Adam'"],
    "[job]\nconfig_file = 'x.toml'": ["job.config_file = 'x.toml'", "base ="],
    "[job]\nmax_minutes = None": ["not valid TOML", "line 2"],
    "[training\nsteps = 1": ["not valid TOML", "line 1"],
    "[training]\nsteps = 1\nsteps = 2": ["not valid TOML", "line 3"],
    '[training]\n"a\\nb" = 1': ["not a known key"],
    '["a\\nb"]\nc = 1': ["not a known table"],
    "base = 'missing.toml'": ["base = ", "missing.toml", "does not exist"],
    "base = 'rum.toml'": ["rum.toml", "did you mean", "run.toml"],
    "base = 'run.toml'": ["base = 'run.toml'", "circle", "remove"],
    "base = ['a.toml', 'b.toml']": ["base = ['a.toml', 'b.toml']", "one file name"],
}


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:40])
def test_a_wrong_file_is_refused_in_one_sentence_that_names_the_file(text: str, toml):
    path = toml(text)
    message = refused("--job.config_file", path)
    for part in [path, *FILES[text]]:
        assert part in message


def test_a_circle_of_bases_is_refused(toml):
    toml('base = "b.toml"', "a.toml")
    message = refused("--job.config_file", toml('base = "a.toml"', "b.toml"))
    assert "circle" in message
    assert "a.toml" in message


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "mark.toml").write_bytes(b"\xef\xbb\xbf[training]\nsteps = 7\n")
    assert parse("--job.config_file", str(tmp_path / "mark.toml")).training.steps == 7


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    assert "UTF-8" in refused("--job.config_file", str(tmp_path / "latin.toml"))


# ---- help, speed, torch

PARSE = "import sys; from trainer.config.loader import parse_command_line; parse_command_line(sys.argv[1:])"


def run(code: str, *argv: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run code in a process of its own; gives its seconds of processor time too, which do not count others' work."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    return result, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start


def test_help_lists_every_option_within_a_second():
    result, seconds = run(PARSE, "--training.steps", "x", "--help")
    assert result.returncode == 0
    for name in [*keys_of(JobConfig), "check-config", "world-size N", "print-config"]:
        assert f"--{name}" in result.stdout
    assert seconds < 1


def test_an_error_takes_less_than_a_second():
    result, seconds = run(PARSE, "--training.sequence_length", "5")
    assert "use training.seq_len" in result.stderr
    assert seconds < 1


def test_parsing_and_validating_do_not_import_torch():
    result, _ = run(
        "import sys\n"
        "from trainer.config.loader import parse_command_line, to_toml\n"
        "from trainer.job import resolve\n"
        "config = parse_command_line(sys.argv[1:]).config\n"
        "resolve(config, 8), to_toml(config)\n"
        "print('torch' in sys.modules)",
        *("--job.config_file", "train_configs/debug_model.toml"),
    )
    assert result.stdout.strip() == "False", result.stderr


def test_planning_does_not_import_torch():
    """The schedule of a thousand ranks can be looked at on any machine."""
    folder = "longshard/context/planning"
    modules = [f"{folder}/{path.stem}".replace("/", ".") for path in (ROOT / folder).glob("[a-z]*.py")]
    assert len(modules) > 9
    imports = "".join(f"import {name}\n" for name in modules)
    result, _ = run(f"import sys\n{imports}print('torch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_check_prints_the_configuration_if_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lct(["check", "debug_model", "--world-size", "4", "--training.steps=7", "--print-config"]) == 0
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    assert parse(f"--job.config_file={file}").training.steps == 7


def test_an_installation_without_a_package_of_the_program_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An editable installation lists the packages that the program had when it was installed."""
    monkeypatch.setitem(COMMANDS, "chat", {"module": "lct_absent.chat"})
    assert lct(["chat", "folder"]) == 2
    assert "lacks lct_absent; install the program again" in capsys.readouterr().err
    monkeypatch.setitem(COMMANDS, "chat", {"module": "trainer.absent"})
    with pytest.raises(ModuleNotFoundError):
        lct(["chat", "folder"])
