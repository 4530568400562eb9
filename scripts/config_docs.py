"""Write what docs/configuration.md says of each key, and of keys without effect: both are made of the schema.

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
    """Return a table in Markdown for each table of the schema, a row for each key."""
    keys, parts = keys_of(schema), []
    for table, kind in get_type_hints(schema).items():
        rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
        for field, text in docstrings(kind).items():
            name = f"{table}.{field}"
            rows.append(f"| `{name}` | {_toml(allowed(keys[name]))} | {_default(keys[name].default)} | {text} |")
        parts.append("\n".join([f"### [{table}]", "", kind.__doc__ or "", "", *rows]))
    return "\n\n".join(parts)


def effect_table(schema: type) -> str:
    """Return one table in Markdown: for each condition the keys that have no effect without it."""
    found: dict[Condition, list[str]] = {}
    for name, key in keys_of(schema).items():
        for condition in key.when:
            found.setdefault(condition, []).append(name)
    rows = ["| keys | have no effect | |", "|---|---|---|"]
    for condition, names in found.items():
        listed = ", ".join(f"`{name}`" for name in names)
        outcome = f"refused: {condition.remedy}" if condition.remedy else "reported"
        rows.append(f"| {listed} | {_toml(condition.words())} | {_toml(outcome)} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """Return the page with what stands between its markers made again; each marker stands once."""
    for name, made in (("keys", key_tables(JobConfig)), ("effects", effect_table(JobConfig))):
        begin, end = f"<!-- {name}: made by scripts/config_docs.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}"
    return text


def _toml(text: str) -> str:
    """Strings within words as TOML spells them, in the font of code."""
    return re.sub(r"'([^' ]+)'", r'`"\1"`', text)


def _default(value: object) -> str:
    return "None" if value is None else f"`{shown(value)}`".replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
