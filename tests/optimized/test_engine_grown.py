"""Rounds over trees that the drafter grows: against both engines of the reference, held in graphs and eagerly.

Leaves out: the definition (`tests/reference/test_growing.py`), and the ops (`test_ops_grow.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from instep_optimized import load
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, OutOfCapacity, Unsupported
from instep_reference.contract.place_names import unseen
from support.inputs.rounds import begin
from support.inputs.tree_rounds import assert_same, played
from support.inputs.tree_windows import path
from support.running.covering import WHOLE, few
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import CAPACITY, both_sides

STEPS = 3
ROOM = replace(CAPACITY, num_draft_tokens=8, topk=3)
engine = partial(sides.engine, room=ROOM)


def rounds(serve: Callable[[e.Event], e.Answer | None], seed: int, *, given: bool = True) -> Iterator[e.Event]:
    """Rounds over grown trees, next to given windows and a prompt; a request leaves and returns. Paths are forced."""
    draw = Random(seed)
    windows: dict[str, tuple[int, ...]] = {}

    def served(event: e.Event) -> e.Event:
        answer = serve(event)
        if isinstance(event, e.Draft) and isinstance(answer, e.Drafted) and answer.own_parents is not None:
            shapes = answer.own_parents.tolist() if event.picks is None else event.parents or [range(STEPS)] * 9
            windows.update({name: (-1, *shape) for name, shape in zip(event.requests, shapes, strict=False)})
        return event

    def round_of(*names: str, beside: tuple[e.Row, ...] = ()) -> Iterator[e.Event]:
        some = names[: draw.randint(0, len(names))] if given else ()
        if some:
            tree = draw.random() < 0.5
            shape = (0, 0, 2, 1) if tree else tuple(range(STEPS))
            picks = tuple(tuple(draw.randrange(64) for _ in shape) for _ in some)
            yield served(e.Draft(some, picks, (shape,) * len(some) if tree else None))
        if names[len(some) :]:
            yield served(e.Draft(names[len(some) :]))
        yield served(e.Forward((*beside, *(e.Row(name, "verify") for name in names))))
        ends = [path(windows[name], draw.randrange(len(windows[name])))[1:] for name in names]
        yield served(e.Commit(names, tuple(e.Path(tuple(nodes), draw.randrange(64)) for nodes in ends)))

    yield served(e.Admit("a", tuple(range(3, 14))))
    yield served(e.Admit("b", (5, 9)))
    yield served(e.Forward((e.Row("a", "prefill", 11, 7), e.Row("b", "prefill", 2, 8))))
    yield served(e.Admit("c", (1, 2, 3, 4, 5)))
    yield from round_of("a", "b", beside=(e.Row("c", "prefill", 2),))
    yield from round_of("b", "a")
    yield served(e.Forward((e.Row("c", "prefill", 3, 4), e.Row("a", "decode", root=2))))
    yield from round_of("c", "b", "a")
    yield served(e.Preempt("a"))
    yield from round_of("c", "b")
    yield served(e.Resume("a"))
    yield from round_of("a", "c")
    yield served(e.Draft(("b",)))
    yield served(e.Abort("b"))
    yield served(e.Finish("c"))
    yield from round_of("a")


COVERED = [("snapshot", False), ("columns", True), pytest.param("rerun", False, marks=WHOLE),
           ("lazy_rerun", True)]  # fmt: skip


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "graphs"), COVERED)
def test_every_label_of_a_grown_tree_matches_the_ledger(checkpoint: Checkpoint, strategy: str, graphs: bool) -> None:
    both = both_sides(checkpoint, "ledger", ROOM, strategy=strategy, graphs=graphs, overlap=not graphs)
    assert [*rounds(both, 1)] and both.compared > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
def test_every_number_of_a_grown_tree_matches_the_reference(checkpoint: Checkpoint, graphs: bool) -> None:
    both = both_sides(checkpoint, "plain", ROOM, graphs=graphs)
    assert [*rounds(both, 2)] and both.compared > 10_000


@pytest.mark.slow
def test_graphs_overlap_and_strategies_change_no_bit(checkpoint: Checkpoint) -> None:
    found: list[str] = []
    watched = around(load("plain"), unseen, contracts(found.append))
    first = engine(checkpoint, watched)
    events = [*rounds(lambda event: event.on(first), 3)]
    told = [played(engine(checkpoint, **options), events) for options in (
        {"strategy": "snapshot"}, {"graphs": True, "overlap": True}, {"strategy": "lazy_rerun"})]  # fmt: skip
    assert found == []
    assert_same(told[0], told[1])
    assert_same(told[0], told[2])


@pytest.mark.parametrize(("topk", "nodes", "drafts"), [(1, 4, 3), (1, 8, 3), (2, 12, 10), (4, 5, 4), (3, 63, 21)])
def test_windows_have_as_many_nodes_as_candidates(checkpoint: Checkpoint, topk: int, nodes: int, drafts: int) -> None:
    """And with one child per node they are the head's own chains."""
    subject = engine(checkpoint, room=replace(ROOM, topk=topk, num_draft_tokens=nodes))
    begin(subject, (3, 4), root=5)
    drafted = subject.draft(("a",))
    assert drafted.own_parents is not None and drafted.drafts.shape == drafted.own_parents.shape == (1, drafts)
    chains = engine(checkpoint, room=CAPACITY)
    begin(chains, (3, 4), root=5)
    if topk == 1:
        assert drafted.drafts.tolist() == chains.draft(("a",)).drafts.tolist()
    assert len(subject.forward((e.Row("a", "verify"),)).own["a"]) == drafts + 1


