"""Windows that are trees, given or grown by the drafter: what is recorded, legal and looked at, and who sees a slip.

Leaves out: the catalogue's faults (`catalogue/trees.py`), how trees grow (`tests/reference/test_growing.py`), and the
engine (`tests/optimized/test_engine_windows.py`).
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from instep.campaign.fuzz.campaign import Settings, campaign
from instep.campaign.fuzz.coverage import Coverage
from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.checks.grown_trees import Grown, Scores
from instep.checks.trace_bookkeeping import Identity
from instep.checks.wrong_state_bank import kin
from instep.cli.record import make
from instep.diagnose import diagnose
from instep.oracle.single_layer_run import positions_of
from instep.run.replay import Replay
from instep.setting import Setting
from instep.tier_allowances import log_prob_error
from instep.trace.event_rules import EventRules
from instep.trace.file import Trace, read
from instep.trace.header import Room, sound
from instep.trace.ngram_tree import picks
from instep.trace.policy import Arrival, Policy
from instep.trace.tree_shape import depths, lines
from instep.verdict import Exit, Tier
from instep.watch.grown_tree import Growth
from instep.watch.op_calls import linked, seen
from instep_optimized import OptimizedEngine
from instep_proof.faults.catalogue import FAMILIES, TRACES, by_id
from instep_proof.faults.catalogue.fault import Edit, Fault
from instep_reference import trunk
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place
from instep_reference.draft.grow_draft_tree import Growing
from instep_reference.sampling import most_probable
from instep_reference.weights import Weights
from support.inputs.checkpoints import Kind, write
from support.inputs.few_channels import few_channels
from support.inputs.traces import header, policy, recorded
from support.running.covering import WHOLE, few
from support.running.event_clock import count_events
from support.running.planting import planted_here

BATCH, INDEX, ROUND, RERUN = (
    f"instep_optimized/{name}.py"
    for name in ("packed_batch", "ops/plain/row_places_and_lengths", "round_for_step_count", "commit/rerun")
)
NODES_OF = "Nodes(plan.before.flatten(), plan.depth.flatten(), plan.ancestors.flatten(), plan.depth.shape[1])"
POLICY = msgspec.json.decode((TRACES / "branching.policy.json").read_bytes(), type=Policy)
PROMPTS = {"one-byte": (7,), "two-words": (1, 2, 3, 4, 5), "document-start": tuple(range(20))}


@pytest.fixture(scope="module")
def branching(model: Path) -> Trace:
    """The committed trace of trees, of a model with a layer of each kind."""
    return make(model, PROMPTS, POLICY, model / "branching.jsonl")


@pytest.fixture(scope="module")
def three_rounds(model: Path) -> Trace:
    """The first rounds with a shorter prompt; the request that prefills next to windows has one in the last round."""
    prompts = {**PROMPTS, "document-start": tuple(range(9))}
    return make(model, prompts, replace(POLICY, rounds=3, accept=(2, 3, 1, 3, 0)), model / "three-rounds.jsonl")


@pytest.mark.parametrize(
    ("parents", "told"), [((-1,), ()), ((-1, 0, 1, 2), ()), ((-1, 0, 0, 2), ((-1,), (0,), (0,), (2,)))], ids=str
)
def test_rows_of_a_chain_continue_the_row_before_and_of_a_tree_their_parents(
    parents: tuple[int, ...], told: tuple[tuple[int, ...], ...]
) -> None:
    assert linked(parents) == told


@pytest.mark.parametrize(("before", "sets", "told"), [
    (8, [], (8, ())),
    (8, [0b1, 0b11, 0b111], (8, ())),  # a chain
    (8, [0b1, 0b101], (8, ((8,), (8, 10)))),
    (8, [0b1, 0b11, 0b101], (8, ((8,), (8, 9), (8, 10)))),
    (8, [0b11], (9, ())),  # a step of the head: the entries that it sees without a gap are before it
    (8, [0b1001], (9, ((11,),))),
], ids=str)  # fmt: skip
def test_attention_of_rows_is_described_by_position(before: int, sets: list[int], told: tuple[Any, ...]) -> None:
    assert seen(before, sets) == told


def test_siblings_that_are_recorded_differ_and_the_first_child_is_the_proposal() -> None:
    parents, text = (0, 0, 0, 1, 1, 2), (5, 6, 7, 5, 6, 8, 5, 6)
    for seed in range(20):
        tokens = picks(text, parents, 3, 9, random.Random(seed))
        assert tokens[:3] == (3, 8, 7)  # the proposal; what followed 5, 6 last; what followed them before that
        assert tokens[3] != tokens[4]
    assert {*picks(text, (0,) * 9, 3, 9, random.Random(0))} == {*range(9)}
    with pytest.raises(BadInput, match="node 0 with 10 children, expected at most 9"):
        picks(text, (0,) * 10, 3, 9, random.Random(0))


SLIPS = [
    ("a mask", (Edit(BATCH, NODES_OF, NODES_OF.replace("plan.ancestors", "(plan.ancestors | plan.ancestors >> 1)")),),
     "rerun", 11, "contracts", "sees positions"),
    ("a parent", (Edit(BATCH, NODES_OF, NODES_OF.replace("plan.before", "(plan.before - (plan.before > 0).long())")),),
     "rerun", 11, "contracts", "continues node"),
    ("a move elsewhere", (Edit(INDEX, "place = before[:, None] + node", "place = before[:, None] + node + 1"),),
     "rerun", 6, "tails", "; this event writes "),
    ("another node", (Edit(ROUND, "acceptance.last_correct_step_indices, acceptance.accept_lens,",
                           "(acceptance.last_correct_step_indices - 1).clamp(min=0), acceptance.accept_lens,"),),
     "snapshot", 6, "labels", ""),
    ("an own path", (Edit("instep_optimized/ops/plain/argmax_and_acceptance.py", "fits.long().argmax(dim=1)",
                          "(parents == at[:, None]).long().argmax(dim=1)"),
                     Edit("instep_optimized/ops/plain/argmax_and_acceptance.py", "fits.any(dim=1)",
                          "(parents == at[:, None]).any(dim=1)")), "rerun", 6, "identity", ""),
]  # fmt: skip


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("edits", "strategy", "event", "check", "says"), [slip[1:] for slip in SLIPS],
                         ids=[slip[0] for slip in SLIPS])  # fmt: skip
def test_tree_fault_is_found_by_its_check(
    branching: Trace, edits: tuple[Edit, ...], strategy: str, event: int, check: str, says: str
) -> None:
    with planted_here(*edits):
        findings = diagnose(Replay(branching, Setting("ledger", strategy=strategy)), until=event).verdict.findings
    mine = [found for found in findings if found.check == check]
    assert mine and mine[0].event == event and says in mine[0].diagnosis, [found.diagnosis for found in findings[:5]]


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "parting"), [(None, set()), ("tree-as-chain-rotary", {"draft_layout", "schedule"})])
def test_tree_paths_equal_chains_and_decoding(three_rounds: Trace, fault: str | None, parting: set[str]) -> None:
    with planted_here(*(by_id()[fault].edits if fault else ())):
        case = Case.of(three_rounds, Replay(three_rounds, Setting("plain")).plan)
        found = held(case, relations(("alone", "draft_layout", "schedule")))
    assert all(one.lacks is None and one.verdict.elements for one in found)
    said = {one.relation.name: one.verdict.findings[:1] for one in found if one.verdict.exit is not Exit.AGREED}
    assert said.keys() == parting, said


@WHOLE
def test_fuzzed_trees_agree_and_a_planted_slip_is_found_in_a_tree(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_events(monkeypatch)
    setting = Setting("ledger", strategy="rerun", conv="windows")
    monkeypatch.setattr("instep.campaign.fuzz.campaign.EVENTS", 9)  # such runs of this seed meet the conditions below
    clean = campaign(Settings(setting, model, 2, 2, tmp_path / "clean", trees=6))
    assert clean.exit == Exit.AGREED, None if clean.found is None else clean.found.verdict.findings[0]
    seen = clean.coverage.counts()
    assert seen["trees of different shapes in one batch"] and seen["an accepted path that is not 1, 2, ..."]
    monkeypatch.setattr("instep.campaign.fuzz.campaign.EVENTS", 7)  # such runs find it sooner
    with planted_here(Edit(RERUN, "accepted.path is None", "True")):
        faulty = campaign(Settings(setting, model, 40, 10, tmp_path / "faulty", trees=6, shrink_s=15))
    assert faulty.exit == Exit.DIVERGED and faulty.found is not None
    events = read(faulty.found.trace).events
    assert any(isinstance(event, e.Draft) and event.parents for event in events) and len(events) < 10


def test_every_kind_of_fault_of_trees_is_served_by_the_trace_of_trees() -> None:
    assert {fault.trace for fault in FAMILIES["trees"]} == {"branching", "grown", "own"}


# ---- trees that the drafter grows

GROWN = TRACES / "grown.jsonl"
ROOM = Room(slots=(3, 1), pages=(5, 2, 7, 1, 4, 6, 3, 8), page_size=8, max_tokens=32, num_draft_tokens=8, topk=3)
HEADER = header(capacity=ROOM, candidates=(3,), adaptive=None)
ENTERED = e.Admit("a", (1, 2)), e.Forward((e.Row("a", "prefill", 2, root=9),))


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        ({}, {"num_draft_tokens": None}), ({}, {"topk": 0}), ({}, {"topk": 65}), ({}, {"topk": 32}),
        ({}, {"topk": 20, "max_positions": 40}),
        ({"checkpoint": msgspec.structs.replace(HEADER.checkpoint, mtp_layers=2)}, {}),
        ({"recording": msgspec.structs.replace(HEADER.recording, drafter="vanilla")}, {}),
    ],
)  # fmt: skip
def test_a_header_in_which_no_tree_can_be_grown_is_refused(changes: dict[str, Any], room: dict[str, Any]) -> None:
    sound(HEADER, "t")
    with pytest.raises(BadInput, match=r"capacity\.topk"):
        sound(msgspec.structs.replace(HEADER, capacity=msgspec.structs.replace(ROOM, **room), **changes), "t")


def test_a_draft_reserves_the_rows_of_all_beams_whatever_its_window() -> None:
    """topk 3 and 3 steps: 6 rows after 2 tokens; the window of one draft would need 3 positions."""
    rules = EventRules(msgspec.structs.replace(HEADER, capacity=msgspec.structs.replace(ROOM, page_size=2)))
    for event in ENTERED:
        rules.apply(event)
    rules.check(e.Draft(("a",)), choices=False)
    with pytest.raises(BadInput, match="picks"):
        rules.check(e.Draft(("a",)))
    rules.apply(e.Draft(("a",), ((7,),), ((0,),)))
    assert len(rules.table.live["a"].pages) == 4


def test_the_committed_trace_meets_the_conditions_and_its_trees_differ() -> None:
    trace, coverage = read(GROWN), Coverage()
    rules = EventRules(trace.header)
    for event in trace.events:
        before = rules.table.as_it_stands()
        rules.apply(event)
        coverage.note(before, event, rules.table)
    assert coverage.met["trees grown for several requests"] and coverage.met["another window than the grown tree"]
    drafts = [event for event in trace.events if isinstance(event, e.Draft)]
    assert len({shape for event in drafts for shape in event.parents or ()}) > 4


def grown(logits: list[list[list[float]]], topk: int) -> Growth:
    """A growth by given logits, a row per beam and step."""
    growing, rows = Growing(topk), [torch.tensor(step, dtype=torch.float64) for step in logits]
    said = [most_probable(step, topk) for step in rows]
    for step in said:
        growing.step(step)
    return Growth(growing, rows, said, True, (-1,), ())


NEAR = [[[3.0, 2.0, 1.0, 0.0]], [[2.0, 1.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]]]


@pytest.mark.parametrize(
    ("kept", "among", "noise", "holds"),
    [
        ([(0,), (1,)], [(0,), (1,), (2,)], 0.0, True),  # as the truth has it
        ([(1,), (0,)], [(0,), (1,), (2,)], 0.01, False),  # one apart: no rounding does that
        ([(1,), (0,)], [(0,), (1,), (2,)], 0.1, True),  # logits of 3 that may be off by a tenth each
        ([(0,), (3,)], [(0,), (1,), (2,)], 0.01, False),  # a token that is no candidate of the truth
        ([(0, 9)], [(0, 0)], 10.0, False),  # no token at all
        ([(0, -1)], [(0, 0)], 10.0, False),  # nor the last one
        ([(0, 0, 0)], [(0, 0)], 10.0, False),  # after the last step
        ([(2, 0)], [(0, 0)], 10.0, False),  # after a node that was no beam
    ],
)  # fmt: skip
def test_other_beam_order_is_a_tie_only_within_the_error(
    kept: list[tuple[int, ...]], among: list[tuple[int, ...]], noise: float, holds: bool
) -> None:
    part = Scores(grown(NEAR, 2), noise, torch.float32).disorder(kept, among, ordered=True)
    assert (part <= 1) is holds and part >= 0


def test_paths_that_part_early_may_err_by_every_row_below() -> None:
    """Siblings depend on one row; two paths depend on the row where they part and on one row below for each."""
    scores = Scores(grown(NEAR, 2), 0.01, torch.float32)
    siblings, cousins = (scores._error(*pair) for pair in (((0, 0), (0, 1)), ((0, 0), (1, 0))))
    assert cousins > 2.5 * siblings > 0
    own = Scores(grown(NEAR, 2), None, torch.float32)
    assert own._error((0, 0), (1, 0)) < 1e-4, "what is the engine's own errs by rounding alone"
    eps, added = torch.finfo(torch.float32).eps, -float(torch.tensor(NEAR[0][0]).double().log_softmax(0)[0])
    assert own._rounding(()) == log_prob_error(3.0, 4, eps)
    assert own._rounding((0,)) == pytest.approx(log_prob_error(2.0, 4, eps) + eps * added)
    own.growth.logits[0].fill_(torch.nan)
    assert not own._part((0,), (1,)) <= 1, "NaN is within no limit"


OF_THE_RUN = frozenset(Tier) - {Tier.DERIVED, Tier.DIRECTED}  # which window is served shows in what follows from it
NAMED = ["grown-tie", "grown-parent-beside", "grown-parent-alone", "grown-score-of-the-step", "grown-last-step-alone",
         "grown-nodes-by-score"]  # fmt: skip


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_a_wrong_tree_of_labels_is_found_exactly_and_named(name: str) -> None:
    fault = by_id()[name]
    with planted_here(*fault.edits):
        ran = Replay(read(GROWN), Setting("ledger"), checks=lambda plan: [Grown()]).run(until=4)
    first = min(ran.verdict.findings, key=lambda found: found.order())
    assert first.event == 4 and first.tier is Tier.IDENTITY and fault.says in first.diagnosis, first.diagnosis
    assert first.explained is not None and fault.mistake in first.explained.names


@pytest.mark.slow
def test_fuzzed_runs_grow_trees_and_agree(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.campaign.fuzz.campaign.EVENTS", 9)  # such runs of this seed meet the condition below
    settings = Settings(Setting("ledger", strategy="rerun", conv="windows"), model, 2, 6, tmp_path, trees=6)
    clean = campaign(settings)
    assert clean.exit == Exit.AGREED, None if clean.found is None else clean.found.verdict.findings[0]
    assert clean.coverage.counts()["trees grown for several requests"]


# -- the drafter's own trees as windows


OWN = [fault for fault in FAMILIES["trees"] if fault.kind == "own-window"]


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize("fault", OWN, ids=lambda fault: fault.id)
def test_fault_in_the_engines_own_tree_is_found(fault: Fault) -> None:
    # A model drawn at random grows one shape for both requests: what takes another's shape, the trained one shows.
    own = read(TRACES / "own.jsonl") if fault.id == "own-window-in-another-s-shape" else few_channels("own", 2)
    begun = max(at for at, event in enumerate(own.events[: fault.event + 1]) if isinstance(event, e.Forward))
    given = Replay(few_channels("grown", 2), Setting("ledger"), checks=lambda plan: [Identity()])
    with planted_here(*fault.edits):
        found = diagnose(Replay(own, fault.how), until=fault.event, judged_from=begun).verdict.findings
        agreed = given.run(until=6).verdict
    assert agreed.exit is Exit.AGREED and (found[0].event, found[0].place) == (fault.event, fault.place)
    assert fault.says in found[0].diagnosis and {one.check for one in found} & {*fault.seen_by}


@pytest.mark.slow
def test_recorded_window_replaces_a_different_own_one(tmp_path: Path) -> None:
    """A model drawn at random, in bf16: some of its choices are ties, so that not every window is its own."""
    told = policy(capacity=ROOM, num_steps=3, adaptive=None, steps=(), deeds=(), accept=(2, 0, 1), own=True, rounds=5,
                  arrivals=(Arrival("a", "few", max_new=24), Arrival("b", "one", max_new=24)))  # fmt: skip
    trace = recorded(tmp_path, told, dtype=torch.bfloat16)
    drafts = [event for event in trace.events if isinstance(event, e.Draft)]
    assert len(drafts) > 3 and all(event.own and event.parents is not None for event in drafts)
    with pytest.MonkeyPatch.context() as patch:
        asked, draft = list[bool](), OptimizedEngine.draft
        patch.setattr(OptimizedEngine, "draft", lambda self, names, picks=None, parents=None: (
            asked.append(picks is None), draft(self, names, picks, parents))[1])
        verdict = Replay(trace, Setting(dtype="bfloat16")).run(tiers=OF_THE_RUN).verdict
    assert verdict.exit is Exit.AGREED, verdict.findings[:1]
    instead = [one for one in verdict.skipped if "as its own drafts differ" in one.reason]
    assert asked.count(True) == len(drafts) > len(instead) == asked.count(False) > 0


@pytest.mark.slow
def test_in_grown_trees_the_target_s_rows_are_compared_to_the_end() -> None:
    verdict = Replay(read(GROWN), Setting()).run(until=3, tiers={Tier.PROPAGATED}).verdict
    there = {one.place for one in verdict.compared if one.check == "propagated" and one.place.stage == "trunk"}
    assert len(there) > 4 and not [one for one in verdict.skipped if "the drafts differ" in one.reason]


def test_own_drafts_need_a_drafter() -> None:
    rules = EventRules(HEADER)
    given = e.Draft(("a",), ((7, 8),), ((0, 0),))
    for event in (*ENTERED, given, e.Draft(("a",), ((9,),), ((0,),))):
        rules.apply(event)
    assert rules.table.live["a"].window == (9, 9) and "draft" not in rules.legal()
    with pytest.raises(BadInput, match="drafted already"):
        rules.check(e.Draft(("a",)), choices=False)
    for own, header_ in ((e.Draft(("a",), ((7, 8, 9),), None, own=True), HEADER),
                         (msgspec.structs.replace(given, own=True), msgspec.structs.replace(
                             HEADER, capacity=msgspec.structs.replace(ROOM, topk=None)))):  # fmt: skip
        other = EventRules(header_)
        for event in ENTERED:
            other.apply(event)
        with pytest.raises(BadInput, match="drafts that nobody gave"):
            other.check(own)


def test_a_node_off_the_path_is_described_by_its_relation_to_the_path() -> None:
    parents, path = (-1, 0, 0, 1, 3, 4, 1, 4), (0, 1, 3)
    assert {node: kin(parents, path, node) for node in (2, 4, 5, 6, 7)} == {
        2: "whose number is the depth of the path", 4: "a child of node 3", 5: "a node off the path",
        6: "a sibling of node 3", 7: "the last node of the window",
    }  # fmt: skip


# -- forms of a tree


LAYERS = ["full_attention", "linear_attention", "linear_attention"]
TREES = [(-1,), (-1, 0, 1, 2, 3), (-1, 0, 0, 0), (-1, 0, 0, 1, 2, 1, 4), (-1, 0, 1, 0, 3, 1, 2, 6)]


@pytest.fixture(scope="module", params=["dense", "moe"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    kind: Kind = request.param
    folder = write(tmp_path_factory.mktemp(kind), kind, num_hidden_layers=3, layer_types=LAYERS)
    return Weights.of(Checkpoint.open(folder), torch.float64)


@few(12)
@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("before", [0, 1, 7])
def test_nodes_as_rows_of_one_run_are_the_nodes_decoded_one_by_one(
    weights: Weights, before: int, parents: tuple[int, ...]
) -> None:
    tokens = [(7 * index + 3) % 64 for index in range(before + len(parents))]
    memories = trunk.empty_memories(weights)
    if before:
        _, memories = trunk.advance(weights, tokens[:before], memories, 0)
    alone: list[dict[Place, torch.Tensor]] = []
    after: list[tuple[trunk.LayerMemory, ...]] = []
    for node, parent in enumerate(parents):
        seen: dict[Place, torch.Tensor] = {}
        held = after[parent] if parent >= 0 else memories
        place = before + depths(parents)[node]
        _, left = trunk.advance(
            weights, [tokens[before + node]], held, place, lambda at, x, seen=seen: seen.setdefault(at, x)
        )
        alone.append(seen)
        after.append(left)

    together: dict[Place, torch.Tensor] = {}
    positions, forms = positions_of(before, len(parents), parents, torch.device("cpu"))
    hidden = trunk.embed(weights, torch.tensor(tokens[before:]))
    for index, memory in enumerate(memories):
        hidden, left_by_layer = trunk.layer(
            weights.config,
            weights.layers[index],
            index,
            "trunk",
            hidden,
            memory,
            positions,
            lambda at, x: together.setdefault(at, x),
            forms,
        )
        if index:  # of a GDN layer: the memory after the last node
            for name, tensor in vars(after[-1][index]).items():
                torch.testing.assert_close(getattr(left_by_layer, name), tensor, rtol=1e-12, atol=1e-14)
    assert together, "places were compared"
    for at, rows in together.items():
        torch.testing.assert_close(rows, torch.cat([seen[at] for seen in alone]), rtol=1e-12, atol=1e-14)


def test_paths_and_depths() -> None:
    assert depths(TREES[3]) == [0, 1, 1, 2, 2, 2, 3] and lines(TREES[3])[6] == [0, 2, 4, 6]
