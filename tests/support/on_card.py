"""What the scripts for a GPU share: times of captured graphs, and errors against truth.

Leaves out: what is timed, and the gate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

WARM_UP = 3  # replays that are not counted


def replays(work: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of `count` replays of a captured graph, behind a few that are not counted."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(WARM_UP + count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times[WARM_UP:]


def milliseconds(work: Callable[[], object], count: int = 17) -> float:
    """The median of them."""
    return statistics.median(replays(work, count))


def bytes_per_second() -> float:
    """What this card moves, read and written, when a kernel doubles 4 GiB: the rate that gives every floor."""
    source = torch.empty(2**30, device="cuda")
    target = torch.empty_like(source)
    return 8e3 * source.numel() / milliseconds(lambda: torch.mul(source, 2.0, out=target))


def worst(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest relative norm error over blocks of the first axis; NaN stays NaN."""
    ours, truth = ours.double().flatten(1), truth.double().flatten(1)
    return float(((ours - truth).norm(dim=1) / truth.norm(dim=1)).max())
