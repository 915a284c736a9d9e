"""The rules of what is kept: saves and tracked prefixes by name, and requests that were taken out of their slots.

Leaves out: what names a request within its rounds (`event_rules.py`), and which prefixes a forward or a commit reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import Phase

if TYPE_CHECKING:
    from .event_rules import EventRules


def _save(rules: EventRules, event: e.Save, choices: bool) -> None:
    new_names(rules, [event.name], "name")


def new_names(rules: EventRules, names: list[str], field: str) -> None:
    """Names for what is going to be kept."""
    for name in names:
        if not name or name in rules.table.saved or names.count(name) > 1:
            rules._no(field, f'"{name}"', "a name under which nothing is kept")
    if field != "name":
        _room(rules, len(names), field)


def _room(rules: EventRules, more: int, field: str) -> None:
    """Refuse the event if the device has no room for `more` further prefixes."""
    if not rules.table.room_for(more):
        rules._no(field, f"{len(rules.table.on_device())} prefixes on the device and {more} more",
                  f"room for them within capacity.tracked = {rules.table.capacity.tracked}")


def _moves(rules: EventRules, event: e.Offload | e.Fetch | e.Evict, choices: bool) -> None:
    """An offload names what is on the device, a fetch what is on the host."""
    kept, due = rules.table.saved.get(event.name), {e.Offload: False, e.Fetch: True}.get(type(event))
    if kept is None or due not in (None, kept.aside):
        where = {None: "", True: " on the host", False: " on the device"}[due]
        rules._no("name", f'"{event.name}"', f"a name under which something is kept{where}")
    if isinstance(event, e.Fetch):
        _room(rules, int(kept.prefix), "fetch")


def _moved(rules: EventRules, event: e.Offload | e.Fetch) -> None:
    kept = rules.table.saved[event.name]
    rules.table.saved[event.name] = replace(kept, aside=isinstance(event, e.Offload))


def _evicted(rules: EventRules, event: e.Evict) -> None:
    del rules.table.saved[event.name]


def _saved(rules: EventRules, event: e.Save) -> None:
    rules.table.change(event.request, ahead=0)
    rules.table.saved[event.name] = rules.table.live[event.request]


def _load(rules: EventRules, event: e.Load, choices: bool) -> None:
    kept = rules.table.saved.get(event.name)
    if kept is None or event.name not in rules.table.loadable(rules.table.live[event.request].prompt):
        rules._no("name", f'"{event.name}"', "a name under which a request with the same prompt was saved, or a prefix "
                  "of this one's prompt is tracked, and which is on the device")
    rules._pages("load", {event.request: kept.length})


def _loaded(rules: EventRules, event: e.Load) -> None:
    kept = rules.table.saved[event.name]
    rules.table.change(event.request, phase=kept.phase, length=kept.length, root=kept.root, said=kept.said)
    rules.table.grow([(event.request, kept.length)])


def _resume(rules: EventRules, event: e.Resume, choices: bool) -> None:
    rules._free_slot("resume")
    rules._pages("resume", {event.request: rules.table.live[event.request].length})


def _resumed(rules: EventRules, event: e.Resume) -> None:
    standing = rules.table.live[event.request]
    slot = rules.table.free_slot()
    rules.table.live[event.request] = replace(standing, phase=standing.before or Phase.WAITING, before=None, slot=slot)
    rules.table.grow([(event.request, standing.length)])


RULES: dict[type[e.Event], Callable[[EventRules, Any, bool], None]] = {
    e.Save: _save, e.Load: _load, e.Offload: _moves, e.Fetch: _moves, e.Evict: _moves, e.Resume: _resume,
}
ADVANCES: dict[type[e.Event], Callable[[EventRules, Any], None]] = {
    e.Save: _saved, e.Load: _loaded, e.Offload: _moved, e.Fetch: _moved, e.Evict: _evicted, e.Resume: _resumed,
}
