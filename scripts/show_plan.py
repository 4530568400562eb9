"""Show how context parallelism spreads attention: who owns which tokens, computes what, and sends how much.

    python scripts/show_plan.py --seq-len 65536 --degree 4
    python scripts/show_plan.py --seq-len 65536 --degree 8 --load-balancer contiguous --mask window:4096
    python scripts/show_plan.py --seq-len 65536 --degree 4 --load-balancer balanced --mask document \
        --documents random:0 --output plan.svg

It reads the same plans that training runs; nothing is computed, and no GPU is needed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a clone, installed or not

import numpy as np

from trainer.config.errors import ConfigError, did_you_mean
from trainer.distributed.context_parallel.planning.cost import AttentionShape, Cost, attention_cost
from trainer.distributed.context_parallel.planning.heads import check_heads
from trainer.distributed.context_parallel.planning.mask import ANY, Band, Mask, causal, documents, full, sliding_window
from trainer.distributed.context_parallel.planning.methods import METHODS, make_plan
from trainer.distributed.context_parallel.planning.options import ContextParallelOptions
from trainer.distributed.context_parallel.planning.plan import Message, RankPlan, Stage
from trainer.distributed.context_parallel.planning.tiles import Tile
from trainer.distributed.sharding.layout import LOAD_BALANCERS, AxisLayout
from trainer.distributed.sharding.ranges import Range, Ranges, intersection, union

MASKS = ("causal", "full", "window:4096", "document")
OUTPUTS = (".svg", ".png")
FEWEST_TILES = 4
"""How many tiles of a stage are listed without --rank."""


@dataclass(frozen=True)
class Case:
    """One attention call of one sequence: its plan on every rank. neighbours: ranks that divide the heads."""

    layout: AxisLayout
    mask: Mask
    mask_name: str
    method: str
    neighbours: int
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
        heads = {"head_degree": self.neighbours} if self.method == "hybrid" else {}
        return [make_plan(self.layout, self.mask, self.method, rank, **heads) for rank in range(self.degree)]

    @cached_property
    def costs(self) -> list[Cost]:
        return [attention_cost(plan, self.shape, self.direction) for plan in self.plans]

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """What `rank` does in the direction that is shown."""
        plan = self.plans[rank]
        return plan.forward if self.direction == "forward" else plan.backward

    def queries(self, rank: int) -> Ranges:
        """Queries that `rank` works on, in its order: its own and those of its neighbours."""
        first = rank - rank % self.neighbours
        return union(sum(self.layout.ranges[first : first + self.neighbours], ()))

    def bands(self, rank: int, stage: Stage, tile: Tile) -> Iterator[Band]:
        """A tile in tokens of the sequence: one band for each piece of its queries and of its keys."""
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
    """(place, start, stop) of the numbers at `places`, if the ranges are laid one after another."""
    before = 0
    for start, stop in ranges:
        for first, last in intersection((places,), ((before, before + stop - start),)):
            yield first, start + first - before, start + last - before
        before += stop - start


# ---- the table


def report(case: Case, rank: int | None = None) -> str:
    """Tables of ownership, stages, tiles and costs; `rank`: all tiles and ranges of that rank, and none of others."""
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
            if case.neighbours == 1
            else f"Stages, between two exchanges of heads among {case.neighbours} ranks",
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
    """Text in columns; those of numbers are set to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    right = [all(set(cell) <= set("0123456789,.-") for cell in column) for column in zip(*rows, strict=True)]
    lines = [title]
    for row in (columns, *rows):
        cells = (x.rjust(w) if r else x.ljust(w) for x, w, r in zip(row, widths, right, strict=True))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def listed(ranges: Sequence[Range], most: int) -> str:
    """Ranges as text, the first `most` of them."""
    text = " ".join(f"[{start:,}, {stop:,})" for start, stop in ranges[:most])
    return text + (f" and {len(ranges) - most} more" if len(ranges) > most else "") or "none"


def ownership(case: Case, ranks: Sequence[int], *, whole: bool) -> list[tuple[str, ...]]:
    """One row a rank."""
    most = case.layout.length if whole else FEWEST_TILES
    return [(str(r), f"{case.layout.local_length(r):,}", listed(case.layout.ranges[r], most)) for r in ranks]


