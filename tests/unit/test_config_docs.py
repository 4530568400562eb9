"""docs/configuration.md says what the program does: every key with its default, keys without effect, messages."""

import re
import shlex
from pathlib import Path

import pytest

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line, schema_keys
from trainer.job import resolve
from trainer.job.unused import RULES, Rule

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
EXAMPLES = re.findall(r"^    \$ python train\.py (.*)\n    error: (.*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("name", schema_keys())
def test_every_key_is_listed_with_its_default(name: str):
    default = schema_keys()[name].default
    spelled = (
        str(default).lower() if isinstance(default, bool) else f'"{default}"' if isinstance(default, str) else default
    )
    shown = "None" if default is None else f"`{spelled}`"
    (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| `{name}` | ") and line.count(" | ") >= 3]
    assert row.split(" | ")[2] == shown


def test_only_keys_that_exist_are_listed():
    assert set(re.findall(r"^\| `(\w+\.\w+)` \| .* \| .* \| ", TEXT, re.MULTILINE)) == set(schema_keys())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.names.split()[0])
def test_keys_without_effect_are_listed_with_the_reason(rule: Rule):
    words = re.sub(r"\{0\.[^}]*\}", "...", rule.otherwise)
    keys = ", ".join(f"`{key}`" for key in rule.keys)
    assert f"| {keys} | {words} | {'refused' if rule.remedy else 'told'} |" in TEXT.splitlines()


def check(argv: list[str]) -> None:
    command = parse_command_line(argv)
    resolve(command.config, command.world_size or 1)


@pytest.mark.parametrize(("options", "message"), EXAMPLES)
def test_the_messages_shown_are_the_actual_ones(options: str, message: str):
    with pytest.raises(ConfigError) as error:
        check(shlex.split(options))
    assert str(error.value) == message


def test_there_are_examples():
    assert len(EXAMPLES) > 8
