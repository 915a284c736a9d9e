"""Streams for copies beside the stream of the launches: a kernel waits for no copy that it does not read.

Two events order both sides: a copy runs behind a *moment* of the launches, and launches wait for the moment at which a
copy has run. Leaves out: what is copied, and which moments those are (`to_device.py`, `to_host.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, Protocol

import torch

Moment = torch.cuda.Event | None  # None: nothing runs later than its call, so every moment is over


class Lane(Protocol):
    """Copies one after the other, in the order in which they are given."""

    def now(self) -> Moment:
        """The moment at which all that was launched up to now has run."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Moment) -> Moment:
        """Copy once that moment is over -> the moment at which it has run. The host side is pinned memory."""
        ...

    def wait(self, moment: Moment) -> None:
        """What is launched from now on runs behind the moment. The host does not wait."""
        ...


class AtOnce:
    """The lane of a device without streams."""

    def now(self) -> Moment:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Moment) -> Moment:
        target.copy_(source)
        return None

    def wait(self, moment: Moment) -> None:
        pass


class Beside:
    """A CUDA stream of its own. The launches are those of the stream that is current at a call."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def now(self) -> Moment:
        return _recorded(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Moment) -> Moment:
        if behind is not None:
            self._stream.wait_event(behind)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for side in (target, source):
            if side.is_cuda:  # whoever lets go of it: its memory is given to nobody before the copy has run
                side.record_stream(self._stream)
        return _recorded(self._stream)

    def wait(self, moment: Moment) -> None:
        if moment is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(moment)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    moment = torch.cuda.Event()  # type: ignore[no-untyped-call]
    moment.record(stream)
    return moment


@cache
def lane(device: torch.device, way: Literal["in", "out"]) -> Lane:
    """One lane per direction: what goes in shall not wait for a result that goes out, and that is not there yet."""
    return Beside(device) if device.type == "cuda" else AtOnce()
