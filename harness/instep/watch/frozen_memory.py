"""Memory that may not change any more: earlier answers, and kept copies of requests.

Leaves out: the judgement of changes (`checks/`), and pools, which events may write (`memory_changes.py`).
"""

import gc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

from instep_reference.contract.kept_copies import Copy

from .batched_host_copies import brought
from .digests import bits
from .event_log import Copies

StorageWeakRef: Any = reductions.StorageWeakRef  # untyped
SMALL = 1 << 10  # numbers up to which tensors are compared together, as launches would take longer than the work
RECENT = 64  # events whose answers are compared after every event, more than any rotating buffer has
MOST = 1 << 28  # bytes of answers that are held, so that their memory is not reused; beyond it the oldest are dropped


class _Given(NamedTuple):
    """An answer's name and tensor. line: its live bytes, flat; was: the bytes when it was returned."""

    name: str
    tensor: torch.Tensor
    line: torch.Tensor
    was: torch.Tensor

    def now(self) -> torch.Tensor:
        """The current bytes of the tensor, also after it moved. The address is compared first, which is fast."""
        same = self.tensor.data_ptr() == self.line.data_ptr() and self.tensor.numel() == self.line.numel()
        return self.line if same else _in_line(self.tensor)


class Answers:
    """All tensors of answers, held until the run ends, and their bytes when they were returned.

    Answers of the last events are compared after every event, older ones less often, and all of them after the last
    event. So a run of n events makes about n log n comparisons.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._held: list[list[_Given]] = []  # by event
        self._looked: list[int] = []  # by event: the event of the last comparison
        self._storages: dict[int, list[int]] = {}  # address of a storage -> its bytes, and how many answers are in it
        self._begin = self.let_go = self._size = 0

    def add(self, names: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Add the tensors of one answer."""
        now = len(self._held)
        lines = [_in_line(tensor) for _, tensor in names]
        self._held.append([_Given(*named, line, line.clone()) for named, line in zip(names, lines, strict=True)])
        self._looked.append(now)
        for _, tensor in names:
            self._count(tensor, 1)
        while self._size > self._most and self._begin < now:
            for given in self._held[self._begin]:
                self._count(given.tensor, -1)
                self.let_go += 1
            self._held[self._begin] = []
            self._begin += 1

    def changed(self, *, all_of_them: bool = False) -> tuple[str, ...]:
        """Names of answers that have changed, each once, with the last known event if it is not the previous one."""
        now = len(self._held)
        due = range(self._begin, now) if all_of_them else self._due(now)
        groups = defaultdict[object, list[tuple[int, int]]](list)
        for event in due:
            for number, given in enumerate(self._held[event]):
                alone = (event, number) if given.tensor.numel() > SMALL else None
                groups[given.was.dtype, given.was.device, alone].append((event, number))
        changed = []
        for numbers in groups.values():
            many = [self._held[event][number] for event, number in numbers]
            if not torch.equal(torch.cat([given.now() for given in many]), torch.cat([given.was for given in many])):
                changed += [at for at, given in zip(numbers, many, strict=True)
                            if not torch.equal(given.now(), given.was)]  # fmt: skip
        told = []
        for event, number in sorted(changed):
            given = self._held[event][number]
            given.was.copy_(given.now())
            looked = self._looked[event]
            since = "" if now - looked <= 1 else f" (at some event after {looked - 1})"
            told.append(f"{given.name}{since}")
        for event in due:
            self._looked[event] = now
        return tuple(told)

    def _due(self, now: int) -> list[int]:
        """The events to compare: the last ones always, twice as old ones every second time, and so on."""
        due, size = list(range(max(self._begin, now - RECENT), now)), RECENT
        while size < now - self._begin:
            size *= 2
            if now % (size // RECENT) == 0:
                due += range(max(self._begin, now - size), max(self._begin, now - size // 2))
        return sorted(due)

    def _count(self, tensor: torch.Tensor, by: int) -> None:
        storage = tensor.untyped_storage()
        entry = self._storages.setdefault(storage.data_ptr(), [storage.nbytes(), 0])
        self._size += entry[0] * (entry[1] == 0)
        entry[1] += by
        if not entry[1]:
            self._size -= entry[0]
            del self._storages[storage.data_ptr()]


class KeptCopies:
    """The subject's copies of requests, and the bytes of each when it was first shown. A move keeps the bytes."""

    def __init__(self) -> None:
        self._were: dict[Copy, _Were] = {}
        self._taken: dict[Copy, _Were] = {}  # by the other engine, since the last look

    def left(self, name: str) -> None:
        """Note that another engine has taken a copy: another one may have its name now, and its memory must be free."""
        if (were := self._were.pop(("offload", name), None)) is not None:
            self._taken["offload", name] = were

    def look(self, shown: Mapping[Copy, Mapping[str, torch.Tensor]]) -> Copies:
        """Compare the copies after an event."""
        changed, again = [], dict[Copy, _Were]()
        tensors = [tensor for parts in shown.values() for tensor in parts.values()]
        here = iter(brought(tensors))
        for copy, parts in shown.items():
            were, now = self._were.get(copy) or self._were.get(_before(copy)), {name: next(here) for name in parts}
            wrong = () if were is None else were.differing(now)
            changed += [(copy, part) for part in wrong]
            again[copy] = _Were(parts, now) if copy not in self._were or wrong else self._were[copy]
        gone = [*self._taken.items(), *(one for one in self._were.items() if one[0] not in shown)]
        held = [copy for copy, were in gone if were.held()]
        self._were, self._taken = again, {}
        stayed = [copy for copy, parts in shown.items() if copy[0] == "offload"
                  and any(part.device.type != "cpu" for part in parts.values())]  # fmt: skip
        return Copies(frozenset(shown), sum(were.elements for were in again.values()), tuple(changed), tuple(held),
                      tuple(stayed))


def _before(copy: Copy) -> Copy:
    """The identity of a copy before it moved at this event."""
    by, name = copy
    return ("offload" if by == "save" else "save" if by == "offload" else by), name


class _Were:
    """The parts of a copy when it was first shown. A part that fills its memory must be freed with the copy."""

    def __init__(self, parts: Mapping[str, torch.Tensor], here: Mapping[str, torch.Tensor]) -> None:
        """here: the same parts on the host."""
        self._parts = {name: bits(tensor).clone() for name, tensor in here.items()}
        whole = [tensor.untyped_storage() for tensor in parts.values() if tensor.numel()
                 and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()]  # fmt: skip
        self._memory = [StorageWeakRef(storage) for storage in whole]

    @property
    def elements(self) -> int:
        return sum(part.numel() for part in self._parts.values())

    def differing(self, parts: Mapping[str, torch.Tensor]) -> list[str]:
        """The names of parts that changed, appeared or disappeared."""
        gone = [f"{name} is missing" for name in self._parts if name not in parts]
        return gone + [name for name, part in parts.items()
                       if name not in self._parts or not _same(part, self._parts[name])]  # fmt: skip

    def held(self) -> bool:
        """Whether anything still holds memory of the copy."""
        if not all(memory.expired() for memory in self._memory):
            gc.collect()  # an unreachable reference cycle may hold it
        return not all(memory.expired() for memory in self._memory)


def _in_line(tensor: torch.Tensor) -> torch.Tensor:
    """[n]: a view if the tensor is contiguous, or else a copy."""
    return bits(tensor).reshape(-1)


def _same(tensor: torch.Tensor, was: torch.Tensor) -> bool:
    """Whether a tensor has these bytes."""
    now = bits(tensor).to(was.device)
    return now.dtype == was.dtype and torch.equal(now, was)
