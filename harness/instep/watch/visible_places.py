"""Visibility: the places and memory that a subject shows at one event, and therefore what is judged.

An engine of the contract shows everything. An engine driven through callbacks (`verbs.py`) shows only their results.
Checks look here before they compare; invisible data are reported as not judged and never invented.
Leaves out: the engine that calls the callbacks (`engine_from_verbs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instep_reference.contract.place_names import Place

if TYPE_CHECKING:
    from ..player import Side

# Callbacks, or keys of the result of `step` -> the comparisons that need them, by tier, in the order of the report.
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
PROPAGATED = ("hidden", "final", "logits")  # components in which accumulated errors show
OWN = "lengths, roots, accepted counts and requested step counts (T0), which the harness keeps itself"
NEVER = "op contracts, graphs and host reads (T0)"


@dataclass(frozen=True)
class Shown:
    """The visible data of the subject at one event; the default is everything.

    whole     it serves the contract itself, so the fields below except `inside` have no meaning; if not, the harness
              computes lengths, roots, counts and requested step counts, which are compared with nothing
    feeds     the entries of `FEEDS` that it has
    places    the places that it has shown so far and whose rows are the trace's at this event
    exact     slots and pages are in the trace's order, so their numbers are compared; if not, up to a one-to-one map
    hidden    request -> the reason why its memory is not visible at this event
    gone      requests that have left the run and are not judged
    rebuilt   requests whose tokens ran again at this event, so their memory is as close as a free run, not equal
    last      requests of which only the last final row is visible
    unserved  whether the engine did not serve the event, as it names only requests that have left
    `said`    sentences about differences between the trace and the way the event was served
    inside    components inside a fused op, which are invisible; also for an engine of the contract
    refuses   it declares that it refuses illegal events, so these are played
    state_layers  the GDN layers whose memory is shown; None: all
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
    state_layers: frozenset[int] | None = None

    def place(self, place: Place) -> bool:
        """Whether the subject must show a place."""
        return place.component not in self.inside and (self.whole or place in self.places)

    def has(self, feed: str) -> bool:
        return self.whole or feed in self.feeds

    def rows(self, place: Place, request: str) -> slice:
        """The visible rows of a request at a place."""
        return slice(-1 if place.component == "final" and request in self.last else 0, None)

    def computed(self, side: Side) -> bool:
        """Whether any visible data were computed by the subject at this event."""
        if self.whole:
            return bool(side.places)
        rows = any(place.component in PROPAGATED for place in side.places)
        return rows or any(left.conv or left.keys for left in side.after.values())

    def memory(self, request: str) -> bool:
        """Whether a request's memory after this event is visible, and unchanged except for writes of the event."""
        return request not in self.hidden

    def layer(self, place: Place) -> bool:
        """Whether the memory of a place is shown, as far as its layer decides this."""
        return self.state_layers is None or place.component not in ("conv", "state") or place.layer in self.state_layers

    def not_judged(self) -> tuple[tuple[str, str], ...]:
        """Comparisons that are not made in this run, with the callback that each needs; "" if none would help."""
        if self.whole:
            return ()
        missing = tuple((feed, what) for feed, what in FEEDS.items() if feed not in self.feeds)
        return (*missing, ("", OWN), ("", NEVER))


WHOLE = Shown()
