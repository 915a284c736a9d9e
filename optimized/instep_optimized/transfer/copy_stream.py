"""Copy streams that run alongside the launch stream: a kernel waits only for copies that it reads.

Two events order both sides: a copy runs after an event of the launches, and launches wait for the event after a copy.
All engines of a device share its two copy streams. So if two engines launch on different streams, the copy of one may
wait for the launches of the other. Leaves out: the copies themselves, and the launches they follow (`to_device.py`,
`to_host.py`).
"""

from functools import cache
from typing import Literal, Protocol

import torch

Event = torch.cuda.Event | None  # None: nothing runs later than its call, so there is nothing to wait for
Direction = Literal["in", "out"]


class CopyStream(Protocol):
    """Runs copies one after the other, in the order in which they are given."""

    def now(self) -> Event:
        """Record an event after everything that was launched up to now."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Event) -> Event:
        """Copy after that event -> the event after the copy. The host side is pinned memory."""
        ...

    def wait(self, event: Event) -> None:
        """Make all later launches run after the event. The host does not wait."""
        ...


class Immediate:
    """The copy stream of a device without streams."""

    def now(self) -> Event:
        return None

    def copy(self, target: torch.Tensor, source: torch.Tensor, behind: Event) -> Event:
        target.copy_(source)
        return None

    def wait(self, event: Event) -> None:
        pass


class SideStream:
    """A dedicated CUDA stream. The launches are those of the stream that is current at a call."""

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
            if side.is_cuda:  # if it is freed, the allocator must not reuse its memory before the copy has run
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
    """Return the stream of a direction: an upload must not wait for a result that is on its way to the host."""
    if device.type != "cuda":
        return Immediate()
    # "cuda" without a number means the current device.
    return _side_stream(torch.cuda.current_device() if device.index is None else device.index, direction)


@cache
def _side_stream(index: int, direction: Direction) -> SideStream:
    return SideStream(torch.device("cuda", index))
