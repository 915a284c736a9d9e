"""Parts of checks of results, labels and calls, and of the choice of explanations, each alone on values made by hand.

Leaves out: checks of memory, graphs and ranks, the search for causes (`test_confirm_cause.py`), and formulas of
explanations (`test_explanations.py`).
"""

import ast
import math
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import instep.diagnose
from instep.checks import (
    accumulated_errors,
    capacity,
    decisions,
    exact_labels,
    experts,
    graph_replays,
    grown_trees,
    of_ranks,
    recomputed_values,
    sampled_tokens,
    trace_bookkeeping,
    unchanged_bytes,
    unused_positions,
)
from instep.checks.accumulated_errors import OTHER_EXPERTS
from instep.checks.exact_labels import Labels
from instep.checks.one_sided_errors import OneSided, Samples
from instep.checks.op_call_contracts import Contracts
from instep.checks.ranks import with_ranks
from instep.checks.sampled_tokens import Row
from instep.checks.tensor_and_choice_judgement import Ties
from instep.checks.trace_bookkeeping import Identity
from instep.diagnose import RunHistory
from instep.diagnose.mistakes import source_slips
from instep.finding_problem import Explained
from instep.oracle import state_oracle
from instep.run.run_variants import Variant
from instep.tier_allowances import TRUTH_ERROR, log_prob_error, sums_error
from instep.verdict import Comparison, Skipped, Tier, Verdict
from instep.watch.memory_changes import pattern
from instep_reference.contract.engine import Commit, Committed, Draft, Drafted, Forward, Load, Preempt, Save
from instep_reference.contract.engine import Row as BatchRow
from instep_reference.contract.place_names import Place
from instep_reference.contract.sampling import Sampling
from instep_reference.sampling import Drawing
from support.inputs.check_contexts import of_facts as context

KEYS, STATE = Place("trunk", 0, "keys"), Place("trunk", 0, "state")


def state(**tensors: torch.Tensor) -> Any:
    """A request's memory in layer 0, by component."""
    parts = [(Place("trunk", 0, name), tensor) for name, tensor in tensors.items()]
    return SimpleNamespace(parts=lambda: parts)


def finding(place: Place = STATE, request: str = "a", check: str = "derived", **more: Any) -> Comparison:
    return Comparison(check, Tier.DERIVED, 4, "forward", place, elements=1, worst=2.0, allowed=1.0, request=request,
                      **more)  # fmt: skip


# -- which checks, capacity, labels ----------------------------------------------------------------------


def test_ranks_stages_and_replicas_are_compared_where_there_are_several() -> None:
    named = {how: [check.name for check in of_ranks(*how)] for how in ((1,), (2,), (2, 3), (1, 2), (1, 1, 2))}
    assert named == {(1,): [], (2,): ["agreement", "collectives", "replicas"], (2, 3): ["agreement", "stages"],
                     (1, 2): ["agreement", "stages"], (1, 1, 2): ["agreement", "group"]}  # fmt: skip


@pytest.mark.parametrize(("ranks", "layout", "short"), [(None, "KV", False), (None, "VK", True), (2, "VK", False)])
def test_a_pool_of_states_has_the_declared_layout(ranks: int | None, layout: str, short: bool) -> None:
    """A pool of 3 states [2, 4, 5], of a model with 2 heads; a rank of two has one of them, so it is no such pool."""
    region = SimpleNamespace(name="pool", layer=0, units=torch.zeros(3, 2, 4, 5), means=None, by="slot", red=False,
                             rank=None)  # fmt: skip
    room = SimpleNamespace(layouts=(layout, layout), capacity=SimpleNamespace(slots=(1, 2)))
    shown = SimpleNamespace(conv={}, state={0: torch.zeros(2, 4, 5)})
    of_ranks = None if ranks is None else SimpleNamespace(size=ranks)
    given = context(log=SimpleNamespace(room=room, budget=None, guarded=False), regions=[region], ranks=of_ranks,
                    subject=SimpleNamespace(after={"a": shown}))  # fmt: skip
    found = next(iter(capacity.Capacity()(given)))
    assert isinstance(found, Comparison) and found.agrees is not short
    assert not short or "blocks in the order VK" in found.diagnosis


