"""Extend a small model from 2,048 to 32,768 tokens, and check each step.

    data        documents with needles, made up, and a tokenizer of their words      proof_data.py
    first       `lct train`: documents of up to 128 tokens, packed into sequences of 2,048
    short       the same with documents of up to 2,048 tokens
    before      `lct evaluate --tasks needle` at lengths up to 32,768
    long        `lct train`: YaRN, sequences of 32,768 tokens, each over 4 context-parallel ranks
    one rank    the first steps of `long` again with one rank: the losses are compared
    after       the same with the extended model; and with YaRN alone, not trained
    export      `lct convert to-hf`; transformers and `lct generate` answer the same questions
    facts       answers in documents of the short length that have several facts

python scripts/proof.py --output outputs/proof --json docs/measurements/proof.json --picture docs/images/proof.svg

The script runs ranks on CPUs, without network. Parts that an earlier run has finished are not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

from scripts.proof_data import document, write_documents, write_tokenizer
from scripts.proof_model import FAMILY, FULL, TINY, Size, config_of, parameters
from scripts.provenance import made_with
from trainer.data.evaluation import needle_prompts
from trainer.data.tokenizers.tokenizer import open_tokenizer

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = (0, 25, 50, 75, 100)
FACTS = (1, 2, 4, 8, 12)
ANSWER_TOKENS = 4
_SEED = 1  # of the prompts


class Proof:
    """The parts of the proof. Each part writes its numbers to a file of the folder.

    Args:
        size: The sizes of the model and of the work.
        folder: The folder of all files.
        say: Prints a line.
    """

    def __init__(self, size: Size, folder: Path, say: Callable[[str], None]) -> None:
        self.size = size
        self.folder = folder
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
            file.write_text(json.dumps({"took": took, "found": result}))
        done = json.loads(file.read_text())
        self.took[name] = done["took"]
        self.say(f"{name}: {done['took']['seconds']} s, {done['took']['cpu_seconds']} s of CPUs")
        return done["found"]

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

    def data(self) -> dict[str, int]:
        """Write tokenizer, configuration of the model, and documents.

        Returns:
            The size of the vocabulary.
        """
        size = self.size
        model = self.folder / "model"
        write_tokenizer(model)
        vocab_size = open_tokenizer(str(model)).vocab_size
        shape = config_of(size, vocab_size)
        (model / "config.json").write_text(json.dumps(shape, indent=2))
        longest = size.seq_len * size.factor
        for name, shortest, most, tokens in (
            ("first", size.seq_len // 64, size.seq_len // 16, size.seq_len * (size.first_steps + 10)),
            ("short", size.seq_len // 32, size.seq_len, size.seq_len * (size.short_steps + 10)),
            ("long", longest // 8, longest, longest * (size.long_steps + 2)),
        ):
            write_documents(self.folder / f"{name}.jsonl", name, shortest, most, tokens)
        return {"vocab_size": vocab_size}

    def settings(self, name: str, **changes: object) -> list[str]:
        """Return the settings of a run in a folder of its own, as options of the command line.

        Args:
            name: The name of the run.
            **changes: Keys with other values.
        """
        entries = {
            "job.dump_folder": self.folder / name,
            "job.device": "cpu",
            "metrics.log_freq": 1,
            "model.name": FAMILY,
            "model.flavor": f"{self.folder.absolute()}/model",
            "model.tokenizer_path": self.folder / "model",
            "training.dataset": "chat",
            "training.data_streams": 1,
            "training.local_batch_size": 1,
            "training.global_batch_size": 1,
            "optimizer.name": "Muon",
            "lr_scheduler.decay_ratio": 0.2,
            **changes,
        }
        flags = ["--metrics.no-enable_tensorboard", "--checkpoint.enable"]
        return [*flags, *(f"--{key}={value}" for key, value in entries.items())]

    def short(self, name: str, steps: int, rate: float, before: str = "") -> list[float]:
        """Train on short sequences of packed documents, `name`.jsonl.

        Args:
            name: The name of the run.
            steps: Number of steps.
            rate: The learning rate.
            before: The run whose weights it starts from; empty for random weights.

        Returns:
            The losses.
        """
        size = self.size
        run = {
            "training.dataset_path": self.folder / f"{name}.jsonl",
            "training.seq_len": size.seq_len,
            "training.steps": steps,
            "optimizer.lr": rate,
            "lr_scheduler.warmup_steps": 30,
        }
        if before:
            run["checkpoint.initial_load_path"] = self.last(before)
        self.run("train", "--ngpu", 1, *self.settings(name, **run))
        return self.losses(name)

    def last(self, name: str) -> Path:
        """Return the last checkpoint of a run.

        Args:
            name: The name of the run.
        """
        steps = (self.folder / name / "checkpoint").glob("step-*")
        return max(steps, key=lambda step: int(step.name.removeprefix("step-")))

    def long(self, ranks: int, steps: int) -> list[float]:
        """Continue with YaRN on long sequences.

        Args:
            ranks: Number of context-parallel ranks for each sequence.
            steps: Number of steps.

        Returns:
            The losses.
        """
        size = self.size
        run = {
            "training.dataset_path": self.folder / "long.jsonl",
            "training.seq_len": size.seq_len * size.factor,
            "training.steps": steps,
            "lr_scheduler.total_steps": size.long_steps,
            "optimizer.lr": size.long_rate,
            "lr_scheduler.warmup_steps": 1,
            "parallelism.context_parallel_degree": ranks,
            **self.scaled(),
            "checkpoint.initial_load_path": self.last("short"),
        }
        self.run("train", "--ngpu", ranks, *self.settings(f"long-{ranks}", **run))
        return self.losses(f"long-{ranks}")

    def scaled(self) -> dict[str, object]:
        """Return the settings of YaRN."""
        size = self.size
        scaling = {"model.rope_scaling": size.factor, "model.rope_scaling_type": "yarn"}
        return scaling | {"model.rope_original_seq_len": size.seq_len}

    def losses(self, name: str) -> list[float]:
        """Return the losses of a run.

        Args:
            name: The name of the run.
        """
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def needles(self, name: str, run: str, **changes: object) -> list[dict[str, float]]:
        """Return the share of right answers of a run's model, by length and depth.

        Args:
            name: The name of the evaluation.
            run: The name of the run.
            **changes: Settings of the evaluation.
        """
        output = self.folder / name
        options = ["--tasks", "needle", "--lengths", *self.size.lengths, "--depths", *DEPTHS, "--seed", _SEED]
        options += ["--samples", self.size.samples, "--output", output, "--ngpu", 1]
        one_rank = {"parallelism.context_parallel_degree": 1} | changes
        self.run("evaluate", self.folder / run, *options, *(f"--{key}={value}" for key, value in one_rank.items()))
        return json.loads((output / "evaluation.json").read_text())["needle"]

    def export(self) -> dict[str, Any]:
        """Export the model for transformers, and compare greedy answers to questions in prompts of growing length.

        Returns:
            The answers: length, right answer, answer of `lct generate`, answer of transformers.
        """
        exported = self.folder / "exported"
        self.run("convert", "to-hf", self.folder / f"long-{self.size.context_parallel}", exported)
        tokenizer = open_tokenizer(str(exported))
        lengths = [self.size.lengths[i % len(self.size.lengths)] for i in range(self.size.asked)]
        asked = [needle_prompts(tokenizer, n, [50], 1, 100 + i)[0] for i, n in enumerate(lengths)]
        prompts = []
        right = []
        for prompt in asked:
            ids = prompt.sequence.tokens
            labels = prompt.sequence.labels
            start = len(ids) - prompt.answer_tokens + 1  # the first token of the answer
            prompts.append(tokenizer.decode(ids[:start].tolist()))
            right.append(tokenizer.decode(labels[-prompt.answer_tokens :].tolist()))
        (self.folder / "prompts").write_text("\n".join(prompts) + "\n")
        options = ["--prompts", self.folder / "prompts", "--temperature", 0, "--tokens", ANSWER_TOKENS]
        written = self.run("generate", exported, *options).rstrip("\n").split("\n\n")
        ours = [text.removeprefix(prompt) for text, prompt in zip(written, prompts, strict=True)]
        theirs = _transformers_answers(exported, prompts)
        answers = zip(lengths, right, ours, theirs, strict=True)
        return {"answers": [dict(zip(("length", "right", "lct", "transformers"), row, strict=True)) for row in answers]}


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


def _transformers_answers(folder: Path, prompts: list[str]) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, do_sample=False)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :]))
    return texts


def _answers_by_facts(folder: Path, tokens: int, documents: int) -> list[dict[str, float]]:
    """Return for each number of facts how many answers are right, and how many belong to another fact."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for facts in FACTS:
        random = Random(f"facts {facts}")
        right = 0
        others = 0
        asked = 0
        for _ in range(documents):
            ids = []
            places = []
            for message in document(random, tokens, facts):
                part = tokenizer(message["content"], add_special_tokens=False).input_ids
                places += [(len(ids), len(ids) + len(part))] * (message["role"] == "assistant")
                ids += part
            with torch.no_grad():
                predicted = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
            numbers = {tuple(ids[begin:end]) for begin, end in places}
            answers = [(tuple(predicted[begin - 1 : end - 1]), tuple(ids[begin:end])) for begin, end in places]
            right += sum(answer == wanted for answer, wanted in answers)
            others += sum(answer != wanted and answer in numbers for answer, wanted in answers)
            asked += len(answers)
        rows.append({"facts": facts, "asked": asked, "right": right, "of_another_fact": others})
    return rows


