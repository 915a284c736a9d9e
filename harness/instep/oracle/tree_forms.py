"""The parts of a layer that look backwards, over a window that is a tree: conv, delta rule, attention.

The reference decodes a tree node by node, each from its parent's memory. Here all nodes of a layer are rows of one run,
as in an engine, so that every place shows the whole window; a test compares the two. Leaves out: ops on one row alone,
which are the reference's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from instep_reference.gdn import Recurred, recur
from instep_reference.trunk import Forms

from ..trace.tree_shape import lines


def forms(parents: Sequence[int]) -> Forms:
    """For `trunk.layer`. parents: of each node, -1 for the root; the memory before the window is the layer's."""
    tree = tuple(parents)
    return {
        "gdn": {"rule": partial(recur_tree, tree), "conv": partial(conv_tree, tree)},
        "attention": {"read": partial(read_tree, tree)},
    }


def recur_tree(
    parents: tuple[int, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor,
    erase: torch.Tensor, write: torch.Tensor, state: torch.Tensor,
) -> Recurred:
    """`recur`, with every node from its parent's state. The state that it returns is the last node's.

    Shapes:  as `recur`
    """
    nodes: list[Recurred] = []
    for node, parent in enumerate(parents):
        at = slice(node, node + 1)
        before = nodes[parent].state if parent >= 0 else state
        nodes.append(recur(q[:, at], k[:, at], v[:, at], log_decay=log_decay[:, at], erase=erase[:, at],
                           write=write[:, at], state=before))  # fmt: skip
    out, update = (torch.cat([getattr(one, name) for one in nodes], 1) for name in ("out", "update"))
    return Recurred(out, update, nodes[-1].state)


def conv_tree(
    parents: tuple[int, ...], x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`causal_conv` along each node's own path. The window that it returns is the last node's.

    Shapes:  x (T, C)   weight (C, W)   window (C, W-1)  ->  (T, C), (C, W-1)
    """
    width, history = weight.shape[1], window.T
    inputs = torch.cat([history, x])  # (W-1 + T, C)
    reads = [[*range(width - 1), *(width - 1 + node for node in line)][-width:] for line in lines(parents)]
    rows = inputs[torch.tensor(reads, device=x.device)]  # (T, W, C)
    taps = [weight[:, j] * rows[:, j] for j in range(width)]  # W of (T, C)
    return torch.stack(taps).sum(0), rows[-1, 1:].T


def read_tree(
    parents: tuple[int, ...], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """`attend`, if the T queries belong to the last T rows of memory: each sees its path, and everything before the
    tree.

    Shapes:  as `attend`
    """
    (tokens, heads, width), (length, kv_heads, _) = query.shape, keys.shape
    keys, values = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,lhd->htl", query, keys) * width**-0.5  # (heads, T, L)
    hidden = torch.zeros(tokens, length, dtype=torch.bool)
    hidden[:, length - tokens :] = True
    for node, line in enumerate(lines(parents)):
        hidden[node, [length - tokens + other for other in line]] = False
    shares = scores.masked_fill(hidden.to(query.device), float("-inf")).softmax(-1)
    return torch.einsum("htl,lhd->thd", shares, values)
