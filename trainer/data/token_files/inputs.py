"""What token files follow from: the content of the data and the settings, as hashes. Torch-free."""

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
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.tokenizer import (
    open_tokenizer,
    tokenizer_hash,
    vocab_size_of,
)

_FORMAT = 2


LABELS = 1
"""The number of the code that makes labels of conversations: each change of labels raises it, so that no run takes the
labels of older code from the cache (tests/unit/test_label_code.py)."""


# fewest and most bytes of input for a shard, of which small data have 64
_SHARD_BYTES = 1 << 20, 1 << 28


@dataclass(frozen=True)
class Inputs:
    """What token files follow from.

    files: of the data set; digests: 63-bit hashes of their content, or of the revision of a data set of the hub;
    made_by: hashes of the settings that decide which tokens the documents become, by name; see `streams.IDENTITY`.
    """

    settings: DataSettings
    files: Sequence[str]
    digests: Sequence[int]
    made_by: Mapping[str, int]

    @classmethod
    def of(cls, settings: DataSettings) -> "Inputs":
        """Return the inputs of a data set; that of the hub has a revision.

        Raises:
            ConfigError: data, tokenizer or template cannot be read, or there is no text.
        """
        if settings.dataset == "hub":
            return cls(settings, (), [hash_of(settings.path)], made_by(settings))
        files = files_of(settings)
        if not files:
            raise ConfigError(
                f"{settings.path or settings.dataset} holds no text; give files that are not empty"
            )
        return cls(settings, files, contents(files), made_by(settings))

    def parts(self, shard_bytes: int | None) -> list[Part]:
        """Return the parts of the data set, of which each is a shard. shard_bytes: None: by the size of the data."""
        least, most = _SHARD_BYTES
        size = shard_bytes or min(max(self.size // 64, least), most)
        return source_of(self.settings).parts(self.settings, self.files, size)

    @property
    def size(self) -> int:
        """Bytes of all files; 0: not known."""
        return sum(map(os.path.getsize, self.files))

    def plan(self, shard_bytes: int | None) -> dict[str, Any]:
        """Return what decides the content of the shards."""
        tokenizer = self.settings.tokenizer
        described = {"hash": tokenizer_hash(tokenizer), "name": Path(tokenizer).name}
        described["vocab_size"] = vocab_size_of(tokenizer)
        names = {
            "format": _FORMAT,
            "dataset": self.settings.dataset,
            "shard_bytes": shard_bytes,
        }
        names |= {"path": self.settings.path} if self.settings.dataset == "hub" else {}
        if self.settings.dataset in CONVERSATIONS:
            names |= {"labels": LABELS, "template": template_hash(self.settings)}
        return names | {
            "tokenizer": described,
            "made_by": dict(self.made_by),
            "inputs": list(self.digests),
        }

    def content(
        self, parts: Sequence[Part], entries: Sequence[Mapping[str, Any]]
    ) -> list[tuple[int, int]]:
        """Return the number of documents up to the end of each file, and the hash of the content of these."""
        digest = hashlib.blake2b(digest_size=8)
        found = []
        documents = 0
        last = None
        # as files of other names have the same content on another machine
        if not self.settings.path:
            for text in map(text_of_file, self.files):
                digest.update(f"{text}\0".encode("utf-8", "surrogatepass"))
            return [(sum(entry["documents"] for entry in entries), number_of(digest))]
        digests = dict(zip(self.files or (self.settings.path,), self.digests, strict=True))
        for part, entry in zip(parts, entries, strict=True):
            counts = [entry["documents"]] if len(part.files) == 1 else [1] * len(part.files)
            for file, count in zip(part.files, counts, strict=True):
                if file != last:
                    digest.update(f"{digests[file]}\0".encode())
                    found.append((documents, 0))
                documents = documents + count
                last = file
                found[-1] = documents, number_of(digest)
        return found


def made_by(settings: DataSettings) -> dict[str, int]:
    """Return hashes of the settings that decide which tokens documents become; ConfigError if one cannot be read."""
    tokenizer = open_tokenizer(settings.tokenizer)
    # Files beside that of the tokenizer may name the tokens that begin and end a text.
    found = {
        "tokenizer": hash_of(
            tokenizer_hash(settings.tokenizer), tokenizer.bos_id, tokenizer.eos_id
        )
    }
    if settings.dataset in ("jsonl", "hub"):
        found["text_field"] = hash_of(settings.text_field)
    if settings.dataset in CONVERSATIONS:
        encoder = ConversationEncoder.of(
            settings.tokenizer, settings.chat_template, settings.chat
        )
        found["template"] = hash_of(encoder.identity)
    return found


def template_hash(settings: DataSettings) -> int | None:
    """Return a hash of the chat template and of its special tokens; None if there is no template."""
    files = ConversationEncoder.of(
        settings.tokenizer, settings.chat_template, settings.chat
    ).files
    return None if files is None else hash_of(files)


def hash_of(*parts: object) -> int:
    """Return a 63-bit hash of plain values."""
    return number_of(
        hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8)
    )