def test_wrong_labels_are_counted_or_named() -> None:
    """4 labels. A prefix has fewer rows than the memory of another request; a third request has no keys."""
    right, mine = torch.arange(4), torch.arange(10, 14)
    after = {"b": state(keys=torch.arange(10, 16)), "c": state(state=torch.arange(4))}
    forward = SimpleNamespace(spans={}, truth=None, parents={})
    given = context(event=Load("a", "copy"), truth=SimpleNamespace(after=after),
                    earlier=SimpleNamespace(forward=forward, saved={}, preempted={}))  # fmt: skip

    def said(found: torch.Tensor, component: str = "keys") -> str:
        due, has = (state(**{component: tensor}) for tensor in (right, found))
        (one,) = Labels()._memory(given, "a", due, has, False)
        return one.diagnosis

    assert said(right) == "" and said(torch.tensor([0, 7, 2, 7])).startswith(
        "2 of 4 elements are wrong, the first at (1"
    )
    assert (
        said(mine) == 'holds what belongs to request "b"' and said(mine + 50) == "holds labels that do not belong here"
    )
    assert said(torch.arange(4) + 50, "values") == "holds labels that do not belong here"
    given.truth.after["d"] = state(values=mine)
    assert said(mine, "values") == 'holds what belongs to request "d"'
    given.log.poison, poison = 3.0, torch.full((4,), int(pattern(3.0, torch.int64)))
    assert said(poison) == "is poison: memory that was never written"
    assert said(poison + torch.tensor([0, 0, 1, 0])) == "holds labels that do not belong here"


def test_the_first_wrong_row_of_labels_has_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 rows of 2 labels. The second is wrong in its last label, or holds the third, or no row is there."""
    monkeypatch.setattr(exact_labels, "whose", lambda context, place, row: f"of row {row}")
    right = torch.arange(6).view(3, 2)
    part, row = right.clone(), right.clone()
    part[1, 1], row[1] = 9, right[2]
    for found, wrong, says in ((right, None, ""), (part, 1, "row 1 is wrong in 1 of 2 elements"), (None, 0, "has no"),
                               (row, 1, "row 1 is wrong in 2 of 2 elements: it holds row 2")):  # fmt: skip
        one = Labels()._rows(context(subject=SimpleNamespace(places={KEYS: found})), KEYS, right)
        assert one.diagnosis.startswith(says) and one.agrees is (not says)
        assert one.request == (None if wrong is None else f"of row {wrong}")


def test_memory_comes_back_to_the_request_of_the_event_alone() -> None:
    copy = SimpleNamespace(state=state(keys=torch.zeros(2)))
    given = context(event=Load("a", "copy"), earlier=SimpleNamespace(saved={"copy": copy}, preempted={}))
    for name, found, back in (("a", torch.ones(2), True), ("a", torch.zeros(2), False), ("b", torch.ones(2), False),
                              ("a", None, True)):  # fmt: skip
        assert exact_labels._came_back(given, name, KEYS, found) is back
    assert not exact_labels._came_back(given, "a", STATE, torch.ones(2))


def test_findings_about_a_request_name_its_replica() -> None:
    group = SimpleNamespace(owners={"a": 0, "b": 1}, size=2)
    sides = {name: SimpleNamespace(places={}) for name in ("subject", "truth")}
    results = [finding(request="b"), finding(request="b", rank=3), finding(request="c")]
    for of_group, ranks in ((group, [1, 3, None]), (None, [None, 3, None])):
        found = with_ranks(context(ranks=None, stages=None, group=of_group, rounded=None, **sides), [*results])
        assert [one.rank for one in found if isinstance(one, Comparison)] == ranks


def test_updates_alone_have_the_two_parts_of_a_ring() -> None:
    rows = torch.tensor([1 + 2.0**-12], dtype=torch.float64)
    narrow: Any = {"ring": torch.bfloat16}
    for component, ring, parts in (("update", narrow, True), ("k", narrow, False), ("update", {}, False)):
        place = Place("trunk", 0, component)
        piece: Any = SimpleNamespace(yardsticks=SimpleNamespace(places={place: rows + 2.0**-30}))
        assert torch.equal(recomputed_values.sampled_rows(piece, place, ring), rows) is parts


# -- calls, positions, bookkeeping -------------------------------------------------------------------------


def test_served_rows_are_judged_unless_their_calls_were_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Skipped("contracts", 4, "judged")
    monkeypatch.setattr(Contracts, "_served", lambda self, context: iter([judged]))
    for captured in (0, 2):
        log = SimpleNamespace(ops="plain", calls=3, tensors=9, broken=(), replays=(), captured=captured, poison=None)
        *_, last = Contracts()(context(event=Forward((BatchRow("a", "decode"),)), log=log))
        assert isinstance(last, Skipped) and (last is judged) is not captured
        assert not captured or "a graph was captured here" in last.reason


def test_only_verified_rows_are_nodes_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode and a verify of 2 tokens. A decode also writes the column that it reads, in a pool by slot."""
    spans = [SimpleNamespace(request="a", kind="decode", count=1), SimpleNamespace(request="b", kind="verify", count=2)]
    monkeypatch.setattr(unused_positions, "row_spans", lambda context, stage: spans)
    expected = SimpleNamespace(slots_after={"a": 3, "b": 5}, request_rows_after={}, num_steps=2)
    given = context(event=Forward((BatchRow("a", "decode"), BatchRow("b", "verify"))), expected=expected)
    for by, what, writes in (("slot", "node", {5: {0, 1, 2}}), ("slot", "column", {3: None, 5: {0, 1}}),
                             ("row", "column", {1: {0, 1}}), ("row", "node", {1: {0, 1}})):  # fmt: skip
        region = SimpleNamespace(by=by, units=torch.zeros(8, 4), means=None)
        found = unused_positions._writes(given, region, SimpleNamespace(what=what))  # type: ignore[arg-type]
        assert found == writes, (by, what)


