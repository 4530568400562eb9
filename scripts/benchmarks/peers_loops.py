"""The program that trains by a peer: transformers, TRL or peft. scripts/benchmarks/peers.py starts it.

    python scripts/benchmarks/peers_loops.py work.json result.json

`work.json` names the loop and everything that it trains on (`Work`). The result has a list of each value of `Recorder`.
The time of the sum in float64 is left out: only this benchmark needs it.
"""

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone, installed or not

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from scripts.benchmarks.peers_data import (
    BETAS,
    DPO_BETA,
    EPS,
    LR,
    MAX_NORM,
    conversations,
    labelled,
    preference_pairs,
)
from scripts.tiny_model import END


@dataclass(frozen=True)
class Work:
    """What a peer trains.

    Attributes:
        loop: A name of `LOOPS`.
        model: Folder of the model.
        data: The conversations.
        steps: Numbers of the conversations of each step.
        dtype: Name of the data type of weights and computation.
        folder: Folder for files of the peer.
        adapters: Folder of peft's adapters to begin with; "" for whole weights.
        padding_idx: Keep the `padding_idx` of transformers' embedding. It drops the embedding's gradient of the pad
            token. In models whose pad token is their end token, such as SmolLM2, this is no gradient of the loss.
    """

    loop: str
    model: str
    data: str
    steps: list[list[int]]
    dtype: str
    folder: str
    adapters: str = ""
    padding_idx: bool = False


