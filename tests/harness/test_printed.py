"""The output of `relations`, `faults`, `fuzz`, `gate` and `doctor` for made-up results.

Leaves out: `replay` (`test_report.py`), and commands that run (`test_cli.py` and its neighbours).
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from instep.campaign.fuzz import result_document as fuzz
from instep.campaign.fuzz.campaign import Result, Settings
from instep.campaign.relations import result as relations
from instep.generate import render as generate
from instep.setting import Setting
from instep.verdict import Skipped, Tier, Verdict
from instep_proof.faults import result_data as faults
from instep_proof.faults.compare_with_control import Heard
from instep_proof.faults.compare_with_control import Result as Campaign
from instep_proof.faults.fault_runs import Arm
from instep_speed.gate import result_data as gate
from instep_speed.gate.input_and_result import Question, Report
from instep_speed.gate.statistics import Say
from support.inputs.outcomes import CONTROL, PLANTED, comparison, held, judged, outcome, shown
from support.running.command import Runner
from support.running.golden import Golden, sections
from support.running.pages import PLAN, gate_report, relation_run

SETTING = Setting("triton", strategy="snapshot", graphs=True)


def test_relations(golden: Golden) -> None:
    plan = SimpleNamespace(setting=SETTING, checkpoint=PLAN.checkpoint)
    run = relation_run(plan=plan, bitwise=True, checkpoint=Path("a model"))
    exact = comparison(tier=Tier.BITWISE, worst=0.0, allowed=0.0, elements=12_345)
    wrong = comparison(tier=Tier.DERIVED, worst=1.0, request="b", slot=5, diagnosis="the runs differ")
    late = replace(wrong, tier=Tier.BITWISE, allowed=0.0, event=43)
    skipped = held("drift", comparison())
    skipped.verdict.add([Skipped("drift", 0, "too few tokens")])
    agree = held("slots", exact), held("alone", comparison()), held("drift", lacks="labels have no error")
    golden("relations", sections({
        "agreed": shown(relations.of(replace(run, held=(*agree, skipped)))),
        "diverged": shown(relations.of(replace(run, held=(held("slots", wrong, late), held("poison", late))))),
        "inconclusive": shown(relations.of(replace(run, held=(held("slots"),)))),
    }))  # fmt: skip


def test_faults(golden: Golden) -> None:
    missed = replace(judged("missed"), arm=replace(CONTROL, served=PLANTED))
    broke = replace(judged("broke"), arm=Arm(None, 9.0, error="it did not end within 300 s"))
    every = (
        judged("row-for-slot"), judged("unwritten-snapshot"), replace(judged("elsewhere", layer=3)),
        judged("by-another", check="derived", tier="T2"), judged("by-the-blind", check="tokens", tier="T4"),
        judged("unnamed", "differs"), missed, broke, judged("void", void="it never fired: no byte differs"),
    )
    heard = Heard(0.5, 0.25, 0.5), Heard(1.0, None, None, True), Heard(error="broke")
    with_text = [replace(one, heard=said) for one, said in zip(every, heard, strict=False)]
    golden("faults", sections({
        "all as the catalogue expects": shown(faults.of(Campaign(every[:2]))),
        "everything that may be otherwise": shown(faults.of(Campaign(every))),
        "with the text of each": shown(faults.of(Campaign(tuple(with_text)))),
    }))  # fmt: skip


def test_fuzz(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    met = {"accepted: ragged": 1200, "a verify after a switch": 3}
    monkeypatch.setattr("instep.campaign.fuzz.coverage.CONDITIONS", [*met, "idle"])
    settings = Settings(Setting("plain"), Path("fixtures/tiny"), 400, 1, Path("found"))
    none, some = Result(settings), Result(settings, examples=37, events=1234, elements=5_000_000, seconds=2.5)
    some.coverage.met.update(met)
    some.coverage.events = Counter({"forward": 1000, "commit": 234})
    some.coverage.pairs.update({("forward", "commit"): 9})
    some.refused.update({"admit": 7})
    found = outcome(comparison(worst=2.0, request="b", diagnosis="holds the state after 2 tokens"), of=5)
    once = replace(some, found=found, again=False, cut="its time was over")
    golden("fuzz", sections({
        "nothing found": shown(fuzz.of([some])), "nothing compared": shown(fuzz.of([none])),
        "found": shown(fuzz.of([replace(some, found=found)])), "found once": shown(fuzz.of([once])),
    }))  # fmt: skip


def test_gate(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "fingerprint", lambda device: {"torch": "2", "device": device, "cores": None})
    calibrated = {"trials": 200, "date": "2026-11-22T00:00:00", "slowed": 0.08, "ratio": {"verify": {"wall": 1.063}},
                  "says": {"A/A": {"verify": {"held": 200}}, "slowed": {"verify": {"slower": 193}}},
                  "independent": 200}  # fmt: skip
    before = {name: value for name, value in calibrated.items() if name != "independent"}
    kept = iter([calibrated, None, before | {"pairs": 129, "setting": {"pairs": 60}}])
    monkeypatch.setattr(gate, "known", lambda *asked: next(kept))
    question = Question("plain", "triton", Path("model"))
    report, refused = partial(gate_report, question, wide=True), Report(question, refused="after: DIVERGED  course")
    golden("gate", sections({
        "held, and noisy by one clock": shown(gate.of(report(
            ("verify", "wall", Say.HELD), ("verify", "cpu", Say.NOISY), ("commit", "wall", Say.HELD),
        ))),
        "slower, and inconclusive": shown(gate.of(report(
            ("verify", "wall", Say.SLOWER), ("verify", "cpu", Say.HELD), ("commit", "wall", Say.NOISY),
        ))),
        "refused": shown(gate.of(refused)),
        "calibrated by trials that overlap": shown(gate.of(report(
            ("verify", "wall", Say.HELD), ("commit", "wall", Say.HELD),
        ))),
    }))  # fmt: skip


def test_generate_of_a_wrong_engine(golden: Golden) -> None:
    found = [comparison(worst=2.0, request="b", slot=5, diagnosis="holds the state after 2 tokens")]
    decoded = SimpleNamespace(states={"b": None}, ask=SimpleNamespace(prompts={"a": (), "b": ()}))
    golden("generate-wrong", sections({
        "diverged": generate.judged(decoded, Verdict(found)),  # type: ignore[arg-type]
        "nothing compared": generate.judged(decoded, Verdict()),  # type: ignore[arg-type]
    }))  # fmt: skip


def test_doctor(golden: Golden, instep: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"python": "3.11", "torch": "2", "safetensors": "1", "msgspec": "1", "triton": None}
    monkeypatch.setattr("instep.cli.doctor.findings", lambda: found)
    monkeypatch.setattr("instep.cli.doctor.platform.python_version_tuple", lambda: ("3", "14", "0"))
    golden("doctor", instep("doctor").out)
    monkeypatch.setattr("instep.cli.doctor.findings", lambda: {**found, "torch": None})
    assert instep("doctor").code == 2
