"""Cases of context-parallel attention, their oracle on one process, and the comparison of both on the ranks."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longshard.context.attention import (
    context_parallel_attention,
)
from longshard.context.attention_inputs import AttentionSettings
from longshard.context.live import LivePlan, opened
from longshard.context.planning.cost import AttentionShape, LatentShape, attention_cost
from longshard.context.planning.mask import (
    Mask,
    by_sequence,
    causal,
    documents,
    full,
    sliding_window,
)
from longshard.context.planning.options import ContextParallelOptions
from longshard.sharding import exchange
from tests.distributed.pool import WorkerPool
from tests.masks import dense
from trainer.config.loader import parse_command_line
from trainer.runtime.process_group import Process, process_group

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BATCH = 2


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def relative(a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor | None = None) -> float:
    """Return the Euclidean error of a against b, relative to b, or to the tensor `whole` that contains both."""
    return ((a.double() - b.double()).norm() / (b if whole is None else whole).double().norm()).item()


def mesh_of_all(process: Process) -> DeviceMesh:
    return init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=("cp",))


def hybrid_groups(process: Process, options: ContextParallelOptions) -> tuple[dist.ProcessGroup, ...] | None:
    if options.method != "hybrid":
        return None
    shape = options.hybrid_degrees[::-1]
    return tuple(init_device_mesh(process.device.type, shape, mesh_dim_names=("cp_ring", "cp_a2a")).get_all_groups())


@dataclass(frozen=True)
class Case:
    """One attention call. masks: mask of the batch, for each sequence; is_causal, window: mask of the call."""

    seq_len: int
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    dtype: torch.dtype = torch.float64
    options: ContextParallelOptions = field(default_factory=ContextParallelOptions)
    is_causal: bool = True
    window: int = 0
    mask: str = "none"
    kv_len: int | None = None
    sinks: bool = False
    latent: tuple[int, int, int] | None = None
    """R, P and V of latents, of one key/value head."""

    @property
    def batch_mask(self) -> Mask | None:
        """Documents of lengths that fit nothing, other ones in each sequence."""
        if self.mask == "none":
            return None
        lengths = [np.random.default_rng(row).multinomial(self.seq_len, [0.5, 0.2, 0.1, 0.2]) for row in range(BATCH)]
        if self.mask == "documents, alike":
            return documents(lengths[0].tolist())
        if self.mask == "a sequence that sees nothing":  # and one that sees its first half
            half = self.seq_len // 2
            seen = documents([half, self.seq_len - half], [half, 0])
            return by_sequence([Mask(self.seq_len, self.seq_len, ()), dataclasses.replace(seen, kv_len=self.seq_len)])
        return by_sequence([documents(row.tolist()) for row in lengths])

    @property
    def whole_mask(self) -> Mask:
        """All masks together, as the oracle sees them."""
        lengths = self.seq_len, self.kv_len
        mask = causal(*lengths) if self.is_causal else full(*lengths)
        if self.window:
            mask = mask & sliding_window(self.seq_len, self.window, self.kv_len, is_causal=self.is_causal)
        return mask if self.batch_mask is None else mask & self.batch_mask

    @property
    def shape(self) -> AttentionShape:
        latent = None if self.latent is None else LatentShape(*self.latent)
        return AttentionShape(BATCH, *self.heads, self.head_dim, self.dtype.itemsize, latent=latent)

    def inputs(self) -> list[torch.Tensor]:
        """Return q, k, v, a cotangent of the output, and sinks or `up` if the case has them, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seq_len + self.head_dim)
        kv_len = self.kv_len or self.seq_len
        sizes = [(self.heads[0], self.seq_len), *[(self.heads[1], kv_len)] * 2, (self.heads[0], self.seq_len)]
        dims = [self.head_dim, *self.shape.key_sizes, self.shape.value_dim]
        shapes: list[tuple[int, ...]] = [(BATCH, *size, d) for size, d in zip(sizes, dims, strict=True)]
        shapes += [self.heads[:1]] * self.sinks
        if self.latent is not None:
            rank, rotated, value_dim = self.latent
            shapes.append((self.heads[0], self.head_dim - rotated + value_dim, rank))
        return [torch.randn(shape, dtype=torch.float64, generator=generator).to(self.dtype) for shape in shapes]


def oracle(case: Case, scale: float) -> tuple[torch.Tensor, ...]:
    """Return out, dq, dk, dv and dsinks by the definition of attention, in float64 on one process.

    The output of a query that sees no key is 0.
    """
    q, k, v, cotangent, *others = (x.to(torch.float64, copy=True) for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v, *others)]
    sinks = others[:1] if case.sinks else []
    if case.latent is not None:  # the definition of multi-head latent attention, head by head
        (rank, rotated, _), heads = case.latent, []
        for up in others[-1]:
            expanded = k[:, 0, :, :rank] @ up.T
            key_width = case.head_dim - rotated
            keys = torch.cat((expanded[..., :key_width], k[:, 0, :, rank:]), -1)
            heads.append((keys, expanded[..., key_width:]))
        k, v = (torch.stack(parts, 1) for parts in zip(*heads, strict=True))
    group = q.shape[1] // k.shape[1]
    visible = torch.from_numpy(dense(case.whole_mask)).unsqueeze(1)
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    scores = scores.masked_fill(~visible, -1e300)
    for sink in sinks:
        scores = torch.cat((scores, sink[:, None, None].expand(*scores.shape[:3], 1)), dim=3)
    weights = scores.softmax(-1)[..., : visible.shape[-1]] * visible
    out = weights @ v.repeat_interleave(group, 1)
    gradients = torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)
    return out, *gradients