@pytest.mark.parametrize(("pages", "right", "before", "because"), [
    ((1, 2, 3), (1, 2), (1, 2, 3), "keeps the pages after its length"),
    ((1,), (1, 2), (1,), "has no pages for the last positions"),
    ((1, 2, 4), (1, 2), (1, 2, 3), ""), ((1, 2, 3), (1, 4), (1, 2, 3), "")])  # fmt: skip
def test_wrong_pages_are_those_that_go_or_come_at_the_event(pages: Any, right: Any, before: Any, because: str) -> None:
    expected = SimpleNamespace(slots_after={"a": 1}, slots_before={}, pages_after={"a": right}, flying=(),
                               pages_before={"a": before})  # fmt: skip
    shown = SimpleNamespace(exact=True, hidden=(), memory=lambda name: True, has=lambda what: what == "pages", gone=())
    given = context(event=Commit(("a",)), expected=expected, shown=shown, subject_slots={"a": 1},
                    subject_pages={"a": pages}, subject=SimpleNamespace(after={}))  # fmt: skip
    (found,) = Identity()._rooms(given)
    assert because in found.diagnosis and (": it " in found.diagnosis) is bool(because)


def test_a_bonus_without_the_cap_is_named_where_all_requests_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caps of 1; without caps 3 drafts would be accepted. The bonus is 7 with the cap, and 9 without it."""
    monkeypatch.setattr(trace_bookkeeping, "paths", lambda context, event: [SimpleNamespace(nodes=(), bonus=0)] * 2)
    monkeypatch.setattr(trace_bookkeeping, "_own", lambda forward, name, cap: (1, 7) if cap else (3, 9))
    event, bonus = Commit(("a", "b"), caps=(1, 1)), "the bonus is the choice at the node that would be accepted"
    for own, said in (([(1, 9), (1, 9)], bonus), ([(3, 9), (3, 9)], "its cap is ignored"), ([(1, 9), (1, 7)], ""),
                      ([(1, 8), (1, 7)], "")):  # fmt: skip
        none, (drafts, bonuses) = torch.zeros(2, dtype=torch.int64), torch.tensor(own).T
        answer = Committed(none, none + 1, none[:, None], none, none, drafts, bonuses)
        given = context(event=event, subject=SimpleNamespace(answer=answer), earlier=SimpleNamespace(forward=object()))
        found = [one.diagnosis for one in Identity()._committed(given, event) if not one.agrees]
        assert found and all(said in one and (": " in one.partition("expected")[2]) is bool(said) for one in found)


def test_choices_are_judged_unless_the_drafts_of_both_sides_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request "a" has other experts, "b" other drafts, and "c" has no logits."""
    spans = [SimpleNamespace(request=name, logit_rows=name != "c") for name in "abcd"]
    for name, made in (("row_spans", lambda context, stage: spans),
                       ("parted", lambda context, stage, span: span.request in "bc")):  # fmt: skip
        monkeypatch.setattr(decisions, name, made)
    monkeypatch.setattr(decisions.Decisions, "_without_choice", lambda self, context, place, span: None)
    monkeypatch.setattr(decisions.Decisions, "_chosen", lambda self, context, place, span: span.request)
    given = context(shown=SimpleNamespace(gone=()))
    found: list[Any] = [*decisions.Decisions({"a"})._picks(given, KEYS)]
    assert [one if isinstance(one, str) else one.reason for one in found] == [
        OTHER_EXPERTS, "the drafts differ", "d"]  # fmt: skip


