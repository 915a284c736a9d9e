"""What a subject shows at one event, and from that: what is judged, what is not, and why.

An engine of the contract shows everything. One that is led by a few verbs (`verbs.py`) shows what these give, and a
check asks here before it compares: what is not shown is told as not judged, and is never made up.
Leaves out: the engine that asks the verbs (`derived.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep_reference.contract.place import Place

if TYPE_CHECKING:
    from ..player import Side

# Verbs, or keys of what `step` gives -> what they feed, by tier. In the order in which it is told.
FEEDS: Mapping[str, str] = {
    "logits": "logits (T3), own choices and acceptance (T4)",
    "final": "final hidden rows (T3)",
    "state": "conv windows and recurrent states: their content (T2d), their error (T3), unexpected changes (T1)",
    "kv": "KV entries (T3), unexpected changes (T1)",
    "draft": "own drafts except the first of a round (T4)",
    "layers": "hidden rows of each layer (T3)",
    "watch": "every layer and op by itself (T2)",
    "slots": "the owner of each slot (T0)",
    "pages": "the owner of each page (T0)",
    "regions": "bytes of pools, poison, leaks, aliasing (T1), their sizes (T0)",
}
PROPAGATED = ("hidden", "final", "logits")  # components in which comes out what was computed so far
OWN = "lengths, roots, accepted counts and requested step counts (T0), which the harness keeps itself"
NEVER = "op contracts, graphs and host reads (T0)"


@dataclass(frozen=True)
class Shown:
    """What one event shows of the subject; the default is everything.

    whole     it serves the contract itself, so nothing below but `inside` has a meaning; else lengths, roots, counts
              and wishes are the harness's own words, and are compared with nothing
    feeds     those of `FEEDS` that it has
    places    the places that it has shown so far, and whose rows are the trace's at this event
    exact     slots and pages are in the trace's order, so their numbers are compared; else up to a one-to-one map
    hidden    request -> why nothing of its memory is shown at this event
    gone      requests that have left the run: nothing of them is judged
    rebuilt   requests whose tokens ran once more at this event: what they hold is as near as a free run, not the same
              bits
    last      requests of whose final rows the last one alone is shown
    unserved  whether nobody served the event: it names requests that have left, and no other
    said      sentences about how this event was served otherwise than it stands in the trace
    inside    components that stay inside a fused op, so nobody can show them; also of an engine of the contract
    refuses   it says that it refuses illegal events, so it is offered them
    """

    whole: bool = True
    feeds: frozenset[str] = frozenset()
    places: frozenset[Place] = frozenset()
    exact: bool = True
    hidden: Mapping[str, str] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    rebuilt: frozenset[str] = frozenset()
    last: frozenset[str] = frozenset()
    unserved: bool = False
    said: tuple[str, ...] = ()
    inside: frozenset[str] = frozenset()
    refuses: bool = True

    def place(self, place: Place) -> bool:
        """Whether the subject has to show it."""
        return place.component not in self.inside and (self.whole or place in self.places)

    def has(self, feed: str) -> bool:
        return self.whole or feed in self.feeds

    def rows(self, place: Place, request: str) -> slice:
        """Which of a request's rows of a place are shown."""
        return slice(-1 if place.component == "final" and request in self.last else 0, None)

    def computed(self, side: Side) -> bool:
        """Whether anything is shown that the subject computed at this event."""
        if self.whole:
            return bool(side.places)
        rows = any(place.component in PROPAGATED for place in side.places)
        return rows or any(left.conv or left.keys for left in side.after.values())

    def memory(self, request: str) -> bool:
        """Whether what a request holds after this event is shown, and is what it was but for what the event wrote."""
        return request not in self.hidden

    def not_judged(self) -> tuple[tuple[str, str], ...]:
        """What is not judged in this run: what would have to be shown, and what it would feed; "": nothing feeds it."""
        if self.whole:
            return ()
        missing = tuple((feed, what) for feed, what in FEEDS.items() if feed not in self.feeds)
        return (*missing, ("", OWN), ("", NEVER))


WHOLE = Shown()
