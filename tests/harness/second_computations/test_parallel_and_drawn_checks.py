"""Parts of checks of ranks, stages, transfers, trees and drawn tokens, each alone on values made by hand.

Leaves out: most checks of one engine (`test_check_parts.py`, `test_result_checks.py`), and whole runs
(`test_ranks.py`, `test_stages.py`, `test_transfers.py`, `test_trees.py`).
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import (
    decisions,
    declared_writes,
    graph_replays,
    grown_trees,
    one_sided_errors,
    op_call_contracts,
    prefix_findings,
    ranks,
    recomputed_values,
    sampled_tokens,
    transfer_findings,
    unchanged_bytes,
    wrong_state_bank,
)
from instep.checks.check_interface import compared
from instep.checks.grown_trees import MISTAKES as TREES
from instep.checks.poison import Poison
from instep.checks.transfer_findings import MOST_ROWS, wrong_transfers
from instep.finding_problem import Problem
from instep.oracle.storage_rounding import rounded
from instep.tier_allowances import granted
from instep.verdict import Comparison, Skipped, Tier
from instep.watch.rows_by_request import RowSpan
from instep_reference.contract.answers import RequestState
from instep_reference.contract.declared_rounding import CHUNK, KEPT, Product
from instep_reference.contract.engine import Commit, Committed, Drafted, Fetch, Forward, Forwarded, Idle
from instep_reference.contract.engine import Row as BatchRow
from instep_reference.contract.place_names import Place
from instep_reference.contract.shards import Segment, Shard
from instep_reference.draft.grow_draft_tree import Growing
from support.inputs.check_contexts import of_facts as context

# -- stages and ranks ------------------------------------------------------------------------------------


def test_a_stage_replays_a_graph_for_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_replays, "_which", lambda wanted, replays: [f"{wanted.rows} rows of {replays[0]}"])
    due, parts = graph_replays.Due(("decode", 0), 3), [("a", "b"), ("c",)]
    for wanted, replays, said in (
        (due, ["x", "y"], [["2 rows of x"], ["1 rows of y"]]), (None, [], [[]]),
        (due, ["x"], [["1 graph was replayed; 2 micro-batches need one each"]]),
        (None, ["x", "y"], [["2 graphs were replayed; 0 micro-batches need one each"]]),
    ):  # fmt: skip
        assert [*graph_replays._of_stage(wanted, replays, parts)] == said  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "found", "says"), [
    (Committed, (1, 0, 3, 2, 9, -1, 4, 5), "micro-batch 1 in its relay; expected 0"),
    (Committed, (0, 0, 3, 2, 9, 8, 4, 5), "cap 8 in its relay; expected -1"),
    (Committed, (0, 0, 3, 2, 9, -1, 7, 5), "path (7, 5) in its relay; expected (4, 5)"),
    (Committed, (0, 0, 3, 2, 9, -1, 4, 7), "path (4, 7) in its relay; expected (4, 5)"),
    (Committed, (0, 0, 3, 2, 9, -1, 4), "path (4,) in its relay; expected (4, 5)"),
    (Drafted, (0, 0, 7, 2, 9, -1, 4, 5), "drafts (7, 2, 9, -1, 4, 5) in its relay; expected (3, 2, 9, -1, 4, 5)"),
    (Forwarded, (0, 0, 7, 2, 9, -1, 4, 5), "root 7 in its relay; expected 3"),
])  # fmt: skip
def test_the_first_wrong_field_of_a_relay_is_named(kind: Any, found: tuple[int, ...], says: str) -> None:
    context: Any = SimpleNamespace(subject=SimpleNamespace(answer=kind.__new__(kind)))
    assert ranks._wrong_field(context, found, (0, 0, 3, 2, 9, -1, 4, 5)) == f"received {says}"


def test_the_rank_with_the_largest_error_is_named_if_it_is_far_larger() -> None:
    """4 channels on two ranks. The norms of the parts are 5 and 10; a wrong part may be one wrong number, or NaN."""
    right = torch.tensor([[3.0, 4.0, 6.0, 8.0]])
    shard = Shard(1, (Segment(2, 2),))
    for wrong, rank in (([0.0, 0, 0, 1], 1), ([0, 1, 0, 0.4], 0), ([0, 1, 0, 0.5], None), ([0, 0.5, 0, 1], None),
                        ([0.0, torch.nan, 0, 1], 0), ([0.0] * 4, None)):  # fmt: skip
        assert ranks.part_at_fault(right + torch.tensor([wrong]), right, shard, 2) == rank
    assert ranks._error(right + torch.tensor([[3.0, 4.0, 0, 0]]), right) == pytest.approx((25 / 125) ** 0.5)
    labels = right.long()
    for changed, rank in ((1, 0), (3, 1), (None, None)):
        found = labels.clone()
        if changed is not None:
            found[0, changed] = 99
        assert ranks.part_at_fault(found, labels, shard, 2) == rank
    assert ranks.part_at_fault(None, right, shard, 2) is None
    assert ranks.part_at_fault(right[:, :2], right, shard, 2) is None


def test_rows_of_a_copy_are_shifted_by_every_number_of_positions() -> None:
    """Keys are moved by at most 63 positions, with the rows at the end back at the begin, or zero."""
    kept: Any = SimpleNamespace(state=SimpleNamespace(length=3, parts=list), ranks=None, sent=None)
    context: Any = SimpleNamespace(earlier=SimpleNamespace(dropped={}, saved={}), event=None, ranks=None,
                                   subject=SimpleNamespace(after={}), truth=SimpleNamespace(after={}))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instep.checks.transfer_findings.others_kept", lambda *given, **named: ())
        patch.setattr("instep.checks.transfer_findings.restores", lambda event: None)
        for rows, component, count in ((3, "keys", 2 * 4), (3, "state", 0), (MOST_ROWS + 9, "values", 63 * 4)):
            right = torch.arange(float(rows)) + 1
            found = [(known.says, wrong.tolist()) for known, wrong in wrong_transfers(
                context, "copy", kept, Place("trunk", 0, component), right)]  # fmt: skip
            assert len(found) == count
            assert count != 8 or found == [(f"has its rows {far}", moved) for far, both in (
                ("1 position further", ([3, 1, 2], [0, 1, 2])), ("1 position earlier", ([2, 3, 1], [2, 3, 0])),
                ("2 positions further", ([2, 3, 1], [0, 0, 1])), ("2 positions earlier", ([3, 1, 2], [3, 0, 0])),
            ) for moved in both]  # fmt: skip


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


def test_an_event_with_rows_calls_ops_or_replays_a_graph() -> None:
    forward = Forward((BatchRow("a", "decode"),))
    for event, replays, due in ((forward, [1], [Skipped]), (forward, [], [Comparison]), (Idle(), [1], [])):
        log = SimpleNamespace(ops="plain", calls=0, replays=replays, poison=None)
        assert [*map(type, op_call_contracts.Contracts()(context(event=event, log=log)))] == due


def test_beams_of_one_request_are_rows_of_one_launch() -> None:
    spans = [RowSpan(name, kind, 0, 1, 0, 0, 1, (at,)) for at, (name, kind) in enumerate(
        (("a", "draft"), ("a", "draft"), ("b", "draft"), ("b", "verify"), ("b", "verify")))]  # fmt: skip
    found = op_call_contracts._launched(spans)
    assert [(one.request, one.count, one.nodes) for one in found] == [
        ("a", 2, (0, 1)), ("b", 1, (2,)), ("b", 1, (3,)), ("b", 1, (4,))]  # fmt: skip


def test_blocks_of_a_window_in_flight_may_hold_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Poison, "_seen", lambda self, context, place, tensor, poison, name: [(place.component, name)])
    parts = [(Place("trunk", 0, component), torch.zeros(1)) for component in ("state", "keys")]
    states = {name: SimpleNamespace(parts=lambda: parts) for name in "ab"}
    given: Any = SimpleNamespace(subject=SimpleNamespace(after=states, places=dict(parts[1:])),
                                 expected=SimpleNamespace(flying=("a",)))  # fmt: skip
    assert [*Poison()._visible(given, 1.0)] == [("keys", "a"), ("state", "b"), ("keys", "b"), ("keys", None)]


def test_the_table_of_all_regions_is_one_result_at_the_first_region() -> None:
    means = SimpleNamespace(component="state", draft=False)
    regions = [SimpleNamespace(layer=layer, scratch=set(), means=means, name="pool", by="slot") for layer in (0, 1)]
    log = SimpleNamespace(room=None, poison=None)
    given = context(changes=SimpleNamespace(regions=regions, wider=[]), log=log)
    (found,) = declared_writes.Bounds()(given)
    assert isinstance(found, Comparison) and (found.place.layer, found.elements) == (0, 2) and found.agrees


def test_a_graph_of_a_prompt_has_its_rows_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of four tokens, of which two were read before, in rows 1 and 2; a decode in row 0."""
    spans = [RowSpan("b", "decode", 0, 1, 9, 0, 1), RowSpan("a", "prefill", 1, 2, 2, 1, 0)]
    monkeypatch.setattr(graph_replays, "row_spans", lambda context, stage: spans)
    given: Any = SimpleNamespace(event=Forward((BatchRow("b", "decode"),)),
                                 expected=SimpleNamespace(prompts={"a": (11, 12, 13, 14)}))  # fmt: skip

    def said(
        key: str = graph_replays.PROMPT, tokens: Any = (7, 13, 14), begin: Any = (0, 1), counts: Any = (1, 2)
    ) -> list[str]:
        inputs = {name: ([], [*own], -1) for name, own in (("tokens", tokens), ("begin", begin), ("counts", counts))}
        return [*graph_replays._prompt(given, SimpleNamespace(key=(key, 0), inputs=inputs))]  # type: ignore[arg-type]

    assert said() == [] and said("decode", tokens=(7, 9, 9)) == []
    assert said(tokens=(7, 13, 15)) == ['the graph has tokens [13, 15] of the prompt of "a"; the trace has [13, 14]']
    assert said(begin=(0, 2)) == ['the graph has rows 2 to 3 for request "a"; the trace has 1 to 2']
    assert said(counts=(2, 2)) == ['the graph has rows 0 to 1 for request "b"; the trace has 0 to 0']
    given.event = Commit(("a",))
    assert said(tokens=(7, 9, 9)) == []


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


