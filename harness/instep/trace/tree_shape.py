"""The depths of the nodes of a tree of drafts, and the paths to them, from the parents of the nodes."""

from collections.abc import Sequence


def depths(parents: Sequence[int]) -> list[int]:
    """The depth of each node, 0 for the root."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def lines(parents: Sequence[int]) -> list[list[int]]:
    """The path to each node, root first, itself last."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else ()), node])
    return found
