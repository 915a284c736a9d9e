"""Interleaved timing: every arm once, then every arm again in reverse order; and the rates of the machine.

On a card a sample is the replay of a captured graph, between two events on the device. Right before it the same work
runs untimed, and the device is held back until the host has launched both. So the sample finds the cache as this work
leaves it, not as another arm leaves it with stores that are still to be written back (8 us of 73, LOG.md). The host has
no part in a sample: if the host was late, the sample is repeated or dropped. Work that cannot be captured is launched
each time without holding the device, because such work may wait for the device. On a CPU a sample is a call.

Some work stores only every few calls, which is its period. Samples are a constant number of calls apart, and this
number has no common factor with the period. So a period's number of samples covers each of its phases once.
Leaves out: the timed work, and the time limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from instep_reference.contract.errors import Unsupported

if TYPE_CHECKING:
    from ..gate.gpu_operations import Card

Work = Callable[[], object]
WARM_UP = 3  # samples that are not counted
SAMPLES = 20  # minimum; more are taken until each phase of a period has the same number
TRIES = 3  # tries of a sample for which the host was late: the hold on the device ended too early
LAPS = 3  # limit of the attempts, as a multiple of the samples, when samples are dropped
PLACES = 3  # tensors whose reading is timed


@dataclass(frozen=True)
class Rates:
    """Measured rates of the machine.

    copy     bytes per second, read and written, of a kernel that doubles a large tensor
    read     bytes per second of a kernel that only reads it
    product  operations per second of a large product in the activations' dtype
    """

    copy: float
    read: float
    product: float

    def floor(self, read: float, written: float, flops: float = 0.0) -> float:
        """The minimum seconds for these bytes and operations. Bytes that are only read count at the rate of reading."""
        both = 2 * min(read, written)
        moved = both / self.copy + (read + written - both) / self.read
        return max(moved, flops / self.product)


@dataclass(frozen=True)
class Times:
    """Seconds of one unit of an arm.

    how      "graph", "launched" or "called"
    lacking  number of samples that were dropped because the host was late; each phase of the period lacks as many
    replay   for a graph: replays the timed graph once more and returns its results
    """

    samples: tuple[float, ...]
    how: str
    lacking: int = 0
    replay: Work | None = None

    def data(self) -> dict[str, object]:
        """The fields of a result row. Without samples there is no time."""
        if self.lacking:
            due = len(self.samples) + self.lacking
            return replace(self, how=f"{self.how}, {self.lacking} of {due} left out: the host was late",
                           lacking=0).data()  # fmt: skip
        if not self.samples:
            return {"samples": 0, "how": self.how}
        lower, median, upper = np.quantile(self.samples, (0.25, 0.5, 0.75))
        return {"us": 1e6 * float(median), "lower": 1e6 * float(lower), "upper": 1e6 * float(upper),
                "mean": 1e6 * float(np.mean(self.samples)), "samples": len(self.samples), "how": self.how}  # fmt: skip


def rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure on four tensors of 2 GiB and a product of 8192; on a CPU 32 MiB and 256.

    The rate of reading is that of the fastest tensor. It varies between runs by a few percent, perhaps with the
    placement of memory, and a floor must not be too high because of that.
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
    every = timed(works, device, 5 if card else 3)
    if any(not times.samples for times in every.values()):
        raise Unsupported("timing here: the host was late for all samples of a large tensor, by 20 ms each")
    found = {name: float(np.median(times.samples)) for name, times in every.items()}
    size, read = 4.0 * count, min(found[f"read {number}"] for number in range(PLACES))
    return Rates(2 * size / found["copy"], size / read, 2.0 * side**3 / found["product"])


class Fell(Exception):
    """A work raised an exception while it was timed."""

    def __init__(self, name: str, raised: Exception) -> None:
        super().__init__(name, raised)
        self.name, self.raised = name, raised


def timed(
    works: Mapping[str, Work], device: torch.device, least: int = SAMPLES, periods: Mapping[str, int] | None = None,
) -> dict[str, Times]:
    """Take at least `least` samples of every work, in turn. An exception of one ends all with `Fell`.

    periods: number of calls after which a work repeats its behaviour
    """
    card = None
    if device.type == "cuda":
        from ..gate.gpu_operations import Card  # imports Triton

        card = Card(str(device))
    series = dict[str, _Series]()
    for name, work in works.items():
        try:
            series[name] = _Series(work, card, (periods or {}).get(name, 1), least)
        except Exception as raised:
            raise Fell(name, raised) from raised
    most = max((one.count for one in series.values()), default=0)
    for lap in range(WARM_UP + LAPS * most):
        for name in [name for name, one in series.items() if not one.full][:: 1 if lap % 2 else -1]:
            try:
                series[name].take(counts=lap >= WARM_UP)
            except Exception as raised:
                raise Fell(name, raised) from raised
    return {name: one.times() for name, one in series.items()}


class _Series:
    """The samples of one work, by the phase of its period.

    A sample that is dropped keeps its place, so later samples have the same phases as without the drop.
    """

    def __init__(self, work: Work, card: Card | None, period: int, least: int) -> None:
        self._sample, self._how, self._replay = _ready(work, card, period)
        self._each, self._number = -(-least // period), -WARM_UP
        self._kept: list[list[float]] = [[] for _ in range(period)]

    @property
    def count(self) -> int:
        """The number of samples that are due."""
        return self._each * len(self._kept)

    @property
    def full(self) -> bool:
        return all(len(one) == self._each for one in self._kept)

    def take(self, counts: bool) -> None:
        kept, seconds = self._kept[self._number % len(self._kept)], self._sample()
        self._number += 1
        if counts and seconds is not None and len(kept) < self._each:
            kept.append(seconds)

    def times(self) -> Times:
        """The samples, with the same number from each phase: that of the phase with the fewest."""
        samples = tuple(one for turn in zip(*self._kept, strict=False) for one in turn)
        return Times(samples, self._how, self.count - len(samples), self._replay)


def _ready(work: Work, card: Card | None, period: int) -> tuple[Callable[[], float | None], str, Work | None]:
    """Return the function that takes one sample (None: the host was late), how it works, and `Times.replay`. Without a
    card the work is called on the CPU.
    """
    if card is None:
        return partial(_called, work), "called", None
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            left = work()
    except Exception:  # work that waits for the host is still timed, and the table marks it
        torch.cuda.synchronize()
        return partial(_between_events, work, None, period), "launched", None

    def replay() -> object:
        graph.replay()
        return left

    return partial(_between_events, graph.replay, card, period), "graph", replay


def _turns(period: int) -> tuple[int, int]:
    """The number of untimed calls before a sample, and before a repeated one; at least one.

    The first number plus the sample has no common factor with the period. The second plus the sample is a whole number
    of periods, so that a repeated sample stays in its phase.
    """
    return (next(turns for turns in count(1) if gcd(turns + 1, period) == 1),
            next(turns for turns in count(1) if (turns + 1) % period == 0))  # fmt: skip


def _between_events(work: Work, card: Card | None, period: int) -> float | None:
    """Time one call between two events; None if the host was late at every try. `card` holds the device back."""
    event: Any = torch.cuda.Event
    start, end = (event(enable_timing=True) for _ in range(2))
    before, again = _turns(period)
    for number in range(TRIES):
        if card is not None:
            card.wait()
            card.hold()
        for _ in range(again if number else before):
            work()
        start.record()
        work()
        end.record()
        if card is None or card.release() is not None:
            end.synchronize()
            return 1e-3 * float(start.elapsed_time(end))
    return None


def _called(work: Work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def less(times: Times, other: Times, units: int) -> Times:
    """Subtract sample by sample, for one unit. If one side lacks samples, the pairs are lacking."""
    pairs = list(zip(times.samples, other.samples, strict=False))
    samples = tuple((whole - part) / units for whole, part in pairs)
    return Times(samples, times.how, times.lacking + len(times.samples) - len(pairs), times.replay)


def of_one(times: Times, units: int) -> Times:
    return replace(times, samples=tuple(one / units for one in times.samples))
