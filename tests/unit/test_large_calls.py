"""Law: a call that 32-bit integers cannot address is computed by fewer heads at a time, with the same results."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from longshard.context.execution.kernels import cuda
from longshard.context.execution.kernels.base import BackwardInputs, Kernel
from longshard.context.execution.kernels.choose import CUDA_KERNELS
from longshard.context.execution.kernels.cuda import Cudnn, Varlen
from longshard.context.execution.kernels.head_groups import HeadGroups
from longshard.context.planning.capabilities import call_elements
from tests.unit.kernel_stand_ins import CALLS, KERNELS, OPS, counts, launches_of
from tests.unit.test_kernels import CAUSAL, inputs
from trainer.config.loader import parse_command_line
from trainer.families.registry import flavor_args
from trainer.job.attention import resolve_attention
from trainer.models import attention

by_name = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
# heads, key/value heads, the heads of a call
heads_of_a_call = pytest.mark.parametrize("heads", [(4, 2, 2), (4, 4, 3), (6, 2, 2), (4, 1, 1)], ids=str)


def limited(kernel: Kernel, heads: int, rows: int, calls: int = 1, head_dim: int = 16) -> HeadGroups:
    """Return the kernel with a limit that allows `heads` heads in a call, and no more."""
    grouped = HeadGroups(kernel)
    limit = heads * call_elements(2, rows, calls, head_dim) + 1
    grouped.capabilities = replace(kernel.capabilities, elements=limit)
    return grouped


@by_name
@heads_of_a_call
def test_a_tile_by_fewer_heads(kernel: Kernel, heads: tuple[int, int, int]) -> None:
    q, k, v, dout = inputs(*heads[:2], 9, 9, 16)
    grouped = limited(kernel, heads[2], 9)
    counts.clear()
    out, lse = kernel.forward(q, k, v, relation=CAUSAL, scale=0.3)
    whole = counts.total()
    result = grouped.forward(q, k, v, relation=CAUSAL, scale=0.3)
    assert counts.total() > 2 * whole, "one call of all heads"
    torch.testing.assert_close(result[0], out)
    torch.testing.assert_close(result[1], lse)
    backward_inputs = BackwardInputs(dout, q, k, v, out, lse)
    wanted = kernel.backward(backward_inputs, relation=CAUSAL, scale=0.3)
    for ours, whole in zip(grouped.backward(backward_inputs, relation=CAUSAL, scale=0.3), wanted, strict=True):
        torch.testing.assert_close(ours, whole)


@heads_of_a_call
def test_a_launch_by_fewer_heads(heads: tuple[int, int, int]) -> None:
    kernel = Varlen(OPS)
    q, k, v, dout = inputs(*heads[:2], 12, 13, 16)
    out, lse = torch.randn_like(q), torch.randn(q.shape[:3], dtype=q.dtype).abs() + 5
    for launch in launches_of(CALLS):
        rows = max(sum(stop - start for start, stop in spans) for spans in (launch.q, launch.kv))
        grouped = limited(kernel, heads[2], rows, len(launch.calls))
        wanted = kernel.forward_many(q, k, v, launch, scale=0.3)
        counts.clear()
        results = grouped.forward_many(q, k, v, launch, scale=0.3)
        assert counts.total() > 1, "one call of all heads"
        for ours, whole in zip(results, wanted, strict=True):
            torch.testing.assert_close(ours, whole)
        backward_inputs = BackwardInputs(dout, q, k, v, out, lse)
        pairs = (
            grouped.backward_many(backward_inputs, launch, scale=0.3),
            kernel.backward_many(backward_inputs, launch, scale=0.3),
        )
        for ours, whole in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, whole)


def test_calls_within_the_limit_are_the_kernels_own() -> None:
    kernel = Cudnn(OPS)
    q, k, v, _ = inputs(4, 2, 9, 9, 16)
    out, _ = HeadGroups(kernel).forward(q, k, v, relation=CAUSAL, scale=0.3)
    assert torch.equal(out, kernel.forward(q, k, v, relation=CAUSAL, scale=0.3)[0])
    assert all(isinstance(each, HeadGroups) for each in CUDA_KERNELS)


def test_rows_at_far_offsets_are_copied() -> None:
    """Rows of messages of the exchange of heads: 1.3 million rows, 1,800 elements apart."""
    rows = 1_300_000
    far = torch.empty_strided((1, 4, rows, 128), (1, 128, 1800, 1), dtype=torch.bfloat16, device="meta")
    assert cuda._aligned(far).is_contiguous()
    near = far[:, :, : (1 << 31) // 1800]
    assert cuda._aligned(near) is near


def test_plain_attention_of_too_many_elements_has_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = inputs(6, 2, 9, 9, 16)
    wanted = attention._causal(q, k, v, None)
    monkeypatch.setattr(attention, "_GPU", "cpu")
    monkeypatch.setattr(attention, "_gpu_backends", lambda _: [SDPBackend.MATH])
    monkeypatch.setattr(attention, "INDEX_LIMIT", 6 * call_elements(2, 9, 1, 16))
    torch.testing.assert_close(attention._causal(q, k, v, None), wanted)
    for trained in range(3):  # adapters may train the projection of one alone
        heads = [x.detach().requires_grad_(number == trained) for number, x in enumerate((q, k, v))]
        with pytest.raises(RuntimeError, match=r"plain attention over 2 x 9 tokens and 6 heads would be wrong"):
            attention._causal(*heads, None)
    monkeypatch.setattr(attention, "INDEX_LIMIT", attention.INDEX_LIMIT + 1)
    attention._causal(q.requires_grad_(), k, v, None)


@pytest.mark.parametrize(
    ("words", "device_type", "has_plan"),
    [
        (["--training.seq_len=524288"], "cuda", True),
        (["--training.seq_len=524032"], "cuda", False),
        (["--training.seq_len=524288"], "cpu", False),
        (["--training.seq_len=262144", "--training.local_batch_size=2"], "cuda", True),
        (["--training.seq_len=524288", "--parallelism.tensor_parallel_degree=2"], "cuda", False),
    ],
    ids=str,
)
def test_a_job_of_one_rank_gets_a_plan_for_them(words: list[str], device_type: str, has_plan: bool) -> None:
    config = parse_command_line(["--model.flavor=8B", "--training.local_batch_size=1", *words]).config
    args = flavor_args(config.model).configured(config.model, vocab_size=1, max_seq_len=1)
    options, _ = resolve_attention(config, args, device_type)
    assert (options is not None) == has_plan
