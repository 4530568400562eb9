"""Texts continued by a model, on one rank: the tokens are the model's own, with windows and sinks and in a batch."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.distributed.pool import WorkerPool
from tests.hf_decoders import hf_model
from trainer.components import generation
from trainer.components.generation import Sampling, generate
from trainer.config.schema import JobConfig, Model, Training
from trainer.distributed.parallel_dims import ParallelDims
from trainer.job import ResolvedJob, resolve
from trainer.models.initialization import initialize
from trainer.models.model_spec import model_spec
from trainer.models.state_dict import to_hf

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8]]
GREEDY = Sampling(temperature=0)
LENGTH = 32
MODELS = [
    Model(),
    Model(sliding_window=4, attention_sinks=True),
    Model(sliding_window=3, sliding_window_every=2),
    Model(short_conv_kernel=4),
    Model(name="qwen3", rope_scaling=4.0, rope_scaling_type="yarn", rope_original_seq_len=16),
    Model(name="qwen2"),
    Model(name="gpt_oss"),
]


@contextmanager
def opened(model: Model, seq_len: int = LENGTH) -> Iterator[tuple[nn.Module, ResolvedJob, ParallelDims]]:
    config = JobConfig(model=model, training=Training(seq_len=seq_len, local_batch_size=1, dtype="float64"))
    job = resolve(config, 1, "cpu")
    dims, spec = ParallelDims(job.degrees, "cpu"), model_spec(model.name)
    with torch.device("meta"):
        part = spec.build(job.model).double()
    spec.parallelize(part, dims, job)
    initialize(part, seed=1, device=torch.device("cpu"))
    with torch.no_grad():
        part.output.weight.normal_(std=0.05, generator=torch.Generator().manual_seed(7))
        for name, parameter in part.named_parameters():
            if name.endswith("sinks.weight"):
                parameter.normal_(generator=torch.Generator().manual_seed(8))
    yield part, job, dims


def written_case(
    model: Model, prompts: list[list[int]], tokens: int, sampling: Sampling, seed: int, ends=(), seq_len=LENGTH
):
    with opened(model, seq_len) as (part, job, dims):
        return generate(part, job, dims, prompts, tokens=tokens, sampling=sampling, seed=seed, ends=ends)


def likeliest_case(model: Model, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """By the training's own forward of the whole text, again for each token."""
    with opened(model) as (part, job, dims), torch.no_grad():
        texts = [list(prompt) for prompt in prompts]
        for logits in itertools.islice(generation._again(part, job, dims, texts), tokens):
            for text, row in zip(texts, logits, strict=True):
                text.append(int(row.argmax()))
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize(
    "model",
    MODELS,
    ids=["plain", "windows and sinks", "every second window", "convolved", "qwen3", "qwen2", "gpt_oss"],
)
def test_greedy_tokens_are_those_of_the_whole_text_read_again(pool: WorkerPool, model: Model) -> None:
    """Prompts of different lengths together, and each alone."""
    ((together),) = pool.run(1, written_case, model, PROMPTS, 12, GREEDY, 0)
    assert [len(text) for text in together] == [12, 12, 12]
    (wanted,) = pool.run(1, likeliest_case, model, PROMPTS, 12)
    assert together == wanted
    for prompt, text in zip(PROMPTS, together, strict=True):
        assert pool.run(1, written_case, model, [prompt], 12, GREEDY, 0) == [[text]]


def test_a_long_prompt_is_read_in_chunks(pool: WorkerPool) -> None:
    prompt = [[i * 7 % 50 for i in range(600)]]
    whole, chunked = (pool.run(1, chunks_case, prompt, chunk) for chunk in (1000, 100))
    assert whole == chunked


def chunks_case(prompts: list[list[int]], chunk: int) -> list[list[int]]:
    generation._CHUNK = chunk
    return written_case(Model(sliding_window=50, sliding_window_every=2), prompts, 5, GREEDY, 0, seq_len=700)


