"""The table that `counters_gpu.py` makes from a profiler's output."""

import torch

from instep_speed import bench
from instep_speed.bench.bench_types import Ground
from instep_speed.bench.interleaved_timing import Rates
from perf.counters_gpu import CELLS, COUNTERS, READ, TIME, lines_of


def _printed(*launches: tuple[str, float, float]) -> str:
    """The output of `ncu --csv` for launches of kernels, given by name, time and bytes read"""
    lines = ["==PROF== Connected", '"ID","Kernel Name","Grid Size","Metric Name","Metric Value"']
    for number, (kernel, took, read) in enumerate(launches):
        for metric in (TIME, READ, *COUNTERS.values()):
            value = {TIME: took, READ: read}.get(metric, 10.0 * (1 + number))
            lines.append(f'"{number}","{kernel}(int)","(132, 1, 1)","{metric}","{value:,.2f}"')
    return "\n".join(lines)


def test_launches_with_the_same_weight_share_a_line_and_what_is_short_has_none() -> None:
    wide, narrow = ("_product", 41_000, 201e6), ("_product", 12_000, 33e6)
    heads, *lines = lines_of(_printed(wide, narrow, ("_product", 43_000, 200e6), ("_add", 100, 1e3)))
    assert heads.split()[:5] == ["kernel", "grid", "launches", "us", "MB"]
    assert [line.split() for line in lines] == [
        ["_product", "(132,1,1)", "2", "42.0", "200", *["20"] * len(COUNTERS)],
        ["_product", "(132,1,1)", "1", "12.0", "33", *["20"] * len(COUNTERS)],
    ]


def test_cells_are_of_the_benchmark() -> None:
    ground = Ground(torch.device("cpu"), torch.bfloat16, {}, Rates(1e10, 2e10, 1e11), 0, peers=False)
    for kind, at, _ in CELLS:
        assert at in [dict(one) for one in bench.kind(kind).cells(ground, "full")], (kind, at)
