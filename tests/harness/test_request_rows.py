"""Pools whose units are request rows: predicted from the trace, watched, limited, poisoned and counted.

Leaves out: pools by slot, batch row or page, which every strategy of ours has.
"""

import pytest

from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace
from instep.trace.write_bound import Bound
from instep.watch.event_context import EventContext
from instep.watch.rows_by_request import row_spans, rows, whose
from instep_optimized import OptimizedEngine, memory
from instep_optimized.memory.pool import Pool
from instep_reference.contract import engine as e
from instep_reference.contract.engine import Forward
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from support.inputs.check_contexts import checkpoint, events_of, run_labels
from support.running.covering import few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # whole replays


def replayed(trace: Trace, name: str = "RIGHT", ops: str = "ledger") -> Outcome:
    return Replay(trace, Setting(ops, strategy=f"support.wrong.request_snapshots:{name}")).run()


def first(outcome: Outcome) -> tuple[str, str]:
    finding = outcome.verdict.findings[0]
    return finding.check, finding.diagnosis


@few(2)
@pytest.mark.parametrize(("name", "ops"), [("RIGHT", "ledger"), ("RIGHT", "plain"), ("DECODING", "ledger")])
def test_a_strategy_by_request_row_agrees(trace: Trace, name: str, ops: str) -> None:
    agreed(replayed(trace, name, ops), events=len(trace.events))


@pytest.mark.parametrize(("name", "check", "says"), [
    ("SMALL", "capacity", "kept_state has 2 request rows; 3 are needed, one per slot and row 0"),
    ("AS_ROWS", "bytes", "changed in kept_state row 1, which this event may not write"),
    ("BY_BATCH_ROW", "labels", "is poison: memory that was never written"),
])  # fmt: skip
def test_a_mistake_with_request_rows_is_found(trace: Trace, name: str, check: str, says: str) -> None:
    found = first(replayed(trace, name))
    assert found[0] == check and says in found[1], found


def test_a_request_row_that_is_not_poisoned_is_a_leak(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    def scrub(pool: Pool, units: range | list[int]) -> None:
        if pool.demand.by != "request" or len(units) > 1:
            pool.scrub(units)

    monkeypatch.setattr(memory, "CLEARS", dict.fromkeys(memory.CLEARS, scrub))
    outcome = replayed(trace)
    said = {(one.check, one.request): one.diagnosis for one in outcome.verdict.findings}
    assert "of kept_state request row " in next(text for (check, _), text in said.items() if check == "leaks"), said


def test_a_write_table_with_the_row_of_another_request_is_too_wide(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = OptimizedEngine.may_change
    monkeypatch.setattr(OptimizedEngine, "may_change", lambda self, event: (
        table(self, event) | ({"kept_state": {1, 2}} if isinstance(event, e.Preempt) else {})
    ))  # fmt: skip
    check, says = first(replayed(trace))
    assert check == "bounds", says
    assert "lets this preempt write kept_state request row 2; the event rules allow request row 1, of the req" in says


def test_a_write_to_the_row_of_another_request_names_it(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = OptimizedEngine.preempt

    def preempt(self: OptimizedEngine, request: str) -> None:
        serve(self, request)
        owned = self._memory.request_rows.owned()
        self._memory["kept_state"].units(0)[list(owned.values())] = 1

    monkeypatch.setattr(OptimizedEngine, "preempt", preempt)
    outcome = replayed(trace)
    finding = next(one for one in outcome.verdict.findings if one.check == "bytes")
    assert finding.request == "a" and "kept_state request row 2, which this event may not write" in finding.diagnosis


def test_rows_are_predicted_with_the_slots(trace: Trace) -> None:
    """A preempted request has none, and no two requests have the same one."""
    rules, seen = EventRules(trace.header), set[int]()
    for index, event in enumerate(trace.events):
        rules.apply(event, trace.where(index))
        live = rules.table.live.values()
        rows = [one.request_row for one in live if one.request_row is not None]
        assert len(set(rows)) == len(rows)
        assert all((one.request_row is None) == (one.slot is None) for one in live)
        seen.update(rows)
    assert seen == {1, 2}


def test_no_event_may_write_request_row_0() -> None:
    import torch

    region = e.Region("kept", 0, "request", torch.zeros(3, 1))
    assert Bound(request_rows=frozenset({2})).units(region) == {2} and not Bound(frozenset({1})).units(region)


# -- the rows of a place


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
@pytest.mark.parametrize("place", [FINAL, LOGITS], ids=["every row", "requested rows"])
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
