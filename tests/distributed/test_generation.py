"""Law: generated tokens equal the model's own forward, on one rank and on several, with windows and in a batch."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lct_inference import generate as command
from lct_inference import generation
from lct_inference.generation import Sampling, Writing, generate
from longshard.context.regions import context_parallel
from tests.distributed.pool import WorkerPool
from tests.hf_decoders import hf_model
from tests.hf_tensors import to_hf
from tests.slow import slow
from trainer.commands.finished_run import loaded_model
from trainer.commands.main import main as lct
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig, Model, Parallelism, Training
from trainer.data.tokenizers.tokenizer import default_tokenizer_path
from trainer.families.decoder_args import TransformerArgs
from trainer.families.layer_kinds import RopeScaling
from trainer.job import ResolvedJob, resolve
from trainer.models.initialization import initialize
from trainer.models.model_spec import model_spec
from trainer.parallel.parallel_dims import ParallelDims
from trainer.runtime.process_group import Process, process_group

ROOT = Path(__file__).resolve().parents[2]

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
    Model(name="deepseek_v3"),
    Model(name="kimi_linear"),
    Model(name="qwen3_next"),
    Model(name="granitemoehybrid"),
    Model(name="qwen3_5_moe"),
    Model(name="deepseek_v32"),
]
IDS = ["plain", "windows and sinks", "every second window", "convolution", "qwen3", "qwen2"]
IDS += ["gpt_oss", "deepseek_v3", "kimi_linear", "qwen3_next", "granitemoehybrid", "qwen3_5_moe"]
IDS += ["deepseek_v32"]


def models(*quick: str) -> list[Any]:
    """All of them as cases of a test; `make test` has those that are named."""
    return [
        pytest.param(m, id=i, marks=() if i in quick else pytest.mark.slow) for m, i in zip(MODELS, IDS, strict=True)
    ]


@contextmanager
def opened(
    model: Model, seq_len: int = LENGTH, cp: int = 1, method: str = "ring"
) -> Iterator[tuple[nn.Module, ResolvedJob, ParallelDims]]:
    process = Process.from_environment()
    config = JobConfig(
        model=model,
        training=Training(seq_len=seq_len, local_batch_size=1, dtype="float64"),
        parallelism=Parallelism(
            context_parallel_degree=cp,
            context_parallel_method=method,
            tensor_parallel_degree=process.world_size // cp,
            fsdp_reshard_after_forward="never",
        ),
    )
    job = resolve(config, process.world_size, "cpu")
    with process_group(process, config.comm):
        dims, spec = ParallelDims(job.degrees, "cpu"), model_spec(model.name)
        with torch.device("meta"):
            part = spec.build(job.model).double()
        spec.parallelize(part, dims, job)
        initialize(part, seed=1, device=torch.device("cpu"))
        draw(part.output.weight, 0.05, seed=7)
        for name, parameter in part.named_parameters():
            if name.endswith("sinks.weight"):
                draw(parameter, 1.0, seed=8)
        yield part, job, dims


@torch.no_grad()
def draw(parameter: torch.Tensor, std: float, *, seed: int) -> None:
    """The same numbers on every layout."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype)
    whole.normal_(std=std, generator=torch.Generator().manual_seed(seed))
    if isinstance(parameter, DTensor):
        whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


def written_case(
    model: Model,
    prompts: list[list[int]],
    tokens: int,
    sampling: Sampling,
    seed: int,
    ends: tuple[int, ...] = (),
    *layout: object,
) -> list[list[int]]:
    with opened(model, *layout) as (part, job, dims):
        return generate(part, job, dims, prompts, Writing(tokens, sampling, seed, ends))


