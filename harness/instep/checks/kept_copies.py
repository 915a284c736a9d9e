"""T1: a kept copy of a request exists as long as it should, does not change, and is freed.

Copies are made by `save`, `preempt` and `offload`; an offload must keep the bytes. Leaves out: whether a copy is right
(`unchanged_bytes.py` and `exact_labels.py`, when it comes back). If an engine does not show its copies, only the
logical state of a preempted request is compared.
"""

from collections.abc import Iterator

from instep_reference.contract.event_facts import facts, moves, tracked
from instep_reference.contract.kept_copies import Copy
from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from .check_interface import NOWHERE, TellsOnce, said_of

MOVED = Place("extend", AFTER_LAYERS, "pick")  # sorts after every part of a copy that another check may name


class Copies(TellsOnce):
    """Every kept copy, after every event."""

    name = "copies"
    tier = Tier.BITWISE

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        seen, due = context.log.copies, context.expected.copies
        if seen is None:
            yield from self.once(context, "this engine does not show the copies that it keeps")
            return
        said = [f"{_named(copy)} is missing" for copy in sorted(due - seen.shown)]
        said += [f"{_named(copy)} is kept although it was dropped" for copy in sorted(seen.shown - due)]
        parts = dict[Copy, list[str]]()
        for copy, part in seen.changed:
            parts.setdefault(copy, []).append(part)
        moved: Copy = ("offload" if facts(context.event).copy == "to host" else "save", moves(context.event))
        came = parts.pop(moved, []) if moves(context.event) else []
        for under in tracked(context.event, context.truth.answer):  # a commit replaces a prefix in place
            parts.pop(("save", under), None)
        said += [f"{_named(copy)} changed while this event ran: {', '.join(names)}" for copy, names in parts.items()]
        said += [f"{_named(copy)} is gone, but its memory is still held" for copy in sorted(seen.held)]
        said += [f"{_named(copy)} is not in host memory" for copy in sorted(seen.stayed)]
        yield said_of(self, context, NOWHERE, max(seen.elements, 1), said)
        if came:
            said = [f'the copy "{moved[1]}" changed when it moved: {", ".join(came)}']
            yield said_of(self, context, MOVED, 1, said)


def _named(copy: Copy) -> str:
    by, name = copy
    return f'the copy that {by} kept {"of" if by == "preempt" else "as"} "{name}"'
