"""The clocks for one piece of work: how long the user waits, how long the process computes, how long the device does.

Leaves out: repetition and statistics (`pairs.py`), and what a GPU does for them (`card.py`).

wall    the time that the user waits. On a shared machine it includes the time that other processes took.
cpu     the process's own computing time. It resolves a few percent where the wall time does not; it does not see
        waiting. The CPU engine computes on one thread and waits for nothing, so there this is the wall time without
        the other processes. On a GPU it is what the host does until everything is launched. To wait for the device
        behind that would count as computing, as the driver spins, and is left out.
device  a GPU's own time. Work is launched while the device is held back, so no gap is in it in which the device waits
        for the host. It sees nothing of the host, and so nothing of who shares it. Streams beside the current one
        count as far as this one waits for them.
All that a device has are judged, on a CPU the first two, and any of them may find a slow-down.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

ON_HOST = ("wall", "cpu")
CLOCKS = (*ON_HOST, "device")

Work = Callable[[], object]


class Reading(NamedTuple):
    """What the clocks showed, in seconds; NaN: could not be read."""

    wall: float = 0.0
    cpu: float = 0.0
    device: float = 0.0

    def plus(self, more: Reading) -> Reading:
        return Reading(*(one + other for one, other in zip(self, more, strict=True)))


NOTHING = Reading()


class Device(Protocol):
    """A device beside the host; `card.Card` says what the methods do."""

    def wait(self) -> None: ...
    def hold(self, drag: float = 0.0) -> None: ...
    def release(self) -> float | None: ...


class Clock:
    """Times one piece of work: `clock.ways[0](work, drag)`. No clock stops before all work on the device has ended.

    ways   that see each a part of the clocks; the others stand at 0. The work is played once for each of them
    clocks that somebody asks for, empty: all. A way that sees none of them is left out
    drag   by which part the work is to take longer by each clock: a true slow-down
    """

    def __init__(self, device: str, card: Device | None = None, clocks: Collection[str] = ()) -> None:
        if card is None and device.startswith("cuda"):
            from .card import Card

            card = Card(device)
        self._card = card
        ways: tuple[Callable[[Work, float], Reading], ...] = (self._by_host, self._by_device)
        asked = clocks or CLOCKS
        seen = (any(clock in asked for clock in ON_HOST), card is not None and "device" in asked)
        self.ways = tuple(way for way, wanted in zip(ways, seen, strict=True) if wanted)

    def _by_host(self, work: Work, drag: float = 0.0) -> Reading:
        """Wall and cpu. What is dragged goes on computing on the host, until the clock has gone so much further."""
        self._wait()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        computed = time.process_time() - cpu
        self._wait()
        waited = time.perf_counter() - wall
        if drag:
            begun = time.process_time()
            computed += _go_on(time.process_time, begun + drag * computed) - begun
            if self._card is None:  # computing is all that it does
                waited = time.perf_counter() - wall
            else:
                waited = _go_on(time.perf_counter, wall + (1 + drag) * waited) - wall
        return Reading(wall=waited, cpu=computed)

    def _by_device(self, work: Work, drag: float = 0.0) -> Reading:
        """The device's own time. What is dragged goes on computing there, behind the work."""
        assert self._card is not None
        self._card.wait()
        self._card.hold(drag)
        work()
        taken = self._card.release()
        return Reading(device=math.nan if taken is None else taken)

    def _wait(self) -> None:
        if self._card is not None:
            self._card.wait()


def _go_on(clock: Callable[[], float], until: float) -> float:
    """Compute until this clock shows so much -> what it shows in the end."""
    before, now = clock(), clock()
    while now + (now - before) / 2 < until:  # the end falls half a reading of the clock before or behind
        before, now = now, clock()
    return now


def judged(device: str) -> tuple[str, ...]:
    """The clocks that count on this device."""
    return CLOCKS if device.startswith("cuda") else ON_HOST
