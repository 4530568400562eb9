"""Count the words, sentences and docstrings that are not plain, room by room: the counts may only fall.

    python scripts/plain_words.py                      # compare with scripts/plain_words.json, as `make lint` does
    python scripts/plain_words.py --list trainer/job   # print each place in some files or folders
    python scripts/plain_words.py --lower              # write the counts that have fallen

A room is a folder of at most two levels. The counts of a room:
* constructions: phrases in docstrings, comments, messages and pages that make a reader go back;
* sentences: sentences of more than 28 words in these texts;
* names: functions, arguments and variables whose name is a pronoun or begins with `of_`;
* sections: public functions whose docstring lacks `Args:`, or `Returns:` where it does not begin with "Return";
* shapes: public functions that take a tensor and whose docstring names no shape, such as `(B, S)`.
A false alarm is an entry of "exceptions" in the JSON file, with its file, its text and the reason.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
PROGRAM = ("longshard", "trainer", "lct_inference", "lct_planner", "lct_tools", "scripts")
EVERYTHING = [*PROGRAM, "examples", "tests", "docs", *sorted(path.name for path in ROOT.glob("*.md"))]
CONSTRUCTIONS = re.compile(  # with escaped spaces, this list does not count itself
    r"(?i)\b(those\ of|that\ of|what\ is|what\ are|what\ of|of\ which|of\ whom|such\ of|the\ one\ of|as\ many\ as|"
    r"so\ many|beside|in\ the\ place\ of|but\ for|none\ that|(?:is|are|was|were)\ told|dealt|(?:has|have)\ such)\b"
)
NAMES = re.compile(r"_?(of_\w+|found|given|told|mine|rest|more|what)")
SHAPE = re.compile(r"\((?=[^)]*,)[A-Z0-9a-z_ */+.,-]+\)|scalar|\b[0-5]-D\b|any shape|same shape")
SENTENCE_END = re.compile(r"(?<=[.!?:;])[\"')]*\s+|\n\s*\n|\n\s*(?=(?:[*-]|\d+\.) )|\n\s*(?=[\w*, ]+: )")
COMMENT = re.compile(r"(?m)(?:^ *|  )# .*(?:\n *# .*)*")
CODE = re.compile(r"``[^`]*``|`[^`]*`(?:,\s+`[^`]*`)*|https?://\S+|\]\([^)]*\)")  # names in a row are one word
PAGE_CODE = re.compile(r"(?ms)^( *)```.*?^\1```|^ {4,}[^\n]*|^#[^\n]*")
DRAWING = re.compile(r"(?m)^.*(?:>>>|[│─┌└├→<>=|]{2}|\S   +\S).*$|^ {4,}(?:python|lct|make|\./).*$")


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and words of each finding in one file.

    Args:
        path: a Python file or a Markdown page.
    """
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        texts = [(1, _page_text(source))]
    else:
        tree = ast.parse(source)
        in_program = path.relative_to(ROOT).parts[0] in PROGRAM
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        comments = [(_line_at(source, match), match.group().replace("#", "")) for match in COMMENT.finditer(source)]
        texts = [*_strings(tree, in_program), *comments]
        yield from ((t.start[0], "names", t.string) for t in tokens if NAMES.fullmatch(t.string))
        yield from _missing_parts(tree) if in_program else ()
    for line, text in texts:
        words = CODE.sub(lambda code: "CODE" + "\n" * code.group().count("\n"), text)
        for match in CONSTRUCTIONS.finditer(words):
            yield line + _line_at(words, match) - 1, "constructions", match.group().lower()
        for sentence in SENTENCE_END.split(words):
            if len(re.findall(r"(?:^|\s)\S*[A-Za-z]", sentence)) > 28:
                yield line + words.count("\n", 0, words.index(sentence)), "sentences", " ".join(sentence.split())


def _line_at(text: str, match: re.Match[str]) -> int:
    """Return the number of the line in which a match begins."""
    return text.count("\n", 0, match.start()) + 1


def _page_text(source: str) -> str:
    """Return a page without blocks of code and headings. A cell of a table becomes a sentence."""
    prose = re.sub(PAGE_CODE, lambda block: "\n" * block.group().count("\n"), source)
    return re.sub(r"(?m)^\|.*$", lambda row: re.sub(r"\||<br>", ". ", row.group()), prose)


def _strings(tree: ast.Module, in_program: bool) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, without drawings, and of each other string of the program."""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and in_program:
            yield node.lineno, re.sub(r"\{[^}]*\}", "CODE", ast.unparse(node))
        is_whole = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts
        if is_whole and (in_program or node in docstrings):
            yield node.lineno, DRAWING.sub("", node.value)


def _missing_parts(owner: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and name of each public function that lacks sections or shapes. A class documents `__init__`."""
    for node in owner.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _missing_parts(node)
        if not isinstance(node, ast.FunctionDef) or (node.name.startswith("_") and node.name != "__init__"):
            continue
        if re.search("property|overload|override|setter", " ".join(map(ast.unparse, node.decorator_list))):
            continue
        text = ast.get_docstring(owner if node.name == "__init__" else node) or ""
        listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments = [ast.unparse(argument) for argument in listed if argument.arg not in ("self", "cls")]
        returns = node.returns is not None and ast.unparse(node.returns) not in ("None", "NoReturn")
        says_result = re.search("^(Return|Yield)|(Returns|Yields):", text)
        if (arguments and "Args:" not in text) or (returns and not says_result):
            yield node.lineno, "sections", node.name
        if "Tensor" in " ".join(arguments) and not SHAPE.search(text):
            yield node.lineno, "shapes", node.name


def _counted(names: list[str], exceptions: list[dict[str, str]], show: bool) -> Counter[str]:
    """Count the findings in some files and folders, by room and kind, and print them if `show`."""
    allowed = {(entry["file"], entry["text"]) for entry in exceptions}
    counts: Counter[str] = Counter()
    for path in [path for name in names for path in [ROOT / name, *sorted((ROOT / name).rglob("*"))]]:
        file = str(path.relative_to(ROOT))
        room = "/".join(Path(file).parent.parts[:2]) or "."
        for line, kind, text in findings(path) if path.suffix in (".py", ".md") else ():
            if (file, text) not in allowed:
                counts[f"{room} {kind}"] += 1
                sys.stdout.write(f"{file}:{line}: {kind}: {text}\n" if show else "")
    return counts


def main() -> int:
    """Return the exit code, after comparing, listing or lowering the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="+", metavar="PATH", help="print each place in these files and folders")
    parser.add_argument("--lower", action="store_true", help="write the counts that have fallen")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    counts = _counted(options.list or EVERYTHING, record["exceptions"], show=bool(options.list))
    if options.list:
        return 0
    before = Counter(record["counts"])
    for name, surplus in (counts - before).items():
        print(f"{name}: {surplus} more than the {before[name]} of {RECORD.name}; --list shows each place of a folder")
    if options.lower and counts <= before:
        record["counts"] = dict(sorted(counts.items()))
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return 0
    if counts < before:
        print("Some counts have fallen: write them with `python scripts/plain_words.py --lower`.")
    return int(counts != before)


if __name__ == "__main__":
    sys.exit(main())
