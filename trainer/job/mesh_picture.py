"""Draw the mesh: which rank stands where along each dimension. Torch-free."""

import itertools
import math

from trainer.job.degrees import Degrees

_ROWS, _COLUMNS = 8, 16


def mesh_picture(degrees: Degrees) -> list[str]:
    """Return lines that show each rank's place: outer dimensions as rows, the innermost one above one as columns.

    A long axis is cut in its middle. Ranks are numbered as the mesh numbers them, outermost dimension first.
    """
    order = ("pp", "dp_replicate", "dp_shard", *(degrees.domain_axes or ("cp_ring", "cp_a2a")), "tp")
    lines = _picture(degrees, order)
    if degrees.ep not in (None, 1):
        lines += [f"experts: {line}" for line in _picture(degrees, ("pp", "dp_replicate", "efsdp", "ep"))]
    return lines


def _picture(degrees: Degrees, order: tuple[str, ...]) -> list[str]:
    everything = degrees.sizes()
    sizes = {name: everything[name] for name in order if everything[name] > 1}
    if degrees.cp_a2a == 1:
        sizes = {name.replace("cp_ring", "cp"): size for name, size in sizes.items()}
    if len(sizes) < 2:
        return []  # ranks 0, 1, 2, ... in one line
    (*outer, inner), (*heights, columns) = sizes, sizes.values()
    width = len(str(degrees.world_size - 1))
    label = max((len(_label(outer, [size - 1 for size in heights])), 0))
    places = list(itertools.product(*(range(size) for size in heights)))
    lines = [f"{'':{label}}  {inner} {_row(range(columns), width)}".rstrip()]
    before: tuple[int, ...] | None = None
    for number in _ends(range(len(places)), _ROWS):
        if number is None:
            lines.append("...")
            before = None
            continue
        here = places[number]
        ranks = range(number * columns, (number + 1) * columns)
        shown = _label(outer, here, before)
        lines.append(f"{shown:{label}}  {'':{len(inner)}} {_row(ranks, width)}".rstrip())
        before = here
    assert math.prod(sizes.values()) == degrees.world_size
    return lines


def _label(names: list[str], place: list[int] | tuple[int, ...], before: tuple[int, ...] | None = None) -> str:
    """Return `pp 0  dp_shard 1`, with blanks for what the line above says already."""
    words, same = [], before is not None
    for i, (name, number) in enumerate(zip(names, place, strict=True)):
        same = same and before is not None and before[i] == number
        word = f"{name} {number}"
        words.append(" " * len(word) if same else word)
    return "  ".join(words)


def _row(numbers: range, width: int) -> str:
    return " ".join("..." if number is None else f"{number:>{width}}" for number in _ends(numbers, _COLUMNS))


def _ends(numbers: range, most: int) -> list[int | None]:
    """Return the numbers, or the first and the last ones with None between them."""
    if len(numbers) <= most:
        return list(numbers)
    return [*numbers[: most - 2], None, numbers[-1]]