def hugging_face_case(family: str, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """What we write, and what transformers writes with the same weights."""
    with opened(Model(name=family)) as (part, job, dims):
        ours = generate(part, job, dims, prompts, tokens=tokens, sampling=GREEDY, seed=0)
        args = job.model
        theirs = hf_model(family, args).eval()
        theirs.generation_config.eos_token_id = None
        weights = dict(to_hf(model_spec(family), args, part.named_parameters()))
        theirs.load_state_dict(weights, strict=not args.tie_embeddings)
        found = []
        for prompt in prompts:
            ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
            found.append(ids[0, len(prompt) :].tolist())
        return ours, found


@pytest.mark.parametrize("family", ["llama3", "qwen3", "mistral"])
def test_greedy_tokens_are_those_of_transformers(pool: WorkerPool, family: str) -> None:
    ((ours, theirs),) = pool.run(1, hugging_face_case, family, PROMPTS, 16)
    assert ours == theirs


def test_drawn_tokens_follow_the_seed_and_the_number_of_the_prompt(pool: WorkerPool) -> None:
    drawn = Sampling(temperature=1.0)
    run = lambda prompts, seed: pool.run(1, written_case, Model(), prompts, 8, drawn, seed)[0]  # noqa: E731
    first = run(PROMPTS, 0)
    assert first == run(PROMPTS, 0)
    assert first[:1] == run(PROMPTS[:1], 0), "other prompts change nothing"
    assert first != run(PROMPTS, 1)
    assert first != pool.run(1, written_case, Model(), PROMPTS, 8, GREEDY, 0)[0]


def test_a_text_ends_before_an_end_and_others_go_on(pool: WorkerPool) -> None:
    (free,) = pool.run(1, written_case, Model(), PROMPTS, 8, GREEDY, 0)
    end = free[1][3]
    (ended,) = pool.run(1, written_case, Model(), PROMPTS, 8, GREEDY, 0, (end,))
    assert ended == [text[: text.index(end)] if end in text else text for text in free]


def test_a_text_that_is_full_goes_on_with_its_younger_half(pool: WorkerPool) -> None:
    (whole,) = pool.run(1, written_case, Model(), PROMPTS[:1], 20, GREEDY, 0, (), 12)
    fits, rest = whole[0][:5], whole[0][5:]  # 8 and 4 are 12; the fifth is the last one that the cache gives
    assert pool.run(1, written_case, Model(), PROMPTS[:1], 5, GREEDY, 0)[0] == [fits]
    half = [*PROMPTS[0], *fits][-6:]
    assert pool.run(1, written_case, Model(), [half], 7, GREEDY, 0, (), 12)[0] == [rest[:7]]


def test_tokens_are_drawn_among_the_likeliest() -> None:
    logits = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64).log()
    generator = torch.Generator().manual_seed(0)

    def seen(**settings: float) -> dict[int, float]:
        counts = Counter(Sampling(temperature=1.0, **settings).draw(logits, generator) for _ in range(4000))
        return {token: counts[token] / 4000 for token in sorted(counts)}

    assert seen() == pytest.approx({0: 0.1, 1: 0.3, 2: 0.2, 3: 0.4}, abs=0.03)
    assert seen(top_k=2) == pytest.approx({1: 3 / 7, 3: 4 / 7}, abs=0.03)
    assert seen(top_p=0.7) == pytest.approx({1: 3 / 7, 3: 4 / 7}, abs=0.03)
    assert seen(top_p=0.71) == pytest.approx({1: 3 / 9, 2: 2 / 9, 3: 4 / 9}, abs=0.03)
    assert seen(top_p=1e-9) == {3: 1.0}
    assert seen(top_k=3, top_p=0.5) == pytest.approx({1: 3 / 7, 3: 4 / 7}, abs=0.03)
    assert Sampling(temperature=0).draw(logits, generator) == 3
