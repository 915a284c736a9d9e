"""The sentence of a problem: every field is in it once, and decisions are made by the code."""

from dataclasses import replace

import pytest

from instep.diagnose.explanation_bank import _contracts, _unknown
from instep.diagnose.mistakes.finding_case import UNRECOGNISED
from instep.finding_problem import Explained, Problem, Unexplained, sentence
from instep.report.outcome_data import finding
from support.inputs.outcomes import comparison

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
    at_it, elsewhere = (comparison(check="bytes", worst=1.0, slot=slot, problem=write) for slot in (3, 4))
    assert _contracts(DIFFERS, here, [here, at_it]).written == write
    assert _contracts(DIFFERS, here, [here, elsewhere]).written is None
    other = replace(at_it, problem=Problem("differs", write.clause))
    assert _contracts(DIFFERS, here, [here, other]).written is None


def test_a_result_file_has_the_code_of_a_finding() -> None:
    assert finding(comparison(worst=1.0, problem=DIFFERS))["code"] == "differs"
    assert finding(comparison())["code"] is None
