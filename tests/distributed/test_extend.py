"""The preset that extends published weights, up to the first step, on a tiny model in place of the 8B."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import WorkerPool
from tests.hf_decoders import hf_model
from trainer.config.loader import parse_command_line
from trainer.config.schema import Model
from trainer.data.tokenizers.tokenizer import default_tokenizer_path
from trainer.families.decoder_args import TransformerArgs
from trainer.families.layer_kinds import RopeScaling
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.trainer import Trainer

SHORT, LONG = 32, 256
TINY = TransformerArgs(
    dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_hidden_dim=96, vocab_size=4352, max_seq_len=SHORT, norm_eps=1e-5
)
# What a laptop changes: sizes, number formats, and degrees where a case asks for it.
SMALL = [
    f"--training.seq_len={LONG}",
    "--training.global_batch_size=2",
    "--training.data_streams=4",
    "--training.dtype=float64",
    "--compile.no-enable",
    "--metrics.no-enable_tensorboard",
    "--optimizer.implementation=foreach",
]


def first_step(folder: str, changes: list[str]) -> dict:
    """Run the first step of the preset; return its results, and the settings that it computed with."""
    process = Process.from_environment()
    arguments = ["--job.config_file=llama3_8b_extend", *SMALL, f"--job.dump_folder={folder}/run", *changes]
    arguments += [f"--model.flavor={folder}/hf", f"--checkpoint.initial_load_path={folder}/hf"]
    arguments += [
        f"--model.tokenizer_path={default_tokenizer_path()}",
        f"--training.dataset_path={folder}/data/*/*.jsonl",
    ]
    config = parse_command_line(arguments).config
    with process_group(process, config.comm):
        trainer = Trainer(resolve(config, process.world_size, process.device.type), process.device)
        weight = trainer.model_parts[0].norm.weight
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()
        trainer.train_step(1)
        trainer.metrics.close()
    return {"loss": trainer.metrics.last_loss, "norm": weight.detach(), "scaling": trainer.job.model.rope_scaling}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_model("llama3", TINY).save_pretrained(tmp_path / "hf")
    for name, words in (("long", 600), ("short", 10)):
        (tmp_path / "data" / name).mkdir(parents=True)
        lines = [json.dumps({"text": f"{name} {i} " + "the number is " * words}) for i in range(8)]
        (tmp_path / "data" / name / "a.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow
def test_the_first_step_is_that_of_one_process(pool: WorkerPool, folder: Path) -> None:
    """With the published weights and stretched positions; and these matter: without, the loss is another."""
    (one,) = pool.run(1, first_step, str(folder), ["--parallelism.context_parallel_degree=1"])
    four = pool.run(4, first_step, str(folder), ["--parallelism.context_parallel_degree=4", "--job.description=four"])[
        0
    ]
    (short,) = pool.run(
        1, first_step, str(folder), ["--parallelism.context_parallel_degree=1", "--model.rope_scaling=1"]
    )
    assert abs(four["loss"] - one["loss"]) <= 1e-10 * one["loss"]
    assert abs(short["loss"] - one["loss"]) > 1e-6 * one["loss"]
    theirs = hf_model("llama3", TINY).model.norm.weight
    for run in (one, four):
        torch.testing.assert_close(run["norm"], theirs.detach(), rtol=0, atol=0)
        assert run["scaling"] == RopeScaling(8.0)


def test_the_preset_is_for_the_published_model() -> None:
    config = parse_command_line(["--job.config_file=llama3_8b_extend"]).config
    job = resolve(config, 8, "cuda", missing=(missing := []))
    assert (job.model.n_params(), job.model.max_seq_len, job.degrees.cp) == (8_030_261_248, 131_072, 8)
    assert len(missing) == 3  # weights, tokenizer, data
    assert config.model.tokenizer_path == config.checkpoint.initial_load_path != Model().tokenizer_path
