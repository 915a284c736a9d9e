"""Two clocks for one piece of work: how long the user waits, and how long the process computes.

Leaves out: repetition and statistics (`pairs.py`).

wall  the time that the user waits. On a shared machine it includes the time that other processes took.
cpu   the process's own computing time. The CPU engine computes on one thread and waits for nothing, so this is the wall
      time without the other processes. It resolves a few percent where the wall time does not; it does not see waiting.
On a CPU both are judged, and either may find a slow-down. On a GPU the process mostly waits, so only wall is judged.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

CLOCKS = ("wall", "cpu")


class Reading(NamedTuple):
    """Readings of both clocks, in seconds."""

    wall: float
    cpu: float

    def __sub__(self, earlier: Reading) -> Reading:
        return Reading(self.wall - earlier.wall, self.cpu - earlier.cpu)

    def plus(self, more: Reading) -> Reading:
        return Reading(self.wall + more.wall, self.cpu + more.cpu)


NOTHING = Reading(0.0, 0.0)


class Clock:
    """Reads both clocks after all work on the device has ended."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._device = device

    def read(self) -> Reading:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return Reading(time.perf_counter(), time.process_time())

    def drag(self, begun: Reading, part: float) -> None:
        """Go on computing until what began then has taken so much longer: a true slow-down, by the surest clock."""
        now = self.read()
        clock, since, spent, reading = time.process_time, begun.cpu, now.cpu - begun.cpu, 0.0
        if self._cuda:
            # Whoever measures reads again behind this. That takes a good part of what is to be dragged: how much is
            # seen here, since it differs from one minute to the next where others share the device.
            reading = self.read().wall - now.wall
            clock, since, spent = time.perf_counter, begun.wall, now.wall - begun.wall
        until = since + (1 + part) * spent - reading
        before, now_is = clock(), clock()
        while now_is + (now_is - before) / 2 < until:  # the end falls half a reading of the clock before or behind
            before, now_is = now_is, clock()


def judged(device: str) -> tuple[str, ...]:
    """The clocks that count on this device."""
    return CLOCKS[:1] if device.startswith("cuda") else CLOCKS
