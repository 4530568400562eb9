"""Turn text into files of token ids, for training.dataset = "tokens".

    lct tokenize --dataset jsonl --path 'data/*.jsonl' --tokenizer-path assets/tokenizer --output tokens
    lct train --training.dataset tokens --training.dataset_path tokens --model.tokenizer_path assets/tokenizer

It reads .jsonl, .jsonl.gz, .jsonl.zst and .parquet files (jsonl), .txt files (text), or python_stdlib; or a data set of
the Hugging Face hub, streamed:

    lct tokenize --hub allenai/c4 --hub-config en --split train --output tokens

The same command goes on with an interrupted run: shards that are whole stay, and damaged ones are made again.
"""

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.datasets import DATASETS, Reading, check_source, find_files
from trainer.data.file_index import stamp_of
from trainer.data.hub import HubData
from trainer.data.streamed import STREAMED
from trainer.data.token_files import MANIFEST, UNFINISHED, Pair
from trainer.data.token_writer import Part, keep_if_whole, parts_of, write_shard
from trainer.data.tokenizer import default_tokenizer_path, open_tokenizer, tokenizer_hash

_FORMAT = 1


def tokenize(args: argparse.Namespace) -> str:
    """Write the shards that are not there yet, then the manifest; return what was done, in words.

    Raises:
        ConfigError: wrong settings, data that cannot be read, or a folder with other token ids.
    """
    started, folder = time.monotonic(), Path(args.output)
    how = Reading(args.text_field, args.on_bad_record == "skip")
    plan = _plan(args)
    if args.hub:
        hub = _hub(args, folder)
        plan |= {"dataset": "hub", "inputs": list(astuple(hub))}
        parts = [Part("hub", (), 0, shard, hub=hub) for shard in range(hub.shards)]
    else:
        files = _files(args, how)
        plan["inputs"] = [[os.path.abspath(file), stamp_of(file).ends] for file in files]
        parts = parts_of(args.dataset, files, args.shard_mb << 20)
    _begin(folder, plan)
    stems = [folder / f"shard-{number:05d}" for number in range(len(parts))]
    left = _missing(stems, _noted(folder).get("shards", {}), args.processes)
    if len(left) < len(parts):
        print(f"{folder} has {len(parts) - len(left)} of {len(parts)} shards already")
    _write(parts, stems, left, args, how)
    shards = {stem.name: _entry(stem) for stem in stems}
    unfinished = folder / f"{MANIFEST}.tmp"
    unfinished.write_text(json.dumps(plan | {"shards": shards}, indent=1), encoding="utf-8")
    unfinished.replace(folder / MANIFEST)
    (folder / UNFINISHED).unlink(missing_ok=True)
    documents, tokens = (sum(entry[key] for entry in shards.values()) for key in ("documents", "tokens"))
    seconds = time.monotonic() - started
    return f"{folder}: {tokens:,} tokens of {documents:,} documents in {len(parts)} shards ({_duration(seconds)})"


def _missing(stems: Sequence[Path], entries: Mapping[str, Any], processes: int) -> list[int]:
    """Return the numbers of the shards that are not there, or are damaged. entries: those of the manifest."""
    there = [stem.with_suffix(".idx").exists() for stem in stems]
    with ThreadPoolExecutor(processes) as threads:
        whole = list(threads.map(lambda stem: keep_if_whole(stem, entries.get(stem.name)), stems))
    for stem, was_there, is_whole in zip(stems, there, whole, strict=True):
        if was_there and not is_whole:
            print(f"{stem.name} is damaged, and is made again")
    return [number for number, is_whole in enumerate(whole) if not is_whole]


def _files(args: argparse.Namespace, how: Reading) -> list[str]:
    if args.dataset == "python_stdlib":
        check_source(args.dataset, args.path)
        return []
    if not args.path:
        raise ConfigError(f"--dataset {args.dataset} needs --path; give a file, a folder, or a glob")
    endings = DATASETS[args.dataset].endings + (STREAMED if args.dataset == "jsonl" else ())
    files = [file for file in find_files(args.dataset, args.path, endings) if os.path.getsize(file)]
    if not files:
        raise ConfigError(f"--path {args.path!r} holds no text; give files that are not empty")
    return files


