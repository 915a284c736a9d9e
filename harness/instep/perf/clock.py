"""Two clocks for one piece of work: how long the user waits, and how long the process computes.

Leaves out: repetition and statistics (`pairs.py`).

wall  the time that the user waits. On a shared machine it includes the time that other processes took.
cpu   the process's own computing time. The CPU engine computes on one thread and waits for nothing, so this is the wall
      time without the other processes. It resolves a few percent where the wall time does not; it does not see waiting.
On a CPU both are judged, and either may find a slow-down. On a GPU the process mostly waits, so only wall is judged.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import NamedTuple

import torch

CLOCKS = ("wall", "cpu")
IDLE = 101  # readings of an idle device, of which the median is taken


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
        self._idle = 0.0  # seconds that a reading takes where nothing is left to wait for
        if self._cuda:
            readings = [self.read().wall for _ in range(IDLE)]
            self._idle = statistics.median(later - earlier for earlier, later in pairwise(readings))

    def read(self) -> Reading:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return Reading(time.perf_counter(), time.process_time())

    def drag(self, begun: Reading, part: float) -> None:
        """Go on computing until what began then has taken so much longer: a true slow-down, by the surest clock."""
        now = self.read()
        clock, since, spent = ((time.perf_counter, begun.wall, now.wall - begun.wall) if self._cuda
                               else (time.process_time, begun.cpu, now.cpu - begun.cpu))  # fmt: skip
        # Whoever measures reads again behind this. On a GPU that takes a good part of what is to be dragged.
        until = since + (1 + part) * spent - self._idle
        before, now_is = clock(), clock()
        while now_is + (now_is - before) / 2 < until:  # the end falls half a reading of the clock before or behind
            before, now_is = now_is, clock()


def judged(device: str) -> tuple[str, ...]:
    """The clocks that count on this device."""
    return CLOCKS[:1] if device.startswith("cuda") else CLOCKS
