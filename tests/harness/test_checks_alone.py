"""Parts of checks and of the search for causes, each alone on values made by hand, one of which is wrong.

Leaves out: whole runs (`test_checks.py`, `test_ladder.py`), and formulas of explanations (`test_mistakes.py`).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import graph_replays, op_call_contracts
from instep.checks.experts import Experts
from instep.checks.grown_tree_mistakes import MISTAKES as TREES
from instep.checks.trace_bookkeeping import Identity
from instep.diagnose.confirm_cause import _Climb
from instep.verdict import Comparison, Skipped, Tier
from instep_reference.contract.engine import Draft, Forward, Load, Row
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.draft.grow_draft_tree import Growing

TRUNK = Place("trunk", 0, "hidden")


def context(**given: Any) -> Any:
    """An event context of these facts. log: one without poison"""
    return SimpleNamespace(**{"index": 4, "kind": "forward", "log": SimpleNamespace(poison=None), **given})


# -- trees, experts, bookkeeping -------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parents"), [("parent-one-beam-too-high", [3, 5, 4]),
                                               ("parent-one-beam-too-low", [5, 4, 3])])  # fmt: skip
def test_wrong_parents_are_beams_of_the_last_step(name: str, parents: list[int]) -> None:
    (wrong,) = (one.wrong for one in TREES if one.name == name)
    growing: Growing = wrong(3)
    growing.beams = [[-1], [0, 1, 2], [4, 3, 5]]
    assert [growing.parent(beam) for beam in range(3)] == parents


def test_a_request_parts_from_the_truth_with_a_copy_that_parted() -> None:
    """A load from a copy of a request that took other experts, and one from another copy."""
    experts = Experts(SimpleNamespace(config=SimpleNamespace(experts=0)))  # type: ignore[arg-type]
    experts.kept = {"parted"}
    for name in ("other", "parted"):
        assert not experts.parted
        assert not [*experts(context(event=Load("a", name), rounded=object()))]
    assert experts.parted == {"a"}


def test_a_place_that_the_subject_lacks_has_0_rows() -> None:
    whole = SimpleNamespace(place=lambda place: True, whole=True)
    span = SimpleNamespace(at=lambda place: (0, 3))
    event = Forward((Row("a", "prefill", 3),))
    expected = SimpleNamespace(prompts={"a": (1, 2, 3)}, lengths_after={"a": 3}, windows={}, parents={})
    truth = SimpleNamespace(places={TRUNK: torch.zeros(3, 2)})
    given = context(event=event, truth=truth, subject=SimpleNamespace(places={}), shown=whole, expected=expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instep.checks.trace_bookkeeping.row_spans", lambda context, stage: [span])
        (found,) = Identity()._row_counts(given)
    assert found.diagnosis == "has 0 rows; expected 3"


def test_picks_of_a_block_are_those_after_the_root() -> None:
    """Two requests with blocks of 3 tokens: the root, whose pick is not used, and two drafts."""
    picks = {Place("block", AFTER_LAYERS, "pick"): torch.tensor([90, 11, 12, 91, 21, 22])}
    state = SimpleNamespace(block_keys={0: torch.zeros(1)})
    expected = SimpleNamespace(lengths_after={"a": 5, "b": 7}, parents={"a": (-1, 0, 1), "b": (-1, 0, 1)}, topk=None)
    given = context(event=Draft(("a", "b")), expected=expected,
                    subject=SimpleNamespace(before={"a": state, "b": state}, places=picks))  # fmt: skip
    found = [pick for *_, pick in Identity()._heads(given, 1, "b", 2)]
    assert found == [21, 22] and [*Identity()._heads(given, 1, "b", 0)] == []


# -- graphs ----------------------------------------------------------------------------------------------


def replayed(**inputs: Any) -> Any:
    """A replay whose host inputs are right, so that only the buffer can be wrong. inputs: name -> buffer, idle value"""
    return SimpleNamespace(inputs={name: ([7], *both) for name, both in inputs.items()})


def test_a_graph_of_an_idle_replica_serves_no_slot() -> None:
    given = context(group=object(), expected=SimpleNamespace(slots_after={"a": 2}))
    assert not [*graph_replays._slots(given, replayed(slots=([-1, -1], -1)), ())]
    (says,) = graph_replays._slots(given, replayed(slots=([-1, 3], -1)), ())
    assert says.startswith("the graph serves slot 3 on a replica that has no request")
    (says,) = graph_replays._slots(given, replayed(slots=([3, -1], -1)), ("a",))
    assert says == 'the graph serves request "a" in slot 3; the trace has it in slot 2'


def test_a_row_of_a_mixed_batch_has_a_slot_for_its_kind_alone() -> None:
    event = Forward((Row("a", "verify"), Row("b", "decode")))
    given = context(event=event, expected=SimpleNamespace(slots_after={"a": 2, "b": 5}))
    assert not [*graph_replays._kinds(given, replayed(kinds=([[2, -1], [-1, 5]], -1)), ("a", "b"))]
    (says,) = graph_replays._kinds(given, replayed(kinds=([[], [5, 5]], -1)), ("a", "b"))
    assert says == 'the graph has slot 5 for a verify of request "b"; the trace has -1'


def test_calls_that_are_shown_are_judged_when_a_graph_hides_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay shows the target's conv and the draft head's attention. No call serves a recurrence of the target."""
    core, at = Place("trunk", 0, "core"), {name: Place("trunk", 0, name) for name in ("mixed", "core")}
    served = [SimpleNamespace(op="conv", place=at["mixed"], count=1, part=0, begin=0, form="window", units=(2,),
                              before=0, branches=()),
              SimpleNamespace(op="attend", place=Place("extend", 0, "attended"))]  # fmt: skip
    span = SimpleNamespace(request="a", kind="decode", count=1)
    monkeypatch.setattr(op_call_contracts, "row_spans", lambda context, stage: [span])
    monkeypatch.setattr(op_call_contracts, "_due", lambda context, op, place: [(span, served[0])])
    given = context(log=SimpleNamespace(served=served, replays=[1]), truth=SimpleNamespace(places={core: None}),
                    shown=SimpleNamespace(inside=()), stages=None, group=None,
                    expected=SimpleNamespace(slots_after={"a": 2}, slots_before={}))  # fmt: skip
    (found,) = op_call_contracts.Contracts()._served(given)
    assert isinstance(found, Comparison) and "no call serves the 1 row of request" in found.diagnosis
    given.log.served = served[1:]
    (found,) = op_call_contracts.Contracts()._served(given)
    assert isinstance(found, Skipped)