def likeliest_case(model: Model, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """By the training's own forward of the whole text, again for each token."""
    with opened(model) as (part, job, dims), torch.no_grad():
        texts = [list(prompt) for prompt in prompts]
        for text in texts:
            for _ in range(tokens):
                read = torch.tensor([text])
                if job.attention is None:
                    hidden = part(read)
                else:
                    settings = {"buffers": [read], "buffer_seq_dims": [1], "options": job.attention, "sequences": 1}
                    with context_parallel(dims["cp"], **settings) as cp:
                        hidden = part(read, attention_plan=cp.attention_plan)
                text.append(int(part.output(hidden[:, -1]).argmax()))
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("model", models("gpt_oss"))
def test_greedy_tokens_are_those_of_the_whole_text_read_again(pool: WorkerPool, model: Model) -> None:
    """Prompts of different lengths together, and each alone."""
    ((together),) = pool.run(1, written_case, model, PROMPTS, 12, GREEDY, 0)
    assert [len(text) for text in together] == [12, 12, 12]
    (wanted,) = pool.run(1, likeliest_case, model, PROMPTS, 12)
    assert together == wanted
    for prompt, text in zip(PROMPTS, together, strict=True):
        assert pool.run(1, written_case, model, [prompt], 12, GREEDY, 0) == [[text]]


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=1.0, top_p=0.9), id="drawn"),
    ],
)
@pytest.mark.parametrize("model", models("windows and sinks"))
def test_tensor_parallel_ranks_write_the_same(pool: WorkerPool, model: Model, sampling: Sampling) -> None:
    """Chunks of odd lengths, and a text that outgrows the longest sequence."""
    (alone,) = pool.run(1, written_case, model, PROMPTS, 30, sampling, 3)
    assert pool.run(2, written_case, model, PROMPTS, 30, sampling, 3) == [alone, alone]
    assert len({token for text in alone for token in text}) > (10 if sampling.temperature else 2), "the model speaks"


@pytest.mark.parametrize(
    ("model", "cp", "ranks", "method"),
    [
        pytest.param(MODELS[IDS.index(name)], cp, ranks, method, id=f"{name}, cp{cp} of {ranks}, {method}", marks=marks)
        for name, cp, ranks, method, marks in [
            ("windows and sinks", 2, 2, "ring", ()),
            ("convolution", 2, 4, "all_gather", ()),
            ("kimi_linear", 2, 4, "ring", ()),
            ("deepseek_v32", 2, 4, "ring", ()),
            *((name, 2, 2, "ring", pytest.mark.slow) for name in IDS if name != "windows and sinks"),
            ("plain", 4, 4, "all_to_all", pytest.mark.slow),
            ("gpt_oss", 2, 4, "ring", pytest.mark.slow),
            ("windows and sinks", 4, 8, "ring", pytest.mark.slow),
        ]
    ],
)
def test_context_parallel_ranks_write_the_same(
    pool: WorkerPool, model: Model, cp: int, ranks: int, method: str
) -> None:
    """Prompts of one token, which most ranks have nothing of, and a text that outgrows the longest sequence."""
    settings = PROMPTS, 30, Sampling(temperature=1.0, top_p=0.9), 3
    (alone,) = pool.run(1, written_case, model, *settings)
    assert pool.run(ranks, written_case, model, *settings, (), LENGTH, cp, method) == ranks * [alone]
    assert len({token for text in alone for token in text}) > 10, "the model says something"


def local_heads_case(cp: int) -> set[tuple[int, ...]]:
    """Shapes that the cache keeps."""
    with opened(Model(), cp=cp) as (part, job, dims):
        seen: list[generation.GenerationCache] = []

        class Seen(generation.GenerationCache):
            def __init__(self, *args) -> None:
                super().__init__(*args)
                seen.append(self)

        with mock.patch.object(generation, "GenerationCache", Seen):
            generate(part, job, dims, PROMPTS, Writing(3, GREEDY, seed=0))
        return {tuple(kept.shape) for pair in seen[0]._kept.values() for kept in pair}


def test_a_rank_keeps_its_own_heads_and_tokens_and_no_more_than_are_written(pool: WorkerPool) -> None:
    """Prompts of 8 tokens and 3 more. Two context-parallel ranks keep 4 and at most 2."""
    assert pool.run(1, local_heads_case, 1) == [{(3, 4, 11, 32)}]
    assert pool.run(2, local_heads_case, 1) == 2 * [{(3, 2, 11, 32)}]
    assert pool.run(2, local_heads_case, 2) == 2 * [{(3, 4, 6, 32)}]
    assert pool.run(4, local_heads_case, 2) == 4 * [{(3, 2, 6, 32)}]


