"""Windows that are trees: drawn shapes, paths through them, and one launch of several windows for ops and engines.

Leaves out: ops and engines.
"""

from dataclasses import dataclass
from random import Random

import torch

from instep.kit.cases.trees import Parents, path


def drawn(draw: Random, nodes: int, depth: int | None = None) -> Parents:
    """A tree of that many nodes, none deeper than `depth`."""
    parents, depths = [-1], [0]
    for _ in range(1, nodes):
        open_ = [node for node, at in enumerate(depths) if depth is None or at < depth]
        parents.append(draw.choice(open_))
        depths.append(depths[parents[-1]] + 1)
    return tuple(parents)


def chain(nodes: int) -> Parents:
    return tuple(range(-1, nodes - 1))


@dataclass(frozen=True)
class Launch:
    """Windows with `width` packed rows each: the first ones are nodes, the others garbage."""

    trees: tuple[Parents, ...]
    width: int

    @property
    def rows(self) -> int:
        return len(self.trees) * self.width

    @property
    def begin(self) -> torch.Tensor:
        return torch.arange(len(self.trees)) * self.width

    @property
    def count(self) -> torch.Tensor:
        return torch.tensor([len(tree) for tree in self.trees])

    @property
    def parents(self) -> torch.Tensor:
        return torch.tensor([[*tree, *[77] * (self.width - len(tree))] for tree in self.trees]).flatten()

    @property
    def ancestors(self) -> torch.Tensor:
        bits = [[sum(1 << n for n in path(tree, node)) for node in range(len(tree))] for tree in self.trees]
        return torch.tensor([[*row, *[-1] * (self.width - len(row))] for row in bits]).flatten()
