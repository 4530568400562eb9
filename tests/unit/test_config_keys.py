"""Law: a new key is two places, its field and its use. All else that is said and checked of it is made of the field."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import get_type_hints

import pytest

from scripts.config_docs import key_tables
from trainer.config import loader
from trainer.config.errors import ConfigError
from trainer.config.help import docstrings, help_text
from trainer.config.keys import AT_LEAST_ONE, Condition, key, keys_of, needs, needs_value, unless
from trainer.config.schema import JobConfig, Metrics
from trainer.job import resolve

pytestmark = pytest.mark.about(
    "trainer/config/checkpoint.py", "trainer/config/optimizer.py", "trainer/config/parallelism.py"
)


@dataclass(frozen=True)
class Extra:
    """A table that the program does not have."""

    rounds: int | None = key(None, AT_LEAST_ONE, "laps", example=5, when=unless("metrics.log_freq", 1))
    """How often it goes round."""

    slow: bool = key(False, when=needs("extra.rounds", remedy="give 5 rounds"))
    """It takes its time."""


@dataclass(frozen=True)
class Schema(JobConfig):
    """The program's tables, and the new one."""

    extra: Extra = field(default_factory=Extra)


def read(*argv: str) -> Schema:
    return loader.parse_command_line(list(argv), Schema).config


def test_it_is_read_from_files_and_command_lines_and_written(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[extra]\nrounds = 7\nslow = true\n")
    file = ("--job.config_file", str(tmp_path / "run.toml"))
    config = read(*file, "--extra.no-slow")
    assert config.extra == Extra(rounds=7)
    assert "[extra]\nrounds = 7\nslow = false\n" in loader.to_toml(config)
    assert read(*file, "--extra.rounds", "None").extra == Extra(slow=True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--extra.rounds", "x"],
            "extra.rounds = 'x' (on the command line) must be an int, such as 5, or leave it out",
        ),
        (
            ["--extra.round", "3"],
            "--extra.round 3 (on the command line) is not a known key; did you mean 'extra.rounds'?",
        ),
    ],
)
def test_wrong_words_for_it_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(*argv)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Schema(extra=Extra(rounds=0)), "extra.rounds = 0 must be at least 1, such as 5"),
        (Schema(extra=Extra(slow=True)), "extra.slow = true has no effect without extra.rounds; give 5 rounds"),
    ],
)
def test_its_bounds_and_what_it_needs_are_checked(config: Schema, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(config, 1)
    assert str(error.value) == message


def test_it_is_told_where_it_has_no_effect() -> None:
    extra = Extra(rounds=3, slow=True)
    assert resolve(Schema(extra=extra), 1).notes == ()
    (note,) = resolve(Schema(extra=extra, metrics=Metrics(log_freq=1)), 1).notes
    assert note == "extra.rounds = 3 has no effect with metrics.log_freq = 1"


def test_the_help_has_it() -> None:
    assert help_text(Schema, 100).endswith(
        "\n\n[extra] A table that the program does not have.\n"
        "  --extra.rounds  an int (laps), at least 1, or None\n"
        "      How often it goes round. Default: None. No effect with metrics.log_freq = 1.\n"
        "  --extra.slow, --extra.no_slow\n"
        "      It takes its time. Default: false. No effect without rounds."
    )


def test_the_page_has_it() -> None:
    assert key_tables(Schema).endswith(
        "### [extra]\n\n| A table that the program does not have. | values | default | meaning |\n|---|---|---|---|\n"
        "| `extra.rounds` | an int (laps), at least 1, or None | None | How often it goes round. |\n"
        "| `extra.slow` | true or false | `false` | It takes its time. |"
    )


# ---- what holds of the keys of the program


def test_every_key_has_a_docstring_and_stands_in_the_help() -> None:
    text = " ".join(help_text(JobConfig, 80).split())
    for kind in get_type_hints(JobConfig).values():
        assert kind.__doc__ in text
        assert list(docstrings(kind)) == [key.name for key in fields(kind)]
        for line in docstrings(kind).values():
            assert f"{line} Default: " in text


def test_bounds_and_units_are_of_numbers_and_examples_are_allowed() -> None:
    for name, known in keys_of(JobConfig).items():
        if known.bounds is not None:
            works = known.example if known.default is None else known.default
            assert isinstance(works, int | float), name
            assert known.bounds.test(works), name
        else:
            assert known.example is None, name
        assert not known.unit or known.kind not in (bool, str), name


def test_conditions_name_keys_that_exist() -> None:
    """A misspelled key in a condition would raise for a user, and only under the settings that reach it."""
    config, degrees = JobConfig(), resolve(JobConfig(), 1).degrees
    for known in keys_of(JobConfig).values():
        for condition in known.when:
            assert isinstance(condition.holds(config, degrees), bool)
            assert "{" not in condition.words()
            assert condition.otherwise.format(config)


def test_equal_conditions_are_one() -> None:
    """Keys that lack the same condition are reported in one line, whatever their tables."""
    for make, words in ((needs, ("a.b",)), (needs_value, ("a.b", "x")), (unless, ("a.b", "x"))):
        assert make(*words) is make(*words)
    assert needs("a.b") != needs("a.b", remedy="leave it out")
    assert Condition(lambda *_: True, "as {0.x}, with y = {0.y!r}").words() == "as {0.x}, with y"
