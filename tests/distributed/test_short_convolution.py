"""Law: a short convolution over many ranks equals one process, whatever the layout and the documents."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from longshard import (
    ContextParallelAttention,
    ContextParallelConvolution,
    ContextParallelError,
    context_parallel,
    context_parallel_convolution,
    documents,
    region,
)
from longshard.context.planning.balance import build_layout
from longshard.sharding import exchange
from longshard.sharding.layout import AxisLayout
from longshard.sharding.ranges import union
from tests.distributed.domain_cases import layout_of
from tests.distributed.harness import assert_parity, run_layout
from tests.distributed.pool import WorkerPool
from tests.distributed.test_parity import PLANNED, degrees, reference
from tests.slow import slow
from trainer.config.loader import parse_command_line
from trainer.families.decoder_args import TransformerArgs
from trainer.models.decoder import Transformer
from trainer.models.initialization import initialize
from trainer.models.short_convolution import InnerConvolution
from trainer.runtime.process_group import Process, process_group

TOLERANCE = 1e-12
CASES = 30


@contextmanager
def mesh_of_all() -> Iterator[DeviceMesh]:
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        yield init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("cp",))


def any_layout(rng: random.Random, length: int, degree: int) -> AxisLayout:
    """Return a random layout; some have many short pieces a rank, so that a window spans several owners."""
    if rng.random() < 0.6:
        return layout_of(rng, length, degree)
    shards: list[list[tuple[int, int]]] = [[] for _ in range(degree)]
    ends = sorted({0, length, *rng.choices(range(length + 1), k=4 * degree)})
    for piece in pairwise(ends):
        rng.choice(shards).append(piece)
    return AxisLayout("many", length, tuple(map(union, shards)))


def by_definition(x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """By document numbers, and a sum over all pairs of tokens; starts: (B, S), 1 where a document begins."""
    b, s, c = x.shape
    kernel, number, places = weight.shape[2], starts.cumsum(1), torch.arange(s)
    out = x.new_zeros(b, s, c)
    for j in range(kernel):
        sees = (places[:, None] - places == j) & (number[:, :, None] == number[:, None])  # (B, S, S)
        out = out + weight[:, 0, kernel - 1 - j] * (sees.to(x.dtype) @ x)
    return out


def rows_to_fetch(layout: AxisLayout, rank: int, reach: int, *, after: bool) -> int:
    """Return the number of other ranks' rows in the windows of a rank: up to `reach` rows for each range."""
    own, rows = set(layout.indices(rank).tolist()), 0
    for start, stop in layout.ranges[rank]:
        window = range(stop, stop + reach) if after else range(start - reach, start)
        rows += sum(0 <= row < layout.length and row not in own for row in window)
    return rows


def random_cases(seed: int) -> list[str]:
    """Compare outputs, gradients and bytes of CASES convolutions; return the differences on this rank."""
    problems: list[str] = []
    with mesh_of_all() as mesh:
        for number in range(CASES):
            rng = random.Random(1000 * seed + number)
            length, kernel, batch = rng.randint(1, 24), rng.randint(2, 7), rng.randint(1, 3)
            layout = any_layout(rng, length, mesh.size())
            packed = rng.random() < 0.7
            problems += [f"case {number}, {layout.ranges}: {x}" for x in one_case(mesh, layout, kernel, batch, packed)]
    return problems


