"""Check the project on a GPU, block by block, and write what was found to one JSON file.

    python scripts/gpu_check.py --out gpu_check.json                  # all blocks, at most a quarter of an hour
    python scripts/gpu_check.py --blocks first --out first.json       # under ten minutes; then --blocks second
    python scripts/gpu_check.py --device cpu --out dry_run.json     # small shapes: does the script itself work?
    python scripts/gpu_check.py --blocks kernels,ranks --limit-scale 2

Each block runs in a process of its own and is killed at its time limit. The file is written again after each block. No
block stops the others. Exit code: 0, or 1 if a block failed, or 2 for a wrong option. docs/gpu_check.md has the rest.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from scripts.gpu_blocks.block import KEPT
from scripts.provenance import made_with
from trainer.commands.rank import set_allocator

ROOT = Path(__file__).resolve().parents[1]
Found = dict[str, Any]
_LINES_KEPT = 40  # of what a failed block printed
_MOST_BYTES = 16 * 2**20  # of a file that a block leaves


@dataclass(frozen=True)
class Block:
    """A part of the check. entry: `module:function`, called with a `Check`; limit: seconds until it is killed."""

    name: str
    entry: str
    limit: float


_HERE = "scripts.gpu_blocks"
# Where a GPU is lent for minutes: a call of less than ten minutes, one of less than four, and what compiles for long.
FIRST = (
    Block("versions", f"{_HERE}.kernels:versions", 15),
    Block("two_ranks", f"{_HERE}.two_ranks:two_ranks", 160),
    Block("large", f"{_HERE}.large:large", 50),
    Block("documents", f"{_HERE}.documents:documents", 60),
    Block("vocabulary", f"{_HERE}.steps:vocabulary", 75),
    Block("program", f"{_HERE}.training:program", 85),
    Block("kernels", f"{_HERE}.kernels:kernels", 45),
    Block("ranks", f"{_HERE}.ranks:ranks", 65),
    Block("tiles", f"{_HERE}.speed:tiles", 30),
)
SECOND = (
    Block("speed", f"{_HERE}.speed:speed", 35),
    Block("optimizers", f"{_HERE}.steps:optimizers", 85),
    Block("nccl", f"{_HERE}.nccl:nccl", 20),
    Block("syncs", f"{_HERE}.training:syncs", 30),
    Block("layer", f"{_HERE}.layer:layer", 28),
)
LAST = (
    Block("linear", f"{_HERE}.linear:linear", 180),
    Block("float8", f"{_HERE}.steps:float8", 150),
    Block("mfu", f"{_HERE}.mfu:mfu", 105),
    Block("several", f"{_HERE}.ranks:several", 70),
)
BLOCKS = FIRST + SECOND + LAST
CALLS = {"first": FIRST, "second": SECOND, "last": LAST}
"""Names for some of the blocks in `--blocks`."""


def run_block(block: Block, device: str, scale: float = 1.0, out: Path | None = None) -> Found:
    """Run a block in a process of its own, and return what it found; its files go beside `out`.

    verdict: passed, skipped, failed, over its limit, or died. What the block had noted until then is kept.
    """
    limit = block.limit * scale
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
        notes, log = Path(folder, "notes.json"), Path(folder, "log")
        command = [sys.executable, "-m", f"{_HERE}.child", block.entry, device, str(notes), str(limit)]
        path = os.pathsep.join(filter(None, [str(ROOT), _stand_ins(), os.environ.get("PYTHONPATH")]))
        # Also what a killed block leaves behind goes with the folder.
        environment = os.environ | {"PYTHONPATH": path, "TMPDIR": folder}
        set_allocator(environment)
        if device == "cpu":  # also where there are GPUs; one thread, which waits for no other program
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):  # its processes too, also if it has ended
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = round(time.monotonic() - started, 1)
        found: Found = {"verdict": "failed", "headline": "", "problems": [], "facts": {}}
        with suppress(OSError, ValueError):
            found |= json.loads(notes.read_text())
        if code != 0:
            found["verdict"] = _why(code, limit)
        files = _kept(Path(folder, KEPT), out)
        if found["verdict"] not in ("passed", "skipped"):
            found["log"] = log.read_text(errors="replace").splitlines()[-_LINES_KEPT:]
    return {"name": block.name, "seconds": seconds, "limit": limit} | found | ({"files": files} if files else {})


def _kept(folder: Path, out: Path | None) -> list[str]:
    """Move the files of a block beside `out`, with its name first; return their names, or why a file is not kept."""
    names = []
    for file in sorted(folder.iterdir()) if out is not None and folder.is_dir() else ():
        if file.stat().st_size > _MOST_BYTES:
            names.append(f"{file.name} is not kept: {file.stat().st_size:,} bytes")
            continue
        names.append(f"{out.stem}_{file.name}")
        shutil.move(file, out.with_name(names[-1]))
    return names


def _stand_ins() -> str:
    """Return the folder of what stands for a package that a bare machine lacks, or nothing if it is installed."""
    return "" if find_spec("tiktoken") else str(ROOT / "scripts" / "gpu_blocks" / "stand_ins")


def _why(code: int | None, limit: float) -> str:
    """Return the verdict on a block that did not end by itself with 0; code: None if it was killed at its limit."""
    if code is None:
        return f"over its limit of {limit:g} s"
    return f"died ({signal.Signals(-code).name})" if code < 0 else "failed"


def machine(device: str) -> Found:
    """Return the versions and GPUs; nothing here takes memory of a GPU."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus: list[str] = []
    if device == "cuda":
        with suppress(OSError, subprocess.SubprocessError):
            gpus = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    text = "tiktoken" if find_spec("tiktoken") else "bytes: tiktoken is not installed"
    return {
        "text": text,
        "cuda": torch.version.cuda,
        "torch_git": torch.version.git_version,
        "gpus_memory_driver": gpus,
    }


