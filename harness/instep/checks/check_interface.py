"""The interface of checks, and helpers to make their comparisons. A check reads one event context.

Leaves out: relations, which vary a whole run, and the result of a run (`verdict.py`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from instep_reference.contract.place_names import STAGE_LEVEL, Place

from ..finding_problem import Explained, NamedMistake, Problem, WrongContent, names_of
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext
from ..watch.memory_changes import pattern

# The place of findings that belong to no layer: owners, slots and pages, configurations, graphs, host reads.
NOWHERE = Place("trunk", STAGE_LEVEL, "length")
TOLD = 3  # mistakes that are printed if several fit equally well
LISTED = 8  # numbers of units that are written out
COUNT = NamedMistake("another-count", "holds the {} {}")


class Check(Protocol):
    """Yields one `Comparison` per named thing, and one `Skipped` with a reason per thing that it did not compare.

    A check is made for one run and sees every event context of the run in order. Facts about earlier events are in the
    context (`context.earlier`); the check itself keeps only counters, such as which reasons it has reported.
    """

    @property
    def name(self) -> str: ...

    @property
    def tier(self) -> Tier: ...

    def __call__(self, context: EventContext) -> Iterable[Comparison | Skipped]: ...


@runtime_checkable
class Remembering(Protocol):
    """A check that can take in an event without judging it."""

    def remember(self, context: EventContext) -> None: ...


class TellsOnce:
    """A check that reports once in a run why it compares nothing, or less. `told` are the reported reasons."""

    name: str

    def __init__(self) -> None:
        self.told = set[str]()

    def once(self, context: EventContext, reason: str) -> Iterator[Skipped]:
        if reason not in self.told:
            self.told.add(reason)
            yield Skipped(self.name, context.index, reason)


def compared(
    check: Check, context: EventContext, place: Place, elements: int, worst: float, problem: Problem | None = None, *,
    allowed: float = 0.0, request: str | None = None, **more: Any,
) -> Comparison:
    """One thing that a check compared. more: further fields; the slot is the request's, unless it is given."""
    more.setdefault("slot", slot_of(context, request))
    return Comparison(check.name, check.tier, context.index, context.kind, place, elements, float(worst), allowed,
                      request=request, problem=problem, **more)  # fmt: skip


def exact(
    check: Check, context: EventContext, place: Place, found: object, right: object, says: str,
    request: str | None = None,
) -> Comparison:
    """Compare two plain values. `says` is the sentence about the found one ("length is {}")."""
    wrong, poison = found != right, context.log.poison
    if poison is not None and isinstance(found, int) and found == pattern(poison, torch.int64):
        found = "poison, the pattern of memory that was never written"
    problem = Problem("differs", f"{says.format(found)}; expected {right}") if wrong else None
    elements = max(len(right), 1) if isinstance(right, Sized) else 1
    return compared(check, context, place, elements, wrong, problem, request=request)


def in_batch(
    check: Check, context: EventContext, place: Place, found: Mapping[str, Any], right: Mapping[str, Any], says: str,
    before: Mapping[str, int] | None = None,
) -> Iterator[Comparison]:
    """Compare a value per request of a batch, and recognise a batch in another order.

    before: lengths before the event; then their growth is what may be in another order
    """
    wrong = [name for name in right if found.get(name) != right[name]]
    grown = [
        {name: side[name] - before[name] if before else side[name] for name in wrong} for side in (found, right)
        if before is None or all(isinstance(side.get(name), int) and name in before for name in wrong)
    ]
    ours, due = grown if len(grown) == 2 else ({}, {})
    owners = {value: name for name, value in due.items()}
    exchanged = len(owners) == len(wrong) and set(ours.values()) == owners.keys()  # never one alone, as it is wrong
    for name in right:
        result = exact(check, context, place, found.get(name), right[name], says, name)
        if result.problem is not None and exchanged:
            whose = f'request "{owners[ours[name]]}"'
            mistake = f"it grew by the tokens of {whose}" if before else f"it is the one of {whose}"
            clause = f"{result.problem.clause}: {mistake}, so the requests of the batch are in another order"
            result = replace(result, problem=Problem("identified", clause))
        yield result


def said_of(
    check: Check, context: EventContext, place: Place, elements: int, said: Sequence[str], request: str | None = None,
    rank: int | None = None,
) -> Comparison:
    """A comparison of `elements` things with a sentence for each that is wrong."""
    return compared(check, context, place, elements, len(said), Problem.of("; ".join(said)), request=request, rank=rank)


def counted(count: int, what: str = "token", many: str | None = None) -> str:
    """1 token, 2 tokens"""
    return f"{count} {what}" if count == 1 else f"{count} {many or f'{what}s'}"


def verb(count: int, one: str, many: str) -> str:
    """The form of a verb after a count: 1 of 3 differs, 2 of 3 differ"""
    return one if count == 1 else many


def at_end(count: int, what: str = "token", end: str = "last") -> str:
    """last token, last 2 tokens, first position"""
    return f"{end} {what}" if count == 1 else f"{end} {count} {what}s"


def listed(what: str, numbers: Collection[int]) -> str:
    """slot 3; slots 0, 2, 5 and 40 more"""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return f"{what} {ordered[0]}"
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return f"{what}s {', '.join(map(str, ordered[:LISTED]))}{more}"


def held(what: str, count: int, right: int, done: str) -> WrongContent:
    """holds the state after 2 tokens; 3 tokens were accepted"""
    after = f"after {counted(count)}" if count else "from before the step"
    details = f"{after}; {counted(right)} {verb(right, 'was', 'were')} {done}"
    return COUNT.known(what, details, state=("state", details))


def shared_by_all(mine: Sequence[WrongContent], every: Iterable[Sequence[WrongContent]]) -> Explained | None:
    """The known mistakes of a request that all wrong requests of the event share; the first few are printed.

    None without any: a mistake that fits one request alone may fit it through coincidence.
    """
    names = set.intersection(*(set(names_of(fitting)) for fitting in every))
    fitting = [one for one in mine if one.name in names]
    says = [one.says for one in fitting]
    if len(says) > TOLD:
        says[TOLD:] = [counted(len(says) - TOLD, "other mistake")]
    return Explained.any_of(fitting, ", or ".join(says)) if fitting else None


def slot_of(context: EventContext, request: str | None) -> int | None:
    """The slot of a request in the trace after the event, or before the event if the request has left."""
    expected = context.expected
    return None if request is None else expected.slots_after.get(request, expected.slots_before.get(request))


def op_at(op: str, place: Place | None) -> str:
    """op gdn (trunk.2.core)"""
    if place is None:
        return f"op {op}"
    layer = f".{place.layer}" if 0 <= place.layer < 1 << 16 else ""
    return f"op {op} ({place.stage}{layer}.{place.component})"
