"""Write the tables of keys and of keys without effect in docs/configuration.md, from the schema.

python scripts/config_docs.py
"""

import re
import sys
from pathlib import Path
from typing import get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainer.config.help import allowed, docstrings  # noqa: E402
from trainer.config.keys import Condition, keys_of  # noqa: E402
from trainer.config.schema import JobConfig  # noqa: E402
from trainer.config.values import shown  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"


def key_tables(schema: type) -> str:
    """Return a table in Markdown for each table of the schema, with a row for each key.

    Args:
        schema: The dataclass of the configuration.
    """
    keys = keys_of(schema)
    parts = []
    for table, kind in get_type_hints(schema).items():
        rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
        for field, text in docstrings(kind).items():
            name = f"{table}.{field}"
            rows.append(f"| `{name}` | {_toml(allowed(keys[name]))} | {_default(keys[name].default)} | {text} |")
        parts.append("\n".join([f"### [{table}]", "", kind.__doc__ or "", "", *rows]))
    return "\n\n".join(parts)


def effect_table(schema: type) -> str:
    """Return one table in Markdown: each condition, and the keys that have no effect without it.

    Args:
        schema: The dataclass of the configuration.
    """
    keys_by_condition: dict[Condition, list[str]] = {}
    for name, key in keys_of(schema).items():
        for condition in key.when:
            keys_by_condition.setdefault(condition, []).append(name)
    rows = ["| keys | have no effect | |", "|---|---|---|"]
    for condition, names in keys_by_condition.items():
        listed = ", ".join(f"`{name}`" for name in names)
        outcome = f"refused: {condition.remedy}" if condition.remedy else "reported"
        rows.append(f"| {listed} | {_toml(condition.words())} | {_toml(outcome)} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with new text between its markers; each marker stands once.

    Args:
        text: The page.
    """
    for name, made in (("keys", key_tables(JobConfig)), ("effects", effect_table(JobConfig))):
        begin, end = f"<!-- {name}: made by scripts/config_docs.py -->", f"<!-- end of {name} -->"
        before, after = text.split(begin)
        text = f"{before}{begin}\n\n{made}\n\n{end}{after.split(end)[1]}"
    return text


def _toml(text: str) -> str:
    """Write strings within words as TOML does, as code."""
    return re.sub(r"'([^' ]+)'", r'`"\1"`', text)


def _default(value: object) -> str:
    return "None" if value is None else f"`{shown(value)}`".replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
