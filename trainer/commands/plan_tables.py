"""A plan in tables: the tokens and the cost of each rank, its stages, its tiles. See plan.py."""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from trainer.commands.plan_case import Case, spread
from trainer.distributed.context_parallel.planning.cost import Cost
from trainer.distributed.context_parallel.planning.plan import Message
from trainer.distributed.sharding.ranges import Range, intersection

TABLES = ("ranks", "stages", "tiles")

MOST_SHOWN = 8
"""How many ranks, and stages of a rank, are all listed; of more, the first few, a middle one and the last."""
FEWEST_TILES = 4
"""How many tiles of a stage are listed without --rank."""
_FEWEST = 2
"""How many ranges of tokens and peers of a stage are listed without --rank."""

_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_FLOPS = {"FLOP": 1, "kFLOP": 1e3, "MFLOP": 1e6, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15}

Row = tuple[str, ...]


def tables(case: Case, wanted: Sequence[str], rank: int | None = None) -> str:
    """Return the wanted tables; `rank`: all stages, tiles and ranges of that rank, none of others."""
    whole = rank is not None
    ranks = some(range(case.degree)) if rank is None else [rank]
    parts = []
    if "ranks" in wanted:
        owners = [gap(3) if r is None else ownership(case, r, whole=whole) for r in ranks]
        parts += [table("Who owns what", ("rank", "tokens", "ranges"), owners), cost_table(case, ranks)]
    for name, title, columns, rows_of in (
        ("stages", f"Stages, {case.direction}{between_exchanges(case)}", stage_columns(case), stage_rows),
        ("tiles", f"Tiles, {case.direction}, in tokens of the sequence", TILE_COLUMNS, tile_rows),
    ):
        if name in wanted:
            each = ([gap(len(columns))] if r is None else rows_of(case, r, whole=whole) for r in ranks)
            parts.append(table(title, columns, [row for rows in each for row in rows]))
    return "\n\n".join(parts)


TILE_COLUMNS = ("rank", "stage", "queries", "keys", "relation", "pairs")


def between_exchanges(case: Case) -> str:
    return f", between two exchanges of heads among {case.head_degree} ranks" * (case.head_degree > 1)


def gap(columns: int, rank: str = "...") -> Row:
    """Return the row that stands for rows that are left out."""
    return (rank, *["..."] * (columns - 1))