def hugging_face_case(family: str, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return our continuations of the prompts, and transformers' continuations with the same weights."""
    with opened(Model(name=family)) as (part, job, dims):
        ours = generate(part, job, dims, prompts, Writing(tokens, GREEDY, seed=0))
        args = job.model
        theirs = hf_model(family, args).eval()
        theirs.generation_config.eos_token_id = None
        weights = to_hf(model_spec(family), args, part.named_parameters())
        theirs.load_state_dict(weights, strict=not args.tie_embeddings)
        continuations = []
        for prompt in prompts:
            ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
            continuations.append(ids[0, len(prompt) :].tolist())
        return ours, continuations


@pytest.mark.parametrize("family", ["qwen3", "mistral", *slow("llama3")])
def test_greedy_tokens_are_those_of_transformers(pool: WorkerPool, family: str) -> None:
    ((ours, theirs),) = pool.run(1, hugging_face_case, family, PROMPTS, 16)
    assert ours == theirs


LLAMA = TransformerArgs(
    dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_hidden_dim=96, vocab_size=4354, max_seq_len=64, norm_eps=1e-6
)

TIED = replace(LLAMA, n_kv_heads=2, tie_embeddings=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8))


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    return made_folder(tmp_path, LLAMA)


def made_folder(tmp_path: Path, args: TransformerArgs) -> Path:
    """A folder as transformers saves it, in float64, with our tokenizer."""
    model = hf_model("llama3", args)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "hf")
    shutil.copy(default_tokenizer_path(), tmp_path / "hf" / "tokenizer.model")
    return tmp_path / "hf"


