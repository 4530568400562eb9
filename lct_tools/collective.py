"""A sum over two ranks of this machine; the last line is its bandwidth in GB/s. `lct doctor` runs it as a program.

python -m lct_tools.collective gloo 64     # the back end, and the size in MiB
"""

import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

RANKS = 2
_TIMEOUT = timedelta(seconds=30)


def _rank(rank: int, backend: str, mebibytes: int, store: Path) -> None:
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=_TIMEOUT,
    )
    values = torch.ones(mebibytes * 2**18, device=device)
    dist.all_reduce(values)
    if not (values == RANKS).all():
        raise ValueError("the sum is wrong")
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(values)
    values[0].item()
    if rank == 0:
        print(f"{values.nbytes / (time.perf_counter() - started) / 1e9:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        settings = sys.argv[1], int(sys.argv[2]), Path(folder, "store")
        torch.multiprocessing.spawn(_rank, settings, nprocs=RANKS)
