"""Law: after a step no attention logit of its tokens is above the bound, on every layout the same as in one process."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.distributed.harness import Record, assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import degrees, reference
from tests.slow import slow
from trainer.components.qk_clip import QKClip
from trainer.models.decoder import Transformer

BOUND = 0.2
GIVEN = ("--training.dtype=float64", f"--optimizer.qk_clip={BOUND}", "--training.attention_mask=document")
pytestmark = pytest.mark.about("longshard/context/hooks.py")

LATENT = "--model.name=deepseek_v3"
TOLERANCE = 1e-10


def attend(maxima: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention by its definition, which notes the largest logit of each head, (H,)."""

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, up: Any = None, **_: Any
    ) -> torch.Tensor:
        if up is None:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        else:
            latent, shared = k[:, 0].split([up.shape[2], k.shape[3] - up.shape[2]], -1)
            expanded = torch.einsum("hnr,bsr->bhsn", up, latent)
            nope, v = expanded.tensor_split([q.shape[3] - shared.shape[2]], -1)
            k = torch.cat([nope, shared[:, None].expand(-1, q.shape[1], -1, -1)], -1)
        scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        maxima.append(scores.amax((0, 2, 3)))
        return scores.softmax(-1) @ v

    return forward


@torch.no_grad()
def logits_of(model: Transformer, inputs: Mapping[int, tuple[Any, ...]]) -> dict[int, list[float]]:
    """The largest logits that the attention of each layer has for these inputs."""
    logits = {}
    for layer, args in inputs.items():
        attention, maxima = copy.deepcopy(model.layers[str(layer)].attention), []
        attention.inner_attention.forward = attend(maxima)
        attention(*args)
        logits[layer] = maxima[0].tolist()
    return logits