def _hub(args: argparse.Namespace, folder: Path) -> HubData:
    """Return the data set at the revision that is named, or that an interrupted run had, else at the newest one."""
    before, wanted = _noted(folder).get("inputs"), [args.hub, args.hub_config, args.split]
    revision = args.hub_revision or (before[3] if before and before[:3] == wanted else None)
    hub = HubData.find(*wanted, revision)
    print(f"{hub}: {hub.shards} shards of revision {hub.revision}")
    return hub


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the token ids depend on, beside the data."""
    tokenizer = args.tokenizer_path or default_tokenizer_path()
    made_by = {"hash": tokenizer_hash(tokenizer), "name": Path(tokenizer).name}
    made_by["vocab_size"] = open_tokenizer(tokenizer).vocab_size
    names = ("dataset", "text_field", "on_bad_record", "shard_mb")
    return {"format": _FORMAT, "tokenizer": made_by, **{name: getattr(args, name) for name in names}}


def _noted(folder: Path) -> dict[str, Any]:
    """Return the plan that a folder notes; empty: none, or it is damaged."""
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
    folder.mkdir(parents=True, exist_ok=True)
    if before := _noted(folder):
        before.pop("shards", None)
        if before != plan:
            changed = ", ".join(key for key in plan if before.get(key) != plan[key])
            raise ConfigError(
                f"--output {folder} holds token ids of other settings or data ({changed}); name another folder, or "
                "remove this one"
            )
        return
    if any(folder.glob("*.idx")):
        raise ConfigError(f"--output {folder} holds token ids of another program; name another folder")
    unfinished = folder / f"{UNFINISHED}.tmp"
    unfinished.write_text(json.dumps(plan), encoding="utf-8")
    unfinished.replace(folder / UNFINISHED)


def _write(
    parts: Sequence[Part], stems: Sequence[Path], left: Sequence[int], args: argparse.Namespace, how: Reading
) -> None:
    """Write shards, and print how far they are."""
    started, done, total = time.monotonic(), 0, sum(parts[i].size for i in left)
    work = [(parts[i], stems[i], args.tokenizer_path, how) for i in left]
    for number, (part, stem) in enumerate(_written(work, args.processes), 1):
        done += part.size
        seconds = time.monotonic() - started
        share = done / total if total else number / len(left)
        rate = f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB, {done / 2**20 / seconds:.1f} MiB/s, " if total else ""
        rest = _duration(seconds * (1 - share) / share)
        print(f"{stem.name}: {number} of {len(left)} shards, {rate}{rest} left", flush=True)


def _written(work: Sequence[tuple[Any, ...]], processes: int) -> Iterator[tuple[Part, Path]]:
    """Write shards, and yield each when it is written.

    Raises:
        ConfigError: of a process, or one was killed.
    """
    if processes == 1:
        yield from (_write_one(*one) for one in work)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, initializer=_end_with, initargs=(os.getpid(),)) as pool:
        try:
            for future in as_completed([pool.submit(_write_one, *one) for one in work]):
                yield future.result()
        except BrokenProcessPool:
            raise ConfigError(
                "a process of `lct tokenize` was killed, mostly for lack of memory; run the same command again with "
                "fewer --processes"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _end_with(parent: int) -> None:
    """End this process soon after its parent: without one it would write its shard and then wait for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write_one(part: Part, stem: Path, tokenizer_path: str | None, how: Reading) -> tuple[Part, Path]:
    write_shard(part, stem, open_tokenizer(tokenizer_path), how)
    return part, stem


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _entry(stem: Path) -> dict[str, int]:
    """Return what the manifest says about a shard."""
    sums = {name: zlib.crc32(stem.with_suffix(f".{name}").read_bytes()) for name in ("idx", "crc")}
    pair = Pair(str(stem.with_suffix(".idx")), None)
    tokens = os.path.getsize(pair.ids) // pair.dtype.itemsize
    return {"documents": len(pair), "tokens": tokens, **sums}


def main(argv: list[str] | None = None) -> int:
    what, _, more = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog="lct tokenize", description=what, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="jsonl", choices=("jsonl", "text", "python_stdlib"))
    parser.add_argument("--path", default=None, help="file, folder or glob")
    parser.add_argument("--hub", default=None, help="data set of the Hugging Face hub, in the place of --path")
    parser.add_argument("--hub-config", default=None, help="its configuration, such as en; default: its default")
    parser.add_argument("--hub-revision", default=None, help="its revision; default: the newest one")
    parser.add_argument("--split", default="train", help="its split")
    parser.add_argument("--output", required=True, help="folder of the token ids")
    parser.add_argument("--tokenizer-path", default=None, help="as model.tokenizer_path")
    parser.add_argument("--text-field", default="text", help="field or column with the text of a document")
    parser.add_argument("--on-bad-record", default="stop", choices=("stop", "skip"), help="skip: an empty document")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that tokenize, each a shard")
    parser.add_argument("--shard-mb", type=int, default=256, help="MiB of input for a shard")
    args = parser.parse_args(argv)
    try:
        if args.processes < 1 or args.shard_mb < 1:
            raise ConfigError(
                f"--processes {args.processes} and --shard-mb {args.shard_mb} must be at least 1; leave them out"
            )
        if args.hub and (args.path or args.dataset != "jsonl"):
            raise ConfigError(f"--hub {args.hub} has its own files and format; leave out --path and --dataset")
        print(tokenize(args))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or args.output} cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