def check(blocks: Iterable[Block], head: Found, device: str, out: Path | None, scale: float = 1.0) -> list[Found]:
    """Run the blocks, with a line for each and the file again after each; return what they found."""
    results: list[Found] = []
    for block in blocks:
        found = run_block(block, device, scale, out)
        results.append(found)
        problem = f"; {found['problems'][0]}" if found["problems"] else ""
        print(
            f"{block.name:10}{found['seconds']:7.1f} s  {found['verdict']:12}  {found['headline']}{problem}", flush=True
        )
        if out is not None:
            write(out, head | {"seconds": sum(each["seconds"] for each in results), "blocks": results})
    return results


def write(path: Path, what: Found) -> None:
    """Write a JSON file whole or not at all."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(what, indent=2) + "\n")
    beside.replace(path)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [block.name for block in BLOCKS]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with small shapes")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where the result goes, after each block")
    parser.add_argument("--blocks", default=",".join(names), metavar="A,B", help=f"of {', '.join((*CALLS, *names))}")
    parser.add_argument("--limit-scale", type=float, default=1.0, metavar="X", help="all time limits times this")
    parser.add_argument("--commit", metavar="REV", help="of the code, where a copy has no history of its own")
    args = parser.parse_args(argv)
    wanted = [each for word in args.blocks.split(",") for each in _named(word)]
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--blocks: {unknown[0]!r} is none of {', '.join((*CALLS, *names))}")
    if not args.limit_scale > 0:
        parser.error(f"--limit-scale {args.limit_scale:g} must be above 0")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        parser.error(f"--out {args.out}: its folder does not exist")
    args.blocks = [block for block in BLOCKS if block.name in wanted]
    return args


def _named(word: str) -> list[str]:
    return [block.name for block in CALLS[word]] if word in CALLS else [word]


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: PyTorch finds no GPU here; use --device cpu for a dry run", file=sys.stderr)
        return 2
    head = made_with("scripts/gpu_check.py", argv, device=args.device) | machine(args.device)
    head |= {"commit": args.commit} if args.commit else {}
    head["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    results = check(args.blocks, head, args.device, args.out, args.limit_scale)
    failed = [found["name"] for found in results if found["verdict"] not in ("passed", "skipped")]
    print(f"failed: {', '.join(failed)}" if failed else "no block failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