def test_drafts_are_judged_where_the_engine_shows_them_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that shows all rows has its drafts judged as picks, and grown trees have a check."""
    monkeypatch.setattr(decisions, "carried", lambda context: {})
    monkeypatch.setattr(decisions.Decisions, "_drafts", lambda self, context, event: ["judged"])
    for whole, fed, topk, judged in ((False, "draft", None, True), (True, "draft", None, False),
                                     (False, "logits", None, False), (False, "draft", 2, False)):  # fmt: skip
        shown = SimpleNamespace(whole=whole, has=lambda feed, fed=fed: feed == fed)
        given = context(event=Draft(("a",)), truth=SimpleNamespace(places={}), shown=shown,
                        expected=SimpleNamespace(topk=topk))  # fmt: skip
        assert [*decisions.Decisions()(given)] == ["judged"] * judged


def test_a_window_of_other_paths_is_a_tie_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last choice differs, or the beams of the second step. Up to a part of 1 the truth's scores are a tie."""
    given = context(expected=SimpleNamespace(grown=3, slots_after={}, slots_before={}), subject=SimpleNamespace(
        places={grown_trees.PLACE._replace(component="logits"): torch.zeros(1)}))  # fmt: skip
    monkeypatch.setattr(grown_trees, "paths_of", lambda side, beams: beams)
    monkeypatch.setattr(grown_trees, "_level", lambda truth, step: step)

    def side(*beams: Any, chosen: Any = ((2,),)) -> Any:
        growing = SimpleNamespace(beams=[(), ((8,),), *beams, ()], candidates=[0] * 5, chosen=lambda drafts: chosen)
        return SimpleNamespace(logits=[0] * 4, growing=growing)

    truth = side(((9,),), ((9, 9),))
    for part, ours, at, against in (
        (0.5, side(((9,),), ((9, 9),), chosen=((1,),)), 3, range(5)), (5.0, truth, 3, None),
        *((part, side(((9,),), ((7, 7),)), 2, 3) for part in (0.5, 1.0, 1.5, 2.0)),
    ):  # fmt: skip
        asked = list[Any]()
        monkeypatch.setattr(grown_trees, "Scores", lambda *of, part=part, asked=asked: SimpleNamespace(
            disorder=lambda kept, among, ordered: asked.append((among, ordered)) or part))  # fmt: skip
        check, differs = grown_trees.Grown(), ours is not truth
        found = check._chosen(given, "a", ours, truth, 0.0)
        assert asked == [(against, at == 2)] * differs
        ties = int(differs and part <= 1)
        assert (found.undecided, check.ties.ties, check.ties.made, found.elements) == (ties, ties, 1, 6)
        assert (found.place.stage, found.worst) == (f"chain.{at}", part * differs)
        assert found.agrees is (found.diagnosis == "") is (found.worst <= 1)


def test_a_tree_follows_from_its_own_logits_up_to_their_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that differs by nothing has a path that its own logits do not have."""
    named = list[str]()
    monkeypatch.setattr(grown_trees, "mistake", lambda context, name, wrong: named.append(name))
    mine, told = ([4, 5, 6], [0, 1, 1]), ([4, 5, 7], [0, 1, 1])
    trees: Any = {"a": told}
    for due, part, worst in ((told, 0.0, 0.0), (mine, 0.5, 0.5), (mine, 1.0, 1.0), (mine, 1.5, 1.5),
                             (mine, 0.0, math.inf)):  # fmt: skip
        monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name, due=due: grown(due))
        monkeypatch.setattr(grown_trees, "_own_part", lambda context, ours, told, part=part: part)
        given = context(rounded=object(), subject=None, expected=SimpleNamespace(
            grown=3, slots_after={}, slots_before={}))  # fmt: skip
        assert grown_trees._wrong(given, trees) == (trees if worst > 1 else {})
        one = grown_trees.Grown()._follows(given, "a", trees, due, part)
        assert (one.worst, one.undecided, one.elements) == (worst, int(0 < worst <= 1), 6)
        assert one.agrees is (one.diagnosis == "") is (worst <= 1) and named == ["a"] * (worst > 1)
        named.clear()
    monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name: None)
    assert grown_trees._wrong(given, trees) == trees


class Layer(SimpleNamespace):
    """A layer that was recomputed."""


def test_choices_of_experts_are_judged_for_layers_that_were_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle has a layer with experts, one without, and a result that is no recomputation."""
    of = {"request": "a", "stage": "trunk", "span": None}
    layers = [Layer(near=SimpleNamespace(truth=SimpleNamespace(route=route)), **of) for route in (1, None)]
    other = SimpleNamespace(**vars(layers[0]))
    monkeypatch.setattr(experts, "Recomputation", Layer)
    oracle: Any = SimpleNamespace(config=SimpleNamespace(experts=4), at=lambda context: [*layers, other])
    monkeypatch.setattr(experts, "carried", lambda context: {})
    monkeypatch.setattr(experts, "parted", lambda context, stage, span: False)
    monkeypatch.setattr(experts.Experts, "_piece", lambda self, context, piece, route, noise: [route])
    assert [*experts.Experts(oracle)(context(event=Draft(("a",)), rounded=object()))] == [1]
    check = experts.Experts(oracle)
    check.parted = {"a"}
    for event in (Save("a", "one"), Save("b", "two"), Preempt("a"), Draft(("a", "b"))):
        assert not [*check(context(event=event, rounded=object()))]
    assert check.kept == {"one"}, "copies of a request that parted"


def test_positions_are_spelled_as_one_as_a_range_or_as_a_list() -> None:
    for positions, says in (({3}, "position 3"), ({3, 4, 5}, "positions 3 to 5"), ({1, 4}, "positions 1, 4")):
        assert unused_positions._spelled(positions) == says


