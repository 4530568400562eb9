"""Law: linear attention by flash-linear-attention's kernels is the recurrence of one token after another.

The kernels are those that run on GPUs, called as on GPUs, in Triton's interpreter: `tests/unit/test_linear_kernels.py`
runs this file in a process of its own.
"""

import importlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch.library import opcheck

from longshard.context import linear_scan
from longshard.context.execution import linear_kernels
from longshard.context.execution.linear_chunks import Tokens
from longshard.context.linear_pass import ChunkedPass, Place
from longshard.sharding.layout import AxisLayout, head_tail
from tests.distributed.test_linear_attention import differences, drawn, positions_of, starts_of, token_by_token
from tests.interpreted.interpreter import prepare
from tests.slow import slow
from tests.thread_ranks import run_ranks
from tests.unit.test_thread_linear import scanned, whole_of

OPERATOR = importlib.import_module("longshard.context.linear_attention")
KINDS = ("delta", "delta of channels", "decay")
EXACT, PACKED = 5e-6, 1e-4  # of float32: without documents, and with, behind which sums of logarithms are rounded
LENGTH = 70  # more than a chunk of the kernels
SHORT = 20  # for decays of channels, whose kernels take seconds for ten tokens

prepare("fla.ops.common.chunk_delta_h", "fla.ops.common.chunk_h")


def uneven(length: int) -> AxisLayout:
    """Return a layout of three ranks: one has no token, and one has two fragments of the same length."""
    return AxisLayout("uneven", length, (((0, 4), (length - 4, length)), (), ((4, length - 4),)))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Take the kernels on any device, and count their calls."""
    monkeypatch.setattr(OPERATOR, "runs_kernels", lambda _: True)
    calls = mock.Mock(wraps=linear_kernels._by_kernels)
    monkeypatch.setattr(linear_kernels, "_by_kernels", calls)
    yield calls
    assert calls.called


def recurrence(kind: str, batch: int, length: int, share: float) -> list[torch.Tensor]:
    """Output and gradients by the definition, in float64, of the inputs that `scanned` rounds to float32."""
    rounded = drawn(kind, batch, length, seed=1, dtype=torch.float32)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in rounded]
    out = token_by_token(*exact, starts_of(batch, length, share, 3), 0.5)
    return [out, *torch.autograd.grad(out, [x for x in exact if x is not None], cotangent(batch, length))]


def cotangent(batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(batch, length, 4, 3, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("share", "tolerance"), [(0.0, EXACT), (0.1, PACKED)], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("kind", "length"),
    [("delta", LENGTH), ("decay", LENGTH), *slow(("delta of channels", SHORT), ("delta of channels", LENGTH))],
)
def test_one_process(kind: str, length: int, share: float, tolerance: float) -> None:
    inputs = drawn(kind, 1, length, seed=1, dtype=torch.float32)
    positions = positions_of(starts_of(1, length, share, 3)) if share else None
    out, _, last = OPERATOR.linear_attention(Tokens(*inputs, positions, 0.5), None)
    leaves = [x for x in inputs if x is not None]
    results = [out, *torch.autograd.grad(out, leaves, cotangent(1, length).float())]
    wanted = recurrence(kind, 1, length, share)
    assert differences(results, wanted) < tolerance
    query = inputs[0].detach()[:, -1].repeat_interleave(2, 1)
    assert differences([0.5 * torch.einsum("bhk,bhkv->bhv", query, last)], [wanted[0][:, -1]]) < tolerance


@pytest.mark.parametrize("most", [linear_scan.GATHERED_BYTES, *slow(0)], ids=["gathered", "in_turn"])
@pytest.mark.parametrize("is_uneven", [True, *slow(False)], ids=["uneven", "head_tail"])
@pytest.mark.parametrize(("kind", "length"), [("delta", LENGTH), ("delta of channels", SHORT), ("decay", LENGTH)])
def test_ranks(kind: str, length: int, is_uneven: bool, most: int, kernels: mock.Mock) -> None:
    """Two sequences of packed documents: fragments of one length are one call, a rank may have no token."""
    layout = uneven(length) if is_uneven else head_tail(length, 2)
    with mock.patch.object(linear_scan, "GATHERED_BYTES", most):
        parts = run_ranks(layout.degree, scanned, layout, kind, torch.float32, False, limit=600)
    assert differences(whole_of(layout, parts), recurrence(kind, 2, length, 0.1)) < PACKED
    lengths = sum(len({stop - start for start, stop in ranges}) for ranges in layout.ranges)
    assert kernels.call_count == 3 * lengths, "for the maps, forward, and in the backward"


@pytest.mark.parametrize("kind", KINDS)
def test_maps_are_those_of_chunks(kind: str) -> None:
    place = Place((5, 10, 5), 16, "cpu")
    inputs = [None if x is None else x.detach() for x in drawn(kind, 1, SHORT, seed=1, dtype=torch.float32)]
    x = Tokens(*inputs, None, 0.5)
    maps = linear_kernels.KernelPass(x, place.lengths).maps()
    assert differences([maps], [ChunkedPass(x, place).maps()]) < EXACT


def test_half_precision() -> None:
    """Layers give queries and keys in float32, and values in half precision; gradients have the inputs' types.

    float16, because the interpreter's products of bfloat16 are wrong.
    """
    exact = drawn("delta", 1, LENGTH, seed=1)
    types = torch.float32, torch.float32, torch.float16, torch.float32, torch.float16
    inputs = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(exact, types, strict=True)]
    out = OPERATOR.linear_attention(Tokens(*inputs, None, 0.5), None)[0]
    gradients = torch.autograd.grad(out, inputs, cotangent(1, LENGTH).half())
    assert [out.dtype, *(x.dtype for x in gradients)] == [torch.float16, *types]
    wanted = token_by_token(*exact, starts_of(1, LENGTH, 0.0, 0), 0.5)
    assert differences([out, *gradients], [wanted, *torch.autograd.grad(wanted, exact, cotangent(1, LENGTH))]) < 1e-2


def test_the_operator_keeps_the_rules_of_operators() -> None:
    inputs = drawn("delta", 1, SHORT, seed=0, dtype=torch.float32)
    positions = positions_of(starts_of(1, SHORT, 0.2, 1))
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    *tokens, beta = inputs
    opcheck(OPERATOR.operator, (tokens, beta, None, positions, 0.5), test_utils=checks)


def test_documents_matter() -> None:
    """A control: without their positions the result is another one."""
    inputs = drawn("delta", 1, LENGTH, seed=1, dtype=torch.float32)
    out = OPERATOR.linear_attention(Tokens(*inputs, None, 0.5), None)[0]
    assert differences([out], recurrence("delta", 1, LENGTH, 0.1)[:1]) > 0.05
