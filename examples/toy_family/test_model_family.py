"""Law: a family that comes in through `job.imports` trains under all that Llama trains under."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from examples.toy_family import spec as toy
from examples.toy_family.args import FLAVORS
from examples.toy_family.model import ToyDecoder
from tests.distributed.checkpoint_cases import load_step_save, merged, same
from tests.distributed.harness import Record, assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import degrees, reference
from trainer.components.loss import count_valid, token_losses
from trainer.models.auxiliary_loss import AuxiliaryLoss
from trainer.transforms.compile import compiled_graphs

TOY = ["--job.imports=examples.toy_family", "--model.name=toy", "--model.flavor=toy"]
EXACT = [*TOY, "--training.dtype=float64"]
FLOAT8 = [*TOY, "--float8.enable", "--float8.recipe_name=rowwise", "--float8.emulate", "--float8.filter_fqns=output"]
DOCUMENTS = "--training.attention_mask=document"
COMPILE = ["--compile.enable", "--compile.backend=aot_eager"]
SPLIT = ["--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble"]
LAYOUTS = {
    "fsdp2+tp2": (4, [*degrees(dp_shard=2, tp=2), "--activation_checkpoint.mode=selective"], []),
    "cp2+tp2, documents": (4, degrees(cp=2, tp=2), [DOCUMENTS]),
    "cp2+pp2, recomputed": (4, [*degrees(cp=2, pp=2), "--activation_checkpoint.mode=full"], []),
    "ddp2+tp2, compiled": (4, [*degrees(dp_replicate=2, tp=2), *COMPILE], []),
    "fsdp2+cp2+tp2": (8, degrees(dp_shard=2, cp=2, tp=2), [DOCUMENTS]),
    "fsdp2+tp2+pp2": (8, degrees(dp_shard=2, tp=2, pp=2), []),
    "pp2, backward split": (2, [*degrees(pp=2), *SPLIT], ["--model.flavor=toy4"]),
}
QUICK = ("cp2+tp2, documents",)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_layout_equals_one_process(pool: WorkerPool, layout: str) -> None:
    world_size, arguments, shared = LAYOUTS[layout]
    got = pool.run(world_size, run_layout, [*EXACT, *shared, *arguments])[0]
    assert_parity(got, reference(pool, *EXACT, *shared), 1e-10)
    assert got.gradients[0]["layers.0.attention.wo.bias"].any()
    assert got.buffers["layers.1.bias"].any()


DECODERS = {
    "qwen3": ["--model.name=qwen3"],
    "qwen3_biased": ["--model.name=qwen3", "--model.flavor=tiny_biased"],
    "mistral": ["--model.name=mistral"],
}
QUICK_DECODERS = {("qwen3_biased", "fsdp2+tp2")}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=[] if (family, layout) in QUICK_DECODERS else pytest.mark.slow)
        for family in DECODERS
        for layout in LAYOUTS
        if "backward split" not in layout
    ],
)
def test_families_of_the_decoder_equal_one_process(pool: WorkerPool, family: str, layout: str) -> None:
    (world_size, arguments, shared), model = LAYOUTS[layout], [*DECODERS[family], "--training.dtype=float64"]
    got = pool.run(world_size, run_layout, [*model, *shared, *arguments])[0]
    assert_parity(got, reference(pool, *model, *shared), 1e-10)
    assert all(gradient.any() for gradient in got.gradients[1].values())


def explicit_loss_case() -> dict[str, float]:
    """Return the relative error of each gradient, against one loss to which the penalties are added by hand."""
    penalties: list[torch.Tensor] = []

    def collect(_module: AuxiliaryLoss, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        penalties.append(loss)
        return x

    with trainer_of([*EXACT, "--training.max_norm=1e9"]) as trainer:
        (model,), rows = trainer.model_parts, iter(trainer.task.build_loader())
        batches = [next(rows) for _ in range(trainer.job.micro_batches)]
        with mock.patch.object(AuxiliaryLoss, "forward", collect):
            losses = [token_losses(model.output(model(x["tokens"])), x["labels"]).sum() for x in batches]
        labels, tokens = sum(count_valid(x["labels"]) for x in batches), sum(x["tokens"].numel() for x in batches)
        total = sum(losses) / labels + sum(penalties) / tokens
        names, parameters = zip(*model.named_parameters(), strict=True)
        wanted = torch.autograd.grad(total, parameters)
        trainer.train_step(1)
        got = trainer.record.gradients[0]
        return {
            name: ((got[name] - x).norm() / x.norm()).item() for name, x in zip(names, wanted, strict=True) if x.any()
        }


def test_gradients_are_those_of_the_token_losses_and_the_auxiliary_ones(pool: WorkerPool) -> None:
    errors = pool.run(1, explicit_loss_case)[0]
    assert len(errors) > 20
    assert max(errors.values()) < 1e-12, errors


def compiled_case() -> list[int]:
    """Graphs compiled after each of three steps."""
    with trainer_of([*TOY, *COMPILE]) as trainer:
        return [trainer.train_step(step) or compiled_graphs() for step in (1, 2, 3)]


def test_the_number_of_labels_is_no_constant_of_a_graph(pool: WorkerPool) -> None:
    """Steps have different numbers of labels, and the compiled blocks are not compiled again."""
    first, *later = pool.run(1, compiled_case)[0]
    assert first
    assert later == [first, first]


def run_without_loss_of_first_stage(arguments: list[str]) -> Record:
    """Train with the auxiliary losses of the first pipeline stage dropped."""
    real = toy.SPEC

    def keep_stage(model: ToyDecoder, modules: Collection[str]) -> None:
        real.keep_stage(model, modules)
        for layer in model.layers.values() if "tok_embeddings" in modules else ():
            layer.penalty = Dropped()

    class Dropped(AuxiliaryLoss):
        def forward(self, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
            return x

    with mock.patch.object(toy, "SPEC", replace(real, keep_stage=keep_stage)):
        return run_layout(arguments)


def test_an_auxiliary_loss_that_one_stage_drops_is_seen(pool: WorkerPool) -> None:
    got = pool.run(2, run_without_loss_of_first_stage, [*EXACT, *degrees(pp=2)])[0]
    with pytest.raises(AssertionError, match=r"gradient of layers\.0\.") as error:
        assert_parity(got, reference(pool, *EXACT), 1e-10)
    assert "gradient of layers.1." not in str(error.value).partition("step 2")[0]


@pytest.mark.slow
def test_float8(pool: WorkerPool) -> None:
    got = pool.run(2, run_layout, [*FLOAT8, *degrees(tp=2)])[0]
    assert_parity(got, reference(pool, *FLOAT8), 1e-2)


def parameters_case() -> tuple[int, int]:
    """Parameters by the shape, and by the model."""
    with trainer_of(TOY) as trainer:
        return trainer.job.model.n_params(), sum(p.numel() for p in trainer.model_parts[0].parameters())


def test_the_shape_gives_the_number_of_parameters_and_the_matrices(pool: WorkerPool) -> None:
    by_shape, by_model = pool.run(1, parameters_case)[0]
    assert by_shape == by_model
    with torch.device("meta"):
        model = ToyDecoder(replace(FLAVORS["toy"], vocab_size=32, max_seq_len=4))
    linear = {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert linear == model.args.linear_shapes()


def test_a_checkpoint_of_one_layout_is_loaded_by_another(pool: WorkerPool, tmp_path: Path) -> None:
    saved = merged(pool.run(2, load_step_save, str(tmp_path), [*TOY, *degrees(tp=2)], 1), "after")
    loaded = merged(pool.run(2, load_step_save, str(tmp_path), [*TOY, *degrees(pp=2)], 0), "before")
    assert loaded.keys() == saved.keys()
    assert [name for name in saved if not same(saved[name], loaded[name])] == []
    assert saved["model.layers.1.bias"].any()