def stage_columns(case: Case) -> tuple[str, ...]:
    columns = ("rank", "stage", "keys of", "rows held", "tiles", "pairs", "receives (rank: rows)", "sends")
    return (*columns, "gradients go to") if case.direction == "backward" else columns


def stage_rows(case: Case, rank: int) -> Iterator[tuple[str, ...]]:
    """One row a stage: what is worked on, and what travels before it (gradients: after it)."""

    group, place = divmod(rank, case.neighbours)  # what travels, travels between the ranks at one place of the groups

    def rows(messages: Sequence[Message], *, sent: bool) -> str:
        mine = [(m.target if sent else m.source, m.rows) for m in messages if (m.source == group) == sent]
        return ", ".join(f"{peer * case.neighbours + place}: {count:,}" for peer, count in mine) or "-"

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
    """One row a tile; not `whole`: the first few of each stage."""
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
    """FLOPs, bytes that are sent by kind, calls and buffers: by rank, and in total, maximum, maximum over mean."""
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


# ---- the command line


def random_documents(seq_len: int, seed: int) -> list[int]:
    """Lengths of packed documents, log-normal with a median of a sixteenth of the sequence; the last one is cut."""
    rng, lengths, left = np.random.default_rng(seed), [], seq_len
    while left:
        lengths.append(min(int(rng.lognormal(0, 1) * seq_len / 16) + 1, left))
        left -= lengths[-1]
    return lengths


def parse_documents(text: str, seq_len: int) -> list[int]:
    """Lengths of documents: `5000,3000,...`, or `random:SEED`.

    Raises:
        ConfigError: neither, or lengths that are not those of the sequence.
    """
    name, _, seed = text.partition(":")
    if name == "random" and seed.isdecimal():
        return random_documents(seq_len, int(seed))
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(
            f"--documents {text!r} must be lengths, such as 5000,3000, or random: and a seed, as random:0"
        )
    lengths = [int(word) for word in words]
    if sum(lengths) != seq_len:
        raise ConfigError(
            f"--documents {text} are {sum(lengths):,} tokens and must be --seq-len {seq_len}; "
            + (f"add one of {seq_len - sum(lengths)}" if sum(lengths) < seq_len else f"or use --seq-len {sum(lengths)}")
        )
    return lengths


def parse_mask(text: str, seq_len: int, document_text: str | None) -> tuple[Mask, Mask | None, str]:
    """What is visible; of it what belongs to the batch (by which `balanced` deals); how to call it.

    Raises:
        ConfigError: a mask that is none, or documents that change nothing.
    """
    if document_text is not None and text != "document":
        raise ConfigError(f"--documents has no effect with --mask {text}; leave it out, or use --mask document")
    if text == "document":
        lengths = parse_documents(document_text or "random:0", seq_len)
        packed = documents(lengths)
        return (
            causal(seq_len) & packed,
            packed,
            f"causal mask within {len(lengths)} packed document{'s' * (len(lengths) > 1)}",
        )
    if text in ("causal", "full"):
        return {"causal": causal, "full": full}[text](seq_len), None, f"{text} mask"
    name, _, window = text.partition(":")
    if name != "window" or not window.isdecimal() or not int(window):
        raise ConfigError(
            f"--mask {text!r} must be causal, full, document, or window: and a number of tokens of at least 1, as "
            "window:4096" + (did_you_mean(text, MASKS) if name != "window" else "")
        )
    return sliding_window(seq_len, int(window)), None, f"sliding window of {int(window):,}"