def test_only_a_prompt_has_the_graph_of_a_prompt() -> None:
    """The model has two GDN layers. The draft head's rows have no segment, and embeddings of n-grams have one."""
    expected = SimpleNamespace(num_steps=2, topk=None, device_widths=False)
    truth = SimpleNamespace(before={}, places=[Place("trunk", 0, "core"), Place("trunk", 1, "core"),
                                               Place("extend", 2, "core")])  # fmt: skip
    given = context(event=Forward((BatchRow("a", "decode"),)), expected=expected, truth=truth)
    assert graph_replays.due(given) == graph_replays.Due(("decode", 2), 1)
    ran = [("segment", 0), ("eager", 0), ("segment", 1), ("eager", 1), ("segment", 2), ("eager", 2), ("segment", 3)]
    for more, right in (([], 5), ([Place("trunk", 0, "ngrams"), Place("extend", 0, "ngrams")], 7)):
        given.truth.places += more
        for count in (5, 7):
            replay: Any = SimpleNamespace(key=(graph_replays.PROMPT, 0), ran=ran[:count])
            assert len([*graph_replays._ran(given, replay)]) == (count != right)


def test_a_prompt_next_to_a_tree_has_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of parents belongs to a subject that verifies trees, on any rank."""
    monkeypatch.setattr(graph_replays, "row_spans", lambda context, stage: [SimpleNamespace(count=4)])
    for name, kind, graph in (("parents@1", "verify", graph_replays.TREES), ("slots@1", "verify", graph_replays.PROMPT),
                              ("parents", "decode", graph_replays.PROMPT)):  # fmt: skip
        event = Forward((BatchRow("a", "prefill", 4), BatchRow("b", kind)))
        given = context(event=event, truth=SimpleNamespace(before={}), regions=[SimpleNamespace(name=name)],
                        log=SimpleNamespace(prompt_buckets=(8,)),
                        expected=SimpleNamespace(num_steps=2, topk=None))  # fmt: skip
        assert graph_replays.due(given) == graph_replays.Due((graph, 0), 4, "row")


def test_states_without_a_tracked_prefix_are_not_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that comes back: of no copy, of a copy of a request, and of a prefix, which has a final row."""
    monkeypatch.setattr(unchanged_bytes, "kept_states", lambda right, narrow, forward: right)
    monkeypatch.setattr(unchanged_bytes, "misread", lambda right, narrow, others: ["misread"])
    its: Any = SimpleNamespace(_narrow={"state": None}, _other_states=lambda *given: {})
    for copy, misread in ((None, 0), (SimpleNamespace(sent=None, state=SimpleNamespace(final=None)), 0),
                          (SimpleNamespace(sent=None, state=SimpleNamespace(final=torch.ones(1))), 1)):  # fmt: skip
        monkeypatch.setattr(unchanged_bytes, "kept_of", lambda context, copy=copy: copy)
        found: list[Any] = [*unchanged_bytes.Bytes._misread(its, context(event=None), STATE, torch.ones(1))]
        assert len(found) == 2 + misread


def test_a_state_inside_a_chunk_has_the_last_of_its_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unchanged_bytes, "kept_in", lambda rounds, forward: ("chunk", "kept") if forward else ())
    monkeypatch.setattr(unchanged_bytes, "off_the_grid", lambda found, storage: None if storage == "kept" else 1)
    its: Any = SimpleNamespace(_narrow={}, name="bytes", tier=Tier.BITWISE)
    for event, agrees in ((Forward((BatchRow("a", "prefill", 4),)), [True]), (Draft(("a",)), [])):
        given = context(event=event, expected=SimpleNamespace(slots_after={"a": 1}, slots_before={}))
        span: Any = SimpleNamespace(request="a")
        found = [*unchanged_bytes.Bytes._on_the_grid(its, given, span, STATE, torch.ones(2))]
        assert [one.agrees for one in found] == agrees


def test_whole_runs_in_place_of_an_oracle_make_no_narrow_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_oracle, "_left", lambda side, piece: torch.ones(2))
    its: Any = SimpleNamespace(_redrawn=lambda context, piece: None)
    piece = make_dataclass("Piece", ("writes_state", "yardsticks", "dithered", "narrow"))(True, None, None, True)
    for given, one in ((context(rounded=None), piece), (context(rounded=object()), replace(piece, writes_state=False))):
        assert state_oracle.FreeOracle._by(its, given, one) is one
    found = state_oracle.FreeOracle._by(its, context(rounded=object()), piece)
    assert not found.narrow and found.yardsticks.state is not None and found.yardsticks.state.shape == (1, 2)
    monkeypatch.setattr(state_oracle.StateOracle, "__init__", lambda self, *given: setattr(
        self, "runner", SimpleNamespace(truth=None)))  # fmt: skip
    monkeypatch.setattr(state_oracle, "TrueRunner", lambda *given: None)
    for rounds, products, most in (({"q": torch.float32}, {}, 7), ({"q": torch.float32}, {"gdn": 1}, 16),
                                   ({"q": torch.float32, "state": torch.bfloat16}, {}, 16)):  # fmt: skip
        made: Any = state_oracle.FreeOracle(None, rounds, torch.float32, products, redraws=7, dithered=16)  # type: ignore[arg-type]
        assert made.numbers == range(1, most + 1)


