"""Laws of a feed-forward network in parts of the sequence: the same results, and one part's activations at a time."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch

from scripts.benchmarks.activation_checkpointing import Meter, measure
from tests.distributed import harness
from tests.distributed.harness import assert_parity, run_layout, trainer_of
from tests.distributed.pool import WorkerPool
from tests.distributed.test_offload import FP64, FULL
from tests.distributed.test_parity import LAYOUTS, reference
from tests.slow import slow
from trainer.config.errors import ConfigError
from trainer.config.schema import ActivationCheckpoint
from trainer.families.feed_forward_args import DenseArgs, ExpertArgs
from trainer.models.decoder import Transformer
from trainer.models.experts import Experts
from trainer.models.feed_forward import FeedForward
from trainer.models.initialization import initialize
from trainer.models.tiles import compute_in_tiles, experts_in_tiles, in_tiles
from trainer.transforms.activation_checkpoint import apply_activation_checkpoint

TILES = "--activation_checkpoint.mlp_chunk_tokens=5"
MODES = {
    "none": [],
    "full": ["--activation_checkpoint.mode=full"],
    "2": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"],
    "offload": FULL,
}
PAIRS = [(layout, mode) for layout in ("one", "fsdp2", "tp2", "pp2", "cp2", "fsdp2+cp2+tp2") for mode in MODES]


@pytest.mark.parametrize(("layout", "mode"), [("cp2+tp2", "offload"), *slow(*PAIRS)])
def test_losses_gradients_and_weights_do_not_change(pool: WorkerPool, layout: str, mode: str) -> None:
    world_size, arguments = LAYOUTS.get(layout, (1, []))
    got = pool.run(world_size, run_layout, [FP64, TILES, *MODES[mode], *arguments])[0]
    assert_parity(got, reference(pool, FP64), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2+cp2", "tp2+pp2"])
def test_nor_do_they_with_documents(pool: WorkerPool, layout: str) -> None:
    world_size, arguments = LAYOUTS[layout]
    documents = [FP64, "--training.attention_mask=document", "--model.sliding_window=5"]
    got = pool.run(world_size, run_layout, [*documents, TILES, *MODES["full"], *arguments])[0]
    assert_parity(got, reference(pool, *documents), 1e-10)


@pytest.mark.parametrize("tiles", [2, 5, 9])  # of 7 positions: uneven parts, and empty ones
def test_a_network_in_parts_equals_the_whole(tiles: int) -> None:
    torch.manual_seed(0)
    network = FeedForward(6, DenseArgs(10)).double()
    network.w3.weight.requires_grad_(False)  # as the weights below an adapter
    x, cotangent = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(2, 7, 6, dtype=torch.float64)
    results = []
    for parts in (1, tiles):
        leaf = x.clone().requires_grad_()
        out = in_tiles(network, [leaf], parts, [network])
        out.backward(cotangent)
        results.append([out, leaf.grad, network.w1.weight.grad, network.w2.weight.grad])
        network.zero_grad()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tiles", [3, 9])  # of 14 rows
def test_experts_in_parts_equal_the_whole(tiles: int) -> None:
    torch.manual_seed(0)
    experts = Experts(6, ExpertArgs(number=4, per_token=2, hidden_dim=5, biases=True)).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, cotangent = torch.randn(14, 6, dtype=torch.float64), torch.randn(14, 6, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in x])  # the last expert is never chosen
    weights = torch.rand(14, 2)  # in float32
    results = []
    for parts in (1, tiles):
        if parts > 1:
            experts_in_tiles(experts, parts)
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        out, beside = experts(leaves[0], chosen, leaves[1], meanwhile=lambda: "what is computed beside")
        assert beside == "what is computed beside"
        out.backward(cotangent)
        results.append([out, *(leaf.grad for leaf in leaves), *(p.grad for p in experts.parameters())])
        experts.zero_grad()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6 if one.dtype == torch.float32 else 1e-12, atol=1e-12)


def test_the_pairs_of_experts_do_not_grow_with_the_sequence() -> None:
    """Rows and inner activations of (token, expert) pairs exist for one part at a time."""
    experts = Experts(4, ExpertArgs(number=2, per_token=1, hidden_dim=2048))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    peaks = {}
    for tokens, tiles in ((64, 2), (256, 8), (256, 1)):
        tiled = copy.deepcopy(experts)
        experts_in_tiles(tiled, tiles)
        x = torch.randn(tokens, 4, requires_grad=True)
        chosen, weights = (torch.arange(tokens) % 2).unsqueeze(1), torch.ones(tokens, 1)
        with Meter(*tiled.parameters(), x) as meter:
            tiled(x, chosen, weights, meanwhile=lambda: None)[0].sum().backward()
        peaks[tokens, tiles] = meter.peak
    inner = 2048 * 4  # bytes a token of the narrower inner tensor
    assert peaks[256, 8] - peaks[64, 2] < 192 * inner / 2
    assert peaks[256, 1] - peaks[256, 8] > 3 * 224 * inner


def test_gradients_of_weights_are_summed_in_float32() -> None:
    """In bfloat16 a sum of many parts would lose the last of them."""
    network = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    in_tiles(network, [torch.ones(1, 1024, 1, dtype=torch.bfloat16)], 1024, [network]).sum().backward()
    assert network.weight.grad.item() == 1024


def measure_layers(settings: ActivationCheckpoint, tokens: int, tile: int) -> dict[str, int]:
    with torch.device("meta"):
        model = Transformer(replace(harness.TINY, vocab_size=8, ffn_hidden_dim=4096, n_layers=2))
    for block in model.layers.values():
        compute_in_tiles(block, tokens // tile)
    apply_activation_checkpoint(model.layers, settings)
    initialize(model, seed=0, device=torch.device("cpu"))
    calls = []
    with mock.patch.object(FeedForward, "forward", counted(calls, FeedForward.forward)):
        return measure(model, torch.zeros(1, tokens, dtype=torch.int64)) | {"rows": sum(calls)}


def counted(calls: list[int], forward: object) -> object:
    def run(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[1])
        return forward(self, x)

    return run


@pytest.mark.parametrize("mode", ["none", "full"])
def test_inner_activations_do_not_grow_with_the_sequence(mode: str) -> None:
    """The network's inner tensors are much larger than its input. It computes at most twice, checkpointed or not."""
    settings = ActivationCheckpoint(mode)
    short, long, whole = (measure_layers(settings, *sizes) for sizes in ((64, 32), (256, 32), (256, 256)))
    inner = 4096 * 4  # bytes a token of one of the network's inner tensors
    assert long["peak_bytes"] - short["peak_bytes"] < 192 * inner / 2
    assert whole["peak_bytes"] - long["peak_bytes"] > 3 * 224 * inner
    assert long["rows"] == 2 * 2 * 256


