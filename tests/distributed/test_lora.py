"""Law: adapters train as peft's do, on every layout; nothing else changes, is saved, or is merged wrongly."""

import json
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from lct_inference.evaluate import checked
from lct_inference.generate import model_parser
from tests.distributed import harness
from tests.distributed.checkpoint_cases import load_step_save, merged, trainer_in
from tests.distributed.harness import Record, RecordingTrainer, resolved
from tests.distributed.pool import WorkerPool
from tests.distributed.test_hugging_face import LLAMA, SETTINGS, STEPS, error, initial, logits_of, precise, rows
from tests.distributed.test_parity import LAYOUTS
from tests.slow import slow
from trainer.commands import convert
from trainer.commands.finished_run import loaded_model, text_configuration
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.data.packing import IGNORE_INDEX
from trainer.data.tokenizers.tokenizer import default_tokenizer_path
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.transforms import lora

RANK, ALPHA = 4, 8.0
LORA = [f"--lora.rank={RANK}", f"--lora.alpha={ALPHA}"]
SAVED = [*harness.EXPORTED, "--training.data_streams=8"]


def sums_of_one_rank(
    module: nn.Linear, linear: lora.Linear, scale: float, dropout: lora.Dropout, over_inputs: bool, x: DTensor
) -> DTensor:
    """Plant a mistake: an adapter whose inputs are sharded adds the first rank's part alone."""
    counts = not over_inputs or x.device_mesh.get_local_rank() == 0
    return lora_adapted(module, linear, scale * counts, dropout, over_inputs, x)


lora_adapted = lora._adapted


def train(folder: str, hf: str, arguments: list[str], fault: bool = False) -> dict:
    """On each rank: train adapters of the weights in `hf`, save and export them."""
    process = Process.from_environment()
    settings = [f"--model.flavor={hf}", f"--checkpoint.initial_load_path={hf}", f"--job.dump_folder={folder}"]
    settings += ["--training.dtype=float64", "--checkpoint.export_dtype=float64", *SAVED, *LORA, *arguments]
    config = parse_command_line([*SETTINGS, *settings]).config
    planted = mock.patch.object(lora, "_adapted", sums_of_one_rank) if fault else nullcontext()
    made = mock.patch.object(harness, "VOCAB", LLAMA.vocab_size)
    with made, planted, process_group(process, config.comm):
        record = Record()
        trainer = RecordingTrainer(resolved(config, process), process.device, record=record)
        before = trainer.gather_stages(lambda p: p)
        for step in range(1, STEPS + 1):
            trainer.train_step(step)
        after = trainer.gather_stages(lambda p: p)
        output = harness.exported(trainer, STEPS)
        trainer.metrics.close()
    if process.rank:
        return {}
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {"metrics": lines, "before": before, "after": after, "gradients": record.gradients, "output": output}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "hf"
    initial("plain").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one(pool: WorkerPool, hf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run of one process."""
    return pool.run(1, train, str(tmp_path_factory.mktemp("one") / "run"), str(hf), [])[0]


@pytest.mark.slow
@pytest.mark.parametrize("modules", [["wq", "wv", "wo"], ["w1"]])
def test_sequences_in_chunks_train_the_same_adapters(
    pool: WorkerPool, hf: Path, tmp_path: Path, modules: list[str]
) -> None:
    """Some cases have no gradient of keys and values in the first layer."""
    runs = [["--lora.modules", *modules, *options] for options in ([], ["--training.sequence_chunks=3"])]
    one, got = (pool.run(1, train, str(tmp_path / str(len(run))), str(hf), run)[0] for run in runs)
    assert not differences(got, one)


def exported(run: dict) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run["output"] / "model.safetensors")


def differences(got: dict, wanted: dict) -> list[str]:
    """Return the names of tensors that differ by more than 1e-10, relative to their norm."""
    compared = [("after", got["after"], wanted["after"]), ("merged", exported(got), exported(wanted))]
    compared += [("gradient", *pair) for pair in zip(got["gradients"], wanted["gradients"], strict=True)]
    for ours, theirs in zip(got["metrics"], wanted["metrics"], strict=True):
        numbers = ({key: torch.tensor(line[key]) for key in ("loss", "grad_norm")} for line in (ours, theirs))
        compared.append((f"step {ours['step']}", *numbers))
    names = []
    for kind, ours, theirs in compared:
        assert ours.keys() == theirs.keys()
        names += [f"{kind} {name}" for name, x in theirs.items() if not (ours[name] - x).norm() <= 1e-10 * x.norm()]
    return names


QUICK = ["tp2", "cp2+tp2"]
SLOW = ["fsdp2+tp2", "tp2+pp2", "fsdp2", "tp2", "pp2", "hsdp2x2", "fsdp2+cp2", "fsdp2+pp2", "cp2+pp2", "ddp2+tp2"]


@pytest.mark.parametrize("layout", [*QUICK, *slow(*SLOW)])
def test_layouts_train_the_same_adapters(pool: WorkerPool, hf: Path, one: dict, tmp_path: Path, layout: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    got = pool.run(world_size, train, str(tmp_path / "run"), str(hf), arguments)[0]
    assert differences(got, one) == []


def test_the_comparison_sees_a_sum_over_inputs_that_misses_a_rank(
    pool: WorkerPool, hf: Path, one: dict, tmp_path: Path
) -> None:
    got = pool.run(2, train, str(tmp_path / "run"), str(hf), LAYOUTS["tp2"][1], True)[0]
    assert any(name.startswith("gradient layers.0.feed_forward.w2.lora_b") for name in differences(got, one))


@pytest.mark.slow
def test_features_train_the_same_adapters(pool: WorkerPool, hf: Path, one: dict, tmp_path: Path) -> None:
    """Recomputed, compiled and in chunks of the loss, at once."""
    arguments = ["--activation_checkpoint.mode=full", "--compile.enable", "--compile.backend=aot_eager"]
    arguments += ["--training.loss_chunk_tokens=3"]
    got = pool.run(1, train, str(tmp_path / "run"), str(hf), arguments)[0]
    assert differences(got, one) == []


RECOMPUTED = ["--activation_checkpoint.mode=full"]
COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
DROPOUT = ["--lora.dropout=0.3", "--lora.alpha=16"]


@pytest.fixture(scope="module")
def dropped(pool: WorkerPool, hf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run of one process with dropout."""
    return pool.run(1, train, str(tmp_path_factory.mktemp("dropped") / "run"), str(hf), DROPOUT)[0]


@pytest.mark.parametrize("layout", [*QUICK, *slow(*SLOW)])
def test_layouts_drop_the_same_inputs(pool: WorkerPool, hf: Path, dropped: dict, tmp_path: Path, layout: str) -> None:
    """Each with micro-batches of another size than one process, whose masks they share."""
    world_size, arguments = LAYOUTS[layout]
    got = pool.run(world_size, train, str(tmp_path / "run"), str(hf), [*DROPOUT, *arguments])[0]
    assert differences(got, dropped) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [*RECOMPUTED, "--activation_checkpoint.mlp_chunk_tokens=5"],
        *slow(
            [*RECOMPUTED, *COMPILED],
            [*RECOMPUTED, *COMPILED, "--activation_checkpoint.mlp_chunk_tokens=5"],
            ["--training.sequence_chunks=3"],
            ["--training.local_batch_size=8"],
            ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
        ),
    ],
)
def test_features_drop_the_same_inputs(
    pool: WorkerPool, hf: Path, dropped: dict, tmp_path: Path, arguments: list[str]
) -> None:
    got = pool.run(1, train, str(tmp_path / "run"), str(hf), [*DROPOUT, *arguments])[0]
    assert differences(got, dropped) == []