def test_draft_kv_is_wrong_alone_if_all_of_the_target_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of the target; a wrong one, or no valid position of the draft head, is another mistake."""
    draft, *target = Place("extend", 0, "keys"), Place("trunk", 0, "keys"), Place("trunk", 0, "state")
    right = {place: torch.ones(2, 1) for place in (draft, *target)}
    for wrong, said in (((draft,), "the target's memory came back, the draft KV did not: "), ((draft, target[0]), ""),
                        ((draft, target[1]), ""), ((draft, *target), "")):  # fmt: skip
        found = {place: its * 0 if place in wrong else its for place, its in right.items()}
        states = [SimpleNamespace(parts=lambda parts=parts: [*parts.items()], final=None) for parts in (found, right)]
        monkeypatch.setattr(unchanged_bytes, "kept_of", lambda context, state=states[1]: SimpleNamespace(state=state))
        monkeypatch.setattr(unchanged_bytes, "restores", lambda event: "a")
        given: Any = SimpleNamespace(event=None, subject=SimpleNamespace(after={"a": states[0]}))
        assert unchanged_bytes.draft_alone(given, draft) == said
        assert unchanged_bytes.draft_alone(given, target[0]) == ""


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


def test_nodes_off_a_path_are_named_by_their_nearest_relation() -> None:
    """The path is 0, 2, 3 of a tree of seven nodes."""
    parents, path = (-1, 0, 0, 2, 3, 2, 1), (0, 2, 3)
    assert {node: wrong_state_bank.kin(parents, path, node) for node in (1, 4, 5, 6)} == {
        1: "a node off the path", 4: "a child of node 3", 5: "a sibling of node 3", 6: "the last node of the window"}
    assert wrong_state_bank.kin((-1, 0, 0, 1, 1, 1), (0, 1), 1 + 1) == "a sibling of node 1"
    assert wrong_state_bank.kin((-1, 0, 1, 0, 3, 4), (0, 3, 4), 2) == "whose number is the depth of the path"
    for path, due in (((0, 2, 3), [(6, 7), (3, 4), (2, 3)]), ((0, 1), [(6, 7)]), (tuple(range(7)), [])):
        chains = [(known.says, len(rows)) for known, rows in wrong_state_bank._as_chains(path, 7)]
        assert [count for _, count in chains] == [count for _, count in due]
        assert all(str(node) in says for (says, _), (node, _) in zip(chains, due, strict=True))


def test_slots_of_prefixes_are_wrong_in_one_of_three_ways() -> None:
    for found, right, names in (
        ({"a": 2, "b": 3}, {"a": 2}, ("track-slot-kept",)), ({"a": 1}, {"a": 2}, ("track-slot-not-taken",)),
        ({"a": 3, "b": 5}, {"a": 2, "b": 4}, ("track-slot-taken",)), ({"a": 2}, {"a": 2}, ("track-slot-taken",)),
        ({"a": 2}, {"a": 2, "b": 4}, None),
    ):  # fmt: skip
        known = prefix_findings.wrong_slots(found, right)
        assert (None if known is None else known.names) == names, (found, right)


def test_a_copy_of_before_has_all_parts_of_an_earlier_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_findings, "restores", lambda event: "a")
    keys, state = Place("trunk", 0, "keys"), Place("trunk", 0, "state")
    one, two = torch.ones(2), torch.arange(2.0)

    def held(length: int, **parts: torch.Tensor) -> Any:
        places = {"keys": keys, "state": state}
        return SimpleNamespace(length=length, parts=lambda: [(places[name], x) for name, x in parts.items()])

    before = held(2, keys=one, state=two)
    for found, is_copy in ((held(2, keys=one, state=two), True), (held(3, keys=one, state=two), False),
                           (held(2, keys=one), False), (held(2, keys=one, state=one), False),
                           (held(2, keys=one[:1], state=two), False), (None, False)):  # fmt: skip
        earlier = SimpleNamespace(dropped={"copy": [SimpleNamespace(state=before)]})
        after = {"a": found} if found else {}
        given = context(event=SimpleNamespace(name="copy"), subject=SimpleNamespace(after=after), earlier=earlier)
        assert transfer_findings.is_copy_of_before(given, "a") is is_copy
        assert not transfer_findings.is_copy_of_before(given, "b")


def test_tokens_of_a_grown_tree_are_broadcast_after_the_logits() -> None:
    logits, hidden = Place("chain.0", 0, "logits"), Place("chain.0", 0, "hidden")
    calls = {name: SimpleNamespace(kind=kind, place=place) for name, kind, place in (
        ("l", "gather", logits), ("b", "broadcast", None), ("h", "sum", hidden))}  # fmt: skip
    for order, lacks in (("lbb", [0]), ("hlbbh", [0]), ("lb", [1]), ("lhb", [1]), ("bbl", [1]), ("lbblb", [0, 1])):
        found = ranks.Collectives()._topk(context(), [calls[name] for name in order])  # type: ignore[misc]
        assert [one.worst for one in found] == lacks, order


def test_relays_of_a_stage_are_counted_together_or_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_relays_due", lambda context, facts: {"a": (0, 0, 5), "b": (0, 1, 6), "c": (1, 0, 7)})
    ran: Any = [SimpleNamespace(requests=("a", "b"), relayed=((0, 0, 5, 9), (0, 1, 8)))]
    given = context(subject=SimpleNamespace(answer=Forwarded.__new__(Forwarded)))
    same, *wrong = ranks.Stages()._relays(given, None, 1, ran)  # type: ignore[arg-type]
    assert (same.agrees, same.elements) == (True, 3)
    assert [(one.request, one.rank, one.diagnosis) for one in wrong] == [
        ("b", 1, "stage 1 received root 8 in its relay; expected 6"),
        ("c", 1, "stage 1 received no relay of the request")]  # fmt: skip


def test_a_forward_with_one_drawn_row_has_the_graph_of_draws() -> None:
    expected = SimpleNamespace(num_steps=0, topk=None, device_widths=False)
    for uniforms, kind in (((), "decode"), ((0.5,), "sampled decode")):
        event = Forward((BatchRow("a", "decode"), BatchRow("b", "decode", uniforms=uniforms)))
        given = context(event=event, expected=expected, truth=SimpleNamespace(before={}, places=[]))
        assert graph_replays.due(given) == graph_replays.Due((kind, 0), 2)


def test_slot_0_of_an_idle_replica_is_served_wrongly() -> None:
    """Slot 0 is one of the pool, and -1 is none."""
    for slot, wrong in ((-1, False), (0, True)):
        replay: Any = SimpleNamespace(inputs={"slots": ([7], [-1, slot], -1)})
        given = context(group=object())
        assert bool([*graph_replays._slots(given, replay, ())]) is wrong


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


def test_keys_of_a_prefix_end_before_the_rows_that_later_tokens_decide() -> None:
    """A request of 5 tokens and its prefix of 3. A layer of the draft head has 2 rows of it, and the next one has 1."""
    rows = torch.arange(5.0)[:, None, None]
    after = RequestState(5, 7, None, None, {}, {}, {0: rows}, {0: rows}, {0: rows, 1: rows}, {0: rows, 1: rows})
    prefix = replace(after, length=3, keys={0: rows[:3]}, values={0: rows[:3]}, draft_keys={0: rows[:2], 1: rows[:1]},
                     draft_values={0: rows[:2], 1: rows[:1]})  # fmt: skip
    forward: Any = SimpleNamespace(subject=SimpleNamespace(before={"a": after}, places={}), spans={})
    span = RowSpan("a", "prefill", 0, 2, 3, 0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unchanged_bytes, "remembered", lambda state: ())
        patch.setattr(unchanged_bytes, "rows", lambda side, place, span: None)
        none: dict[int, torch.Tensor] = {}
        for own, its in (({}, {}), ({"block_keys": {0: rows}}, {"block_keys": {0: rows[:3]}})):
            one, other = after, prefix
            if own:  # a block drafter, whose rows depend on no later token
                one, other = (replace(each, draft_keys=none, draft_values=none, **more)  # type: ignore[arg-type]
                              for each, more in ((after, own), (prefix, its)))  # fmt: skip
            results = [*unchanged_bytes.Bytes()._moved(context(), span, other, one, forward, [0])]
            assert len(results) == (3 if own else 6) and all(each.agrees for each in results)
