"""A hook of mkdocs (mkdocs.yml) that makes pages of the site from files of the repository, such as README.md."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/fields/README.md": "fields.md",
}
_ITEM = re.compile(r"(\*|-|\d+\.) ")
_LINK = re.compile(r"\[([^]]*)\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages of `PAGES` to the pages of docs/.

    Args:
        files: The files of the site.
        config: The configuration of mkdocs.

    Returns:
        The files of the site.
    """
    for source, page in PAGES.items():
        text = code_in_lists(site_links((ROOT / source).read_text(encoding="utf-8")))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page of docs/ with links for the site, and with the indents of code in lists that the site needs.

    Args:
        markdown: The page.
        **_: Further arguments of the hook; not used.
    """
    return code_in_lists(site_links(markdown))


def code_in_lists(text: str) -> str:
    """Return the text with code of list items indented by 8 blanks for the site. GitHub takes 6.

    Args:
        text: A page in Markdown.
    """
    lines = []
    in_list = False
    in_code = False
    fenced = False
    for line in text.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        if line and not line.startswith(" "):
            in_list = bool(_ITEM.match(line))
        blank_before = not lines or not lines[-1].strip()
        in_code = in_list and not fenced and line.startswith(" " * 6) and (in_code or blank_before)
        lines.append("  " + line if in_code else line)
        in_code = in_code or (in_list and not line.strip() and len(lines) > 1 and lines[-2].startswith(" " * 8))
    return "\n".join(lines)


def site_links(text: str) -> str:
    """Return the text with links to pages of the site. A link to code becomes the name of the file.

    Args:
        text: A page in Markdown.
    """

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, hash_, part = re.sub(r"^(\.\./)+", "", target).removeprefix("docs/").partition("#")
        path = PAGES.get(path, path)
        if path and not (path in PAGES.values() or (ROOT / "docs" / path).exists()):
            return f"`{path}`" if (ROOT / path).exists() else match[0]
        return f"[{words}]({path}{hash_}{part})"

    return _LINK.sub(link, text)
