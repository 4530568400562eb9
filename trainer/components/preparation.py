"""Prepare the process of a rank for a job, and check that its machine can run it.

State of the process: The seed of PyTorch and one filter of warnings, for the run.
"""

import warnings

import torch

from trainer.components.profiling import check_memory_snapshot
from trainer.config.schema import Training
from trainer.job.record import ResolvedJob
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.determinism import set_determinism
from trainer.runtime.dump_folder import save_configuration
from trainer.transforms.compile import check_compiler
from trainer.transforms.float8 import check_float8_machine
from trainer.transforms.quantized import check_quantization_package


def prepare_process(training: Training) -> None:
    """Seed PyTorch, set determinism, and ignore a warning that does not apply.

    Args:
        training: Table `[training]`.
    """
    torch.manual_seed(training.seed)
    set_determinism(training.deterministic)
    # The sequence-parallel embedding returns a view, and nothing changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


def prepare_machine(job: ResolvedJob, dims: ParallelDims, device: torch.device) -> None:
    """Check that this machine can run the job; the first rank saves the configuration.

    Args:
        job: The resolved job.
        dims: The meshes of the run.
        device: The device of this rank.

    Raises:
        ConfigError: The machine lacks something, or the configuration cannot be saved.
    """
    check_compiler(job.compilation, device)
    check_float8_machine(
        job.config.float8, device, norms_have_parameters=job.model.norms_have_parameters
    )
    check_quantization_package(job.config.lora)
    check_memory_snapshot(job.config.profiling, device)
    if dims.is_first:
        save_configuration(job.user_config)