def folder_case(folder: str, prompts: list[list[int]], tokens: int, sampling: Sampling) -> list[list[int]]:
    process = Process.from_environment()
    _, job = command.checked([folder, "--ngpu", str(process.world_size)])
    with process_group(process, job.config.comm):
        model, dims = loaded_model(job, process.device)
        return generate(model, job, dims, prompts, Writing(tokens, sampling, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("args", [TIED, LLAMA], ids=["tied, scaled", "plain"])
def test_a_hugging_face_folder_is_read_as_it_is(pool: WorkerPool, tmp_path: Path, args: TransformerArgs) -> None:
    hf_folder = made_folder(tmp_path, args)
    theirs = transformers.LlamaForCausalLM.from_pretrained(hf_folder, dtype="float64")
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = [theirs.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]
    assert len({token for text in wanted for token in text}) > 10, "the model says something"
    assert pool.run(1, folder_case, str(hf_folder), PROMPTS, 16, GREEDY) == [wanted]
    assert pool.run(2, folder_case, str(hf_folder), PROMPTS, 16, GREEDY) == [wanted, wanted]
    (drawn,) = pool.run(1, folder_case, str(hf_folder), PROMPTS, 16, Sampling(temperature=1.0))
    assert drawn != wanted
    assert pool.run(2, folder_case, str(hf_folder), PROMPTS, 16, Sampling(temperature=1.0)) == [drawn, drawn]


def refused_folder(argv: list[str], capsys: pytest.CaptureFixture) -> str:
    assert lct(["generate", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_a_broken_folder_is_one_sentence(hf_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert "which has no steps" in refused_folder([str(hf_folder), "--step", "3"], capsys)
    said = refused_folder([str(hf_folder), "--ngpu", "3"], capsys)
    assert said.startswith("error: parallelism.tensor_parallel_degree = 3 ")
    assert said.endswith("degrees that fit this model: 1, 2; tensor_parallel_degree is --ngpu here\n")
    said = refused_folder([str(hf_folder), "--ngpu", "3", "--context-parallel", "2"], capsys)
    assert said == "error: --context-parallel 2 does not divide the 3 ranks; give --ngpu a multiple of it\n"
    said = refused_folder([str(hf_folder), "--ngpu", "6", "--context-parallel", "2"], capsys)
    assert said.endswith("1, 2; tensor_parallel_degree is --ngpu over --context-parallel here\n")
    (hf_folder / "tokenizer.model").rename(hf_folder / "kept")
    assert "holds no tokenizer" in refused_folder([str(hf_folder)], capsys)
    (hf_folder / "kept").rename(hf_folder / "tokenizer.model")
    weights = hf_folder / "model.safetensors"
    tensors = {name: x.clone() for name, x in safetensors.torch.load_file(weights).items()}  # not the file itself
    os.truncate(weights, weights.stat().st_size // 2)
    for ranks in ("1", "2"):
        said = refused_folder([str(hf_folder), "--ngpu", ranks], capsys)
        assert len(said.splitlines()) == 1
        assert "model.safetensors" in said
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, weights)
    assert "there is no model.norm.weight, which this model has" in refused_folder([str(hf_folder)], capsys)
    (hf_folder / "config.json").write_text("{")
    assert "config.json is no JSON" in refused_folder([str(hf_folder)], capsys)
    (hf_folder / "config.json").unlink()
    assert "holds no run" in refused_folder([str(hf_folder)], capsys)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [["--ngpu", "2"], [], ["--ngpu", "4", "--context-parallel", "2"]])
def test_the_command_starts_its_ranks_and_one_of_them_prints(hf_folder: Path, ranks: list[str]) -> None:
    arguments = ["--prompt", "def f(", "--prompt", "class A", "--tokens", "5", "--temperature", "0"]
    line = [sys.executable, "-m", "trainer", "generate", str(hf_folder), *arguments, *ranks]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("\n\nclass A")
    assert first.startswith("def f(")
    assert len(second) > 3


def test_drawn_tokens_follow_the_seed_and_the_number_of_the_prompt(pool: WorkerPool) -> None:
    drawn = Sampling(temperature=1.0)
    run = lambda prompts, seed: pool.run(1, written_case, Model(), prompts, 8, drawn, seed)[0]  # noqa: E731
    first = run(PROMPTS, 0)
    assert first == run(PROMPTS, 0)
    assert first[:1] == run(PROMPTS[:1], 0), "other prompts change nothing"
    assert run(PROMPTS[::-1], 0)[:1] == run(PROMPTS[-1:], 0), "nor what fills up the shorter ones"
    assert first != run(PROMPTS, 1)
    assert first != pool.run(1, written_case, Model(), PROMPTS, 8, GREEDY, 0)[0]


def test_a_text_ends_before_an_end_and_others_continue(pool: WorkerPool) -> None:
    (free,) = pool.run(1, written_case, Model(), PROMPTS, 8, GREEDY, 0)
    end = free[1][3]
    (ended,) = pool.run(1, written_case, Model(), PROMPTS, 8, GREEDY, 0, (end,))
    assert ended == [text[: text.index(end)] if end in text else text for text in free]


def test_a_text_that_is_full_continues_with_its_younger_half(pool: WorkerPool) -> None:
    (whole,) = pool.run(1, written_case, Model(), PROMPTS[:1], 20, GREEDY, 0, (), 12)
    fits, younger = whole[0][:5], whole[0][5:]  # 8 and 4 are 12; the fifth is the last one that the cache gives
    assert pool.run(1, written_case, Model(), PROMPTS[:1], 5, GREEDY, 0)[0] == [fits]
    half = [*PROMPTS[0], *fits][-6:]
    assert pool.run(1, written_case, Model(), [half], 7, GREEDY, 0, (), 12)[0] == [younger[:7]]


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


def refused(model: Model, sampling: Sampling) -> str:
    with opened(model) as (part, job, dims):
        with torch.no_grad():
            local = part.norm.weight.to_local() if isinstance(part.norm.weight, DTensor) else part.norm.weight
            local[0] = torch.nan
        try:
            generate(part, job, dims, PROMPTS, Writing(3, sampling, seed=0))
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)], ids=["greedy", "drawn"])
def test_weights_that_are_not_numbers_write_nothing(pool: WorkerPool, sampling: Sampling) -> None:
    for said in pool.run(2, refused, Model(), sampling):
        assert said.startswith("the model's logits are not numbers, so its weights are damaged or diverged")
