"""Verify is decoding: each node of a window is one token that is decoded from its parent's memory.

The same function is used for chains and trees. A commit then takes the memory of one node. Leaves out: the choice of
this node (`acceptance.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from .contract.place_names import See
from .model_interface import Cache, Memory, Model, Rows


@dataclass(frozen=True)
class Node(Generic[Rows, Memory]):
    """One token of a window: the target's final row for it, and the memory after its ancestors and itself."""

    token: int
    depth: int
    final: Rows
    memory: Memory


def verify(
    model: Model[Rows, Memory, Cache], tokens: Sequence[int], parents: Sequence[int],
    memory: Memory, start: int, see: See,
) -> tuple[Node[Rows, Memory], ...]:
    """Decode every node from its parent's memory; siblings never see each other.

    tokens, parents: the window, root first, parents[i] < i (the root's is -1)
    start: the root's position, which is the committed length
    Claim: the nodes along any path are equal to decoding the tokens of the path one by one.
    """
    nodes: list[Node[Rows, Memory]] = []
    for token, parent in zip(tokens, parents, strict=True):
        before = nodes[parent].memory if parent >= 0 else memory
        depth = nodes[parent].depth + 1 if parent >= 0 else 0
        final, after = model.advance((token,), before, start + depth, see)
        nodes.append(Node(token, depth, final, after))
    return tuple(nodes)
