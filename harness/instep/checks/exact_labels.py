"""T0 for a subject that moves labels: every place and every element of memory has exactly the right label.

Leaves out: owners (`trace_bookkeeping.py`) and unowned bytes (`unchanged_bytes.py`).
"""

from collections.abc import Iterator
from functools import reduce
from zlib import crc32

import torch

from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.engine import RequestState
from instep_reference.contract.event_facts import restores, tracks
from instep_reference.contract.place_names import Place
from instep_reference.label_mixing import MASK, mix

from ..finding_problem import Problem
from ..verdict import Comparison, Tier
from ..watch.event_context import EventContext, LastForward
from ..watch.facts_for_later_events import last_forward
from ..watch.memory_changes import pattern
from ..watch.rows_by_request import whose
from .check_interface import compared, held, verb
from .prefix_findings import FINAL, of_prefix
from .unchanged_bytes import came_back, kept_of


class Labels:
    """Compare all labels with those of the `ledger` run of the same trace."""

    name = "labels"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        for place, truth in context.truth.places.items():
            if truth.numel():
                yield self._rows(context, place, truth)
        for name, state in context.truth.after.items():
            yield from self._memory(context, name, state, context.subject.after.get(name),
                                    name in context.expected.flying)  # fmt: skip
        for under, name in tracks(context.event).items():
            if under in context.truth.tracked:
                yield from (of_prefix(under, one) for one in self._prefix(context, name, under))

    def _rows(self, context: EventContext, place: Place, truth: torch.Tensor) -> Comparison:
        found = context.subject.places.get(place)
        wrong = _differing(found, truth)
        request, problem = None, None
        if wrong.any():
            row = int(wrong.flatten(1).any(1).nonzero()[0]) if wrong.dim() > 1 else int(wrong.nonzero()[0])
            request = whose(context, place, row)
            if found is None or found.shape != truth.shape:
                problem = Problem("missing", "has no such rows")
            else:
                problem = Problem("differs", _row_sentence(found, truth, row))
        return self._comparison(context, place, truth.numel(), int(wrong.sum()), request, problem)

    def _prefix(self, context: EventContext, name: str, under: str) -> Iterator[Comparison]:
        right, found = context.truth.tracked[under], context.subject.tracked.get(under)
        yield from self._memory(context, name, right, found, False)
        assert right.final is not None, "it is a prefix"
        wrong = int(_differing(None if found is None else found.final, right.final).sum())
        said = f"its final row is wrong in {wrong} of {right.final.numel()} elements" if wrong else ""
        yield self._comparison(context, FINAL, right.final.numel(), wrong, name, Problem.of(said))

    def _memory(
        self, context: EventContext, name: str, truth: RequestState, subject: RequestState | None, in_flight: bool
    ) -> Iterator[Comparison]:
        seen = {} if subject is None else dict(subject.parts())
        for place, right in truth.parts():
            if not right.numel() or (in_flight and place.component in BLOCKS):
                continue
            found = seen.get(place)
            wrong = _differing(found, right)
            problem = self._problem(context, name, place, found, right, wrong) if wrong.any() else None
            result = self._comparison(context, place, right.numel(), int(wrong.sum()), name, problem)
            yield came_back(context, result) if _came_back(context, name, place, found) else result

    def _problem(
        self, context: EventContext, name: str, place: Place, found: torch.Tensor | None, right: torch.Tensor,
        wrong: torch.Tensor,
    ) -> Problem:
        """The problem of a memory, with the content that its labels reveal."""
        if found is None or found.shape != right.shape:
            has = "nothing" if found is None else tuple(found.shape)
            return Problem("missing", f"has {has}; expected {tuple(right.shape)}")
        partly = int(wrong.sum())
        if partly < wrong.numel():
            first_at = tuple(wrong.nonzero()[0].tolist())
            which = f"{partly} of {wrong.numel()} elements {verb(partly, 'is', 'are')} wrong"
            return Problem("differs", f"{which}, the first at {first_at}")
        first = int(found.flatten()[0]) & MASK
        chain = states_of_window(last_forward(context), name, place.layer) if place.component == "state" else []
        if first in chain:
            at, taken = chain.index(first), chain.index(int(right.flatten()[0]) & MASK)
            tree = last_forward(context).parents[name]  # type: ignore[union-attr]  # there is a chain, so there is one
            if at and tree != tuple(range(-1, len(tree) - 1)):
                clause = f"holds the state after node {at - 1}; node {taken - 1} is the last accepted one"
                return Problem("identified", clause)
            return Problem("identified", held("state", at, taken, "accepted").says)
        for other, state in context.truth.after.items():
            its = dict(state.parts()).get(place)
            if its is not None and place.component in ("keys", "values"):
                its = its[: len(found)]  # a prefix has that many rows
            if other != name and its is not None and its.shape == found.shape and torch.equal(its, found.cpu()):
                return Problem("identified", f'holds what belongs to request "{other}"')
        poison = context.log.poison
        if poison is not None and bool((found == pattern(poison, found.dtype)).all()):
            return Problem("poison", "is poison: memory that was never written")
        if not found.any():
            return Problem("identified", "is empty")
        return Problem("unidentified", "holds labels that do not belong here")

    def _comparison(
        self, context: EventContext, place: Place, elements: int, wrong: int, request: str | None,
        problem: Problem | None,
    ) -> Comparison:
        return compared(self, context, place, elements, wrong, problem, request=request)


