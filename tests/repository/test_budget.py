"""Laws of size: what makes the packages hard to read is counted, and each count may only fall.

A budget in lines rewards dense lines. These budgets count tokens, dense lines, long functions, long files, keys and
long parameter lists. A change that lowers a count lowers its number here too; no change raises a number.

The terms of the counts:

* Token: a token of `tokenize`, without comments, docstrings, line ends, indents and dedents. An f-string is one
  token. Every string that stands alone as a statement is a docstring, so the text below an attribute is one too.
* Line of code: a line that a token covers. Blank lines, comments and docstrings are no lines of code.
* Wide line: a line of code with 105 columns or more.
* Length of a function: its lines from `def` to its last line, docstring included, decorators not.
* Length of a file: all its lines.
* Argument of a function: each parameter, `*args` and `**kwargs` included, `self` and `cls` not.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.program import PACKAGES
from trainer.config.keys import keys_of
from trainer.config.schema import JobConfig

ROOT = Path(__file__).resolve().parents[2]
MOST_FUNCTION_LINES = 50
MOST_FILE_LINES = 400
MOST_ARGUMENTS = 7
WIDE_COLUMNS = 105

MOST_TOKENS = 306_159
"""Of the library and the trainer."""
MOST_INFERENCE_TOKENS = 17_052
"""Of commands that use a trained model."""
MOST_PLANNER_TOKENS = 18_548
MOST_TOOLS_TOKENS = 13_039
"""Of commands around a run."""
MOST_PROGRAM_TOKENS = 354_798
"""Of all packages: a move from one to another does not lower it."""
MOST_TOKENS_PER_LINE = 8.69
MOST_WIDE_SHARE = 0.0136
MOST_LONG_FUNCTIONS = 0
MOST_LONG_FILES = 0
MOST_KEYS = 172
MOST_LONG_PARAMETER_LISTS = 15
MOST_PAGE_LINES = 3_200
"""Of docs/, without the pages that tests write whole."""
MADE_PAGES = ("hugging_face_list.md", "support_matrix.md")

_NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_NOT_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)  # Python 3.12 divides an f-string into tokens
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """The counts of one file. Lists have pairs of a place, `path:line name`, and a count."""

    path: str
    lines: int
    tokens: int
    code_lines: int
    wide_lines: int
    functions: list[tuple[str, int]]
    """Functions and their lengths."""
    parameter_lists: list[tuple[str, int]]
    """Functions and their numbers of arguments."""


@cache
def program() -> list[Source]:
    return [source for top in PACKAGES for source in package(top)]


@cache
def package(top: str) -> list[Source]:
    return [
        count(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / top).rglob("*.py"))
    ]


def count(path: str, text: str) -> Source:
    nodes = list(ast.walk(ast.parse(text)))
    lines = text.splitlines()
    tokens = list(code_tokens(text, docstring_lines(nodes)))
    code_lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    functions = [node for node in nodes if isinstance(node, Function)]
    return Source(
        path,
        len(lines),
        len(tokens),
        len(code_lines),
        sum(len(lines[line - 1]) >= WIDE_COLUMNS for line in code_lines),
        [(f"{path}:{node.lineno} {node.name}", length(node)) for node in functions],
        [(f"{path}:{node.lineno} {node.name}", arguments(node)) for node in functions],
    )


def docstring_lines(nodes: list[ast.AST]) -> set[int]:
    """Return the lines of strings that stand alone as statements."""
    lines: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def code_tokens(text: str, docstrings: set[int]) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens that are counted. Of an f-string that Python divides, the first token stands for all."""
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        outside = depth == 0
        depth += (token.type == _FSTRING_START) - (token.type == _FSTRING_END)
        if outside and token.type not in _NOT_CODE and token.start[0] not in docstrings:
            yield token


def length(function: Function) -> int:
    return function.end_lineno - function.lineno + 1


def arguments(function: Function) -> int:
    listed = function.args
    named = [*listed.posonlyargs, *listed.args]
    bound = bool(named) and named[0].arg in ("self", "cls")
    return len(named) + len(listed.kwonlyargs) + (listed.vararg is not None) + (listed.kwarg is not None) - bound


def check(name: str, counted: float, most: float, offenders: list[tuple[str, float]]) -> None:
    """Compare a count with its number, which may be at most 1 % above the count.

    Args:
        name: the name of the number in this file.
        counted: the count of the packages as they are.
        most: the number.
        offenders: places and their counts. The message lists the largest ones.
    """
    largest = sorted(offenders, key=lambda pair: -pair[1])[:60]
    listed = "".join(f"\n  {place}: {size:,.6g}" for place, size in largest)
    assert counted <= most, f"The packages have {counted:,.6g}, and {name} allows {most:,}. The largest ones:{listed}"
    assert counted >= 0.99 * most, f"The packages have {counted:,.6g} only: lower {name} from {most:,} to this count."