def build(args: argparse.Namespace) -> Case:
    """The case that the arguments describe.

    Raises:
        ConfigError: a value that cannot be.
    """
    for name in ("seq_len", "degree", "heads", "kv_heads", "head_dim", "bytes"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.seq_len < args.degree:
        raise ConfigError(
            f"--seq-len {args.seq_len} gives some of --degree {args.degree} ranks no token; use a length of at least "
            f"{args.degree}, or fewer ranks"
        )
    if args.heads % args.kv_heads:
        works = ", ".join(str(n) for n in range(1, args.heads + 1) if args.heads % n == 0)
        raise ConfigError(f"--kv-heads {args.kv_heads} must divide --heads {args.heads}; use one of {works}")
    neighbours = _neighbours(args)
    if args.rank is not None and not 0 <= args.rank < args.degree:
        raise ConfigError(f"--rank {args.rank} is none of --degree {args.degree} ranks; use 0 to {args.degree - 1}")
    if args.output is not None and args.output.suffix not in OUTPUTS:
        raise ConfigError(f"--output {args.output} must end in {' or '.join(OUTPUTS)}, the two kinds of picture")
    if args.output is not None and not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output} lies in no folder: make {args.output.parent} first")
    mask, batch_mask, mask_name = parse_mask(args.mask, args.seq_len, args.documents)
    degrees = {"hybrid_degrees": (neighbours, args.degree // neighbours)} if args.method == "hybrid" else {}
    options = ContextParallelOptions(method=args.method, load_balancer=args.load_balancer, **degrees)
    layout = options.layout(args.seq_len, args.degree, batch_mask)
    shape = AttentionShape(1, args.heads, args.kv_heads, args.head_dim, args.bytes)
    return Case(layout, mask, mask_name, args.method, neighbours, args.direction, shape)


def _neighbours(args: argparse.Namespace) -> int:
    """How many ranks divide the heads among them.

    Raises:
        ConfigError: a number that cannot, or has no effect.
    """
    number, name = args.head_degree, "--head-degree"
    if (number is None) != (args.method != "hybrid"):
        raise ConfigError(
            "--method hybrid needs --head-degree, how many neighbours divide the heads, such as 2"
            if number is None
            else f"--head-degree {number} has no effect with --method {args.method}; leave it out, or use hybrid"
        )
    if args.method == "all_to_all":
        number, name = args.degree, "--degree"
    if number is None:
        return 1
    if number < 1 or args.degree % number:
        works = ", ".join(str(n) for n in range(1, args.degree + 1) if args.degree % n == 0)
        raise ConfigError(f"--head-degree {number} must divide --degree {args.degree}; use one of {works}")
    try:
        check_heads(args.heads, number)
    except ValueError as error:
        raise ConfigError(f"{name} {number} does not go with --heads {args.heads}: {error}") from None
    return number


def painter() -> Callable[[Case, Path, int | None], None]:
    """What draws; imported when it is asked for, as not every installation can.

    Raises:
        ConfigError: a module that it needs is missing.
    """
    try:
        from scripts.plan_picture import draw
    except ModuleNotFoundError as error:
        raise ConfigError(f"--output needs {error.name}: pip install {error.name}, or leave --output out") from None
    return draw


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def parser() -> argparse.ArgumentParser:
    described = _Parser(description=__doc__.splitlines()[0])
    add = described.add_argument
    add("--seq-len", type=int, required=True, help="tokens of the sequence")
    add("--degree", type=int, required=True, help="ranks that share it")
    add("--method", choices=METHODS, default="ring", help="how attention reaches the other ranks' keys")
    add("--head-degree", type=int, help="with --method hybrid: neighbours that divide the heads")
    add("--load-balancer", choices=LOAD_BALANCERS, default="head_tail", help="who owns which tokens")
    add("--mask", default="causal", help="causal (default), full, window:4096, or document (causal within documents)")
    add("--documents", help="lengths, such as 5000,3000, or random:SEED (default random:0), with --mask document")
    add("--heads", type=int, default=32, help="query heads")
    add("--kv-heads", type=int, default=8, help="key/value heads")
    add("--head-dim", type=int, default=128, help="size of a head")
    add("--bytes", type=int, default=2, help="of an element of q, k, v")
    add("--direction", choices=("forward", "backward"), default="forward", help="of training")
    add("--rank", type=int, help="show all tiles of this rank only")
    add("--output", type=Path, help="picture to write, .svg or .png")
    return described


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        case = build(args)
        draw = None if args.output is None else painter()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(report(case, args.rank))
    if draw is not None:
        draw(case, args.output, args.rank)
        print(f"\n{args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
