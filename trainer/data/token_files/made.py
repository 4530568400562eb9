"""Token files that are made of a data set, once: into a folder of the user, or into the cache. Torch-free.

The folder in the cache is named by all that its content follows from: the content of all files, the tokenizer, the text
field, the chat template. Shards are made by several processes, each of a part of the data set, whose number it has: so
documents keep the order of the data set. Bad and empty ones keep their place, without tokens. A shard that is whole
stays when the job is killed, and the next job makes the others; a job that finds another one at work waits for it.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError
from trainer.config.loader import IMPORTED, import_packages
from trainer.data.sources.files import cache_folder, contents, number_of, write_whole
from trainer.data.sources.records import HubData, Tally, text_of_file
from trainer.data.sources.registry import DataSettings, Part, documents_of, files_of, source_of
from trainer.data.token_files.format import (
    CODES,
    MANIFEST,
    NOTES,
    UNFINISHED,
    index_bytes,
    open_pair,
)
from trainer.data.tokenizers import chat_notes
from trainer.data.tokenizers.conversation_encoder import ConversationEncoder
from trainer.data.tokenizers.tokenizer import (
    NOTHING,
    open_tokenizer,
    tokenizer_hash,
    vocab_size_of,
)
from trainer.runtime.console import logger
from trainer.runtime.dump_folder import wait_for_lock
from trainer.runtime.launcher_watch import end_with

_FORMAT = 2
LABELS = 1
"""The number of the code that makes labels of conversations: each change of labels raises it, so that no run takes the
labels of older code from the cache (tests/unit/test_label_code.py)."""
# fewest and most bytes of input for a shard, of which small data have 64
_SHARD_BYTES = 1 << 20, 1 << 28
_ALONE_BYTES = 1 << 24  # input of about a second, in which other processes would only start
_LOG_SECONDS = 5.0
_TOKENS_A_BYTE = 0.3  # about what tokenizers make of text


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
            return cls(settings, (), [_hash(settings.path)], made_by(settings))
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
        "tokenizer": _hash(
            tokenizer_hash(settings.tokenizer), tokenizer.bos_id, tokenizer.eos_id
        )
    }
    if settings.dataset in ("jsonl", "hub"):
        found["text_field"] = _hash(settings.text_field)
    if settings.dataset in CONVERSATIONS:
        encoder = ConversationEncoder.of(
            settings.tokenizer, settings.chat_template, settings.chat
        )
        found["template"] = _hash(encoder.identity)
    return found


def template_hash(settings: DataSettings) -> int | None:
    """Return a hash of the chat template and of its special tokens; None if there is no template."""
    files = ConversationEncoder.of(
        settings.tokenizer, settings.chat_template, settings.chat
    ).files
    return None if files is None else _hash(files)


def _hash(*parts: object) -> int:
    return number_of(
        hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8)
    )


def cached(settings: DataSettings, *, makes_files: bool = True) -> Path | None:
    """Return the folder of the token files of a data set in the cache.

    Args:
        settings: the data set.
        makes_files: whether to make files that are missing; if not, return None for them.

    Raises:
        ConfigError: the data cannot be read, a record is bad and not to be skipped, or the cache cannot be written.
    """
    try:
        inputs = Inputs.of(_pinned(settings))
        key = hashlib.sha256(
            json.dumps(inputs.plan(None), sort_keys=True).encode()
        ).hexdigest()[:32]
        folder = cache_folder() / "tokens" / key
        if not (folder / MANIFEST).exists():
            if not makes_files:
                return None
            logger.info(
                f"making token files of {described(inputs.settings, inputs.size)} in {folder}"
            )
            cpus = (
                len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1
            )
            processes = 1 if 0 < inputs.size <= _ALONE_BYTES else cpus
            tokenize(inputs, folder, processes=processes, log=logger.info, every=_LOG_SECONDS)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or cache_folder()} cannot be written ({error.strerror}); make room there, or name "
            "another folder in XDG_CACHE_HOME; the same command then makes the token files that are missing"
        ) from None
    return folder


def described(settings: DataSettings, size: int) -> str:
    """Return what token files are made of, and about how large they become. size: of the data, in bytes; 0: unknown."""
    if not size:
        return f"{settings.dataset} {settings.path or ''}".strip()
    id_bytes = (2 if vocab_size_of(settings.tokenizer) <= 1 << 16 else 4) + (
        settings.dataset in CONVERSATIONS
    )
    about = size * _TOKENS_A_BYTE * id_bytes
    return (
        f"{size / 2**20:,.1f} MiB of {settings.dataset}, about {about / 2**20:,.1f} MiB of ids,"
    )


def _pinned(settings: DataSettings) -> DataSettings:
    """Return the settings with the revision of the hub that the first run found; later runs need no network."""
    path = settings.path or ""
    if settings.dataset != "hub" or HubData.of(path).revision:
        return settings
    note = cache_folder() / "hub" / f"{_hash(path):016x}"
    if not note.exists():
        write_whole(note, HubData.of(path).found().path.encode())
    return replace(settings, path=note.read_text(encoding="utf-8"))


def tokenize(
    inputs: Inputs,
    folder: Path,
    *,
    processes: int,
    log: Callable[[str], None],
    every: float = 0.0,
    shard_bytes: int | None = None,
) -> dict[str, Any]:
    """Make the shards that are not in the folder yet, then the manifest, and return it.

    log: takes lines of progress, at most one in `every` seconds.

    Raises:
        ConfigError: data that cannot be read, a bad record, or a folder with other token ids.
        OSError: the folder cannot be written.
    """
    plan = inputs.plan(shard_bytes)
    started = time.monotonic()
    with _held(folder, log):
        # in the cache it is of the same content, and another job made it
        if every and (folder / MANIFEST).exists():
            return noted(folder)
        _begin(folder, plan)
        parts = inputs.parts(shard_bytes)
        stems = [folder / f"shard-{number:05d}" for number in range(len(parts))]
        left = _missing(stems, noted(folder).get("shards", {}), log)
        if len(left) < len(parts):
            log(f"{folder} has {len(parts) - len(left)} of {len(parts)} shards already")
        _write(inputs.settings, parts, stems, left, processes=processes, log=log, every=every)
        entries = [entry_of(stem) for stem in stems]
        shards = dict(zip([stem.name for stem in stems], entries, strict=True))
        manifest = plan | {"content": inputs.content(parts, entries), "shards": shards}
        write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        # of processes that were killed
        for file in (folder / UNFINISHED, *folder.glob("*.tmp")):
            file.unlink(missing_ok=True)
    documents, tokens = (
        sum(entry[key] for entry in entries) for key in ("documents", "tokens")
    )
    seconds = _duration(time.monotonic() - started)
    log(
        f"{folder}: {tokens:,} tokens of {documents:,} documents in {len(parts)} shards ({seconds})"
    )
    return manifest


def noted(folder: Path) -> dict[str, Any]:
    """Return the plan that a folder notes, and the shards if it is finished; empty: none, or it is damaged."""
    for name in (UNFINISHED, MANIFEST):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {"damaged": name}
    return {}


def _begin(folder: Path, plan: dict[str, Any]) -> None:
    """Note the plan in the folder, which may have shards of the same plan."""
    if before := noted(folder):
        changed = ", ".join(key for key in plan if before.get(key) != plan[key])
        if changed:
            raise ConfigError(
                f"--output {folder} holds token ids of other settings or data ({changed}); name another folder, or "
                "remove this one"
            )
        return
    if any(folder.glob("*.idx")):
        raise ConfigError(
            f"--output {folder} holds token ids of another program; name another folder"
        )
    write_whole(folder / UNFINISHED, json.dumps(plan).encode())


@contextmanager
def _held(folder: Path, log: Callable[[str], None]) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("wb") as file:
        while wait_for_lock(file, _LOG_SECONDS) is False:
            log(f"waiting for another process, which makes {folder}")
        yield


def _missing(
    stems: Sequence[Path], entries: Mapping[str, Any], log: Callable[[str], None]
) -> list[int]:
    """Return the numbers of the shards that are not there, or are damaged. entries: those of the manifest."""
    missing = []
    for number, stem in enumerate(stems):
        index = stem.with_suffix(".idx")
        if index.exists():
            with suppress(ConfigError, OSError):
                found = entry_of(stem)
                if found == entries.get(stem.name, found):
                    continue
            log(f"{stem.name} is damaged, and is made again")
            index.unlink()
        missing.append(number)
    return missing


def _write(
    settings: DataSettings,
    parts: Sequence[Part],
    stems: Sequence[Path],
    left: Sequence[int],
    *,
    processes: int,
    log: Callable[[str], None],
    every: float,
) -> None:
    started = logged = time.monotonic()
    done = 0
    total = sum(parts[i].size for i in left)
    work = {i: (settings, parts[i], stems[i]) for i in left}
    for number, i in enumerate(_written(work, min(processes, len(left))), 1):
        done += parts[i].size
        if (now := time.monotonic()) - logged < every:
            continue
        logged = now
        seconds = now - started
        share = done / total if total else number / len(left)
        rate = (
            f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB, {done / 2**20 / seconds:.1f} MiB/s, "
            if total
            else ""
        )
        log(
            f"{stems[i].name}: {number} of {len(left)} shards, {rate}{_duration(seconds * (1 - share) / share)} left"
        )


def _written(
    work: Mapping[int, tuple[DataSettings, Part, Path]], processes: int
) -> Iterator[int]:
    """Write shards, and yield the number of each when it is written; ConfigError of a process, or if one is killed."""
    if processes <= 1:
        for number, one in work.items():
            write_shard(*one)
            yield number
        return
    spawn = multiprocessing.get_context("spawn")
    begin = (os.getpid(), tuple(IMPORTED))
    with ProcessPoolExecutor(
        processes, spawn, initializer=_begin_process, initargs=begin
    ) as pool:
        try:
            numbers = {pool.submit(write_shard, *one): number for number, one in work.items()}
            for future in as_completed(numbers):
                future.result()
                yield numbers[future]
        except BrokenProcessPool:
            raise ConfigError(
                "a process that makes token files was killed, mostly for lack of memory; run the same command again, "
                "which makes the shards that are missing, or `lct tokenize` with fewer --processes"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _emptied_on_error(file: Path) -> Iterator[BinaryIO]:
    """Open a file to write at its end, and empty it if it cannot be written: a part of it would keep a disk full."""
    with file.open("ab") as stream:
        try:
            yield stream
        except OSError:
            os.truncate(file, 0)  # another process may wait for this file, so it stays
            raise


def write_shard(settings: DataSettings, part: Part, stem: Path) -> None:
    """Tokenize a part. Its .idx appears last, when the shard is whole; one process at a time writes it.

    Raises:
        ConfigError: the data cannot be read, or a record is bad and not to be skipped.
        OSError: a file cannot be written.
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
    notes: dict[str, dict[str, Any]] = {}
    with _emptied_on_error(stem.with_suffix(".bin")) as stream:
        # a process of a run whose parent was killed may still write
        fcntl.flock(stream, fcntl.LOCK_EX)
        if index.exists():
            return
        stream.truncate(0)
        for document in documents_of(settings, part, skipped):
            encoded = encode(document) if document else NOTHING
            ids = encoded.ids
            marks = encoded.answers
            if encoded.notes:
                chat_notes.add(notes, encoded.notes, document["where"]())
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
            write_whole(stem.with_suffix(NOTES), json.dumps(notes).encode())
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
    sums = {
        name: zlib.crc32(stem.with_suffix(f".{name}").read_bytes()) for name in ("idx", "crc")
    }
    pair = open_pair(str(stem.with_suffix(".idx")))
    note = {}
    with suppress(FileNotFoundError):
        note = json.loads(stem.with_suffix(".skipped").read_text(encoding="utf-8"))
    return {
        "documents": pair.documents,
        "tokens": os.path.getsize(pair.ids) // pair.itemsize,
        **sums,
        **note,
    }


def _begin_process(parent: int, packages: Sequence[str]) -> None:
    end_with(parent)
    import_packages(packages)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
