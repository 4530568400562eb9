"""Law: neighbourhood attention on shards equals dense attention under NATTEN's mask, and sends seen rows only."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from longshard.domain import neighborhood
from longshard.domain.domain import Axis, Domain, sized
from longshard.domain.neighborhood import neighborhood_attention
from longshard.domain.neighborhood_tiles import Neighborhood, segments
from longshard.domain.tensor import DomainTensor
from longshard.sharding import exchange
from tests.distributed.domain_cases import TOLERANCE, error, layout_of, local, meshes
from tests.distributed.pool import WorkerPool
from tests.slow import slow

# ---- the oracle: a boolean mask of every query and key, from the words of NATTEN's definition


def axis_mask(length: int, kernel: int, dilation: int = 1, stride: int = 1, causal: bool = False) -> np.ndarray:
    """(length, length) bool, by loops over the rows of each residue class."""
    mask = np.zeros((length, length), dtype=bool)
    for remainder in range(min(dilation, length)):
        rows = [*range(remainder, length, dilation)]
        groups = [range(len(rows))[at : at + stride] for at in range(0, len(rows), stride)]
        for query, group in enumerate(g for g in groups for _ in g):
            if causal:  # ends at the query; as far back as the window of the last query of the group
                keys = [key for key in range(query + 1) if group[-1] - key < kernel]
            else:  # of all windows the one whose middle is nearest to the middle query of the group
                leader = group[min(stride // 2, len(group) - 1)]
                first = min(range(len(rows) - kernel + 1), key=lambda first: abs(first + kernel // 2 - leader))
                keys = [*range(first, first + kernel)]
            for key in keys:
                mask[rows[query], rows[key]] = True
    return mask


def dense(q, k, v, hoods, scale):
    """Attention with the mask of the whole field."""
    spatial = q.shape[1:-2]
    places = np.unravel_index(np.arange(np.prod(spatial)), spatial)
    mask = np.ones((len(places[0]),) * 2, dtype=bool)
    for at, hood, length in zip(places, hoods, spatial, strict=True):
        mask &= axis_mask(length, *hood)[at[:, None], at[None, :]]
    groups = q.shape[-2] // k.shape[-2]
    k, v = (x.flatten(1, -3).repeat_interleave(groups, -2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.flatten(1, -3), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~torch.from_numpy(mask), -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).unflatten(1, spatial)


@pytest.mark.parametrize(
    ("length", "hood", "expected"),
    [
        (6, Neighborhood(3), ["012", "012", "123", "234", "345", "345"]),
        (6, Neighborhood(4), ["0123", "0123", "0123", "1234", "2345", "2345"]),  # two before, one behind
        (7, Neighborhood(3, dilation=2), ["024", "135", "024", "135", "246", "135", "246"]),
        (5, Neighborhood(3, causal=True), ["0", "01", "012", "123", "234"]),
        (6, Neighborhood(2, dilation=2, causal=True), ["0", "1", "02", "13", "24", "35"]),
        (6, Neighborhood(3, stride=2), ["012", "012", "234", "234", "345", "345"]),  # leaders 1 3 5
        (6, Neighborhood(3, stride=3), ["012", "012", "012", "345", "345", "345"]),  # blocks
        (6, Neighborhood(3, stride=2, causal=True), ["0", "01", "12", "123", "34", "345"]),
        (5, Neighborhood(3, stride=3, causal=True), ["0", "01", "012", "23", "234"]),  # the last group is shorter
    ],
)
def test_windows_by_hand(length: int, hood: Neighborhood, expected: list[str]) -> None:
    keys = [[int(key) for key in row] for row in expected]
    assert [np.flatnonzero(row).tolist() for row in axis_mask(length, *hood)] == keys
    planned = {}
    for segment in segments(((0, length),), length, hood):
        for place in range(*segment.queries):
            window = hood.window(place, segment.length)
            planned[segment.rows((place, place + 1), hood.dilation)[0]] = [*segment.rows(window, hood.dilation)]
    assert [planned[row] for row in range(length)] == keys


# ---- random cases


@dataclass(frozen=True)
class Case:
    spatial: tuple[int, ...]
    hoods: tuple[Neighborhood, ...]
    heads: tuple[int, int]
    widths: tuple[int, int]
    scale: float | None


def draw(rng: random.Random) -> Case:
    axes = rng.choice([1, 1, 2, 2, 3])
    spatial, hoods = [], []
    for _ in range(axes):
        length = rng.randint(2, {1: 30, 2: 11, 3: 6}[axes])
        dilation = rng.choice([1, 1, 2, 3])
        kernel = rng.randint(1, max(length // dilation, 1))
        dilation = min(dilation, length // kernel)
        stride = rng.choice([1, 1, rng.randint(1, kernel)])
        spatial.append(length)
        hoods.append(Neighborhood(kernel, dilation, stride, rng.random() < 0.3))
    kv = rng.choice([1, 2])
    heads, widths = (kv * rng.choice([1, 3]), kv), (4, rng.choice([4, 2]))
    return Case(tuple(spatial), tuple(hoods), heads, widths, rng.choice([None, 0.3]))


def attend(case: Case, q, k, v, domain: Domain) -> tuple[torch.Tensor, Domain]:
    kernel, dilation, stride, causal = zip(*case.hoods, strict=True)
    options = {"kernel_size": kernel, "dilation": dilation, "stride": stride, "is_causal": causal}
    q, k, v = (DomainTensor(x, domain) for x in (q, k, v))
    out = neighborhood_attention(q, k, v, scale=case.scale, **options)
    return out.local, out.domain


def tensors(case: Case, seed: int, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and the gradient of the output, with a batch of 2."""
    generator = torch.Generator().manual_seed(seed)
    (heads, kv), (width, value_width) = case.heads, case.widths
    shapes = [(heads, width), (kv, width), (kv, value_width), (heads, value_width)]
    *inputs, cotangent = (torch.randn(2, *case.spatial, *s, dtype=dtype, generator=generator) for s in shapes)
    return inputs, cotangent


