"""Assign the rows of a place to requests, also if logits are computed for some rows only.

Leaves out: the contents of the rows (`test_checks.py`).
"""

import pytest

from instep.watch.event_context import EventContext
from instep.watch.rows_by_request import row_spans, rows, whose
from instep_reference.contract.engine import Forward
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from support.inputs.check_contexts import checkpoint, events_of, run_labels

LOGITS, FINAL = (Place("trunk", AFTER_LAYERS, component) for component in ("logits", "final"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> EventContext:
    """A forward with an unfinished prompt, which asks for nothing, in front of rows that do ask."""
    opened = checkpoint(tmp_path_factory.mktemp("rows"))
    for context in run_labels(opened, events_of(opened)):
        told = row_spans(context, "trunk")
        if isinstance(context.event, Forward) and any(one.logit_rows != one.count for one in told[:-1]):
            return context
    raise AssertionError("no such forward in this run")


@pytest.mark.slow
@pytest.mark.parametrize("place", [FINAL, LOGITS], ids=["every row", "rows that are asked for"])
def test_spans_partition_the_rows_among_the_requests(mixed: EventContext, place: Place) -> None:
    count = len(mixed.truth.places[place])
    spans = [(span.request, *span.at(place)) for span in row_spans(mixed, "trunk")]
    owners = [name for name, begin, its in spans for _ in range(begin, begin + its)]
    assert [whose(mixed, place, row) for row in range(count)] == owners and len(owners) == count
    assert whose(mixed, place, count) is None
    for span in row_spans(mixed, "trunk"):
        begin, its = span.at(place)
        found = rows(mixed.truth, place, span)
        assert found is not None and found.equal(mixed.truth.places[place][begin : begin + its])


def test_requested_rows_are_found_at_their_own_offsets(mixed: EventContext) -> None:
    spans = [(span.at(FINAL), span.at(LOGITS)) for span in row_spans(mixed, "trunk")]
    assert any(every != asked for every, asked in spans)
