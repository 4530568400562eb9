"""Law: a family of models that is a folder and a line in the registry trains under all that Llama trains under."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.harness import assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_checkpoint import load_step_save, merged, same
from tests.distributed.test_parity import degrees, reference
from tests.toy_family.args import FLAVORS
from tests.toy_family.model import ToyDecoder

TOY = ["--model.name=toy", "--model.flavor=toy"]
EXACT = [*TOY, "--training.dtype=float64"]
FLOAT8 = [*TOY, "--float8.enable", "--float8.recipe_name=rowwise", "--float8.emulate", "--float8.filter_fqns=output"]
DOCUMENTS = "--training.attention_mask=document"
COMPILE = ["--compile.enable", "--compile.backend=aot_eager"]
LAYOUTS = {
    "fsdp2+tp2": (4, [*degrees(dp_shard=2, tp=2), "--activation_checkpoint.mode=selective"], []),
    "cp2+tp2, documents": (4, degrees(cp=2, tp=2), [DOCUMENTS]),
    "cp2+pp2, recomputed": (4, [*degrees(cp=2, pp=2), "--activation_checkpoint.mode=full"], []),
    "ddp2+tp2, compiled": (4, [*degrees(dp_replicate=2, tp=2), *COMPILE], []),
    "fsdp2+cp2+tp2": (8, degrees(dp_shard=2, cp=2, tp=2), [DOCUMENTS]),
    "fsdp2+tp2+pp2": (8, degrees(dp_shard=2, tp=2, pp=2), []),
}
QUICK = ("cp2+tp2, documents", "cp2+pp2, recomputed")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_layout_equals_one_process(pool: WorkerPool, layout: str) -> None:
    world_size, arguments, shared = LAYOUTS[layout]
    got = pool.run(world_size, run_layout, [*EXACT, *shared, *arguments])[0]
    assert_parity(got, reference(pool, *EXACT, *shared), 1e-10)
    assert got.gradients[0]["layers.0.attention.wo.bias"].any()


def test_float8(pool: WorkerPool) -> None:
    got = pool.run(2, run_layout, [*FLOAT8, *degrees(tp=2)])[0]
    assert_parity(got, reference(pool, *FLOAT8), 1e-2)


def parameters_case() -> tuple[int, int]:
    """Parameters by the shape, and by the model."""
    with trainer_of(TOY) as trainer:
        return trainer.job.model.n_params(), sum(p.numel() for p in trainer.parts[0].parameters())


def test_the_shape_tells_the_number_of_parameters_and_the_matrices(pool: WorkerPool) -> None:
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
