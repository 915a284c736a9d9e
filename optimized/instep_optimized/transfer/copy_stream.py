"""Streams for copies beside the stream of the launches: a kernel waits for no copy that it does not read.

Two events order both sides: a copy runs behind an event of the launches, and launches wait for the event behind a
copy. All engines of a device share its two streams. So where two engines launch on streams of their own, the copy of
one may wait for the launches of the other. Leaves out: what is copied, and behind which launches (`to_device.py`,
`to_host.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Literal, Protocol

import torch

Event = torch.cuda.Event | None  # None: nothing runs later than its call, so there is nothing to wait for
Direction = Literal["in", "out"]


class CopyStream(Protocol):
    """Copies one after the other, in the order in which they are given."""

    def now(self) -> Event:
        """An event behind all that was launched up to now."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Event) -> Event:
        """Copy behind that event -> the event behind the copy. The host side is pinned memory."""
        ...

    def wait(self, event: Event) -> None:
        """What is launched from now on runs behind the event. The host does not wait."""
        ...


class Immediate:
    """Of a device without streams."""

    def now(self) -> Event:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Event) -> Event:
        target.copy_(source)
        return None

    def wait(self, event: Event) -> None:
        pass


class SideStream:
    """A CUDA stream of its own. The launches are those of the stream that is current at a call."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def now(self) -> Event:
        return _recorded(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Event) -> Event:
        if behind is not None:
            self._stream.wait_event(behind)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for side in (target, source):
            if side.is_cuda:  # whoever lets go of it: its memory is given to nobody before the copy has run
                side.record_stream(self._stream)
        return _recorded(self._stream)

    def wait(self, event: Event) -> None:
        if event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def copy_stream(device: torch.device, direction: Direction) -> CopyStream:
    """One per direction: what goes in shall not wait for a result that goes out, and that is not there yet."""
    if device.type != "cuda":
        return Immediate()
    # "cuda" without a number is the device that is current at this call.
    return _side_stream(torch.cuda.current_device() if device.index is None else device.index, direction)


@cache
def _side_stream(index: int, direction: Direction) -> SideStream:
    return SideStream(torch.device("cuda", index))