def _came_back(context: EventContext, name: str, place: Place, found: torch.Tensor | None) -> bool:
    """Whether this event brings the request back with other bits than its copy has."""
    kept = kept_of(context) if restores(context.event) == name else None
    were = None if kept is None else dict(kept.state.parts()).get(place)
    return were is not None and (found is None or not torch.equal(were, found))


def folded(layer: int, chain: int, k: int, v: int, log_decay: int, write: int, recalls: bool) -> int:
    """The chain of a trunk layer with one more token and its update, which recalls the chain before it, or nothing."""
    own = crc32(f"trunk.{layer}.update".encode("ascii"))
    return mix(chain, mix(mix(k, log_decay), reduce(mix, (chain if recalls else 0, k, v, log_decay, write, own))))


def states_of_window(forward: LastForward | None, name: str, layer: int) -> list[int]:
    """The truth's states before a request's window and after each of its nodes, to recognise a wrong one.

    In a chain these are the states after 0, 1, .. tokens.
    """
    span = None if forward is None else forward.spans.get(name)
    if forward is None or span is None or span.kind != "verify":
        return []
    chain = [int(forward.truth.before[name].state[layer].flatten()[0]) & MASK]
    places, recalls = forward.truth.places, Place("trunk", layer, "beta") in forward.truth.places
    parts = [places[Place("trunk", layer, part)] for part in ("k", "v", "log_decay", "beta" if recalls else "write")]
    for row, parent in enumerate(forward.parents[name], span.begin):
        k, v, log_decay, write = (int(part[row].flatten()[0]) & MASK for part in parts)
        chain.append(folded(layer, chain[parent + 1], k, v, log_decay, write, recalls))
    return chain


def _differing(found: torch.Tensor | None, right: torch.Tensor) -> torch.Tensor:
    """Whether each element differs; all of them do if there is no tensor of that shape."""
    if found is None or found.shape != right.shape:
        return torch.ones_like(right, dtype=torch.bool)
    return found.to(right.device) != right


def _row_sentence(found: torch.Tensor, truth: torch.Tensor, row: int) -> str:
    """How much of a wrong row is wrong, and whether it has the labels of another row."""
    wrong = int(_differing(found[row], truth[row]).sum())
    equal = [other for other in range(len(truth)) if torch.equal(found[row].cpu(), truth[other])]
    stands = f": it holds row {equal[0]}" if equal else ""
    return f"row {row} is wrong in {wrong} of {truth[row].numel()} elements{stands}"
