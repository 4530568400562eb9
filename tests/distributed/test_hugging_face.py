"""Law: a model of transformers trains here, on every layout, to the losses and weights of its own loop there."""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.distributed import harness
from tests.distributed.checkpoint_cases import load_step_save, merged
from tests.distributed.harness import BASE, Record, RecordingTrainer, make_row, resolved
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.hf_decoders import hf_model, in_float64
from tests.hf_tensors import to_hf
from tests.slow import slow
from trainer.checkpoint.failed_save import CheckpointError
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.data.packing import IGNORE_INDEX
from trainer.families.decoder_args import TransformerArgs
from trainer.families.layer_kinds import RopeScaling
from trainer.families.registry import hf_families
from trainer.hugging_face import folder as hf_folder
from trainer.hugging_face import parts as hf_parts
from trainer.hugging_face import reader as hf_reader
from trainer.hugging_face.writer import NewFolder
from trainer.job import resolve
from trainer.models.model_spec import model_spec
from trainer.runtime.process_group import Process, process_group
from trainer.trainer import Trainer

STEPS, ROWS, SEQ_LEN = 3, 8, 16
LLAMA = TransformerArgs(
    dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_hidden_dim=96, vocab_size=4354, max_seq_len=SEQ_LEN, norm_eps=1e-6
)
MODELS: dict[str, TransformerArgs] = {
    "plain": LLAMA,
    "qwen3": replace(
        LLAMA, qk_norm=True, head_size=16, rope_scaling=RopeScaling(4.0, original_max_seq_len=8, kind="yarn")
    ),
    "qwen2": replace(LLAMA, attention_bias=True),
    "mistral": replace(LLAMA, sliding_window=5),
    "tied, scaled": replace(LLAMA, n_kv_heads=2, tie_embeddings=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8)),
}
FAMILIES = {name: name if name in hf_families() else "llama3" for name in MODELS}
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
SETTINGS = [*BASE, f"--training.steps={STEPS}", f"--training.seq_len={SEQ_LEN}", f"--training.global_batch_size={ROWS}"]


# ---- here


def train(folder: str, hf: str, dtype: str, arguments: list[str]) -> dict:
    """On each rank: start from the weights in `hf`, train, export; losses, weights, logits before the first step."""
    process = Process.from_environment()
    settings = ["--model.flavor=debugmodel", f"--model.path={hf}", f"--training.dtype={dtype}"]
    settings += [f"--job.dump_folder={folder}", f"--checkpoint.export_dtype={dtype}", *harness.EXPORTED, *arguments]
    config = parse_command_line([*SETTINGS, *settings]).config
    with mock.patch.object(harness, "VOCAB", LLAMA.vocab_size), process_group(process, config.comm):
        trainer = RecordingTrainer(resolved(config, process), process.device, record=Record())
        logits = None
        if process.world_size == 1:
            (part,) = trainer.model_parts
            with torch.no_grad():
                logits = part.output(part(rows(0)["tokens"]))
        for step in range(1, STEPS + 1):
            trainer.train_step(step)
        weights = trainer.gather_stages(lambda p: p)
        output = harness.exported(trainer, STEPS)
        trainer.metrics.close()
    if process.rank:
        return {}
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {"metrics": [json.loads(line) for line in lines], "weights": weights, "output": output, "logits": logits}


# ---- there


def rows(step: int) -> dict[str, torch.Tensor]:
    """The batch of a step, from 0."""
    with mock.patch.object(harness, "VOCAB", LLAMA.vocab_size):
        numbers = range(ROWS * step, ROWS * (step + 1))
        made = [make_row(i, SEQ_LEN, no_labels=step == 0 and i % 2 == 1) for i in numbers]
    return {name: torch.stack([row[name] for row in made]) for name in made[0]}


@contextmanager
def precise(model: str, dtype: str) -> Iterator[None]:
    """Inside, transformers computes wholly in this data type, with the frequencies of float64 in float64."""
    with in_float64(FAMILIES[model], MODELS[model], SEQ_LEN) if dtype == "float64" else nullcontext():
        yield


@cache
def initial(model: str) -> PreTrainedModel:
    theirs = hf_model(FAMILIES[model], MODELS[model])
    for parameter in theirs.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0.0, 0.1)
        else:
            nn.init.normal_(parameter, 1.0, 0.1)
    return theirs


