"""Planted faults are found, named and located; what proves nothing is void; a campaign in pieces is one campaign.

Of several rows of a fault one that is not void counts, then the latest; each keeps its session. The page on adding
faults shows one as the catalogue has it.
Leaves out: the whole catalogue (`instep faults` runs it; `tests/test_house.py` holds its texts to the source).
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from instep.campaign import farm
from instep.campaign.farm import Ended
from instep.campaign.runner import TrialRunner
from instep.diagnose.mistakes import CATALOGUE
from instep.report.result import read
from instep.report.svg import picture
from instep.run.replay import served
from instep.setting import Setting
from instep.verdict import Exit
from instep_proof.commands.faults import A_TRIAL, _trials
from instep_proof.faults import plant, result_data
from instep_proof.faults.campaign import campaign
from instep_proof.faults.catalogue import FAMILIES, TRACES, by_id
from instep_proof.faults.catalogue.fault import EXPECTED, Edit, Expected, Fault, of_family, recorded, speaking
from instep_proof.faults.compare_with_control import HYPOTHESIS, Heard, Judged, Result, Session, hear, judge, updated
from instep_proof.faults.fault_runs import Arm, Said, both, replayed, spoken
from instep_proof.faults.result_data import data_of, matrix_of, surprises
from instep_reference.contract.errors import BadInput
from support.inputs.few_channels import few_channels
from support.inputs.outcomes import shown
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few
from support.running.planting import planted_here
from support.wrong.harmless import HARMLESS, Harmless

# They share the control arm of one short trace, and run as a campaign runs them, each in a copy of the source and in
# processes. `test_planted_families.py` plants a drawn fault of each family in its own process.
FEW = ("row-for-slot", "count-permute-lengths", "draft-chain-own-drafts")
ROW_FOR_SLOT = by_id()["row-for-slot"]
# Edits that cannot fire: the same number in other words, on a trace and in a setting of a fault above.
SAME = Edit("instep_optimized/draft_answers.py", "NO_OPINION = -1", "NO_OPINION = 0 - 1")
IDLE = replace(ROW_FOR_SLOT, id="the-same-number", edits=(SAME,), other=ROW_FOR_SLOT.expected)

RIGHT, PLANTED = {"instep": "right"}, {"instep": "planted"}
CONTROL = Arm(Exit.AGREED, 1.0, served=RIGHT, trail=("0 a", "1 b"), events=2, of=2)
FAULT = Fault(
    "made-up", "commit-index", "Nothing is wrong.", (), "accepted", Setting(), ("bytes",),
    other=Expected(1, "trunk", 0, "conv", "holds the state after 2"),
)


def finding(check: str = "bytes", tier: str = "T1", **otherwise: object) -> dict[str, object]:
    said = {"event": 1, "stage": "trunk", "layer": 0, "component": "conv", "where": "there",
            "diagnosis": "holds the state after 2 tokens", "explained": None}  # fmt: skip
    return {"check": check, "tier": tier, **said, **otherwise}


def diverged(*findings: dict[str, object]) -> Arm:
    return Arm(Exit.DIVERGED, 1.0, findings, {"bytes": "T1"}, PLANTED, ("0 a", "1 c"), events=2, of=2)


def judged(arm: Arm, control: Arm = CONTROL, fault: Fault = FAULT) -> Judged:
    return judge(fault, control, arm, RIGHT, PLANTED)


def result(*judged: Judged) -> Result:
    return Result(judged)


@pytest.fixture(scope="module")
def ran(warm: None) -> Result:
    some = [*(by_id()[name] for name in FEW), IDLE]
    (folder,) = {few_channels(fault.trace, 2).path.parent for fault in some}
    found = {one.fault.id: one for one in campaign(some, folder, jobs=2, text=False)}
    return Result(tuple(found[fault.id] for fault in some))


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_planted_fault_is_found_named_and_located(ran: Result, name: str) -> None:
    one = next(one for one in ran.judged if one.fault.id == name)
    assert not one.void and one.control.clean, one.void
    assert one.found and one.located and one.named == bool(one.fault.says), list(surprises(result_data.data_of(one)))
    assert one.arm.served != one.control.served == served(), "the planted source must have served"


@pytest.fixture
def here(instep: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arms of a campaign run in this process, whatever copy of the source they name."""

    def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        ended = instep(*words)
        return subprocess.CompletedProcess(words, ended.code, ended.out, ended.err)

    monkeypatch.setattr("instep_proof.faults.plant.run", run)


