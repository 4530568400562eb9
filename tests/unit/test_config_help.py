"""`--help`: every key in a few lines, the actions first, examples that work, and one table or key on request."""

import re
import shlex
from typing import get_type_hints

import pytest

from trainer.commands.start import parse
from trainer.config.errors import ConfigError
from trainer.config.help import help_text
from trainer.config.keys import keys_of
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig

PAGE = help_text(JobConfig, 80)


def helped(capsys: pytest.CaptureFixture, *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse_command_line(list(argv))
    assert end.value.code == 0
    return capsys.readouterr().out


def test_the_page_fits_a_terminal_and_each_key_a_glance():
    assert max(map(len, PAGE.splitlines())) <= 80
    entries = re.findall(r"^  --\w+\..*(?:\n {6}.*)*", PAGE, re.MULTILINE)
    lengths = [entry.count("\n") + 1 for entry in entries]
    assert len(lengths) == len(keys_of(JobConfig))
    assert max(lengths) <= 6
    assert sum(length <= 4 for length in lengths) > 0.8 * len(lengths)


def test_examples_come_first_then_actions_then_the_tables():
    assert PAGE.startswith("Train a language model")
    assert PAGE.index("\nExamples") < PAGE.index("\nActions") < PAGE.index("\n[job]")
    actions = PAGE[PAGE.index("\nActions") : PAGE.index("\n[job]")]
    for action in ("-h, --help", "--check-config", "--world-size N", "--print-config"):
        assert f"\n  {action}" in actions
    assert re.findall(r"^\[(\w+)\]", PAGE, re.MULTILINE) == list(get_type_hints(JobConfig))


def test_the_examples_are_accepted():
    examples = PAGE[PAGE.index("Examples") : PAGE.index("Start (")].replace("\\\n", " ")
    commands = re.findall(r"^    lct (train|check) (.*)$", examples, re.MULTILINE)
    assert [verb for verb, _ in commands].count("train") == 4
    for verb, arguments in commands:
        words = shlex.split(arguments)
        if verb == "check":
            parse_command_line(["--check-config", "--job.config_file", *words])
        else:
            parse_command_line(parse(words).arguments)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_one_table_or_one_key(capsys: pytest.CaptureFixture, option: str):
    table = helped(capsys, option, "parallelism")
    assert table.startswith("[parallelism] ")
    assert set(re.findall(r"^  --([\w.]+)", table, re.MULTILINE)) == {
        name for name in keys_of(JobConfig) if name.startswith("parallelism.")
    }
    key = helped(capsys, option, "training.seq_len")
    assert re.findall(r"^  --([\w.]+)", key, re.MULTILINE) == ["training.seq_len"]
    assert key.startswith("[training] ")
    assert helped(capsys, option, "--training.seq_len")[:20] == PAGE[:20], "an option of its own asks for nothing"
    assert helped(capsys, option, "training.seq-len") == key
    for spelling in ("seq_len", "seq-len"):
        both = helped(capsys, option, spelling)
        assert re.findall(r"^  --([\w.]+)", both, re.MULTILINE) == ["training.seq_len", "validation.seq_len"]
    assert helped(capsys, f"{option}", "seed", "max_norm").count("  --") == 2
    assert set(re.findall(r"^  --([\w.]+)", helped(capsys, option, "enable"), re.MULTILINE)) == {
        name for name in keys_of(JobConfig) if name.endswith(".enable")
    }


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("nonsense", "the tables are job, profiling, metrics"),
        ("paralelism", "did you mean 'parallelism'?"),
        ("training.seqlen", "did you mean 'training.seq_len'?"),
        ("dumpfolder", "did you mean 'job.dump_folder'?"),
        ("learning_rate", "use optimizer.lr"),
    ],
)
def test_help_for_something_else_is_refused_in_one_sentence(topic: str, hint: str):
    with pytest.raises(ConfigError) as error:
        parse_command_line(["--help", topic])
    assert str(error.value).startswith(f"--help {topic} is neither a table nor a key; {hint}")
    assert "\n" not in str(error.value)
