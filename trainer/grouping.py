"""Groups named items of known size into groups of limited size: small files to read together, tensors of one file."""

from collections.abc import Mapping


def grouped(sizes: Mapping[str, int], most: float) -> list[list[str]]:
    """Return the names, in their order, in groups whose sizes add up to at most `most`; a larger item is alone.

    Args:
        sizes: Size of each name.
        most: Largest size of a group.
    """
    groups = []
    total = 0
    for name, size in sizes.items():
        total += size
        if not groups or total > most:
            groups.append([])
            total = size
        groups[-1].append(name)
    return groups
