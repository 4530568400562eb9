"""Run Triton kernels of other packages on CPUs, in Triton's interpreter: for a process with TRITON_INTERPRET = 1.

The interpreter calls a kernel's function for each program of its grid, on NumPy arrays. It lacks three things: there is
no device on which configurations could be timed, so the first one is taken; counters of loops are plain integers, which
have no `.to`; and it changes Triton's functions while a kernel runs, so that ranks that are threads take turns.
"""

import builtins
import importlib
import threading
from collections.abc import Iterator
from typing import Any

from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

_TURN = threading.Lock()


def prepare(*modules: str) -> None:
    """Complete the interpreter; modules: those with kernels whose counters must be tensors, as they are if compiled."""
    run = interpreter.GridExecutor.__call__

    def in_turn(self: object, *args: Any, **kwargs: Any) -> None:
        with _TURN:
            run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = in_turn
    Autotuner._bench = lambda self, *_, config, **__: [float(self.configs.index(config))] * 3
    for name in modules:
        importlib.import_module(name).range = _counted


def _counted(*bounds: Any) -> Iterator[Any]:
    whole = [int(x.handle.data.item()) if hasattr(x, "handle") else int(x) for x in bounds]
    return map(interpreter._implicit_cvt, builtins.range(*whole))
