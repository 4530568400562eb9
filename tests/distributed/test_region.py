"""Laws of regions: a model with a context-parallel part has the outputs and gradients of one process."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from longshard.context.attention import ContextParallelAttention
from longshard.context.planning.mask import documents_of, full
from longshard.context.planning.options import ContextParallelError, ContextParallelOptions
from longshard.context.regions import Region, region, replicate, shard, unshard
from longshard.sharding import exchange as door
from longshard.sharding.layout import AxisLayout, head_tail
from longshard.sharding.rows import Axis, exchange
from scripts.gpu_blocks.block import largest
from tests.distributed.attention_cases import mesh_of_all, random, relative
from tests.distributed.pool import WorkerPool
from tests.slow import slow
from trainer.config.loader import parse_command_line
from trainer.models.attention import InnerAttention
from trainer.runtime.process_group import Process, process_group

DIM, HEADS, VOCAB = 16, 4, 32


class Block(nn.Module):
    """Self-attention, cross attention to a memory if there is one, feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.cross_q, self.out = (nn.Linear(DIM, n * DIM, bias=False) for n in (3, 1, 1))
        self.cross_kv, self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)
        self.inner_attention, self.inner_cross = InnerAttention(), Local()

    def forward(self, x, memory=None, plan=None, cross_plan=None):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(self.inner_attention(q, k, v, plan=plan).transpose(1, 2).flatten(2))
        if memory is not None:
            q = self.cross_q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.cross_kv(memory).chunk(2, -1))
            x = x + self.inner_cross(q, k, v, plan=cross_plan).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


class Local(nn.Module):
    """Attention of every query to every key, of any two lengths."""

    def forward(self, q, k, v, *, scale=None, sinks=None, plan=None):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)


