"""A text continued by a model: the tokens are the model's own, on one rank, with and without planned attention."""

import itertools

import pytest
import torch

from tests.distributed.pool import WorkerPool
from trainer.components.generation import continued
from trainer.config.schema import JobConfig, Model, Training
from trainer.distributed.parallel_dims import ParallelDims
from trainer.job import resolve
from trainer.models.initialization import initialize
from trainer.models.model_spec import model_spec

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def generate(model: Model, temperature: float, seed: int) -> tuple[list[int], list[int]]:
    """Six tokens of `continued`, and what the logits of the whole text say at each of their places."""
    config = JobConfig(model=model, training=Training(seq_len=12, local_batch_size=1, dtype="float64"))
    job = resolve(config, 1, "cpu")
    dims, spec = ParallelDims(job.degrees, "cpu"), model_spec(model.name)
    with torch.device("meta"):
        part = spec.build(job.model).double()
    spec.parallelize(part, dims, job)
    initialize(part, seed=1, device=torch.device("cpu"))
    with torch.no_grad():
        part.output.weight.normal_(std=0.05, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    written = list(
        itertools.islice(continued(part, job, dims, PROMPT, temperature=temperature, generator=generator), 6)
    )
    if job.attention is not None:
        return written, []
    likeliest = []
    for end in range(len(PROMPT), len(PROMPT) + 6):
        seen = [*PROMPT, *written][max(end - 12, 0) : end]  # the model has 12 positions
        with torch.no_grad():
            likeliest.append(int(part.output(part(torch.tensor([seen])))[0, -1].argmax()))
    return written, likeliest


@pytest.mark.parametrize("model", [Model(), Model(sliding_window=4, attention_sinks=True), Model(short_conv_kernel=4)])
def test_greedy_tokens_are_the_likeliest_and_drawn_ones_follow_the_seed(pool: WorkerPool, model: Model) -> None:
    ((greedy, likeliest),) = pool.run(1, generate, model, 0.0, 0)
    assert len(greedy) == 6
    if model.sliding_window is None:
        assert greedy == likeliest
    ((drawn, _),) = pool.run(1, generate, model, 1.0, 0)
    ((again, _),) = pool.run(1, generate, model, 1.0, 0)
    ((other, _),) = pool.run(1, generate, model, 1.0, 1)
    assert drawn == again
    assert len({tuple(greedy), tuple(drawn), tuple(other)}) == 3


def test_a_window_as_long_as_the_text_changes_nothing(pool: WorkerPool) -> None:
    ((planned, _),) = pool.run(1, generate, Model(sliding_window=11), 0.0, 0)
    ((plain, _),) = pool.run(1, generate, Model(), 0.0, 0)
    assert planned[:4] == plain[:4]  # up to 11 tokens each sees all