def test_a_state_alone_is_planned_for_each_request_that_shows_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk begins with its own state. One that continues a prompt may follow any conv window."""
    monkeypatch.setattr(state_oracle, "state_before", lambda before, layer, start, device: ("base", layer))
    monkeypatch.setattr(state_oracle, "to_state", lambda hidden, *of: (hidden, *of[1:]))
    monkeypatch.setattr(state_oracle, "rows", lambda side, place, span: side.get(place.layer))
    monkeypatch.setattr(state_oracle.StatePlanner, "_parents", lambda self, span: None)
    monkeypatch.setattr(state_oracle.StatePlanner, "_hidden", lambda self, span, layer: {2: "2", 3: "3"}.get(layer))
    config: Any = SimpleNamespace(keeping=lambda component: (4, 5, 6))
    side = {4: torch.ones(3, 2), 5: torch.ones(2, 2)}
    plan = state_oracle.StatePlanner(context(subject=side), config, {}, True, gdn_layers=(1, 2, 3, 4, 5, 6),
                                     device=torch.device("cpu"))  # fmt: skip
    for kind, start in (("prefill", 0), ("prefill", 5), ("verify", 5)):
        span: Any = SimpleNamespace(kind=kind, start=start, count=3)
        tasks = [*plan._target(span, SimpleNamespace(conv={2: "window"}))]  # type: ignore[arg-type]
        assert [(task.layer, task.recurrence.number) for task in tasks if task.recurrence] == [(2, 1), (3, 2), (4, 3)]
        for task in tasks:
            assert task.recurrence is not None and task.recurrence.base == ("base", task.layer)  # type: ignore[comparison-overlap]
            assert task.chunk == (("base", task.layer) if kind == "prefill" else None)
            assert (task.recurrence.window is not None) is (kind == "prefill" and start == 5 and task.layer == 2)


# -- grown trees -------------------------------------------------------------------------------------------


def grown(tree: Any, paths: Any = (), **more: Any) -> Any:
    growing = SimpleNamespace(tree=lambda drafts: tree, candidates=paths, path=lambda number: paths[number], topk=2)
    return SimpleNamespace(growing=growing, whole=True, **more)


def test_only_a_tree_that_follows_from_its_own_logits_is_compared_with_the_truth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = ([4, 5], [0, 1]), ([4, 6], [0, 1])
    monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name: grown(mine))
    monkeypatch.setattr(grown_trees, "carried", lambda context: {})
    monkeypatch.setattr(grown_trees, "_own_part", lambda context, ours, told: 0.5)
    monkeypatch.setattr(grown_trees.Grown, "_follows", lambda self, context, name, trees, mine, part: part)
    monkeypatch.setattr(grown_trees.Grown, "_chosen", lambda self, *given: "compared")
    for told, says in ((mine, [0.0, "compared"]), (other, [0.5])):
        answer, right = (
            Drafted(torch.tensor([tree[0]]), *(torch.tensor([each]) for each in tree)) for tree in (told, mine)
        )
        given = context(
            event=Draft(("a",)),
            subject=SimpleNamespace(answer=answer),
            truth=SimpleNamespace(answer=right),
            expected=SimpleNamespace(topk=2, grown=2, slots_after={}, slots_before={}),
            shown=SimpleNamespace(whole=True),
            rounded=object(),
        )
        found: list[Any] = [*grown_trees.Grown()(given)]
        assert found == says
    for lost in (given.subject, given.truth):
        monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name, lost=lost: SimpleNamespace(
            **vars(grown(mine)) | {"whole": side is not lost}))  # fmt: skip
        (one,) = grown_trees.Grown()(given)
        assert isinstance(one, Comparison) and one.diagnosis.startswith("the grown tree is ([4, 6], [0, 1]); expected")


def test_the_order_of_a_window_is_no_order_of_its_scores() -> None:
    """Two children of the root, the less probable one first. Rows below the fork count for an error."""
    growth = grown(None, paths=[(0,), (1,)], logits=[torch.tensor([[0.0, 3.0]], dtype=torch.float64)])
    place = Place("chain.0", grown_trees.PLACE.layer, "logits")
    given = context(subject=SimpleNamespace(places=dict.fromkeys(
        (place, grown_trees.PLACE._replace(component="logits")), growth.logits[0])))  # fmt: skip
    assert grown_trees._own_part(given, growth, ([0, 1], [0, 0])) == 0
    assert grown_trees._own_part(given, growth, ([0, 0], [0, 0])) == math.inf
    assert grown_trees._told_paths(([4], [-1])) is None
    rows: Any = SimpleNamespace(_granted=lambda path: 10.0 ** len(path), _rounding=lambda path: 0.0)
    for one, other, error in (((1,), (1, 2), 10), ((1, 2), (1, 3), 10), ((1, 2), (3,), 11), ((1,), (1,), 0)):
        assert grown_trees.Scores._error(rows, one, other) == error


def test_the_tree_of_another_request_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = {"a": ([4, 5], [0, 1]), "b": ([6, 7], [0, 0])}
    monkeypatch.setattr(grown_trees, "MISTAKES", ())
    monkeypatch.setattr(grown_trees, "grown_of", lambda context, side, name: grown(trees[name], said=()))
    given = context(event=Draft(("a", "b")), subject=None, expected=SimpleNamespace(grown=2))
    for name, told, others in (("a", "b", 1), ("b", "a", 1), ("a", "a", 0)):
        assert len(grown_trees._fitting(given, name, trees[told])) == others


# -- sampling, one-sided errors ----------------------------------------------------------------------------


def test_tokens_that_cannot_be_drawn_are_explained_and_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows. The parts of the allowance with which their tokens are drawn are given."""
    span = SimpleNamespace(request="a", logit_rows=2)
    drawing = Drawing(Sampling(1.0), (9, 0), (-1, 0), (0.5, 0.5, 0.5))
    shown = {"pick": torch.tensor([0, 1]), "logits": torch.zeros(2, 3)}
    monkeypatch.setattr(sampled_tokens, "row_spans", lambda context, stage: [span])
    monkeypatch.setattr(sampled_tokens, "rows", lambda side, place, span: shown[place.component])
    monkeypatch.setattr(sampled_tokens, "drawing_of", lambda context, span: drawing)
    known = Explained("bank", "by a known mistake")
    monkeypatch.setattr(sampled_tokens, "wrong_way", lambda one, wrong, *others: known if wrong == [one] else None)
    given = context(shown=SimpleNamespace(whole=True, gone=()), subject=None, earlier=SimpleNamespace(forward=None))
    for parts, undecided, wrong in (([0.0, 2.0], 0, True), ([1.0, 0.0], 1, False), ([0.5, 2.0], 1, True),
                                    ([0.0, 0.0], 0, False)):  # fmt: skip
        monkeypatch.setattr(sampled_tokens, "against", lambda *given, parts=parts: parts)
        (found,) = sampled_tokens.Draws()(given)
        assert (found.undecided, found.blocks, found.agrees) == (undecided, 2, not wrong)
        assert wrong is (found.problem is not None and found.problem.mistake is not None)