# -- the search for causes ---------------------------------------------------------------------------------


def climb(**given: Any) -> Any:
    return SimpleNamespace(event=4, at=TRUNK, first=SimpleNamespace(request="a"), found=[], **given)


def test_memory_is_compared_if_an_event_before_the_finding_did() -> None:
    """Keys were compared at an earlier event, values only at that of the finding, and states bit by bit alone."""
    places = {name: Place("trunk", 1, name) for name in ("keys", "values", "state")}
    state = SimpleNamespace(parts=lambda: [(place, torch.zeros(2)) for place in places.values()])
    compared = [SimpleNamespace(place=places[name], event=event, tier=tier) for name, event, tier in (
        ("keys", 3, Tier.DERIVED), ("values", 4, Tier.DERIVED), ("state", 3, Tier.BITWISE))]  # fmt: skip
    last = SimpleNamespace(truth=SimpleNamespace(after={"a": state}))
    missing = _Climb._memory_not_compared(climb(last=last, compared=compared))
    assert len(missing) == 2 and "keys" not in " ".join(missing)


def test_memory_that_its_first_reader_finds_wrong_again_is_the_cause() -> None:
    """With the reference's memory after event 4 the next event that reads it, 6, is the first finding, or 5 agrees."""
    state = Place("trunk", 1, "state")
    for again, agree in ((6, "event 5 agrees; event 6 corrupts it again"), (None, "events 5 to 6 agree")):
        left = [SimpleNamespace(event=again, place=state)] * (again is not None)
        its = climb(_another_strategy=lambda: None, _keepers_ops=list, _readers=lambda: [6, 40],
                    _left=lambda *given, left=left: left, _is=lambda cause, op, says, options=(): says)  # fmt: skip
        its.at, its.found = state, [SimpleNamespace(event=4, place=state)]
        assert str(_Climb.memory(its)).endswith(f"wrong memory (with the reference's memory restored, {agree})")
