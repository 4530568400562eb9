"""Write the tables of docs/configuration.md, which the schema makes: a row for each key.

python scripts/config_docs.py
"""

import re
import sys
from pathlib import Path
from typing import get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainer.config.help import allowed, docstrings  # noqa: E402
from trainer.config.keys import keys_of  # noqa: E402
from trainer.config.schema import JobConfig  # noqa: E402
from trainer.config.values import shown  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"


def key_tables(schema: type) -> str:
    """Return a table in Markdown for each table of the schema, a row for each key.

    Args:
        schema: A dataclass whose fields are tables of keys.
    """
    keys = keys_of(schema)
    parts = []
    for table, kind in get_type_hints(schema).items():
        rows = [f"| {kind.__doc__} | values | default | meaning |", "|---|---|---|---|"]
        for field, text in docstrings(kind).items():
            name = f"{table}.{field}"
            rows.append(f"| `{name}` | {_toml(allowed(keys[name]))} | {_default(keys[name].default)} | {text} |")
        parts.append("\n".join([f"### [{table}]", "", *rows]))
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page with new tables of keys between its two markers. Each marker stands once.

    Args:
        text: The page as it is.
    """
    begin, end = "<!-- keys: made by scripts/config_docs.py -->", "<!-- end of keys -->"
    before, after = text.split(begin)
    return f"{before}{begin}\n\n{key_tables(JobConfig)}\n\n{end}{after.split(end)[1]}"


def _toml(text: str) -> str:
    """Strings within words as TOML spells them, in the font of code."""
    return re.sub(r"'([^' ]+)'", r'`"\1"`', text)


def _default(value: object) -> str:
    return "None" if value is None else f"`{shown(value)}`".replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
