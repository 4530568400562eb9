"""Throughput of the data loader, as one JSON object.

python scripts/benchmarks/data_loader.py --dataset python_stdlib --seq-len 2048 --batches 200
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch

from trainer.config.errors import ConfigError
from trainer.data.datasets import check_source, open_source
from trainer.data.loader import BatchLoader
from trainer.data.tokenizer import open_tokenizer


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Seconds to open the data and to the first batch, then tokens per second over `--batches` batches."""
    check_source(args.dataset, args.path, args.data_streams)
    start = time.perf_counter()
    source, tokenizer = open_source(args.dataset, args.path), open_tokenizer(args.tokenizer_path)
    opened = time.perf_counter()
    loader = BatchLoader(
        source,
        tokenizer,
        seq_len=args.seq_len,
        local_batch_size=args.local_batch_size,
        data_streams=args.data_streams,
        seed=0,
        dp_rank=0,
        dp_degree=args.dp_degree,
    )
    batches = iter(loader)
    next(batches)
    first = time.perf_counter()
    for _ in range(args.batches):
        next(batches)
    seconds = time.perf_counter() - first
    tokens = args.batches * args.local_batch_size * args.seq_len
    return {
        "dataset": args.dataset,
        "documents": len(source),
        "vocab_size": tokenizer.vocab_size,
        "seq_len": args.seq_len,
        "local_batch_size": args.local_batch_size,
        "data_streams": args.data_streams,
        "open_seconds": round(opened - start, 3),
        "first_batch_seconds": round(first - opened, 3),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds),
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="python_stdlib")
    parser.add_argument("--path", default=None)
    parser.add_argument("--tokenizer-path", default=None)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--local-batch-size", type=int, default=4)
    parser.add_argument("--data-streams", type=int, default=64)
    parser.add_argument("--dp-degree", type=int, default=1)
    parser.add_argument("--batches", type=int, default=200)
    args = parser.parse_args()
    try:
        print(json.dumps(measure(args), indent=2))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
