"""A campaign in pieces is one campaign: a row that is not void counts, then the latest; each keeps its session.

Leaves out: planting (`test_faults.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from instep.campaign.runner import TrialRunner
from instep.verdict import Exit
from instep_proof.commands.faults import _part
from instep_proof.faults import result_data, resume
from instep_proof.faults.catalogue import FAMILIES, by_id
from instep_proof.faults.catalogue.fault import Fault
from instep_proof.faults.compare_with_control import Heard, Judged, Result, Session, judge
from instep_proof.faults.fault_runs import Arm
from support.running.command import Runner, complaint

TOP = Path(__file__).resolve().parents[2]
COMMITTED = TOP / "fixtures" / "results" / "faults.json"
EXPERTS = TOP / "fixtures" / "experts"
EVERY = [fault for faults in FAMILIES.values() for fault in faults]
RIGHT, PLANTED = {"instep": "right"}, {"instep": "planted"}
CONTROL = Arm(Exit.AGREED, 1.0, served=RIGHT, trail=("0 a",), events=1, of=1)
FIRST, SECOND, THIRD = EVERY[:3]


def row(name: str, day: int, void: bool = False) -> Judged:
    """A fault that is found, located and named, or void, on that day."""
    fault = by_id()[name]
    said = {"check": fault.seen_by[0], "tier": "T1", "event": fault.event, "explained": None, "where": "there",
            "diagnosis": f"it {fault.says}", **fault.place._asdict()}  # fmt: skip
    also = {"check": "decisions", "tier": "T4"}
    arm = Arm(Exit.DIVERGED, 2.0, (said, also), {"bytes": "T1", "decisions": "T4"}, PLANTED, ("0 b",))
    session = Session(f"2026-01-0{day}T00:00:00+00:00", f"of day {day}", {"device": f"machine {day}"}, 3.0, day, 9.0)
    one = judge(fault, CONTROL, replace(CONTROL, served=PLANTED) if void else arm, RIGHT, PLANTED)
    return replace(one, session=session, heard=Heard(0.5, 0.5, 0.25, True))


def written(path: Path, *rows: Judged) -> Path:
    result_data.of(Result(rows)).write(path)
    return path


@pytest.mark.parametrize(("earlier", "later", "day"), [(False, False, 2), (True, False, 2), (False, True, 1)],
                         ids=["the latest", "what was void", "a later void one"])  # fmt: skip
def test_fault_in_several_files_has_one_row(
    earlier: bool, later: bool, day: int, tmp_path: Path, instep: Runner
) -> None:
    out = written(tmp_path / "all.json", row(SECOND.id, 2, void=later))
    other = written(tmp_path / "other.json", row(SECOND.id, 1, void=earlier), row(FIRST.id, 1))
    ran = instep("faults", "--json", out, "--join", other, "--picture", tmp_path / "all.svg")
    found = json.loads(out.read_text())
    assert ran.code == found["exit"] == Exit.AGREED and (found["found"], found["located"], found["void"]) == (2, 2, 0)
    assert [one["id"] for one in found["results"]] == [FIRST.id, SECOND.id], "the catalogue's order"
    sessions = [found["sessions"][one["session"]] for one in found["results"]]
    assert [one["commit"] for one in sessions] == ["of day 1", f"of day {day}"] and len(found["sessions"]) == day
    assert sessions[1]["machine"] == {"device": f"machine {day}"} and f"{9 * day} processor seconds" in ran.out
    assert FIRST.id in (tmp_path / "all.svg").read_text()


def test_missing_plants_what_is_void_or_not_there(tmp_path: Path, instep: Runner) -> None:
    there = written(tmp_path / "a.json", row(FIRST.id, 1), row(SECOND.id, 1, void=True))
    ran = instep("faults", FIRST.id, SECOND.id, THIRD.id, "--missing", "--json", there, "--list")
    assert [line.partition(" ")[0] for line in ran.out.splitlines()[:-1]] == [SECOND.id, THIRD.id]
    before = there.read_bytes()
    assert instep("faults", FIRST.id, "--missing", "--json", there).code == Exit.INCONCLUSIVE, "one is void still"
    assert json.loads(before)["results"] == json.loads(there.read_text())["results"]


def test_interrupted_campaign_keeps_what_was_judged_and_goes_on_with_the_rest(
    tmp_path: Path, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed_at_the_second(chosen: list[Fault], traces: Path, run: TrialRunner, **more: object) -> Iterator[Judged]:
        for fault in run.trials(chosen, str):
            if fault.id == SECOND.id:
                raise KeyboardInterrupt
            yield row(fault.id, 1)

    monkeypatch.setattr("instep_proof.faults.campaign.campaign", pressed_at_the_second)
    monkeypatch.setattr("instep_proof.faults.run_in_forks.warm", nullcontext)  # nothing is planted
    words = ("faults", FIRST.id, SECOND.id, THIRD.id, "--json", tmp_path / "a.json")
    ran = instep(*words)
    assert ran.code == Exit.INCONCLUSIVE and "interrupted" in ran.out, ran
    assert [one["id"] for one in json.loads((tmp_path / "a.json").read_text())["results"]] == [FIRST.id]
    left = instep(*words, "--missing", "--list").out.splitlines()[:-1]
    assert [line.partition(" ")[0] for line in left] == [SECOND.id, THIRD.id]


@pytest.mark.parametrize("words", [("--missing",), ("--missing", "--checkpoint", "{experts}"), ("--join", "{other}")])
def test_rows_of_two_models_are_not_one_campaign(words: tuple[str, ...], tmp_path: Path, instep: Runner) -> None:
    """Each names a file of one model together with faults or rows of another one."""
    traced, anew = row(FIRST.id, 1), row(SECOND.id, 1)
    anew.session.model = "0123456789abcdef"
    there = written(tmp_path / "a.json", anew if words == ("--missing",) else traced)
    before, places = there.read_bytes(), {"other": tmp_path / "b.json", "experts": EXPERTS}
    written(places["other"], anew)
    names = () if words[0] == "--join" else (THIRD.id,)
    ran = instep("faults", *names, *(word.format(**places) for word in words), "--json", there)
    assert "rows of a model of digest 0123456789ab and of the traces" in complaint(ran) or words[-1] == "{experts}"
    assert "expected those of one model in a file" in complaint(ran) and there.read_bytes() == before


def test_file_is_read_as_it_was_written() -> None:
    found = json.loads(COMMITTED.read_text())
    again = json.loads(json.dumps(result_data.of(resume.read(COMMITTED)).data()))
    for one in (*found["results"], *again["results"]):  # files of earlier revisions do not name the mistake
        mistake = one["expected"].pop("mistake", by_id()[one["id"]].mistake)
        assert mistake == by_id()[one["id"]].mistake
        one["expected"].pop("written_for", None)
    assert found["results"] == again["results"] and found["sessions"] == again["sessions"]
    assert all(found[name] == again[name] for name in ("exit", "faults", "named_by", "failures"))


def test_parts_are_all_of_it_and_share_no_control() -> None:
    parts = [_part(EVERY, f"{number}/16") for number in range(1, 17)]
    assert sorted(fault.id for part in parts for fault in part) == sorted(by_id()) and all(parts)
    where = {(fault.trace, *fault.how.words()): number for number, part in enumerate(parts) for fault in part}
    assert all(where[fault.trace, *fault.how.words()] == n for n, part in enumerate(parts) for fault in part)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--part", "0/3"), "--part"), (("--part", "4/3"), "--part"), (("--part", "3"), "3/16"),
        (("--part", "1/99999999999"), "3/16"), (("--missing",), "--json"), (("--join", "{there}"), "--json"),
        *((("--json", "{out}", "--join", "{there}", *more), "to join plants nothing")
          for more in (("--part", "1/2"), ("--list",), ("--dtype", "bfloat16"))),
        (("--json", "{out}", "--join", "{out}.none"), "no file"),
        (("--json", "{out}", "--join", "{other}"), "instep faults"),
    ],
)  # fmt: skip
def test_incompatible_files_are_refused(words: tuple[str, ...], says: str, tmp_path: Path, instep: Runner) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"schema": 2, "results": 3}')
    places = {"there": COMMITTED, "out": tmp_path / "out.json", "other": other}
    assert says in complaint(instep("faults", *(word.format(**places) for word in words)))
    assert not (tmp_path / "out.json").exists()
