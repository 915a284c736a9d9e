"""A verdict is a fold in which nothing compared, a NaN, and an infinity never pass, and the first finding comes first.

Leaves out: the checks that yield comparisons.
"""

from dataclasses import replace
from typing import Any

import pytest

from instep.audit.recorded_engine import allow_undecided_events
from instep.checks import known_wrong_states
from instep.diagnose.explanation_bank import _contracts, _unknown
from instep.diagnose.mistakes.finding_case import UNRECOGNISED
from instep.finding_problem import Explained, Problem, Unexplained, WrongContent, sentence
from instep.kit.replayed_trace import Divergence, replayed
from instep.report.divergence_message import message
from instep.report.outcome_data import finding
from instep.verdict import UNDECIDABLE, Comparison, Exit, Skipped, Stressed, Tier, Verdict, prefer_shared
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from support.inputs.outcomes import comparison
from support.running.command import Runner
from support.running.covering import TRACES

SHORT = TRACES / "faults" / "short.jsonl"
HIDDEN = Place("trunk", 0, "hidden")


def compared(
    worst: float = 0.1, allowed: float = 1.0, elements: int = 4, event: int = 0, place: Place = HIDDEN
) -> Comparison:
    return Comparison("c", Tier.DERIVED, event, "forward", place, elements, worst, allowed)


@pytest.mark.parametrize(("comparison", "agrees"), [
    (compared(), True),
    (compared(worst=1.0), True),
    (compared(worst=1.1), False),
    (compared(worst=float("nan")), False),
    (compared(allowed=float("nan")), False),
    (compared(worst=float("inf")), False),
    (compared(elements=0, worst=0.0), False),
])  # fmt: skip
def test_comparison_agrees_within_its_allowance(comparison: Comparison, agrees: bool) -> None:
    assert comparison.agrees is agrees
    verdict = Verdict()
    assert verdict.add([comparison]) == ([] if agrees else [comparison])
    assert verdict.exit == (Exit.AGREED if agrees else Exit.DIVERGED)


def test_the_mistake_that_most_findings_share_is_named_first() -> None:
    """A stale window is also a zero one; the state of the same event is only stale. Another event has no vote."""
    window = Explained.one_of((WrongContent("is all zero"), WrongContent("is an old window", "is an old state")))
    state = Explained.one_of((WrongContent("is an old state"),))
    zero = Explained.one_of((WrongContent("is all zero"),))
    found = [
        replace(compared(worst=2.0, event=event), problem=Problem("identified", mistake=mistake))
        for event, mistake in ((3, window), (3, state), (4, zero), (4, window))
    ]
    assert [each.diagnosis for each in prefer_shared(found)] == [
        "is an old window [equal bits: is all zero]", "is an old state",
        "is all zero", "is all zero [equal bits: is an old window]",
    ]


def test_undecided_events_alone_are_no_divergence() -> None:
    undecided = replace(compared(worst=0.6, allowed=0.5, event=1), check=UNDECIDABLE, tier=Tier.DIRECTED)
    verdict = Verdict()
    verdict.add([compared(), undecided])
    assert verdict.undecided and verdict.exit is Exit.INCONCLUSIVE
    assert message("t", verdict.findings, "n", ()).startswith("INCONCLUSIVE  t")
    wrong = compared(worst=2.0, event=2)
    verdict.add([wrong])
    assert verdict.findings == [wrong, undecided] and not verdict.undecided and verdict.exit is Exit.DIVERGED
    assert message("t", verdict.findings, "n", ()).startswith("DIVERGED  t")


