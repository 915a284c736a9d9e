"""A soak continues from its file, finds wear, and writes a trace of its last stretch.

Leaves out: drawing (`test_fuzz.py`) and constant memory, which takes hours to show.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from instep.campaign.fuzz import draw_events
from instep.campaign.fuzz.campaign import Settings, place
from instep.campaign.fuzz.result_document import document, of
from instep.campaign.runner import TrialRunner
from instep.campaign.soak import soak, totals
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import read
from instep.verdict import Exit
from instep_reference.contract.engine import Forward
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import kind_of
from support.running.command import Runner, complaint
from support.running.covering import WHOLE
from support.wrong import subjects

pytestmark = pytest.mark.slow  # whole replays or commands

LATE = "support.wrong.subjects:LATE"


def soaked(model: Path, folder: Path, rounds: int, ops: str = "ledger", every: int = 20, stretch: int = 4,
           shrink: float = 0.0) -> soak.Soak:  # fmt: skip
    settings = Settings(Setting(ops), model, 0, 3, folder, shrink, command="soak")
    run = totals.Soaked(Setting(ops).data(), "", 3, every, stretch)
    soaking = soak.Soak(settings, run, totals.Session.now("cpu", None), TrialRunner(), rounds)
    soaking.run()
    return soaking


def test_two_sessions_make_one_sum(instep: Runner, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    told = ["soak", "--checkpoint", model, "--ops", "ledger", "--stretch", 2, "--json", file]
    first = instep(*told, "--rounds", 2)
    assert first.code == Exit.AGREED, first
    then: Any = json.loads(file.read_text())
    assert instep(*told, "--rounds", 3).code == Exit.AGREED
    (now,), (run,) = (json.loads(file.read_text())[name] for name in ("runs", "soaked"))
    assert then["runs"][0]["rounds"] == 2 and now["rounds"] == 3
    assert [session["rounds"] for session in run["sessions"]] == [2, 1] and run["engines"] == 2
    assert now["events"] == sum(session["events"] for session in run["sessions"]) > then["runs"][0]["events"] > 4
    assert all(session["memory_mib"] and session["machine"]["torch"] for session in run["sessions"])
    assert instep(*told, "--rounds", 3).code == Exit.AGREED, "all of them are there"
    kept_now: Any = json.loads(file.read_text())
    assert kept_now["runs"][0]["rounds"] == 3 and len(kept_now["soaked"][0]["sessions"]) == 2
    assert "expected 2, with which it was begun" in complaint(instep(*told, "--rounds", 12, "--stretch", 5))
    assert "--minutes" in complaint(instep(*told))
    other = tmp_path / "other.json"
    assert instep(*told[:-1], other, "--rounds", 1, "--seed", 1).code == Exit.AGREED
    assert instep("soak", "--json", file, "--join", other).code == Exit.AGREED
    joined: Any = json.loads(file.read_text())
    assert [(run["seeds"], run["rounds"]) for run in joined["runs"]] == [([0, 1], 4)]
    assert "of ledger with seed 1, which is there" in complaint(instep("soak", "--json", file, "--join", other))
    for seed in (0, 1):
        assert "found a sum of 2 seeds" in complaint(instep(*told, "--rounds", 2, "--seed", seed))
    assert instep(*told, "--rounds", 2, "--seed", 2).code == Exit.AGREED, "each other seed continues separately"
    assert [run["rounds"] for run in json.loads(file.read_text())["runs"]] == [4, 2]
    file.write_text("{}")
    assert "a file that `instep soak` wrote" in complaint(instep(*told, "--rounds", 5))
    assert "to join serves nothing" in complaint(instep("soak", "--json", file, "--join", other, "--minutes", 1))
    assert "another file" in complaint(instep("soak", "--json", other, "--join", other))
    for bad in (("--json", other, "--join", file), ("--json", other, "--join", tmp_path), ("--join", other)):
        assert "soak` wrote" in (said := complaint(instep("soak", *bad))) or "takes the others in" in said


def test_seeds_that_agree_are_joined_to_one_row_a_setting(tmp_path: Path) -> None:
    """A row of another setting, one that compared nothing, and one with a finding remain."""
    found = totals.Found(3, "a.jsonl", True, "wrong")

    def row(seed: int, mib: tuple[int, ...] = (5, 7), commit: str = "a", elements: int = 4, ops: str = "ledger",
            wrong: bool = False) -> totals.Soaked:  # fmt: skip
        session = totals.Session(f"date {9 - seed}", commit, {}, 1.5, 2, 3, elements, mib)
        met = {"idle": 1, f"{seed}": 1}
        return totals.Soaked({"ops": ops, "device": "cpu"}, "m", seed, engines=1, stretches=2, refused=5,
                             conditions=met, sessions=[session], found=[found] * wrong)  # fmt: skip

    several = [row(1), row(2, (6, 9)), row(3, commit="b"), row(4, elements=0), row(5, ops="plain"), row(6, wrong=True)]
    runs, first = list[totals.Soaked](), tmp_path / "first.json"
    totals.result(several, None).write(first)
    totals.join(runs, first)
    assert [run.seeds for run in runs] == [[1, 2, 3], [4], [5], [6]]
    one = runs[0]
    assert (one.engines, one.stretches, one.refused, one.conditions) == (3, 6, 15, {"idle": 3, "1": 1, "2": 1, "3": 1})
    assert one.sessions == [totals.Session("date 7", "a", {}, 3.0, 4, 6, 8, (6, 9), 2), *several[2].sessions]
    totals.result(runs, None).write(second := tmp_path / "second.json")
    assert totals.read(second) == runs
    with pytest.raises(BadInput, match="a soak of ledger with seed 3, which is there"):
        totals.join([row(3)], second)
    (told,) = totals.document(runs, None).tables
    assert [line[1:3] for line in told.rows] == [("1 and 2 more", "6"), ("4", "2"), ("5", "2"), ("6", "2")]
    assert [line[7] for line in told.rows] == ["3", "1", "1", "1"]


def test_no_time_is_inconclusive(instep: Runner, model: Path) -> None:
    assert instep("soak", "--checkpoint", model, "--minutes", 0).code == Exit.INCONCLUSIVE


def test_wear_is_found_and_its_trace_is_the_smallest_that_shows_it(
    instep: Runner, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects.LATE.gated_norm, "calls", 0)
    monkeypatch.setattr(subjects.LATE.gated_norm, "wrong", range(5, 10**9))
    soaking = soaked(model, tmp_path / "found", 60, LATE, every=1, stretch=1, shrink=60)
    (found,) = soaking.soaked.found
    assert soaking.soaked.exit == Exit.DIVERGED and found.again
    trace = read(Path(found.trace))
    assert soaking.soaked.stretches > 0 and [kind_of(event) for event in trace.events] == ["admit", "forward"]
    again = instep("replay", found.trace, "--no-ladder", "--ops", LATE)
    assert again.code == Exit.DIVERGED and "DIVERGED" in again.out
    monkeypatch.setattr(subjects.LATE.gated_norm, "wrong", ())
    assert instep("replay", found.trace, "--ops", LATE).code == Exit.AGREED, "without the fault"


@pytest.mark.parametrize("every", [pytest.param(1, marks=WHOLE), 5])
def test_ops_are_recomputed_at_regular_events_only(model: Path, tmp_path: Path, every: int) -> None:
    """A gated norm that is louder leaves every state right: T2 alone sees it, in the first forward that it judges."""
    soaking = soaked(model, tmp_path / "found", 60, "support.wrong.subjects:LOUDER", every, stretch=60)
    assert soaking.found is not None
    (found,) = soaking.soaked.found
    events = read(Path(found.trace)).events
    judged = [n for n, event in enumerate(events) if n % every == 0 and isinstance(event, Forward)]
    assert judged == [len(events) - 1]
    further = soak.Soak(soaking.settings, soaking.soaked, totals.Session.now("cpu", None), TrialRunner(), 120)
    further.run()
    first, second = (Path(one.trace) for one in soaking.soaked.found)
    assert first != second and first.is_file() and second.is_file(), "a second finding replaces no trace"


def test_permanent_memory_of_engines_stays_bounded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are rebuilt in time; no further copies are saved; all answers are compared where requests leave alone."""
    monkeypatch.setattr(soak, "STRETCHES", 2)
    monkeypatch.setattr(soak, "MOST_SAVED", 1)
    monkeypatch.setattr(draw_events, "INTERVALS", (None,))  # tracked prefixes have a bound of their own
    most, whole = [], []
    serve = soak.Example.serve

    def watched(example: Any, event: Any, *, last: bool = True) -> None:
        serve(example, event, last=last)
        most.append(len(example.rules.table.saved))
        whole.append(not example.rules.table.live if last else None)

    monkeypatch.setattr(soak.Example, "serve", watched)
    soaking = soaked(model, tmp_path / "found", 6, stretch=1)
    assert soaking.soaked.exit == Exit.AGREED and soaking.soaked.engines == 3
    assert max(most) == 1 and {one for one in whole if one is not None} == {True}
    assert soaking.soaked.conditions["saved"] <= 5 and sum(soaking.soaked.conditions.values()) > 100


