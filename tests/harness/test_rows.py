"""Whose rows of a place these are, also where only some rows are asked for logits.

Leaves out: what stands in the rows (`test_checks.py`).
"""

from __future__ import annotations

import pytest

from instep.observe.moment import Moment
from instep.observe.rows import rows, shares, whose
from instep_reference.contract.engine import Forward
from instep_reference.contract.place import AFTER_LAYERS, Place
from support.moments import checkpoint, events_of, run_labels

LOGITS, FINAL = (Place("trunk", AFTER_LAYERS, component) for component in ("logits", "final"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Moment:
    """A forward with an unfinished prompt, which asks for nothing, in front of rows that do ask."""
    opened = checkpoint(tmp_path_factory.mktemp("rows"))
    for moment in run_labels(opened, events_of(opened)):
        told = shares(moment, "trunk")
        if isinstance(moment.event, Forward) and any(one.asked != one.count for one in told[:-1]):
            return moment
    raise AssertionError("no such forward in this run")


@pytest.mark.parametrize("place", [FINAL, LOGITS], ids=["every row", "rows that are asked for"])
def test_spans_part_the_rows_among_the_requests(mixed: Moment, place: Place) -> None:
    count = len(mixed.truth.places[place])
    spans = [(share.request, *share.span(place)) for share in shares(mixed, "trunk")]
    owners = [name for name, begin, its in spans for _ in range(begin, begin + its)]
    assert [whose(mixed, place, row) for row in range(count)] == owners and len(owners) == count
    assert whose(mixed, place, count) is None
    for share in shares(mixed, "trunk"):
        begin, its = share.span(place)
        found = rows(mixed.truth, place, share)
        assert found is not None and found.equal(mixed.truth.places[place][begin : begin + its])


def test_rows_that_are_asked_for_stand_elsewhere_than_the_others(mixed: Moment) -> None:
    spans = [(share.span(FINAL), share.span(LOGITS)) for share in shares(mixed, "trunk")]
    assert any(every != asked for every, asked in spans)
