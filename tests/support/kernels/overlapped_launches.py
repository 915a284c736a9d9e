"""A chain of launches that overlap in a graph: its rows, turn by turn. Leaves out: what the chain computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from instep.kit.cases.guarded_pools import same_bits

TURNS = 20


def same_in_a_graph(
    chain: Callable[[], list[torch.Tensor]], start: torch.Tensor, starts: Sequence[torch.Tensor],
    right: Sequence[Sequence[torch.Tensor]],
) -> list[bool]:
    """Whether each row that the chain makes from `start` has the right bits, from one of `starts` after the other.

    Before a turn all rows but the first hold NaN, so a launch that begins too early does not find those of before.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    same = list[bool]()
    for turn in range(TURNS):
        start.copy_(starts[turn % len(starts)])
        for one in found[1:]:
            one.fill_(torch.nan)
        graph.replay()
        same.extend(map(same_bits, found, right[turn % len(starts)]))
    return same