def test_a_token_within_the_largest_part_is_surely_drawn() -> None:
    """Parts of 0.4, 0.3 and 0.3; top-p 0.5 keeps the first two, and no rounding of fp64 changes that."""
    logits = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64).log()
    for final, token in ((0.5, 0), (0.8, 1)):
        row = Row(logits, Drawing(Sampling(1.0, top_p=0.5), (9,), (-1,), (0.0, final)), 0)
        assert row.drawn == token and sampled_tokens.sure(row, 0.0, torch.float64)
        reached = [sampled_tokens.reachable(row, other, 0.0, torch.float64) for other in range(3)]
        assert reached == [other == token for other in range(3)]


def test_a_part_of_the_allowance_is_the_smallest_that_draws_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(torch.zeros(3), Drawing(Sampling(1.0), (9,), (-1,), (0.0, 0.5)), 0)
    for least in (0.3, 1.0, 1.2, 2.5, 100.0, math.inf):
        monkeypatch.setattr(sampled_tokens, "reachable", lambda *given, least=least: given[-1] >= least)
        assert least <= sampled_tokens.part(row, 0, 0.0, torch.float64) <= least + max(least, 1.0) / 500


@pytest.mark.parametrize(("made", "expected", "cap"), [(10, 0.0, 3), (10, 2.0, 9), (1000, 2.0, 50)])
def test_ties_are_too_many_above_what_rounding_explains(made: int, expected: float, cap: int) -> None:
    """3 ties are always allowed, and 3 for each that rounding makes, or a twentieth of the choices."""
    for ties in (cap, cap + 1):
        found = [*Ties(made=made, ties=ties, expected=expected).too_many("choices", 4, "forward", KEYS)]
        assert [(one.worst, one.allowed, one.agrees) for one in found] == [(ties, cap, False)] * (ties > cap)


def test_log_probabilities_err_by_the_logits_and_by_the_vocabulary() -> None:
    """Each part of x - max - log(sum) has its error: a right one may err by more if any part is larger."""
    assert sums_error(16, 2.0**-20) == 8 * 2.0**-20  # 2 sqrt(16) additions, each within half a unit, and the total's
    without = log_prob_error(0.0, 1, 2.0**-20) - sums_error(1, 2.0**-20)  # log(1) is 0
    for largest, vocab in ((2.0, 1), (0.0, 1000), (2.0, 1000)):
        error = log_prob_error(largest, vocab, 2.0**-20) - sums_error(vocab, 2.0**-20)
        assert error == pytest.approx(without * (1 + largest + math.log(vocab)), rel=1e-9)