def shared_oracles(cases: list[Case], process: Process) -> list[tuple[torch.Tensor, ...]]:
    """Return `oracle` of each case. Each rank computes some cases and sends them to the others; a collective."""
    own_results = [oracle(case, 0.3) for case in cases[process.rank :: process.world_size]]
    shares: list[list] = [[] for _ in range(process.world_size)]
    dist.all_gather_object(shares, own_results)
    return [shares[i % process.world_size][i // process.world_size] for i in range(len(cases))]


def attention_case(cases: list[Case]) -> list[dict]:
    """Return relative errors of out, dq, dk and dv on this rank's shard, and sent and planned bytes, for each case."""
    process = Process.from_environment()
    results = []
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        for case, wanted in zip(cases, shared_oracles(cases, process), strict=True):
            layout = case.options.layout(case.seq_len, mesh.size(), case.batch_mask)
            kv_layout = case.options.layout(case.kv_len, mesh.size()) if case.kv_len else layout
            groups = hybrid_groups(process, case.options)
            live = LivePlan(mesh, layout, case.batch_mask, case.options, kv_layout, groups)
            row_indices = [
                torch.from_numpy(part.indices(process.rank)) for part in (layout, kv_layout, kv_layout, layout)
            ]
            # In memory as a projection gives them: (B, S, H, D).
            shards = [
                x[:, :, part].transpose(1, 2).contiguous().transpose(1, 2).to(process.device)
                for x, part in zip(case.inputs(), row_indices, strict=False)
            ]
            cotangent = shards.pop()
            leaves = [x.requires_grad_() for x in (*shards, *(x.to(process.device) for x in case.inputs()[4:]))]
            exchange.calls.clear()
            exchange.bytes_sent.clear()
            keep = case.options.keep_exchanged
            settings = AttentionSettings(0.3, case.is_causal, case.window, keep_exchanged=keep)
            with opened(live, BATCH) as handle:
                others = leaves[3:]
                sinks = others.pop(0) if case.sinks else None
                up = others.pop() if case.latent else None
                out, lse, *_ = context_parallel_attention(*leaves[:3], handle, settings, sinks=sinks, up=up)
                grads = torch.autograd.grad(out, leaves, cotangent)
            assert lse.shape == out.shape[:3]
            got = (out, *grads[:3])
            sent, calls = dict(exchange.bytes_sent), dict(exchange.calls)
            for dsinks, whole in zip(grads[3:], wanted[4:], strict=True):  # each rank has its queries' part
                summed = exchange.all_reduce(dsinks.clone(), mesh)
                assert relative(summed.cpu(), whole) < TOLERANCE[case.dtype]
            errors = [
                relative(x.cpu(), whole[:, :, part], whole) if whole.any() else x.norm().item()
                for x, whole, part in zip(got, wanted[:4], (row_indices[0], *row_indices[:3]), strict=True)
            ]
            (run,) = live._made.values()
            shape = case.shape
            queries = case.options.query_heads_per_pass
            costs = [
                attention_cost(
                    run.plan, shape, way, case.options.heads_per_pass, query_heads=queries, keep_exchanged=keep
                )
                for way in ("forward", "backward")
            ]
            results.append(
                {
                    "errors": errors,
                    "calls": calls,
                    "sent": sent,
                    "planned calls": dict(costs[0].calls + costs[1].calls),
                    "planned": {k: v for c in [costs[0].bytes_sent + costs[1].bytes_sent] for k, v in c.items() if v},
                    "pairs": run.plan.pairs,
                }
            )
    return results


def assert_exact(pool: WorkerPool, degree: int, cases: list[Case], run: Callable = attention_case) -> None:
    """Check outputs and gradients against one process, and collectives and bytes against the plan."""
    problems = []
    for rank, results in enumerate(pool.run(degree, run, cases)):
        for case, result in zip(cases, results, strict=True):
            tolerance = TOLERANCE[case.dtype]
            sent = {kind: size for kind, size in result["sent"].items() if size}
            if not all(error <= tolerance for error in result["errors"]):
                problems.append(f"rank {rank} {case}: {result['errors']}")
            if result["calls"] != result["planned calls"] or sent != result["planned"]:
                problems.append(f"rank {rank} {case}: {result}")
    assert not problems, "\n".join(problems[:10])


METHODS = ("ring", "all_gather", "all_to_all")
MASKS = [
    {},
    {"is_causal": False},
    {"window": 7},
    {"is_causal": False, "window": 5},
    {"mask": "documents"},
    {"mask": "documents, alike", "window": 6},
    {"mask": "a sequence that sees nothing"},
]