@pytest.mark.parametrize(
    ("name", "most", "tops"),
    [
        ("MOST_TOKENS", MOST_TOKENS, ("longshard", "trainer")),
        ("MOST_INFERENCE_TOKENS", MOST_INFERENCE_TOKENS, ("lct_inference",)),
        ("MOST_PLANNER_TOKENS", MOST_PLANNER_TOKENS, ("lct_planner",)),
        ("MOST_TOOLS_TOKENS", MOST_TOOLS_TOKENS, ("lct_tools",)),
        ("MOST_PROGRAM_TOKENS", MOST_PROGRAM_TOKENS, PACKAGES),
    ],
)
def test_tokens(name: str, most: int, tops: tuple[str, ...]) -> None:
    sources = [source for top in tops for source in package(top)]
    check(name, sum(s.tokens for s in sources), most, [(s.path, s.tokens) for s in sources])


def test_tokens_per_line_of_code() -> None:
    density = sum(s.tokens for s in program()) / sum(s.code_lines for s in program())
    files = [(s.path, s.tokens / s.code_lines) for s in program() if s.code_lines]
    check("MOST_TOKENS_PER_LINE", density, MOST_TOKENS_PER_LINE, files)


def test_share_of_wide_lines() -> None:
    share = sum(s.wide_lines for s in program()) / sum(s.code_lines for s in program())
    check("MOST_WIDE_SHARE", share, MOST_WIDE_SHARE, [(s.path, s.wide_lines) for s in program() if s.wide_lines])


def test_long_functions() -> None:
    long = [(place, size) for s in program() for place, size in s.functions if size > MOST_FUNCTION_LINES]
    check("MOST_LONG_FUNCTIONS", len(long), MOST_LONG_FUNCTIONS, long)


def test_long_files() -> None:
    long = [(s.path, s.lines) for s in program() if s.lines > MOST_FILE_LINES]
    check("MOST_LONG_FILES", len(long), MOST_LONG_FILES, long)


def test_keys_of_the_configuration() -> None:
    tables: dict[str, int] = {}
    for key in keys_of(JobConfig):
        table = key.partition(".")[0]
        tables[table] = tables.get(table, 0) + 1
    check("MOST_KEYS", sum(tables.values()), MOST_KEYS, [(f"[{table}]", size) for table, size in tables.items()])


def test_long_parameter_lists() -> None:
    long = [(place, size) for s in program() for place, size in s.parameter_lists if size > MOST_ARGUMENTS]
    check("MOST_LONG_PARAMETER_LISTS", len(long), MOST_LONG_PARAMETER_LISTS, long)


def test_lines_of_pages() -> None:
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in MADE_PAGES]
    lines = [(page.name, len(page.read_text().splitlines())) for page in pages]
    check("MOST_PAGE_LINES", sum(size for _, size in lines), MOST_PAGE_LINES, lines)


def test_a_count_takes_what_its_terms_say() -> None:
    text = '''"""Text."""

class A:
    x: int = 1  # five tokens, and this comment
    """Text of x,
    of two lines."""

    @property
    def f(self, a, *b, c=f"{1} and {2}", **d) -> None:
        """Text."""

        return (
            a)
'''
    source = count("a.py", text)
    first, second, third, last = "class A :", "x : int = 1", "@ property", "return ( a )"
    header = "def f ( self , a , * b , c = f-string , ** d ) -> None :"
    assert source.tokens == sum(len(part.split()) for part in (first, second, third, header, last))
    assert (source.lines, source.code_lines, source.wide_lines) == (13, 6, 0)
    assert source.functions == [("a.py:9 f", 5)]
    assert source.parameter_lists == [("a.py:9 f", 4)]


def test_a_number_follows_its_count_in_both_directions() -> None:
    check("MOST", 991, 1000, [])
    check("MOST", 0, 0, [])
    with pytest.raises(AssertionError, match=r"have 1,001, and MOST allows 1,000(.|\n)*trainer/a\.py:1 f: 60"):
        check("MOST", 1001, 1000, [("trainer/a.py:1 f", 60)])
    with pytest.raises(AssertionError, match="have 989 only: lower MOST from 1,000"):
        check("MOST", 989, 1000, [])
