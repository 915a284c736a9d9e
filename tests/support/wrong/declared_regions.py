"""Right engines that declare too much of their memory as theirs, or too little, and write there.

Leaves out: the computation, which is right. Found by the harness as `support.wrong.declared_regions:NAME`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from instep_optimized import OptimizedEngine
from instep_reference.contract.engine import Commit, Committed, Event, Region
from instep_reference.contract.pool_meaning import Meaning, Positions
from support.wrong.subjects import maker


class _Wide(OptimizedEngine):
    """`table` of a right one; at every commit `units` of the state pools are written."""

    table: "Callable[[_Wide, Event, dict[str, set[int]]], dict[str, set[int]]]" = lambda self, event, own: own
    shown: Callable[[Region], Region] = lambda self, region: region
    units: tuple[int, ...] = ()

    def may_change(self, event: Event) -> dict[str, set[int]]:
        return self.table(event, super().may_change(event))

    def regions(self) -> list[Region]:
        return [self.shown(region) for region in super().regions()]

    def commit(self, requests: Any, accepted: Any = None) -> Committed:
        for region in super().regions():
            if region.name == "state":
                region.units[list(self.units)] = 7.0
        return super().commit(requests, accepted)


def _every_unit(self: _Wide, event: Event, own: dict[str, set[int]]) -> dict[str, set[int]]:
    return {region.name: set(range(len(region.units))) for region in OptimizedEngine.regions(self)}


def _all_pages(self: _Wide, event: Event, own: dict[str, set[int]]) -> dict[str, set[int]]:
    """All pages of the named requests, also committed ones."""
    pages = {page for name in getattr(event, "requests", ()) for page in self.pages()[name]}
    return {**own, "keys": pages} if isinstance(event, Commit) else own


def _somebody_elses(self: _Wide, event: Event, own: dict[str, set[int]]) -> dict[str, set[int]]:
    """A commit may write the state of every request in the run."""
    return {**own, "state": set(self.slots().values())} if isinstance(event, Commit) else own


def _scratch(*units: int) -> Callable[[Any, Region], Region]:
    return lambda self, region: replace(region, scratch=frozenset(units)) if region.name == "state" else region


EVERYTHING = maker(_Wide, table=_every_unit, units=(0, 2))  # the reserved slot, and one that is free
BEHIND_THE_TABLE = maker(_Wide, units=(0, 2))
OLD_PAGES = maker(_Wide, table=_all_pages)
OTHERS = maker(_Wide, table=_somebody_elses)
SCRATCH = maker(_Wide, shown=_scratch(0), units=(0,))
OWNED_SCRATCH = maker(_Wide, shown=_scratch(0, 1), units=(0,))
UNDECLARED = maker(_Wide, shown=lambda self, region: replace(region, means=None))
UNKNOWN = maker(_Wide, table=lambda self, event, own: {**own, "states": {1}})
NO_UNITS = maker(
    _Wide, shown=lambda self, region: replace(region, units=region.units[:0], gaps=None, scratch=frozenset())
)
EMPTY = maker(_Wide, regions=lambda self: [], may_change=lambda self, event: {})


class _Hiding(_Wide):
    """Shows its states until the first commit, at which they are written."""

    hidden = False

    def regions(self) -> list[Region]:
        return [region for region in super().regions() if not (self.hidden and region.name == "state")]

    def may_change(self, event: Event) -> dict[str, set[int]]:
        self.hidden |= isinstance(event, Commit)
        return super().may_change(event)


HIDING = maker(_Hiding, units=(0, 2))


def _states(**changed: Any) -> Any:
    """An engine whose pools of states are declared so."""
    return maker(_Wide, shown=lambda self, region: replace(region, **changed) if region.name == "state" else region)


BY_PAIR = _states(by="pair")
ANOTHER_AXIS = _states(means=Meaning("state", positions=Positions("column", axis=9)))
NO_COMPONENT = _states(means=Meaning("memory"))
SCRATCH_BEYOND = _states(scratch=frozenset({10**6}))
SCRATCH_NONE = _states(scratch=None)
