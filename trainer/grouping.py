"""Things with sizes in groups of a limited size: small files to read together, tensors of one file."""

from collections.abc import Mapping


def grouped(sizes: Mapping[str, int], most: float) -> list[list[str]]:
    """Return the names in groups whose sizes add up to at most so much; a larger one is alone."""
    groups: list[list[str]] = []
    total = 0
    for name, size in sizes.items():
        total += size
        if not groups or total > most:
            groups.append([])
            total = size
        groups[-1].append(name)
    return groups
