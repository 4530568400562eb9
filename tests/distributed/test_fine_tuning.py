"""Law: the steps of docs/fine_tuning.md lead from a model of transformers to a model of transformers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.chat_files import MARKED, chat_folder, conversations, write_lines
from tests.distributed.harness import TINY
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import LAYOUTS
from tests.hf_decoders import hf_model, in_float64
from trainer.commands.finished_run import configuration
from trainer.config.loader import parse_command_line
from trainer.job import resolve
from trainer.runtime.process_group import Process, process_group
from trainer.trainer import Trainer

SEQ_LEN, LINES = 512, 12
MODEL = replace(TINY, vocab_size=314, max_seq_len=SEQ_LEN, norm_eps=1e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer and a template, and conversations that fill a sequence in part."""
    folder = chat_folder(tmp_path_factory.mktemp("tuning") / "model", MARKED, file=True)
    theirs = hf_model("llama3", MODEL)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0.2)
    theirs.save_pretrained(folder)
    write_lines(folder.parent / "chat.jsonl", conversations(LINES, longest=3))
    return folder


def tuned(model: str, folder: str, arguments: list[str]) -> list[dict]:
    """Train as the page says, and return the lines of metrics."""
    process = Process.from_environment()
    settings = f"""--model.flavor {model} --checkpoint.initial_load_path {model} --training.dataset chat
        --training.dataset_path {Path(model).parent}/chat.jsonl --training.data_streams 2 --training.seq_len {SEQ_LEN}
        --training.local_batch_size 1 --training.global_batch_size 4 --optimizer.lr 1e-3 --training.steps 3
        --lr_scheduler.warmup_steps 1 --job.dump_folder {folder} --checkpoint.enable --checkpoint.last_save_in_hf
        --training.dtype float64 --checkpoint.export_dtype float64 --metrics.log_freq 1""".split()
    config = parse_command_line([*settings, *arguments]).config
    with process_group(process, config.comm):
        Trainer(resolve(config, process.world_size, process.device.type), process.device).train()
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def their_loss(folder: Path, lines: list[dict]) -> float:
    """The mean loss of all answers by transformers, each conversation by itself."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    total, number = 0.0, 0
    for line in lines:
        out = tokenizer.apply_chat_template(line["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(out["input_ids"]), torch.tensor(out["assistant_masks"])
        with in_float64("llama3", MODEL, len(ids)), torch.no_grad():
            logits = model.to(torch.float64)(ids[None], use_cache=False).logits[0]
        losses = F.cross_entropy(logits[:-1], ids[1:], reduction="none")[mask[1:].bool()]
        total, number = total + losses.sum().item(), number + len(losses)
    return total / number


@pytest.mark.parametrize("layout", ["one", "fsdp2+cp2"])
@pytest.mark.slow
def test_a_small_model_is_fine_tuned_and_exported(pool: WorkerPool, model: Path, tmp_path: Path, layout: str) -> None:
    """Four sequences have a whole number of epochs, so the first loss equals transformers' loss on all lines."""
    ranks, arguments = LAYOUTS.get(layout, (1, []))
    metrics, *_ = pool.run(ranks, tuned, str(model), str(tmp_path), arguments)
    lines = [json.loads(line) for line in (model.parent / "chat.jsonl").read_text().splitlines()]
    assert metrics[0]["epoch"] in (1.0, 2.0), "the test needs lines that fill the sequences of a step"
    assert metrics[0]["loss"] == pytest.approx(their_loss(model, lines), rel=1e-10)
    assert metrics[2]["loss"] < metrics[0]["loss"]
    exported = tmp_path / "checkpoint" / "step-3-hf"
    assert their_loss(exported, lines) < metrics[2]["loss"]
    assert AutoTokenizer.from_pretrained(exported).chat_template == MARKED
    config = configuration(tmp_path, -1, command="generate")
    assert resolve(config, 1).attention is None, "the cache of generation needs plain attention"