class Toy(nn.Module):
    """Encoder and decoder; `part` says which of them is a region."""

    def __init__(self, source_length: int, target_length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.places = nn.Parameter(torch.randn(max(source_length, target_length), DIM))
        self.encoder, self.decoder = (nn.ModuleList([Block(), Block()]) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.copy_(random(*parameter.shape, seed=len(name)) / parameter.shape[-1] ** 0.5)
        self.double()

    def embedded(self, tokens):
        return self.embed(tokens) + self.places[: tokens.shape[1]]

    def encoded(self, x, plan=None):
        for block in self.encoder:
            x = block(x, plan=plan)
        return x

    def decoded(self, x, memory, plan=None, cross_plan=None):
        for block in self.decoder:
            x = block(x, memory, plan, cross_plan)
        return x

    def forward(self, source, target):
        return self.head(self.decoded(self.embedded(target), self.encoded(self.embedded(source))))


SOURCE, TARGET = 11, 13


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    source, target, labels = (torch.randint(VOCAB, (2, n), generator=generator) for n in (SOURCE, TARGET, TARGET))
    return source, target, labels


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 26


def style(blocks: nn.ModuleList, mesh: DeviceMesh, name: str = "inner_attention", *, is_causal: bool = True) -> None:
    for block in blocks:
        ContextParallelAttention(is_causal=is_causal)._apply(getattr(block, name), mesh)


def compared(toy: Toy, *, summed: bool, group: dist.ProcessGroup, wanted: Toy) -> list[float]:
    """Relative errors of each gradient, after adding up over ranks if that is still to be done."""
    errors = []
    for (name, ours), theirs in zip(toy.named_parameters(), wanted.parameters(), strict=True):
        if theirs.grad is None:  # cross attention of an encoder's block
            assert ours.grad is None, name
            continue
        gradient = door.all_reduce(ours.grad.clone(), group) if summed else ours.grad
        errors.append(relative(gradient, theirs.grad))
    return errors


def replicated(part: nn.Module, where: Region) -> dict[str, torch.Tensor]:
    return {name: where.replicate(parameter) for name, parameter in part.named_parameters()}


def decoder_region(mesh: DeviceMesh, grad: str, method: str, faulty: bool) -> list[float]:
    """The decoder lies over the ranks; encoder and cross attention are local, and untouched."""
    source, target, labels = (x.to(mesh.device_type) for x in data())
    alone, toy = (Toy(SOURCE, TARGET).to(mesh.device_type) for _ in range(2))
    loss_of(alone(source, target), labels).backward()
    style(toy.decoder, mesh)
    options = ContextParallelOptions(method)
    layout = options.layout(TARGET, mesh.size())
    with region(mesh, layout, options=options, local_attention=True) as part:
        memory = toy.encoded(toy.embedded(source))
        x = part.shard(toy.embedded(target), 1, grad=grad)
        if grad == "replicated":
            memory = memory if faulty else part.replicate(memory)
            for block in toy.decoder:
                x = functional_call(block, replicated(block, part), (x, memory, part.attention_plan))
            logits = functional_call(toy.head, replicated(toy.head, part), (x,))
        else:
            memory = part.replicate(memory) if faulty else memory
            logits = toy.head(toy.decoded(x, memory, part.attention_plan))
        loss_of(logits, part.shard(labels, 1)).backward()
        assert part.live.calls == 2
    return compared(toy, summed=grad == "partial", group=mesh.get_group(), wanted=alone)


def decoder_region_case(grad: str, method: str, faulty: bool) -> list[float]:
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        return decoder_region(mesh_of_all(process), grad, method, faulty)


REGIONS = [(4, "partial", "ring"), (2, "replicated", "all_gather"), (2, "partial", "all_to_all")]


@pytest.mark.parametrize(
    ("degree", "grad", "method"),
    [
        pytest.param(*case, marks=[] if case in REGIONS else [pytest.mark.slow])
        for case in product((2, 4), ("partial", "replicated"), ("ring", "all_gather", "all_to_all"))
    ],
)
def test_a_region_with_local_cross_attention(pool: WorkerPool, degree: int, grad: str, method: str) -> None:
    """A length that does not divide; nothing is scaled back. With the other placement, gradients are wrong."""
    for errors in pool.run(degree, decoder_region_case, grad, method, False):
        assert len(errors) > 25
        assert largest(*errors) < 1e-11
    for errors in pool.run(degree, decoder_region_case, grad, method, True):
        assert max(errors) > 0.1


def encoder_region_case(grad: str) -> list[float]:
    """The encoder lies over the ranks, and the decoder, on every rank, uses all of its output."""
    process = Process.from_environment()
    source, target, labels = data()
    alone, toy = Toy(SOURCE, TARGET), Toy(SOURCE, TARGET)
    loss_of(alone(source, target), labels).backward()
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        style(toy.encoder, mesh)
        layout = head_tail(SOURCE, mesh.size())
        with region(mesh, layout, local_attention=True) as part:
            x = part.shard(toy.embedded(source), 1, grad=grad)
            for block in toy.encoder:
                weights = replicated(block, part) if grad == "replicated" else dict(block.named_parameters())
                x = functional_call(block, weights, (x,), {"plan": part.attention_plan})
            memory = part.unshard(x, 1, grad=grad)
            loss = loss_of(toy.head(toy.decoded(toy.embedded(target), memory)), labels)
            # Every rank computes the same loss: each counts its part of it, or each the whole.
            (loss / mesh.size() if grad == "partial" else loss).backward()
        return compared(toy, summed=grad == "partial", group=mesh.get_group(), wanted=alone)


@pytest.mark.parametrize("grad", ["partial", "replicated"])
@pytest.mark.parametrize("degree", [3, *slow(1)])
def test_a_prefix_in_a_region_and_the_rest_on_every_rank(pool: WorkerPool, degree: int, grad: str) -> None:
    for errors in pool.run(degree, encoder_region_case, grad):
        assert largest(*errors) < 1e-11


def cross_region_case(method: str) -> list[float]:
    """Encoder, decoder and cross attention all lie over the ranks: three regions, one of two sequences."""
    process = Process.from_environment()
    source, target, labels = data()
    alone, toy = Toy(SOURCE, TARGET), Toy(SOURCE, TARGET)
    loss_of(alone(source, target), labels).backward()
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        style(toy.encoder, mesh)
        style(toy.decoder, mesh)
        style(toy.decoder, mesh, "inner_cross", is_causal=False)
        options = ContextParallelOptions(method)
        layouts = [options.layout(n, mesh.size()) for n in (SOURCE, TARGET)]
        with (
            region(mesh, layouts[0], options=options) as encoder,
            region(mesh, layouts[1], options=options) as decoder,
            region(mesh, layouts[1], options=options, kv_layout=layouts[0], mask=full(TARGET, SOURCE)) as cross,
        ):
            memory = toy.encoded(encoder.shard(toy.embedded(source), 1), encoder.attention_plan)
            x = decoder.shard(toy.embedded(target), 1)
            logits = toy.head(toy.decoded(x, memory, decoder.attention_plan, cross.attention_plan))
            loss_of(logits, decoder.shard(labels, 1)).backward()
        return compared(toy, summed=True, group=mesh.get_group(), wanted=alone)


@pytest.mark.parametrize("method", ["ring", *slow("all_gather", "all_to_all")])
def test_cross_attention_between_two_sharded_sequences(pool: WorkerPool, method: str) -> None:
    for errors in pool.run(2, cross_region_case, method):
        assert largest(*errors) < 1e-11


def refusal(act: Callable[[], object], error_type: type[Exception] = ContextParallelError) -> str:
    with pytest.raises(error_type) as error:
        act()
    return str(error.value)


def open_region(mesh: DeviceMesh, layout: AxisLayout, **settings: Any) -> None:
    with region(mesh, layout, **settings):
        pass


def refused_arguments(mesh: DeviceMesh, layout: AxisLayout, x: torch.Tensor) -> list[str]:
    """The messages about arguments that do not fit the layout or the group."""
    group = mesh.get_group()
    return [
        refusal(lambda: shard(x, layout, 1, group=group, grad="sum"), ValueError),
        refusal(lambda: shard(x, layout, 2, group=group), ValueError),
        refusal(lambda: unshard(x, layout, 1, group=group), ValueError),
        refusal(lambda: exchange(x[:, :4], Axis(layout, group), (((5, 3),), ()), 1), ValueError),
        refusal(lambda: exchange(x, Axis(layout, group), ((), ()), 1), ValueError),
        refusal(lambda: open_region(mesh, layout, sequences=3, mask=documents_of(np.zeros((2, 8))))),
        refusal(lambda: AxisLayout("part", 8, (((0, 4),), ())), ValueError),
    ]


def second_derivatives(group: dist.ProcessGroup, layout: AxisLayout, x: torch.Tensor) -> list[list[float]]:
    """Return second derivatives of the sum of squares: twice the number of copies of a row that count."""
    leaf, values = x[:, :4].clone().requires_grad_(), []
    for act in (
        lambda: exchange(leaf, Axis(layout, group), (((0, 8),),) * 2, 1),
        lambda: unshard(leaf, layout, 1, group=group, grad="replicated"),
        lambda: shard(torch.cat([leaf, leaf], 1), layout, 1, group=group, grad="replicated"),
        lambda: replicate(leaf, group),
    ):
        leaf.grad = None
        (gradient,) = torch.autograd.grad((act() ** 2).sum(), leaf, create_graph=True)
        gradient.sum().backward()
        values.append(leaf.grad.unique().tolist())
    return values


def guards_case() -> list[str]:
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        group, layout = mesh.get_group(), head_tail(8, 2)
        module = InnerAttention()
        ContextParallelAttention()._apply(module, mesh)
        x = random(1, 8, 2)
        messages = refused_arguments(mesh, layout, x)
        assert second_derivatives(group, layout, x) == [[4.0], [2.0], [4.0], [4.0]]

        # Rows of no width are sent as any others.
        empty = exchange(torch.zeros(4, 0), Axis(layout, group), (((0, 8),),) * 2, 0)
        assert empty.shape == (8, 0)
        # A row that many want: its gradient is added up in float32.
        half = torch.ones(4, 1, dtype=torch.bfloat16, requires_grad=True)
        many = exchange(half, Axis(layout, group), (((0, 1),) * 1000,) * 2, 0)
        many.backward(torch.ones_like(many))
        assert half.grad.sum() == (2000 if process.rank == 0 else 0)

        messages.append(refusal(lambda: open_region(mesh, head_tail(8, 3))))
        messages.append(refusal(lambda: open_region(mesh, layout)))  # and no attention ran
        del module
        open_region(mesh, layout, local_attention=True)  # nothing is parallelised
    return messages


def test_guards(pool: WorkerPool) -> None:
    words = [
        "'sum' is none of 'partial', 'replicated'",
        "layout with 8",
        "layout with 4",
        "ends before it begins",
        "got 8 rows",
        "the mask is for 2 x 8 queries",
        "of layout 'part' do not give each of 8 tokens",
        "for 3 ranks",
        "none of the 1",
    ]
    for messages in pool.run(2, guards_case):
        assert len(messages) == len(words)
        for message, word in zip(messages, words, strict=True):
            assert word in message
            assert len(message.splitlines()) == 1