def one_case(mesh: DeviceMesh, layout: AxisLayout, kernel: int, batch: int, packed: bool) -> list[str]:
    generator = torch.Generator().manual_seed(layout.length * 100 + kernel)
    x, weight, cotangent = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((batch, layout.length, 3), (3, 1, kernel), (batch, layout.length, 3))
    )
    starts = (torch.rand(batch, layout.length, generator=generator) < 0.3 * packed).long()
    starts[:, 0] = 1
    places = torch.arange(layout.length)
    positions = places - (places * starts).cummax(1).values
    wanted = by_definition(x, weight, starts)
    rank = mesh.get_local_rank()
    own = torch.from_numpy(layout.indices(rank))
    shard = x[:, own].detach().requires_grad_()
    exchange.bytes_sent.clear()
    with region(mesh, layout, sequences=batch) as opened:
        got = context_parallel_convolution(shard, weight, opened.attention_plan, positions[:, own] if packed else None)
        sent = exchange.bytes_sent["exchange"]
        dx, dweight = torch.autograd.grad(got, (shard, weight), cotangent[:, own])
    dist.all_reduce(dweight)
    wanted_dx, wanted_dweight = torch.autograd.grad(wanted, (x, weight), cotangent)
    pairs = {
        "output": (got, wanted[:, own]),
        "input": (dx, wanted_dx[:, own]),
        "weight": (dweight, wanted_dweight),
    }
    problems = [name for name, (a, b) in pairs.items() if not (a - b).norm() <= TOLERANCE * max(b.norm(), 1.0)]
    total = torch.tensor([sent, exchange.bytes_sent["exchange"] - sent])
    dist.all_reduce(total)
    rows = [sum(rows_to_fetch(layout, r, kernel - 1, after=a) for r in range(mesh.size())) for a in (False, True)]
    if total.tolist() != [8 * batch * 3 * rows[0], 8 * batch * (3 + packed) * rows[1]]:
        problems.append(f"bytes {total.tolist()}")
    return problems


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
@pytest.mark.parametrize("world_size", [2, 4, *slow(1, 3)])
def test_random_layouts_and_documents(pool: WorkerPool, world_size: int, seed: int) -> None:
    """Shards have any size, down to none and to one row, and a rank may have many; ranks send only missing rows."""
    assert not [problem for rank in pool.run(world_size, random_cases, seed) for problem in rank]


def packed_and_alone(balancer: str) -> tuple[float, float]:
    """Return relative differences of a model's packed documents to each document alone.

    The first is for positions that start again in each document, the second for positions that do not.
    """
    lengths = [1, 2, 5, 13, 11]
    args = TransformerArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=48, vocab_size=64, max_seq_len=32,
        short_conv_kernel=4,
    )  # fmt: skip
    models = []
    for _ in range(2):
        with torch.device("meta"):
            model = Transformer(args).double()
        initialize(model, seed=0, device=torch.device("cpu"))
        models.append(model)
    whole, parallel = models
    tokens = torch.randint(64, (1, 32), generator=torch.Generator().manual_seed(0))
    alone = torch.cat([whole(part) for part in tokens.split(lengths, 1)], 1).detach()
    with mesh_of_all() as mesh:
        for layer in parallel.layers.values():
            styles = {"attention.inner_attention": ContextParallelAttention()}
            styles["attention.short_conv.inner_convolution"] = ContextParallelConvolution()
            parallelize_module(layer, mesh, styles)
        results = []
        for positions in ([torch.arange(n) for n in lengths], [torch.arange(32)]):
            tensors = [tokens.clone(), torch.cat(positions)[None]]
            mask = documents(lengths)
            with context_parallel(
                mesh, buffers=tensors, buffer_seq_dims=[1, 1], mask=mask, load_balancer=balancer
            ) as cp:
                own = torch.from_numpy(cp.layout.indices(mesh.get_local_rank()))
                got = parallel(*tensors, cp.attention_plan).detach()
            results.append(((got - alone[:, own]).norm() / alone.norm()).item())
        return results[0], results[1]


@pytest.mark.parametrize("balancer", ["balanced", *slow("head_tail", "contiguous")])
def test_packed_documents_are_those_alone(pool: WorkerPool, balancer: str) -> None:
    """Compare through the whole model.

    Rotary embeddings see distances alone. So positions that continue through all documents change the convolution only.
    """
    results = pool.run(2, packed_and_alone, balancer)
    assert max(right for right, _ in results) < 1e-12
    assert max(wrong for _, wrong in results) > 1e-3


