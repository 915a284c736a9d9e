"""Verify is decoding: each node of a window is one token decoded from its parent's memory.

Chains and trees are one function, and commit picks one node. Leaves out: which node (`acceptance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from .contract.place import See
from .model import Cache, Memory, Model, Rows


@dataclass(frozen=True)
class Node(Generic[Rows, Memory]):
    """One token of a window: the target's final row for it, and the memory with it and its ancestors in."""

    token: int
    depth: int
    final: Rows
    memory: Memory


def verify(
    model: Model[Rows, Memory, Cache], tokens: Sequence[int], parents: Sequence[int],
    memory: Memory, start: int, see: See,
) -> tuple[Node[Rows, Memory], ...]:
    """Decode every node after its parent; siblings never see each other.

    tokens, parents: the window, root first, parents[i] < i; start: the root's position, the committed length.
    Claim: along any path the nodes are what decoding its tokens one by one gives.
    """
    nodes: list[Node[Rows, Memory]] = []
    for token, parent in zip(tokens, parents, strict=True):
        before = nodes[parent].memory if parent >= 0 else memory
        depth = nodes[parent].depth + 1 if parent >= 0 else 0
        final, after = model.advance((token,), before, start + depth, see)
        nodes.append(Node(token, depth, final, after))
    return tuple(nodes)
