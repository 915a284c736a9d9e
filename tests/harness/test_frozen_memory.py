"""A write into an earlier answer or a kept copy is found at the event that does it.

Leaves out: the contents of answers and copies (`labels`, `bytes`), and pools (`test_memory.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier, Verdict
from instep.watch.frozen_memory import RECENT, Answers, KeptCopies
from instep_optimized import OptimizedEngine
from instep_reference.contract.engine import Preempt, Resume, Save
from support.running.covering import each_value, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # replays of whole traces


def replayed(trace: Trace, ops: str = "plain", **how: Any) -> Verdict:
    """Only bytes are remembered, so no arithmetic runs and no drafts are made."""
    setting = Setting(ops, **{"drafter": "external", **how})
    return Replay(trace, setting).run(tiers={Tier.IDENTITY, Tier.BITWISE}).verdict


def said(trace: Trace, check: str, *given: Any, **how: Any) -> tuple[int, str]:
    """The event at which a run stops, and the findings of one check there."""
    verdict = replayed(trace, *given, **how)
    assert verdict.exit is Exit.DIVERGED
    first = next(finding for finding in verdict.findings if finding.check == check)
    return first.event, first.diagnosis


def first(trace: Trace, kind: type, after: int = 0) -> int:
    return next(index for index, event in enumerate(trace.events) if isinstance(event, kind) and index >= after)


def planted(monkeypatch: pytest.MonkeyPatch, method: str, behind: Callable[[OptimizedEngine], None]) -> None:
    """After every such event of every engine, `behind`."""
    right = getattr(OptimizedEngine, method)

    def call(self: OptimizedEngine, *given: Any) -> Any:
        answer = right(self, *given)
        behind(self)
        return answer

    monkeypatch.setattr(OptimizedEngine, method, call)


# ---- answers


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_an_answer_that_is_written_rounds_later_is_found(
    longer: Trace, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    commit, given = OptimizedEngine.commit, list[Any]()

    def late(self: OptimizedEngine, *named: Any) -> Any:
        given.append(commit(self, *named))
        if len(given) > rounds:
            given[-1 - rounds].bonus.add_(1)
        return given[-1]

    monkeypatch.setattr(OptimizedEngine, "commit", late)
    commits = [index for index, event in enumerate(longer.events) if type(event).__name__ == "Commit"]
    event, told = said(longer, "aliasing")
    assert (event, told) == (
        commits[rounds], f"earlier answers changed while this event ran: bonus of event {commits[0]} commit"
    )


def test_overwritten_answers_are_reported_once() -> None:
    answers, memory = Answers(most=400), torch.zeros(100)
    view, strided, scalar = memory[:10], memory[10:40:3], memory[50]
    answers.add([("view", view), ("strided", strided), ("scalar", scalar)])
    assert answers.changed() == () and not answers.let_go
    memory[13] = memory[50] = -0.0
    assert answers.changed() == ("strided", "scalar") and answers.changed() == ()
    answers.add([("large", torch.zeros(5000))])
    memory.fill_(1)
    assert answers.let_go == 3 and answers.changed() == ()


def test_every_answer_is_compared_in_subquadratic_time() -> None:
    """Recent answers at every event; an old one later, but before twice its age; all of them after the last event."""
    answers, compared, given = Answers(), 0, []
    numbers = [torch.tensor([float(event)]) for event in range(1000)]
    for event, number in enumerate(numbers):
        compared += len(answers._due(event))
        assert answers.changed() == ()
        answers.add([(f"answer {event}", number)])
    assert compared < 1000 * RECENT * 6  # of 1000 * 1000 / 2, at every event all before it
    for event in (999 - RECENT // 2, 300, 0):
        numbers[event].add_(1)
    assert answers.changed() == (f"answer {999 - RECENT // 2}",)
    while len(given) < 2:
        answers.add([])
        given += answers.changed()
        assert len(answers._held) < 2100
    assert {one.partition(" (")[0] for one in given} == {"answer 300", "answer 0"}
    assert all("at some event after" in one for one in given)
    answers.add([])
    answers.add([])
    numbers[5].add_(1)
    assert answers.changed(all_of_them=True)[0].startswith("answer 5 (at some event after")


# ---- copies


def spoil(kept: Any) -> None:
    next(iter(kept["state"].values())).flatten().view(torch.uint8)[-1] ^= 1


WRITTEN = (
    ("commit", "_preempted", 'the copy that preempt kept of "b"'),
    ("idle", "_saved", 'the copy that save kept as "start"'),
    ("load", "_saved", 'the copy that save kept as "start"'),
)


@pytest.mark.parametrize(("ops", "written"), each_value(("plain", "ledger"), WRITTEN))
def test_a_copy_that_is_written_while_it_is_kept_is_found_at_that_event(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, ops: str, written: tuple[str, str, str]
) -> None:
    method, kept, named = written
    planted(monkeypatch, method, lambda self: [spoil(copy) for _, copy in getattr(self, kept).values()])
    kind = {"commit": "Commit", "idle": "Idle", "load": "Load"}[method]
    begun = first(trace, Preempt if kept == "_preempted" else Save)
    where = next(i for i, event in enumerate(trace.events) if type(event).__name__ == kind and i > begun)
    assert said(trace, "copies", ops) == (where, f"{named} changed while this event ran: state (layer 0)")
    assert kept == "_saved" or where < first(trace, Resume)


@few(2)
@pytest.mark.parametrize(("method", "fault", "kind", "told"), [
    ("resume", lambda self: self._preempted.update(b=(self._requests["b"], self._kept("b")[1])), Resume,
     'the copy that preempt kept of "b" is kept although it was dropped'),
    ("preempt", lambda self: hoard.append(self._preempted["b"][1]["keys"]), Resume,
     'the copy that preempt kept of "b" is gone, but its memory is still held'),
    ("save", lambda self: self._saved.clear(), Save, 'the copy that save kept as "start" is missing'),
])  # fmt: skip
def test_a_copy_that_is_freed_late_or_early_is_found(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, method: str, fault: Any, kind: type, told: str
) -> None:
    planted(monkeypatch, method, fault)
    assert said(trace, "copies") == (first(trace, kind), told)


hoard: list[Any] = []  # of an engine that lets nothing go


def test_copies_of_a_right_engine_are_compared_at_every_event(trace: Trace) -> None:
    verdict = agreed(replayed(trace))
    elements = [one.elements for one in verdict.compared if one.check == "copies"]
    saved, preempted, resumed = (first(trace, kind) for kind in (Save, Preempt, Resume))
    assert set(elements[:saved]) == {1} and min(elements[saved:]) > 100
    assert elements[resumed] == elements[preempted - 1] < elements[preempted] == elements[resumed - 1]


def test_an_engine_need_not_show_its_copies(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OptimizedEngine, "copies")
    verdict = agreed(replayed(trace))
    assert [skip.reason for skip in verdict.skipped if skip.check == "copies"] == [
        "this engine does not show the copies that it keeps"
    ]


def test_copies_of_a_wrong_type_are_a_finding(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OptimizedEngine, "copies", lambda self: {"b": torch.zeros(1)})
    assert said(trace, "interface")[1].startswith('copies returned a dict')


def test_a_copy_whose_memory_serves_others_need_not_be_freed() -> None:
    pool, copies = torch.zeros(4, 8), KeptCopies()
    whole = {"state": pool[1].clone()}
    for shown in ({("preempt", "a"): {"state": pool[1]}, ("preempt", "b"): whole}, {}):
        looked = copies.look(shown)  # type: ignore[arg-type]
    assert looked.held == (("preempt", "b"),) and replace(looked, held=()) == copies.look({})
