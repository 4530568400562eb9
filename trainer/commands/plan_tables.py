"""A plan in tables: layout, stages and tiles of each rank, and cost. See plan.py."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainer.distributed.context_parallel.planning.cost import AttentionShape, Cost, attention_cost
from trainer.distributed.context_parallel.planning.mask import ANY, Band, Mask
from trainer.distributed.context_parallel.planning.methods import make_plan
from trainer.distributed.context_parallel.planning.plan import Message, RankPlan, Stage
from trainer.distributed.context_parallel.planning.tiles import Tile
from trainer.distributed.sharding.layout import AxisLayout
from trainer.distributed.sharding.ranges import Range, Ranges, intersection, union

FEWEST_TILES = 4
"""How many tiles of a stage are listed without --rank."""


@dataclass(frozen=True)
class Case:
    """One attention call of one sequence, with its plan on every rank. head_degree: ranks of a head group."""

    layout: AxisLayout
    mask: Mask
    mask_name: str
    method: str
    head_degree: int
    direction: str
    shape: AttentionShape

    @property
    def degree(self) -> int:
        return self.layout.degree

    @property
    def ranks_named(self) -> str:
        return f"{self.degree} rank{'s' * (self.degree > 1)}"

    @cached_property
    def plans(self) -> list[RankPlan]:
        heads = {"head_degree": self.head_degree} if self.method == "hybrid" else {}
        return [make_plan(self.layout, self.mask, self.method, rank, **heads) for rank in range(self.degree)]

    @cached_property
    def costs(self) -> list[Cost]:
        return [attention_cost(plan, self.shape, self.direction) for plan in self.plans]

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages of `rank` in the direction that is shown."""
        plan = self.plans[rank]
        return plan.forward if self.direction == "forward" else plan.backward

    def queries(self, rank: int) -> Ranges:
        """Return the queries of the rank's head group, in order."""
        first = rank - rank % self.head_degree
        return union(sum(self.layout.ranges[first : first + self.head_degree], ()))

    def bands(self, rank: int, stage: Stage, tile: Tile) -> Iterator[Band]:
        """Yield a tile in tokens of the sequence: one band for each piece of its queries and of its keys."""
        between = tile.kv[1] - tile.kv[0] - (tile.q[1] - tile.q[0])
        for q_place, q_start, q_stop in spread(tile.q, self.queries(rank)):
            for kv_place, kv_start, kv_stop in spread(tile.kv, stage.held):
                # Where place j - place i is 0, in tokens.
                diagonal = kv_start - q_start - (kv_place - tile.kv[0]) + (q_place - tile.q[0])
                lower = diagonal if tile.relation.lower else -ANY
                upper = diagonal + between if tile.relation.upper else ANY
                band = Band(q_start, q_stop, kv_start, kv_stop, lower, upper)
                if len(range(*band.hull(q_start, q_stop))):
                    yield band


