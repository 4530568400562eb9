"""The catalog of a data set: everything that one process of each node finds out for all its ranks. Torch-free.

The process lists and hashes the files, makes missing token files, reads and checks their indices, and writes the
catalog into the cache. The other ranks open the catalog, and only the token files that they read.
"""

import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.sources.files import cache_folder, contents, number_of, reading, write_whole
from trainer.data.sources.records import BadRecord
from trainer.data.sources.registry import (
    DataSettings,
    all_documents,
    check_source,
    check_streams,
    files_of,
    source_of,
)
from trainer.data.token_files.format import (
    MANIFEST,
    UNFINISHED,
    Catalog,
    Pair,
    Pairs,
    TokenFiles,
    catalog_name,
    checked_pair,
    open_pair,
)
from trainer.data.token_files.inputs import made_by, template_hash
from trainer.data.token_files.made import cached
from trainer.data.tokenizers.tokenizer import Encoded, tokenizer_hash, vocab_size_of
from trainer.runtime.console import logger

_REMEDY = (
    "copy the file again; or remove its .idx, and the same `lct tokenize` makes the shard again"
)


def catalog_of(settings: DataSettings, *, makes_files: bool = True) -> str | None:
    """Write the catalog of a data set to a file of the cache, or else of the system's temporary folder.

    Missing token files are made first, which may take hours.

    Args:
        settings: The data set.
        makes_files: Whether to make missing token files.

    Returns:
        The path of the catalog. "" for an iterable, which has no files. If token files are missing and `makes_files` is
        False, the result is None.

    Raises:
        ConfigError: The data set cannot be used, or no folder can be written.
    """
    if source_of(settings).iterable:
        return ""
    if source_of(settings).token_files:
        catalog = _catalog_of_pairs(settings)
    elif (folder := cached(settings, makes_files=makes_files)) is not None:
        catalog = _catalog_of_cache(settings, folder)
    else:
        return None
    content = json.dumps(catalog).encode()
    name = catalog_name(content)
    for folder in (
        cache_folder() / "catalogs",
        Path(tempfile.gettempdir(), "long-context-trainer"),
    ):
        with suppress(OSError):  # token files need no cache
            _keep(folder / name, content)
            return str(folder / name)
    raise ConfigError(
        f"neither {cache_folder()} nor {tempfile.gettempdir()} can be written; set XDG_CACHE_HOME"
    )


def _keep(file: Path, content: bytes) -> None:
    """Write a catalog if its file is missing or damaged; raise OSError if it cannot be written."""
    with suppress(FileNotFoundError):
        if file.read_bytes() == content:
            return
        logger.info(f"note: {file} was damaged, and is made again")
    write_whole(file, content)


def open_documents(settings: DataSettings, catalog: str | None = None) -> TokenFiles:
    """Return the documents of a data set.

    Args:
        settings: The data set.
        catalog: The file of its catalog; None to make it here.

    Raises:
        ConfigError: As `catalog_of`.
    """
    kind = Pairs if settings.dataset == "preferences" else TokenFiles
    return kind(Catalog.read(catalog or catalog_of(settings)), skips=settings.skips)


def documents_in_order(settings: DataSettings) -> Iterator[Encoded]:
    """Yield the documents of a data set in order, without making token files.

    A data set of token files is read from these files. Other data are tokenized on the way.

    Args:
        settings: The data set.

    Raises:
        ConfigError: As `catalog_of`.
    """
    source = source_of(settings)
    if source.token_files:
        files = open_documents(settings)
        yield from (files[i] for i in range(len(files)))
        return
    yield from map(source.encoder(settings), all_documents(settings))


def check_data(settings: DataSettings, data_streams: int | None = None) -> None:
    """Check a data set without converting it. Of large data without an index only the start is read.

    Args:
        settings: The data set.
        data_streams: The configured number of streams, None for the default.

    Raises:
        ConfigError: As `check_source`; or a token file is damaged or of another tokenizer.
    """
    if not source_of(settings).token_files:
        check_source(settings, data_streams)
        return
    documents = 0
    for pair, _ in _pairs(settings):
        documents += pair.documents
        if documents >= (data_streams or 1):
            break
    check_streams(f"{settings.keys.path} = {settings.path!r}", documents, data_streams)


def _catalog_of_cache(settings: DataSettings, folder: Path) -> Catalog:
    shards = _shards(folder, settings)
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    if not settings.skips and (
        bad := next((entry for entry in shards.values() if "first" in entry), None)
    ):
        raise BadRecord(bad["first"])
    pairs = [_own_pair(str(folder / f"{name}.idx"), entry) for name, entry in shards.items()]
    return Catalog(
        pairs,
        manifest["made_by"],
        manifest["content"],
        manifest["tokenizer"]["vocab_size"],
        f"remove {folder}, and the next start makes it again",
    )


