"""Parts of checks of drawn tokens, trees, states and prefixes, each alone on values made by hand.

Leaves out: what another file of this folder computes, and whole runs (`test_trees.py`, `test_prefixes.py`).
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import (
    decisions,
    grown_trees,
    one_sided_errors,
    prefix_findings,
    recomputed_values,
    sampled_tokens,
    unchanged_bytes,
)
from instep.checks.check_interface import compared
from instep.checks.grown_trees import MISTAKES as TREES
from instep.finding_problem import Problem
from instep.oracle.storage_rounding import rounded
from instep.tier_allowances import granted
from instep.verdict import Tier
from instep.watch.rows_by_request import RowSpan
from instep_reference.contract.answers import RequestState
from instep_reference.contract.declared_rounding import CHUNK, KEPT, Product
from instep_reference.contract.engine import Fetch
from instep_reference.contract.place_names import Place
from instep_reference.draft.grow_draft_tree import Growing
from support.inputs.check_contexts import of_facts as context

# -- choices and drawn tokens ----------------------------------------------------------------------------


def test_the_first_accepted_child_is_drawn() -> None:
    """A uniform of half a weight accepts the second of two children with half of the weight each, and 0.49 the first.

    Token 0 is the first child. With no weight left, nothing is drawn.
    """
    for uniform, drawn in ((0.49, 0), (0.5, 1), (1.0, -1)):
        drawing: Any = SimpleNamespace(at_nodes=[uniform], final=0.0, tokens=(9, 0, 1), parents=(-1, 0, 0))
        assert sampled_tokens.choices(torch.tensor([[0.5, 0.5]]), drawing) == [drawn]


def test_logits_with_one_number_that_is_not_finite_choose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = torch.zeros(2, 3)
    monkeypatch.setattr(decisions, "rows", lambda side, place, span: seen)
    for whole, kind, lost in ((False, "verify", {"a"}), (False, "decode", set()), (True, "verify", None)):
        check, span = decisions.Decisions(), SimpleNamespace(request="a", kind=kind)
        given: Any = SimpleNamespace(shown=SimpleNamespace(whole=whole), subject=None, index=4)
        seen[1, 2] = 0
        assert check._without_choice(given, Place("trunk", 0, "pick"), span) is None  # type: ignore[arg-type]
        seen[1, 2] = torch.nan
        found = check._without_choice(given, Place("trunk", 0, "pick"), span)  # type: ignore[arg-type]
        assert (None if found is None else check.lost) == lost


# -- grown trees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "drafts", "tokens", "parents"), [
    ("ties-by-higher-number", 4, [5, 6, 7, 9], [0, 0, 1, 2]), ("score-without-parent", 3, [5, 7, 9], [0, 1, 0]),
    ("probabilities-added", 3, [7, 8, 9], [0, 0, 0]), ("parent-one-beam-too-high", 3, [5, 6, 9], [0, 0, 1]),
    ("parent-one-beam-too-low", 3, [5, 6, 9], [0, 0, 1]), ("parent-of-another-score", 3, [5, 6, 7], [0, 0, 2]),
    ("last-step-alone", 3, [7, 8, 9], [0, 0, 0]), ("first-candidates", 2, [5, 6], [0, 0]),
    ("nodes-by-score", 3, [5, 7, 6], [0, 1, 0])])  # fmt: skip
def test_a_wrong_way_to_grow_gives_its_tree(name: str, drafts: int, tokens: list[int], parents: list[int]) -> None:
    """Two beams, 5 and 6. The scores are -0.125 and -2, then -1.125 (7), -2.25 (8) after 5, -2.25 (9), -6 (4)."""
    (wrong,) = (one.wrong for one in TREES if one.name == name)
    for growing, right in ((wrong(2), False), (Growing(2), True)):
        for said in ([[(5, -0.125), (6, -2.0)]], [[(7, -1.0), (8, -2.125)], [(9, -0.25), (4, -4.0)]]):
            growing.step(said)
        assert (growing.tree(drafts) == (tokens, parents)) is not right
    assert growing.tree(4) == ([5, 6, 7, 8], [0, 0, 1, 1])


def test_a_tree_that_rounding_allows_is_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grown_trees, "mistake", lambda *given: None)
    monkeypatch.setattr(grown_trees, "_wrong", lambda *given: {})
    due, other = ([5, 6], [0, 0]), ([5, 7], [0, 1])
    for told, part, worst, ties in ((due, 9.0, 0.0, 0), (other, 1.0, 1.0, 1), (other, 1.5, 1.5, 0),
                                    (other, 0.0, math.inf, 0)):  # fmt: skip
        found = grown_trees.Grown()._follows(context(rounded=None), "a", {"a": told}, due, part)  # type: ignore[call-arg]
        assert (found.worst, found.undecided, found.elements) == (worst, ties, 4)
        says = "the grown tree is 5<0 7<1; its own logits give 5<0 6<0" if worst > 1 else ""
        assert found.diagnosis == says and found.agrees is (worst <= 1)


def test_the_allowed_error_of_a_score_grows_with_the_largest_logit() -> None:
    row = torch.tensor([1.0, -8.0, 2.0], dtype=torch.float64)
    growth: Any = SimpleNamespace(logits=[[row]])
    for noise in (0.25, None):
        due = 0.0 if noise is None else float(granted(torch.tensor(8.0), torch.tensor(noise), torch.float32))
        assert grown_trees.Scores(growth, noise, torch.float32)._granted(()) == due


# -- calls, graphs and memory ----------------------------------------------------------------------------


def test_products_are_exact_in_fp32_and_one_part() -> None:
    for product, exact in ((Product("ieee"), True), (Product("tf32"), False), (Product("ieee", parts=2), False)):
        assert one_sided_errors.are_exact({"linear": Product("ieee"), "mlp": product}) is exact


# -- memory ----------------------------------------------------------------------------------------------


def test_a_request_may_hold_its_state_rounded_as_in_a_prefix() -> None:
    """A chunk rounds to bfloat16, a prefix then to float16. A commit makes a prefix with the second rounding alone."""
    state = torch.tensor([[[1 + 2.0**-9, 1 + 2.0**-12]]])
    piece: Any = SimpleNamespace(prefix="")
    both, chunk = {CHUNK: torch.bfloat16, KEPT: torch.float16}, {CHUNK: torch.bfloat16}
    for rounds, found, known in ((both, rounded(state, torch.float16), True), (both, state, False), ({}, state, False),
                                 (chunk, rounded(state, torch.bfloat16), True)):  # fmt: skip
        check: Any = SimpleNamespace(oracle=SimpleNamespace(rounds=rounds))
        assert (recomputed_values.Derived._misrounded(check, piece, found, state) is not None) is known


def test_the_next_draft_is_what_the_draft_extend_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's last row and its pick count if the extend has them, and if the request has a root."""
    kept = dict[str, Any]()
    monkeypatch.setattr(unchanged_bytes, "rows", lambda side, place, span: kept[place.component])
    check: Any = SimpleNamespace(_same=lambda context, place, name, found, right: (found, int(right)))
    monkeypatch.setattr(unchanged_bytes, "exact", lambda check, context, place, found, right, *more: (found, right))
    names = unchanged_bytes.PROPOSED.component, unchanged_bytes.PROPOSAL.component
    three, one = torch.tensor([1, 2, 3]), torch.tensor([7])
    for rows, pick, logit_rows, root, due in (
        (three, one, 1, 5, [("row", 3), ("pick", 7)]), (None, one, 1, 5, [("pick", 7)]),
        (three[:2], one, 1, 5, [("pick", 7)]),
        (three, None, 1, 5, [("row", 3)]), (three, three, 1, 5, [("row", 3)]), (three, one, 0, 5, []),
        (three, one, 1, None, []),
    ):  # fmt: skip
        kept.update(zip(names, (rows, pick), strict=True))
        extend: Any = SimpleNamespace(request="a", count=3, logit_rows=logit_rows)
        given: Any = SimpleNamespace(subject=None, expected=SimpleNamespace(roots_after={"a": root}))
        after: Any = SimpleNamespace(proposal_hidden="row", proposal="pick")
        assert [*unchanged_bytes.Bytes._proposed(check, given, extend, after)] == due