def spread(places: Range, ranges: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield (place, start, stop) of the numbers at `places`, if the ranges are laid one after another."""
    before = 0
    for start, stop in ranges:
        for first, last in intersection((places,), ((before, before + stop - start),)):
            yield first, start + first - before, start + last - before
        before += stop - start


# ---- the table


def report(case: Case, rank: int | None = None) -> str:
    """Return tables of layout, stages, tiles and cost; `rank`: all tiles and ranges of that rank, none of others."""
    shape, seq_len = case.shape, case.layout.length
    ranks = range(case.degree) if rank is None else [rank]
    area = case.mask.area()
    heading = [
        f"{case.method}, {case.direction}: {seq_len:,} tokens on {case.ranks_named}, {case.layout.name} layout, "
        f"{case.mask_name}",
        f"one sequence of {shape.heads} query and {shape.kv_heads} key/value heads of {shape.head_dim}, "
        f"{shape.itemsize} bytes an element",
        f"{area:,} visible pairs, {100 * area / seq_len**2:.2f} % of all",
    ]
    parts = [
        "\n".join(heading),
        table("Who owns what", ("rank", "tokens", "ranges"), ownership(case, ranks, whole=rank is not None)),
        table(
            "Stages"
            if case.head_degree == 1
            else f"Stages, between two exchanges of heads among {case.head_degree} ranks",
            stage_columns(case),
            [row for r in ranks for row in stage_rows(case, r)],
        ),
        table(
            "Tiles, in tokens of the sequence",
            ("rank", "stage", "queries", "keys", "relation", "pairs"),
            [row for r in ranks for row in tile_rows(case, r, whole=rank is not None)],
        ),
        cost_table(case),
    ]
    return "\n\n".join(parts)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return text in columns; columns of numbers are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    right = [all(set(cell) <= set("0123456789,.-") for cell in column) for column in zip(*rows, strict=True)]
    lines = [title]
    for row in (columns, *rows):
        cells = (x.rjust(w) if r else x.ljust(w) for x, w, r in zip(row, widths, right, strict=True))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def listed(ranges: Sequence[Range], most: int) -> str:
    """Return ranges as text, the first `most` of them."""
    text = " ".join(f"[{start:,}, {stop:,})" for start, stop in ranges[:most])
    return text + (f" and {len(ranges) - most} more" if len(ranges) > most else "") or "none"


def ownership(case: Case, ranks: Sequence[int], *, whole: bool) -> list[tuple[str, ...]]:
    """Return one row for each rank."""
    most = case.layout.length if whole else FEWEST_TILES
    return [(str(r), f"{case.layout.local_length(r):,}", listed(case.layout.ranges[r], most)) for r in ranks]


def stage_columns(case: Case) -> tuple[str, ...]:
    columns = ("rank", "stage", "keys of", "rows held", "tiles", "pairs", "receives (rank: rows)", "sends")
    return (*columns, "gradients go to") if case.direction == "backward" else columns


def stage_rows(case: Case, rank: int) -> Iterator[tuple[str, ...]]:
    """Yield one row for each stage: its keys and tiles, and what travels before it (gradients: after it)."""
    group, place = divmod(rank, case.head_degree)  # rows travel between ranks at the same place of their head groups

    def rows(messages: Sequence[Message], *, sent: bool) -> str:
        mine = [(m.target if sent else m.source, m.rows) for m in messages if (m.source == group) == sent]
        return ", ".join(f"{peer * case.head_degree + place}: {count:,}" for peer, count in mine) or "-"

    for number, stage in enumerate(case.stages(rank)):
        owners = [r for r in range(case.degree) if intersection(stage.held, case.layout.ranges[r])]
        keys = "all" if len(owners) == case.degree else " ".join(map(str, owners)) or "-"
        if stage.collective:
            whole = f"all-gather of {case.plans[rank].longest:,} a rank"
            travels = whole, whole
        else:
            travels = rows(stage.messages, sent=False), rows(stage.messages, sent=True)
        home = "reduce-scatter" if stage.collective else rows(stage.home, sent=True)
        cells = str(rank), str(number), keys, f"{stage.rows:,}", f"{len(stage.tiles):,}", f"{stage.pairs:,}", *travels
        yield (*cells, home) if case.direction == "backward" else cells


def tile_rows(case: Case, rank: int, *, whole: bool) -> Iterator[tuple[str, ...]]:
    """Yield one row for each tile; not `whole`: for the first few of each stage."""
    for number, stage in enumerate(case.stages(rank)):
        most = len(stage.tiles) if whole else FEWEST_TILES
        for tile in stage.tiles[:most]:
            q, kv = (
                listed([(start, stop) for _, start, stop in spread(*where)], FEWEST_TILES)
                for where in ((tile.q, case.queries(rank)), (tile.kv, stage.held))
            )
            yield str(rank), str(number), q, kv, tile.relation.value, f"{tile.pairs:,}"
        if left := stage.tiles[most:]:
            more = f"and {len(left):,} more (--rank {rank})"
            yield str(rank), str(number), more, "", "", f"{sum(tile.pairs for tile in left):,}"


def cost_table(case: Case) -> str:
    """Return FLOPs, bytes sent by kind, calls and buffers: by rank, and as total, maximum, maximum over mean."""
    kinds = sorted({kind for cost in case.costs for kind in cost.bytes_sent})
    columns: list[tuple[str, list[int], Callable[[int], float], str]] = []

    def add(name: str, values: list[int], steps: dict[str, float]) -> None:
        unit, scale = max((x for x in steps.items() if x[1] <= max(values)), key=lambda x: x[1], default=("", 1))
        columns.append(
            (f"{name} {unit}".strip(), values, lambda value: value / scale, "{:,.3f}" if unit else "{:,.0f}")
        )

    add(
        "",
        [cost.flops for cost in case.costs],
        {"FLOP": 1, "kFLOP": 1e3, "MFLOP": 1e6, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15},
    )
    for kind in kinds:
        add(f"{kind} sent", [cost.bytes_sent[kind] for cost in case.costs], _BYTES)
    add("calls", [cost.calls.total() for cost in case.costs], {})
    add("buffers", [cost.workspace for cost in case.costs], _BYTES)

    rows = [
        (str(r), *(form.format(scaled(values[r])) for _, values, scaled, form in columns)) for r in range(case.degree)
    ]
    for name, together in (("total", sum), ("maximum", max)):
        rows.append((name, *(form.format(scaled(together(values))) for _, values, scaled, form in columns)))
    ratios = (f"{max(v) * len(v) / sum(v):.3f}" if sum(v) else "-" for _, v, _, _ in columns)
    rows.append(("max/mean", *ratios))
    return table("Cost of one layer's attention", ("rank", *(name for name, *_ in columns)), rows)


_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