def their_own(model: str, dtype: str, lrs: list[float]) -> tuple[list[float], PreTrainedModel, torch.Tensor]:
    """Losses and final weights of a plain loop over the model of transformers; logits before the first step."""
    theirs = hf_model(FAMILIES[model], MODELS[model])
    theirs.load_state_dict(initial(model).state_dict())
    theirs.to(getattr(torch, dtype)).train()
    embeddings = theirs.get_input_embeddings().weight
    decaying = [p for p in theirs.parameters() if p.ndim > 1 and p is not embeddings]
    others = [p for p in theirs.parameters() if p.ndim == 1 or p is embeddings]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    with precise(model, dtype):
        before = logits_of(theirs)
        for step, lr in enumerate(lrs):
            batch = rows(step)
            valid = int((batch["labels"] != IGNORE_INDEX).sum())
            logits = theirs(batch["tokens"], use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / valid
            optimizer.zero_grad()
            loss.backward()
            gradients = [p.grad for p in theirs.parameters()]
            norm = torch.stack([g.double().norm() for g in gradients]).norm().item()
            for gradient in gradients:
                gradient *= min(0.5 / norm, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            losses.append(loss.item())
    return losses, theirs, before


def logits_of(theirs: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return theirs(rows(0)["tokens"], use_cache=False).logits


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check(pool: WorkerPool, folder: Path, model: str, dtype: str, layout: str) -> dict:
    """Train on a layout, compare with transformers' loop, and load the export there."""
    hf = folder / "hf"
    initial(model).save_pretrained(hf, max_shard_size="300KB")
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    arguments = [*arguments, f"--model.name={FAMILIES[model]}"]
    got = pool.run(world_size, train, str(folder / "run"), str(hf), dtype, arguments)[0]
    losses, theirs, before = their_own(model, dtype, [line["lr"] for line in got["metrics"]])
    for step, wanted in zip(got["metrics"], losses, strict=True):
        assert abs(step["loss"] - wanted) <= TOLERANCE[dtype] * wanted
    if got["logits"] is not None:
        assert error(got["logits"], before) < TOLERANCE[dtype]
    # The export: bit for bit the weights of the run.
    exported = safetensors.torch.load_file(got["output"] / "model.safetensors")
    wanted = to_hf(model_spec(FAMILIES[model]), MODELS[model], got["weights"].items())
    assert exported.keys() == wanted.keys()
    assert [name for name, x in wanted.items() if not torch.equal(x, exported[name])] == []
    loaded = AutoModelForCausalLM.from_pretrained(got["output"], dtype=getattr(torch, dtype))
    assert loaded.config.tie_word_embeddings == MODELS[model].tie_embeddings
    with precise(model, dtype):
        assert error(logits_of(loaded), logits_of(theirs)) < TOLERANCE[dtype]
    return exported


CASES = [
    ("plain", "float32", "one"),
    *slow(
        ("qwen3", "float64", "cp2+pp2"),
        ("tied, scaled", "float64", "fsdp2+tp2"),
        ("qwen3", "float64", "fsdp2+tp2"),
        ("qwen2", "float64", "tp2+pp2"),
        ("mistral", "float64", "cp2+tp2"),
        ("plain", "float32", "tp2+pp2"),
        *(("plain", "float64", layout) for layout in ("one", "pp2", "fsdp2+tp2", "cp2+tp2", "hsdp2x2", "fsdp2+pp2")),
        *(("plain", "float64", layout) for layout in ("cp2+pp2", "fsdp2+cp2+tp2", "fsdp2+tp2+pp2")),
    ),
]


@pytest.mark.parametrize(("model", "dtype", "layout"), CASES)
def test_a_model_trains_here_as_there(pool: WorkerPool, tmp_path: Path, model: str, dtype: str, layout: str) -> None:
    check(pool, tmp_path, model, dtype, layout)


def unmoved(folder: str, hf: str) -> float:
    """The first loss, if rotary rows are read without a change of their order."""
    with mock.patch.object(hf_reader.HFReader, "read", unmoved_rows):
        return train(folder, hf, "float64", [])["metrics"][0]["loss"]


def unmoved_rows(reader: hf_reader.HFReader, name: str, offsets: list[int], lengths: list[int]) -> torch.Tensor:
    return hf_parts.read_part(reader._stored[reader.pairs[name][1].name], offsets, lengths)


def test_the_test_sees_rotary_rows_in_the_wrong_order(pool: WorkerPool, tmp_path: Path) -> None:
    initial("plain").save_pretrained(tmp_path / "hf")
    wrong = pool.run(1, unmoved, str(tmp_path / "run"), str(tmp_path / "hf"))[0]
    (right,), *_ = their_own("plain", "float64", [1e-3])
    assert abs(wrong - right) > 1e-6 * right


# ---- what a rank reads, and what goes wrong


def bytes_read(folder: str, hf: str, arguments: list[str]) -> tuple[int, int, int]:
    """Bytes that this rank reads from the weights' files, those that its part has, and readings of all headers."""
    read, real = [], hf_parts._read_exactly
    headers = mock.patch.object(hf_folder, "read_folder", side_effect=hf_folder.read_folder)

    def counted(file, start: int, into: memoryview) -> None:
        read.append(len(into))
        real(file, start, into)

    count = mock.patch.object(hf_parts, "_read_exactly", counted)
    with count, headers as folders, trainer_from(folder, hf, arguments) as trainer:
        parameters = [p for part in trainer.model_parts for p in part.parameters()]
        held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)
        return sum(read), held, folders.call_count


@contextmanager
def trainer_from(folder: str, hf: str, arguments: list[str]) -> Iterator[Trainer]:
    process = Process.from_environment()
    settings = [f"--model.flavor={hf}", f"--checkpoint.initial_load_path={hf}", f"--job.dump_folder={folder}"]
    config = parse_command_line([*BASE, *settings, *arguments]).config
    with process_group(process, config.comm):
        trainer = Trainer(resolve(config, process.world_size, process.device.type), process.device)
        yield trainer
        trainer.metrics.close()


@pytest.mark.parametrize("layout", ["fsdp2+tp2", *slow("pp2")])
def test_a_rank_reads_what_it_holds(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    """If a shard ended inside a head, the rank would read the whole head. Here shards end with heads."""
    initial("plain").save_pretrained(tmp_path / "hf")
    world_size, arguments = LAYOUTS[layout]
    arguments = [*arguments, "--training.dtype=float64"]  # as the file
    whole = sum(x.nbytes for x in safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors").values())
    results = pool.run(world_size, bytes_read, str(tmp_path / "run"), str(tmp_path / "hf"), arguments)
    # each rank checks the folder here; one of them reads the headers for all
    assert [folders for _, _, folders in results] == [2] + [1] * (world_size - 1)
    for read, held, _ in results:
        assert read == held
        assert read < 0.6 * whole


def refused_start(folder: str, hf: str, arguments: list[str]) -> str:
    try:
        with trainer_from(folder, hf, arguments):
            return ""
    except ConfigError as error:
        return str(error)


def test_a_wrong_file_is_the_same_sentence_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    initial("plain").save_pretrained(hf)
    tensors = safetensors.torch.load_file(hf / "model.safetensors")
    safetensors.torch.save_file(
        {n: x[:-1] if n == "model.norm.weight" else x for n, x in tensors.items()}, hf / "model.safetensors"
    )
    said = pool.run(2, refused_start, str(tmp_path / "run"), str(hf), LAYOUTS["pp2"][1])
    assert said[0] == said[1]
    assert "model.norm.weight has the shape (63,), and this model's has (64,); the folder must hold" in said[0]


def failed_export(folder: str, hf: str, arguments: list[str], at: str) -> tuple[str, list[str]]:
    full = mock.patch.object(NewFolder, at, side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with trainer_from(folder, hf, [*harness.EXPORTED, *arguments]) as trainer, full:
        try:
            trainer.checkpoint.save(1, tokens_seen=0, last=True)
        except CheckpointError as error:
            return str(error), [path.name for path in (Path(folder) / "checkpoint").iterdir()]
    return "", []


@pytest.mark.parametrize("at", ["put", *slow("__init__", "finish")])
def test_a_full_disk_at_the_export_is_told_on_every_rank(pool: WorkerPool, tmp_path: Path, at: str) -> None:
    initial("plain").save_pretrained(tmp_path / "hf")
    case = (failed_export, str(tmp_path / "run"), str(tmp_path / "hf"), LAYOUTS["pp2"][1], at)
    for said, left in pool.run(2, *case):
        assert "step-1-hf could not be written (the disk is full (" in said
        assert "\n" not in said
        assert left == ["step-1"]


# ---- from a checkpoint of ours


def state_after(folder: str, start: str, arguments: list[str], steps: int) -> dict:
    """Train from the weights in `start`, if there are any, and save; see `load_step_save`."""
    arguments = [*arguments, "--model.flavor=tiny", f"--checkpoint.initial_load_path={start}"] if start else arguments
    return load_step_save(folder, arguments, steps)


def test_weights_of_a_checkpoint_start_another_run(pool: WorkerPool, tmp_path: Path) -> None:
    """On another layout, in another data type; optimizer, step and data are new, and a checkpoint of its own wins."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = merged(pool.run(2, state_after, first, "", LAYOUTS["fsdp2"][1], 2), "after")
    start = str(tmp_path / "first" / "checkpoint" / "step-2")
    results = pool.run(2, state_after, second, start, LAYOUTS["tp2"][1], 1)
    begun = merged(results, "before")
    assert results[0]["step"] == 0
    for name, value in begun.items():
        if name.startswith("model."):
            assert torch.equal(value, saved[name]), name
        elif name.startswith("optimizer."):
            assert not value.any(), name
        elif name.startswith("stream "):
            assert value["samples"] == 0
    resumed = pool.run(2, state_after, second, start, LAYOUTS["fsdp2"][1], 0)
    assert resumed[0]["step"] == 1
    assert not torch.equal(merged(resumed, "before")["model.norm.weight"], saved["model.norm.weight"])
    other = pool.run(1, state_after, str(tmp_path / "third"), start, ["--training.dtype=float64"], 0)
    wide = merged(other, "before")["model.norm.weight"]
    assert wide.dtype == torch.float64
    assert torch.equal(wide, saved["model.norm.weight"].double())
