"""Squeeze the launches of each event onto a few multiprocessors: a kernel spins on all others.

Leaves out: when (`stress.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (device code: Triton's types are not Python's)

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

from instep_reference.contract.engine import Event

from ..player import Observer, Side
from ..verdict import Stressed

FREE_SMS = 4  # multiprocessors that are left
LIMIT_S = 0.5  # after which the kernel ends by itself
WARPS, PER_SM = 32, 2  # 2,048 threads fill a multiprocessor
LINGERS_NS = 100_000  # for which a program stays where nothing may spin, so that all others are placed elsewhere
BEGINS_S = 1.0  # in which all programs must run
NAP = tl.constexpr("{ .reg .b32 x; mov.b32 x, $1; nanosleep.u32 2000; mov.u32 $0, x; }")
WAITING, FREE, SPINS, TOLD, LATE = range(5)  # what a program is doing


class Squeeze(Observer):
    """Leave a few multiprocessors to the launches of each event: a kernel spins on all others.

    It begins before the event and ends after the device has run it. A wait for the whole device would wait for the
    kernel, too, so `torch.cuda.synchronize` ends it first, and a replay of a CUDA graph begins it again: a capture has
    such a wait. Any other wait for the device lasts `LIMIT_S` at most.
    """

    def __init__(self, device: torch.device, spin: Any = None) -> None:
        """spin: spins from `begin` to `end`, which returns whether it spun until then"""
        self._device, self._spin = device, Spin(device, FREE_SMS, LIMIT_S) if spin is None else spin
        self._events = self._whole = self._left = 0
        self._serves = self._spins = False
        self._stack = ExitStack()

    def __enter__(self) -> None:
        graph = torch.cuda.CUDAGraph
        self._synchronize = torch.cuda.synchronize
        self._stack.enter_context(patch.object(torch.cuda, "synchronize", self._lifted))
        self._stack.enter_context(patch.object(graph, "replay", self._squeezed(graph.replay)))

    def __exit__(self, *failed: object) -> None:
        self._stack.close()
        self._lift()

    def before(self, event: Event) -> None:
        self._serves = True
        self._begin()
        self._events += 1

    def after(self, event: Event, side: Side) -> Side:
        torch.cuda.current_stream(self._device).synchronize()
        self._serves = False
        self._whole += self._lift()
        return side

    def failed(self, event: Event, error: BaseException) -> None:
        self._serves = False
        self._lift()

    def result(self) -> Stressed:
        short = self._events - self._whole
        ended = f"; in {short:,} of them it ended earlier, at a wait for the whole device or after {LIMIT_S:g} s"
        says = f"{self._events:,} events on {self._left} of {self._spin.count} multiprocessors{ended * bool(short)}"
        return Stressed(self._whole, says, "no event ran on a few multiprocessors until its end")

    def _begin(self) -> None:
        self._left = max(self._left, self._spin.begin())
        self._spins = True

    def _squeezed(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def replay(graph: Any) -> Any:
            if self._serves and not self._spins:
                self._begin()
            return act(graph)

        return replay

    def _lift(self) -> bool:
        spins, self._spins = self._spins, False
        try:
            return spins and bool(self._spin.end())
        except RuntimeError:  # the engine has broken the card, and its own exception is the finding
            return False

    def _lifted(self, *given: Any, **named: Any) -> None:
        self._lift()
        self._synchronize(*given, **named)


class Spin:
    """Spins from `begin` to `end`, next to everything that is launched on other streams.

    count: multiprocessors of the card
    """

    def __init__(self, device: torch.device, free: int, limit_s: float) -> None:
        self._device, self._free, self._limit = device, free, int(limit_s * 1e9)
        self.count = int(torch.cuda.get_device_properties(device).multi_processor_count)
        self._stream, self._copies = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._go = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        self._state = torch.zeros(PER_SM * self.count, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize(device)
        self.begin()  # compiles the kernel
        self.end()

    def begin(self) -> int:
        """Begin to spin, and return the number of multiprocessors that are left."""
        self._state.zero_()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._go.zero_()
            _spin[(len(self._state),)](self._go, self._state, self._free, self._limit, LINGERS_NS, num_warps=WARPS)
        end = time.monotonic() + BEGINS_S
        while bool((self._state == WAITING).any()) and time.monotonic() < end:
            pass
        return self.count - int((self._state == SPINS).sum()) // PER_SM

    def end(self) -> bool:
        """End it, and return whether it spun until now."""
        with torch.cuda.stream(self._copies):
            self._go.copy_(self._one, non_blocking=True)  # a copy needs no multiprocessor
        self._stream.synchronize()
        self._copies.synchronize()  # or the copy might end the next one
        return not bool((self._state == LATE).any())


@triton.jit
def _spin(go, state, free, longest, lingers):
    at, begun = tl.program_id(0), globaltimer()
    here = smid() >= free
    tl.store(state + at, tl.where(here, 2, 1))
    until, told = begun + tl.where(here, longest, lingers), 0
    now = begun
    while (told == 0) & (now < until):
        told = tl.load(go, volatile=True)
        tl.inline_asm_elementwise(NAP, "=r,r", [told], tl.int32, False, 1)
        now = globaltimer()
    tl.store(state + at, tl.where(here, tl.where(told != 0, 3, 4), 1))
