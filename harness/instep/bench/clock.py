"""Times, interleaved: every arm once, then every arm again in the reverse order; and the rates of the machine.

On a card a sample is the replay of a captured graph, between two events on the device. Right before it the same work
runs without being timed, and the device is held back until the host has launched both. So the sample finds the cache as
this work leaves it, and not as another arm does, whose stores may still have to be written back (8 us of 73, LOG.md);
and the host has no part in it. Work that cannot be captured is launched each time, and nothing holds the device back,
for such work may wait for it. On a CPU a sample is a call. Leaves out: what is timed, and for how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ..perf.card import Card

Work = Callable[[], object]
WARM_UP = 3  # samples that are not counted
SAMPLES = 20
BEFORE = (1, 1, 1, 2, 1)  # turns before a sample: so work that differs every second to fifth time is seen at each alike
TRIES = 3  # of a sample for which the host was late: the device did not wait so long
PLACES = 3  # tensors whose reading is timed


@dataclass(frozen=True)
class Rates:
    """Bytes per second that are moved, read and written, when a kernel doubles a large tensor; bytes per second when it
    is only read; and operations per second of a large product in the activations' dtype."""

    copy: float
    read: float
    product: float

    def floor(self, read: float, written: float, flops: float = 0.0) -> float:
        """Seconds in which nobody can read, write and multiply more. What is only read comes at the rate of reading."""
        both = 2 * min(read, written)
        moved = both / self.copy + (read + written - both) / self.read
        return max(moved, flops / self.product)


@dataclass(frozen=True)
class Times:
    """Seconds of one unit of an arm. how: graph, launched, or called."""

    samples: tuple[float, ...]
    how: str

    def data(self) -> dict[str, object]:
        lower, median, upper = np.quantile(self.samples, (0.25, 0.5, 0.75))
        return {"us": 1e6 * float(median), "lower": 1e6 * float(lower), "upper": 1e6 * float(upper),
                "mean": 1e6 * float(np.mean(self.samples)), "samples": len(self.samples), "how": self.how}  # fmt: skip


def rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measured on four tensors of 2 GiB, and a product of 8192; on a CPU of 32 MiB and of 256.

    The rate of reading is that of the tensor that is read fastest. From run to run it differs by some percent, perhaps
    by where memory lies, and a floor must be no higher for that.
    """
    card = device.type == "cuda"
    count, side = (2**29, 8192) if card else (2**23, 256)
    sources = [torch.ones(count, device=device) for _ in range(PLACES)]
    target = torch.empty_like(sources[0])
    square = torch.ones(side, side, device=device, dtype=dtype)
    works: dict[str, Work] = {
        "copy": lambda: torch.mul(sources[0], 2.0, out=target), "product": lambda: square @ square,
        **{f"read {number}": source.sum for number, source in enumerate(sources)},
    }  # fmt: skip
    found = {name: float(np.median(times.samples)) for name, times in timed(works, device, 5 if card else 3).items()}
    size, read = 4.0 * count, min(found[f"read {number}"] for number in range(PLACES))
    return Rates(2 * size / found["copy"], size / read, 2.0 * side**3 / found["product"])


def timed(works: Mapping[str, Work], device: torch.device, count: int = SAMPLES) -> dict[str, Times]:
    """`count` samples of every work, taken in turn."""
    card = None
    if device.type == "cuda":
        from ..perf.card import Card  # which needs Triton

        card = Card(str(device))
    ready = {name: _ready(work, card) for name, work in works.items()}
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(WARM_UP + count):
        for name in list(works)[:: 1 if number % 2 else -1]:
            taken[name].append(ready[name][0](BEFORE[number % len(BEFORE)]))
    return {name: Times(tuple(taken[name][WARM_UP:]), ready[name][1]) for name in works}


def _ready(work: Work, card: Card | None) -> tuple[Callable[[int], float], str]:
    """What takes one sample behind so many turns, and how. card: None is a CPU"""
    if card is None:
        return lambda before: _called(work), "called"
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except Exception:  # it waits for the host; it is timed all the same, and the table says so
        torch.cuda.synchronize()
        return partial(_between_events, work, None), "launched"
    return partial(_between_events, graph.replay, card), "graph"


def _between_events(work: Work, card: Card | None, before: int) -> float:
    """card: what holds the device back meanwhile, of work that does not wait for it"""
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    for _ in range(TRIES):
        if card is not None:
            card.wait()
            card.hold()
        for _ in range(before):
            work()
        start.record()
        work()
        end.record()
        if card is None or card.release() is not None:
            break
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


def _called(work: Work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def less(times: Times, other: Times, units: int) -> Times:
    """Sample by sample: the one without the other, of one unit."""
    pairs: Sequence[tuple[float, float]] = list(zip(times.samples, other.samples, strict=True))
    return Times(tuple((whole - part) / units for whole, part in pairs), times.how)


def of_one(times: Times, units: int) -> Times:
    return Times(tuple(one / units for one in times.samples), times.how)