def parts_case(arguments: list[str]) -> list[int]:
    """Return how many rows each call of a network, or of experts, has computed in a step."""
    calls: list[int] = []
    sums = Experts.sums

    def counted_sums(self: Experts, parameters: dict, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(len(x))
        return sums(self, parameters, x, *args, **kwargs)

    with (
        trainer_of(arguments) as trainer,
        mock.patch.object(FeedForward, "forward", counted(calls, FeedForward.forward)),
        mock.patch.object(Experts, "sums", counted_sums),
    ):
        trainer.train_step(1)
    return calls


@pytest.mark.parametrize(("model", "parts"), [([], [4, 4, 4, 4]), (["--model.name=qwen3_moe"], [8, 8, 8, 8])])
@pytest.mark.parametrize("mode", ["none", *slow("full")])
def test_a_job_computes_in_parts(pool: WorkerPool, model: list[str], parts: list[int], mode: str) -> None:
    """A part has at most 10 of the 32 tokens: 4 positions of two sequences, or for experts 8 tokens of one row."""
    sizes = ["--training.local_batch_size=2", "--training.global_batch_size=-1", "--training.seq_len=16"]
    arguments = [*sizes, *model, f"--activation_checkpoint.mode={mode}", "--activation_checkpoint.mlp_chunk_tokens=10"]
    (calls,) = pool.run(1, parts_case, arguments)
    assert calls == 2 * harness.TINY.n_layers * parts


def test_a_block_without_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a block that computes its network by in_tiles, and Linear does not"):
        compute_in_tiles(torch.nn.Linear(1, 1), 2)
