"""Start one process per rank of this node: `python -m trainer.launch --nproc-per-node N [train.py arguments]`.

`torchrun train.py ...` does the same job; this one returns the failing rank's own exit code and says in one line which
rank failed, where torchrun returns 1 and prints a trace of its own.
"""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def main(argv: list[str] | None = None) -> int:
    """Run the ranks of this node to their end; the exit code of the job.

    Rendezvous of several nodes at MASTER_ADDR:MASTER_PORT; 128 + the signal's number when a signal ended the job.
    """
    arguments, train_arguments = _parser().parse_known_args(argv)
    several = arguments.nnodes > 1
    config = LaunchConfig(
        min_nodes=arguments.nnodes,
        max_nodes=arguments.nnodes,
        nproc_per_node=arguments.nproc_per_node,
        run_id=arguments.rdzv_id,
        rdzv_backend="c10d",
        # Alone, a free port is chosen, so that jobs of one machine do not meet.
        rdzv_endpoint=f"{arguments.master_addr}:{arguments.master_port}" if several else "localhost:0",
        local_addr=None if several else "localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)  # our one line says it
    try:
        elastic_launch(config, sys.executable)("-u", str(_TRAIN), *train_arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"exit code {failure.exitcode}" if failure.exitcode > 0 else failure.signal_name()
        if failure.exitcode != 2:  # a wrong setting has been named already
            print(f"error: rank {rank} failed first ({how}); the other ranks were stopped", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        print(f"error: stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainer.launch",
        description="Start one process per rank of this node; what is not listed here goes to train.py.",
        allow_abbrev=False,
    )
    environment = os.environ.get
    parser.add_argument("--nproc-per-node", type=int, required=True, help="ranks on this node")
    parser.add_argument("--nnodes", type=int, default=int(environment("NNODES", "1")), help="nodes of the job (NNODES)")
    parser.add_argument(
        "--master-addr", default=environment("MASTER_ADDR", "localhost"), help="first node (MASTER_ADDR)"
    )
    parser.add_argument(
        "--master-port", type=int, default=int(environment("MASTER_PORT", "29500")), help="(MASTER_PORT)"
    )
    parser.add_argument("--rdzv-id", default=environment("RDZV_ID", "trainer"), help="name of the job (RDZV_ID)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
