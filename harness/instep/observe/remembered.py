"""Memory that nobody may write into any more: answers that were given, copies of requests that are kept.

Leaves out: what a change means (`checks/`), and pools, in which events may write (`memory.py`).
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.multiprocessing import reductions

from instep_reference.contract.copies import Copy

from .digests import bits
from .event_log import Copies

StorageWeakRef: Any = reductions.StorageWeakRef  # it has no types
SMALL = 1 << 10  # numbers of a tensor that is compared together with others: it takes longer to ask than to answer
MOST = 1 << 28  # bytes of answers that are held, so that their memory serves nothing else; then the oldest are let go


class Answers:
    """Every tensor that was answered, held until the run ends, and its bytes when it was given."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._numbers = most, count()
        self._held: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        self.let_go = 0

    def add(self, names: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in names:
            self._held[next(self._numbers)] = name, tensor, bits(tensor).clone()
        while len(self._held) > len(names) and self._size() > self._most:
            del self._held[next(iter(self._held))]
            self.let_go += 1

    def changed(self) -> tuple[str, ...]:
        """Those that are no longer what they were, each told once."""
        groups = defaultdict[object, list[int]](list)
        for number, (_, tensor, was) in self._held.items():
            groups[was.dtype, was.device, number if tensor.numel() > SMALL else None].append(number)
        changed = []
        for numbers in groups.values():
            now, then = (torch.cat(parts) for parts in zip(*(
                (bits(tensor).reshape(-1), was.reshape(-1))
                for _, tensor, was in (self._held[number] for number in numbers)
            ), strict=True))  # fmt: skip
            changed += [] if torch.equal(now, then) else [n for n in numbers if not _same(*self._held[n][1:])]
        for number in changed:
            name, tensor, was = self._held[number]
            self._held[number] = name, tensor, was.copy_(bits(tensor))
        return tuple(self._held[number][0] for number in sorted(changed))

    def _size(self) -> int:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                    for _, tensor, _ in self._held.values()}  # fmt: skip
        return sum(storages.values())


class KeptCopies:
    """What the subject keeps of requests by `save` and `preempt`: the bytes of each since it was first shown."""

    def __init__(self) -> None:
        self._were: dict[Copy, _Were] = {}

    def look(self, shown: Mapping[Copy, Mapping[str, torch.Tensor]]) -> Copies:
        """After an event."""
        changed, again = [], dict[Copy, _Were]()
        for copy, parts in shown.items():
            were = self._were.get(copy)
            wrong = () if were is None else were.differing(parts)
            changed += [(copy, part) for part in wrong]
            again[copy] = _Were(parts) if were is None or wrong else were
        held = [copy for copy, were in self._were.items() if copy not in shown and were.held()]
        self._were = again
        return Copies(frozenset(shown), sum(were.elements for were in again.values()), tuple(changed), tuple(held))


class _Were:
    """The parts of a copy when it was first shown. What is the whole of its memory is given back with the copy."""

    def __init__(self, parts: Mapping[str, torch.Tensor]) -> None:
        self._parts = {name: bits(tensor).clone() for name, tensor in parts.items()}
        whole = [tensor.untyped_storage() for tensor in parts.values() if tensor.numel()
                 and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()]  # fmt: skip
        self._memory = [StorageWeakRef(storage) for storage in whole]

    @property
    def elements(self) -> int:
        return sum(part.numel() for part in self._parts.values())

    def differing(self, parts: Mapping[str, torch.Tensor]) -> list[str]:
        """The parts that are no longer what they were, or have come or gone."""
        names = dict.fromkeys([*self._parts, *parts])
        return [name for name in names if not (
            name in self._parts and name in parts and _same(parts[name], self._parts[name])
        )]  # fmt: skip

    def held(self) -> bool:
        """Whether somebody still holds memory of it."""
        if not all(memory.expired() for memory in self._memory):
            gc.collect()  # it may hang on a cycle that nobody reaches any more
        return not all(memory.expired() for memory in self._memory)


def _same(tensor: torch.Tensor, was: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are these."""
    now = bits(tensor)
    return now.dtype == was.dtype and torch.equal(now, was)