def test_rows_of_a_prefix_that_a_load_computes_end_the_draft_heads_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix with three rows, whose load computes the rows from the second on, or shows none."""
    rows = torch.arange(3.0)[:, None, None]
    kept = RequestState(3, None, None, None, {}, {}, {}, {}, {0: rows}, {0: rows + 10}, tail={}, final=torch.zeros(2))
    monkeypatch.setattr(unchanged_bytes, "row_spans", lambda context, stage: [RowSpan("a", "prefill", 0, 2, 1, 0, 0)])
    for shown, due in ((None, [0]), (rows[:2] + 5, [0, 5, 6])):
        monkeypatch.setattr(unchanged_bytes, "rows", lambda side, place, span, shown=shown: shown)
        check: Any = SimpleNamespace(_narrow=False, oracle=None, _entries=lambda source, row: row)
        found = unchanged_bytes.Bytes._extended(check, context(subject=None), kept)
        assert found.draft_keys[0].flatten().tolist() == due and found.tail == {}
        assert found.draft_values[0].flatten().tolist() == [10, *due[1:]]


def test_a_state_of_another_dtype_than_declared_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its numbers are right or not."""
    right = torch.ones(1, 2, 8, dtype=torch.float64)
    for dtype, factor, says in ((torch.float16, 1, True), (torch.bfloat16, 1, False), (torch.float16, 2, True)):
        piece: Any = SimpleNamespace(
            yardsticks=SimpleNamespace(state=right[None]), layer=0, request="a", prefix="kept", span=SimpleNamespace(
                start=0, count=1), kept_in=lambda rounds: (torch.bfloat16,), place=lambda name: Place("trunk", 0, name),
            left=lambda side, dtype=dtype, factor=factor: SimpleNamespace(state={0: (right * factor).to(dtype)}))
        check = recomputed_values.Derived(SimpleNamespace(rounds={}))  # type: ignore[arg-type]
        monkeypatch.setattr(check, "_misrounded", lambda *given: None)
        (found,) = check._state(context(subject=None), piece, right)
        assert found.agrees is not says
        assert found.problem is None or found.problem.dtypes == ("torch.float16", "torch.bfloat16")


