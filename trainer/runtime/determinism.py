"""Prepare the process of a rank: its seed, and deterministic kernels, the same bits in every run of one layout.

State of the process: The seed of PyTorch, deterministic algorithms, new tensors that stay unfilled with them, cuDNN,
cuBLAS's workspace, and one filter of warnings, for the run.
"""

import os
import warnings

import torch

from trainer.config.schema import Training

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


def prepare_process(training: Training) -> None:
    """Seed PyTorch, set determinism, and ignore a warning that does not apply.

    Args:
        training: Table `[training]`.
    """
    torch.manual_seed(training.seed)
    set_determinism(training.deterministic)
    # The sequence-parallel embedding returns a view, and nothing changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
