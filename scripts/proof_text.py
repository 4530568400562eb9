"""Text of `proof.py`.

The text comes with every Python (licence: PSF-2.0). Python's documentation, as `help()` shows it, is measured. The
longest modules of the standard library are learned, so that nothing that is measured has been learned.
"""

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

_NOT_LEARNED = {"pydoc_data", "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
_CHARACTERS_PER_TOKEN = 5
"""More than a token of SmolLM2 has in this text, 4.1, so that a document has enough tokens."""


def documentation() -> str:
    """Return Python's documentation, about 460,000 characters."""
    return "\n".join(topics[name] for name in sorted(topics))


def modules(shortest: int) -> list[Path]:
    """Return the modules of the standard library that have at least this number of bytes, in the order of their paths.

    Args:
        shortest: The number of bytes.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in library.rglob("*.py") if not _NOT_LEARNED & {*file.relative_to(library).parts}]
    return sorted(file for file in files if file.stat().st_size >= shortest)


def write_text(folder: Path, documents: int, longest: int, learned: int) -> dict[str, int]:
    """Write the text that is measured, `measured/*.txt`, and the text that is learned, `learned/*.txt`.

    Args:
        folder: The folder of both.
        documents: Number of documents that are measured.
        longest: Number of tokens that each of them has at least.
        learned: Number of tokens that each learned document has about, or more.

    Returns:
        The numbers of characters of both.
    """
    text = documentation()
    size = longest * _CHARACTERS_PER_TOKEN
    measured = [text[i * size : (i + 1) * size] for i in range(documents)]
    if len(measured[-1]) < size:
        raise SystemExit(f"{documents} documents of {size:,} characters are more than the documentation has")
    sources = [file.read_text(encoding="utf-8") for file in modules(learned * _CHARACTERS_PER_TOKEN)]
    for name, texts in (("measured", measured), ("learned", sources)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, document in enumerate(texts):
            (folder / name / f"{i:03}.txt").write_text(document, encoding="utf-8")
    return {"measured": sum(map(len, measured)), "learned": sum(map(len, sources))}
