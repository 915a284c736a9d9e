"""An engine's own table of what it may change is bounded by the rules; what it declares as scratch is listed.

Leaves out: writes inside the table (`tails`), and the strategies' tables one by one (`tests/optimized`).
"""

from itertools import product

import pytest

from instep.report import outcome_data
from instep.run.build_compared_engines import participants_of
from instep.run.lockstep import Lockstep
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace
from instep.trace.write_bound import bound
from instep.verdict import Exit
from instep.watch.memory_changes import positions_of
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_reference.contract import engine as e
from support.running.covering import few
from support.running.verdicts import agreed


def replayed(trace: Trace, name: str) -> Outcome:
    return Replay(trace, Setting(f"support.wrong.declared_regions:{name}")).run()


def first_of(trace: Trace, kind: type[e.Event]) -> int:
    return next(index for index, event in enumerate(trace.events) if isinstance(event, kind))


def test_write_table_that_names_every_unit_is_a_finding(trace: Trace) -> None:
    found = replayed(trace, "EVERYTHING").verdict
    assert found.exit is Exit.DIVERGED and found.events == 1
    said = {finding.diagnosis for finding in found.findings if finding.check == "bounds"}
    assert ("the engine's table lets this admit write state slots 0, 1, 2; the event rules allow slot 3, of the "
            "requests that it names") in said  # fmt: skip
    assert any("pages 0, 1, 2, 3, 4, 5, 6, 7 and 1 more; the event rules allow nothing there" in one for one in said)
    assert any("state_ends" in one for one in said), "no request owns a red zone"


def test_units_wrongly_named_in_a_write_table_stay_guarded(trace: Trace) -> None:
    """The reserved slot, and a free one: the table does not excuse the write."""
    plan = Replay(trace, Setting("support.wrong.declared_regions:EVERYTHING")).plan
    lockstep = Lockstep(trace, participants_of(plan))
    contexts = [lockstep.step() for _ in range(first_of(trace, e.Commit) + 1)]
    stray = {(one.region.name, one.unit) for one in contexts[-1].changes.trespasses}
    free = {2} - set(contexts[-1].expected.slots_after.values())
    assert stray == {("state", unit) for unit in {0} | free} and free


def test_write_outside_a_correct_table_is_found(trace: Trace) -> None:
    found = replayed(trace, "BEHIND_THE_TABLE").verdict.findings
    assert {finding.check for finding in found} == {"bytes"}
    assert "changed in state slot 0, which this event may not write" in found[0].diagnosis


@pytest.mark.slow
@pytest.mark.parametrize(("name", "says"), [
    ("OLD_PAGES", "with the positions that it writes"), ("OTHERS", "of the requests that it names"),
])  # fmt: skip
def test_slightly_too_wide_table_is_a_finding(longer: Trace, name: str, says: str) -> None:
    first = replayed(longer, name).verdict.findings[0]
    assert first.check == "bounds" and first.kind == "commit" and says in first.diagnosis


@pytest.mark.slow
def test_scratch_is_listed_and_nothing_else_is_excused(four_rounds: Trace) -> None:
    outcome = replayed(four_rounds, "SCRATCH")
    assert outcome.verdict.exit is Exit.AGREED
    assert set(outcome.scratch.values()) == {frozenset({0})}
    found = outcome_data.of([outcome]).found
    told = found["runs"][0]["scratch"]
    assert [one["units"] for one in told] == [[0]] * len(told) and told[0]["region"] == "state"
    assert any("state, layer 0, unit 0: declared as scratch, so not compared" in note for note in found["run_notes"])


def test_scratch_that_the_trace_hands_out_is_a_finding(trace: Trace) -> None:
    first = replayed(trace, "OWNED_SCRATCH").verdict.findings[0]
    assert first.diagnosis == "state declares slot 1 as scratch, which the trace gives to requests"


@pytest.mark.slow
def test_undeclared_pool_is_compared_whole_and_reported(four_rounds: Trace) -> None:
    verdict = agreed(replayed(four_rounds, "UNDECLARED"))
    reasons = [skipped.reason for skipped in verdict.skipped if skipped.check == "tails"]
    assert len(reasons) == 1 and "keys, " in reasons[0] and "compared as a whole" in reasons[0]
    assert not [one for one in verdict.compared if one.check == "tails"]


@few(4)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "conv"), [*product(STRATEGIES, CONV_FORMS)])
def test_the_rules_are_as_wide_as_every_right_table(trace: Trace, strategy: str, conv: str) -> None:
    """Every pool of every strategy declares its contents."""
    participants = participants_of(Replay(trace, Setting("ledger", strategy=strategy, conv=conv)).plan)
    rules, rows = EventRules(trace.header), 0
    for index, event in enumerate(trace.events):
        now = rules.table
        before = type(now)(now.capacity, now.num_steps, dict(now.live), [], dict(now.saved))
        rules.apply(event, trace.where(index))
        rows = len(event.rows) if isinstance(event, e.Forward) else rows
        most, table = bound(event, before, rules.table, rows), participants.shown.may_change(event)
        for region in participants.shown.regions():
            assert region.means is not None
            assert table.get(region.name, set()) <= most.units(region), (index, event, region.name)
        event.on(participants.subject.engine)
    assert sum(positions_of(region) > 1 for region in participants.shown.regions()) >= 8


def test_event_that_names_no_request_may_write_nothing(trace: Trace) -> None:
    rules = EventRules(trace.header)
    for event in (e.Idle(), e.SetNumSteps(0)):
        most = bound(event, rules.table, rules.table, 3)
        assert (most.slots, most.pages, most.rows) == (frozenset(), frozenset(), 0)
