"""One shard of token files, made from a part of a data set; and its entry in the manifest. Torch-free."""

import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainer.config.data import CONVERSATIONS
from trainer.data.sources.files import write_whole
from trainer.data.sources.records import Tally
from trainer.data.sources.registry import DataSettings, Part, documents_of, source_of
from trainer.data.token_files.format import CODES, NOTES, index_bytes, open_pair
from trainer.data.tokenizers import chat_notes
from trainer.data.tokenizers.tokenizer import NOTHING, vocab_size_of


@contextmanager
def _emptied_on_error(file: Path) -> Iterator[BinaryIO]:
    """Open a file to append, and yield the stream. If a write raises an OSError, empty the file, and raise the error.

    A part of a file would keep a full disk full.
    """
    with file.open("ab") as stream:
        try:
            yield stream
        except OSError:
            os.truncate(file, 0)  # another process may wait for this file, so it stays
            raise


def write_shard(settings: DataSettings, part: Part, stem: Path) -> None:
    """Tokenize a part, and write its shard under a lock, the .idx file last. If the .idx file exists, write nothing.

    Args:
        settings: The data set.
        part: The part.
        stem: The path of the shard's files, without their endings. The folder exists.

    Raises:
        ConfigError: The data cannot be read, or a record is bad and not to be skipped.
        OSError: A file cannot be written.
    """
    # uint16, or int32: the format has no uint32
    code = 8 if vocab_size_of(settings.tokenizer) <= 1 << 16 else 4
    encode = source_of(settings).encoder(settings)
    dtype = np.dtype(CODES[code])
    index = stem.with_suffix(".idx")
    lengths = []
    sums = []
    answers = []
    skipped = Tally()
    notes = {}
    with _emptied_on_error(stem.with_suffix(".bin")) as stream:
        # a process of a run whose parent was killed may still write
        fcntl.flock(stream, fcntl.LOCK_EX)
        if index.exists():
            return
        stream.truncate(0)
        for document in documents_of(settings, part, skipped):
            encoded = encode(document) if document else NOTHING
            ids = encoded.ids
            marks = b"" if encoded.answers is None else encoded.answers.tobytes()
            if encoded.notes:
                chat_notes.add(notes, encoded.notes, document["where"]())
            stream.write(content := ids.astype(dtype).tobytes())
            lengths.append(len(ids))
            sums.append(zlib.crc32(marks, zlib.crc32(content)))
            answers.append(marks)
        stream.flush()
        os.fsync(stream.fileno())
        write_whole(stem.with_suffix(".crc"), np.array(sums, dtype="<u4").tobytes())
        if settings.dataset in CONVERSATIONS:
            write_whole(stem.with_suffix(".answers"), *answers)
            write_whole(stem.with_suffix(NOTES), json.dumps(notes).encode())
        if skipped.number:
            note = {"skipped": skipped.number, "first": skipped.first}
            write_whole(stem.with_suffix(".skipped"), json.dumps(note).encode())
        write_whole(index, *index_bytes(code, lengths))


def entry_of(stem: Path) -> dict[str, Any]:
    """Return the manifest's entry of a shard: documents, tokens, check sums of .idx and .crc, and skipped records.

    Args:
        stem: The path of the shard's files, without their endings.

    Raises:
        ConfigError: The index is damaged, or does not fit the ids.
        OSError: A file is missing.
    """
    sums = {
        name: zlib.crc32(stem.with_suffix(f".{name}").read_bytes()) for name in ("idx", "crc")
    }
    pair = open_pair(str(stem.with_suffix(".idx")))
    note = {}
    with suppress(FileNotFoundError):
        note = json.loads(stem.with_suffix(".skipped").read_text("utf-8"))
    return {
        "documents": pair.documents,
        "tokens": os.path.getsize(pair.ids) // pair.itemsize,
        **sums,
        **note,
    }
