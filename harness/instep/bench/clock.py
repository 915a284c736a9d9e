"""Times, interleaved: every arm once, then every arm again in the reverse order; and the rates of the machine.

On a card a sample is the replay of a captured graph, between two events on the device. Right before it the same work
runs without being timed, and the device is held back until the host has launched both. So the sample finds the cache as
this work leaves it, and not as another arm does, whose stores may still have to be written back (8 us of 73, LOG.md);
and the host has no part in it: a sample for which the host was late is taken again, or left out. Work that cannot be
captured is launched each time, and nothing holds the device back, for such work may wait for it. On a CPU a sample is a
call.

Work may store something only every few turns, as often as its period says. Samples are a constant number of turns
apart, which has no factor in common with the period. So as many samples as the period has turns see each of its phases
once. Leaves out: what is timed, and for how long.
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
    from ..perf.card import Card

Work = Callable[[], object]
WARM_UP = 3  # samples that are not counted
SAMPLES = 20  # at least: so many that each phase of a period has as many
TRIES = 3  # of a sample for which the host was late: the device did not wait so long
LAPS = 3  # times as many as there are samples: so long they are taken, where some are left out
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
    """Seconds of one unit of an arm. how: graph, launched, or called.

    lacking  how many samples are left out, because the host was late; each phase of the period lacks as many
    replay   of a graph: one more turn of the very thing that was timed -> what it left
    """

    samples: tuple[float, ...]
    how: str
    lacking: int = 0
    replay: Work | None = None

    def data(self) -> dict[str, object]:
        """As a row tells it. Without a sample there is no time."""
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
    every = timed(works, device, 5 if card else 3)
    if any(not times.samples for times in every.values()):
        raise Unsupported("timing here: the host was late for all samples of a large tensor, by 20 ms each")
    found = {name: float(np.median(times.samples)) for name, times in every.items()}
    size, read = 4.0 * count, min(found[f"read {number}"] for number in range(PLACES))
    return Rates(2 * size / found["copy"], size / read, 2.0 * side**3 / found["product"])


class Fell(Exception):
    """What a work raised while it was timed."""

    def __init__(self, name: str, raised: Exception) -> None:
        super().__init__(name, raised)
        self.name, self.raised = name, raised


def timed(
    works: Mapping[str, Work], device: torch.device, least: int = SAMPLES, periods: Mapping[str, int] | None = None,
) -> dict[str, Times]:
    """`least` samples of every work, or a few more, taken in turn. One that raises ends all, with `Fell`.

    periods: of works that repeat what they do only after so many turns
    """
    card = None
    if device.type == "cuda":
        from ..perf.card import Card  # which needs Triton

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
    """The samples of one work, by the phase of its period, as they are taken.

    What is taken and not kept keeps its place: the samples behind it are of the phases of which they would have been.
    """

    def __init__(self, work: Work, card: Card | None, period: int, least: int) -> None:
        self._sample, self._how, self._replay = _ready(work, card, period)
        self._each, self._number = -(-least // period), -WARM_UP
        self._kept: list[list[float]] = [[] for _ in range(period)]

    @property
    def count(self) -> int:
        """How many samples are due."""
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
        """As many of each phase as of the one that has the fewest."""
        samples = tuple(one for turn in zip(*self._kept, strict=False) for one in turn)
        return Times(samples, self._how, self.count - len(samples), self._replay)


def _ready(work: Work, card: Card | None, period: int) -> tuple[Callable[[], float | None], str, Work | None]:
    """What takes one sample (None: the host was late), how it does, and `Times.replay`. card: None is a CPU"""
    if card is None:
        return partial(_called, work), "called", None
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            left = work()
    except Exception:  # it waits for the host; it is timed all the same, and the table says so
        torch.cuda.synchronize()
        return partial(_between_events, work, None, period), "launched", None

    def replay() -> object:
        graph.replay()
        return left

    return partial(_between_events, graph.replay, card, period), "graph", replay


def _turns(period: int) -> tuple[int, int]:
    """Turns before a sample, and before one that is taken again; one at least.

    With the sample itself the first has no factor in common with the period. The second makes whole periods, so that a
    sample stays in its phase however often it is taken.
    """
    return (next(turns for turns in count(1) if gcd(turns + 1, period) == 1),
            next(turns for turns in count(1) if (turns + 1) % period == 0))  # fmt: skip


def _between_events(work: Work, card: Card | None, period: int) -> float | None:
    """None: the host was late, each time. card: what holds the device back, of work that does not wait for it"""
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
    """Sample by sample: the one without the other, of one unit. Where one lacks samples, so many pairs are lacking."""
    pairs = list(zip(times.samples, other.samples, strict=False))
    samples = tuple((whole - part) / units for whole, part in pairs)
    return Times(samples, times.how, times.lacking + len(times.samples) - len(pairs), times.replay)


def of_one(times: Times, units: int) -> Times:
    return replace(times, samples=tuple(one / units for one in times.samples))
