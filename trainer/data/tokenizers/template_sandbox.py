"""The sandbox of Jinja in which chat templates run, with the block `generation` of transformers."""

import json
from datetime import date
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


def environment_of(marks: tuple[str, str], today: str | None) -> "jinja2.Environment":
    """Return a new sandbox in which templates run. The package jinja2 is imported here.

    Args:
        marks: Texts before and after an answer that a template marks.
        today: The date of `strftime_now`, such as "2025-01-31". If it is None, `strftime_now` is undefined.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `generation`, around what an assistant has written."""

        tags = frozenset({"generation"})

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body, lineno=line)

        def _marked(self, caller: Any) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    def to_json(value: object, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = refuse
    if today is not None:
        environment.globals["strftime_now"] = date.fromisoformat(today).strftime
    return environment
