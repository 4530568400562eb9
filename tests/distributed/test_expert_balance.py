"""Laws of the balance of experts on layouts: learnt balance, the loss of the same step, padding, metrics."""

import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from longshard.context.planning.options import BatchPlan
from tests.distributed.harness import MadeRows, Record, assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_experts import COMPILED, DOCUMENTS, EXPERTS, FAMILY, ac, ep
from tests.distributed.test_parity import degrees, reference
from tests.slow import slow
from trainer.data.packing import IGNORE_INDEX, NO_POSITION
from trainer.models import moe
from trainer.models.moe import Router
from trainer.tasks.task import Batch


def test_the_losses_and_the_biases_change_what_is_learnt(pool: WorkerPool) -> None:
    off = reference(pool, FAMILY, "--training.dtype=float64", "--model.router_aux_loss_coef=0")
    load = reference(pool, FAMILY, "--training.dtype=float64", "--model.router_aux_loss_load=micro_batch")
    with pytest.raises(AssertionError, match=r"step 1 gradient of layers\.0"):
        assert_parity(load, off, 1e-6)
    for key in ("aux_loss_coef=0.5", "bias_update_rate=0.5"):
        others = ["--model.router_aux_loss_coef=0"] * key.startswith("bias")
        on = reference(pool, FAMILY, "--training.dtype=float64", *others, f"--model.router_{key}")
        # Loads are equal in the first step, and biases move after it.
        assert on.metrics[0]["loss"] == off.metrics[0]["loss"]
        assert on.metrics[1]["loss"] == off.metrics[1]["loss"] or key.startswith("bias")
        with pytest.raises(AssertionError, match=r"step 2 gradient of layers\.0"):
            assert_parity(on, off, 1e-6)


SAME_STEP = [*EXPERTS, "--model.router_aux_loss_load=micro_batch", "--training.global_batch_size=4"]
OF_A_STEP = {
    "cp2+tp2+ep4, whole layers, documents": (
        4,
        [*degrees(cp=2, tp=2), ep(4), ac("full"), "--training.local_batch_size=4"],
        [DOCUMENTS],
    ),
    "fsdp2, documents": (2, [*degrees(dp_shard=2), "--training.local_batch_size=2"], [DOCUMENTS]),
    "ddp2+cp2+ep2": (4, [*degrees(dp_replicate=2, cp=2), ep(2), "--training.local_batch_size=2"], []),
    "fsdp4+ep2, compiled": (4, [*degrees(dp_shard=4), ep(2), *COMPILED, "--training.local_batch_size=1"], []),
}


@pytest.mark.parametrize("layout", ["cp2+tp2+ep4, whole layers, documents", *slow(*OF_A_STEP)[1:]])
def test_a_loss_of_the_same_step_does_not_depend_on_the_layout(pool: WorkerPool, layout: str) -> None:
    """A step has one micro-batch. test_expert_hugging_face.py compares one process with transformers."""
    ranks, arguments, shared = OF_A_STEP[layout]
    wanted = reference(pool, *SAME_STEP, *shared, "--training.local_batch_size=4")
    assert_parity(pool.run(ranks, run_layout, [*SAME_STEP, *shared, *arguments])[0], wanted, 1e-10)
    before = reference(pool, *EXPERTS, *shared, "--training.global_batch_size=4", "--training.local_batch_size=4")
    with pytest.raises(AssertionError, match=r"step 1 gradient of layers\.0"):
        assert_parity(before, wanted, 1e-6)


