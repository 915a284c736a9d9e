"""Pools whose units are request rows: predicted from the trace, watched, limited, poisoned and counted.

Leaves out: pools by slot, batch row or page, which every strategy of ours has.
"""

import pytest

from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace
from instep.trace.write_bound import Bound
from instep_optimized import OptimizedEngine, memory
from instep_optimized.memory.pool import Pool
from instep_reference.contract import engine as e
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
