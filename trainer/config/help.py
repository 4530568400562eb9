"""The text of `--help`, made from the fields of the schema.

One parser of ours reads files and command lines with the same messages. A library such as argparse would be a second
parser, used for its help only.
"""

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from textwrap import fill
from typing import get_type_hints

from trainer.config.keys import Key, keys_of
from trainer.config.values import kind_name, shown, without_none

_USAGE = """Train a language model: train.py --job.config_file FILE [--table.key VALUE ...]

The command line goes over the TOML file, the file over the defaults.

  -h, --help
      Print this text, then exit.
  --check-config
      Check every setting without starting anything, then exit.
  --world-size N
      With --check-config, the number of ranks to check the degrees for.
  --print-config
      Print the effective configuration as TOML, then exit (--job.print_config: print it, then train)."""


def help_text(schema: type, width: int) -> str:
    """Return every option with its meaning and rules, by table, in lines of `width` characters."""
    keys, lines = keys_of(schema), [_USAGE]
    for table, kind in get_type_hints(schema).items():
        lines += ["", fill(f"[{table}] {kind.__doc__}", width)]
        for field, text in docstrings(kind).items():
            key = keys[f"{table}.{field}"]
            spelled = f", --{table}.no_{field}" if key.kind is bool else f"  {allowed(key)}"
            in_vain = f" No effect {', or '.join(when.words() for when in key.when)}." if key.when else ""
            for line, indent in (
                (f"--{table}.{field}{spelled}", "  "),
                (f"{text} Default: {shown(key.default)}.{in_vain}", " " * 6),
            ):
                indents = {"initial_indent": indent, "subsequent_indent": " " * 6}
                lines.append(fill(line, width, **indents, break_on_hyphens=False, break_long_words=False))
    return "\n".join(lines)


def allowed(key: Key) -> str:
    """Return the values that a key may have, in words."""
    kind, optional = without_none(key.kind)
    parts = [kind_name(kind) + (f" ({key.unit})" if key.unit else "")]
    parts += [key.bounds.words] if key.bounds is not None else []
    return ", ".join([*parts, "or None"] if optional else parts)


@cache
def docstrings(table: type) -> dict[str, str]:
    """Return the docstring below each field of a table, read from its source."""
    tree = ast.parse(inspect.getsource(sys.modules[table.__module__]))
    (body,) = (node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == table.__name__)
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
