"""Sizes in bytes: of data types, and of what a rank holds. Torch-free."""

from dataclasses import asdict, astuple, dataclass

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class RankMemory:
    """Bytes that the largest rank holds from step to step, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    tables: int
    """Rotary tables and the batch."""

    @property
    def total(self) -> int:
        """Return the sum."""
        return sum(astuple(self))

    def describe(self) -> str:
        """Return the parts of at least a hundredth of the total, each with its size."""
        named = [f"{name} {size_words(size)}" for name, size in asdict(self).items() if size >= self.total / 100]
        return ", ".join(named)


def size_words(size: float) -> str:
    """Return a size in MiB, GiB or TiB with two digits or more."""
    for unit, power in (("TiB", 40), ("GiB", 30)):
        if size >= 2**power:
            return f"{size / 2**power:,.{1 if size < 100 * 2**power else 0}f} {unit}"
    return f"{size / 2**20:,.{1 if size < 10 * 2**20 else 0}f} MiB"
