"""Pages of the site that are files of the repository: README.md is its start page. A hook of mkdocs (mkdocs.yml)."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"\[([^]]*)\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages to those of docs/."""
    for source, page in PAGES.items():
        text = site_links((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Change the links of a page of docs/."""
    return site_links(markdown)


def site_links(text: str) -> str:
    """Return the text with links to pages as the site has them, and links to code as the name of the file."""

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        path, hash_, part = target.removeprefix("../").removeprefix("docs/").partition("#")
        path = PAGES.get(path, path)
        if path and not (path in PAGES.values() or (ROOT / "docs" / path).exists()):
            return f"`{path}`" if (ROOT / path).exists() else match[0]
        return f"[{words}]({path}{hash_}{part})"

    return _LINK.sub(link, text)