@pytest.mark.slow
def test_a_fault_that_does_not_fire_is_void(ran: Result) -> None:
    one = ran.judged[-1]
    assert one.fault is IDLE and one.arm.clean and "never fired" in one.void
    assert ran.exit is Exit.INCONCLUSIVE and len(ran.fired) == len(FEW)


@few(1)
@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("one", HARMLESS, ids=lambda one: one.id)
def test_edit_without_effect_is_not_reported(one: Harmless, tmp_path: Path) -> None:
    trace, out = few_channels(one.trace, 2).path, tmp_path / "out.json"
    with planted_here(*one.edits):
        edited = replayed(tmp_path, trace, one.how, out)
    assert edited.clean, edited.message or edited.error
    if one.fires:
        assert edited.trail != replayed(tmp_path, trace, one.how, out).trail, one.proof


@pytest.mark.slow
def test_printed_rows_are_the_judged_ones(ran: Result) -> None:
    said = shown(result_data.of(ran))
    assert f"{len(FEW)} of {len(FEW)} faults found" in said and "1 void" in said
    assert all(name in said for name in FEW)
    data = json.loads(json.dumps(result_data.of(ran, "abc").data()))
    assert (data["faults"], data["found"], data["located"], data["void"]) == (len(FEW) + 1, len(FEW), len(FEW), 1)
    assert data["commit"] == "abc" and data["machine"]["torch"] and data["exit"] == Exit.INCONCLUSIVE
    drawn = picture(matrix_of(data)).decode()
    signs = sum(drawn.count(f'class="{kind}"') for kind in ("yes", "meant"))
    assert drawn.startswith("<svg") and signs >= 4 * len(FEW)  # three signs, and a check


@WHOLE
def test_faulty_engine_generates_another_text(warm: None, tmp_path: Path) -> None:
    fault = by_id()["commit-index-minus-one"]
    folder, trace = plant.planted(tmp_path / "planted", *fault.edits), few_channels(fault.trace, 2).path
    faulty = spoken(folder, trace, speaking(fault.how), tmp_path / "faulty.json")
    right = spoken(plant.planted(tmp_path / "control"), trace, speaking(fault.how), tmp_path / "right.json")
    assert not right.error and right.drafts > 0 and right.texts.keys() == faulty.texts.keys() == right.states.keys()
    heard = hear(right, faulty, plant.digests(folder))
    assert heard.agreement < 1 and heard.states and not heard.equal and not heard.error
    same = hear(right, right, right.served)
    assert same.agreement == 1 and not same.states and not same.equal and not same.raised


def test_found_named_and_located() -> None:
    one = judged(diverged(finding()))
    assert one.found and one.named and one.located and result(one).exit is Exit.AGREED


@pytest.mark.parametrize(("arm", "says"), [
    (replace(diverged(), code=Exit.AGREED), "not found: made-up"),
    (diverged(finding("derived", "T2")), "not found: made-up"),
    (diverged(finding("bytes", "T4")), "by tokens or acceptance alone: made-up"),
    (diverged(finding(layer=1)), "0 of 1 are located exactly"),
    (diverged(finding(event=0)), "0 of 1 are located exactly"),
    (Arm(None, 9.0, error="it did not end within 300 s"), "not found: made-up"),
], ids=["nothing said", "by another check", "by tokens", "another layer", "another event", "no end"])  # fmt: skip
def test_a_fault_that_is_missed_or_lies_elsewhere_is_a_failure(arm: Arm, says: str) -> None:
    ended = result(judged(arm))
    assert ended.exit is Exit.DIVERGED and any(says in failure for failure in ended.failures), ended.failures