def prove(size: Size, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Do all parts.

    Args:
        size: The sizes of the model and of the work.
        folder: The folder of all files.
        say: Prints a line.

    Returns:
        The numbers of all parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    proof = Proof(size, folder, say)
    cp = size.context_parallel
    vocab_size = proof.part("data", proof.data)["vocab_size"]
    first = proof.part("first losses", partial(proof.short, "first", size.first_steps, size.first_rate))
    short = proof.part("short losses", partial(proof.short, "short", size.short_steps, size.short_rate, "first"))
    long = proof.part(f"losses of {cp} ranks", partial(proof.long, cp, size.long_steps))
    one = proof.part("losses of one rank", partial(proof.long, 1, size.one_rank_steps))
    before = proof.part("before", partial(proof.needles, "needles-before", "short"))
    after = proof.part("after", partial(proof.needles, "needles-after", f"long-{cp}"))
    exported = proof.part("export", proof.export)
    untrained = proof.part("untrained", partial(proof.needles, "needles-untrained", "short", **proof.scaled()))
    several = partial(_answers_by_facts, folder / "exported", size.seq_len * 7 // 8, size.samples * 3)
    facts = proof.part("facts", several)
    apart = [abs(a - b) / b for a, b in zip(long, one, strict=False)]
    return {
        "parameters": parameters(folder / "model"),
        "vocab_size": vocab_size,
        "size": vars(size),
        "first_losses": first,
        "short_losses": short,
        "long_losses": long,
        "one_rank_losses": one,
        "largest_relative_difference": max(apart),
        "before": before,
        "yarn_untrained": untrained,
        "after": after,
        "facts": facts,
        **exported,
        "took": proof.took,
    }


def main(argv: list[str] | None = None) -> int:
    """Prove, write the numbers and the picture, and print the verdict.

    Args:
        argv: The words of the command line; None for the words of this process.

    Returns:
        The exit code: 0 if losses and answers are the same.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/proof"), help="folder of the runs")
    parser.add_argument("--json", type=Path, help="file of the numbers (default: proof.json in the folder)")
    parser.add_argument("--picture", type=Path, help="picture (default: proof.svg in the folder)")
    parser.add_argument("--tiny", action="store_true", help="everything on a tiny model, which learns nothing")
    args = parser.parse_args(argv)
    head = made_with("scripts/proof.py", argv, device="cpu") | {"cores": os.cpu_count()}
    numbers = prove(TINY if args.tiny else FULL, args.output, partial(print, flush=True))
    result = head | numbers
    (args.json or args.output / "proof.json").write_text(json.dumps(result, indent=2) + "\n")
    from scripts.proof_picture import draw

    draw(result, args.picture or args.output / "proof.svg")
    same = all(row["lct"] == row["transformers"] for row in result["answers"])
    print(
        f"losses of {result['size']['context_parallel']} ranks and of one: {numbers['largest_relative_difference']:.1e}"
    )
    print(f"answers of lct and transformers: {'the same' if same else 'different'}")
    return 0 if same and numbers["largest_relative_difference"] <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