# -- names of mistakes in checks -------------------------------------------------------------------------


def test_slots_of_prefixes_are_wrong_in_one_of_three_ways() -> None:
    for found, right, names in (
        ({"a": 2, "b": 3}, {"a": 2}, ("track-slot-kept",)), ({"a": 1}, {"a": 2}, ("track-slot-not-taken",)),
        ({"a": 3, "b": 5}, {"a": 2, "b": 4}, ("track-slot-taken",)), ({"a": 2}, {"a": 2}, ("track-slot-taken",)),
        ({"a": 2}, {"a": 2, "b": 4}, None),
    ):  # fmt: skip
        known = prefix_findings.wrong_slots(found, right)
        assert (None if known is None else known.names) == names, (found, right)


def test_memory_in_a_narrower_dtype_than_declared_is_wrong() -> None:
    wide, narrow = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    spot: Any = SimpleNamespace(name="bytes", tier=Tier.BITWISE)
    for worst, problem in ((0.0, None), (5.0, Problem("differs", "differs"))):
        result = compared(spot, context(), Place("trunk", 0, "keys"), 2, worst, problem)
        check = unchanged_bytes.Bytes()
        assert all(check._as_declared(result, found, torch.float32) is result for found in (wide, None))
        found = check._as_declared(result, narrow, torch.float32)
        assert found.worst == max(worst, 1.0) and not found.agrees
        assert found.problem is not None and found.problem.dtypes == ("torch.bfloat16", "torch.float32")


def test_a_prefix_moves_with_all_parts_that_have_numbers() -> None:
    """Keys are right, the final row is wrong or missing, and a part without numbers is not compared."""
    keys, none = Place("trunk", 0, "keys"), Place("trunk", 1, "keys")

    def state(final: Any) -> Any:
        return SimpleNamespace(length=2, final=final, parts=lambda: [(keys, torch.ones(2)), (none, torch.zeros(0))])

    expected = SimpleNamespace(prefixes={"p": 2}, slots_after={}, slots_before={})
    one, other = torch.ones(1), torch.zeros(1)
    for kept, found, due in ((one, one, ["keys", "final"]), (one, other, ["keys"]), (one, None, ["keys"]),
                             (None, None, ["keys"])):  # fmt: skip
        saved = SimpleNamespace(state=state(kept), sent=None)
        given = context(event=Fetch("p"), expected=expected, earlier=SimpleNamespace(saved={"p": saved}),
                        subject=SimpleNamespace(tracked={"p": state(found)}))  # fmt: skip
        results = [*unchanged_bytes.Bytes()._moved_whole(given, "p")]
        assert [each.place.component for each in results if each.agrees] == due
        assert len(results) == 1 + (kept is not None) and all(each.request is None for each in results)
        assert all(each.problem is None or each.problem.moved == "back" for each in results)
        given.expected = SimpleNamespace(prefixes={})
        assert not [*unchanged_bytes.Bytes()._moved_whole(given, "p")]
