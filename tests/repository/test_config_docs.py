"""docs/configuration.md says what the program does: its keys and its messages."""

import re
import shlex

import pytest

from scripts.config_docs import PAGE, page
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.job import resolve

TEXT = PAGE.read_text()
EXAMPLES = re.findall(r"^    \$ python train\.py (.*)\n    error: (.*)$", TEXT, re.MULTILINE)


def test_what_is_made_of_the_schema_is_not_stale():
    assert page(TEXT) == TEXT, "docs/configuration.md is stale: make docs"


def test_a_change_between_the_markers_is_seen():
    line = "| `training.steps` | an int (steps), in [1, 1000000000000] | `10000` |"
    assert line in TEXT
    assert page(TEXT.replace(line, "")) == TEXT


def check(argv: list[str]) -> None:
    command = parse_command_line(argv)
    resolve(command.config, command.world_size or 1)


@pytest.mark.parametrize(("options", "message"), EXAMPLES)
def test_the_messages_shown_are_the_actual_ones(options: str, message: str):
    with pytest.raises(ConfigError) as error:
        check(shlex.split(options))
    assert str(error.value) == message


def test_there_are_examples():
    assert len(EXAMPLES) == 9