LAYOUTS = ("head_tail", "contiguous", "balanced")
METHODS = ("ring", "all_gather", "all_to_all", "hybrid")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "balancer", "mask"), product(METHODS, LAYOUTS, ("causal", "document")))
def test_methods_and_layouts_equal_single_process(pool: WorkerPool, method: str, balancer: str, mask: str) -> None:
    """Four ranks, 14 tokens: shards of 4 and 3 tokens, whose pieces are shorter than a window."""
    settings = ["--training.dtype=float64", "--training.seq_len=14", "--model.short_conv_kernel=4"]
    settings.append(f"--training.attention_mask={mask}")
    balanced = f"--parallelism.context_parallel_load_balancer={balancer}"
    got = pool.run(4, run_layout, [*settings, *degrees(cp=4), *PLANNED.get(method, []), balanced])[0]
    assert_parity(got, reference(pool, *settings), 1e-10)


_STAGES = "--parallelism.pipeline_parallel_module_fqns tok_embeddings layers.0 layers.1 norm,output"
_COMPILE = "--compile.enable --compile.backend=aot_eager"
WORK = {
    "cp2+tp2, recompute layers": (degrees(cp=2, tp=2), "--activation_checkpoint.mode=full"),
    "cp2, recompute within a budget": (degrees(cp=2), f"--activation_checkpoint.mode=memory_budget {_COMPILE}"),
    "cp2+tp2, compile": (degrees(cp=2, tp=2), _COMPILE),
    "cp2+pp2, compile": (
        degrees(cp=2, pp=2),
        f"--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble {_STAGES} {_COMPILE}",
    ),
    "fsdp2+cp2, recompute operators, compile": (
        degrees(dp_shard=2, cp=2),
        f"--activation_checkpoint.mode=selective {_COMPILE}",
    ),
    "ddp2+cp2, offload": (degrees(dp_replicate=2, cp=2), "--training.enable_cpu_offload"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WORK)
def test_other_work_equals_single_process(pool: WorkerPool, case: str) -> None:
    """Cases that test_pairs.py does not combine with a short convolution, and documents assigned by cost."""
    settings = ["--training.dtype=float64", "--model.short_conv_kernel=4", "--training.attention_mask=document"]
    layout, work = WORK[case]
    balanced = "--parallelism.context_parallel_load_balancer=balanced"
    world_size = 2 if case.startswith("cp2,") else 4
    got = pool.run(world_size, run_layout, [*settings, *layout, *work.split(), balanced])[0]
    assert_parity(got, reference(pool, *settings), 1e-10)


def test_a_convolution_that_stays_local_is_seen(pool: WorkerPool) -> None:
    """Negative control of the harness."""
    settings = ["--training.dtype=float64", "--model.short_conv_kernel=4"]
    broken = pool.run(2, run_layout, [*settings, *degrees(cp=2)], "convolution not under CP")[0]
    with pytest.raises(AssertionError, match="gradient of"):
        assert_parity(broken, reference(pool, *settings), 1e-3)


def refusals() -> None:
    with mesh_of_all() as mesh:
        layout = build_layout("head_tail", 16, mesh.size())
        module = parallelize_module(InnerConvolution(), mesh, ContextParallelConvolution())
        x, weight = torch.randn(1, layout.local_length(mesh.get_local_rank()), 2), torch.randn(2, 1, 4)
        with pytest.raises(ContextParallelError, match="got no plan"):
            module(x, weight)
        with region(mesh, layout) as opened:
            with pytest.raises(ContextParallelError, match=r"its plan has 8 rows for this rank; give \(B, S, C\), cut"):
                module(torch.randn(1, 16, 2), weight, plan=opened.attention_plan)
            positions = torch.arange(8)[None]
            torch.library.opcheck(
                torch.ops.longshard.context_parallel_convolution.default,
                (x.requires_grad_(), weight.requires_grad_(), opened.attention_plan, positions),
                test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
            )
        with pytest.raises(ContextParallelError, match="outside its context"):
            module(x, weight, plan=opened.attention_plan)


def test_what_is_refused_and_the_operators_schema(pool: WorkerPool) -> None:
    pool.run(2, refusals)