@pytest.mark.slow
def test_layouts_drop_the_same_inputs_of_packed_documents_and_parts(pool: WorkerPool, hf: Path, tmp_path: Path) -> None:
    documents = [*DROPOUT, "--training.attention_mask=document"]
    parts = ["--activation_checkpoint.mlp_chunk_tokens=2", *RECOMPUTED]
    one = pool.run(1, train, str(tmp_path / "one"), str(hf), documents)[0]
    got = pool.run(4, train, str(tmp_path / "run"), str(hf), [*documents, *parts, *LAYOUTS["cp2+tp2"][1]])[0]
    assert differences(got, one) == []


def test_the_comparison_sees_other_masks(one: dict, dropped: dict) -> None:
    assert any(name.startswith("gradient") for name in differences(one, dropped))


def test_frozen_weights_stay(one: dict) -> None:
    changed = {name for name, x in one["after"].items() if not torch.equal(x, one["before"][name])}
    adapters = {name for name in one["after"] if lora.is_adapter(name)}
    assert changed == adapters
    assert len(adapters) == 2 * 2 * 7
    assert all(gradients.keys() == adapters for gradients in one["gradients"])


# ---- modules that are trained whole

WHOLE = ["--lora.whole", "tok_embeddings", "output"]


@pytest.mark.parametrize("layout", ["tp2", *slow("cp2+pp2", "fsdp2+tp2")])
def test_layouts_train_embedding_and_output_beside_adapters(
    pool: WorkerPool, hf: Path, tmp_path: Path, layout: str
) -> None:
    """They are in checkpoints, in the merged weights, and in the files that peft loads."""
    one = pool.run(1, train, str(tmp_path / "one"), str(hf), WHOLE)[0]
    world_size, arguments = LAYOUTS[layout]
    got = pool.run(world_size, train, str(tmp_path / "run"), str(hf), [*WHOLE, *arguments])[0]
    assert differences(got, one) == []
    changed = {name for name, x in got["after"].items() if not torch.equal(x, got["before"][name])}
    assert {name for name in changed if not lora.is_adapter(name)} == {"tok_embeddings.weight", "output.weight"}
    run = tmp_path / "run"
    assert convert.main(["to-peft", str(run), str(tmp_path / "adapters")]) == 0
    assert convert.main(["to-hf", str(run), str(tmp_path / "merged")]) == 0
    with precise("plain", "float64"):
        base, whole = (LlamaForCausalLM.from_pretrained(x, dtype=torch.float64) for x in (hf, tmp_path / "merged"))
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapters").to(torch.float64)
        assert error(logits_of(loaded), logits_of(whole)) < 1e-6  # the file is float32
    there = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
    for name, theirs in zip(("tok_embeddings.weight", "output.weight"), there, strict=True):
        assert torch.equal(theirs, got["after"][name])