def bounded_case(arguments: list[str]) -> list[tuple[float, float, float]]:
    """One step with nearly no update: (largest logit before, that after, log-sum-exp that was seen) of each head."""
    logits, real, inputs, models = [], QKClip._clip, {}, []
    forward = Transformer.forward

    def noted(self: Transformer, *args: Any, **kwargs: Any) -> torch.Tensor:
        models[:] = [self]
        for number, layer in self.layers.items():
            layer.attention.register_forward_pre_hook(partial(note, int(number)), with_kwargs=True)
        return forward(self, *args, **kwargs)

    def note(layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[layer] = args[0].detach().clone(), args[1]

    def compared(self: QKClip, left_out: torch.Tensor | None) -> None:
        before = logits_of(*models, inputs)
        real(self, left_out)
        after = logits_of(*models, inputs)
        for layer, place in self._places.items():
            logits.extend(zip(before[layer], after[layer], self._seen[place].tolist(), strict=True))

    with mock.patch.object(QKClip, "_clip", compared), mock.patch.object(Transformer, "forward", noted):
        run_layout(arguments)
    return logits


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
def test_no_logit_stays_above_the_bound(pool: WorkerPool, family: str) -> None:
    settings = ["--training.dtype=float64", f"--model.name={family}", "--training.steps=1", "--optimizer.lr=1e-12"]
    settings += ["--training.global_batch_size=2", f"--optimizer.qk_clip={BOUND}"]
    heads = pool.run(1, bounded_case, settings)[0]
    assert heads
    clipped = 0
    for before, after, seen in heads:
        assert before <= seen + 1e-9  # the log-sum-exp is the larger one, and not by far
        assert seen <= before + 2.78  # log 16 keys
        factor = min(1.0, BOUND / seen)
        assert after == pytest.approx(before * factor, rel=1e-8)
        assert after <= BOUND + 1e-9
        clipped += before > BOUND and factor < 1
    assert clipped


LAYOUTS = {
    "fsdp2": (2, degrees(dp_shard=2), ()),
    "cp2 tp2": (4, degrees(cp=2, tp=2), ()),
    "cp2 pp2, recomputed": (4, [*degrees(cp=2, pp=2), "--activation_checkpoint.mode=full"], ()),
    "hybrid shards, Muon": (4, degrees(dp_replicate=2, dp_shard=2), ("--optimizer.name=Muon",)),
    "CP all_to_all, kept": (
        2,
        [
            *degrees(cp=2),
            "--parallelism.context_parallel_method=all_to_all",
            "--parallelism.context_parallel_keep_exchanged",
        ],
        (),
    ),
    "sequences in chunks": (1, ["--training.sequence_chunks=3"], ()),
    "latent attention, cp2 tp2": (4, degrees(cp=2, tp=2), (LATENT,)),
    "latent attention, fsdp2 compiled": (
        2,
        [*degrees(dp_shard=2), "--compile.enable", "--compile.backend=aot_eager"],
        (LATENT,),
    ),
    "biases and sinks, tp2 fsdp2": (4, degrees(dp_shard=2, tp=2), ("--model.name=gpt_oss",)),
    "further tokens, cp2": (2, degrees(cp=2), ("--model.mtp_layers=1",)),
}
QUICK = {"cp2 tp2", "latent attention, cp2 tp2", "biases and sinks, tp2 fsdp2"}


@pytest.mark.parametrize("name", [*sorted(QUICK), *slow(*(name for name in LAYOUTS if name not in QUICK))])
def test_a_layout_clips_as_one_process(pool: WorkerPool, name: str) -> None:
    ranks, arguments, shared = LAYOUTS[name]
    got = pool.run(ranks, run_layout, [*GIVEN, *shared, *arguments])[0]
    wanted = reference(pool, *GIVEN, *shared)
    assert_parity(got, wanted, TOLERANCE)
    for ours, theirs in zip(got.metrics, wanted.metrics, strict=True):
        assert ours["attention_logit"] == pytest.approx(theirs["attention_logit"], rel=1e-9)
        assert ours["clipped_heads"] == theirs["clipped_heads"] > 0


def own_tokens_case(arguments: list[str]) -> Record:
    with mock.patch("trainer.components.qk_clip.all_reduce", side_effect=lambda x, *_: x):
        return run_layout(arguments)


def test_the_largest_logit_of_a_ranks_own_tokens_is_seen_to_be_wrong(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError, match=r"weight layers\.0\.attention"):
        assert_parity(pool.run(2, own_tokens_case, [*GIVEN, *degrees(cp=2)])[0], reference(pool, *GIVEN), TOLERANCE)


def test_logits_within_the_bound_change_nothing(pool: WorkerPool) -> None:
    settings = ["--training.dtype=float64", "--optimizer.qk_clip=1e6"]
    assert_parity(reference(pool, *settings), reference(pool, settings[0]), TOLERANCE)


def left_out_case(arguments: list[str]) -> bool:
    """Tell a fused optimizer on the device that the step is not finite; return whether no weight has changed."""
    before: list[torch.Tensor] = []

    def masked(optimizer: torch.optim.Optimizer, not_finite: torch.Tensor) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.found_inf = torch.ones_like(not_finite)
        before[:] = [x for p in parameters for x in (p, p.detach().clone())]

    with mock.patch("trainer.trainer.mask_update", masked):
        run_layout(arguments)
    return all(torch.equal(now, old) for now, old in zip(before[::2], before[1::2], strict=True))


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_a_step_that_is_left_out_clips_nothing(pool: WorkerPool, optimizer: str) -> None:
    settings = [f"--optimizer.name={optimizer}", "--optimizer.implementation=fused", f"--optimizer.qk_clip={BOUND}"]
    assert pool.run(1, left_out_case, settings) == [True]


def test_logits_are_those_of_the_step(pool: WorkerPool) -> None:
    first, second = reference(pool, *GIVEN, "--optimizer.lr=1e-12").metrics
    assert first["attention_logit"] > 4
    assert second["attention_logit"] < BOUND + 2.78  # logits within the bound, of 16 keys at most