def test_wrong_name_is_printed_but_fails_nothing() -> None:
    one = judged(diverged(finding(diagnosis="differs")))
    assert one.found and not one.named and result(one).exit is Exit.AGREED
    assert any("not named 'holds the state after 2'" in line for line in surprises(result_data.data_of(one)))


@pytest.mark.parametrize("check", ["grown", "experts"])
def test_a_check_of_what_a_choice_was_made_of_is_not_tokens_alone(check: str) -> None:
    one = judged(diverged(finding(check, "T4")), fault=replace(FAULT, seen_by=(check,)))
    assert one.found and result(one).exit is Exit.AGREED
    chosen = judged(diverged(finding("decisions", "T4")), fault=replace(FAULT, seen_by=("decisions",)))
    assert chosen.found and result(chosen).exit is Exit.DIVERGED


def test_fault_without_a_sentence_is_not_named() -> None:
    one = judged(diverged(finding()), fault=replace(FAULT, other=Expected(1, "trunk", 0, "conv")))
    assert one.found and one.located and not one.named and not list(surprises(result_data.data_of(one)))


SAID = {"by": "bank", "says": "holds the state after 2 tokens"}


@pytest.mark.parametrize(("arm", "by"), [
    (diverged(finding()), "check"),
    (diverged(finding(explained=SAID)), "bank"),
    (diverged(finding(explained=SAID | {"by": "hypothesis"})), "hypothesis"),
    (diverged(finding(explained=SAID | {"says": "is twice the right value"})), "check"),
    (diverged(finding(diagnosis="differs"), finding()), ""),
    (replace(diverged(finding(diagnosis="differs")), message="holds the state after 2"), ""),
], ids=["the check", "the bank", "a hypothesis", "beside the bank", "not the first", "the command"])  # fmt: skip
def test_name_counts_once_for_its_author_in_the_first_finding(arm: Arm, by: str) -> None:
    one = judged(arm)
    assert one.named_by == by and one.named == bool(by)
    ended = result(one, judged(CONTROL))
    assert ended.named_by == {who: int(who == by) for who in ("check", "bank", "hypothesis")}
    found = json.loads(json.dumps(result_data.of(ended).data()))
    assert found["named_by"] == ended.named_by
    assert f"{int(bool(by))} named (" in result_data.said(found) and b"<svg" in picture(matrix_of(found))


@pytest.mark.parametrize("says", [
    "relative error 2.7e-01 by the norm", "row 0 is wrong", "8 of 8 bytes differ", "next_num_steps requests 3",
    "holds labels that do not belong here", "4 of 8 elements are NaN",
])
def test_the_size_of_an_error_is_no_name(says: str) -> None:
    with pytest.raises(ValueError, match="describes the effect, not the mistake"):
        Expected(1, "trunk", 0, "conv", says)


@pytest.mark.parametrize(
    ("arm", "control", "why"),
    [
        (replace(CONTROL, served=PLANTED), CONTROL, "it never fired"),
        (diverged(finding()), replace(CONTROL, code=Exit.DIVERGED, findings=(finding(),)), "the control is not clean"),
        (diverged(finding()), replace(CONTROL, events=1), "the control is not clean"),
        (diverged(finding()), Arm(4, 1.0, error="broken"), "the control is not clean: broken"),
        (diverged(finding()), replace(CONTROL, served=PLANTED), "the control was served by another source"),
        (replace(diverged(finding()), served=RIGHT), CONTROL, "the planted source did not serve"),
    ],
    ids=["never fired", "control diverged", "control stopped", "control broke", "wrong control", "wrong source"],
)
def test_run_without_proof_is_void(arm: Arm, control: Arm, why: str) -> None:
    one = judged(arm, control)
    assert why in one.void and not (one.found or one.named or one.located)
    ended = result(one)
    assert ended.exit is Exit.INCONCLUSIVE and not ended.failures
    assert any(f"void: {why}" in line for line in surprises(result_data.data_of(one)))