# ---- peft


def our_name(name: str) -> str:
    """Our name of the tensor that peft calls so."""
    names = {"q_proj": "attention.wq", "o_proj": "attention.wo", "down_proj": "feed_forward.w2"}
    _, _, _, _, layer, _, module, matrix, *_ = name.split(".")
    return f"layers.{layer}.{names[module]}.{ {'lora_A': 'lora_a', 'lora_B': 'lora_b'}[matrix] }"


@pytest.mark.parametrize(("rslora", "alpha"), [(True, ALPHA * RANK**0.5), *slow((False, ALPHA))])
def test_adapters_train_here_as_in_peft(pool: WorkerPool, hf: Path, tmp_path: Path, rslora: bool, alpha: float) -> None:
    """From one start, losses are equal. Adapters converted here, alone and merged, have the logits of peft's run."""
    run = tmp_path / "run"
    got = pool.run(1, train, str(run), str(hf), [f"--lora.alpha={alpha}", "--lora.modules", "wq", "wo", "w2"])[0]
    targets = ["q_proj", "o_proj", "down_proj"]
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, use_rslora=rslora)
    theirs = get_peft_model(LlamaForCausalLM.from_pretrained(hf, dtype=torch.float64), settings).to(torch.float64)
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            if "lora_A" in name:
                parameter.copy_(got["before"][our_name(name)])
    optimizer = torch.optim.AdamW(trained.values(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    with precise("plain", "float64"):
        for step, line in enumerate(got["metrics"]):
            assert abs(peft_step(theirs, optimizer, step, line["lr"]) - line["loss"]) < 1e-10 * line["loss"]
        assert convert.main(["to-peft", str(run), str(tmp_path / "adapters")]) == 0
        assert convert.main(["to-hf", str(run), str(tmp_path / "merged")]) == 0
        base = LlamaForCausalLM.from_pretrained(hf, dtype=torch.float64)
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapters").to(torch.float64)
        assert error(logits_of(loaded), logits_of(theirs)) < 1e-7  # the file is float32
        whole = LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
        assert error(logits_of(whole), logits_of(theirs)) < 1e-10
        assert error(logits_of(base), logits_of(initial("plain"))) > 1e-4  # peft has changed it: there is a difference


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_commands_of_text_open_a_run_with_its_adapters(
    pool: WorkerPool, hf: Path, tmp_path: Path, command: str
) -> None:
    """On two ranks: the weights with adapters added are those that `convert to-hf` writes."""
    run = tmp_path / "run"
    pool.run(1, train, str(run), str(hf), [])
    assert convert.main(["to-hf", str(run), str(tmp_path / "merged")]) == 0
    merged, plain = (pool.run(2, opened, str(path), command) for path in (tmp_path / "merged", hf))
    adapted = pool.run(2, opened, str(run), command)
    for a, b, c in zip(adapted, merged, plain, strict=True):
        assert error(a, b) < 1e-12
        assert error(a, c) > 1e-4


def opened(folder: str, command: str) -> torch.Tensor:
    """Logits of the model that the text commands open."""
    process = Process.from_environment()
    settings = ["--parallelism.tensor_parallel_degree=2", "--training.loss_chunk_tokens=0"]
    tokenizer = default_tokenizer_path()
    if command == "generate":
        args = model_parser(command, "").parse_args([folder, "--tokenizer", tokenizer])
        config, _ = text_configuration(args, settings, command=command)
        job = resolve(config, process.world_size, process.device.type)
    else:
        options = ["--tasks", "needle", "--lengths", "512", "--ngpu", "2", "--tokenizer", tokenizer]
        _, job = checked([folder, *options, "--output", f"{folder}-evaluated", *settings])
    with process_group(process, job.config.comm):
        model, _ = loaded_model(job, process.device)
        with torch.no_grad():
            logits = model.output(model(rows(0)["tokens"]))
        return logits.full_tensor() if isinstance(logits, DTensor) else logits


def peft_step(theirs: PeftModel, optimizer: torch.optim.Optimizer, step: int, lr: float) -> float:
    batch = rows(step)
    valid = int((batch["labels"] != IGNORE_INDEX).sum())
    logits = theirs(batch["tokens"], use_cache=False).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / valid
    optimizer.zero_grad()
    loss.backward()
    optimizer.param_groups[0]["lr"] = lr
    gradients = [p.grad for p in optimizer.param_groups[0]["params"]]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient *= min(0.5 / norm, 1.0)
    optimizer.step()
    return loss.item()


# ---- checkpoints


def state_after(folder: str, start: str, arguments: list[str], steps: int) -> dict:
    return load_step_save(folder, ["--model.flavor=tiny", *arguments, *start_of(start)], steps)


def start_of(start: str) -> list[str]:
    return [f"--checkpoint.initial_load_path={start}"] if start else []


@pytest.fixture(scope="module")
def base(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A step of a run of all weights."""
    folder = tmp_path_factory.mktemp("base")
    pool.run(1, state_after, str(folder), "", [], 1)
    return str(folder / "checkpoint" / "step-1")


@pytest.mark.parametrize("layout", ["tp2", *slow("fsdp2+tp2")])
def test_a_checkpoint_has_adapters_only_and_resumes_on_another_layout(
    pool: WorkerPool, base: str, tmp_path: Path, layout: str
) -> None:
    run = str(tmp_path / "run")
    world_size, arguments = LAYOUTS[layout]
    saved = pool.run(world_size, state_after, run, base, [*LORA, *arguments], 1)
    assert all(name.split(".")[-1] in ("lora_a", "lora_b") for name in saved[0]["after"] if name.startswith("model."))
    files = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoint" / "step-1").iterdir())
    whole = sum(file.stat().st_size for file in Path(base).iterdir())
    assert files < whole / 3
    resumed = pool.run(2, state_after, run, base, [*LORA, *LAYOUTS["pp2"][1]], 0)
    assert resumed[0]["step"] == 1
    after, before = merged(saved, "after"), merged(resumed, "before")
    assert after.keys() == before.keys()
    assert [name for name, x in after.items() if isinstance(x, torch.Tensor) and not torch.equal(x, before[name])] == []


def sum_of_weights(folder: str, start: str, arguments: list[str], steps: int) -> float:
    """Train and save on one rank; return the sum of the frozen weights' absolute values at the start."""
    with trainer_in(folder, ["--model.flavor=tiny", *arguments, *start_of(start)]) as trainer:
        total = sum(p.double().abs().sum().item() for p in trainer.model_parts[0].parameters() if not p.requires_grad)
        for step in range(trainer.start_step + 1, trainer.start_step + steps + 1):
            trainer.train_step(step)
        trainer.checkpoint.save(trainer.start_step + steps, tokens_seen=7, last=True)
        return total


def test_frozen_weights_are_there_after_a_resume(pool: WorkerPool, base: str, tmp_path: Path) -> None:
    first, resumed = (pool.run(1, sum_of_weights, str(tmp_path), base, LORA, steps)[0] for steps in (1, 0))
    fresh = pool.run(1, sum_of_weights, str(tmp_path / "fresh"), "", [], 0)[0]
    assert first == resumed
    assert first != fresh


@pytest.mark.parametrize(
    ("arguments", "start", "said"),
    [
        ([*LORA, "--lora.modules", "wq"], "base", "lora.modules = ['wq'] is not the ["),
        *slow(
            (["--lora.rank=2"], "base", "lora.rank = 2 is not the 4 of the checkpoint"),
            ([], "base", "lora.rank = 0 is not the 4 of the checkpoint"),
        ),
        (LORA, "adapters", "holds adapters only; merge them into a Hugging Face folder with lct convert to-hf"),
    ],
)
def test_other_adapters_are_refused(
    pool: WorkerPool, base: str, tmp_path: Path, arguments: list[str], start: str, said: str
) -> None:
    run = tmp_path / "run"
    pool.run(1, state_after, str(run), base, LORA, 1)
    if start == "adapters":
        base, run = str(run / "checkpoint" / "step-1"), tmp_path / "other"
    assert said in pool.run(1, refused, str(run), base, arguments)[0]


def refused(folder: str, start: str, arguments: list[str]) -> str:
    try:
        state_after(folder, start, arguments, 0)
    except ConfigError as error:
        return str(error)
    return ""
