"""A plan's tiles as calls that a kernel can do: torch-free.

What a kernel can do is declared (`Capabilities`); a tile beyond it is cut into calls within it. What no cut can bring
within is refused when the kernel is chosen.

    CAUSAL, more keys than queries    FULL over the first keys, CAUSAL over a square at the end
    BAND, TAIL                        by a dense mask over short pieces of queries, with FULL and CAUSAL where it can be
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.errors import ConfigError
from trainer.distributed.context_parallel.mask import Relation
from trainer.distributed.context_parallel.plan import RankPlan, Stage
from trainer.distributed.context_parallel.tiles import Tile
from trainer.distributed.sharding.ranges import Range, Ranges, intersection, union


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can do. Everything not named here (any scale, grouped heads, float64 results merged) all can.

    device: `cpu`, `cuda`, or None for any; dtypes: names of torch's; max_head_dim, head_dim_multiple: sizes of a head.
    bottom_right: CAUSAL with more keys than queries in one call. bands: BAND and TAIL in one call of any size; masks:
    they can be computed with a dense mask, over pieces. many: many tiles in one launch.
    """

    device: str | None
    dtypes: frozenset[str]
    max_head_dim: int = 1 << 30
    head_dim_multiple: int = 1
    bottom_right: bool = False
    bands: bool = False
    masks: bool = False
    many: bool = False

    def lacks(self, device_type: str | None, dtype: str | None, head_dim: int, *, bands: bool) -> list[str]:
        """What of this the kernel cannot do, in words; device and type None where they are not known yet."""
        lacks = []
        if device_type and self.device not in (None, device_type):
            lacks.append(f"tensors on {device_type}")
        if dtype and dtype not in self.dtypes:
            lacks.append(dtype)
        if head_dim > self.max_head_dim or head_dim % self.head_dim_multiple:
            lacks.append(f"heads of size {head_dim}")
        if bands and not (self.bands or self.masks):
            lacks.append("a sliding window")
        return lacks


_HALVES = frozenset({"bfloat16", "float16"})

CAPABILITIES: dict[str, Capabilities] = {
    "cpu_flash": Capabilities("cpu", _HALVES | {"float32", "float64"}, masks=True),
    "cuda_flash": Capabilities("cuda", _HALVES, max_head_dim=256, bottom_right=True, bands=True),
    "efficient": Capabilities("cuda", _HALVES | {"float32"}, bottom_right=True, masks=True),
    "cudnn": Capabilities("cuda", _HALVES, max_head_dim=128, head_dim_multiple=8),
    "varlen": Capabilities("cuda", _HALVES, max_head_dim=256, bottom_right=True, bands=True, many=True),
    "flex": Capabilities("cuda", _HALVES | {"float32"}, max_head_dim=256, bottom_right=True, bands=True),
    "math": Capabilities(None, _HALVES | {"float32", "float64"}, bottom_right=True, bands=True),
}
"""Every kernel, in the order in which `auto` looks for one that can do what is asked."""


def able_kernels(name: str, device_type: str | None, dtype: str | None, head_dim: int, *, bands: bool) -> list[str]:
    """Kernels that can do this, in the order of `CAPABILITIES`; name: the one that is asked for, or `auto`.

    Raises:
        ConfigError: a kernel that is none, or cannot do it; the sentence names those that can.
    """
    lacks = {each: c.lacks(device_type, dtype, head_dim, bands=bands) for each, c in CAPABILITIES.items()}
    able = [each for each in lacks if not lacks[each]]
    if name not in ("auto", *lacks):
        raise ConfigError(
            f"parallelism.context_parallel_kernel = {name!r} is none of 'auto', {', '.join(map(repr, lacks))}"
        )
    if name != "auto" and lacks[name]:
        raise ConfigError(
            f"parallelism.context_parallel_kernel = {name!r} cannot do {' or '.join(lacks[name])}; "
            f"kernels that can: {', '.join(map(repr, able))}"
        )
    return able


@dataclass(frozen=True)
class Call:
    """One tile for the kernel. fresh: no earlier call of the plan had any of its queries, so nothing is merged."""

    q: Range
    kv: Range
    relation: Relation
    fresh: bool


@dataclass(frozen=True)
class LoweredPlan:
    """A plan with the calls of each stage."""

    plan: RankPlan
    forward: tuple[tuple[Call, ...], ...]
    backward: tuple[tuple[Call, ...], ...]


def lower(plan: RankPlan, capabilities: Capabilities) -> LoweredPlan:
    """The plan's tiles as calls of a kernel that can do so much."""
    return LoweredPlan(plan, *(tuple(_calls(stages, capabilities)) for stages in (plan.forward, plan.backward)))


def _calls(stages: tuple[Stage, ...], capabilities: Capabilities) -> Iterator[tuple[Call, ...]]:
    touched: Ranges = ()
    for stage in stages:
        calls = []
        for tile in stage.tiles:
            for part in split(tile, capabilities):
                calls.append(Call(part.q, part.kv, part.relation, fresh=not intersection((part.q,), touched)))
                touched = union((*touched, part.q))
        yield tuple(calls)


def split(tile: Tile, capabilities: Capabilities) -> Iterator[Tile]:
    """The tile as one or more that the kernel can do, with the same pairs."""
    (q_start, q_stop), (kv_start, kv_stop) = tile.q, tile.kv
    extra = kv_stop - kv_start - (q_stop - q_start)
    if tile.relation is Relation.CAUSAL and extra and not capabilities.bottom_right:
        yield Tile(tile.q, (kv_start, kv_start + extra))
        yield Tile(tile.q, (kv_start + extra, kv_stop), Relation.CAUSAL)
    elif tile.relation.lower and not capabilities.bands:
        yield from _pieces(tile, extra)
    else:
        yield tile


def _pieces(tile: Tile, extra: int) -> Iterator[Tile]:
    """A BAND or TAIL over pieces of queries: masks only where a diagonal runs."""
    (q_start, q_stop), (kv_start, kv_stop) = tile.q, tile.kv
    rows = max(_FEWEST_ROWS, min(_MOST_ROWS, extra + 1))
    for start in range(q_start, q_stop, rows):
        q = start, min(start + rows, q_stop)
        count = q[1] - start
        first = kv_start + start - q_start  # the first query sees from here
        last = kv_stop if tile.relation is Relation.TAIL else first + extra + count
        if tile.relation is Relation.BAND and extra < count:
            yield Tile(q, (first, last), Relation.BAND)  # narrower than the piece: both diagonals at once
            continue
        yield Tile(q, (first, first + count), Relation.TAIL)
        middle = first + count, last - count if tile.relation is Relation.BAND else last
        if middle[0] < middle[1]:
            yield Tile(q, middle)
        if tile.relation is Relation.BAND:
            yield Tile(q, (last - count, last), Relation.CAUSAL)


# A mask costs memory and time for each of its pairs, a call costs time for itself.
_FEWEST_ROWS, _MOST_ROWS = 64, 512
