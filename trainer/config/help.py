"""The text of `--help`, made from the fields of the schema.

One parser of ours reads files and command lines with the same messages. A library such as argparse would be a second
parser, used for its help only.
"""

import ast
import inspect
import sys
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from textwrap import fill
from typing import get_type_hints

from trainer.config.errors import ConfigError, nearest
from trainer.config.keys import Key, keys_of
from trainer.config.unknown import ELSEWHERE
from trainer.config.values import kind_name, shown, without_none

_USAGE = """Train a language model: lct train [FILE] [--ngpu N] [--table.key VALUE ...]

The command line goes over the TOML file, the file over its base, the base over
the defaults. In files a key stands in its table: training.steps is `steps`
below [training]. In a clone, ./run_llama_train.sh is `lct train`, and train.py
is one process of it, for torchrun.

Examples

  Train a small model:
    lct train --training.steps 300
  Train on 4 GPUs with context parallelism:
    lct train --ngpu 4 --parallelism.context_parallel_degree 4
  Check a configuration for 8 GPUs, on any machine:
    lct check llama3_8b --world-size 8
  Print the effective configuration:
    lct train llama3_8b --print-config
  Train on your own text, a document per file:
    lct train --training.dataset text \\
      --training.dataset_path 'books/*.txt'

Start (of lct train and lct check)
  FILE
      TOML file, or a preset by name. Default: CONFIG_FILE, or debug_model.
  --ngpu N
      Processes on this machine. Default: NGPU, or one per GPU, or 2 on a CPU.
  --log-rank N,N
      Ranks whose log is shown. Default: LOG_RANK, or 0.

Actions
  -h, --help [TABLE or KEY ...]
      Print this text, or what it says of a table or key, then exit, such as
      --help parallelism or --help training.seq_len.
  --check-config
      Check every setting without starting anything, then exit.
  --world-size N
      Of lct check: the number of ranks of a job on other machines. Default: as
      many as lct train starts here.
  --print-config
      Print the effective configuration as TOML, then exit.
  --allow-imports
      Of commands that only read: import what job.imports in the config.toml of
      a run names. Without it they run no code of the run."""


def help_text(schema: type, width: int, topics: Sequence[str] = ()) -> str:
    """Return every option with its meaning and rules, by table.

    Args:
        schema: The class of the configuration.
        width: Most characters of a line.
        topics: Tables or keys to which the text is limited; none for the whole text.

    Raises:
        ConfigError: A topic is neither a table nor a key.
    """
    keys = keys_of(schema)
    lines = [] if topics else [_USAGE]
    wanted = {name for topic in topics for name in _keys_of_topic(topic, schema)}
    for table, kind in get_type_hints(schema).items():
        fields = [
            field for field in docstrings(kind) if not topics or f"{table}.{field}" in wanted
        ]
        if fields:
            lines += ["", fill(f"[{table}] {kind.__doc__}", width)]
        for field in fields:
            lines += _entry(
                f"{table}.{field}", keys[f"{table}.{field}"], docstrings(kind)[field], width
            )
    return "\n".join(lines).lstrip("\n")


def _entry(name: str, key: Key, text: str, width: int) -> list[str]:
    table, _, field = name.partition(".")
    spelled = f", --{table}.no_{field}" if key.kind is bool else f"  {allowed(key)}"
    in_vain = (
        f" No effect {', or '.join(when.words() for when in key.when)}." if key.when else ""
    )
    in_vain = in_vain.replace(f" {table}.", " ")  # the reader is in this table
    indents = {
        "subsequent_indent": " " * 6,
        "break_on_hyphens": False,
        "break_long_words": False,
    }
    return [
        fill(f"--{name}{spelled}", width, initial_indent="  ", **indents),
        fill(
            f"{text} Default: {shown(key.default)}.{in_vain}",
            width,
            initial_indent=" " * 6,
            **indents,
        ),
    ]


def _keys_of_topic(topic: str, schema: type) -> list[str]:
    """Return the keys that a topic names: all keys of a table, or the keys of this name, with or without their table.

    Raises:
        ConfigError: The topic is neither a table nor a key; the message gives a hint.
    """
    name = topic.strip("[]").removeprefix("--").replace("-", "_")
    tables = list(get_type_hints(schema))
    known = keys_of(schema)
    keys = [key for key in known if name in (key, *key.split("."))]
    if keys:
        return keys
    near = nearest(name, [*tables, *known]) or nearest(
        name, [key.split(".")[1] for key in known]
    )
    if name in ELSEWHERE:
        hint = ELSEWHERE[name]
    elif near is not None:
        hint = f"did you mean {near!r}?"
    else:
        hint = f"the tables are {', '.join(tables)}"
    raise ConfigError(f"--help {topic} is neither a table nor a key; {hint}")


def allowed(key: Key) -> str:
    """Return the values that a key may have, in words.

    Args:
        key: The properties of the key.
    """
    kind, optional = without_none(key.kind)
    parts = [
        f"{kind_name(kind, infinite=key.may_be_infinite)}{f' ({key.unit})' if key.unit else ''}"
    ]
    parts += [key.bounds.words] if key.bounds is not None else []
    return ", ".join([*parts, "or None"] if optional else parts)


@cache
def docstrings(table: type) -> dict[str, str]:
    """Return the docstring below each field of a table, read from its source.

    Args:
        table: A dataclass of the configuration.
    """
    tree = ast.parse(inspect.getsource(sys.modules[table.__module__]))
    (body,) = (
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == table.__name__
    )
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }
