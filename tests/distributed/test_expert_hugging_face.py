"""Law: ranks start from the experts of transformers and export them again; planned attention computes the same."""

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from peft import PeftModel

from lct_inference import generation
from tests.distributed import harness
from tests.distributed.harness import BASE, Record, RecordingTrainer, assert_parity
from tests.distributed.pool import WorkerPool
from tests.distributed.test_experts import ep
from tests.distributed.test_generation import opened
from tests.distributed.test_parity import degrees
from tests.hf_experts import hf_experts
from tests.hf_families import MODELS as FAMILIES
from tests.slow import slow
from tests.unit.test_expert_hugging_face import GPT_OSS, QWEN, logits_there, relative, whole_folder
from trainer.checkpoint.weights import load_weights
from trainer.commands import convert
from trainer.config.loader import parse_command_line
from trainer.config.schema import Model
from trainer.families.decoder_args import TransformerArgs
from trainer.hugging_face.folder import HFFolder
from trainer.hugging_face.reader import HFReader
from trainer.job import resolve
from trainer.models.model_spec import hf_model, model_spec
from trainer.runtime.process_group import Process, process_group

MODELS = {"qwen3_moe": replace(QWEN, vocab_size=4354), "gpt_oss": GPT_OSS}


def here_case(family: str, folder: str, texts: list[list[int]]) -> torch.Tensor:
    """Logits of the token after each text."""
    with opened(Model(name=family, flavor=folder)) as (part, job, dims), torch.no_grad():
        load_weights([HFReader(HFFolder(Path(folder)), hf_model(model_spec(family), job.model))], [part])
        return next(generation._logits(part, job, dims, texts, 1 + max(map(len, texts))))


@pytest.mark.parametrize("family", ["gpt_oss", *slow("qwen3_moe")])
def test_logits_are_those_of_transformers(pool: WorkerPool, tmp_path: Path, family: str) -> None:
    args: TransformerArgs = MODELS[family]
    theirs = hf_experts(family, args)
    theirs.save_pretrained(tmp_path)
    texts = [[i * 7 % 50 for i in range(length)] for length in (1, 5, 29)]
    got = pool.run(1, here_case, family, str(tmp_path), texts)[0]
    for text, logits in zip(texts, got, strict=True):
        wanted = logits_there(theirs, args, torch.tensor([text]))[0, -1]
        assert relative(logits, wanted) < 1e-10


def through_case(family: str, folder: str, output: str, arguments: list[str]) -> str:
    """Take the weights of a folder, and export them without a step."""
    settings = [f"--model.name={family}", f"--model.flavor={folder}", f"--checkpoint.initial_load_path={folder}"]
    settings += [
        f"--job.dump_folder={output}",
        "--training.dtype=float64",
        "--checkpoint.export_dtype=float64",
        *harness.EXPORTED,
    ]
    config = parse_command_line([*BASE, *settings, *arguments]).config
    process = Process.from_environment()
    with process_group(process, config.comm):
        job = resolve(config, process.world_size, process.device.type)
        trainer = RecordingTrainer(job, process.device, record=Record())
        written = harness.exported(trainer, 1)
        trainer.metrics.close()
    return str(written)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, [*degrees(tp=2), ep(2)]),
        pytest.param(4, [*degrees(dp_shard=4), ep(2)], marks=pytest.mark.slow),
        pytest.param(4, [*degrees(cp=2, pp=2)], marks=pytest.mark.slow),
    ],
)
def test_ranks_read_their_experts_and_write_all(
    pool: WorkerPool, tmp_path: Path, family: str, ranks: int, arguments: list[str]
) -> None:
    hf_experts(family, MODELS[family]).save_pretrained(tmp_path / "hf")
    written = pool.run(ranks, through_case, family, str(tmp_path / "hf"), str(tmp_path / "run"), arguments)[0]
    original, back = whole_folder(tmp_path / "hf"), whole_folder(Path(written))
    assert original.keys() == back.keys()
    assert [name for name, x in original.items() if not torch.equal(back[name], x)] == []


def beside_case(family: str, modules: list[str], folder: str, arguments: list[str]) -> Record:
    """Train adapters of attention, or of a shared expert, with frozen loaded experts."""
    with mock.patch.object(harness, "VOCAB", 4354):
        settings = [f"--model.name={family}", f"--model.flavor={folder}", f"--checkpoint.initial_load_path={folder}"]
        adapters = ["--lora.rank=4", "--lora.modules", *modules]
        return harness.run_layout([*settings, *adapters, "--training.dtype=float64", *arguments])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "modules"), [("qwen3_moe", ["wq", "wv", "wo"]), ("qwen2_moe", ["wq", "w1", "w2", "w3"])]
)
def test_adapters_train_beside_frozen_experts(
    pool: WorkerPool, tmp_path: Path, family: str, modules: list[str]
) -> None:
    args = replace({**MODELS, **dict(FAMILIES.values())}[family], n_heads=8, n_kv_heads=4)
    hf_experts(family, args).save_pretrained(tmp_path)
    case = beside_case, family, modules, str(tmp_path)
    wanted = pool.run(1, *case, [])[0]
    got = pool.run(2, *case, [*degrees(tp=2), ep(2)])[0]
    assert_parity(got, wanted, 1e-10)
    assert all(name.endswith(("lora_a", "lora_b")) for name in got.gradients[0])