def test_a_single_byte_or_call_makes_a_fault_fire() -> None:
    quiet = replace(CONTROL, served=PLANTED)
    assert "never fired" in judged(quiet).void
    for arm in (replace(quiet, trail=("0 a", "1 c")), replace(quiet, calls={"gdn": 1})):
        assert not judged(arm).void and result(judged(arm)).exit is Exit.DIVERGED


def test_a_relation_finds_what_no_replay_can() -> None:
    related = Arm(Exit.DIVERGED, 1.0, (finding("alone"),), {"alone": "T1"}, PLANTED, events=2, of=2)
    one = judged(both(replace(CONTROL, served=PLANTED), related), fault=replace(FAULT, seen_by=("alone",)))
    assert one.found and one.located and not one.void


def test_text_and_acceptance() -> None:
    right = Said({"a": (1, 2, 3, 4)}, 10, 5, {"a": "x"}, RIGHT)
    other = Said({"a": (1, 9, 3)}, 10, 6, {"a": "y"}, PLANTED)
    heard = hear(right, other, PLANTED)
    assert heard.agreement == 0.5 and heard.raised and not heard.equal
    assert hear(right, replace(other, texts=right.texts), PLANTED).equal
    assert "did not serve" in hear(right, replace(other, served=RIGHT), PLANTED).error
    assert "broke" in hear(replace(right, error="x"), other, PLANTED).error


def test_a_fault_whose_text_has_moved_is_refused_before_anything_runs() -> None:
    moved = replace(FAULT, edits=(Edit("instep/verdict.py", "no_such_name", "0"),))
    with pytest.raises(BadInput, match=r"planting in instep/verdict\.py.*move the fault's text"):
        next(campaign([moved], TRACES))


@WHOLE
def test_a_copy_is_the_source_that_is_here(tmp_path: Path) -> None:
    assert plant.digests(plant.planted(tmp_path / "control")) == served()
    assert plant.digests(plant.planted(tmp_path / "planted", SAME)) != served()


def test_a_list_names_every_fault_and_plants_none(instep: Runner) -> None:
    ran = instep("faults", "--list", "--family", "draft")
    here, lines = FAMILIES["draft"], ran.out.splitlines()
    assert ran.code == 0 and lines[: len(here)] == [f"{f.id}  {f.kind}  {f.what}" for f in here]
    unnamed = [f"  {f.id}  {f.what}" for f in here if not f.says]
    assert unnamed and lines[len(here) : -2] == ["", "Planted and not named:", *unnamed]


def test_a_fault_is_named_only_by_its_mistake() -> None:
    fault, said = replace(FAULT, mistake="another-count"), {**SAID, "by": "hypothesis"}
    right, wrong = (judged(diverged(finding(explained=said | {"names": names})), fault=fault)
                    for names in (["all-zero", "another-count"], ["all-zero"]))  # fmt: skip
    assert right.named_by == "hypothesis" and not list(surprises(result_data.data_of(right)))
    assert not wrong.named and any("its mistake is another-count; the finding is all-zero" in line
                                   for line in surprises(result_data.data_of(wrong)))  # fmt: skip


