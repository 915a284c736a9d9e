"""Rounds over trees: against the reference, between strategies, and against plain decoding.

Leaves out: the ops (`test_ops_trees.py`), room and refusals (`test_trees_room.py`).
"""

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from instep_optimized import load
from instep_optimized.memory_addresses import Keeps
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Committed, Draft, Path
from instep_reference.contract.place_names import unseen
from support.inputs.checkpoints import TWO_LAYERS, write
from support.inputs.rounds import CLOSE, begin, decode, disagreement, play
from support.inputs.tree_rounds import NODES, ROOM, STEPS, VOCAB, Story, ahead, assert_same, played
from support.inputs.tree_windows import chain, drawn, path
from support.running.covering import PART, WHOLE, few
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import WIDE, both_sides

pytestmark = pytest.mark.slow  # whole replays or commands

engine = partial(sides.engine, room=ROOM)
STRATEGIES = ("snapshot", "columns", "rerun", "lazy_rerun")


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write(tmp_path_factory.mktemp("headless"), "dense", **TWO_LAYERS, mtp_num_hidden_layers=0))


# (strategy, graphs, overlap), all of which have the bits of `snapshot` without either.
WAYS = (("rerun", False, True), ("columns", True, False), ("rerun", True, False), ("lazy_rerun", True, True))
FEW = [("columns", True), ("lazy_rerun", False)]  # labels of the other two: with paths of the engine's own
COVERED = [("snapshot", False), ("columns", True), ("rerun", False), ("rerun", True), ("lazy_rerun", False)]


@few(1)
@pytest.mark.parametrize(("strategy", "graphs"), [
    pytest.param(*pair, marks=() if pair in FEW else WHOLE) for pair in COVERED
])  # fmt: skip
def test_every_label_of_a_tree_matches_the_ledger(checkpoint: Checkpoint, strategy: str, graphs: bool) -> None:
    both = both_sides(checkpoint, "ledger", ROOM, strategy=strategy, graphs=graphs, overlap=not graphs)
    assert both.serve(Story(1)).compared > 10_000


@few(1)
@pytest.mark.parametrize(("strategy", "keeps", "graphs"), [
    ("snapshot", "update", True), ("rerun", "inputs", False), pytest.param("columns", "update", False, marks=WHOLE),
    pytest.param("rerun", "inputs", True, marks=WHOLE), pytest.param("lazy_rerun", "inputs", False, marks=WHOLE),
    pytest.param("lazy_rerun", "update", True, marks=WHOLE),
])  # fmt: skip
def test_labels_of_trees_match_for_strategies_and_own_paths(
    checkpoint: Checkpoint, strategy: str, keeps: Keeps, graphs: bool
) -> None:
    ops, accepted = replace(load("ledger"), keeps=keeps), []
    both = both_sides(checkpoint, ops, ROOM, strategy=strategy, graphs=graphs, layout="KV")
    for event in Story(2, ahead=partial(ahead, both.truth)):
        answer = both(event)
        accepted += answer.num_correct_drafts.tolist() if isinstance(answer, Committed) else []
    assert set(accepted) == set(range(STEPS + 1)), "every length of a path"


@few(1)
@pytest.mark.parametrize(("strategy", "graphs", "head"), [
    ("snapshot", False, 1), ("rerun", True, 0),
    *(pytest.param(*pair, 1, marks=WHOLE) for pair in COVERED[1:]),  # of the same bits as these: the next test
])  # fmt: skip
def test_every_number_of_a_tree_matches_the_reference(
    checkpoint: Checkpoint, headless: Checkpoint, strategy: str, graphs: bool, head: int
) -> None:
    model = checkpoint if head else headless
    both = both_sides(model, "plain", ROOM, strategy=strategy, graphs=graphs)
    assert both.serve(Story(3, ahead=partial(ahead, both.truth), head=bool(head))).compared > 10_000


@few(1)
@pytest.mark.parametrize(("activation", "ways"), [
    *(pytest.param(*row, marks=PART) for row in ((torch.float32, WAYS[:2]), (torch.bfloat16, WAYS[2:]))),
    *(pytest.param(activation, WAYS, marks=WHOLE) for activation in (torch.float32, torch.bfloat16)),
])  # fmt: skip
def test_strategies_layouts_and_graphs_give_the_same_bits(
    checkpoint: Checkpoint, activation: torch.dtype, ways: tuple[tuple[str, bool, bool], ...]
) -> None:
    """With a state as wide as the arithmetic: then it matters to no bit where it is stored."""
    given: dict[str, Any] = {"activation": activation, "state": torch.float32}
    wanted = played(engine(checkpoint, strategy="snapshot", layout="KV", **given), Story(4))
    for strategy, graphs, overlap in ways:
        served = engine(checkpoint, strategy=strategy, graphs=graphs, overlap=overlap, **given)
        assert_same(played(served, Story(4)), wanted)


@pytest.mark.parametrize("ops", ["plain", pytest.param("ledger", marks=WHOLE)])
def test_a_tree_that_is_a_chain_has_the_bits_of_the_chain(checkpoint: Checkpoint, ops: str) -> None:
    """Next to a tree, so that the launch is the same."""
    said, as_tree = [*Story(5)], chain(STEPS + 1)[1:]
    told = [
        Draft(event.requests, event.picks, (as_tree,) * len(event.requests))
        if isinstance(event, Draft) and event.picks and event.parents is None else event
        for event in said
    ]  # fmt: skip
    assert said != told
    assert_same(*(played(engine(checkpoint, ops, strategy="rerun"), events) for events in (said, told)))


@few(2)
@pytest.mark.parametrize(("ops", "strategy"), [("ledger", "rerun"), ("ledger", "columns"), ("plain", "lazy_rerun")])
def test_round_over_a_tree_equals_decoding_its_accepted_tokens(checkpoint: Checkpoint, ops: str, strategy: str) -> None:
    """Exact for labels. Numbers are summed in another order: a window has more rows than a step of decoding."""
    wide: dict[str, Any] = {} if ops == "ledger" else WIDE
    draw = Random(6)
    for number in range(3):
        round_, steps = (engine(checkpoint, ops, strategy=strategy, **wide) for _ in range(2))
        for subject in (round_, steps):
            begin(subject, (7, 3, 9, 2, 4), root=5)
        for _ in range(3):
            tree = drawn(draw, draw.randint(2, NODES), STEPS)
            picks = tuple(draw.randrange(VOCAB) for _ in tree[1:])
            nodes, bonus = path(tree, draw.randrange(len(tree)))[1:], draw.randrange(VOCAB)
            play(round_, picks, Path(tuple(nodes), bonus), parents=tree[1:])
            decode(steps, (*(picks[node - 1] for node in nodes), bonus))
            assert disagreement(round_.state("a"), steps.state("a")) <= (0.0 if ops == "ledger" else CLOSE), number


@few(1)
@pytest.mark.parametrize(("ops", "strategies"), [
    *(pytest.param(*row, marks=PART) for row in (("plain", STRATEGIES[::3]), ("ledger", STRATEGIES[1:3]))),
    *(pytest.param(ops, STRATEGIES, marks=WHOLE) for ops in ("plain", "ledger")),
])  # fmt: skip
def test_rounds_over_trees_keep_every_contract(checkpoint: Checkpoint, ops: str, strategies: tuple[str, ...]) -> None:
    found: list[str] = []
    for strategy in strategies:
        played(engine(checkpoint, around(load(ops), unseen, contracts(found.append)), strategy=strategy), Story(7))
    assert found == []
