"""Everything that decides the content of token files: the data and the settings, as hashes. Torch-free."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError
from trainer.data.sources.files import contents, number_of
from trainer.data.sources.records import text_of_file
from trainer.data.sources.registry import DataSettings, Part, files_of, source_of
from trainer.data.tokenizers.tokenizer import open_tokenizer, tokenizer_hash, vocab_size_of

_FORMAT = 2


LABELS = 2
"""Version of the code that makes labels of conversations. Each change of labels raises it, so that no run takes the
labels of older code from the cache (tests/unit/test_label_code.py)."""


# Fewest and most bytes of input of a shard. Data of medium size have 64 shards.
_SHARD_BYTES = 1 << 20, 1 << 28


@dataclass(frozen=True)
class Inputs:
    """Everything that decides the content of token files.

    Attributes:
        settings: The data set.
        files: Its files.
        digests: 63-bit hashes of their content, or of the revision of a data set of the hub.
        made_by: Hashes of the settings that decide the tokens of documents, by name; see `stream_loader.IDENTITY`.
    """

    settings: DataSettings
    files: Sequence[str]
    digests: Sequence[int]
    made_by: Mapping[str, int]

    @classmethod
    def of(cls, settings: DataSettings) -> "Inputs":
        """Return the inputs of a data set. All of its files are read and hashed, unless the cache has their hashes.

        Args:
            settings: The data set; a data set of the hub has a revision.

        Raises:
            ConfigError: Data, tokenizer or template cannot be read, or there is no text.
        """
        if settings.hub:
            return cls(settings, (), [hash_of(settings.path)], made_by(settings))
        files = files_of(settings)
        if not files:
            raise ConfigError(
                f"{settings.path or settings.dataset} holds no text; give files that are not empty"
            )
        return cls(settings, files, contents(files), made_by(settings))

    def parts(self, shard_bytes: int | None) -> list[Part]:
        """Return the parts of the data set; each becomes a shard.

        Args:
            shard_bytes: Bytes of a part; None to choose by the size of the data.
        """
        least, most = _SHARD_BYTES
        size = shard_bytes or min(max(self.size // 64, least), most)
        return source_of(self.settings).parts(self.settings, self.files, size)

    @property
    def size(self) -> int:
        """Bytes of all files; 0 if unknown."""
        return sum(map(os.path.getsize, self.files))

    def plan(self, shard_bytes: int | None) -> dict[str, Any]:
        """Return everything that decides the content of the shards, as it is written to JSON.

        Args:
            shard_bytes: Bytes of a part, as configured; None if it is chosen by the size of the data.
        """
        settings = self.settings
        tokenizer = settings.tokenizer
        names = {
            "format": _FORMAT,
            "dataset": settings.dataset,
            "shard_bytes": shard_bytes,
        }
        if settings.hub:
            names["path"] = settings.path
        if settings.dataset in CONVERSATIONS:
            names |= {"labels": LABELS, "template": template_hash(settings)}
        return names | {
            "tokenizer": {
                "hash": tokenizer_hash(tokenizer),
                "name": Path(tokenizer).name,
                "vocab_size": vocab_size_of(tokenizer),
            },
            "made_by": dict(self.made_by),
            "inputs": list(self.digests),
        }

    def content(
        self, parts: Sequence[Part], entries: Sequence[Mapping[str, Any]]
    ) -> list[tuple[int, int]]:
        """Return for each file the number of documents up to its end, and the hash of all inputs up to its end.

        Data that come with this program give one pair, for all files together.

        Args:
            parts: The parts of the data set.
            entries: The record of each shard.
        """
        digest = hashlib.blake2b(digest_size=8)
        contents = {}
        documents = 0
        # another machine has the same content in files of other names
        if not self.settings.path:
            for text in map(text_of_file, self.files):
                digest.update(f"{text}\0".encode("utf-8", "surrogatepass"))
            return [(sum(entry["documents"] for entry in entries), number_of(digest))]
        digests = dict(zip(self.files or (self.settings.path,), self.digests, strict=True))
        for part, entry in zip(parts, entries, strict=True):
            counts = [entry["documents"]] if len(part.files) == 1 else [1] * len(part.files)
            for file, count in zip(part.files, counts, strict=True):
                if file not in contents:
                    digest.update(f"{digests[file]}\0".encode())
                documents += count
                contents[file] = documents, number_of(digest)
        return list(contents.values())


def made_by(settings: DataSettings) -> dict[str, int]:
    """Return 63-bit hashes of the settings that decide the tokens of documents, by name.

    Args:
        settings: The data set.

    Raises:
        ConfigError: The tokenizer or the template cannot be read.
    """
    tokenizer = open_tokenizer(settings.tokenizer)
    # Other files of the tokenizer's folder may name the tokens that begin and end a text.
    hashes = {
        "tokenizer": hash_of(
            tokenizer_hash(settings.tokenizer), tokenizer.bos_id, tokenizer.eos_id
        )
    }
    if settings.dataset in ("jsonl", "hub"):
        hashes["text_field"] = hash_of(settings.text_field)
    if settings.dataset in CONVERSATIONS:
        hashes["template"] = hash_of(settings.conversation_encoder().identity)
    return hashes


def template_hash(settings: DataSettings) -> int | None:
    """Return a hash of the chat template and of its special tokens; None if there is no template.

    Args:
        settings: The data set.
    """
    files = settings.conversation_encoder().files
    return None if files is None else hash_of(files)


def hash_of(*parts: object) -> int:
    """Return a 63-bit hash of plain values.

    Args:
        *parts: The values.
    """
    return number_of(
        hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8)
    )
