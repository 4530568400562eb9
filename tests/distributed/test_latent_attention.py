"""Law: attention over latents of many ranks equals latent attention of one process, and ranks send latents.

The oracle expands the latents head by head, on one process, in float64. Cotangents are random.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from longshard.context.execution import latent
from longshard.context.planning.balance import LOAD_BALANCERS
from longshard.context.planning.options import ContextParallelOptions
from tests.distributed.attention_cases import BATCH, MASKS, METHODS, Case, assert_exact, attention_case
from tests.distributed.pool import WorkerPool
from tests.slow import slow

pytestmark = pytest.mark.about("trainer/models/latent_attention.py")

SIZES = 10, 4, 6
"""R, P and V, with keys of 8: three sizes that differ."""
HEADS = 24, 1


def cases_of(method: str, lengths: tuple[int, ...] = (37, 5)) -> list[Case]:
    """Layouts x masks x lengths."""
    return [
        Case(seq_len, HEADS, options=ContextParallelOptions(method, balancer), latent=SIZES, **mask)
        for balancer in LOAD_BALANCERS
        for mask in MASKS
        for seq_len in lengths
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("degree", [3, *slow(1, 2, 4, 8)])
def test_every_method_layout_and_mask_equals_one_process(pool: WorkerPool, degree: int, method: str) -> None:
    assert_exact(pool, degree, cases_of(method))


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [(2, 2), (3, 2)])
def test_a_ring_of_head_groups(pool: WorkerPool, degrees: tuple[int, int]) -> None:
    options = ContextParallelOptions("hybrid", hybrid_degrees=degrees)
    balancers = [(case, case.options.load_balancer) for case in cases_of("ring")]
    cases = [replace(case, options=replace(options, load_balancer=balancer)) for case, balancer in balancers]
    assert_exact(pool, degrees[0] * degrees[1], cases)


@pytest.mark.parametrize("method", METHODS)
def test_other_types_sizes_and_sinks(pool: WorkerPool, method: str) -> None:
    """Values as large as keys, latents without a rotated part, and sinks."""
    options = ContextParallelOptions(method)
    cases = [Case(26, (6, 1), 8, dtype, options, latent=SIZES) for dtype in (torch.float32, torch.bfloat16)]
    cases += [Case(26, (6, 1), options=options, latent=sizes) for sizes in ((3, 4, 8), (5, 0, 2), (1, 6, 1))]
    cases += [Case(26, (6, 1), options=options, latent=SIZES, sinks=True, mask="documents")]
    if method == "all_to_all":
        cases.append(replace(cases[-1], options=replace(options, query_heads_per_pass=1)))
    assert_exact(pool, 3, cases)


def in_groups_case(cases: list[Case], size: int) -> list[dict]:
    """Run `attention_case` with keys and values of a few heads at a time."""
    with mock.patch.object(latent, "EXPANDED_BYTES", size):
        return attention_case(cases)


@pytest.mark.parametrize("size", [0, 40_000])
def test_heads_are_expanded_in_groups(pool: WorkerPool, size: int) -> None:
    """Groups have one head or a few; the last group is smaller. No other messages are sent."""
    cases = [Case(40, (7, 1), options=ContextParallelOptions("ring"), latent=SIZES, mask="documents")]
    for results in pool.run(2, in_groups_case, cases, size):
        assert all(error < 1e-12 for error in results[0]["errors"])
        assert results[0]["calls"] == results[0]["planned calls"]


@pytest.mark.parametrize(("method", "kinds"), [("ring", ("kv", "dkv")), ("all_gather", ("kv", "dkv"))])
def test_bytes_are_those_of_latents(pool: WorkerPool, method: str, kinds: tuple[str, str]) -> None:
    """Without a mask every token's latent goes to every other rank, twice, and its gradient comes back once."""
    degree, seq_len = 3, 36
    case = Case(seq_len, HEADS, options=ContextParallelOptions(method), latent=SIZES, is_causal=False)
    sent = [results[0]["sent"] for results in pool.run(degree, attention_case, [case])]
    payload = BATCH * (SIZES[0] + SIZES[1]) * case.dtype.itemsize
    others = seq_len * (degree - 1)
    assert [sum(counts[kind] for counts in sent) for kind in kinds] == [2 * others * payload, others * payload]