@pytest.mark.parametrize(("room", "sentence"), [
    ({"num_draft_tokens": None}, "need num_draft_tokens and eagle drafting"),
    ({"topk": 0}, "from 1 to 62"),
    ({"topk": 63}, "from 1 to 62"),
    ({"topk": 32}, "at most 62 rows of 2 steps"),
])  # fmt: skip
def test_drafter_that_cannot_grow_trees_is_refused(checkpoint: Checkpoint, room: dict[str, Any], sentence: str) -> None:
    with pytest.raises((Unsupported, BadInput), match=sentence):
        engine(checkpoint, room=replace(ROOM, **room))


def test_pages_hold_the_rows_of_all_beams(checkpoint: Checkpoint) -> None:
    """Two of three steps run 8 rows each: 16 positions after the length, though the window has 4 drafts."""
    room = replace(ROOM, topk=8, num_draft_tokens=5, page_size=4, pages=(1, 2, 3, 4), max_tokens=9)
    subject = engine(checkpoint, room=room)
    begin(subject, (3,), root=4)
    with pytest.raises(OutOfCapacity, match="KV pages are needed"):
        subject.draft(("a",))
    assert len(subject.pages()["a"]) == 1
    subject = engine(checkpoint, room=replace(room, pages=(1, 2, 3, 4, 5)))
    begin(subject, (3,), root=4)
    assert subject.draft(("a",)).drafts.shape == (1, 4) and len(subject.pages()["a"]) == 5


@pytest.mark.interpreted
@pytest.mark.slow
def test_kernels_grow_the_trees_of_the_plain_ops(checkpoint: Checkpoint) -> None:
    """The last bits differ, but no two scores are so close that a tree depends on them."""
    told = []
    for ops in ("plain", "triton"):
        subject = engine(checkpoint, ops, room=replace(ROOM, topk=2, num_draft_tokens=5))
        begin(subject, (3, 4, 9), root=5)
        begin(subject, (8,), root=2, name="b")
        drafted = subject.draft(("b", "a"))
        told.append((drafted.drafts.tolist(), drafted.own_parents.tolist()))
    assert told[0] == told[1]
