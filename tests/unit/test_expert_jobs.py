"""Laws of jobs with experts: sizes, degrees, refusals, the summary, the estimate of memory."""

from dataclasses import replace

import pytest
import torch

from trainer.config.errors import ConfigError
from trainer.config.loader import parse_command_line
from trainer.families.registry import MODELS, flavor_args
from trainer.job import ResolvedJob, resolve
from trainer.job.experts import note_of_router
from trainer.job.summary import summary
from trainer.models.decoder import Transformer

P = "--parallelism."
QWEN, LOAD = "--model.name=qwen3_moe", "--model.router_aux_loss_load=micro_batch"


def job_of(*argv: str, ranks: int = 1) -> ResolvedJob:
    return resolve(parse_command_line([QWEN, *argv]).config, ranks, "cpu")


# Total, and billions that are active; gpt-oss counts them without the embedding.
PUBLISHED = {
    ("qwen3_moe", "30B-A3B"): (30_532_122_624, 3.35),
    ("qwen3_moe", "235B-A22B"): (235_093_634_560, 22.19),
    ("gpt_oss", "20b"): (20_914_757_184, 3.61 + 0.58),
    ("gpt_oss", "120b"): (116_829_156_672, 5.13 + 0.58),
}


@pytest.mark.parametrize(("family", "flavor"), PUBLISHED)
def test_a_published_size_has_its_parameters(family: str, flavor: str) -> None:
    args = MODELS[family].flavors[flavor]
    with torch.device("meta"):
        model = Transformer(replace(args, max_seq_len=8))
    total, active = PUBLISHED[family, flavor]
    assert args.n_params() == sum(p.numel() for p in model.parameters()) == total
    assert args.n_active_params() / 1e9 == pytest.approx(active, abs=0.006)


def test_flops_count_the_experts_that_a_token_chooses() -> None:
    args = MODELS["qwen3_moe"].flavors["30B-A3B"]
    without_embedding = args.n_active_params() - args.vocab_size * args.dim
    assert args.flops_per_token(1)[0] == pytest.approx(6 * without_embedding, rel=0.001)


@pytest.mark.parametrize(
    ("argv", "ranks", "parts"),
    [
        ([QWEN, f"{P}expert_parallel_degree=3"], 12, ["= 3 must divide the 8 experts", "12 ranks", "fit: 1, 2, 4"]),
        ([QWEN, f"{P}expert_parallel_degree=4"], 2, ["= 4 must divide", "the 2 ranks", "fit: 1, 2"]),
        ([QWEN, f"{P}expert_parallel_degree=0"], 2, ["expert_parallel_degree = 0 must be at least 1"]),
        (
            [QWEN, f"{P}expert_parallel_degree=2", f"{P}data_parallel_replicate_degree=2"],
            2,
            ["= 2 must divide", "the 1 ranks", "fit: 1"],
        ),
        ([f"{P}expert_parallel_degree=2"], 2, ["no effect with model.name = 'llama3'", "has no experts", "qwen3_moe"]),
        (["--model.router_aux_loss_coef=0.1"], 1, ["router_aux_loss_coef = 0.1 has no effect with model.name"]),
        (["--model.router_bias_update_rate=0.1"], 1, ["router_bias_update_rate = 0.1 has no effect"]),
        (
            ["--model.router_aux_loss_load=micro_batch"],
            1,
            ["router_aux_loss_load = 'micro_batch' has no effect with model."],
        ),
        ([QWEN, LOAD, "--model.router_aux_loss_coef=0"], 1, ["has no effect with model.router_aux_loss_coef = 0"]),
        ([QWEN, LOAD, "--training.sequence_chunks=2"], 1, ["micro-batch before its first backward", "chunks = 2 does"]),
        (
            [QWEN, LOAD, f"{P}pipeline_parallel_degree=2"],
            2,
            ["needs all layers' choices", "pipeline_parallel_degree = 2 does not", "use 1, or 'step_before'"],
        ),
        ([QWEN, "--float8.enable"], 1, ["float8.enable = true does not work with the experts", "no product"]),
        (
            [QWEN, "--compile.enable", f"{P}enable_async_tensor_parallel", f"{P}tensor_parallel_degree=2"],
            2,
            ["enable_async_tensor_parallel = true does not work with the experts", "does not cut"],
        ),
        (
            [QWEN, "--compile.enable", "--activation_checkpoint.mode=memory_budget"],
            1,
            ["activation_checkpoint.mode = 'memory_budget' does not work with the experts", "'selective' or 'full'"],
        ),
    ],
)
def test_what_cannot_work_is_one_sentence(argv: list[str], ranks: int, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(parse_command_line(argv).config, ranks, "cpu")
    for part in parts:
        assert part in str(error.value)


def test_the_summary_says_where_experts_are_and_what_is_sent() -> None:
    job = job_of(f"{P}expert_parallel_degree=4", f"{P}tensor_parallel_degree=2", ranks=8)
    text = " ".join(summary(job).split())
    for part in (
        "2 of 8 experts of width 256 a token",
        "active parameters)",
        "2 of 8 on each of ep 4 ranks, 2 ranks shard each one's weights",
        "a token is sent to 1.39 other ranks if it chooses among all alike",
        "balanced by auxiliary loss (0.001)",
        "one product for each expert",
    ):
        assert part in text
    in_bfloat16 = job_of("--training.dtype=bfloat16")
    assert "one grouped product for all experts" in " ".join(summary(in_bfloat16).split())


@pytest.mark.parametrize(("tp", "cp", "ep"), [(1, 1, 1), (1, 1, 4), (2, 2, 4), (2, 1, 2), (1, 4, 2)])
def test_weights_of_experts_are_divided_by_all_ranks(tp: int, cp: int, ep: int) -> None:
    degrees = f"{P}tensor_parallel_degree={tp}", f"{P}context_parallel_degree={cp}", f"{P}expert_parallel_degree={ep}"
    job = job_of(*degrees, ranks=4)
    model, experts = job.model, job.model.experts
    expert_weights = model.n_layers * experts.number * experts.weights(model.dim)
    norms = (2 * 4 + 1) * 256 + 4 * 2 * 32
    gates = 4 * experts.number * model.dim
    others = (model.n_params() - expert_weights - norms - gates) / 4 + gates / (4 / tp)
    assert job.task.memory(job).weights == pytest.approx(4 * (expert_weights / 4 + others), rel=1e-6)


@pytest.mark.parametrize(
    ("coefficient", "words"), [("0", "it is never trained"), ("0.1", "its balance loss alone trains it")]
)
def test_a_router_without_a_gradient_is_told(coefficient: str, words: str) -> None:
    args = flavor_args(parse_command_line([QWEN]).config.model)
    one = replace(args, router_aux_loss_coef=float(coefficient), experts=replace(args.experts, per_token=1))
    (note,) = note_of_router(one)
    assert words in note
    assert note_of_router(replace(one, experts=replace(one.experts, normalise=False))) == ()
    assert note_of_router(args) == ()