def auxiliary_case() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of the gates by the auxiliary loss alone: in a step, and of the formula over the whole batch."""
    settings = [*EXPERTS, "--training.max_norm=1e9", "--model.router_bias_update_rate=0"]
    seen: dict[Router, list[torch.Tensor]] = {}

    def keep(module: Router, args: tuple[torch.Tensor, ...], _out: object) -> None:
        seen.setdefault(module, []).append(args[0].detach())

    with trainer_of([*settings, "--model.router_aux_loss_coef=0"]) as trainer:
        trainer.train_step(1)
        routers = [*moe.routers_of(trainer.model_parts).values()]
        loads = [router.load.clone() for router in routers]
        weights = [router.gate.weight.detach().clone() for router in routers]
        hooks = [router.register_forward_hook(keep) for router in routers]
        trainer.train_step(2)
        without = trainer.record.gradients[1]
        for hook in hooks:
            hook.remove()
        inputs = [torch.cat(seen[router]) for router in routers]
        tokens = routers[0].auxiliary.tokens.item()
    with trainer_of([*settings, "--model.router_aux_loss_coef=0.5"]) as trainer:
        trainer.train_step(1)
        trainer.train_step(2)
        gradients = trainer.record.gradients[1]
    got, wanted = [], []
    load = torch.stack(loads).mean(0)
    for layer, (x, weight) in enumerate(zip(inputs, weights, strict=True)):
        name = f"layers.{layer}.feed_forward.router.gate.weight"
        got.append(gradients[name] - without[name])
        weight.requires_grad_()
        loss = 0.5 * 4 * 2 * ((x @ weight.T).softmax(-1).sum(0) * load).sum() / (len(loads) * tokens)
        wanted.append(torch.autograd.grad(loss, weight)[0])
    return got, wanted


def test_the_auxiliary_loss_is_that_of_the_formula_over_the_whole_batch(pool: WorkerPool) -> None:
    """In the last layer, whose gate no later loss reaches."""
    got, wanted = pool.run(1, auxiliary_case)[0]
    assert (got[-1] - wanted[-1]).norm() < 1e-10 * wanted[-1].norm()
    assert (got[0] - wanted[0]).norm() > 1e-3 * wanted[0].norm()


def texts(plan: Callable[..., BatchPlan], *, padded: bool) -> Iterator[Batch]:
    """Steps of eight texts of 8 tokens: each in a sequence of 16 with padding, or two by two."""
    places = torch.arange(8)
    for step in itertools.count():
        tokens = torch.randint(128, (8, 8), generator=torch.Generator().manual_seed(step))
        labels = tokens.roll(-1, 1).masked_fill(places == 7, IGNORE_INDEX)
        made = {"tokens": tokens, "labels": labels, "positions": places.expand(8, 8), "document_ids": 0 * tokens}
        if padded:
            filler = {"tokens": 0, "labels": IGNORE_INDEX, "positions": NO_POSITION, "document_ids": 1}
            rows = {name: torch.cat((x, torch.full((8, 8), filler[name])), 1) for name, x in made.items()}
        else:
            made["document_ids"] = torch.arange(2).repeat(4)[:, None].expand(8, 8)
            rows = {name: x.reshape(4, 16) for name, x in made.items()}
        for start in range(0, len(rows["tokens"]), 2):
            batch = {name: x[start : start + 2].clone() for name, x in rows.items()}
            arrays = {name: x.numpy().copy() for name, x in batch.items()}
            yield batch | {"padding": 16 * padded, "plan": plan(arrays)}


def texts_case(padded: bool) -> Record:
    size = "--training.global_batch_size=" + ("8" if padded else "4")

    def batches(_task: MadeRows, plan: Callable[..., BatchPlan]) -> Iterator[Batch]:
        return texts(plan, padded=padded)

    with mock.patch.object(MadeRows, "batches_of_rows", batches):
        return run_layout([*EXPERTS, DOCUMENTS, size, "--model.router_aux_loss_coef=2"])


def test_padded_texts_are_learnt_as_packed_ones(pool: WorkerPool) -> None:
    """Loads, the balance loss, and all gradients."""
    padded, packed = (pool.run(1, texts_case, padded)[0] for padded in (True, False))
    assert [x["loss"] for x in padded.metrics] == pytest.approx([x["loss"] for x in packed.metrics], rel=1e-12)
    for name, load in packed.buffers.items():
        assert torch.allclose(padded.buffers[name], load, rtol=0, atol=1e-12), name
    for step in (0, 1):
        for name, gradient in packed.gradients[step].items():
            assert (padded.gradients[step][name] - gradient).norm() <= 1e-10 * gradient.norm(), (step, name)


def test_metrics_have_the_load_of_each_expert(pool: WorkerPool) -> None:
    got = pool.run(2, run_layout, [*EXPERTS, *degrees(pp=2)])[0]
    for line in got.metrics:
        assert [len(layer) for layer in line["expert_load"]] == [4, 4]
        assert all(sum(layer) == pytest.approx(4, abs=0.01) for layer in line["expert_load"])
        assert line["expert_imbalance"] == max(map(max, line["expert_load"])) > 1
    assert got.metrics[-1]["expert_load"][1] == pytest.approx(
        (4 * got.buffers["layers.1.feed_forward.router.load"]).tolist(), abs=1e-3
    )