@pytest.mark.slow
def test_a_run_in_which_nothing_could_be_decided_says_so(instep: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the check that counts undecided wrong states reports every event."""
    monkeypatch.setattr(known_wrong_states, "UNDECIDED_CAP", -1.0)
    ran = instep("replay", SHORT, "--ops", "plain", "--until", 4, "--no-ladder")
    assert ran.code == Exit.INCONCLUSIVE and "INCONCLUSIVE  short" in ran.out and "DIVERGED" not in ran.out
    assert "could not be distinguished from the right one" in ran.out
    assert "nothing wrong was found, but too little could be decided" in ran.out
    assert "nothing was compared" not in ran.out
    with pytest.raises(Divergence, match="INCONCLUSIVE  short"):
        replayed(SHORT, until=4).must_agree()


@pytest.mark.parametrize(("elsewhere", "exit"), [(5, Exit.INCONCLUSIVE), (10, Exit.AGREED)])
def test_a_recording_may_have_events_that_cannot_be_decided(elsewhere: int, exit: Exit) -> None:
    """Event 1 has 6 of 10 pairs undecided, and event 0 has 5 or 10 more pairs, of which 2 are undecided."""
    event = replace(compared(worst=0.6, allowed=0.5, elements=10, event=1), check=UNDECIDABLE, tier=Tier.DIRECTED,
                    undecided=6, problem=Problem("undecided", "6 of 10"))  # fmt: skip
    whole = replace(compared(elements=2000), tier=Tier.DIRECTED, undecided=2, pairs=elsewhere)
    within = replace(compared(elements=640, event=1), tier=Tier.DIRECTED, undecided=6, pairs=10)
    verdict = Verdict([whole, within, event])
    allow_undecided_events(verdict)
    assert verdict.exit is exit and [one.reason for one in verdict.skipped] == ["6 of 10"] * (exit is Exit.AGREED)


IDLE, ACTED = Stressed(0, "0 acts"), Stressed(2, "2 acts")


@pytest.mark.parametrize(("facts", "agrees"), [
    ({}, True), ({"served": False}, False), ({"stopped": "by a limit"}, False),
    ({"segmented": True}, False), ({"segmented": True, "replayed": 1}, True),
    ({"stages": 2}, False), ({"stages": 2, "relayed": 1}, True), ({"replicas": 2}, False),
    ({"replicas": 2, "shared": 1}, True), ({"micro_batches": 2}, False), ({"micro_batches": 2, "overlapped": 1}, True),
    ({"segmented": True, "stages": 2, "relayed": 1}, False), ({"replicas": 2, "overlapped": 1}, False),
    ({"stressed": {"poison": ACTED}}, True), ({"stressed": {"poison": ACTED, "races": IDLE}}, False),
])  # fmt: skip
def test_an_engine_must_have_used_what_the_run_is_about(facts: dict[str, Any], agrees: bool) -> None:
    """Graphs of prompts, stages, replicas, micro-batches, stress. A divergence counts all the same."""
    assert Verdict([compared()], **facts).exit is (Exit.AGREED if agrees else Exit.INCONCLUSIVE)
    assert Verdict([compared(worst=2.0)], **facts).exit is Exit.DIVERGED


def test_a_finding_is_lost_if_it_is_about_numbers_that_are_not_finite() -> None:
    for code, lost in ((None, False), ("differs", False), ("not_finite", True)):
        assert replace(compared(), problem=code and Problem(code)).lost is lost  # type: ignore[arg-type]


def test_nothing_compared_is_never_a_pass() -> None:
    verdict = Verdict()
    assert verdict.exit == Exit.INCONCLUSIVE
    verdict.add([Skipped("c", 0, "because")])
    assert verdict.exit == Exit.INCONCLUSIVE
    assert verdict.skipped[0].reason == "because"


def test_the_first_finding_is_the_first_in_the_data_flow() -> None:
    places = [
        Place("chain.10", 0, "normed"), Place("chain.2", 0, "normed"), Place("extend", 0, "normed"),
        Place("trunk", AFTER_LAYERS, "logits"), Place("trunk", 1, "state"), Place("trunk", 1, "core"),
        Place("trunk", 0, "hidden"), Place("trunk", STAGE_LEVEL, "embedding"),
    ]  # fmt: skip
    verdict = Verdict()
    verdict.add([compared(worst=2.0, event=1, place=Place("trunk", 0, "normed"))])
    verdict.add([compared(worst=2.0, place=place) for place in places])
    assert [f.place for f in verdict.findings[:-1]] == places[::-1]
    assert verdict.findings[-1].event == 1


def test_used_is_a_part_of_what_is_allowed() -> None:
    assert compared(worst=0.25, allowed=0.5).used == 0.5
    assert compared(worst=0.0, allowed=0.0).used == 0.0
    assert compared(worst=1.0, allowed=0.0).used == float("inf")


# -- sentences of problems


DIFFERS = Problem("differs", "3 of 8 bytes differ")
ZERO, OLDER = Explained("bank", "is all zero"), Explained("hypothesis", "holds the state from before the step")


@pytest.mark.parametrize(("changes", "text"), [
    ({}, "3 of 8 bytes differ"),
    ({"mistake": ZERO}, "is all zero; 3 of 8 bytes differ"),
    ({"mistake": ZERO, "clause": ""}, "is all zero"),
    ({"mistake": ZERO, "nearest": OLDER, "clause": ""},
     "is all zero; the nearest known wrong state: holds the state from before the step"),
    ({"like": ("a", ZERO)}, 'is all zero (seen in request "a"); 3 of 8 bytes differ'),
    ({"dtypes": ("bf16", "fp32")}, "is bf16, fp32 is declared; 3 of 8 bytes differ"),
    ({"moved": "back", "draft": "without the draft KV: "},
     "comes back different from what was saved: without the draft KV: 3 of 8 bytes differ"),
    ({"prefix": "p", "mistake": ZERO},
     'tracked prefix "p": is all zero; 3 of 8 bytes differ'),
    ({"unexplained": Unexplained()}, "3 of 8 bytes differ; unexplained"),
    ({"unexplained": Unexplained(2)}, "3 of 8 bytes differ; unexplained: 2 explanations fit equally well"),
    ({"unexplained": Unexplained(error="KeyError: 3")},
     "3 of 8 bytes differ; unexplained: the search for an explanation raised KeyError: 3"),
    ({"broken": (Problem("broken_contract", "z is fp16"),), "written": Problem("forbidden_write", "8 bytes changed")},
     "3 of 8 bytes differ; a contract is broken at the same place: z is fp16; 8 bytes changed"),
])  # fmt: skip
def test_a_sentence_has_every_field_once(changes: dict[str, object], text: str) -> None:
    assert sentence(replace(DIFFERS, **changes)) == text  # type: ignore[arg-type]


def test_an_explanation_does_not_depend_on_the_sentence() -> None:
    """The code of a problem decides whether it needs an explanation, for every wording."""
    for clause in ("unknown: close to none of 9 wrong states", "resembles no known mistake", ""):
        assert _unknown(comparison(problem=Problem("unidentified", clause)))
        assert not _unknown(comparison(problem=Problem("identified", clause)))
    assert {"unidentified", "differs", "poison"} == set(UNRECOGNISED)


def test_a_forbidden_write_is_added_to_the_finding_at_the_same_memory() -> None:
    here = comparison(worst=1.0, slot=3, problem=DIFFERS)
    write = Problem("forbidden_write", "16 bytes changed")
    unread: Any = None  # the context, which bytes do not need
    at_it, elsewhere = (comparison(check="bytes", worst=1.0, slot=slot, problem=write) for slot in (3, 4))
    assert _contracts(DIFFERS, here, [here, at_it], unread).written == write
    assert _contracts(DIFFERS, here, [here, elsewhere], unread).written is None
    other = replace(at_it, problem=Problem("differs", write.clause))
    assert _contracts(DIFFERS, here, [here, other], unread).written is None


def test_a_result_file_has_the_code_of_a_finding() -> None:
    assert finding(comparison(worst=1.0, problem=DIFFERS))["code"] == "differs"
    assert finding(comparison())["code"] is None