def test_update_keeps_a_part_of_a_sentence_that_still_holds() -> None:
    fault = replace(FAULT, id="row-for-slot")
    whole = {"by": "bank", "says": "is all zero", "names": ["all-zero"]}

    def after(arm: Arm, says: str = FAULT.says) -> Expected:
        other = Expected(1, "trunk", 0, "conv", says)
        return updated({"row-for-slot": other}, [judged(arm, fault=replace(fault, other=other))])["row-for-slot"]

    assert after(diverged(finding(event=3))) == Expected(3, "trunk", 0, "conv", "holds the state after 2")
    assert after(diverged(finding(explained=whole, diagnosis="is all zero; 4 of 8 bytes differ"))).says == "is all zero"
    several = whole | {"names": ["all-zero", "from-zero"]}
    assert after(diverged(finding(explained=several, diagnosis="is all zero"))).says == "", "a list is no name"
    assert after(diverged(finding(diagnosis="4 of 8 bytes differ"))).says == "", "a size is no name"
    assert after(diverged(finding(diagnosis="length is 4")), "").says == "", "no sentence is a name here"
    assert updated({}, [judged(diverged(finding()), fault=replace(fault, other=None))])["row-for-slot"].says
    assert after(diverged(finding("derived"))) == FAULT.expected, "a fault that is not found has no other finding"
    assert after(replace(CONTROL, served=RIGHT)) == FAULT.expected, "nor has one that never fired"


