"""Check the project on a GPU, block by block, and write the results to one JSON file.

    python scripts/gpu_check.py --out gpu_check.json                  # all blocks, at most a quarter of an hour
    python scripts/gpu_check.py --blocks first --out first.json       # under ten minutes; then --blocks second
    python scripts/gpu_check.py --device cpu --out dry_run.json     # small shapes: does the script itself work?
    python scripts/gpu_check.py --blocks kernels,ranks --limit-scale 2

Each block runs in a process of its own, which is killed at its time limit. The file is written again after each block.
No block stops the others. Exit code: 0 no block failed, 1 a block failed, 2 an option is wrong. See docs/gpu_check.md.

In the file, `blocks` has one entry a block. Its `verdict` is "passed", "skipped", "failed", "over its limit of N s", or
"died (SIGNAL)", and its `headline` is the line on the screen. `problems` has one sentence for each expectation that did
not hold, and `facts` everything that was measured until the block ended. Shares are of the bound: above 1 is an error.

    kernels     `worst_share` of each kernel
    large       `errors` of each kernel; the last two rows are kernels without groups of heads
    mfu         `mfu` as PaLM counts it, with full attention; `mfu_causal` counts the visible half. `busy_share` is the
                share of the time in which the GPU works; `alloc_retries` and `ooms` are 0 where memory is not short
    syncs       for each mask, the lines of the project that made the host wait, and how often
    layer       `kib_a_token` of each row: the peak of allocated memory for each further token, without the weights
    two_ranks   for each method the worst share of the bound; `differences` of the losses; `time_out`: how the waiting
                rank ended
    documents   `first_ms` has the building of cuDNN's plans, `ms` has not; `batches`: milliseconds of new lengths
    ranks       `done` of `of` rows; the first `of_pairs` rows hold every two settings; `running`: the row of a killed
                block
    tiles       `ratio` is (time of the slowest rank) * degree / (time of one call over everything)
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
Result = dict[str, Any]
_LINES_KEPT = 40  # last lines of the output of a failed block
_MOST_BYTES = 16 * 2**20  # of a file that a block writes


@dataclass(frozen=True)
class Block:
    """A part of the check.

    Attributes:
        name: The name in `--blocks`.
        entry: `module:function`; the function takes a `Check`.
        limit: Seconds until the process is killed.
    """

    name: str
    entry: str
    limit: float


_HERE = "scripts.gpu_blocks"
# For a GPU that is lent for minutes: a call of less than ten minutes, one of less than four, and blocks that compile.
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
"""Groups of blocks that `--blocks` takes by name."""


def run_block(block: Block, device: str, scale: float = 1.0, out: Path | None = None) -> Result:
    """Run a block in a process of its own.

    Args:
        block: The block.
        device: "cuda" or "cpu".
        scale: Factor of the time limit.
        out: The file of the results; files of the block go to its folder. None: they are deleted.

    Returns:
        The result of the block, with name, seconds, limit and verdict: passed, skipped, failed, over its limit or died.
        Notes that the block made before it failed are kept.
    """
    limit = block.limit * scale
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
        notes = Path(folder, "notes.json")
        log = Path(folder, "log")
        command = [sys.executable, "-m", f"{_HERE}.child", block.entry, device, str(notes), str(limit)]
        path = os.pathsep.join(filter(None, [str(ROOT), _stand_ins(), os.environ.get("PYTHONPATH")]))
        # Temporary files of a killed block are deleted with the folder.
        environment = os.environ | {"PYTHONPATH": path, "TMPDIR": folder}
        set_allocator(environment)
        if device == "cpu":  # even on a machine with GPUs; one thread waits for no other program
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
                with suppress(ProcessLookupError):  # processes of the block may outlive it
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = round(time.monotonic() - started, 1)
        result: Result = {"verdict": "failed", "headline": "", "problems": [], "facts": {}}
        with suppress(OSError, ValueError):
            result |= json.loads(notes.read_text())
        if code != 0:
            result["verdict"] = _why(code, limit)
        files = _kept(Path(folder, KEPT), out)
        if result["verdict"] not in ("passed", "skipped"):
            result["log"] = log.read_text(errors="replace").splitlines()[-_LINES_KEPT:]
    return {"name": block.name, "seconds": seconds, "limit": limit} | result | ({"files": files} if files else {})


def _kept(folder: Path, out: Path | None) -> list[str]:
    """Move the files of a block to the folder of `out`, with the name of `out` as prefix.

    Returns:
        The name of each file, or why a file is not kept.
    """
    names = []
    for file in sorted(folder.iterdir()) if out is not None and folder.is_dir() else ():
        if file.stat().st_size > _MOST_BYTES:
            names.append(f"{file.name} is not kept: {file.stat().st_size:,} bytes")
            continue
        names.append(f"{out.stem}_{file.name}")
        shutil.move(file, out.with_name(names[-1]))
    return names


def _stand_ins() -> str:
    """Return the folder of stand-ins for packages that a bare machine lacks; empty if the package is installed."""
    return "" if find_spec("tiktoken") else str(ROOT / "scripts" / "gpu_blocks" / "stand_ins")


def _why(code: int | None, limit: float) -> str:
    """Return the verdict on a block whose exit code is not 0. A code of None: the block was killed at its limit."""
    if code is None:
        return f"over its limit of {limit:g} s"
    return f"died ({signal.Signals(-code).name})" if code < 0 else "failed"


def machine(device: str) -> Result:
    """Return versions and GPUs of this machine, without using memory of a GPU.

    Args:
        device: "cuda" or "cpu".
    """
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


def check(blocks: Iterable[Block], head: Result, device: str, out: Path | None, scale: float = 1.0) -> list[Result]:
    """Run blocks, print a line for each, and write the file again after each block.

    Args:
        blocks: The blocks.
        head: The entries at the start of the file.
        device: "cuda" or "cpu".
        out: The file; None for no file.
        scale: Factor of all time limits.

    Returns:
        The result of each block.
    """
    results: list[Result] = []
    for block in blocks:
        result = run_block(block, device, scale, out)
        results.append(result)
        problem = f"; {result['problems'][0]}" if result["problems"] else ""
        print(
            f"{block.name:10}{result['seconds']:7.1f} s  {result['verdict']:12}  {result['headline']}{problem}",
            flush=True,
        )
        if out is not None:
            write(out, head | {"seconds": sum(each["seconds"] for each in results), "blocks": results})
    return results


def write(path: Path, content: Result) -> None:
    """Write a JSON file whole or not at all.

    Args:
        path: The file.
        content: The content.
    """
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(path)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line. `blocks` is the list of blocks to run.

    Args:
        argv: The words of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [block.name for block in BLOCKS]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run with small shapes")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="file of the results, written after each block")
    parser.add_argument(
        "--blocks", default=",".join(names), metavar="A,B", help=f"blocks to run, of {', '.join((*CALLS, *names))}"
    )
    parser.add_argument("--limit-scale", type=float, default=1.0, metavar="X", help="all time limits times this")
    parser.add_argument("--commit", metavar="REV", help="commit of the code, for a copy without history")
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
    """Check the project, and write the results.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code.
    """
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
    failed = [result["name"] for result in results if result["verdict"] not in ("passed", "skipped")]
    print(f"failed: {', '.join(failed)}" if failed else "no block failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
