"""Entries kept under names: saved states and tracked prefixes, on the device or on the host.

An entry moves whole: all its tensors are copied. The copies start at once, and no call waits: on the device they are
in the stream after the work that filled the entry. Only a read of an entry on the host waits.
Leaves out: which entry moves or is evicted, which the events decide, and the parts of an entry
(`memory/saved_states.py`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from instep_reference.contract.errors import OutOfCapacity
from instep_reference.contract.kept_copies import Copy

from .memory.component_cells import cells
from .memory.saved_states import Kept, copied, copied_alone, copy_layers
from .request_record import Request
from .transfer.to_host import Arrival
from .transfer_between_engines import Courier

Entry = tuple[Request, Kept]
OFFLOADS = cells(block=copy_layers, rows=copy_layers, last=copy_layers)


class Aside(NamedTuple):
    """An entry on the host; it is complete when the copies have arrived."""

    request: Request
    kept: Kept
    arrival: Arrival


class Tiers:
    """here: entries on the device, by name; aside: entries on the host. most: maximum number of prefixes in `here`.

    courier: the wire to another engine, in place of a host memory of its own: an entry that was offloaded is in both
    slots: the track slot of each prefix in `here`, and of names that a commit may need; empty if there is no maximum
    """

    def __init__(
        self, here: dict[str, Entry], device: torch.device, most: int | None, courier: Courier | None = None
    ) -> None:
        self.here = here
        self._device, self._most, self._courier = device, most, courier
        self.aside: dict[str, Aside] = {} if courier is None else courier.home
        self.slots: dict[str, int] = {}

    def must_have_room(self, prefixes: int) -> None:
        """Refuse an event whose new or fetched prefixes do not fit, before anything has changed."""
        there = sum(kept.final is not None for _, kept in self.here.values())
        if self._most is not None and prefixes and there + prefixes > self._most:
            raise OutOfCapacity(f"{there} prefixes are on the device; there is room for {self._most}")

    def claim(self, names: Sequence[str]) -> None:
        """Take the lowest free track slot for each name. There must be room."""
        for name in names if self._most is not None else ():
            taken = set(self.slots.values())
            self.slots[name] = next(slot for slot in range(1, len(taken) + 2) if slot not in taken)

    def release(self, names: Sequence[str]) -> None:
        """Free the track slots of names under which nothing was kept."""
        for name in names:
            if name not in self.here:
                self.slots.pop(name, None)

    def offload(self, name: str) -> None:
        request, kept = self.here.pop(name)
        self.release([name])
        memory = {part: move(kept[part], _to_host) for part, move in OFFLOADS.items()}
        self.aside[name] = Aside(request, copied_alone(kept, memory, _to_host), Arrival(self._device))
        if self._courier is not None:
            self._courier.give(name)

    def fetch(self, name: str) -> None:
        request, kept = self.aside[name][:2] if self._courier is None else self._courier.take(name)
        self.must_have_room(int(kept.final is not None))
        self.here[name] = request, copied(kept, partial(_moved, self._device))
        self.claim([name] if kept.final is not None else [])
        if self._courier is not None:
            self._courier.taken(name)
        else:
            del self.aside[name]

    @property
    def fetchable(self) -> Mapping[str, Any]:
        """The entries that may be fetched."""
        return self.aside if self._courier is None else self._courier.wire

    def evict(self, name: str) -> None:
        if self.here.pop(name, None) is None:
            del self.aside[name]
        if self._courier is not None:
            self._courier.wire.pop(name, None)
        self.release([name])

    def shown(self, name: str) -> Entry:
        """Return an entry for inspection, wherever it is."""
        if name in self.here:
            return self.here[name]
        request, kept, arrival = self.aside[name]
        arrival.wait()
        return request, kept

    def copies(self) -> dict[Copy, Kept]:
        """Return every entry, by its tier and name."""
        return {("save", name): kept for name, (_, kept) in self.here.items()} | {
            ("offload", name): self.shown(name)[1] for name in self.aside}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # A copy from a GPU is asynchronous only into pinned memory.
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return there.copy_(tensor, non_blocking=True)


def _moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)
