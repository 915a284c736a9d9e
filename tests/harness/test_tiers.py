"""A run of chosen tiers: it judges those, lists the others, and a known finding hides nothing.

Leaves out: the comparisons of each tier.
"""

import json
from pathlib import Path

import pytest

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier, tiers_of
from instep_reference.contract.errors import BadInput
from support.inputs.few_channels import few_channels
from support.running.command import Runner, complaint

pytestmark = pytest.mark.slow  # whole replays or commands

TRACE = "accepted"
LOUDER = "support.wrong.subjects:LOUDER"  # one percent too much in every gated norm: numeric, from the first prefill on
STALE = "support.wrong.ops:LATE_AND_LOUD"


def test_names_are_read_with_commas_and_repeated() -> None:
    assert tiers_of(["T0,T2d", "T1"]) == {Tier.IDENTITY, Tier.DIRECTED, Tier.BITWISE}
    assert tiers_of([]) == frozenset(Tier)
    for wrong in ("t0", "T5", "", "T0,,T1"):
        with pytest.raises(BadInput):
            tiers_of([wrong])


def test_a_numeric_finding_does_not_hide_the_rest() -> None:
    replay = Replay(few_channels(TRACE, 2), Setting(LOUDER))
    whole = replay.run()
    assert whole.verdict.exit is Exit.DIVERGED and whole.verdict.events < whole.of
    assert {found.tier for found in whole.verdict.findings} <= {Tier.DERIVED, Tier.PROPAGATED, Tier.DIRECTED}
    exact = replay.run(tiers={Tier.IDENTITY, Tier.BITWISE, Tier.DIRECTED})
    assert exact.verdict.exit is Exit.AGREED and exact.verdict.events == exact.of
    assert {compared.tier for compared in exact.verdict.compared} == {Tier.IDENTITY, Tier.BITWISE, Tier.DIRECTED}
    assert exact.left_out == (Tier.DERIVED, Tier.PROPAGATED, Tier.DECISIONS)


def test_finding_after_a_numeric_finding_is_found() -> None:
    """Two faults: every gated norm is too loud, and one commit leaves the state where it was."""
    replay = Replay(few_channels(TRACE, 2), Setting(STALE, strategy="snapshot"))
    assert replay.run().verdict.findings[0].place.component == "gated"
    found = replay.run(tiers=[Tier.DIRECTED]).verdict.findings[0]
    assert (found.kind, found.place.component) == ("commit", "state"), found


def test_exception_is_a_finding_for_any_choice_of_tiers() -> None:
    replay = Replay(few_channels(TRACE, 2), Setting("support.wrong.subjects:refusing"))
    assert replay.run(tiers=[Tier.DECISIONS]).verdict.findings[0].check == "serves"


@pytest.mark.parametrize("tier", list(Tier))
def test_every_tier_runs_alone(tier: Tier, trace: Trace) -> None:
    verdict = Replay(trace, Setting("plain")).run(tiers=[tier], until=6).verdict  # a first commit
    assert verdict.exit is Exit.AGREED and {compared.tier for compared in verdict.compared} == {tier}


def test_tiers_that_compare_nothing_are_inconclusive(instep: Runner) -> None:
    ran = instep("replay", few_channels(TRACE, 2).path, "--ops", "ledger", "--tiers", "T2,T3")
    assert ran.code == 3 and "inconclusive" in ran.out, ran


def test_output_lists_the_tiers_that_were_left_out(instep: Runner, tmp_path: Path) -> None:
    trace, file, page = few_channels(TRACE, 2).path, tmp_path / "a.json", tmp_path / "a.html"
    ran = instep("replay", trace, "--ops", "plain", "--tiers", "T0", "--tiers", "T2d,T1", "--json", file,
                 "--html", page)  # fmt: skip
    assert ran.code == 0 and "<p>only T0,T1,T2d judged; left out: T2,T3,T4</p>" in page.read_text()
    assert ran.out.strip().splitlines()[-1] == "only T0,T1,T2d judged; left out: T2,T3,T4"
    (run,) = json.loads(file.read_text())["runs"]
    assert run["asked"] == ["T0", "T1", "T2d"] and run["left_out"] == ["T2", "T3", "T4"]
    ran = instep("replay", trace, "--ops", LOUDER, "--tiers", "T3", "--no-ladder")
    assert ran.code == 1 and "--tiers T3" in ran.out.splitlines()[-2]
    assert "only T3 judged" in ran.out.strip().splitlines()[-1]


def test_run_of_all_tiers_lists_no_omission(instep: Runner) -> None:
    ran = instep("replay", few_channels(TRACE, 2).path, "--ops", "plain", "--until", 3)
    assert "left out" not in ran.out


def test_the_ladder_climbs_with_the_same_tiers() -> None:
    """Without them another tier's finding would stay, and nothing would be confirmed."""
    from instep.diagnose import locate

    replay = Replay(few_channels(TRACE, 2), Setting(STALE, strategy="snapshot"))
    outcome = replay.run(tiers=[Tier.DIRECTED])
    assert locate(replay, outcome).cause != "unconfirmed"


def test_an_unknown_tier_is_refused_in_a_line(instep: Runner) -> None:
    said = complaint(instep("replay", few_channels(TRACE, 2).path, "--tiers", "T9"))
    assert "--tiers: found 'T9', expected some of T0, T1, T2, T2d, T3, T4" in said
