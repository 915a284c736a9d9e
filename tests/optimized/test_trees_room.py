"""Room for trees: pools, pages and tokens count nodes; what does not serve trees is refused.

Leaves out: rounds over trees (`test_engine_trees.py`).
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from instep_optimized import load
from instep_optimized.commit.snapshot import SNAPSHOT
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Capacity, Draft, Path, Row
from instep_reference.contract.errors import BadInput, OutOfCapacity, Unsupported
from instep_reference.contract.place_names import unseen
from support.inputs.rounds import begin
from support.inputs.tree_rounds import NODES, ROOM, STEPS
from support.worlds.engine_and_reference import CAPACITY, engine, snapshot, untouched


def test_memory_counts_nodes(checkpoint: Checkpoint) -> None:
    """The widest window is the largest tree. Without trees nothing is there that was not there before."""
    trees, chains = (
        {one.name: one.units.shape[1] for one in engine(checkpoint, room=room).regions() if not one.red}
        for room in (ROOM, CAPACITY)
    )
    assert trees.pop("parents") == NODES
    windows = {"window": 1, "picks": 1, "final": 1, "ring_k": 2, "ring_decay": 2, "ring_update": 1, "snapshot_conv": 1}
    wider = {name: (size, trees[name]) for name, size in chains.items() if size != trees[name]}
    assert trees.keys() == chains.keys()
    assert wider == {name: (many * (STEPS + 1), many * NODES) for name, many in windows.items()}


def test_chains_cost_the_same_when_trees_are_possible(checkpoint: Checkpoint) -> None:
    """The exact number of runs of the head and of copies; further ones write the window's shape, and the memory after
    it.
    """
    told = []
    for room in (CAPACITY, ROOM):
        calls = Counter[str]()

        def counting(name: str, op: Any, calls: Counter[str] = calls) -> Any:
            def call(**given: Any) -> Any:
                calls[name] += 1
                return op(**given)

            return call

        subject = engine(checkpoint, around(load("plain"), unseen, counting), room)
        begin(subject, (3,), root=4)
        calls.clear()
        subject.draft(("a",))
        told.append(calls)
    assert told[1] - told[0] == {"store_rows": 2} and not told[0] - told[1]
    assert told[0]["lm_head"] == STEPS - 1


FEW = replace(ROOM, slots=(1, 2), pages=(1, 2, 3, 4), max_tokens=9)


def test_pages_and_tokens_count_nodes(checkpoint: Checkpoint) -> None:
    """Four pages of four positions: after one token each, two requests reserve 1 + 5 and 1 + 2 positions."""
    subject = engine(checkpoint, room=FEW)
    for name in "ab":
        begin(subject, (3,), root=4, name=name)
    subject.draft(("a", "b"), ((1, 2, 3, 4, 5), (1, 2)), ((0, 0, 0, 0, 0), (0, 0)))
    assert {name: len(pages) for name, pages in subject.pages().items()} == {"a": 2, "b": 1}
    subject.forward((Row("a", "verify"), Row("b", "verify")))  # 6 + 3 of 9 tokens
    answer = subject.commit(("b", "a"), (Path((2,), 9), Path((5,), 9)))
    assert answer.accept_index.tolist() == [[0, 2, -1, -1, -1, -1], [0, 5, -1, -1, -1, -1]]
    drafted = subject.draft(("b", "a"), ((1, 2, 7), (1, 2, 3, 4, 5)), ((0, 1, 1), (0, 0, 1, 1, 0)))
    assert drafted.drafts.tolist() == [[1, 2, 7, -1, -1], [1, 2, 3, 4, 5]]
    with pytest.raises(OutOfCapacity, match="a forward of 10 tokens; there is room for 9"):
        subject.forward((Row("a", "verify"), Row("b", "verify")))
    subject.forward((Row("b", "verify"),))
    subject.commit(("b",), (Path((1, 3), 9),))
    with pytest.raises(OutOfCapacity, match="KV pages: 1 more needed, 0 free"):
        subject.draft(("b",), ((1, 2, 3),), ((0, 0, 0),))


@pytest.mark.parametrize(("given", "sentence"), [
    ({"conv": "widened"}, "in a widened line of inputs the conv windows of siblings would overlap"),
    ({"drafter": "vanilla"}, "vanilla drafting has no separate layer per branch"),
    ({"ops": replace(load("plain"), trees=False)}, "serves chains alone, or does not say that it serves trees"),
    ({"ops": replace(load("plain"), keepers={"mine": SNAPSHOT}), "strategy": "mine"},
     "a strategy from an op set supports only chains"),
    ({"room": replace(CAPACITY, num_draft_tokens=64)}, "from 2, the root and 1 drafts, to 63"),
    ({"room": replace(CAPACITY, num_draft_tokens=1)}, "from 2, the root and 1 drafts, to 63"),
    ({"room": replace(ROOM, max_tokens=5)}, "room for a window of 6 tokens"),
    ({"adaptive": AdaptiveFile(flat=Bracket(candidate_steps=(1, 3)))}, "trees with adaptive step counts"),
])  # fmt: skip
def test_setting_that_cannot_serve_trees_is_refused_before_the_run(
    checkpoint: Checkpoint, given: dict[str, Any], sentence: str
) -> None:
    options = {"ops": load("plain"), "room": ROOM, "adaptive": None, "strategy": "rerun"} | given
    ops, room, adaptive = (options.pop(name) for name in ("ops", "room", "adaptive"))
    with pytest.raises((Unsupported, BadInput), match=sentence):
        engine(checkpoint, ops, room, num_steps=1, adaptive=adaptive, **options)
    if room is ROOM:  # chains are served
        engine(checkpoint, ops, num_steps=1, adaptive=adaptive, **options)


@pytest.mark.parametrize(("room", "draft", "sentence"), [
    (CAPACITY, Draft(("a",), ((1, 2, 3),), ((0, 0, 1),)), "drafts that form a tree"),
    (ROOM, Draft(("a",), None, ((0, 0, 1),)), "a tree without its drafts"),
    (ROOM, Draft(("a",), ((1,) * 4,), ((0, 1, 2, 3),)), "a path of 4 drafts"),
    (ROOM, Draft(("a",), ((1,) * 6,), ((0,) * 6,)), "a window of 7 nodes; there is room for 6"),
])  # fmt: skip
def test_unsupported_draft_changes_nothing(checkpoint: Checkpoint, room: Capacity, draft: Draft, sentence: str) -> None:
    subject = engine(checkpoint, room=room)
    begin(subject, (3, 4), root=5)
    before, pages = snapshot(subject), subject.pages()
    with pytest.raises((BadInput, Unsupported, OutOfCapacity), match=sentence):
        draft.on(subject)
    assert untouched(subject, before, {}) and subject.pages() == pages
