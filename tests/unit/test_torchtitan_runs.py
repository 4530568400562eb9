"""Law: the runs of torchtitan's own integration tests of January 2025 are read, on as many ranks, from its own file."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from trainer.config.loader import parse_command_line
from trainer.job import resolve

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests/unit/torchtitan_configs/2025_01_debug_model.toml"
# Its data are in torchtitan's repository.
HERE = ["--training.dataset=python_stdlib", "--model.tokenizer_path=None"]
SAVES = "--checkpoint.enable_checkpoint"
PP = "--experimental.pipeline_parallel_"
CP = "--experimental.context_parallel_"
TP2 = "--training.tensor_parallel_degree 2"
SHARD = "--training.data_parallel_shard_degree"
REPLICATE = "--training.data_parallel_replicate_degree"
OFFLOAD = "--training.enable_cpu_offload --optimizer.early_step_in_backward"
# name -> (ranks, the options of each run, one after another in one folder)
RUNS: dict[str, tuple[int, list[str]]] = {
    "default": (4, ["--profiling.enable_profiling --metrics.enable_tensorboard"]),
    "1d_compile": (4, ["--training.compile"]),
    "1d_compile_sac_op": (
        4,
        ["--training.compile --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op"],
    ),
    "2d_eager": (4, [TP2]),
    "2d_compile": (4, [f"--training.compile {TP2}"]),
    "full_checkpoint": (4, [SAVES, f"{SAVES} --training.steps 20"]),
    "model_weights_only_fp32": (4, [f"{SAVES} --checkpoint.model_weights_only"]),
    "model_weights_only_bf16": (4, [f"{SAVES} --checkpoint.model_weights_only --checkpoint.export_dtype bfloat16"]),
    "pp_looped_zero_bubble": (4, [f"{PP}degree 4 {PP}schedule InterleavedZeroBubble"]),
    "pp_zbv": (2, [f"{PP}degree 2 {PP}schedule ZBVZeroBubble {PP}microbatch_size 1"]),
    "pp_1f1b": (2, [f"{PP}degree 2 {PP}schedule 1F1B {SHARD} 1"]),
    "pp_gpipe": (2, [f"{PP}degree 2 {PP}schedule GPipe {SHARD} 1"]),
    "pp_dp_1f1b": (4, [f"{PP}degree 2 {PP}schedule 1F1B {SHARD} 2"]),
    "pp_dp_gpipe": (4, [f"{PP}degree 2 {PP}schedule GPipe {SHARD} 2"]),
    "pp_tp": (4, [f"{PP}degree 2 {TP2}"]),
    "pp_dp_tp": (
        8,
        [f"{SAVES} {PP}degree 2 {SHARD} 2 {TP2}", f"{SAVES} {PP}degree 2 {SHARD} 2 {TP2} --training.steps 20"],
    ),
    "3d_compile": (8, [f"{PP}degree 2 {SHARD} 2 {TP2} --training.compile"]),
    "pp_looped_1f1b": (4, [f"{PP}degree 4 {PP}schedule Interleaved1F1B"]),
    "optimizer_foreach": (2, ["--optimizer.name AdamW --optimizer.implementation foreach"]),
    "optimizer_fused": (2, ["--optimizer.name AdamW --optimizer.implementation fused"]),
    "ddp": (4, [f"{SHARD}=1 {REPLICATE}=4"]),
    "hsdp": (4, [f"{SHARD}=2 {REPLICATE}=2"]),
    "cp_allgather": (4, [f"{CP}degree=4 {CP}rotate_method=allgather"]),
    "cp_alltoall": (4, [f"{CP}degree=4 {CP}rotate_method=alltoall"]),
    "hsdp+tp": (8, [f"{SHARD}=2 {REPLICATE}=2 {TP2}"]),
    "fsdp+cp": (4, [f"{SHARD}=2 {CP}degree=2"]),
    "hsdp+cp_without_dp_shard": (4, [f"{SHARD}=1 {REPLICATE}=2 {CP}degree=2"]),
    "hsdp+cp_with_dp_shard": (8, [f"{SHARD}=2 {REPLICATE}=2 {CP}degree=2"]),
    "fsdp+tp+cp": (8, [f"{SHARD}=2 {TP2} {CP}degree=2"]),
    "cpu_offload+opt_in_bwd+TP+DP+CP": (
        8,
        [f"{SAVES} {TP2} {CP}degree=2 {OFFLOAD}", f"{TP2} {CP}degree=2 {REPLICATE}=2 {OFFLOAD}"],
    ),
    "fsdp2_memory_estimation": (2, ["--memory_estimation.enabled"]),
    "test_generate": (2, [SAVES]),
    "fsdp_reshard_always": (2, ["--training.fsdp_reshard_after_forward always"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_read_as_it_is_written(name: str, tmp_path: Path) -> None:
    for options in RUNS[name][1]:
        command = parse_command_line(
            ["--job.config_file", str(FILE), f"--job.dump_folder={tmp_path}/run", *HERE, *options.split()]
        )
        job = resolve(command.config, RUNS[name][0], "cpu")
        assert job.degrees.world_size == RUNS[name][0]
        notes = " ".join(command.notes)
        assert ("follows the whole backward" in notes) == ("opt_in_bwd" in name)
        assert ("predict the memory of a rank" in notes) == ("memory_estimation" in name)
        assert command.config.checkpoint.last_save_model_only == ("weights_only" in name)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains(name: str, tmp_path: Path) -> None:
    """By the program itself, with short sequences: this is a laptop."""
    if "compile" in name and shutil.which("g++") is None:
        pytest.skip("compiling needs a C++ compiler")
    small = ["--training.seq_len=128", f"--job.dump_folder={tmp_path}/run"]
    for options in RUNS[name][1]:
        result = subprocess.run(
            [str(ROOT / "run_llama_train.sh"), *small, *HERE, *options.split()],
            env={**os.environ, "CONFIG_FILE": str(FILE), "NGPU": str(RUNS[name][0])},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert "training done" in result.stdout + result.stderr
