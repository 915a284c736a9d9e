"""Replay a trace on both sides: correct engines agree on every event, wrong ones are found at their event.

Leaves out: the checks one by one, and faults planted in the source.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from instep.checks.check_interface import exact
from instep.checks.trace_bookkeeping import LENGTH
from instep.run.build_compared_engines import participants_of
from instep.run.lockstep import Lockstep
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier
from instep.watch.event_context import EventContext
from instep.watch.memory_changes import Watch
from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from support.running.covering import few


@pytest.fixture(scope="module")
def right(trace: Trace) -> Callable[[str], Outcome]:
    """A right engine's replay of the whole trace, made once."""
    return cache(lambda ops: Replay(trace, Setting(ops)).run())


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize("ops", ["ledger", "plain"])
def test_a_right_engine_agrees_on_every_event(trace: Trace, right: Callable[..., Any], ops: str) -> None:
    outcome = right(ops)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    assert outcome.verdict.events == outcome.of == len(trace.events)
    assert outcome.verdict.elements > 0 and outcome.calls["gdn"] > 0
    assert {compared.event for compared in outcome.verdict.compared} == set(range(len(trace.events)))


@pytest.mark.slow
def test_every_tier_of_numbers_is_used(right: Callable[..., Any]) -> None:
    tiers = {compared.tier for compared in right("plain").verdict.compared}
    assert tiers == set(Tier)


def test_a_wrong_op_is_found_at_its_first_event_layer_and_place(trace: Trace) -> None:
    verdict = Replay(trace, Setting("support.wrong.subjects:LOUDER")).run().verdict
    first = verdict.findings[0]
    event = next(i for i, event in enumerate(trace.events) if isinstance(event, e.Forward))
    assert verdict.exit is Exit.DIVERGED
    assert (first.event, first.place.layer, first.place.component) == (event, 0, "gated")
    assert verdict.events == event + 1, "the run continues after a finding"


def test_a_subject_that_raises_is_a_divergence_with_the_last_place_it_reached(trace: Trace) -> None:
    verdict = Replay(trace, Setting("support.wrong.subjects:refusing")).run().verdict
    first = verdict.findings[0]
    assert verdict.exit is Exit.DIVERGED
    assert first.kind == "commit" and "raised IndexError (row 3 of 2)" in first.diagnosis


def test_until_and_layers_bound_what_is_judged(trace: Trace) -> None:
    replay = Replay(trace, Setting("plain"))
    assert replay.run(until=4).verdict.events == 5
    layers = {compared.place.layer for compared in replay.run(until=4, layers=[1]).verdict.compared}
    assert layers == {1}
    for layer in (2, 77, -1):
        with pytest.raises(BadInput, match=f"--layer: found {layer}, expected a layer of the model, 0 to 1"):
            replay.run(until=4, layers=[layer])


def test_a_fault_of_the_harness_is_not_the_subjects(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the harness's memory checks is a harness failure, not a divergence."""
    def fallen(self: Watch, *given: object) -> None:
        raise ZeroDivisionError("of the harness")

    for name in ("before", "after"):
        with monkeypatch.context() as patched:
            patched.setattr(Watch, name, fallen)
            with pytest.raises(ZeroDivisionError, match="of the harness"):
                Replay(trace, Setting("ledger")).run(until=2)


def test_wrong_owner_is_reported_for_any_judged_layer(trace: Trace) -> None:
    class Wrong:
        name, tier = "identity", Tier.IDENTITY

        def __call__(self, context: EventContext) -> Iterator[Any]:
            yield exact(self, context, LENGTH, 3, 4, "length is {}")

    first = Replay(trace, Setting("ledger"), checks=lambda plan: (Wrong(),)).run(layers=[1]).verdict.findings[0]
    assert first.diagnosis == "length is 3; expected 4"


@pytest.mark.slow
def test_no_checks_is_no_pass(trace: Trace) -> None:
    assert Replay(trace, Setting("ledger"), checks=lambda plan: ()).run().verdict.exit is Exit.INCONCLUSIVE


@pytest.mark.slow
def test_the_context_holds_what_the_trace_alone_expects(trace: Trace) -> None:
    lockstep = Lockstep(trace, participants_of(Replay(trace, Setting("ledger")).plan))
    contexts: list[EventContext] = [lockstep.step() for _ in trace.events]
    for context in contexts:
        assert context.subject_slots == context.expected.slots_after
        assert {name: tuple(pages) for name, pages in context.subject_pages.items() if pages} == {
            name: pages for name, pages in context.expected.pages_after.items() if pages
        }
        if isinstance(context.event, e.Commit):
            assert all(name in context.expected.windows for name in context.event.requests)
    assert contexts[-1].expected.slots_after == {}
    assert all(one.subject.after is other.subject.before for one, other in pairwise(contexts))


def test_reading_a_state_changes_nothing(trace: Trace) -> None:
    """Watched or not, with or without checks between the events, the subject ends with the same bytes."""
    plan, ends = Replay(trace, Setting("plain")).plan, []
    for watched in (True, False):
        participants = participants_of(plan)
        lockstep = Lockstep(trace, participants)
        for event in trace.events[:12]:
            if watched:
                lockstep.step()
            else:
                event.on(participants.subject.engine)
        ends.append([region.units.clone() for region in participants.shown.regions()])
    for one, other in zip(*ends, strict=True):
        assert one.contiguous().view(-1).numpy().tobytes() == other.contiguous().view(-1).numpy().tobytes()


@pytest.mark.slow
def test_history_is_read_off_the_trace(longer: Trace) -> None:
    history = Replay(longer, Setting("ledger")).run().history
    assert [count for _, count in history.steps] == [1, 3, 0, 3]
    assert {text.request for text in history.texts} == {"a", "b", "c", "d"}
    assert 0 < history.mean_accepted_drafts < 3


@pytest.mark.parametrize(
    ("ops", "complaint"),
    [("nobody", "no such name"), ("no.such:THING", "No module named"),
     ("support.wrong.subjects:NOT_AN_ENGINE", "a str"),
     ("support.wrong.subjects:MISSING", "AttributeError: .*MISSING"),
     ("support.wrong.subjects:load", "a callable that is no Maker"),
     ("json:JSONDecodeError", "a callable that is no Maker"),
     ("broken_at_import:THING", "ZeroDivisionError: division by zero"), ("leaves_at_import:THING", "SystemExit: 3")],
)
def test_unknown_subject_lists_the_known_ones_unless_an_import_failed(
    trace: Trace, ops: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_at_import.py").write_text("1 / 0\n")
    (tmp_path / "leaves_at_import.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match=complaint) as refused:
        Replay(trace, Setting(ops)).run()
    by_the_import = complaint.startswith(("No module", "AttributeError", "ZeroDivision", "SystemExit"))
    assert ("ledger, plain, triton" in str(refused.value)) is not by_the_import


def test_changed_choice_of_the_reference_is_reported(trace: Trace) -> None:
    name, said = next((name, said) for name, said in trace.recorded.items() if name.startswith("own."))
    changed = replace(trace, recorded={**trace.recorded, name: said + 1})
    first = Replay(changed, Setting("plain")).run().verdict.findings[0]
    assert first.check == "remembered" and first.event == int(name.partition(".")[2])
    assert "the reference now chooses" in first.diagnosis
