"""Parts of checks and of the search for causes, each alone on values made by hand, one of which is wrong.

Leaves out: whole runs (`test_checks.py`, `test_ladder.py`), and formulas of explanations (`test_mistakes.py`).
"""

import dataclasses
import math
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep import tier_allowances
from instep.checks import (
    capacity,
    check_interface,
    graph_replays,
    known_wrong_states,
    op_call_contracts,
    prefix_findings,
    ranks,
    recomputed_values,
    unchanged_bytes,
    unused_positions,
)
from instep.checks.declared_writes import Bounds
from instep.checks.error_measurement import Spot, granted_error, measured
from instep.checks.exact_labels import folded, states_of_window
from instep.checks.experts import Experts
from instep.checks.grown_trees import MISTAKES as TREES
from instep.checks.leaks import Leaks
from instep.checks.poison import Poison
from instep.checks.tensor_and_choice_judgement import flips, judge
from instep.checks.trace_bookkeeping import Identity
from instep.diagnose.confirm_cause import _Climb, _until
from instep.trace.request_table import RequestTable, Standing
from instep.trace.write_bound import Bound, bound
from instep.verdict import UNDECIDABLE, Comparison, Skipped, Tier, Verdict
from instep.watch.memory_changes import pattern
from instep_reference.contract.capacity import Capacity
from instep_reference.contract.engine import Draft, Forward, Idle, Load, Row
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.draft.grow_draft_tree import Growing
from support.inputs.traces import ROOM

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
    whole = SimpleNamespace(place=lambda place: True, whole=True, has=lambda feed: feed == "watch")
    span = SimpleNamespace(at=lambda place: (0, 3))
    event = Forward((Row("a", "prefill", 3),))
    expected = SimpleNamespace(prompts={"a": (1, 2, 3)}, lengths_after={"a": 3}, windows={}, parents={})
    truth = SimpleNamespace(places={TRUNK: torch.zeros(3, 2)})
    given = context(event=event, truth=truth, subject=SimpleNamespace(places={}), shown=whole, expected=expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instep.checks.trace_bookkeeping.row_spans", lambda context, stage: [span])
        (found,) = Identity()._row_counts(given)
        whole.whole = False  # the harness itself packs what comes after the layers
        truth.places[Place("trunk", AFTER_LAYERS, "final")] = torch.zeros(1, 2)
        assert [*Identity()._row_counts(given)] == [found]
    assert found.diagnosis == "has 0 rows; expected 3"


def test_picks_of_a_draft_head_are_those_of_its_kind() -> None:
    """Two requests with two drafts each. A block has the root, whose pick is not used, and the drafts."""
    picks = {Place("block", AFTER_LAYERS, "pick"): torch.tensor([90, 11, 12, 91, 21, 22])}
    state = SimpleNamespace(block_keys={0: torch.zeros(1)})
    expected = SimpleNamespace(lengths_after={"a": 5, "b": 7}, parents={"a": (-1, 0, 1), "b": (-1, 0, 1)}, topk=None)
    # An MTP head: the first draft was proposed before, the second is the pick of the step after it.
    chain = {Place("chain.1", AFTER_LAYERS, "pick"): torch.tensor([31, 32])}
    head = SimpleNamespace(block_keys={}, proposal=8)
    subject = SimpleNamespace(before={"b": head}, places=chain)
    given = context(event=Draft(("a", "b")), expected=expected, subject=subject)
    assert [pick for *_, pick in Identity()._heads(given, 1, "b", 2)] == [8, 32]
    assert not [*Identity()._heads(given, 1, "b", 0)] and not [*Identity()._heads(given, 0, "a", 2)]
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
    """A replay shows the target's conv and the draft head's attention. No call serves a recurrence of the target.

    A replay without a prompt hides all calls of the target.
    """
    core, at = Place("trunk", 0, "core"), {name: Place("trunk", 0, name) for name in ("mixed", "core")}
    served = [SimpleNamespace(op="conv", place=at["mixed"], count=1, part=0, begin=0, form="window", units=(2,),
                              before=0, branches=()),
              SimpleNamespace(op="attend", place=Place("extend", 0, "attended"))]  # fmt: skip
    span = SimpleNamespace(request="a", kind="decode", count=1)
    spans = [span]
    monkeypatch.setattr(op_call_contracts, "row_spans", lambda context, stage: spans)
    monkeypatch.setattr(op_call_contracts, "_due", lambda context, op, place: [(span, served[0])])
    given = context(log=SimpleNamespace(served=served, replays=[1]), truth=SimpleNamespace(places={core: None}),
                    shown=SimpleNamespace(inside=()), stages=None, group=None,
                    expected=SimpleNamespace(slots_after={"a": 2}, slots_before={}))  # fmt: skip
    (found,) = op_call_contracts.Contracts()._served(given)
    assert isinstance(found, Comparison) and "no call serves the 1 row of request" in found.diagnosis
    given.log.served = served[1:]
    for kind, skipped in (("decode", True), ("prefill", False)):
        spans[1:] = [SimpleNamespace(request="b", kind=kind, count=4)]
        (found,) = op_call_contracts.Contracts()._served(given)
        assert isinstance(found, Skipped) is skipped


# -- helpers of checks -------------------------------------------------------------------------------------


def test_a_batch_is_in_another_order_if_all_wrong_requests_exchange_their_values() -> None:
    """Lengths of three requests. One that was not there before has not grown, so nothing is known of its growth."""
    nobody = SimpleNamespace(slots_after={}, slots_before={})
    check, right, before = Identity(), {"a": 5, "b": 9, "c": 4}, {"a": 4, "b": 6, "c": 2}

    def said(found: dict[str, Any], before: dict[str, int] | None) -> list[str]:
        results = check_interface.in_batch(check, context(expected=nobody), TRUNK, found, right, "is {}", before)
        return [one.diagnosis.partition(": ")[2].partition(",")[0] for one in results]

    assert said({"a": 9, "b": 5, "c": 4}, None) == ['it is the one of request "b"', 'it is the one of request "a"', ""]
    grown = ['it grew by the tokens of request "b"', 'it grew by the tokens of request "a"', ""]
    assert said({"a": 7, "b": 7, "c": 4}, before) == grown
    assert said({"a": 7, "b": 7, "c": 4}, {"a": 4, "c": 2}) == ["", "", ""]
    assert said({"a": 9, "b": 9, "c": 4}, None) == ["", "", ""]


def test_a_number_with_the_bits_of_the_poison_is_poison() -> None:
    given = context(log=SimpleNamespace(poison=3.0), expected=SimpleNamespace(slots_after={}, slots_before={}))
    for found, says in ((pattern(3.0, torch.int64), "is poison"), (7, "is 7; expected 8")):
        assert says in check_interface.exact(Identity(), given, TRUNK, found, 8, "is {}").diagnosis


def test_units_are_listed_up_to_eight() -> None:
    listed = check_interface.listed
    assert (listed("slot", {3}), listed("slot", {5, 3})) == ("slot 3", "slots 3, 5")
    assert listed("page", range(10)) == "pages 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_a_wrong_tracked_step_is_named() -> None:
    """8 tokens before a window of 7, of which nodes 0, 2, 3 and 5 are accepted; every 5 tokens are tracked.

    The tenth token is at depth 1, node 2. With the whole window the fifteenth would be at depth 6.
    """
    every = prefix_findings
    for found, known in ((-1, {every.NO_STEP}), (1, {every.BY_DEPTH}), (3, {every.ONE_OFF}), (0, {every.ONE_OFF}),
                         (5, {every.LAST_STEP, every.OF_WINDOW}), (6, {every.OF_WINDOW}), (4, set())):  # fmt: skip
        fits = every.wrong_step(found, 2, (0, 2, 3, 5), 8, 7, 5)
        assert set(fits.names if fits is not None else ()) == {one.name for one in known}, found
    fits = every.wrong_step(1, 2, (0, 2, 3, 5), 8, 6, 5)  # the whole window ends before the fifteenth token, too
    assert fits is not None and set(fits.names) == {every.BY_DEPTH.name}


# -- capacity, scratch memory, poison ----------------------------------------------------------------------


@pytest.mark.parametrize(("by", "due"), [("slot", 6), ("page", 10), ("request", 4), ("row", 3)])
def test_a_pool_needs_a_unit_for_each_number_of_the_trace(by: str, due: int) -> None:
    room = SimpleNamespace(capacity=SimpleNamespace(slots=(2, 5, 1), pages=(9, 3)))
    region = SimpleNamespace(units=torch.zeros(7, 11), by=by, means=None)
    ((_, found, needed, _),) = capacity._needs(region, room, 3)  # type: ignore[arg-type]
    assert (found, needed) == (7, due)


def test_red_zones_are_between_units_and_keep_the_alignment() -> None:
    """Units of 64 elements: packed, 16 apart, and apart by a number to which no kernel is aligned."""
    for gap, aligned in ((0, 1), (16, 1), (3, 0)):
        memory = torch.zeros(4 * (64 + gap) + 16)
        units = memory[-memory.data_ptr() // 4 % 16 :].as_strided((3, 64), (64 + gap, 1))
        region = SimpleNamespace(units=units, gaps=torch.zeros(3, gap) if gap else None)
        found = {name: (has, due) for name, has, due, _ in capacity._guards(region)}  # type: ignore[arg-type]
        assert found == {"red-zone elements": (gap, 1), "elements from unit to unit": (64 + gap, 64 + gap),
                         "aligned pitches": (aligned, 1)}  # fmt: skip


def test_a_budget_of_the_first_step_count_is_recognised() -> None:
    """3 layers of 2 units with 4 positions of 32 bytes: 192 bytes for each position of all units, of 1 or 3 windows."""
    room, along = SimpleNamespace(first=2, widest=4), SimpleNamespace(axis=1, windows=1)
    region = SimpleNamespace(units=torch.zeros(2, 4, 8), means=SimpleNamespace(positions=along))
    along.windows = 3
    assert capacity._of_first_count(region, 3, 2 * 192, room)  # type: ignore[arg-type]
    along.windows = 1
    for found, says in ((2 * 192, True), (4 * 192, False), (2 * 192 + 1, False), (192, False)):
        assert bool(capacity._of_first_count(region, 3, found, room)) is says  # type: ignore[arg-type]


def test_scratch_memory_belongs_to_no_request_unless_all_rows_are_scratch() -> None:
    room = SimpleNamespace(capacity=SimpleNamespace(slots=(1, 4), pages=(7,)))
    for by, scratch, wrong in (("slot", {4}, True), ("slot", {0, 2}, False), ("page", {7}, True), ("row", {1}, True),
                               ("row", {0, 1, 2}, False), ("request", {2}, True), ("request", {0}, False)):
        region = SimpleNamespace(name="pool", by=by, scratch=scratch, units=torch.zeros(3, 1), means=None, rank=None,
                                 layer=0)  # fmt: skip
        changes = SimpleNamespace(regions=[region], wider=[])
        given = context(changes=changes, log=SimpleNamespace(room=room, poison=None),
                        expected=SimpleNamespace(slots_after={}, slots_before={}))  # fmt: skip
        *_, last = Bounds()(given)
        assert isinstance(last, Comparison) and last.agrees is not wrong, (by, scratch)


def test_poison_in_results_is_counted_and_its_first_row_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN of arithmetic in row 1 does not count if there is poison, which is in rows 2 and 3."""
    monkeypatch.setattr("instep.checks.poison.whose", lambda context, place, row: f"of row {row}")
    given = context(expected=SimpleNamespace(slots_after={}, slots_before={}))
    tensor = torch.zeros(4, 2)
    tensor[1, 0] = -torch.tensor(torch.nan)
    (found,) = Poison()._seen(given, TRUNK, tensor, torch.nan, None)
    assert "1 of 8 elements is NaN, but not with the bits" in found.diagnosis and found.request == "of row 1"
    tensor[2:] = torch.nan
    (found,) = Poison()._seen(given, TRUNK, tensor, torch.nan, None)
    assert found.diagnosis.startswith("4 of 8 elements are poison (nan), the first in row 2")
    (found,) = Poison()._seen(given, TRUNK, torch.tensor([1.0, 2.0, torch.nan, torch.nan]), torch.nan, None)
    assert "the first in row 2" in found.diagnosis


def test_the_first_unit_of_a_pool_that_lost_its_poison_is_named() -> None:
    region = SimpleNamespace(name="pool", by="slot", means=None, rank=None, layer=0)
    wrong = torch.zeros(4, 3, dtype=torch.bool)
    wrong[[0, 1, 3], 1] = True
    given = context(expected=SimpleNamespace(slots_after={}, slots_before={}))
    looked: Any = SimpleNamespace(region=region, gap=False)
    found = Poison()._comparison(given, looked, wrong, "is free and not poison", {0})
    assert found.diagnosis.startswith("pool slot 1 is free and not poison; ")
    assert (found.elements, found.worst, found.blocks) == (9, 2.0, 3)


# -- ranks -------------------------------------------------------------------------------------------------


def test_collectives_are_those_that_each_place_needs() -> None:
    mixer, core = Place("trunk", 0, "mixer"), Place("trunk", 0, "core")
    reduced, more = (SimpleNamespace(kind="all_reduce", place=place) for place in (mixer, core))
    for calls, wrong in (([reduced], []), ([], [(mixer, "is made without all_reduce: every rank has its own")]),
                         ([reduced, more], [(core, "went through all_reduce, and needs no such collective")])):
        given = context(ranks=SimpleNamespace(calls=[calls]), event=None, expected=SimpleNamespace(topk=None),
                        subject=SimpleNamespace(places={mixer: 0, core: 0}))  # fmt: skip
        found = [*ranks.Collectives()(given)]
        assert [(one.place, one.diagnosis) for one in found if not one.agrees] == wrong
        assert all((one.elements, one.worst) == (1, 1.0) for one in found if not one.agrees)


def test_the_first_call_in_which_a_rank_differs_is_named() -> None:
    for mine, theirs, says in (("ab", "ac", "at call 1 rank 2 is b; rank 0 is c"),
                               ("a", "ab", "at call 1 rank 2 is done; rank 0 is b"),
                               ("abc", "ab", "at call 2 rank 2 is c; rank 0 is done")):  # fmt: skip
        problem = ranks.differing(2, tuple(mine), tuple(theirs))  # type: ignore[arg-type]
        assert problem is not None and problem.clause == says
    assert ranks.differing(2, (), ()) is None


def test_the_bucket_is_the_smallest_that_has_room() -> None:
    """A verify of two requests in a group of which one replica is idle: it replays its graph for one idle row."""
    replays = [SimpleNamespace(stage=rank, key=("verify", 3), rows=rows, bucket=2, buckets=(1, 2, 4, 8), inputs={},
                               ran=(), freed=0, addresses=()) for rank, rows in ((0, 2), (1, 1))]  # fmt: skip
    group = SimpleNamespace(owners={"a": 0, "b": 0}, size=2)
    event = Forward((Row("a", "verify"), Row("b", "verify")))
    log = SimpleNamespace(graphs=True, replays=replays, poison=None)
    given = context(event=event, group=group, stages=None, regions=[], log=log, expected=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_replays, "due", lambda context: graph_replays.Due(("verify", 3), 2))
        assert [one.agrees for one in islice(graph_replays.Graphs()(given), 2)] == [True, True]
        replays[1].bucket = 4
        one, other = islice(graph_replays.Graphs()(given), 2)
    assert one.agrees and other.diagnosis == "the bucket is for 4 requests; for 2 it is the one for 2"


def test_drafts_that_are_no_chains_have_a_graph_of_their_own_without_blocks() -> None:
    for parents, blocks, kind in (((0, 1), {}, "draft"), ((0, 0), {}, "shaped draft"), ((0, 0), {0: 1}, "draft")):
        expected = SimpleNamespace(num_steps=2, topk=None, device_widths=False)
        truth = SimpleNamespace(before={"a": SimpleNamespace(block_keys=blocks)})
        found = graph_replays.due(context(event=Draft(("a",), parents=(parents,)), expected=expected, truth=truth))
        assert found == graph_replays.Due((kind, 2), 1)


def test_rows_of_a_block_see_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 rows from position 8 on. And a row of a grown tree whose node the tree does not have."""
    span = SimpleNamespace(request="a", kind="draft", start=8, count=3, begin=0, nodes=())
    monkeypatch.setattr(op_call_contracts, "row_spans", lambda context, stage: [span])
    monkeypatch.setattr(op_call_contracts, "_launched", lambda spans: spans)
    expected = SimpleNamespace(slots_after={"a": 2}, pages_in_use=lambda name: [4], tree=lambda name: (-1, 0, 0),
                               topk=None)  # fmt: skip
    ((_, served),) = op_call_contracts._due(context(expected=expected), "attend", Place("block", 0, "attended"))
    assert (served.before, served.branches) == (8, ((8, 9, 10),) * 3)
    expected.topk, span.nodes = 2, (1, 5)
    given = context(expected=expected, subject=None)
    for parents, count in (((-1, 0, 0, 1), 0), ((-1, 0, 0, 1, 1, 2), 1)):
        tree = SimpleNamespace(parents=parents)
        monkeypatch.setattr(op_call_contracts, "grown_of", lambda *given, tree=tree: tree)
        assert len(op_call_contracts._due(given, "attend", Place("chain.1", 0, "attended"))) == count


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


def test_a_finding_that_an_eager_run_lacks_is_of_the_graph() -> None:
    says = dict(_is=lambda cause, op, says, options=(): (cause, says), _agree=lambda: "events 0 to 4 agree")
    found = _Climb.graph(climb(eager=False, _left=lambda variant: [], **says))
    assert found == ("graph", "cause: the CUDA graph (run eagerly, events 0 to 4 agree)")
    for place, seen in ((TRUNK, 0), (TRUNK._replace(layer=1), 1)):
        its = climb(eager=False, seen=[], _left=lambda variant, place=place: [
            SimpleNamespace(place=place, event=4)], **says)  # fmt: skip
        assert _Climb.graph(its) is None and len(its.seen) == seen


def test_another_strategy_is_one_that_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.diagnose.confirm_cause.Ops", SimpleNamespace)
    for used, other in (("snapshot", "rerun"), ("columns", "snapshot"), ("rerun", "snapshot")):
        setting = SimpleNamespace(strategy=used, subject=SimpleNamespace)
        its = climb(replay=SimpleNamespace(plan=SimpleNamespace(setting=setting)), seen=[],
                    _left=lambda variant, other=other: [1] * (variant.options != {"strategy": other}))  # fmt: skip
        its.at = Place("trunk", 1, "state")
        _Climb._another_strategy(its)
        assert its.seen == [f"with --strategy {other} it agrees"]


def test_results_are_no_memory_that_an_event_writes() -> None:
    assert _Climb.memory(climb()) is None


def test_the_smallest_set_of_ops_that_helps_is_found_by_halving() -> None:
    for guilty in ("a", "d", "ad", "bc"):
        its = climb(_agrees=lambda swap, guilty=guilty: set(guilty) <= swap.keys())
        assert set(guilty) <= set(_Climb._guilty(its, "abcd", "plain")) <= set(guilty if len(guilty) == 1 else "abcd")


def test_events_that_agree_are_spelled() -> None:
    assert _until(3, 3, False) == "event 3 agrees" and _until(3, 5, False) == "events 3 to 5 agree"
    assert _until(3, 3, True) == "event 3 agrees until it corrupts it again"
    assert _until(3, 4, True) == "event 3 agrees; event 4 corrupts it again"
    assert _until(3, 6, True) == "events 3 to 5 agree; event 6 corrupts it again"


# -- allowances, votes, bounds -----------------------------------------------------------------------------


def test_the_looks_at_errors_of_one_side_share_one_risk() -> None:
    for look in (1, 2, 50):
        t = tier_allowances.one_sided_limit(look)
        assert 2 * math.exp(-t * t / 2) == pytest.approx(tier_allowances.ONE_SIDED_RISK / (look * (look + 1)))


def test_the_margin_of_a_choice_grows_with_the_logits_and_the_error() -> None:
    def granted(largest: float, noise: float, factor: float = 1.0) -> float:
        values = (torch.tensor(each, dtype=torch.float64) for each in (largest, noise))
        return float(tier_allowances.granted(*values, torch.float32, factor))

    assert granted(8, 0.25) == pytest.approx(2 * granted(4, 0.25)) == pytest.approx(granted(4, 0.25, 2.0))
    assert granted(1, 0.25) - granted(1, 0.125) == pytest.approx(
        tier_allowances.MARGIN_ERRORS * tier_allowances.YARDSTICK_FACTOR * 0.125)  # fmt: skip


def test_the_largest_error_of_all_draws_is_the_yardstick() -> None:
    """Two draws of one row, of which the second errs by a thousandth, and a subject that errs by 2 or 4 of these."""
    spot = Spot("derived", Tier.DERIVED, 0, "forward", Place("trunk", 0, "hidden"), "a", 1)
    truth = torch.ones(1, 16, dtype=torch.float64)
    draws = torch.stack([truth * (1 + 1e-9), truth * 1.001])
    for wrong, agrees in ((1.002, True), (1.004, False)):
        found = measured(spot, truth * wrong, truth, draws)
        assert found.agrees is agrees and found.allowed == pytest.approx(0.003)
    assert "(would pass at 4 times that)" in found.diagnosis
    granted = granted_error(spot.place, torch.float64, truth, draws)
    assert granted.flatten().tolist() == pytest.approx([0.003, 0.003])


def test_only_undecided_events_are_undecided() -> None:
    one, other = (Comparison(check, Tier.DERIVED, 0, "forward", TRUNK, elements=1, worst=2.0, allowed=1.0)
                  for check in (UNDECIDABLE, "derived"))  # fmt: skip
    for several, undecided in (([one, one], True), ([one, other], False), ([], False)):
        verdict = Verdict()
        verdict.add(several)
        assert verdict.undecided is undecided


def test_an_idle_event_may_write_nothing_and_a_replica_its_own_units() -> None:
    table = RequestTable(ROOM, 3)
    assert bound(Idle(), table, table, 7) == Bound()
    mine = Bound(slots=frozenset({2}), of_rank={1: Bound(slots=frozenset({5}))})
    for rank, name, units in ((None, "state", {2}), (0, "state", {2}), (1, "state", {5}), (1, "state@1", {5}),
                              (1, "table", {2}), (1, "table@1", {2})):  # fmt: skip
        region = SimpleNamespace(red=False, rank=rank, name=name, by="slot")
        assert mine.units(region) == units, (rank, name)  # type: ignore[arg-type]


def test_a_commit_may_replace_only_its_own_prefix_on_the_device() -> None:
    table = RequestTable(ROOM, 3)
    table.saved = {"mine": SimpleNamespace(prefix=True, aside=False, request="a"),
                   "copy": SimpleNamespace(prefix=False, aside=False, request="a"),
                   "host": SimpleNamespace(prefix=True, aside=True, request="a")}  # fmt: skip
    assert [table.own_prefix("a", under) for under in ("mine", "copy", "host", "none")] == [True, False, False, False]
    assert not table.own_prefix("b", "mine")


def test_an_event_that_waited_for_a_length_knows_it() -> None:
    """An engine with overlapping rounds: request "a" has 5 tokens, of which it must assume 3 more."""
    for reached, ahead in ((7, 0), (10, 3)):
        table = RequestTable(ROOM, 3, {"a": Standing("a", (1,) * 5, 1, length=5, ahead=3)})
        table.positions = lambda tokens, reached=reached: {"a": reached}  # type: ignore[method-assign]
        table.grow = lambda positions: None  # type: ignore[method-assign]
        table.reach({"a": 2})
        assert table.live["a"].ahead == ahead


def test_a_request_has_read_its_prompt_for_good() -> None:
    assert [Standing("a", (1,) * 5, 1, length=length).unread for length in (0, 3, 5, 9)] == [5, 2, 0, 0]


def test_a_block_drafter_writes_the_row_of_its_root_alone_without_drafts() -> None:
    room = Capacity(slots=(1,), pages=tuple(range(1, 30)), page_size=1, max_tokens=40, block=True)
    then = Standing("a", (1,) * 4, 1, length=4, pages=tuple(range(10, 20)))
    tables = [RequestTable(room, 3, {"a": one}) for one in (then, dataclasses.replace(then, window=(9,)))]
    assert bound(Draft(("a",)), *tables, 0).pages == {14}


def test_a_verified_window_is_picked_only_if_all_its_nodes_are_there() -> None:
    rows = torch.arange(3.0)
    assert unchanged_bytes._picked(rows, [0, 3]) is None and unchanged_bytes._picked(None, [0]) is None
    assert torch.equal(unchanged_bytes._picked(rows, [2, 0]), rows[[2, 0]])  # type: ignore[arg-type]


def test_draft_kv_that_is_valid_up_to_a_position_is_counted() -> None:
    """4 positions of 2 channels, of which the third is half wrong and the fourth right."""
    place, right = Place("extend", 0, "keys"), torch.ones(4, 2)
    found = right.clone()
    found[2, 1] = 0
    states = [SimpleNamespace(parts=lambda one=one: [(place, one)], final=None) for one in (found, right)]
    given = context(event=Load("a", "copy"), subject=SimpleNamespace(after={"a": states[0]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unchanged_bytes, "kept_of", lambda context: SimpleNamespace(state=states[1]))
        said = unchanged_bytes.draft_alone(given, place)
    assert said == "the target's memory came back, the draft KV is valid only for its first 2 of 4 positions: "


def test_labels_of_a_tree_continue_from_their_parents() -> None:
    """A chain and a tree of 3 nodes: the third node follows the second, or the root."""
    part = {name: torch.arange(3) + 10 * number for number, name in enumerate(("k", "v", "log_decay", "beta"), 1)}
    places = {Place("trunk", 0, name): labels for name, labels in part.items()}
    state = SimpleNamespace(state={0: torch.tensor([7])})
    span = SimpleNamespace(kind="verify", begin=0)
    made = dict[tuple[int, ...], list[int]]()
    for parents in ((-1, 0, 1), (-1, 0, 0)):
        forward: Any = SimpleNamespace(spans={"a": span}, parents={"a": parents},
                                       truth=SimpleNamespace(before={"a": state}, places=places))  # fmt: skip
        made[parents] = states_of_window(forward, "a", 0)
    chain, tree = made.values()
    assert chain[:3] == tree[:3] and chain[0] == 7 and len({*chain, *tree}) == 5
    after = [int(labels[2]) for labels in part.values()]
    assert (chain[3], tree[3]) == tuple(folded(0, chain[node], *after, True) for node in (2, 1))


# -- more measures and names of mistakes -------------------------------------------------------------------


def test_the_deviation_of_a_state_of_ones_is_half_a_unit() -> None:
    """2 heads of 4 x 12: a tile of 8 columns and one of 4."""
    right = torch.ones(2, 4, 12, dtype=torch.float64)
    spread = known_wrong_states._spread(torch.zeros(3, 2, 4, 12, dtype=torch.float64), right, 0.25)
    assert spread.flatten().tolist() == pytest.approx([0.125] * 4)


def test_rounding_flips_half_of_the_choices_between_two_equal_logits() -> None:
    logits = torch.tensor([[5.0, 5.0, 5.0], [9.0, 0.0, 0.0], [5.0, 5.0, 0.0]], dtype=torch.float64)
    assert [flips(row[None], 1e-3) for row in logits] == pytest.approx([1, 0, 0.5])
    assert flips(logits, 1e-3) == pytest.approx(1.5)


def test_no_draw_is_made_after_one_that_allows_the_error() -> None:
    """Three draws that err by a thousandth, and a subject that errs by 2, 4, or 4000 of these."""
    spot = Spot("propagated", Tier.PROPAGATED, 0, "forward", TRUNK, "a", 1)
    truth = torch.ones(1, 16, dtype=torch.float64)
    for wrong, agrees, made in ((1.002, True, 1), (1.004, False, 3), (5.0, False, 1)):
        draws = iter([(truth * 1.001, 0.0)] * 3)
        assert judge(spot, truth, draws, truth * wrong).agrees is agrees
        assert len([*draws]) == 3 - made


def test_data_of_a_request_that_left_is_counted_by_positions() -> None:
    region = SimpleNamespace(name="pool", by="page", means=None, rank=None, layer=0)
    spoiled = torch.zeros(4, 5, dtype=torch.bool)
    spoiled[3, :2] = True
    looked: Any = SimpleNamespace(region=region, after=torch.zeros(4, 5), spoiled=lambda: spoiled)
    (found,) = Leaks()._left(context(expected=SimpleNamespace(slots_after={}, slots_before={})), looked, "a", (1, 3))
    assert (found.elements, found.worst) == (10, 1.0)
    assert found.diagnosis == 'data of request "a" is still in 2 positions of pool page 3'


def test_a_prefix_may_belong_to_another_request_that_has_the_place() -> None:
    states = {name: SimpleNamespace(parts=lambda has=has: [(TRUNK, torch.arange(4))] * has)
              for name, has in (("a", True), ("b", True), ("c", False))}  # fmt: skip
    given = context(subject=SimpleNamespace(after=states))
    ((known, held),) = prefix_findings.of_others(given, "a", TRUNK, 2)
    assert '"b"' in known.says and held.tolist() == [0, 1]
    assert not [*prefix_findings.misread(torch.zeros(1, 2, 2), {}, {})]


def test_a_request_without_narrow_prefixes_has_no_misrounded_state() -> None:
    piece: Any = SimpleNamespace(prefix="")
    state, check = torch.rand(1, 2, 2), SimpleNamespace(oracle=SimpleNamespace(rounds={}))
    assert recomputed_values.Derived._misrounded(check, piece, state, state) is None  # type: ignore[arg-type]


def test_pages_of_a_live_request_do_not_move() -> None:
    """An engine that orders pages by itself may give pages back and take others."""
    for before, now, moved in (((1, 2, 3), (1, 2), False), ((1, 2), (1, 2, 3), False), ((1, 2), (2, 1), True)):
        check = Identity()
        check.known = {"a": before}
        given = context(subject_pages={"a": now}, event=Idle(), shown=SimpleNamespace(memory=lambda name: True),
                        expected=SimpleNamespace(slots_after={}, slots_before={}))  # fmt: skip
        (found,) = check._moved(given)
        assert found.agrees is not moved and check.known == {"a": now}


def test_positions_that_the_event_does_not_write_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit 1 changed at positions 0 and 2, and the event writes position 0 there."""
    changed = torch.zeros(3, 4, dtype=torch.bool)
    changed[1, [0, 2]] = True
    region = SimpleNamespace(name="pool", by="slot", means=None, rank=None, layer=0, scratch=set())
    looked: Any = SimpleNamespace(region=region, changed=lambda: changed)
    expected = SimpleNamespace(slots_after={}, slots_before={}, request_rows_after={})
    for writes, strays in (({1: {0}}, True), ({1: {0, 2}}, False), ({}, True), ({1: None}, True)):
        monkeypatch.setattr(unused_positions, "_writes", lambda *given, writes=writes: writes)
        found = unused_positions.Tails()._judged(context(expected=expected), looked, None)
        assert found.agrees is not strays, writes