class Ruled:
    """Replaces `Example`: the rules alone, without an engine."""

    refuses, elements, served = True, 1, None

    def __init__(self, plan: Any, header: Any, *given: Any) -> None:
        self.header, self.setting, self.rules = header, plan.setting, EventRules(header, overlap=False)
        self.events: tuple[Any, ...] = ()

    def serve(self, event: Any, *, last: bool = True) -> None:
        self.events = (*self.events, event)
        self.rules.apply(event)


def test_refused_event_is_followed_by_one_that_frees_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the same event again, which would be refused again."""
    behind: list[str] = []
    turn = soak.Turns.turn

    def noted(self: Any) -> None:
        full, served = self._full, len(self.example.events)
        roomy = any(self._may(kind) for kind in soak.MAKES_ROOM)
        turn(self)
        behind.extend([kind_of(self.example.events[served])] if full and roomy else [])

    monkeypatch.setattr(soak.Turns, "turn", noted)
    monkeypatch.setattr(soak, "Example", Ruled)
    monkeypatch.setattr(draw_events, "ROOMY", draw_events.TIGHT)
    soaking = soaked(model, tmp_path / "found", 60, stretch=30)
    assert soaking.soaked.refused >= len(behind) > 2 and set(behind) <= {*soak.MAKES_ROOM}


def test_long_requests_pass_their_positions_and_all_room_is_used_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "Example", Ruled)
    soaking = soaked(model, tmp_path / "found", 500, stretch=100)
    met = soaking.soaked.conditions
    assert all(met.get(name) for name in (
        "a position past 512", "a position past 4,096", "every slot used again", "every page used again")), met


def test_a_fault_at_a_position_after_512_is_found(model: Path, tmp_path: Path) -> None:
    """By the rounds with which `instep fuzz` begins."""
    settings = Settings(Setting("support.wrong.subjects:NEAR"), model, 0, 3, tmp_path / "found", 0.0)
    result = soak.campaign(settings, TrialRunner(), soak.LONG_NEEDS)
    assert result.found is not None and result.again and result.exit is Exit.DIVERGED
    assert result.found.verdict.findings[0].place.component == "attended"
    events = read(place(result.settings)).events
    assert isinstance(events[-1], Forward) and max(len(getattr(one, "prompt", ())) for one in events) > 500
    says = document(of([result]).data())
    assert f"found in round {result.rounds}, shrunk to {len(events)} events" in "\n".join(says.messages)
    assert "NEAR, engines stay DIVERGED" in says.summary[0], says.summary
