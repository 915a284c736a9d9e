"""Windows that are trees, on the harness's side: what is recorded, what is looked at, and who sees which slip.

Leaves out: the oracle's form of a tree (`test_tree_forms.py`), and the catalogue's faults (`catalogue/trees.py`).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from instep.campaign.fuzz.campaign import Settings, campaign
from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.cli.record import make
from instep.diagnose import diagnose
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.trace.ngram_tree import picks
from instep.trace.policy import Policy
from instep.verdict import Exit
from instep.watch.op_calls import linked, seen
from instep_proof.faults.catalogue import FAMILIES, TRACES, by_id
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract.engine import Draft
from instep_reference.contract.errors import BadInput
from support.covering import WHOLE, few
from support.event_clock import count_events
from support.planting import planted_here

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


@pytest.mark.parametrize(
    ("before", "sets", "told"),
    [
        (8, [], (8, ())),
        (8, [0b1, 0b11, 0b111], (8, ())),  # a chain
        (8, [0b1, 0b101], (8, ((8,), (8, 10)))),
        (8, [0b1, 0b11, 0b101], (8, ((8,), (8, 9), (8, 10)))),
        (8, [0b11], (9, ())),  # a step of the head: the entries that it sees without a gap are before it
        (8, [0b1001], (9, ((11,),))),
    ],
    ids=str,
)
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
def test_tree_paths_equal_chains_and_decoding(
    three_rounds: Trace, fault: str | None, parting: set[str]
) -> None:
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
    clean = campaign(Settings(setting, model, 2, 4, tmp_path / "clean", trees=6))
    assert clean.exit == Exit.AGREED, None if clean.found is None else clean.found.verdict.findings[0]
    seen = clean.coverage.counts()
    assert seen["trees of different shapes in one batch"] and seen["an accepted path that is not 1, 2, ..."]
    monkeypatch.setattr("instep.campaign.fuzz.campaign.EVENTS", 7)  # such runs find it sooner
    with planted_here(Edit(RERUN, "accepted.path is None", "True")):
        faulty = campaign(Settings(setting, model, 40, 4, tmp_path / "faulty", trees=6, shrink_s=15))
    assert faulty.exit == Exit.DIVERGED and faulty.found is not None
    events = read(faulty.found.trace).events
    assert any(isinstance(event, Draft) and event.parents for event in events) and len(events) < 10


def test_every_kind_of_fault_of_trees_is_served_by_the_trace_of_trees() -> None:
    assert {fault.trace for fault in FAMILIES["trees"]} == {"branching", "grown", "own"}
