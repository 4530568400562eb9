"""Law: sparse attention over many ranks equals its definition on one process, and each choice has the same keys.

The oracle has all index scores as a matrix, and chooses by sorting them. Cotangents are random, lengths and documents
fit no degree, and some scores are equal.
"""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from longshard.context import sparse_attention as module
from longshard.context.execution import sparse_rows
from longshard.context.execution.chunks import OnDevice
from longshard.context.execution.sparse_rows import Index
from longshard.context.live import LivePlan, opened, with_layer
from longshard.context.planning.balance import LOAD_BALANCERS
from longshard.context.planning.mask import Mask, by_sequence, causal, documents
from longshard.context.planning.options import ContextParallelError, ContextParallelOptions
from longshard.context.regions import sequence_chunks
from longshard.context.sparse_attention import SparseSettings, sparse_attention
from longshard.sharding import exchange
from longshard.sharding.layout import contiguous
from tests.distributed.attention_cases import mesh_of_all, relative
from tests.distributed.pool import RankFailedError, WorkerPool
from tests.masks import dense
from tests.slow import slow
from trainer.config.loader import parse_command_line
from trainer.runtime.process_group import Process, process_group

pytestmark = pytest.mark.about("longshard/context/sparse_attention.py", "longshard/context/execution/sparse_rows.py")

BATCH, HEADS, INDEX_HEADS = 2, 3, 4
RANK, NOPE, ROTATED, VALUE, INDEX_DIM = 10, 6, 4, 5, 8
DOCUMENTS = ([5, 13, 7, 11, 1], [1, 20, 3, 13])


