"""The input of a coverage condition: one event, with the state before and after it. Leaves out: conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from instep_reference.contract import engine as e

from ...trace.request_table import RequestTable


@dataclass
class Past:
    """Facts about earlier events.

    accepted  number of drafts accepted last; owned: slots that had an owner; lost: slots that a preemption took
    behind    requests that decoded while the step count was 0; switched: the step count changed
    missed    number of other requests' commits since a request was last in a batch, while its accepted drafts may still
              be pending; batch: requests of the last two commits
    kept      saved states by name -> slot and step count of the save; loads: how often each was loaded
    hits      live requests that have loaded a prefix; accepted_in: prefixes that end with accepted tokens
    fetched   prefixes that were reloaded from the host; evicted: names that were evicted
    """

    accepted: dict[str, int] = field(default_factory=dict)
    owned: set[int] = field(default_factory=set)
    lost: dict[str, int | None] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)
    switched: bool = False
    missed: dict[str, int] = field(default_factory=dict)
    batch: tuple[int, int] = (0, 0)
    kept: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    loads: Counter[str] = field(default_factory=Counter)
    hits: set[str] = field(default_factory=set)
    accepted_in: set[str] = field(default_factory=set)
    fetched: set[str] = field(default_factory=set)
    evicted: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Turn:
    """One event, and the request table before and after it."""

    before: RequestTable
    event: e.AnyEvent
    after: RequestTable
    past: Past
    overlap: bool = False  # whether rounds overlap
    heads: int = 1  # how many MTP layers are in use


Condition = Callable[[Turn], bool]
