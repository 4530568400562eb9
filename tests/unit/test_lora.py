"""Laws of adapters: each refusal is one sentence, and memory and FLOPs count the trained parameters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lct_planner.timing import device
from trainer.components.optimizer import build_optimizer
from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig, LoRA
from trainer.families.decoder_args import LLAMA3 as FLAVORS
from trainer.families.decoder_args import TransformerArgs
from trainer.families.feed_forward_args import ExpertArgs
from trainer.job import resolve
from trainer.job.lora import adapter_names, adapter_sizes, check_lora, flops_beside
from trainer.models.decoder import Transformer
from trainer.models.initialization import initialize
from trainer.transforms.lora import A, B, Dropout, apply_lora, is_adapter, merged, without_adapters

INITIAL = "--checkpoint.initial_load_path=somewhere"


def job_of(tmp_path: Path, *arguments: str, ranks: int = 1):
    config = parse_command_line([f"--job.dump_folder={tmp_path}", *arguments]).config
    return resolve(config, ranks, "cpu", missing=[])


@pytest.mark.parametrize(
    ("arguments", "ranks", "said"),
    [
        (["--lora.modules", "wq", "q_proj", INITIAL], 1, "'q_proj' must be a linear module of a layer"),
        (["--lora.modules", "output", INITIAL], 1, "'output' must be a linear module of a layer"),
        (["--model.name=qwen3_moe", "--lora.modules", "w1", INITIAL], 1, "'w1' must be a linear module of a layer"),
        (
            ["--model.name=qwen3_moe", "--lora.modules", "wq", "w13", "--lora.dropout=0.1", INITIAL],
            1,
            "lora.dropout = 0.1 does not work with the experts' weights ['w13'] of lora.modules",
        ),
        (
            ["--model.name=qwen2_moe", "--lora.modules", "wq", "w1", "--lora.dropout=0.1", INITIAL],
            1,
            "lora.dropout = 0.1 does not reach shared experts",
        ),
        (
            ["--lora.dropout=0.1", "--training.balance=step", "--training.attention_mask=document", INITIAL],
            2,
            "lora.dropout = 0.1 numbers the tokens of sequences, which training.balance = 'step' takes apart",
        ),
        (["--model.name=qwen3_moe", "--lora.modules", "gate", INITIAL], 1, "'gate' must be a linear module of a layer"),
        ([], 1, "lora.rank = 8 adapts given weights, which are never saved again; name them with checkpoint.initial"),
        (
            [INITIAL, "--float8.enable", "--float8.emulate"],
            1,
            "float8.enable = true multiplies weights that are",
        ),
        (
            [
                INITIAL,
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble",
            ],
            2,
            "freezes most weights; use the schedule 'Interleaved1F1B'",
        ),
        (
            [
                INITIAL,
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_module_fqns",
                "tok_embeddings",
                "layers.0,layers.1,layers.2,layers.3,norm,output",
            ],
            2,
            "the first stage of a pipeline, and each of its ranks, must have a layer",
        ),
        (
            [
                INITIAL,
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_module_fqns",
                "tok_embeddings,layers.0,layers.1,layers.2,layers.3",
                "norm,output",
            ],
            2,
            "the first stage of a pipeline, and each of its ranks, must have a layer",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(tmp_path: Path, arguments: list[str], ranks: int, said: str) -> None:
    rows = ["--training.local_batch_size=4"]
    with pytest.raises(ConfigError) as raised:
        job_of(tmp_path, "--lora.rank=8", *rows, *arguments, ranks=ranks)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def model_with(settings: LoRA, args: TransformerArgs | None = None) -> Transformer:
    with torch.device("meta"):
        model = Transformer(args or FLAVORS["debugmodel"])
    apply_lora(model, settings)
    return model


def test_adapters_are_what_is_counted(tmp_path: Path) -> None:
    """In memory too: gradients and moments of adapters alone, weights of all."""
    settings = ["--lora.rank=8", "--lora.modules", "wq", "w2", "--", INITIAL]
    job = job_of(tmp_path, *(x for x in settings if x != "--"))
    model = model_with(job.config.lora)
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert set(map(is_adapter, trained)) == {True}
    sizes = adapter_sizes(job.config, job.model)
    assert sum(trained.values()) == sum(sizes.values()) == 4 * 8 * (256 + 256 + 512 + 256)
    plain, memory = job_of(tmp_path), job.task.memory(job)
    assert memory.gradients == 4 * sum(sizes.values())
    assert memory.optimizer == 2 * memory.gradients
    assert memory.weights == plain.task.memory(plain).weights + memory.gradients


def test_a_frozen_weight_saves_a_third(tmp_path: Path) -> None:
    job = job_of(tmp_path, "--lora.rank=8", INITIAL)
    weights = sum(rows * columns for rows, columns in job.model.linear_shapes().values())
    assert flops_beside(job.config, job.model) == 6 * sum(adapter_sizes(job.config, job.model).values()) - 2 * weights
    assert flops_beside(job_of(tmp_path).config, job.model) == 0


def test_a_start_changes_nothing_and_the_optimizer_has_adapters_alone() -> None:
    plain, adapted = (model_with(LoRA(rank=rank)) for rank in (0, 4))
    for model in (plain, adapted):
        initialize(model, seed=1, device=torch.device("cpu"))
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(adapted(tokens), plain(tokens), rtol=0, atol=0)
    held = build_optimizer([adapted], JobConfig()).param_groups
    assert {p for group in held for p in group["params"]} == {p for p in adapted.parameters() if p.requires_grad}
    module = adapted.layers["0"].attention.wq
    with torch.no_grad():
        getattr(module, B).normal_()
        x = torch.randn(3, 256)
        weight = merged(module.weight, getattr(module, A), getattr(module, B), LoRA(rank=4))
        torch.testing.assert_close(module(x), x @ weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 8])
def test_the_preset_adapts_on_one_gpu_or_more(ranks: int) -> None:
    config = parse_command_line(["--job.config_file=llama3_8b_lora"]).config
    job = resolve(config, ranks, "cuda", missing=(missing := []))
    assert len(missing) == 3  # weights, tokenizer, conversations
    assert job.notes == ()
    memory = job.task.memory(job)
    assert memory.total < 0.8 * 80e9
    assert memory.optimizer < 0.02 * memory.weights


@pytest.mark.parametrize(("kind", "length", "gib"), [("lora", 90112, 15.04), ("qlora", 131072, 5.70)])
def test_the_presets_for_24_gb_keep_what_fits_there(kind: str, length: int, gib: float) -> None:
    """From step to step; `lct estimate` traces the peak."""
    config = parse_command_line([f"--job.config_file=llama3_8b_{kind}_24gb"]).config
    job = resolve(config, 1, "cuda", missing=[])
    assert job.notes == ()
    assert config.training.seq_len == length
    memory = job.task.memory(job)
    assert memory.weights / 2**30 == pytest.approx(gib, abs=0.03)
    assert memory.total < device("rtx4090").memory - 6e9


def test_alpha_over_rank_is_the_factor() -> None:
    assert LoRA(rank=4, alpha=8.0).scale == 2.0


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_drops_its_share_and_keeps_the_mean(share: float) -> None:
    """Independently for tokens, features, modules and seeds: counts of 2^18 bits lie within five deviations."""
    numbers = torch.arange(2**10).view(2, -1)
    factors = [Dropout(key, share).factors(numbers, range(256), torch.float64) for key in (1, 2)]
    for factor in factors:
        assert factor.unique().tolist() == pytest.approx([0, 1 / (1 - share)], rel=1e-4)
        assert abs(factor.mean() - 1) < 5 * (share / (1 - share) / 2**18) ** 0.5
        for dim, size in (((0, 1), 2**10), (2, 2**8)):
            spread = factor.mean(dim).flatten() - 1
            assert spread.abs().max() < 6 * (share / (1 - share) / size) ** 0.5
    both = ((factors[0] == 0) & (factors[1] == 0)).double().mean()
    assert abs(both - share**2) < 5 * (share**2 / 2**18) ** 0.5


def test_a_part_of_tokens_and_features_has_the_factors_of_the_whole() -> None:
    numbers, dropout = torch.arange(24).view(3, 8), Dropout(7, 0.4)
    whole = dropout.factors(numbers, range(14), torch.float64)
    part = dropout.factors(numbers[1:, ::2], range(5, 13), torch.float64)
    assert torch.equal(part, whole[1:, ::2, 5:13])
    assert torch.equal(numbers, torch.arange(24).view(3, 8))


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_a_forward_without_adapters_is_that_of_the_frozen_weights(family: str) -> None:
    """A forward with adapters equals the merged weights."""
    args = replace(FLAVORS["debugmodel"], experts=ExpertArgs(4, 2, 48)) if family == "qwen3_moe" else None
    modules = ("wq", "w13", "w2") if args else ()
    plain, adapted = (model_with(LoRA(rank=rank, modules=modules), args) for rank in (0, 4))
    for model in (plain, adapted):
        initialize(model, seed=1, device=torch.device("cpu"))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 2 * 4 * (3 if args else 7)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained:
            parameter.normal_(generator=generator)
        tokens = torch.arange(12)[None]
        wanted, other = plain(tokens), adapted(tokens)
        with without_adapters([adapted]):
            assert torch.equal(adapted(tokens), wanted)
        assert torch.equal(adapted(tokens), other)
        assert not torch.allclose(other, wanted)
        parts = dict(adapted.named_parameters())
        for name, weight in plain.named_parameters():
            a, b = (parts.get(x) for x in adapter_names(name.removesuffix(".weight")))
            if a is not None:
                weight.copy_(merged(weight, a, b, LoRA(rank=4)))
        torch.testing.assert_close(plain(tokens), other, rtol=1e-4, atol=1e-4)


def test_check_takes_a_job_without_adapters(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    check_lora(job.config, job.model, None)