def some(numbers: range) -> list[int | None]:
    """Return the numbers, or of many the first three, a middle one and the last, and None where some are left out."""
    if len(numbers) <= MOST_SHOWN:
        return [*numbers]
    return [*numbers[:3], None, numbers[len(numbers) // 2], None, numbers[-1]]


def table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> str:
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


def ownership(case: Case, rank: int, *, whole: bool) -> Row:
    most = case.layout.length if whole else _FEWEST
    return str(rank), f"{case.layout.local_length(rank):,}", listed(case.layout.ranges[rank], most)


def stage_columns(case: Case) -> Row:
    columns = ("rank", "stage", "keys of", "rows held", "tiles", "pairs", "receives (rank: rows)", "sends")
    return (*columns, "gradients go to") if case.direction == "backward" else columns


def stage_rows(case: Case, rank: int, *, whole: bool) -> Iterator[Row]:
    """Yield one row for each stage: its keys and tiles, and what travels before it (gradients: after it)."""
    group, place = divmod(rank, case.head_degree)  # rows travel between ranks at the same place of their head groups

    def rows(messages: Sequence[Message], *, sent: bool) -> str:
        mine = [(m.target if sent else m.source, m.rows) for m in messages if (m.source == group) == sent]
        shown = mine if whole else mine[:_FEWEST]
        text = ", ".join(f"{peer * case.head_degree + place}: {count:,}" for peer, count in shown)
        if left := mine[len(shown) :]:
            text += f", {len(left)} more: {sum(count for _, count in left):,}"
        return text or "-"

    stages = case.stages(rank)
    for number in range(len(stages)) if whole else some(range(len(stages))):
        if number is None:
            yield gap(len(stage_columns(case)), str(rank))
            continue
        stage = stages[number]
        owners = [r for r in range(case.degree) if intersection(stage.held, case.layout.ranges[r])]
        keys = "all" if len(owners) == case.degree else runs(owners) or "-"
        if stage.collective:
            text = f"all-gather of {case.plan(rank).longest:,} a rank"
            travels = text, text
        else:
            travels = rows(stage.messages, sent=False), rows(stage.messages, sent=True)
        home = "reduce-scatter" if stage.collective else rows(stage.home, sent=True)
        cells = str(rank), str(number), keys, f"{stage.rows:,}", f"{len(stage.tiles):,}", f"{stage.pairs:,}", *travels
        yield (*cells, home) if case.direction == "backward" else cells


def runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, those that follow each other as first-last."""
    starts = [n for n in numbers if n - 1 not in numbers]
    stops = [n for n in numbers if n + 1 not in numbers]
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))


def tile_rows(case: Case, rank: int, *, whole: bool) -> Iterator[Row]:
    """Yield one row for each tile; not `whole`: for the first few of some stages."""
    stages = case.stages(rank)
    for number in range(len(stages)) if whole else some(range(len(stages))):
        if number is None:
            yield gap(len(TILE_COLUMNS), str(rank))
            continue
        stage = stages[number]
        most = len(stage.tiles) if whole else FEWEST_TILES
        for tile in stage.tiles[:most]:
            q, kv = (
                listed([(start, stop) for _, start, stop in spread(*where)], FEWEST_TILES if whole else _FEWEST)
                for where in ((tile.q, case.queries(rank)), (tile.kv, stage.held))
            )
            yield str(rank), str(number), q, kv, tile.relation.value, f"{tile.pairs:,}"
        if left := stage.tiles[most:]:
            more = f"and {len(left):,} more (--rank {rank})"
            yield str(rank), str(number), more, "", "", f"{sum(tile.pairs for tile in left):,}"


def cost_table(case: Case, ranks: Sequence[int | None]) -> str:
    """Return FLOPs, bytes by kind, calls and buffers: of `ranks`, and as maximum, mean, maximum over mean.

    Maximum and mean are of the planned ranks, which are all unless they are many.
    """
    cost = {rank: case.cost(rank, case.direction) for rank in {*ranks, *case.planned} - {None}}
    kinds = sorted({kind for each in cost.values() for kind in each.bytes_sent})
    columns: list[tuple[str, Callable[[Cost], int], dict[str, float]]] = [("", lambda each: each.flops, _FLOPS)]
    columns += [(f"{kind} sent", lambda each, kind=kind: each.bytes_sent[kind], _BYTES) for kind in kinds]
    columns.append(("received", lambda each: each.bytes_received.total(), _BYTES))
    columns.append(("calls", lambda each: each.calls.total(), {}))
    columns.append(("buffers", lambda each: each.workspace, _BYTES))
    heads, cells = [], []
    for name, of, units in columns:
        values = {rank: of(each) for rank, each in cost.items()}
        most, mean = max(values[r] for r in case.planned), fmean(values[r] for r in case.middles)
        unit, scale = max((x for x in units.items() if x[1] <= most), key=lambda x: x[1], default=("", 1))
        form = "{:,.3f}" if unit else "{:,.0f}"
        heads.append(f"{name} {unit}".strip())
        column = ["..." if rank is None else form.format(values[rank] / scale) for rank in ranks]
        form = form if unit else "{:,.4g}"
        cells.append([*column, *(form.format(x / scale) for x in (most, mean)), f"{most / mean:.3f}" if mean else "-"])
    names = [*("..." if rank is None else str(rank) for rank in ranks), "maximum", "mean", "max/mean"]
    title = f"Cost of one layer's attention, {case.direction}"
    if len(case.planned) < case.degree:
        title += f"; maximum and mean of {len(case.planned)} of {case.degree:,} ranks"
    return table(title, ("rank", *heads), [*zip(names, *cells, strict=True)])
