"""Engines driven through verbs that show their memory, pools by slot and KV by page: a right one, and wrong ones.

Found by the harness as `support.wrong.pooled_engines:NAME`. The memory of a request is read from the
pools, except KV entries. Leaves out: engines that show none (`engines.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from instep_reference.contract.engine import Commit, Event, Forward, Load, Region, Resume
from instep_reference.gdn import GdnMemory
from support.wrong.engines import Keeping

PAGE = 4  # tokens of a page


class Slotted(Keeping):
    """Slots in the order of the room, taken with the first token; conv windows and states lie in pools."""

    kv = None  # type: ignore[assignment]
    order = True

    def __init__(self, model: Path, room: Any, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        self.room, self.slot = room, dict[str, int]()
        config = self.weights.config
        self.gdn = config.recurrent
        heads = config.value_heads, config.key_dim, config.value_dim
        channels = 2 * config.key_heads * config.key_dim + config.value_heads * config.value_dim
        units = max(room.slots) + 1
        self.pools = {layer: (torch.zeros(units, channels, config.conv_width - 1), torch.zeros(units, *heads))
                      for layer in self.gdn}  # fmt: skip
        self.declares = {"order": self.order}

    # -- slots

    def taken(self, names: Iterable[str]) -> dict[str, int]:
        """Slots once these requests have one, too."""
        slots = dict(self.slot)
        for name in names:
            free = (slot for slot in self.room.slots if slot not in slots.values())
            slots.setdefault(name, next(free, 0))
        return slots

    def written(self, event: Event) -> list[str]:
        """The requests whose memory an event writes."""
        match event:
            case Forward(rows=rows):
                return [row.request for row in rows if row.kind != "verify"]
            case Commit(requests=names):
                return [*names]
            case Load(request=name) | Resume(request=name):
                return [name]
        return []

    def write(self, name: str) -> None:
        for layer in self.gdn:
            kept = self.memory[name][layer]
            assert isinstance(kept, GdnMemory)
            for pool, tensor in zip(self.pools[layer], (kept.window, kept.state), strict=True):
                pool[self.slot[name]] = tensor

    # -- verbs

    def step(self, rows: Sequence[Any]) -> Mapping[str, Mapping[str, torch.Tensor]]:
        self.slot = self.taken(row.request for row in rows)
        found = super().step(rows)
        for row in rows:
            if row.kind != "verify":
                self.write(row.request)
        return found

    def keep(self, request: str, length: int) -> None:
        super().keep(request, length)
        self.write(request)

    def load(self, request: str, name: str) -> None:
        self.slot = self.taken([request])
        super().load(request, name)
        self.write(request)

    def resume(self, request: str) -> None:
        self.slot = self.taken([request])
        super().resume(request)
        self.write(request)

    def preempt(self, request: str) -> None:
        super().preempt(request)
        self.slot.pop(request)

    def drop(self, request: str) -> None:
        super().drop(request)
        self.slot.pop(request, None)

    def state(self, request: str) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        at = self.slot[request]
        return {layer: (conv[at], state[at]) for layer, (conv, state) in self.pools.items()}

    # -- memory

    def slots(self) -> dict[str, int]:
        return dict(self.slot)

    def regions(self) -> list[Region]:
        return [Region(name, layer, "slot", pool) for layer, pair in self.pools.items()
                for name, pool in zip(("conv", "state"), pair, strict=True)]  # fmt: skip

    def may_change(self, event: Event) -> dict[str, set[int]]:
        names = self.written(event)
        slots = self.taken(names)
        return {name: {slots[request] for request in names} for name in ("conv", "state")}


class Paged(Keeping):
    """Number slots and pages independently of the trace; take pages from the last one on, as tokens come."""

    def __init__(self, model: Path, room: Any, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        self.free, self.mine = list(range(90)), dict[str, list[int]]()

    def slots(self) -> dict[str, int]:
        return {name: 70 - number for number, name in enumerate(self.memory)}

    def pages(self) -> dict[str, list[int]]:
        for name in [*self.mine]:
            if name not in self.memory:
                self.free += self.mine.pop(name)
        for name, memory in self.memory.items():
            mine = self.mine.setdefault(name, [])
            length = next(len(one.keys) for one in memory if not isinstance(one, GdnMemory))
            while len(mine) * PAGE < length:
                mine.append(self.free.pop())
        return {name: [*mine] for name, mine in self.mine.items()}


def made(kind: Any, **otherwise: Any) -> Any:
    """A maker of such engines with these attributes in the place of theirs."""
    spoiled = type("Spoiled", (kind,), otherwise)

    def make(model: Path, room: Any, *, dtype: torch.dtype, **told: Any) -> Any:
        return spoiled(model, room, dtype)

    return make


def _after(verb: str, then: Any, kind: Any = Slotted) -> Any:
    """A verb, followed by another action."""

    def both(self: Any, *given: Any) -> Any:
        found = getattr(kind, verb)(self, *given)
        return then(self, found)

    return {verb: both}


def _stray(self: Any, found: Any) -> Any:
    """Change a number in a slot that no request owns."""
    self.pools[self.gdn[0]][1][max(self.room.slots)] += 1
    return found


def _neighbour(self: Any, found: Any) -> Any:
    """The slot of the request that came first."""
    self.pools[self.gdn[0]][1][next(iter(self.slot.values()))] *= 1.001
    return found


def _swapped(self: Any, found: Any) -> Any:
    """Two requests, each under the slot of the other."""
    names = [*found]
    return found if len(names) < 2 else {**found, names[0]: found[names[1]], names[1]: found[names[0]]}


def _moved(self: Any, found: Any) -> Any:
    """The table of the first request turns around once it has three pages."""
    return {name: mine[::-1] if len(mine) > 2 else mine for name, mine in found.items()}


def _one_for_two(self: Any, found: Any) -> Any:
    return found if len(found) < 2 else dict.fromkeys(found, min(found.values()))


slotted, paged = made(Slotted), made(Paged)
numbered = made(Slotted, order=False)
stray, neighbour = made(Slotted, **_after("step", _stray)), made(Slotted, **_after("keep", _neighbour))
swapped = made(Slotted, **_after("slots", _swapped))
wide = made(Slotted, may_change=lambda self, event: {
    name: {*self.room.slots} if self.written(event) else set() for name in ("conv", "state")
})
silent = made(Slotted, may_change=lambda self, event: {})
unnamed = made(Slotted, may_change=lambda self, event: {"states": {1}})
shared_pool = made(Slotted, regions=lambda self: [
    Region(name, layer, "slot", self.pools[layer][1]) for layer in self.gdn for name in ("conv", "state")
])
one_slot = made(Paged, **_after("slots", _one_for_two, Paged))
no_slot = made(Paged, **_after("slots", lambda self, found: dict([*found.items()][1:]), Paged))
dead_slot = made(Paged, **_after("slots", lambda self, found: {**found, "nobody": 3}, Paged))
shared_page = made(Paged, **_after(
    "pages", lambda self, found: {name: [5, *mine[1:]] for name, mine in found.items()}, Paged))
moved_pages = made(Paged, **_after("pages", _moved, Paged))
no_table = made(Paged, **_after("pages", lambda self, found: dict([*found.items()][1:]), Paged))
twice = made(Paged, **_after("pages", lambda self, found: {n: [*m, *m[:1]] for n, m in found.items()}, Paged))
