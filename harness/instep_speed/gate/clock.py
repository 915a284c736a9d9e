"""The clocks for one piece of work: how long the user waits, the process computes, and the device computes.

Leaves out: repetition and statistics (`statistics.py`), and their operations on a GPU (`gpu_operations.py`).

wall    the time that the user waits. On a shared machine it includes the time that other processes took.
cpu     the process's own computing time. It resolves a few percent where the wall time does not; it does not see
        waiting. The CPU engine computes on one thread and waits for nothing, so there this is the wall time without
        the other processes. On a GPU it is the host's work until everything is launched. Waiting for the device after
        that is excluded, because the driver spins and it would count as computing.
device  a GPU's own time. Work is launched while the device is held back, so the device never waits for the host. It
        includes nothing of the host, and so nothing of the host's other processes. Other streams count as far as the
        current one waits for them.
All clocks of a device are judged, on a CPU the first two, and each of them may find a slow-down.
"""

import math
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

ON_HOST = ("wall", "cpu")
CLOCKS = (*ON_HOST, "device")

Work = Callable[[], object]


class Reading(NamedTuple):
    """The readings of the clocks in seconds; NaN: could not be read."""

    wall: float = 0.0
    cpu: float = 0.0
    device: float = 0.0

    def plus(self, more: "Reading") -> "Reading":
        return Reading(*(one + other for one, other in zip(self, more, strict=True)))


NOTHING = Reading()


class Device(Protocol):
    """A device next to the host; see `card.Card` for the methods."""

    def wait(self) -> None: ...
    def hold(self, drag: float = 0.0) -> None: ...
    def release(self) -> float | None: ...


class Clock:
    """Times one piece of work: `clock.ways[0](work, drag)`. No clock stops before all work on the device has ended.

    ways    functions that each read some of the clocks, and 0 for the others. The work is played once for each of them
    clocks  the requested clocks; empty: all. A way that reads none of them is dropped
    drag    part by which the work takes longer on each clock: a true slow-down
    """

    def __init__(self, device: str, card: Device | None = None, clocks: Collection[str] = ()) -> None:
        if card is None and device.startswith("cuda"):
            from .gpu_operations import Card

            card = Card(device)
        self._card = card
        ways: tuple[Callable[[Work, float], Reading], ...] = (self._by_host, self._by_device)
        asked = clocks or CLOCKS
        seen = (any(clock in asked for clock in ON_HOST), card is not None and "device" in asked)
        self.ways = tuple(way for way, wanted in zip(ways, seen, strict=True) if wanted)

    def _by_host(self, work: Work, drag: float = 0.0) -> Reading:
        """Read wall and cpu. A drag computes on the host until the clock has advanced by that part."""
        self._wait()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        computed = time.process_time() - cpu
        self._wait()
        waited = time.perf_counter() - wall
        if drag:
            begun = time.process_time()
            computed += _go_on(time.process_time, begun + drag * computed) - begun
            if self._card is None:  # computing is all of its work
                waited = time.perf_counter() - wall
            else:
                waited = _go_on(time.perf_counter, wall + (1 + drag) * waited) - wall
        return Reading(wall=waited, cpu=computed)

    def _by_device(self, work: Work, drag: float = 0.0) -> Reading:
        """Read the device's time. A drag computes on the device after the work."""
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
    """Compute until this clock reads `until`; return its last reading."""
    before, now = clock(), clock()
    while now + (now - before) / 2 < until:  # end within half a reading of the clock
        before, now = now, clock()
    return now


def judged(device: str) -> tuple[str, ...]:
    """The clocks that count on this device."""
    return CLOCKS if device.startswith("cuda") else ON_HOST
