"""A real job with one rank that fails: `FAULT="rank kind place file" python faulty_train.py [launcher's arguments]`.

It calls the launcher's main with this module as the program of each rank. A rank plants the fault around one method,
and then runs its own program. Step 3 has the faults of a step, and the checkpoint of step 4 the fault of saving. The
file is made when the rank fails.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.runtime import launch
from trainer.runtime.rank_processes import flight_record

STEP_OF_FAULT = 3
CHECKPOINT_OF_FAULT = 4


def fail(kind: str) -> None:
    """Let this rank die, stop, hang (its threads live) or raise; SIG...: let it signal the launcher, once."""
    mark = Path(os.environ["FAULT"].split(maxsplit=3)[3])
    if kind.startswith("SIG"):
        if not mark.exists():
            mark.touch()
            os.kill(os.getppid(), signal.Signals[kind])
        return
    mark.touch()
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        while True:
            time.sleep(3600)
    raise RuntimeError("planted fault")


def before(owner: Any, name: str, fault: Callable[..., None]) -> None:
    """From now on `owner.name` calls `fault` with its arguments first."""
    wrapped = getattr(owner, name)

    def with_fault(*args: Any, **kwargs: Any) -> Any:
        fault(*args, **kwargs)
        return wrapped(*args, **kwargs)

    setattr(owner, name, with_fault)


def plant(kind: str, place: str) -> None:
    """Let this rank fail at a place.

    Places: start, model, parts, compile, forward, backward, optimizer, checkpoint, validation.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from trainer.checkpoint.dcp_files import Writer
    from trainer.models.block import TransformerBlock
    from trainer.tasks.validation import Validation
    from trainer.trainer import Trainer

    if place == "start":
        before(torch.distributed, "init_process_group", lambda *_, **__: fail(kind))
        return
    if place == "model":
        before(Trainer, "build_task", lambda *_: fail(kind))
        return
    if place == "parts":
        before(Trainer, "build_model_parts", lambda *_: fail(kind))
        return
    if place == "validation":
        before(Validation, "run", lambda *_, **__: fail(kind))
        return
    if place == "compile":
        from torch._dynamo.output_graph import OutputGraph

        before(OutputGraph, "compile_and_call_fx_graph", lambda *_, **__: fail(kind))
        return
    steps = []
    before(Trainer, "train_step", lambda _, step: steps.append(step))

    def at_step(*_: Any, **__: Any) -> None:
        if steps[-1] == STEP_OF_FAULT:
            fail(kind)

    def in_backward(_: TransformerBlock, x: torch.Tensor, *__: Any, **___: Any) -> None:
        if x.requires_grad:
            x.register_hook(at_step)

    def in_checkpoint(writer: Writer, *_: Any) -> None:
        if f"step-{CHECKPOINT_OF_FAULT}" in str(writer.path):
            fail(kind)

    if place == "forward":
        before(TransformerBlock, "forward", at_step)
    elif place == "backward":
        before(TransformerBlock, "forward", in_backward)
    elif place == "optimizer":
        register_optimizer_step_pre_hook(at_step)
    else:
        assert place == "checkpoint", place
        before(Writer, "write_data", in_checkpoint)


def act_as_watchdog(folder: Path) -> None:
    """Act like NCCL's watchdog in a rank that waits: write the last collectives to a file, and abort."""

    def watch() -> None:
        while not Path(os.environ["FAULT"].split(maxsplit=3)[3]).exists():
            time.sleep(0.1)
        time.sleep(1)
        folder.mkdir(exist_ok=True)
        (folder / flight_record(os.environ["RANK"])).write_bytes(b"")
        os.abort()

    threading.Thread(target=watch, daemon=True).start()


def rank_process() -> int:
    """The program of a rank, with the fault if this is the rank that has it."""
    from trainer.commands import rank as program

    rank, kind, place, _ = os.environ["FAULT"].split(maxsplit=3)
    if os.environ["RANK"] == rank:
        plant(kind, place)
    elif "WATCHDOG" in os.environ:
        act_as_watchdog(Path(os.environ["WATCHDOG"]))
    return program.command_line()


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(rank_process())
    # Forked where they can be, as the ranks of `lct train` on CPUs.
    sys.exit(
        launch.main(["--program", "tests.integration.faulty_train", "--preload", "trainer.trainer", *sys.argv[1:]])
    )