ADAPTERS = ["--lora.rank=4", "--lora.alpha=16", "--lora.modules", "wq", "wo", "w13", "w2"]


def adapted_case(family: str, folder: str, output: str, arguments: list[str]) -> Record:
    """Train adapters of attention and experts of given weights, save them, and export their sum."""
    settings = [f"--model.name={family}", f"--model.flavor={folder}", f"--checkpoint.initial_load_path={folder}"]
    settings += [f"--job.dump_folder={output}", "--training.dtype=float64", "--checkpoint.export_dtype=float64"]
    settings += ["--training.data_streams=8", *harness.EXPORTED, *ADAPTERS]
    config, process = parse_command_line([*BASE, *settings, *arguments]).config, Process.from_environment()
    with process_group(process, config.comm), mock.patch.object(harness, "VOCAB", MODELS[family].vocab_size):
        record = Record()
        trainer = RecordingTrainer(harness.resolved(config, process), process.device, record=record)
        for step in range(1, harness.STEPS + 1):
            trainer.train_step(step)
        record.weights = trainer.gather_stages(lambda p: p)
        harness.exported(trainer, harness.STEPS)
        trainer.metrics.close()
    if process.rank:
        return Record()
    lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    record.metrics = [json.loads(line) for line in lines]
    return record


def adapted(pool: WorkerPool, family: str, folder: Path, ranks: int, arguments: list[str]) -> tuple[Record, Path]:
    """The record of a run of adapters, and the folder of its sum."""
    output = folder / f"run-{ranks}"
    record = pool.run(ranks, adapted_case, family, str(folder / "hf"), str(output), arguments)[0]
    return record, output / "checkpoint" / f"step-{harness.STEPS}-hf"


@pytest.mark.parametrize(
    ("family", "ranks", "arguments"),
    [
        ("qwen3_moe", 2, [*degrees(tp=2), ep(2)]),
        *slow(
            ("gpt_oss", 4, [*degrees(cp=2, tp=2), ep(2)]),
            ("gpt_oss", 4, [*degrees(dp_shard=4), ep(2), "--training.local_batch_size=1"]),
            ("qwen3_moe", 2, degrees(dp_shard=2)),
            ("qwen3_moe", 4, [*degrees(dp_shard=2, pp=2), ep(2)]),
            ("qwen3_moe", 4, [*degrees(dp_shard=2, cp=2), ep(2), "--activation_checkpoint.mode=full"]),
            ("qwen3_moe", 2, [*degrees(cp=2), ep(2), "--activation_checkpoint.mlp_chunk_tokens=3"]),
        ),
    ],
)
def test_adapters_of_experts_train_and_merge_alike_on_every_layout(
    pool: WorkerPool, tmp_path: Path, family: str, ranks: int, arguments: list[str]
) -> None:
    args = replace(MODELS[family], n_heads=8, n_kv_heads=4)
    hf_experts(family, args).save_pretrained(tmp_path / "hf")
    wanted, merged = adapted(pool, family, tmp_path, 1, [])
    got, merged_there = adapted(pool, family, tmp_path, ranks, arguments)
    assert_parity(got, wanted, 1e-10)
    names = {name.rpartition(".")[2] for name in got.gradients[0]}
    assert names == {"lora_a", "lora_b", "w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"}
    original, one, many = map(whole_folder, (tmp_path / "hf", merged, merged_there))
    changed = set()
    for name, x in one.items():
        assert relative(many[name], x) < 1e-10
        if not torch.equal(original[name], x):
            changed.add(name.removesuffix(".weight").rpartition(".")[2])
    experts = {"gate_up_proj", "down_proj"} if family == "gpt_oss" else {"gate_proj", "up_proj", "down_proj"}
    assert changed == {"q_proj", "o_proj", *experts}


@pytest.mark.parametrize("family", ["qwen3_moe", *slow("gpt_oss")])
def test_peft_loads_the_adapters_of_experts(pool: WorkerPool, tmp_path: Path, family: str) -> None:
    """Its logits equal the merged weights' logits, and differ from the logits before training."""
    args: TransformerArgs = MODELS[family]
    theirs = hf_experts(family, args)
    theirs.save_pretrained(tmp_path / "hf")
    _, merged = adapted(pool, family, tmp_path, 1, [])
    assert convert.main(["to-peft", str(tmp_path / "run-1"), str(tmp_path / "adapters")]) == 0
    tokens = torch.arange(0, 63, 7)[None]
    before = logits_there(theirs, args, tokens)
    whole, base = (type(theirs).from_pretrained(path, dtype=torch.float64) for path in (merged, tmp_path / "hf"))
    for model in (whole, base):
        model.set_experts_implementation("eager")  # the other ones know no float64
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapters")
    sums = logits_there(whole, args, tokens)
    assert relative(logits_there(loaded.to(torch.float64), args, tokens), sums) < 1e-7  # the file is float32
    assert relative(before, sums) > 1e-4
