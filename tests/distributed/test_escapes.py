"""Attention and mixing of tokens that the context does not see, in any model, are refused on every rank."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from longshard.context.planning.mask import documents
from longshard.context.planning.options import ContextParallelError
from longshard.context.regions import context_parallel
from longshard.integrations.interception import intercept_sdpa
from scripts.gpu_blocks.block import largest
from tests.distributed.other_models import RANKS, Attention, data, ranks, relative
from tests.distributed.pool import WorkerPool


class Shift(nn.Module):
    """Mixes tokens without attention, by nothing that its modules or parameters show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack(x.unbind(1)[::-1], 1)


class Padded(Attention):
    """Attention that sees the token before too, as MobileBert's embeddings."""

    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        return super().forward(x + F.pad(x[:, :-1], (0, 0, 1, 0)), **settings)


class Summed(Attention):
    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        return super().forward(x.cumsum(dim=1), **settings)


class Convolved(Attention):
    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        weight = torch.ones(8, 1, 3, dtype=x.dtype)
        return super().forward(F.conv1d(x.mT, weight, padding=1, groups=8).mT, **settings)


class Centred(Attention):
    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        return super().forward(x - x.mean(1, keepdim=True), **settings)


class Flipped(Attention):
    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        return super().forward(x + x.flip(1), **settings)


class Pointwise(Attention):
    """Control: the same functions over other dimensions."""

    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        x = F.conv1d(x.mT, torch.ones(8, 8, 1, dtype=x.dtype)).mT - x.mean(-1, keepdim=True) + x.flip(0, 2)
        return super().forward(x, **settings)


class PlainAttention(Attention):
    """Attention by its definition."""

    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).split(8, dim=-1)
        return (q @ k.mT).softmax(-1) @ v


class Kernel(Attention):
    """Attention by an operator."""

    def __init__(self, operator: Callable) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, x: torch.Tensor, **settings: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).split(2, dim=1)
        return self.operator(q, k, v).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module, positions: int = 0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(layers)
        self.table = nn.Embedding(positions, 8, dtype=torch.float64) if positions else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if self.table is not None:
            x = x + self.table(torch.arange(x.shape[1]) if positions is None else positions)
        for layer in self.layers:
            x = layer(x)
        return x


def run(
    mesh: DeviceMesh,
    model: nn.Module,
    checked: nn.Module | None = None,
    *,
    give_positions: bool = False,
    allow_modules: Sequence[type | str] = (),
    **settings: Any,
) -> torch.Tensor | str:
    """The model's output of this rank's rows, or its refusal."""
    x, positions = data(), torch.arange(13).expand(2, -1).clone()
    extra = {"positions": positions} if give_positions else {}
    try:
        settings["intercept"] = intercept_sdpa(checked, allow_modules=allow_modules)
        with context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[1, 1], **settings):
            return model(x, **extra)
    except ContextParallelError as error:
        return str(error)


def _scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def escapes_case() -> list[str]:
    aten = torch.ops.aten
    kernel = Kernel(aten._scaled_dot_product_flash_attention_for_cpu)
    with ranks() as mesh:
        in_thread = Stack(Attention(), Attention())
        call = in_thread.layers[1].forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(call, x).result()

        in_thread.layers[1].forward = forward
        models = {
            "plain": Stack(Attention(), PlainAttention()),
            "shift": Stack(Attention(), Shift()),
            "pad": Stack(Padded(), Attention()),
            "cumsum": Stack(Attention(), Summed()),
            "conv1d": Stack(Attention(), Convolved()),
            "mean": Stack(Attention(), Centred()),
            "flip": Stack(Flipped(), Attention()),
            "kernel": Stack(Attention(), kernel),
            "jit function": Stack(Attention(), Kernel(torch.jit.script(_scripted))),
            "jit module": Stack(Attention(), torch.jit.trace(Attention(), data())),
            "thread": in_thread,
        }
        messages = [run(mesh, model) for model in models.values()]
        messages.append(run(mesh, models["shift"], allow_modules=[Shift, "Shifted"]))
        messages.append(run(mesh, models["jit module"], models["jit module"]))
        # Controls: the same checks let these pass.
        assert isinstance(run(mesh, Stack(Pointwise(), Attention())), torch.Tensor)
        assert isinstance(run(mesh, models["shift"], allow_modules=["Shift"]), torch.Tensor)
        assert isinstance(run(mesh, models["pad"], allow_modules=[Padded]), torch.Tensor)
        assert isinstance(run(mesh, models["plain"], allow_modules=["layers.1"]), torch.Tensor)
        assert not torch.nn.modules.module._global_forward_pre_hooks
        assert not any(m._forward_hooks or m._forward_pre_hooks for model in models.values() for m in model.modules())
        return messages


ESCAPES = [
    "layers.1 ran and no context-parallel attention in it",
    "layers [1] of layers ran no context-parallel attention",
    "calls pad along the",
    "calls cumsum along the",
    "calls conv1d along the",
    "calls mean along the",
    "calls flip along the",
    "_scaled_dot_product_flash_attention_for_cpu attends inside of one call",
    "layers [1] of layers ran no context-parallel attention",
    "compiled by torch.jit",
    "layers.1 ran and no context-parallel attention in it",
    "names ['Shifted'], and the model has no such module",
    "compiled by torch.jit",
]


def test_attention_that_escapes_is_noticed(pool: WorkerPool) -> None:
    for messages in pool.run(RANKS, escapes_case):
        assert len(messages) == len(ESCAPES)
        for message, words in zip(messages, ESCAPES, strict=True):
            assert isinstance(message, str), words
            assert words in message
            assert len(message.splitlines()) == 1


def tables_case() -> list[str | float]:
    """A model of nobody's library: attention by aten, a table of positions. Errors, or refusals."""
    aten, results = torch.ops.aten.scaled_dot_product_attention, []
    with ranks() as mesh:
        model = Stack(Kernel(aten), Kernel(aten.default), positions=13)
        for settings in (
            {"give_positions": True},
            {"give_positions": True, "load_balancer": "contiguous"},
            {},
            {"load_balancer": "contiguous"},
            {"load_balancer": "contiguous", "mask": documents((5, 8))},
        ):
            out = run(mesh, model, **settings)
            if isinstance(out, torch.Tensor):
                buffers = {"buffers": [data()], "buffer_seq_dims": [1]}
                with context_parallel(mesh, **buffers, **settings_of(settings), local_attention=True) as cp:
                    own_rows = torch.from_numpy(cp.layout.indices(mesh.get_local_rank()))
                out = relative(out, model(data())[:, own_rows])
            results.append(out)
    return results


def settings_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in settings.items() if name == "load_balancer"}


def test_tables_of_positions_of_any_model(pool: WorkerPool) -> None:
    for *errors, permuted, cut, packed in pool.run(RANKS, tables_case):
        assert largest(*errors) < 1e-12
        assert "counts positions from 0 on rank(s) [0, 1] of the group" in permuted
        assert all("counts positions from 0 on rank(s) [1] of the group" in message for message in (cut, packed))
