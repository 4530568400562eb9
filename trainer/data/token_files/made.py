"""Token files that are made once from a data set: in a folder of the user, or in the cache. Torch-free.

The name of the folder in the cache is a hash of everything that decides its content: the content of all files, the
tokenizer, the text field, the chat template. Several processes make shards, each from a part of the data set. A shard
has the number of its part, so that documents keep the order of the data set. Bad and empty documents keep their place,
without tokens. A whole shard stays when the job is killed, and the next job makes the others. A job waits for another
job that works on the same folder.
"""

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError
from trainer.config.loader import IMPORTED, import_packages
from trainer.data.sources.files import cache_folder, write_whole
from trainer.data.sources.records import HubData
from trainer.data.sources.registry import DataSettings, Part
from trainer.data.token_files.format import MANIFEST, UNFINISHED
from trainer.data.token_files.inputs import Inputs, hash_of
from trainer.data.token_files.shards import entry_of, write_shard
from trainer.data.tokenizers.tokenizer import vocab_size_of
from trainer.runtime.console import logger
from trainer.runtime.dump_folder import wait_for_lock
from trainer.runtime.launcher_watch import end_with

Log = Callable[[str], None]
_Work = Mapping[int, tuple[DataSettings, Part, Path]]
"""Numbers of shards, with the arguments of `write_shard`."""
_ALONE_BYTES = 1 << 24  # input of about a second: other processes would take longer to start
_LOG_SECONDS = 5.0
_TOKENS_A_BYTE = 0.3  # typical number of tokens of a byte of text


