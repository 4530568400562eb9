"""How fast each source of documents is: opened, read in batches, and as a share of the steps of a small job.

    python scripts/benchmarks/data.py --json docs/measurements/data_cpu.json

The documents of every source are those of the standard library, jsonl repeats them up to --megabytes. Files lie in a
temporary folder, so that they are in the memory of the operating system. The index of jsonl is built, then read again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

from trainer.data.datasets import open_source
from trainer.data.file_index import cache_folder

from scripts.provenance import made_with
from trainer.commands import tokenize_text
from trainer.data.loader import BatchLoader
from trainer.data.tokenizers.tokenizer import open_tokenizer

SEQ_LEN, ROWS = 2048, 4


def written(folder: Path, megabytes: float) -> dict[str, str | None]:
    """Write the documents in each form; return the path of each source."""
    documents = list(open_source("python_stdlib"))
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


def tokenized(path: str, output: str) -> dict[str, object]:
    """Tokenize text files in one process; return its speed."""
    started = time.perf_counter()
    options = ["--dataset", "text", "--path", path, "--output", output, "--processes", "1"]
    if tokenize_text.main(options):
        raise RuntimeError("lct tokenize failed")
    seconds = time.perf_counter() - started
    size = sum(file.stat().st_size for file in Path(path).iterdir())
    return {"megabytes": round(size / 1e6, 1), "megabytes_per_second": round(size / 1e6 / seconds, 2)}


def opened(name: str, path: str | None) -> float:
    """Return the seconds in which a source is opened."""
    started = time.perf_counter()
    open_source(name, path)
    return round(time.perf_counter() - started, 4)


def speeds(name: str, path: str | None, batches: int, rounds: int) -> Iterator[float]:
    """Yield the tokens per second of one process for each round, after a first batch of every stream."""
    sizes = {"seq_len": SEQ_LEN, "local_batch_size": ROWS, "data_streams": None}
    loader = BatchLoader(open_source(name, path), open_tokenizer(), **sizes, seed=0, dp_rank=0, dp_degree=1)
    made = iter(loader)
    for _ in range(16):
        next(made)
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(batches):
            next(made)
        yield batches * ROWS * SEQ_LEN / (time.perf_counter() - started)


def loading_fraction(name: str, path: str | None, steps: int) -> float:
    """Return the share of the time of a step that the debug model's job waits for data, median over steps."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--training.steps={steps}", f"--training.dataset={name}", f"--job.dump_folder={folder}"]
        options += ["--metrics.log_freq=1", *([f"--training.dataset_path={path}"] if path else [])]
        subprocess.run(
            [sys.executable, "-m", "trainer", "train", "debug_model", "--ngpu", "1", *options],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return round(statistics.median(json.loads(line)["data_loading_fraction"] for line in lines[1:]), 5)


def measure(name: str, path: str | None, args: argparse.Namespace) -> dict[str, object]:
    """Return the row of a source."""
    first, again = opened(name, path), opened(name, path)
    index_bytes = sum(file.stat().st_size for file in cache_folder().glob("*.index"))
    rates = sorted(speeds(name, path, args.batches, args.rounds))
    row: dict[str, object] = {"dataset": name, "documents": len(open_source(name, path))}
    if path:
        files = [Path(path)] if Path(path).is_file() else list(Path(path).iterdir())
        row["megabytes"] = round(sum(file.stat().st_size for file in files) / 1e6, 1)
    row |= {"open_seconds": first, "open_again_seconds": again}
    row |= {"index_bytes": index_bytes} if name == "jsonl" else {}
    row |= {"tokens_per_second": round(statistics.median(rates)), "range": [round(rates[0]), round(rates[-1])]}
    if args.steps:
        row["data_loading_fraction"] = loading_fraction(name, path, args.steps)
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/data.md."""
    lines = [
        "| source | documents | opened, and again | tokens per second | share of a step |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        size = f", {row['megabytes']:.0f} MB" if "megabytes" in row else ""
        seconds = f"{1000 * row['open_seconds']:.0f} ms, {1000 * row['open_again_seconds']:.0f} ms"
        speed = f"{row['tokens_per_second'] / 1e6:.1f} million | {row['data_loading_fraction']:.2%}"
        lines.append(f"| `{row['dataset']}` | {row['documents']:,}{size} | {seconds} | {speed} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--megabytes", type=float, default=245, help="of the JSON lines")
    found.add_argument("--batches", type=int, default=100, help=f"of {ROWS} x {SEQ_LEN} tokens, in a round")
    found.add_argument("--rounds", type=int, default=5)
    found.add_argument("--steps", type=int, default=3, help="of a job with the debug model for each source; 0: none")
    found.add_argument("--json", default=None, help="file of the numbers")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    content: dict[str, object] = made_with("scripts/benchmarks/data.py", argv, device="cpu")
    content |= {
        "cpus": os.cpu_count(),
        "seq_len": SEQ_LEN,
        "rows": ROWS,
        "batches": args.batches,
        "rounds": args.rounds,
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # an index of another run would be found
        paths = written(Path(folder), args.megabytes)
        content["tokenize"] = tokenized(str(paths["text"]), str(paths["tokens"]))
        content["results"] = [measure(name, path, args) for name, path in paths.items()]
    text = json.dumps(content, indent=2)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