@dataclass
class Recorder:
    """Values of each step.

    Attributes:
        losses: Loss of each step.
        reported_norms: Gradient norms as the peer reports them.
        norms: Norms of the same gradients, summed in float64.
        seconds: Seconds of each step, from the end of the step before; the first includes the start.
        cpu: CPU seconds of this process at the end of each step.
    """

    losses: list[float] = field(default_factory=list)
    reported_norms: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._last = time.perf_counter()
        self._left_out = 0.0

    def gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Record the norm of the gradients, before they are clipped; leave its time out.

        Args:
            parameters: The trained parameters.
        """
        began = time.perf_counter()
        cpu_began = time.process_time()
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        squares = [torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2 for grad in grads]
        self.norms.append(torch.stack(squares).sum().sqrt().item())
        self._last += time.perf_counter() - began
        self._left_out += time.process_time() - cpu_began

    def step(self, loss: float, reported_norm: float) -> None:
        """Record the end of a step.

        Args:
            loss: Its loss.
            reported_norm: Its gradient norm.
        """
        now = time.perf_counter()
        self.losses.append(loss)
        self.reported_norms.append(reported_norm)
        self.seconds.append(now - self._last)
        self.cpu.append(time.process_time() - self._left_out)
        self._last = now


# ---- transformers' model, and peft's adapters on it


def _model(work: Work) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype))
    if not work.padding_idx:
        model.get_input_embeddings().padding_idx = None
    return model


def _padded(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad conversations at their right to the longest one: (B, S) each."""
    longest = max(len(row["input_ids"]) for row in rows)
    padded = {
        name: torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    return padded | {"attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def plain_loop(work: Work) -> Recorder:
    """Train transformers' model, or peft's adapters, by hand: labels, cross entropy, clipping and AdamW of torch.

    Args:
        work: What to train.

    Returns:
        The values of each step.
    """
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    rows = [labelled(tokenizer, chat) for chat in conversations(Path(work.data))]
    model = _model(work)
    if work.adapters:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, work.adapters, is_trainable=True)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    record = Recorder()
    for numbers in work.steps:
        batch = _padded([rows[number] for number in numbers])
        labels = batch.pop("labels")[:, 1:]
        optimizer.zero_grad()
        logits = model(**batch, use_cache=False).logits[:, :-1]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = total / (labels != -100).sum()
        loss.backward()
        record.gradients(trained)
        norm = nn.utils.clip_grad_norm_(trained, MAX_NORM)
        optimizer.step()
        record.step(loss.item(), norm.item())
    return record


# ---- TRL


class _Recording:
    """A trainer of TRL whose batches are the given steps, and whose steps are recorded."""

    work: Work
    record: Recorder
    _loss = 0.0

    def get_train_dataloader(self) -> Iterator[dict[str, torch.Tensor]]:
        steps = DataLoader(self.train_dataset, batch_sampler=self.work.steps, collate_fn=self.data_collator)
        return self.accelerator.prepare(steps)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self._loss = loss.item()
        self.record.gradients([p for p in self.model.parameters() if p.requires_grad])
        return loss


class _SFT(_Recording, SFTTrainer):
    """SFTTrainer with the given steps."""


class _DPO(_Recording, DPOTrainer):
    """DPOTrainer with the given steps."""


class _Steps(TrainerCallback):
    """Records the end of each step; TRL logs the gradient norm right after it."""

    def __init__(self, trainer: _Recording) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.record.step(self._trainer._loss, 0.0)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "grad_norm" in logs:
            self._trainer.record.reported_norms[-1] = logs["grad_norm"]


def _settings(work: Work) -> dict[str, Any]:
    """Return the arguments of TRL's configurations that the trainer's job has, too."""
    adam = {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_epsilon": EPS, "weight_decay": 0.0}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return {
        "output_dir": work.folder,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": len(work.steps),
        "per_device_train_batch_size": 1,
        "remove_unused_columns": False,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": MAX_NORM,
        **adam,
        **quiet,
    }


def _trained(trainer: _Recording, work: Work) -> Recorder:
    trainer.work = work
    trainer.record = Recorder()
    trainer.add_callback(_Steps(trainer))
    trainer.train()
    return trainer.record


def _until_end(ids: list[int], end: int) -> list[int]:
    """Leave out the line break that the template writes behind an answer's end token: the trainer learns none."""
    return ids[: len(ids) - ids[::-1].index(end)]


def trl_sft(work: Work) -> Recorder:
    """Train by TRL's SFTTrainer, which makes token ids and labels from prompts and completions.

    Args:
        work: What to train.

    Returns:
        The values of each step.
    """
    chats = conversations(Path(work.data))
    data = Dataset.from_list([{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats])
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    trainer = _SFT(_model(work), SFTConfig(**_settings(work)), train_dataset=data, processing_class=tokenizer)
    end = tokenizer.convert_tokens_to_ids(END)
    collate = trainer.data_collator

    def without_line_break(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        for example in examples:
            kept = len(_until_end(example["input_ids"], end))
            example["labels"] = example["labels"][:kept] + [-100] * (len(example["input_ids"]) - kept)
        return collate(examples)

    trainer.data_collator = without_line_break
    return _trained(trainer, work)


def trl_dpo(work: Work) -> Recorder:
    """Train by TRL's DPOTrainer, with a copy of the first weights as the reference.

    Args:
        work: What to train.

    Returns:
        The values of each step.
    """
    data = Dataset.from_list(preference_pairs(conversations(Path(work.data))))
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    model = _model(work)
    trainer = _DPO(
        model,
        copy.deepcopy(model),
        args=DPOConfig(**_settings(work), beta=DPO_BETA),
        train_dataset=data,
        processing_class=tokenizer,
    )
    end = tokenizer.convert_tokens_to_ids(END)
    collate = trainer.data_collator

    def without_line_break(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        sides = ("chosen_ids", "rejected_ids")
        return collate([e | {side: _until_end(e[side], end) for side in sides} for e in examples])

    trainer.data_collator = without_line_break
    return _trained(trainer, work)


LOOPS: dict[str, Callable[[Work], Recorder]] = {
    "transformers": plain_loop,
    "peft": plain_loop,
    "TRL SFTTrainer": trl_sft,
    "TRL DPOTrainer": trl_dpo,
}


def main(argv: Sequence[str]) -> int:
    """Train as `work.json` says, and write the result.

    Args:
        argv: The paths of `work.json` and of the result.

    Returns:
        The exit code.
    """
    work = Work(**json.loads(Path(argv[0]).read_text()))
    record = LOOPS[work.loop](work)
    named = ("losses", "norms", "reported_norms", "seconds", "cpu")
    result = {name: getattr(record, name) for name in named} | {"threads": torch.get_num_threads()}
    Path(argv[1]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