def cached(settings: DataSettings, *, makes_files: bool = True) -> Path | None:
    """Return the folder of the token files of a data set in the cache. Missing files are made first.

    Args:
        settings: The data set.
        makes_files: Whether to make missing files. Otherwise the result is None if some are missing.

    Raises:
        ConfigError: The data cannot be read, a record is bad and not to be skipped, or the cache cannot be written.
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
    """Return words for a log line: size and format of the data, and the expected size of the token ids.

    If the size is unknown, these are the format and the path.

    Args:
        settings: The data set.
        size: Bytes of the data; 0 if unknown.
    """
    if not size:
        return f"{settings.dataset} {settings.path or ''}".strip()
    id_bytes = (2 if vocab_size_of(settings.tokenizer) <= 1 << 16 else 4) + (
        settings.dataset in CONVERSATIONS
    )
    mib = size / 2**20
    about = mib * _TOKENS_A_BYTE * id_bytes
    return f"{mib:,.1f} MiB of {settings.dataset}, about {about:,.1f} MiB of ids,"


def _pinned(settings: DataSettings) -> DataSettings:
    """Return the settings with the hub's revision of the first run.

    The first run asks the hub, and notes the revision in the cache. Later runs need no network.
    """
    hub = settings.hub
    if not hub or HubData.of(hub).revision:
        return settings
    note = cache_folder() / "hub" / f"{hash_of(hub):016x}"
    if not note.exists():
        write_whole(note, HubData.of(hub).pinned().path.encode())
    return replace(settings, path=settings.path.removesuffix(hub) + note.read_text("utf-8"))


def tokenize(
    inputs: Inputs,
    folder: Path,
    *,
    processes: int,
    log: Log,
    every: float = 0.0,
    shard_bytes: int | None = None,
) -> None:
    """Make the shards that the folder lacks, then the manifest. The folder is locked: a second process waits.

    Args:
        inputs: Everything that decides the content.
        folder: The folder.
        processes: Number of processes.
        log: Takes lines of progress.
        every: Fewest seconds between two lines. If above 0 (in the cache), a folder with a manifest is not checked.
        shard_bytes: Bytes of a part; None to choose by the size of the data.

    Raises:
        ConfigError: The data cannot be read, a record is bad, or the folder has other token ids.
        OSError: The folder cannot be written.
    """
    plan = inputs.plan(shard_bytes)
    started = time.monotonic()
    with _held(folder, log):
        # another job has made the folder in the cache, with the same content
        if every and (folder / MANIFEST).exists():
            return
        _begin(folder, plan)
        parts = inputs.parts(shard_bytes)
        stems = [folder / f"shard-{number:05d}" for number in range(len(parts))]
        left = _missing(stems, noted(folder).get("shards", {}), log)
        if len(left) < len(parts):
            log(f"{folder} has {len(parts) - len(left)} of {len(parts)} shards already")
        work = {i: (inputs.settings, parts[i], stems[i]) for i in left}
        _write(work, processes=processes, log=log, every=every)
        shards = {stem.name: entry_of(stem) for stem in stems}
        entries = list(shards.values())
        manifest = plan | {"content": inputs.content(parts, entries), "shards": shards}
        write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        # files of killed processes
        for file in (folder / UNFINISHED, *folder.glob("*.tmp")):
            file.unlink(missing_ok=True)
    documents = sum(entry["documents"] for entry in entries)
    tokens = sum(entry["tokens"] for entry in entries)
    log(
        f"{folder}: {tokens:,} tokens of {documents:,} documents in {len(parts)} shards "
        f"({_duration(time.monotonic() - started)})"
    )


def noted(folder: Path) -> dict[str, Any]:
    """Return the plan in a folder, with its shards if the folder is finished; {} if there is no plan.

    For a damaged file, the result is {"damaged": name of the file}.

    Args:
        folder: The folder.
    """
    for name in (UNFINISHED, MANIFEST):
        try:
            plan = json.loads((folder / name).read_text("utf-8"))
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError):
            plan = None
        return plan if isinstance(plan, dict) else {"damaged": name}
    return {}


def _begin(folder: Path, plan: dict[str, Any]) -> None:
    """Write the plan into the folder's file `UNFINISHED`. A folder with the same plan stays as it is.

    If the folder has another plan or token ids of another program, a ConfigError is raised.
    """
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
def _held(folder: Path, log: Log) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("wb") as file:
        while wait_for_lock(file, _LOG_SECONDS) is False:
            log(f"waiting for another process, which makes {folder}")
        yield


def _missing(stems: Sequence[Path], entries: Mapping[str, Any], log: Log) -> list[int]:
    """Return the numbers, from 0, of the shards that are missing or damaged. The .idx of a damaged shard is deleted.

    `entries` has the records of the manifest. A shard without a record is only checked by itself.
    """
    missing = []
    for number, stem in enumerate(stems):
        index = stem.with_suffix(".idx")
        if index.exists():
            with suppress(ValueError, OSError):  # a ConfigError is a ValueError
                entry = entry_of(stem)
                if entry == entries.get(stem.name, entry):
                    continue
            log(f"{stem.name} is damaged, and is made again")
            index.unlink()
        missing.append(number)
    return missing


def _write(work: _Work, *, processes: int, log: Log, every: float) -> None:
    started = logged = time.monotonic()
    done = 0
    total = sum(part.size for _, part, _ in work.values())
    for number, i in enumerate(_written(work, min(processes, len(work))), 1):
        _, part, stem = work[i]
        done += part.size
        if (now := time.monotonic()) - logged < every:
            continue
        logged = now
        seconds = now - started
        share = done / total if total else number / len(work)
        rate = (
            f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB, {done / 2**20 / seconds:.1f} MiB/s, "
            if total
            else ""
        )
        log(
            f"{stem.name}: {number} of {len(work)} shards, {rate}"
            f"{_duration(seconds * (1 - share) / share)} left"
        )


def _written(work: _Work, processes: int) -> Iterator[int]:
    """Write shards and yield the number of each, in the order in which they are finished.

    If a process fails, its ConfigError is raised. If a process is killed, a ConfigError says so.
    """
    if processes <= 1:
        for number, one in work.items():
            write_shard(*one)
            yield number
        return
    with ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        initializer=_begin_process,
        initargs=(os.getpid(), tuple(IMPORTED)),
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
            pool.shutdown(cancel_futures=True)


def _begin_process(parent: int, packages: Sequence[str]) -> None:
    end_with(parent)
    import_packages(packages)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