@dataclass(frozen=True)
class Case:
    """One call. rows: rows of the sequence, or of its documents, which differ in each sequence of the batch."""

    seq_len: int = 37
    per_query: int = 7
    balancer: str = "head_tail"
    packed: bool = False
    dtype: torch.dtype = torch.float64
    ties: bool = False
    """Whether index keys repeat, so that many scores are equal."""

    @property
    def mask(self) -> Mask | None:
        return by_sequence([documents(lengths) for lengths in DOCUMENTS]) if self.packed else None

    def inputs(self) -> list[torch.Tensor]:
        """q, latents, `up`, and queries, keys and weights of the index."""
        generator = torch.Generator().manual_seed(self.seq_len)
        rows = BATCH, self.seq_len
        shapes = [
            (BATCH, HEADS, self.seq_len, NOPE + ROTATED),
            (*rows, RANK + ROTATED),
            (HEADS, NOPE + VALUE, RANK),
            (*rows, INDEX_HEADS, INDEX_DIM),
            (*rows, INDEX_DIM),
            (*rows, INDEX_HEADS),
        ]
        tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        if self.ties:
            tensors[4] = tensors[4][:, :3].repeat(1, -(-self.seq_len // 3), 1)[:, : self.seq_len]
        return [x.to(self.dtype) for x in tensors]


DIMS = 2, 1, None, 1, 1, 1
"""The dimension of the sequence in each input; None: every rank has it whole."""


def oracle(case: Case, cotangents: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Output, loss, choice as a matrix, and gradients, by definition, in float64."""
    leaves = [x.double().requires_grad_() for x in case.inputs()]
    q, latent, up, queries, keys, weights = leaves
    compressed, rotated = latent.split([RANK, ROTATED], -1)
    expanded = torch.einsum("bsr,hor->bhso", compressed, up)
    k = torch.cat((expanded[..., :NOPE], rotated.unsqueeze(1).expand(-1, HEADS, -1, -1)), -1)
    visible = torch.from_numpy(dense(causal(case.seq_len) if case.mask is None else case.mask & causal(case.seq_len)))
    products = torch.einsum("bsjd,btd->bsjt", queries, keys).relu()
    index = torch.einsum("bsjt,bsj->bst", products, weights).masked_fill(~visible, -torch.inf)
    order = index.detach().sort(dim=-1, descending=True, stable=True).indices
    first = order[..., : case.per_query or case.seq_len]
    seen = torch.zeros_like(index, dtype=torch.bool).scatter(-1, first, True) & visible
    scores = (q @ k.mT * 0.3).masked_fill(~seen.unsqueeze(1), -torch.inf)
    shares = scores.softmax(-1)
    out = shares @ expanded[..., NOPE:]
    target = shares.detach().mean(1)
    log_shares = index.masked_fill(~seen, -torch.inf).log_softmax(-1).masked_fill(~seen, 0)
    loss = (target.xlogy(target) - target * log_shares).sum(-1)
    gradients = torch.autograd.grad([out, loss], leaves, cotangents)
    return out.detach(), loss.detach(), seen, *gradients


def cotangents_of(case: Case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = (BATCH, HEADS, case.seq_len, VALUE), (BATCH, case.seq_len)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def as_matrix(chosen: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return which keys are chosen, (B, S, T), from positions, (B, S, k)."""
    spare = chosen.long().masked_fill(chosen < 0, seq_len)
    return torch.zeros(*chosen.shape[:2], seq_len + 1, dtype=torch.bool).scatter(-1, spare, True)[..., :-1]


def cut(x: torch.Tensor, dim: int | None, rows: torch.Tensor) -> torch.Tensor:
    return x if dim is None else x.index_select(dim, rows)


def sparse_case(cases: list[Case], gathered_bytes: int) -> list[dict]:
    """Errors of this rank's outputs, losses and gradients, and its choices; a collective."""
    process = Process.from_environment()
    results = []
    with (
        process_group(process, parse_command_line([]).config.comm),
        mock.patch.object(module, "GATHERED_BYTES", gathered_bytes),
    ):
        mesh = mesh_of_all(process)
        for case in cases:
            cotangents = cotangents_of(case)
            out, loss, seen, *wanted = oracle(case, cotangents)
            options = ContextParallelOptions(load_balancer=case.balancer)
            layout = options.layout(case.seq_len, mesh.size(), case.mask)
            rows = torch.from_numpy(layout.indices(process.rank))
            leaves = [cut(x, dim, rows).requires_grad_() for x, dim in zip(case.inputs(), DIMS, strict=True)]
            exchange.bytes_sent.clear()
            with opened(LivePlan(mesh, layout, case.mask, options), BATCH) as handle:
                settings = SparseSettings(0.3, case.per_query, learns=True)
                got = sparse_attention(*leaves[:3], Index(*leaves[3:]), handle, settings)
                own = [cut(x, dim, rows).to(case.dtype) for x, dim in zip(cotangents, (2, 1), strict=True)]
                gradients = list(torch.autograd.grad([got.output, got.loss], leaves, own))
            gradients[2] = exchange.all_reduce(gradients[2].clone(), mesh)
            pairs = [(got.output, out, 2), (got.loss, loss, 1)]
            pairs += zip(gradients, wanted, DIMS, strict=True)
            errors = [relative(x, cut(right, dim, rows), right) for x, right, dim in pairs]
            seen = cut(seen, 1, rows)
            same = not case.per_query or torch.equal(as_matrix(got.chosen, case.seq_len), seen)
            results.append(
                {
                    "errors": errors,
                    "same choice": same,
                    "sent": exchange.bytes_sent["exchange"],
                    "rows": len(rows),
                    "chosen": got.chosen,
                    "where": rows,
                }
            )
    return results


CASES = [
    Case(seq_len, per_query, balancer, packed, ties=ties)
    for balancer in LOAD_BALANCERS
    for seq_len, per_query, packed, ties in (
        (37, 7, False, False),
        (37, 7, True, False),
        (37, 2, True, True),
        (37, 50, False, True),
        (37, 0, True, False),
        (5, 2, False, False),
    )
]


@pytest.mark.parametrize("degree", [1, 3, *slow(2, 4, 8)])
@pytest.mark.parametrize("gathered_bytes", [1 << 30, *slow(1)])
def test_every_layout_and_mask_equals_the_definition(pool: WorkerPool, degree: int, gathered_bytes: int) -> None:
    """With 5 tokens on 8 ranks, some ranks have none."""
    for results in pool.run(degree, sparse_case, CASES, gathered_bytes):
        for case, result in zip(CASES, results, strict=True):
            assert max(result["errors"]) < 1e-12, case
            assert result["same choice"], case


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_types(pool: WorkerPool, dtype: torch.dtype, tolerance: float) -> None:
    """Products are in float32; all keys are chosen, as a rounded score chooses other keys than an exact one."""
    for (result,) in pool.run(2, sparse_case, [Case(per_query=0, dtype=dtype)], 1 << 30):
        assert max(result["errors"]) < tolerance


def long_case(degree: int, dtype: torch.dtype) -> torch.Tensor:
    """Choices of all queries of a sequence of several tiles, (B, S, k), from the ranks of one process each."""
    case = Case(2500, 40, dtype=dtype, ties=dtype == torch.float32)
    *_, queries, keys, weights = case.inputs()
    chosen = torch.empty(BATCH, case.seq_len, case.per_query, dtype=torch.int32)
    visible = torch.from_numpy(causal(case.seq_len).intervals())
    layout = ContextParallelOptions().layout(case.seq_len, degree)
    for rank in range(degree):
        rows = torch.from_numpy(layout.indices(rank))
        index = Index(queries[:, rows], keys[:, rows], weights[:, rows])
        chosen[:, rows] = sparse_rows.choose(index, keys, visible[:, rows], case.per_query, case.seq_len)
    return chosen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_choices_have_the_same_bits_on_any_degree(dtype: torch.dtype) -> None:
    """Rows of a tile that differ between the degrees, and last tiles that are not full."""
    with mock.patch.multiple(sparse_rows, TILE_BYTES=64 * 1024 * INDEX_HEADS * dtype.itemsize, KEYS=1024):
        once = long_case(1, dtype)
        for degree in (3, 7):
            assert torch.equal(long_case(degree, dtype), once)


def test_of_equal_scores_the_earlier_keys_count() -> None:
    scores = torch.tensor([[2.0, 1.0, 2.0, 1.0, 1.0, 3.0, -torch.inf]])
    places = torch.arange(7).expand_as(scores)
    assert sparse_rows.highest(scores, places, 4)[1].tolist() == [[0, 1, 2, 5]]
    assert sparse_rows.highest(scores, places, 6)[1].tolist() == [[0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_an_index_that_is_no_number_is_not_hidden(number: float) -> None:
    """Queries from the key on have no number as output; scores beyond all numbers still choose visible keys."""
    q, latent, up, *index = Case().inputs()
    index[1] = index[1].abs() + 1
    index[0] = index[0].abs() + 1
    index[2] = index[2].abs() + 1
    index[2][:, 20] = number
    got = sparse_attention(q, latent, up, Index(*index), None, SparseSettings(0.3, 7))
    finite = got.output.isfinite().all(-1).all(1)
    assert finite[:, :20].all()
    assert finite[:, 21:].all()
    assert finite[:, 20].any() == (number == number)
    if number == number:
        assert (got.chosen[:, 20] >= 0).all()


def test_a_key_that_is_no_number_is_not_hidden() -> None:
    """Each query that sees the key has an output that is not a number, and no other query."""
    q, latent, up, *index = Case().inputs()
    index[1][:, 20] = torch.nan
    got = sparse_attention(q, latent, up, Index(*index), None, SparseSettings(0.3, 7))
    finite = got.output.isfinite().all(-1).all(1)
    assert finite.tolist() == BATCH * [[row < 20 for row in range(37)]]


def test_more_keys_than_tokens_are_all_keys() -> None:
    q, latent, up, *index = Case().inputs()
    everything = sparse_attention(q, latent, up, Index(*index), None, SparseSettings(0.3, 37))
    got = sparse_attention(q, latent, up, Index(*index), None, SparseSettings(0.3, 1000))
    assert got.chosen.shape == (BATCH, 37, 1000)
    assert torch.equal(got.output, everything.output)
    assert (got.chosen[..., 37:] == -1).all()


def test_places_without_a_key_come_last_for_any_rows() -> None:
    *_, queries, keys, weights = Case(48).inputs()
    visible = torch.from_numpy((documents([16, 16, 16]) & causal(48)).intervals())
    with mock.patch.multiple(sparse_rows, TILE_BYTES=0, KEYS=16):
        index = Index(queries, keys, weights)
        whole = sparse_rows.choose(index, keys, visible, 8, 48)
        part = Index(*(x[:, 32:] for x in index))
        assert torch.equal(sparse_rows.choose(part, keys, visible[:, 32:], 8, 48), whole[:, 32:])
    assert (whole.diff(dim=-1)[whole[..., 1:] >= 0] > 0).all()
    assert whole[0, 34].tolist() == [32, 33, 34, -1, -1, -1, -1, -1]


def test_bytes_are_those_of_latents_and_index_keys(pool: WorkerPool) -> None:
    """Each token's row goes to every other rank twice, and its gradient comes back once, in float64."""
    degree, case = 3, Case(36)
    sent = sum(results[0]["sent"] for results in pool.run(degree, sparse_case, [case], 1 << 30))
    assert sent == 3 * BATCH * case.seq_len * (degree - 1) * (RANK + ROTATED + INDEX_DIM) * 8


def chunks_case(case: Case, chunks: int) -> list[float]:
    """Errors of outputs, losses and gradients of a sequence in chunks, on one process."""
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        cotangents = cotangents_of(case)
        out, loss, _, *wanted = oracle(case, cotangents)
        layout = contiguous(case.seq_len, chunks)
        parts = [torch.from_numpy(layout.indices(number)) for number in range(chunks)]
        leaves = [x.requires_grad_() for x in case.inputs()]
        settings = SparseSettings(0.3, case.per_query, learns=True)

        def run(number: int) -> module.SparseResult:
            own = [cut(x, dim, parts[number]) for x, dim in zip(leaves, DIMS, strict=True)]
            return sparse_attention(*own[:3], Index(*own[3:]), with_layer(handles[number], 0), settings)

        outputs, losses = torch.zeros_like(out), torch.zeros_like(loss)
        options = ContextParallelOptions()
        with sequence_chunks(mesh, layout, case.mask, options, sequences=BATCH, keep=OnDevice) as handles:
            with torch.no_grad():
                for number in range(chunks - 1):
                    run(number)
            for number in reversed(range(chunks)):
                got = run(number)
                own = [cut(x, dim, parts[number]) for x, dim in zip(cotangents, (2, 1), strict=True)]
                torch.autograd.backward([got.output, got.loss], own)
                outputs[:, :, parts[number]] = got.output.detach()
                losses[:, parts[number]] = got.loss.detach()
        pairs = [(outputs, out), (losses, loss), *((x.grad, right) for x, right in zip(leaves, wanted, strict=True))]
        return [relative(x, right) for x, right in pairs]


@pytest.mark.parametrize("packed", [False, True])
def test_a_sequence_in_chunks_equals_the_definition(pool: WorkerPool, packed: bool) -> None:
    assert max(pool.run(1, chunks_case, Case(packed=packed), 4)[0]) < 1e-12


def control_case(mistake: str) -> list[dict]:
    """Run a case with a planted mistake on its ranks."""
    choose = sparse_rows.choose

    def mistaken(index: Index, keys: torch.Tensor, visible: torch.Tensor, *numbers: int) -> torch.Tensor:
        if mistake == "a leak over a border":
            visible = torch.stack((torch.zeros_like(visible[..., 0]), visible[..., 1]), -1)
        chosen = choose(index, keys, visible, *numbers)
        return chosen.roll(1, 1) if mistake == "a stale choice" else chosen

    with mock.patch.object(module, "choose", mistaken):
        return sparse_case([Case(packed=True)], 1 << 30)


@pytest.mark.parametrize("mistake", ["a leak over a border", "a stale choice"])
def test_a_wrong_choice_is_seen(pool: WorkerPool, mistake: str) -> None:
    for (result,) in pool.run(2, control_case, mistake):
        assert not result["same choice"]
        assert max(result["errors"]) > 1e-2


def wrong_rows_case() -> None:
    process = Process.from_environment()
    with process_group(process, parse_command_line([]).config.comm):
        mesh = mesh_of_all(process)
        case = Case()
        q, latent, up, *index = case.inputs()
        options = ContextParallelOptions()
        with opened(LivePlan(mesh, options.layout(40, mesh.size()), None, options), BATCH) as handle:
            sparse_attention(q, latent, up, Index(*index), handle, SparseSettings(0.3, 7))


def test_inputs_that_were_not_cut_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(RankFailedError, match="got 37 rows of the sequence and its plan has 20 for this rank"):
        pool.run(2, wrong_rows_case)


def test_tensors_that_do_not_fit_are_refused() -> None:
    q, latent, up, *index = Case().inputs()
    with pytest.raises(ContextParallelError, match=r"sparse attention got q .* Give \(B, H, S, N \+ P\)"):
        sparse_attention(q, latent[:, 1:], up, Index(*index), None, SparseSettings(0.3, 7))
