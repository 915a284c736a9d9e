"""A host and a GPU in simulated time, for the gate's own clock and card: launches run one after the other.

It takes the place of the clocks of `time`, of events and waiting of `torch.cuda`, and of the card's two kernels.
Leaves out: several streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from instep_speed.gate import gpu_operations
from instep_speed.gate.clock import Clock

STEP = 1e-7  # what it takes to read a clock
LAUNCHED = 2e-6  # what the device takes to begin a kernel of the card, in seconds


class Machine:
    """`host` and `launch` are what work is made of. now: the host's time;  cpu: its computing time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = self.free = 0.0
        self._queue: list[tuple[float, Callable[[float], float | None]]] = []
        patch.setattr(time, "perf_counter", lambda: self.host(STEP).now)
        patch.setattr(time, "process_time", lambda: self.host(STEP).cpu)
        patch.setattr(torch.cuda, "synchronize", lambda *_: self.wait())
        patch.setattr(torch.cuda, "Event", lambda **_: Event(self))
        patch.setattr(gpu_operations, "_hold", Kernel(self._hold))
        patch.setattr(gpu_operations, "_drag", Kernel(self._drag))
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *shape, dtype, **_: zeros(*shape, dtype=dtype))
        self.clock = Clock("cuda")

    def host(self, seconds: float) -> Machine:
        """The host computes."""
        self.now += seconds
        self.cpu += seconds
        self._run()
        return self

    def launch(self, seconds: float) -> None:
        """The device computes, as soon as everything before has ended."""
        self.push(lambda begin: begin + seconds)

    def push(self, work: Callable[[float], float | None]) -> None:
        """work: when it begins -> when it ends; None: that is not known yet"""
        self._queue.append((self.now, work))
        self._run()

    def wait(self) -> None:
        """Until the device has ended; the driver spins meanwhile."""
        while self._queue:  # what is held back ends by itself
            self.host(1e-5)
        self.host(max(0.0, self.free - self.now))

    def _run(self) -> None:
        while self._queue:
            launched, work = self._queue[0]
            ended = work(max(launched, self.free))
            if ended is None:
                return
            self.free = ended
            del self._queue[0]

    def _hold(self, go: torch.Tensor, since: torch.Tensor, longest: int, **_: int) -> None:
        def held(begin: float) -> float | None:
            until = begin + 1e-9 * longest
            if not int(go[0]) and self.now < until:
                return None
            ended = min(max(begin, self.now), until)
            since[0] = round(1e9 * ended)
            return ended

        self.push(held)

    def _drag(self, since: torch.Tensor, part: float, launch: int, **_: int) -> None:
        def dragged(begin: float) -> float:
            begin += LAUNCHED
            return begin + max(0.0, part * (begin - 1e-9 * int(since[0])) - 1e-9 * launch)

        self.push(dragged)


class Event:
    """Of torch.cuda."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._at = machine, -1.0

    def record(self) -> None:
        self._at = -1.0

        def passed(begin: float) -> float:
            self._at = begin
            return begin

        self._machine.push(passed)

    def query(self) -> bool:
        return 0 <= self._at <= self._machine.now

    def elapsed_time(self, later: Event) -> float:
        if not (self.query() and later.query()):
            raise RuntimeError("the device has not come so far")
        return 1e3 * (later._at - self._at)


class Kernel:
    """A function as Triton's decorator returns it: kernel[grid](...)"""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run
