"""Measure a run, or a Hugging Face folder, on long sequences: loss by position, needles in a haystack.

evaluate outputs/debug_model --seq-len 2048 --ngpu 2 --parallelism.context_parallel_degree 2

A run is evaluated with the parallelism that it was trained with. Settings of the tables [parallelism], [model] and
[comm], and a few others, may follow the options (docs/evaluation.md).
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.checkpoint.folder import checkpoint_folder, step_to_load
from trainer.commands.evaluate_options import Wanted, checked
from trainer.commands.evaluate_report import Cell, Findings, tables, write
from trainer.commands.finished_run import loaded_model
from trainer.commands.ranks import run_on_ranks, work_on_rank
from trainer.config.errors import ConfigError
from trainer.job import ResolvedJob

if TYPE_CHECKING:
    import torch

    from trainer.data.needle import NeedlePrompt
    from trainer.data.packing import PackedSequence
    from trainer.tasks.evaluation import Bucket, Evaluation


def positions(wanted: Wanted, evaluation: "Evaluation", job: ResolvedJob) -> "list[Bucket]":
    """Return the loss by position. A collective over all ranks."""
    from trainer.data.datasets import Reading, open_source
    from trainer.data.long_documents import long_documents
    from trainer.data.tokenizer import open_tokenizer
    from trainer.runtime.agreement import raise_on_all_ranks

    def sequences() -> "list[PackedSequence]":
        how = Reading.of(job.config.training, job.config.model.tokenizer_file)
        source = open_source(wanted.dataset, wanted.dataset_path, how)
        tokenizer = open_tokenizer(job.config.model.tokenizer_file)
        return list(long_documents(source, tokenizer, wanted.seq_len, wanted.sequences))

    return evaluation.by_position(raise_on_all_ranks(sequences, evaluation.dims["world"]), wanted.edges)


def needle(wanted: Wanted, evaluation: "Evaluation", job: ResolvedJob) -> list[Cell]:
    """Return the answers by length and depth. A collective over all ranks."""
    from trainer.data.needle import needle_prompts
    from trainer.data.tokenizer import open_tokenizer
    from trainer.runtime.agreement import raise_on_all_ranks

    tokenizer = open_tokenizer(job.config.model.tokenizer_file)

    def prompts_of(length: int) -> "list[NeedlePrompt]":
        return needle_prompts(tokenizer, length, wanted.depths, wanted.samples, wanted.seed)

    cells = []
    for length in wanted.lengths:
        prompts = raise_on_all_ranks(lambda length=length: prompts_of(length), evaluation.dims["world"])
        found = evaluation.needles(prompts)
        for depth in wanted.depths:
            of = [answer for prompt, answer in zip(prompts, found, strict=True) if prompt.depth == depth]
            accuracy = sum(answer.correct for answer in of) / len(of)
            cells.append(Cell(length, depth, len(of), accuracy, sum(a.log_probability for a in of) / len(of)))
    return cells


def evaluate(wanted: Wanted, job: ResolvedJob, device: "torch.device") -> Findings:
    """Return what was asked for. A collective over all ranks.

    Raises:
        SharedConfigError: the weights are damaged, or of another model; or no document is long enough.
    """
    from trainer.tasks.evaluation import Evaluation
    from trainer.tasks.language import LanguageTask

    model, dims = loaded_model(job, device)
    evaluation = Evaluation(LanguageTask(job, dims), dims, model, rows=wanted.rows)
    settings = {name: getattr(wanted, name) for name in ("seq_len", "dataset", "dataset_path", "sequences", "seed")}
    settings |= {"weights": job.config.checkpoint.initial_load_path, "compute_dtype": job.compute_dtype}
    settings |= {"ranks": job.degrees.world_size}
    if job.config.lora.rank:
        settings["adapters"] = str(checkpoint_folder(job.config).step(step_to_load(job.config)))
    return Findings(
        settings,
        positions(wanted, evaluation, job) if "positions" in wanted.tasks else (),
        needle(wanted, evaluation, job) if "needle" in wanted.tasks else (),
    )


def rank(argv: list[str], *, launched: bool = False) -> int:
    """Do the work of one rank, and return the exit code; rank 0 prints and writes."""

    def prepare() -> "tuple[ResolvedJob, Callable[[ResolvedJob, torch.device], None]]":
        wanted, job = checked(argv)

        def work(job: ResolvedJob, device: "torch.device") -> None:
            findings = evaluate(wanted, job, device)
            if os.environ.get("RANK", "0") == "0":
                print(tables(findings))
                print(*write(findings, wanted.output), sep="\n", flush=True)

        return job, work

    return work_on_rank(prepare)


def main(argv: list[str]) -> int:
    """Print the tables of an evaluation, and write its files."""
    try:
        wanted, job = checked(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if (longest := job.config.training.seq_len) > wanted.trained_for:
        made = f"{wanted.trained_for:,} tokens"
        print(f"note: the model was made for {made}, and {longest:,} are asked for", file=sys.stderr)
    return rank(argv) if job.degrees.world_size == 1 else run_on_ranks(__name__, argv, job, wanted.ranks_here)


if __name__ == "__main__":
    from trainer.commands.rank import command_line

    sys.exit(command_line(rank))
