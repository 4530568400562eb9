"""Laws of pipelines other than parity: which calls run how often, the memory of each rank, and the refusals."""

from collections import Counter
from unittest import mock

import pytest
import torch
from torch import nn

from tests.distributed.harness import Record, assert_parity, run_layout, trainer_of
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.distributed.test_parity import LAYOUTS, reference
from tests.slow import slow
from trainer.components.norms import settle_gradients, squared_norm
from trainer.components.step_outcome import StepTotals
from trainer.models.attention import InnerAttention
from trainer.models.decoder import Transformer
from trainer.parallel import pipeline_parallel

PRECISION = "--training.dtype=float64"
PP2 = LAYOUTS["pp2"][1]
CP2_PP2 = LAYOUTS["cp2+pp2"][1]
FOUR_ROWS = ["--training.local_batch_size=4", "--parallelism.pipeline_parallel_microbatch_size=2"]
STAGES = "--parallelism.pipeline_parallel_module_fqns"
FOUR_STAGES = [STAGES, "tok_embeddings", "layers.0", "layers.1", "norm,output"]


def counted_case(arguments: list[str]) -> tuple[Counter[str], list[str]]:
    """Forwards of each module in the first step, and the names of this rank's parameters."""
    forwards: Counter[str] = Counter()
    with trainer_of(arguments) as trainer:
        for part in trainer.model_parts:
            for name, module in part.named_modules():
                if isinstance(module, InnerAttention | nn.Embedding):
                    module.register_forward_hook(lambda *_, name=name: forwards.update([name]))
        trainer.train_step(1)
        names = [name for part in trainer.model_parts for name, _ in part.named_parameters()]
    return forwards, names


def test_the_first_step_runs_no_forward_of_its_own(pool: WorkerPool) -> None:
    """8 rows in micro-batches of one: 8 calls of each attention, once on one of the ranks."""
    (first, names_first), (last, names_last) = pool.run(2, counted_case, [PRECISION, *PP2])
    assert first == {"tok_embeddings": 8, "layers.0.attention.inner_attention": 8}
    assert last == {"layers.1.attention.inner_attention": 8}
    assert not set(names_first) & set(names_last)
    assert {"norm.weight", "output.weight"} < set(names_last)


@pytest.mark.slow
def test_stages_without_attention_are_fine_under_context_parallelism(pool: WorkerPool) -> None:
    schedule = ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B", *FOUR_STAGES]
    got = pool.run(4, run_layout, [PRECISION, *CP2_PP2, *schedule])
    assert_parity(got[0], reference(pool, PRECISION), 1e-10)
    # the second rank has no attention at all
    two_stages = ["tok_embeddings,layers.0,layers.1", "norm,output"]
    got = pool.run(4, run_layout, [PRECISION, *CP2_PP2, STAGES, *two_stages])
    assert_parity(got[0], reference(pool, PRECISION), 1e-10)


@pytest.mark.slow
def test_a_stage_may_end_with_the_norm_under_tensor_parallelism(pool: WorkerPool) -> None:
    stages = ["tok_embeddings,layers.0,layers.1,norm", "output"]
    got = pool.run(4, run_layout, [PRECISION, *LAYOUTS["tp2+pp2"][1], STAGES, *stages])
    assert_parity(got[0], reference(pool, PRECISION), 1e-10)


def test_every_nth_layer_is_recomputed_by_its_number(pool: WorkerPool) -> None:
    """Each of two stages has one layer; the second layer is recomputed."""
    every_2nd = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"]
    (first, _), (last, _) = pool.run(2, counted_case, [PRECISION, *PP2, *every_2nd])
    assert first["layers.0.attention.inner_attention"] == 8
    assert last["layers.1.attention.inner_attention"] == 16


def test_each_rank_holds_its_stages_only(pool: WorkerPool) -> None:
    got = pool.run(2, run_layout, [PRECISION, *PP2])
    held = [record.local_elements for record in got]
    assert sum(held) == sum(weight.numel() for weight in got[0].weights.values())
    assert min(held) > 0.4 * sum(held)


# ---- negative controls


def scaled_case(arguments: list[str]) -> Record:
    """Gradients divided by the number of micro-batches, as the schedules do by default."""
    real = pipeline_parallel.torch_schedules.Schedule1F1B.__init__

    def scaled(self: object, *args: object, **settings: object) -> None:
        real(self, *args, **settings | {"scale_grads": True})

    with mock.patch.object(pipeline_parallel.torch_schedules.Schedule1F1B, "__init__", scaled):
        return run_layout(arguments)


def first_stage_case(arguments: list[str]) -> Record:
    """Only the first stage rotates by the positions of the plan's layout."""
    real = Transformer._freqs_cis

    def freqs_cis(self: Transformer, tokens: torch.Tensor, positions: None, plan: torch.Tensor) -> torch.Tensor:
        return real(self, tokens, positions, None if self.tok_embeddings is None else plan)

    with mock.patch.object(Transformer, "_freqs_cis", freqs_cis):
        return run_layout(arguments)


@pytest.mark.parametrize(("case", "layout"), [(scaled_case, "pp2"), *slow((first_stage_case, "cp2+pp2"))])
def test_negative_control(pool: WorkerPool, case, layout: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    broken = pool.run(world_size, case, [PRECISION, *arguments])[0]
    with pytest.raises(AssertionError, match="gradient of"):
        assert_parity(broken, reference(pool, PRECISION), 1e-3)


# ---- other shapes


def other_rows_case(arguments: list[str]) -> list[float]:
    """The same step, its rows in one pass and in two of half the rows; gradient norms."""
    norms = []
    with trainer_of(arguments) as trainer:
        for rows in (4, 2, 4):
            trainer.optimizer.zero_grad()
            batch = next(iter(trainer.task.build_loader()))
            valid = torch.tensor(10)
            for start in range(0, 4, rows):
                tensors = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}
                part = {name: x[start : start + rows].clone() for name, x in tensors.items()}
                trainer.forward_backward(part, valid, last=start + rows == 4)
            settle_gradients(trainer.parameters)
            squares = squared_norm(trainer.parameters, trainer.dims)
            totals = StepTotals(torch.tensor(1.0), squares, trainer.stop.votes(), trainer.dims)
            norms.append(totals.read()[1])
    return norms


def test_a_batch_of_other_rows_gets_a_schedule_of_its_shape(pool: WorkerPool) -> None:
    (norms, _) = pool.run(2, other_rows_case, [PRECISION, *PP2, *FOUR_ROWS])
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    assert norms[0] == norms[2] > 0


# ---- errors


class BrokenLayerError(RuntimeError):
    pass


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", *slow("1F1B")])
def test_what_a_stage_raises_arrives_as_it_is(pool: WorkerPool, schedule: str) -> None:
    """The error is not wrapped into an error that lists the stage's arguments."""
    options = FOUR_STAGES if schedule != "1F1B" else []
    choice = f"--parallelism.pipeline_parallel_schedule={schedule}"
    with pytest.raises(RankFailedError) as error:
        pool.run(2, raising_case, [*PP2, choice, *options])
    assert "BrokenLayerError: layer 1 is broken" in str(error.value)
    assert "failed to run forward" not in str(error.value).splitlines()[-1]


def raising_case(arguments: list[str]) -> None:
    with trainer_of([*arguments, "--comm.init_timeout_seconds=20"]) as trainer:
        for part in trainer.model_parts:
            if "1" in part.layers:
                part.layers["1"].register_forward_pre_hook(mock.Mock(side_effect=BrokenLayerError("layer 1 is broken")))
        trainer.train_step(1)
