"""Shards of token ids: parts of a data set, which processes tokenize one by one. `format.py` has the format.

The number of a part is that of its shard, so that documents keep the order that the data set has. Bad and empty
documents keep their place, without tokens. Torch-free.
"""

import fcntl
import json
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.data import CONVERSATIONS
from trainer.data.sources.bad_records import Tally
from trainer.data.sources.files import write_whole
from trainer.data.sources.registry import DataSettings, Part, documents_of, source_of
from trainer.data.token_files.format import CODES, index_bytes, open_pair
from trainer.data.tokenizers.encoders import NOTHING
from trainer.data.tokenizers.tokenizer import vocab_size_of


def write_shard(settings: DataSettings, part: Part, stem: Path) -> None:
    """Tokenize a part. Its .idx appears last, when the shard is whole; one process at a time writes it.

    Raises:
        ConfigError: the data cannot be read, or a record is bad and not to be skipped.
        OSError: a file cannot be written.
    """
    code = 8 if vocab_size_of(settings.tokenizer) <= 1 << 16 else 4  # uint16, or int32: the format has no uint32
    encoder, dtype = source_of(settings).encoder(settings), np.dtype(CODES[code])
    index, lengths, sums, answers, skipped = stem.with_suffix(".idx"), [], [], [], Tally()
    with stem.with_suffix(".bin").open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # a process of a run whose parent was killed may still write
        if index.exists():
            return
        stream.truncate(0)
        for document in documents_of(settings, part, skipped):
            ids, marks, _ = encoder.encode(document) if document else NOTHING
            stream.write(content := ids.astype(dtype).tobytes())
            lengths.append(len(ids))
            sums.append(zlib.crc32(content))
            if marks is not None:
                answers.append(marks.tobytes())
                sums[-1] = zlib.crc32(answers[-1], sums[-1])
        stream.flush()
        os.fsync(stream.fileno())
        write_whole(stem.with_suffix(".crc"), np.array(sums, dtype="<u4").tobytes())
        if settings.dataset in CONVERSATIONS:
            write_whole(stem.with_suffix(".answers"), *answers)
        if skipped.number:
            note = {"skipped": skipped.number, "first": skipped.first}
            write_whole(stem.with_suffix(".skipped"), json.dumps(note).encode())
        write_whole(index, *index_bytes(code, lengths))


def entry_of(stem: Path) -> dict[str, Any]:
    """Return the manifest's entry of a shard: documents, tokens, check sums, and what was skipped in it.

    Raises:
        ConfigError: the index is damaged, or does not fit the ids.
        OSError: a file is missing.
    """
    sums = {name: zlib.crc32(stem.with_suffix(f".{name}").read_bytes()) for name in ("idx", "crc")}
    pair, note = open_pair(str(stem.with_suffix(".idx"))), {}
    with suppress(FileNotFoundError):
        note = json.loads(stem.with_suffix(".skipped").read_text(encoding="utf-8"))
    return {"documents": pair.documents, "tokens": os.path.getsize(pair.ids) // pair.itemsize, **sums, **note}