def compare(case: Case, domain: Domain, seed: int, oracle: Case) -> dict[str, float]:
    """Relative errors of this rank, and the difference between bytes sent and rows that others see."""
    inputs, cotangent = tensors(case, seed)
    wholes = [x.clone().requires_grad_() for x in inputs]
    expected = dense(*wholes, oracle.hoods, case.scale)
    wanted = torch.autograd.grad(expected, wholes, cotangent)
    shards = [local(x, domain).requires_grad_() for x in inputs]
    before = exchange.bytes_sent["exchange"]
    out, result = attend(case, *shards, domain)
    sent = exchange.bytes_sent["exchange"] - before
    gradients = torch.autograd.grad(out, shards, local(cotangent, result), allow_unused=False)
    assert result.axes == DomainTensor(shards[0], domain).domain.axes
    errors = {"out": error(out, local(expected, domain), expected)}
    for name, gradient, whole in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        errors[name] = error(gradient, local(whole, domain), whole)
    return errors | {"bytes": abs(sent - bytes_of(case, domain))}


def bytes_of(case: Case, domain: Domain) -> int:
    """Bytes of the K and V rows that this rank owns and others see, axis by axis."""
    rows = {dim: axis.rows for dim, axis in domain.axes.items()}
    rows = {dim: rows.get(dim, n) for dim, n in enumerate((2, *case.spatial))}
    total = 0
    for dim, axis in domain.axes.items():
        if dim == 0:
            continue
        mask = axis_mask(case.spatial[dim - 1], *case.hoods[dim - 1])
        seen = [set(np.flatnonzero(mask[axis.layout.indices(rank)].any(0))) for rank in range(axis.degree)]
        own = set(axis.layout.indices(axis.rank).tolist())
        sent = sum(len(own & rows_seen) for rank, rows_seen in enumerate(seen) if rank != axis.rank)
        others = np.prod([n for d, n in rows.items() if d != dim])
        total += sent * others * case.heads[1] * sum(case.widths) * 8
        rows[dim] = len(seen[axis.rank])
    return int(total)


def place(rng: random.Random, mesh, case: Case) -> Domain:
    dims = rng.sample(range(len(case.spatial) + 1), min(mesh.ndim, len(case.spatial) + 1))
    whole = (2, *case.spatial)
    return Domain(
        {d: Axis(layout_of(rng, whole[d], g.size()), g) for d, g in zip(dims, mesh.get_all_groups(), strict=False)}
    )


def cases(seeds: range, most: int = 1 << 20, change: int = 0) -> list[tuple[float, str]]:
    """Compare each case; most: elements of a mask; change: of the oracle's kernels, so that nothing should agree."""
    failures = []
    with meshes() as all_meshes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighborhood, "_MASK_ELEMENTS", most)
        for seed in seeds:
            rng = random.Random(seed)
            case = draw(rng)
            domain = place(rng, rng.choice(all_meshes), case)
            kernels = (max(hood.kernel - change, 1) for hood in case.hoods)
            hoods = (h._replace(kernel=k, stride=min(h.stride, k)) for h, k in zip(case.hoods, kernels, strict=True))
            description = f"seed {seed}: {case}, { ({d: axis.layout.ranges for d, axis in domain.axes.items()}) }"
            try:
                errors = compare(case, domain, seed, replace(case, hoods=tuple(hoods)))
            except Exception as reason:
                raise RuntimeError(description) from reason
            failures += [(value, f"{name}, {description}") for name, value in errors.items() if not value <= TOLERANCE]
    return sorted(failures, reverse=True)[:5]


