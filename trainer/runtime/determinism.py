"""Deterministic kernels: the same bits in every run of one layout.

State of the process: Deterministic algorithms, new tensors that stay unfilled with them, cuDNN, and cuBLAS's workspace,
for the run.
"""

import os

import torch

_REPRODUCIBLE_WORKSPACES = (":4096:8", ":16:8")


def set_determinism(on: bool) -> None:
    """Allow deterministic kernels only, or all kernels. Call it before the first matrix product of the process.

    cuBLAS reads its setting from the environment when it starts. A value that is not reproducible is replaced.

    Args:
        on: Allow deterministic kernels only.
    """
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on
    # PyTorch would write NaN into each new tensor, most of the cost of determinism: no bits of a result depend on it.
    torch.utils.deterministic.fill_uninitialized_memory = not on
    if on:
        torch.backends.cudnn.benchmark = False  # it chooses kernels by their time
        if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _REPRODUCIBLE_WORKSPACES:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = _REPRODUCIBLE_WORKSPACES[0]
