"""Speed of each source of documents: its first start, later starts, and batches.

    python scripts/benchmarks/data.py --json docs/measurements/data_cpu.json

Every source has the documents of Python's standard library; jsonl repeats them up to --megabytes. The files lie in a
temporary folder, so that the operating system has them in memory. The first start makes token files with one process
for each CPU. Then the benchmark measures the order of --documents on one of 1,024 ranks. It also measures how this rank
and the first rank of its node open --files token files.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not


from scripts.provenance import made_with
from trainer.config.schema import Training
from trainer.data.job_data import open_text
from trainer.data.loader import BatchLoader
from trainer.data.order.streams import assigned
from trainer.data.sources.registry import DataSettings, all_documents
from trainer.data.text_data import TextData
from trainer.data.token_files.catalog import catalog_of, open_documents
from trainer.data.token_files.format import index_bytes
from trainer.data.token_files.made import cached

SEQ_LEN = 2048
ROWS = 4


def written(folder: Path, megabytes: float) -> dict[str, str | None]:
    """Write the documents in each form.

    Args:
        folder: Folder for the files.
        megabytes: Size of the JSON lines.

    Returns:
        The path of each source. None: the source needs none.
    """
    documents = list(all_documents(DataSettings("python_stdlib")))
    (folder / "text").mkdir()
    for i, document in enumerate(documents):
        (folder / "text" / f"{i:05d}.txt").write_text(document, encoding="utf-8")
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    size = 0
    with open(folder / "lines.jsonl", "w", encoding="utf-8") as stream:
        for line in cycle(lines):
            size += stream.write(line)
            if size >= megabytes * 1e6:
                break
    paths = {name: str(folder / name) for name in ("text", "lines.jsonl", "tokens")}
    return {"python_stdlib": None, "text": paths["text"], "jsonl": paths["lines.jsonl"], "tokens": paths["tokens"]}


def opened(name: str, path: str | None) -> float:
    """Return the seconds of the command that makes the token files of a source, as the start of a job runs it.

    Args:
        name: Name of the source.
        path: Path of its files. None: the source needs none.
    """
    started = time.perf_counter()
    command = [sys.executable, "-m", "trainer", "tokenize", f"--training.dataset={name}"]
    command += [f"--training.dataset_path={path}"] if path else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return round(time.perf_counter() - started, 4)


def speeds(data: TextData, batches: int, rounds: int) -> Iterator[float]:
    """Yield the tokens per second of one process for each round, after a first batch of every stream.

    Args:
        data: The documents.
        batches: Batches of a round.
        rounds: Number of rounds.
    """
    training = Training(seq_len=SEQ_LEN, local_batch_size=ROWS)
    loader = BatchLoader(data, training, dp_rank=0, dp_degree=1)
    made = iter(loader)
    for _ in range(16):
        next(made)
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(batches):
            next(made)
        yield batches * ROWS * SEQ_LEN / (time.perf_counter() - started)


def measure(name: str, path: str | None, args: argparse.Namespace) -> dict[str, object]:
    """Return the row of a source.

    Args:
        name: Name of the source.
        path: Path of its files. None: the source needs none.
        args: The command line.
    """
    settings = DataSettings(name, path)
    first = opened(name, path)
    again = opened(name, path)
    data = open_text(settings)
    rates = sorted(speeds(data, args.batches, args.rounds))
    row: dict[str, object] = {"dataset": name, "documents": data.items}
    if path:
        files = [Path(path)] if Path(path).is_file() else list(Path(path).iterdir())
        row["megabytes"] = round(sum(file.stat().st_size for file in files) / 1e6, 1)
    row |= {"first_seconds": first, "open_seconds": again}
    row |= {"tokens_per_second": round(statistics.median(rates)), "range": [round(rates[0]), round(rates[-1])]}
    return row


def order(documents: int, streams: int = 1024) -> dict[str, object]:
    """Return how long one rank takes to order its documents and to look up 1,000 of them, and its memory.

    Args:
        documents: Number of documents.
        streams: Number of streams, one for each rank.
    """
    started = time.perf_counter()
    ((_, items),) = assigned(documents, streams, 0, 3, 1024)
    made = time.perf_counter() - started
    _ = [items[place] for place in range(1000)]
    microseconds = (time.perf_counter() - started - made) * 1000
    tracemalloc.start()
    _ = [items[0] for _, items in assigned(documents, streams, 0, 3, 1024)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    result = {"seconds": round(made, 6), "microseconds_a_document": round(microseconds, 2), "peak_bytes": peak}
    return {"documents": documents, **result}


def start_of_ranks(folder: Path, files: int) -> dict[str, object]:
    """Return the seconds that the first rank of a node, and then another rank, take to open token files.

    Args:
        folder: Folder for the token files, which must not exist.
        files: Number of token files.
    """
    folder.mkdir()
    ids = np.arange(2, 66, dtype="<u2")
    for i in range(files):
        ids.tofile(folder / f"{i:05d}.bin")
        (folder / f"{i:05d}.idx").write_bytes(b"".join(index_bytes(8, np.array([ids.size]))))
    settings = DataSettings("tokens", str(folder))
    started = time.perf_counter()
    catalog = catalog_of(settings)
    first = time.perf_counter() - started
    started = time.perf_counter()
    catalog_of(settings)
    again = time.perf_counter() - started
    started = time.perf_counter()
    open_documents(settings, catalog)
    other = time.perf_counter() - started
    seconds = {"first_rank": first, "first_rank_again": again, "other_rank": other}
    return {"files": files, **{name: round(value, 4) for name, value in seconds.items()}}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    described = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    described.add_argument("--megabytes", type=float, default=245, help="size of the JSON lines")
    described.add_argument(
        "--batches", type=int, default=100, help=f"batches of a round, {ROWS} x {SEQ_LEN} tokens each"
    )
    described.add_argument("--rounds", type=int, default=5)
    described.add_argument(
        "--documents", type=int, default=365_000_000, help="number of documents to order (default: C4's)"
    )
    described.add_argument("--files", type=int, default=1000, help="token files that ranks open")
    described.add_argument("--json", default=None, help="file of the numbers")
    return described


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the result, and write it to `--json`.

    Args:
        argv: The command line. None: the process's own.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    content: dict[str, Any] = made_with("scripts/benchmarks/data.py", argv, device="cpu")
    content |= {
        "cpus": os.cpu_count(),
        "seq_len": SEQ_LEN,
        "rows": ROWS,
        "batches": args.batches,
        "rounds": args.rounds,
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # no token files of another run
        paths = written(Path(folder), args.megabytes)
        content["results"] = [measure(name, path, args) for name, path in paths.items() if name != "tokens"]
        paths["tokens"] = str(cached(DataSettings("text", paths["text"])))
        content["results"].append(measure("tokens", paths["tokens"], args))
        content["order"] = order(args.documents)
        content["start"] = start_of_ranks(Path(folder, "many"), args.files)
    text = json.dumps(content, indent=2)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
