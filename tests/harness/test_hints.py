"""Hints: a context of a right run is spoiled in one way, and the hint says in which.

Leaves out: finding it, and wrong states that follow from a wrong step, which T2d names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from instep.localise.hints import hints
from instep.observe.context import EventContext
from instep.observe.rows import row_spans
from instep.verdict import Comparison, Tier
from instep_reference.contract.engine import Commit, Forward
from instep_reference.contract.place import Place
from support import contexts as m

Z, CORE = Place("trunk", 0, "z"), Place("trunk", 0, "core")


@pytest.fixture(scope="module")
def contexts(tmp_path_factory) -> Sequence[EventContext]:
    opened = m.checkpoint(tmp_path_factory.mktemp("hints"))
    return m.run(opened, m.events_of(opened)[:12])


@pytest.fixture(scope="module")
def packed(contexts) -> EventContext:
    """A forward in which two requests have rows, and one of them several."""
    return next(
        context for context in contexts
        if isinstance(context.event, Forward) and len(row_spans(context, "trunk")) > 1
        and max(span.count for span in row_spans(context, "trunk")) > 3
    )


@pytest.fixture(scope="module")
def commit(contexts) -> EventContext:
    return next(m for m in contexts if isinstance(m.event, Commit) and len(m.event.requests) > 1)


def finding(context: EventContext, place: Place, request: str | None) -> Comparison:
    return Comparison(
        "derived", Tier.DERIVED, context.index, context.kind, place, elements=1, worst=1.0, allowed=0.0,
        request=request,
    )


def of_rows(context: EventContext, change: Callable[[torch.Tensor], torch.Tensor], place: Place = Z) -> tuple[str, ...]:
    """The hints about the request with most rows, after its rows were changed."""
    mine = max(row_spans(context, "trunk"), key=lambda span: span.count)

    def changed(rows: torch.Tensor) -> torch.Tensor:
        end = mine.begin + mine.count
        return torch.cat((rows[: mine.begin], change(rows)[mine.begin : end], rows[end:]))

    return hints(m.with_rows(context, place, changed), finding(context, place, mine.request))


def of_memory(context: EventContext, field: str, change: Callable[[Any], torch.Tensor]) -> tuple[str, ...]:
    assert isinstance(context.event, Commit)
    name = context.event.requests[0]
    spoiled = m.with_state(context, name, lambda state: replace(state, **{
        field: {**getattr(state, field), 0: change(getattr(state, field)[0])}
    }))
    return hints(spoiled, finding(context, Place("trunk", 0, field), name))


@pytest.mark.parametrize(("change", "hint"), [
    (torch.zeros_like, "is all zero"), (lambda z: 2 * z, "is twice what is right"),
    (lambda z: z / 2, "is half of what is right"), (lambda z: -z, "is the opposite of what is right"),
    (lambda z: z.transpose(-1, -2).reshape(z.shape), "matches if transposed"),
    (lambda z: z.reshape(len(z), z.shape[2], z.shape[1]).transpose(-1, -2), "matches if transposed"),
    (lambda z: z.roll(1, 1), "matches if its heads are shifted by one"),
    (lambda z: z.roll(1, 0), "each row equals the one before it"),
    (lambda z: z.roll(-1, 0), "each row equals the one behind it"),
])
def test_what_rows_look_like(packed, change, hint):
    assert hint in of_rows(packed, change)


def test_a_row_of_another_request_is_named(packed):
    mine = max(row_spans(packed, "trunk"), key=lambda span: span.count)
    other = next(span for span in row_spans(packed, "trunk") if span.request != mine.request)

    def change(z: torch.Tensor) -> torch.Tensor:
        changed = z.clone()
        changed[mine.begin + 2] = z[other.begin]
        return changed

    said = of_rows(packed, change, Place("trunk", 2, "normed"))
    assert said == (f'row {mine.begin + 2} equals row {other.begin} of request "{other.request}"',)


def test_noise_looks_like_nothing_and_what_is_right_is_not_looked_at(packed):
    noise = torch.Generator().manual_seed(0)
    assert of_rows(packed, lambda z: z + torch.randn(z.shape, generator=noise).to(z)) == ()
    assert of_rows(packed, lambda z: z) == ()


@pytest.mark.parametrize(("field", "change", "hint"), [
    ("state", lambda s: s.transpose(-1, -2).reshape(s.shape), "matches if transposed"),
    ("state", lambda s: s.roll(1, 0), "matches if its heads are shifted by one"),
    ("state", torch.zeros_like, "is all zero"),
    ("conv", lambda c: c.roll(1, 1), "each column equals the one before it"),
    ("conv", lambda c: c.roll(-1, 1), "each column equals the one behind it"),
])
def test_what_memory_looks_like(commit, field, change, hint):
    assert hint in of_memory(commit, field, change)


def test_whose_memory_it_is_and_from_when(commit):
    name, other = commit.event.requests[:2]
    assert f'holds what belongs to request "{other}"' in of_memory(
        commit, "state", lambda s: commit.subject.after[other].state[0]
    )
    stale = of_memory(commit, "state", lambda s: commit.subject.before[name].state[0])
    assert stale[0] == "holds what it held before the event"


def test_labels_are_compared_exactly(tmp_path):
    opened = m.checkpoint(tmp_path)
    labels = m.run_labels(opened, m.events_of(opened)[:6])
    context = next(each for each in labels if isinstance(each.event, Forward) and len(each.subject.places[Z]) > 3)
    assert of_rows(context, lambda z: z.roll(1, 0)) == ("each row equals the one before it", "row 0 equals row 4")
    assert of_rows(context, lambda z: z + 1) == ()


def test_a_context_that_is_missing_or_another_ones_gives_no_hint(packed):
    found = finding(packed, Z, None)
    assert hints(None, found) == () and hints(packed, replace(found, event=packed.index + 1)) == ()
    assert hints(packed, replace(found, place=Place("chain.7", 0, "query"))) == ()