def _catalog_of_pairs(settings: DataSettings) -> Catalog:
    pairs = list(_pairs(settings))
    others = [pair for pair, content in pairs if content is None]
    both = zip(
        contents([pair.ids for pair in others]),
        contents([pair.idx for pair in others]),
        strict=True,
    )
    digest = blake2b(digest_size=8)
    content = []
    documents = 0
    for pair, own in pairs:
        digest.update(f"{own or next(both)}\0".encode())
        documents += pair.documents
        content.append((documents, number_of(digest)))
    return Catalog(
        [pair for pair, _ in pairs],
        made_by(settings),
        content,
        vocab_size_of(settings.tokenizer),
        _REMEDY,
    )


def _pairs(settings: DataSettings) -> Iterator[tuple[Pair, tuple[int, int, int] | None]]:
    """Yield each pair with the identity of its content: bytes of the ids, and check sums of its .idx and .crc.

    The identity is None for a pair of another program: all bytes of the pair must be hashed.
    """
    shards_of = cache(partial(_shards, settings=settings))
    for idx in files_of(settings):
        stem = Path(idx).with_suffix("")
        entry = shards_of(stem.parent).get(stem.name)
        if entry is not None:
            pair = _own_pair(idx, entry)
            # The .crc has check sums of all ids, which are compared when they are read.
            yield pair, (os.path.getsize(pair.ids), entry["idx"], entry["crc"])
            continue
        if stem.with_suffix(".crc").exists():
            raise ConfigError(
                f"`lct tokenize` made {idx}, and no {MANIFEST} in its folder names it; copy the whole folder again, "
                "or make it again with another --output"
            )
        yield checked_pair(idx), None


def _own_pair(idx: str, entry: Mapping[str, Any]) -> Pair:
    pair = open_pair(idx)
    marks = Path(idx).with_suffix(".answers")
    for ending in ("idx", "crc"):
        file = Path(idx).with_suffix(f".{ending}")
        with reading(str(file)):
            checksum = zlib.crc32(file.read_bytes())
        if checksum != entry[ending]:
            raise ConfigError(
                f"{file} is damaged: its check sum differs from {MANIFEST}; copy or make it again"
            )
    return pair._replace(
        crc=str(Path(idx).with_suffix(".crc")), answers=str(marks) if marks.exists() else None
    )


def _shards(folder: Path, settings: DataSettings) -> Mapping[str, Any]:
    """Return the record of `lct tokenize` about the shards of a folder, by name; empty if another program made them.

    The record is checked. If the folder is unfinished, damaged or of another tokenizer, a ConfigError is raised.
    """
    if (folder / UNFINISHED).exists():
        raise ConfigError(
            f"{folder} is not finished; run the same `lct tokenize` again, which makes the shards that are missing"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        shards = manifest["shards"]
        tokenizer = manifest["tokenizer"]
        _ = [tokenizer[key] for key in ("hash", "name", "vocab_size")]
        _ = [int(entry[key]) for entry in shards.values() for key in ("idx", "crc")]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(
            f"{folder / MANIFEST} is damaged; copy it again, or run `lct tokenize` with another --output"
        ) from None
    for name in shards:
        if not (folder / f"{name}.idx").exists():
            raise ConfigError(
                f"{folder} lacks {name}.idx, which its {MANIFEST} names; copy the folder again"
            )
    if tokenizer["hash"] != tokenizer_hash(settings.tokenizer):
        raise ConfigError(
            f"{folder} has the token ids of another tokenizer ({tokenizer['name']}, {tokenizer['vocab_size']:,} tokens)"
            "; name that one in model.tokenizer_path, or run `lct tokenize` with this one"
        )
    _check_tokenizer_files(folder, manifest, settings)
    return shards


def _check_tokenizer_files(
    folder: Path, manifest: Mapping[str, Any], settings: DataSettings
) -> None:
    """Raise a ConfigError if the tokenizer's folder has other files than when the token files were made.

    End tokens and the template are compared. An entry that the manifest lacks is not compared.
    """
    ends = manifest.get("made_by", {}).get("tokenizer")
    template = manifest.get("template")
    changed = ""
    if ends is not None and ends != made_by(settings)["tokenizer"]:
        changed = "other tokens at the beginning or end of documents than"
    elif template is not None and template_hash(settings) not in (None, template):
        changed = "another template, or other special tokens in it, than model.chat_template or"
    if changed:
        raise ConfigError(
            f"{folder} was made with {changed} the files next to model.tokenizer_path = {settings.tokenizer!r} "
            "have now; restore them, or run `lct tokenize` with another --output and the settings of this run"
        )