def test_the_error_of_memory_is_the_largest_by_norm_or_element() -> None:
    """One of 8 ones is off by 1: by the norm that is 1 / sqrt(8). A component without an error has that of fp64."""
    rounded, truth = torch.ones(8), torch.ones(8)
    rounded[3] = 2
    given = context(rounded=SimpleNamespace(after={"a": state(conv=rounded, keys=truth)}),
                    truth=SimpleNamespace(after={"a": state(conv=truth, keys=truth)}))  # fmt: skip
    assert accumulated_errors.kept(given, "a") == {"conv": 1.0, "keys": TRUTH_ERROR}


def test_a_row_of_zeros_is_a_sample_without_an_error_to_one_side() -> None:
    samples = Samples("hidden", 0, 0)
    a, d = samples._by_row(np.array([[1.0, 3.0], [1.0, 3.0]]), np.array([[0.0, 0.0], [2.0, -2.0]]))
    assert not a[0].any() and not d[0].any() and a[1].any() and d[1].all()
    samples._sums = np.zeros((5, 2))
    mean, limit = samples.judged(0.1, 3.0)
    assert not mean.any() and np.isinf(limit).all()


def test_looks_at_errors_of_one_side_are_counted() -> None:
    """512 rows that are all too large by a thousandth, or not; each look shares its risk with the earlier ones."""
    oracle: Any = SimpleNamespace(runner=SimpleNamespace(rounded=SimpleNamespace(embedding=torch.zeros(1))))
    g, check = torch.Generator().manual_seed(2), OneSided(oracle)
    truth = torch.randn(512, 4, generator=g, dtype=torch.float64)
    for scale, agrees in ((1.001, False), (1.0, True)):
        samples = Samples("hidden", 0, 0)
        assert samples.add(truth * scale, truth)
        for looks in (1, 2):
            (found,) = check._look(context(), KEYS, "a", samples, torch.float32)
            assert (found.agrees, samples.looks, samples.looked) == (agrees, looks, 512)


# -- the choice of explanations ----------------------------------------------------------------------------


def test_causes_are_confirmed_only_on_request_and_without_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further runs cost minutes."""
    for name, made in (("explain_outcome", lambda outcome, history: outcome), ("locate", lambda *given: "located"),
                       ("replace", lambda outcome, located: located)):  # fmt: skip
        monkeypatch.setattr(instep.diagnose, name, made)
    for ladder, findings, variant, runs in (
        (True, [1], Variant(), True),
        (False, [1], Variant(), False),
        (True, [], Variant(), False),
        (True, [1], Variant(calm=True), False),
    ):
        outcome = SimpleNamespace(verdict=SimpleNamespace(findings=findings))
        replay: Any = SimpleNamespace(plan=SimpleNamespace(steps=None), run=lambda outcome=outcome, **given: outcome)
        found: Any = instep.diagnose.diagnose(replay, ladder=ladder, variant=variant)
        assert (found == "located") is runs


def test_explanations_see_the_memory_of_earlier_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instep.diagnose, "explained", lambda compared, last, oracle, history: [history])
    config = SimpleNamespace(hidden=8)
    outcome = make_dataclass("Outcome", ("verdict", "plan", "last", "oracle"))(
        Verdict(), SimpleNamespace(checkpoint=SimpleNamespace(config=config)), None, object())
    for history in (RunHistory(), None):
        of: Any = instep.diagnose.explain_outcome(outcome, history)
        (seen,) = of.verdict.compared
        assert of.oracle is None and (seen is history or (history is None and isinstance(seen, RunHistory)))


def test_slips_change_a_number_by_one_and_show_a_short_expression() -> None:
    assert [one.value for one in source_slips.others(ast.Constant(3))] == [4, 2]  # type: ignore[attr-defined]
    for product, without in (("a * (b + c)", "a * b + c"), ("(a - b) / c", "a - b / c")):
        made = map(ast.unparse, source_slips.others(ast.parse(product, mode="eval").body))
        assert without in made, product
    assert {(slip.right, slip.wrong) for slip in source_slips.of_function(_turned)} >= {
        ("a * b - c * d", wrong) for wrong in ("a * b - c + d", "a * b - (c + d)", "a + b - c * d")}
    for longer, shown in ((0, True), (1, False)):
        name = "x" * (source_slips.SHOWN - len(" + 1") + longer)
        tree = ast.parse(f"{name} + 1")
        parents = {below: above for above in ast.walk(tree) for below in ast.iter_child_nodes(above)}
        node = next(one for one in ast.walk(tree) if isinstance(one, ast.Constant))
        assert isinstance(source_slips._shown(node, parents), ast.BinOp) is shown


def _turned(a: float, b: float, c: float, d: float) -> float:
    return a * b - c * d
