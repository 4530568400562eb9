"""Out of memory: the error is raised again, and every setting its message names can be used as it stands."""

import re

import pytest
import torch

from trainer.components.out_of_memory import is_out_of_memory, memory_savers, out_of_memory_explained
from trainer.config.loader import parse_command_line
from trainer.job import resolve

CPU = torch.device("cpu")
RUNS = [
    (1, []),
    (1, ["--training.local_batch_size=9", "--training.seq_len=1"]),
    (2, ["--activation_checkpoint.mode=selective", "--parallelism.fsdp_reshard_after_forward=never"]),
    (4, ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"]),
    (8, ["--parallelism.tensor_parallel_degree=2", "--parallelism.context_parallel_degree=2"]),
    (2, ["--parallelism.tensor_parallel_degree=2", "--parallelism.disable_loss_parallel", "--training.seq_len=6"]),
    (1, ["--training.mixed_precision_param=float32", "--training.global_batch_size=16"]),
    (2, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatch_size=4"]),
    (
        4,
        [
            *["--parallelism.pipeline_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2"],
            "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
        ],
    ),
    (2, ["--activation_checkpoint.mode=memory_budget", "--compile.enable", "--parallelism.fsdp_forward_prefetch=2"]),
]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("world_size", "arguments"), RUNS)
def test_each_setting_is_accepted_and_changes_something(
    world_size: int, arguments: list[str], device_type: str
) -> None:
    config = parse_command_line(arguments).config
    for saver in memory_savers(resolve(config, world_size, device_type)):
        setting, colon, _ = saver.partition(": ")
        assert colon
        ranks = re.search(r" on (\d+) ranks", setting)
        pairs = re.findall(r"(\w+\.\w+) = (\S+)", setting)
        assert pairs
        changed = parse_command_line([*arguments, *(f"--{key}={value.strip(chr(34))}" for key, value in pairs)]).config
        assert changed != config
        resolve(changed, int(ranks[1]) if ranks else world_size)


def keys(world_size: int, *arguments: str, device_type: str = "cuda") -> set[str]:
    config = parse_command_line(list(arguments)).config
    savers = memory_savers(resolve(config, world_size, device_type))
    return {saver.split(" = ")[0] for saver in savers}


def test_what_is_at_its_limit_is_not_named() -> None:
    more_ranks = {"parallelism.data_parallel_shard_degree"}
    at_their_limit = [
        "--training.local_batch_size=1",
        "--activation_checkpoint.mode=full",
        "--activation_checkpoint.offload=inputs",
        "--activation_checkpoint.mlp_chunk_tokens=1",
        "--training.enable_cpu_offload",
        "--training.seq_len=1",
    ]
    assert keys(1, *at_their_limit) == more_ranks
    for i, setting in enumerate(at_their_limit):
        key = setting.removeprefix("--").split("=")[0]
        assert key in keys(1, *at_their_limit[:i], *at_their_limit[i + 1 :])
    assert "training.enable_cpu_offload" not in keys(1, device_type="cpu")  # parameters are in host memory already


def test_the_error_continues_with_the_settings() -> None:
    config = parse_command_line([]).config
    with pytest.raises(torch.OutOfMemoryError) as error, out_of_memory_explained(resolve(config, 1)):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")
    assert str(error.value).startswith("CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    for name in ("training.local_batch_size = 4", 'activation_checkpoint.mode = "full"', "training.seq_len = 1024"):
        assert name in str(error.value)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)


def test_an_allocation_that_fails_in_host_memory_counts() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)


def test_other_errors_are_left_alone() -> None:
    config = parse_command_line([]).config
    with (
        pytest.raises(RuntimeError, match=r"^something else$"),
        out_of_memory_explained(resolve(config, 1)),
    ):
        raise RuntimeError("something else")