def test_update_writes_the_expected_findings(instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, first = tmp_path / "expected.json", finding(event=7)
    monkeypatch.setattr("instep_proof.faults.catalogue.fault.EXPECTED", kept)
    monkeypatch.setattr("instep_proof.faults.campaign.campaign", lambda chosen, *_, **__: [
        judged(diverged(first), fault=fault) for fault in chosen])  # fmt: skip
    before, lines = recorded(), EXPECTED.read_text().splitlines()
    ran = instep("faults", "commit-index-last", "--update")
    wrong = [line for line in lines if line not in kept.read_text().splitlines()]
    assert len(wrong) == 1 and '"commit-index-last"' in wrong[0], "all others are written as they were"
    assert ran.code == 1 and "expected event 5" in " ".join(ran.out.split())
    after = json.loads(kept.read_text())
    assert after.keys() == before.keys() and after.pop("commit-index-last")["event"] == 7
    assert all(Expected(**one) == before[name] for name, one in after.items())
    assert instep("faults", "commit-index-last", "--update", "--dtype", "bfloat16").code == 2


TOP = Path(__file__).resolve().parents[2]


def test_fault_on_the_page_is_one_of_the_catalogue() -> None:
    page = (TOP / "docs" / "faults-adding.md").read_text()
    (family, example) = page.split("```python\n", 1)[1].split("\n```", 1)[0].split("\n\n")
    right, names = by_id()["commit-index-minus-one"], {"of_family": of_family, "Edit": Edit, "Setting": Setting}
    exec(family, names)
    (shown,) = eval(f"({example}\n)", names)
    assert replace(shown, edits=(), blind=()) == replace(right, edits=(), blind=())
    (edit,) = shown.edits
    source = " ".join((TOP / "optimized" / edit.file).read_text().split())
    assert source.count(edit.old) == 1 and edit.new not in source


def test_faults_with_a_mistake_are_those_that_a_hypothesis_named() -> None:
    recorded = read(TOP / "fixtures" / "results" / "faults.json")["results"]
    named = {row["id"]: row["named_by"] for row in recorded if row["named_by"]}
    written = {fault.id for fault in by_id().values() if fault.mistake and fault.says}
    assert written and {one for one, by in named.items() if by == HYPOTHESIS} == written


def test_every_fault_has_an_expected_finding_and_every_mistake_is_in_the_catalogue() -> None:
    assert recorded().keys() == by_id().keys()
    assert {fault.mistake for fault in by_id().values()} - {""} <= CATALOGUE.keys()


def test_list_of_faults_has_both_gaps(instep: Runner) -> None:
    done = instep("faults", "--list")
    faults, out = by_id().values(), done.out
    planted = {fault.mistake for fault in faults}
    unnamed, unplanted = out.partition("Planted and not named:")[2].split("Named and not planted")
    assert re.findall("^  ([a-z0-9-]+)  ", unnamed, re.M) == [fault.id for fault in faults if not fault.says]
    assert re.findall("^  ([a-z0-9-]+)  ", unplanted, re.M) == [name for name in CATALOGUE if name not in planted]
    named, written = (sum(bool(fault.says and has) for fault, has in zip(faults, of, strict=True))
                      for of in ([True] * len(faults), [fault.mistake for fault in faults]))  # fmt: skip
    assert done.code == 0 and (
        f"{len(faults)} faults: {written} named by a mistake of the catalogue, {named - written} by a general "
        f"explanation, {len(faults) - named} not named") in " ".join(out.split())


def test_a_fault_named_by_another_part_is_reported() -> None:
    fault = by_id()["row-before-decays"]
    found = {"check": "derived", "tier": "T2", "diagnosis": "", "event": fault.event, "stage": fault.place.stage,
             "layer": fault.place.layer, "component": fault.place.component}  # fmt: skip
    for by, reported in (("hypothesis", False), ("bank", True)):
        finding = {**found, "explained": {"by": by, "says": fault.says, "names": [fault.mistake]}}
        arm = Arm(1, 0.0, findings=(finding,), looked={"derived": "T2"})
        one = Judged(fault, Arm(0, 0.0), arm, "")
        assert any("named by bank" in line for line in surprises(data_of(one))) is reported


COMMITTED = TOP / "fixtures" / "results" / "faults.json"
EXPERTS = TOP / "fixtures" / "experts"
EVERY = [fault for faults in FAMILIES.values() for fault in faults]
BEGUN = Arm(Exit.AGREED, 1.0, served=RIGHT, trail=("0 a",), events=1, of=1)
FIRST, SECOND, THIRD = EVERY[:3]


def row(name: str, day: int, void: bool = False) -> Judged:
    """A fault that is found, located and named, or void, on that day."""
    fault = by_id()[name]
    said = {"check": fault.seen_by[0], "tier": "T1", "event": fault.event, "explained": None, "where": "there",
            "diagnosis": f"it {fault.says}", **fault.place._asdict()}  # fmt: skip
    also = {"check": "decisions", "tier": "T4"}
    arm = Arm(Exit.DIVERGED, 2.0, (said, also), {"bytes": "T1", "decisions": "T4"}, PLANTED, ("0 b",))
    session = Session(f"2026-01-0{day}T00:00:00+00:00", f"of day {day}", {"device": f"machine {day}"}, 3.0, day, 9.0)
    one = judge(fault, BEGUN, replace(BEGUN, served=PLANTED) if void else arm, RIGHT, PLANTED)
    return replace(one, session=session, heard=Heard(0.5, 0.5, 0.25, True))


def written(path: Path, *rows: Judged) -> Path:
    result_data.of(Result(rows)).write(path)
    return path


@few(1)
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
    monkeypatch.setattr("instep_proof.faults.plant.warm", nullcontext)  # nothing is planted
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
    again = json.loads(json.dumps(result_data.of(result_data.read(COMMITTED)).data()))
    for one in (*found["results"], *again["results"]):  # files of earlier revisions do not name the mistake
        mistake = one["expected"].pop("mistake", by_id()[one["id"]].mistake)
        assert mistake == by_id()[one["id"]].mistake
        one["expected"].pop("written_for", None)
    assert found["results"] == again["results"] and found["sessions"] == again["sessions"]
    assert all(found[name] == again[name] for name in ("exit", "faults", "named_by", "failures"))


def test_trials_of_a_farm_are_all_faults_next_to_those_with_their_control(
    tmp_path: Path, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [one["names"] for one in _trials(EVERY)]
    order = [name for names in trials for name in names]
    assert sorted(order) == sorted(by_id()) and {len(names) for names in trials[:-1]} == {A_TRIAL}
    controls = [(one.trace, *one.how.words()) for one in map(by_id().__getitem__, order)]
    assert len([*groupby(controls)]) == len(set(controls))

    def planted(words: Sequence[str], more: object) -> Ended:
        ids = [word for word in words[1:] if word in by_id()]
        assert words[-2:] == ("--jobs", "1") and "--no-text" in words
        content = written(tmp_path / f"{ids[0]}.json", *(row(name, 1) for name in ids)).read_bytes()
        return Ended(0, content, "", farm.source_of(words))

    monkeypatch.setattr(farm, "run_trial", planted)
    out = written(tmp_path / "all.json", row(FIRST.id, 1))
    asked = [FIRST.id, SECOND.id, THIRD.id]
    ran = instep("faults", *asked, "--farm", tmp_path / "farm", "--missing", "--no-text", "--json", out, "--jobs", 2)
    assert ran.code == Exit.AGREED and "1 of 1 trials are there" in ran.out, ran
    assert [one["id"] for one in json.loads(out.read_text())["results"]] == asked


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--jobs", "0"), "0 without --farm"), (("--farm", "{out}", "--update"), "--update"),
        (("--missing",), "--json"), (("--join", "{there}"), "--json"),
        *((("--json", "{out}", "--join", "{there}", *more), "to join plants nothing")
          for more in (("--farm", "farm"), ("--list",), ("--dtype", "bfloat16"))),
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


SAYS = """
import os, sys, instep, torch
print(instep.SAID, os.getcwd(), os.environ["COLUMNS"], sys.argv, __name__, torch.get_num_threads())
print("beside", file=sys.stderr)
"""
ENDS = (  # the words after `python -P`, and how a new Python ends with them: exit code, output, last line of errors
    (("-c", SAYS, "more", "words"), 0, "the copy {folder} 120 ['-c', 'more', 'words'] __main__ 1\n", "beside"),
    (("-c", "raise SystemExit(3)"), 3, "", ""), (("-c", "import sys; sys.exit('no')"), 1, "", "no"),
    (("-c", "1 / 0"), 1, "", "ZeroDivisionError: division by zero"),
    (("-c", "import os; os.kill(os.getpid(), 9)"), -9, "", ""),
    (("-m", "instep.within", "word"), 0, "__main__ ['{folder}/instep/within.py', 'word']\n", ""),
    (("-c", "import atexit; atexit.register(print, 'last')"), 0, "last\n", ""),
)  # fmt: skip


@WHOLE
@pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux alone")
def test_a_fork_ends_as_a_new_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "instep").mkdir()
    (tmp_path / "instep" / "__init__.py").write_text("SAID = 'the copy'\n")
    (tmp_path / "instep" / "within.py").write_text("import sys\nprint(__name__, sys.argv)\n")
    monkeypatch.setattr(plant, "forks", None)  # that of the module
    new = plant.run_python(tmp_path, *ENDS[0][0])
    assert new.stdout == ENDS[0][2].format(folder=tmp_path), "a new Python"
    with plant.warm():
        assert plant.forks is not None
        for words, code, output, error in ENDS:
            fork = plant.run_python(tmp_path, *words)
            assert (fork.returncode, fork.stdout) == (code, output.format(folder=tmp_path)), (words, fork.stderr)
            assert fork.stderr.splitlines()[-1:] == [error][: bool(error)], words
        assert plant.forks.spent > 0
        monkeypatch.setattr(plant, "TIMEOUT_S", 0.2)
        with pytest.raises(subprocess.TimeoutExpired):
            plant.run_python(tmp_path, "-c", "import time; time.sleep(60)")
        monkeypatch.setattr(plant, "TIMEOUT_S", 60.0)
        assert plant.run_python(tmp_path, "-c", "print(1)").stdout == "1\n", "one that was ended ends no other"
        lost = plant.run_python(tmp_path, "-c", "import os; os.kill(os.getppid(), 9)")
        assert lost.returncode == plant.LOST and "every run is forked from has ended" in lost.stderr
        assert plant.run_python(tmp_path, "-c", "print(1)").stdout == "1\n", "the server is started again"
    assert plant.forks is None
