"""What a state would be if a commit had taken another node of a tree, or had taken the tree for a chain.

Leaves out: the comparison (`directed.py`), and mistakes that a chain knows as well (`hypotheses.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..observe.recomputation import Folding, fold
from ..observe.tree_forms import lines
from .scene import Wrong


def branches(folding: Folding, path: Sequence[int]) -> list[Wrong]:
    """The state after every node beside the path, and after rows in their order; path: accepted nodes, root first.

    The state after an earlier node of the path, as its parent or the root, is that of a smaller count of tokens.
    """
    assert folding.parents is not None, "asked of trees alone"
    parents, last = folding.parents, path[-1]
    found = [
        Wrong(f"holds the state after node {node}, {kin(parents, path, node)}; node {last} is the last accepted one",
              _after(folding, line))
        for node, line in enumerate(lines(parents)) if node not in path
    ]  # fmt: skip
    for rows, means in _as_chains(path, len(parents)):
        found.append(Wrong(f"takes the tree for a chain: holds rows 0 to {rows - 1} in their order, {means}",
                           _after(folding, range(rows))))  # fmt: skip
    return found


def kin(parents: Sequence[int], path: Sequence[int], node: int) -> str:
    """What a node beside the path is to it. Only one is said, the nearest relation first."""
    last = path[-1]
    if parents[node] == last:
        return f"a child of node {last}"
    if parents[node] == parents[last]:
        return f"a sibling of node {last}"
    if node == len(path) - 1:
        return "whose number is the depth of the path"
    return "the last node of the window" if node == len(parents) - 1 else "a node beside the path"


def _as_chains(path: Sequence[int], width: int) -> Iterator[tuple[int, str]]:
    """How many rows a mistake takes that knows no parents."""
    means = {width: "all of them", path[-1] + 1: "up to the last accepted node", len(path): "as many as are accepted"}
    return ((rows, said) for rows, said in means.items() if list(path) != list(range(rows)))


def _after(folding: Folding, nodes: Sequence[int]) -> torch.Tensor:
    return fold(folding.tokens, folding.base, nodes)[0]