@pytest.mark.parametrize("world_size", [3, 4, *slow(1, 2)])
def test_attention_equals_dense_attention(pool: WorkerPool, world_size: int) -> None:
    first = world_size * 10_000
    for most, seeds in [(1 << 20, range(first, first + 30)), (64, range(first + 100, first + 110))]:
        wrong = [line for rank in pool.run(world_size, cases, seeds, most) for line in rank]
        assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_attention_equals_dense_attention_in_many_cases(pool: WorkerPool, world_size: int) -> None:
    for first in range(world_size * 10_000 + 1000, world_size * 10_000 + 1500, 100):
        wrong = [line for rank in pool.run(world_size, cases, range(first, first + 100), 1 << 12) for line in rank]
        assert not wrong, "\n".join(map(str, wrong))


FIXED = [  # spatial, sizes of each mesh dimension, kernel, dilation, causal; on dimensions 1, 2
    ((12,), [(6, 0, 6)], 5, 1, False),
    ((12,), [(1, 10, 1)], 12, 1, False),
    ((12,), [(1, 1, 10)], 3, 4, True),
    ((12,), [(0, 0, 12)], 5, 2, False),
    ((6, 7), [(2, 1, 3)], 6, 1, False),
    ((6, 7), [(6, 0), (1, 6)], 5, 1, False),
    ((6, 7), [(1, 5), (7, 0)], 3, 2, True),
    ((6, 7, 3), [(1, 5), (4, 3)], 3, 1, False),
]


def fixed_cases(ndim: int) -> list[tuple[float, str]]:
    failures = []
    with meshes() as all_meshes:
        groups = next(mesh for mesh in all_meshes if mesh.ndim == ndim).get_all_groups()
        for spatial, sizes, *hood in FIXED:
            if len(sizes) != ndim:
                continue
            kernel, dilation, causal = hood
            case = Case(spatial, (Neighborhood(kernel, dilation, 1, causal),) * len(spatial), (4, 2), (4, 4), None)
            axes = {d: Axis(sized(part), group) for d, (part, group) in enumerate(zip(sizes, groups, strict=True), 1)}
            failures += [(e, f"{n} {spatial} {sizes}") for n, e in compare(case, Domain(axes), 0, case).items()]
    return failures


@pytest.mark.parametrize(("world_size", "ndim"), [(3, 1), (4, 2)])
def test_shards_without_rows_and_windows_wider_than_shards(pool: WorkerPool, world_size: int, ndim: int) -> None:
    results = [line for rank in pool.run(world_size, fixed_cases, ndim) for line in rank]
    assert len(results) == world_size * 5 * sum(len(sizes) == ndim for _, sizes, *_ in FIXED)
    assert max(results)[0] <= TOLERANCE, max(results)


def bytes_kept(case: Case, inputs: list[torch.Tensor]) -> int:
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages.append(x.untyped_storage())  # alive, so that addresses differ
        kept[storages[-1].data_ptr()] = storages[-1].nbytes()
        return x

    storages: list[torch.UntypedStorage] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attend(case, *(x.requires_grad_() for x in inputs), Domain({}))
    return sum(kept.values())


def test_boxes_that_overlap_much_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward keeps q, k, v and the output, each once, or few masks and boxes; never a mask of the whole field."""
    case = Case((48, 48), (Neighborhood(21), Neighborhood(21)), (2, 2), (16, 16), None)
    inputs, _ = tensors(case, 0, torch.float32)
    for most, limit in ((1 << 14, 6), (1 << 20, 30)):  # tiles of a few queries; tiles as wide as the kernel
        monkeypatch.setattr(neighborhood, "_MASK_ELEMENTS", most)
        assert bytes_kept(case, inputs) / inputs[0].nbytes < limit


def test_another_kernel_size_is_seen(pool: WorkerPool) -> None:
    """Negative control."""
    assert any(value > 1e-3 for rank in pool.run(2, cases, range(20, 24), 64, 1) for value, _ in rank)


def test_lower_precisions() -> None:
    case = Case((12, 9), (Neighborhood(5), Neighborhood(4, 2)), (4, 2), (8, 8), None)
    inputs, _ = tensors(case, 0)
    expected = dense(*inputs, case.hoods, None)
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        out, _ = attend(case, *(x.to(dtype) for x in inputs), Domain({}))
        assert out.dtype == dtype
        assert error(out.double(), expected) < most


@pytest.mark.parametrize(
    ("heads", "options", "words"),
    [
        ((4, 2), {"kernel_size": (5, 3), "dilation": (2, 1)}, "kernel of at most 4"),
        ((4, 2), {"kernel_size": 2, "stride": 3}, "stride at most the kernel size"),
        ((4, 2), {"kernel_size": 0}, "at least 1"),
        ((4, 3), {"kernel_size": 3}, "must divide q's"),
        ((4, 2), {"kernel_size": (3, 3, 3)}, "2 spatial dimensions"),
    ],
)
def test_wrong_options_in_a_sentence(heads: tuple[int, int], options: dict, words: str) -> None:
    (q, k, v), _ = tensors(Case((8, 6), (), heads, (4, 4), None), 0)
    with pytest.raises(ValueError, match=words):
        neighborhood_attention(q, k, v, **options)
