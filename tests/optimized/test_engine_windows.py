"""Windows of a round that differ: capped commits, widths of their own, and trees that the drafter grows.

Each story runs on both sides, and in all forms of the engine. Leaves out: trees next to chains
(`test_engine_trees.py`), the op that accepts (`test_index_ops.py`), the definition of grown trees
(`tests/reference/test_growing.py`), and the rules that predict the pages (`test_event_rules.py`).
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
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, OutOfCapacity, Unsupported
from instep_reference.contract.place_names import unseen
from instep_reference.contract.sampling import Sampling
from support.inputs.rounds import begin
from support.inputs.tree_rounds import ahead, assert_same, played
from support.inputs.tree_windows import drawn, path
from support.running.covering import few
from support.worlds.engine_and_reference import CAPACITY, both_sides, engine, snapshot, untouched

STEPS = 3
TRIMMED = replace(CAPACITY, page_size=2, trim=True)
TREES = replace(TRIMMED, num_draft_tokens=6)
GROWN = replace(CAPACITY, num_draft_tokens=8, topk=3)
Serve = Callable[[e.Event], e.Answer | None]


def capped(serve: Serve, seed: int, *, trees: bool = False) -> Iterator[e.Event]:
    """Rounds of three requests with and without caps; the paths of the last one are the engine's own."""
    draw, cut = Random(seed), 0

    def served(event: e.Event) -> e.Event:
        serve(event)
        return event

    def round_of(*names: str, caps: bool = True, free: bool = False) -> Iterator[e.Event]:
        nonlocal cut
        shapes = [drawn(draw, draw.randint(1, 6), STEPS) if trees else tuple(range(-1, draw.randint(0, STEPS)))
                  for _ in names]  # fmt: skip
        picks = tuple(tuple(draw.randrange(64) for _ in shape[1:]) for shape in shapes)
        yield served(e.Draft(names, picks, tuple(shape[1:] for shape in shapes)))
        yield served(e.Forward(tuple(e.Row(name, "verify") for name in names[::-1])))
        paths = tuple(e.Path(tuple(path(shape, len(shape) - 1)[1:]), draw.randrange(64)) for shape in shapes)
        most = tuple(draw.randint(0, len(shape) - 1) for shape in shapes) if caps else ()
        cut += sum(len(one.nodes) > cap for one, cap in zip(paths, most, strict=False) if not free)
        yield served(e.Commit(names, None if free else paths, (), most))

    for number, name in enumerate("abc"):
        yield served(e.Admit(name, tuple(range(3, 6 + 2 * number))))
    yield served(e.Forward(tuple(e.Row(name, "prefill", 3 + 2 * n, 7 + n) for n, name in enumerate("abc"))))
    for caps in (True, True, False, True):
        yield from round_of(*draw.sample("abc", 3), caps=caps)
    yield served(e.Preempt("b"))
    yield from round_of("c", "a")
    yield served(e.Resume("b"))
    yield from round_of("b", "a", "c")
    yield served(e.Finish("c"))
    yield from round_of("b", "a", free=True)
    assert cut >= 3, "caps end paths"


def ragged(serve: Serve, seed: int) -> Iterator[e.Event]:
    """Rounds with own widths, by given drafts and by the head's, next to a prompt, decodes and equal windows."""
    draw = Random(seed)

    def served(event: e.Event) -> e.Event:
        serve(event)
        return event

    def round_of(
        *names: str, beside: tuple[e.Row, ...] = (), widths: tuple[int, ...] | None = None
    ) -> Iterator[e.Event]:
        counts = [draw.randint(0, STEPS) for _ in names] if widths is None else list(widths)
        shapes = tuple(tuple(range(count)) for count in counts)
        given = draw.random() < 0.5
        picks = tuple(tuple(draw.randrange(64) for _ in shape) for shape in shapes) if given else None
        yield served(e.Draft(names, picks, shapes))
        order = tuple(draw.sample(names, len(names)))
        yield served(e.Forward((*beside, *(e.Row(name, "verify") for name in order))))
        kept = {name: draw.randint(0, count) for name, count in zip(names, counts, strict=True)}
        yield served(e.Commit(order, tuple(
            e.Path(tuple(range(1, kept[name] + 1)), draw.randrange(64)) for name in order)))  # fmt: skip

    yield served(e.Admit("a", tuple(range(3, 14))))
    yield served(e.Admit("b", (5, 9)))
    yield served(e.Forward((e.Row("a", "prefill", 11, 7), e.Row("b", "prefill", 2, 8))))
    yield served(e.Admit("c", (1, 2, 3, 4, 5)))
    yield from round_of("a", "b", beside=(e.Row("c", "prefill", 2),), widths=(1, 3))
    yield from round_of("b", "a", widths=(0, 2))
    yield from round_of("a", "b", widths=(0, 0))
    yield served(e.Forward((e.Row("c", "prefill", 3, 4), e.Row("a", "decode", root=2))))
    for _ in range(3):
        yield from round_of("c", "b", "a")
    yield served(e.Preempt("a"))
    yield from round_of("c", "b", widths=(3, 3))
    yield served(e.Resume("a"))
    yield from round_of("a", "c", "b", widths=(2, 1, 3))
    yield from round_of("a", "c", widths=(0, 1), beside=(e.Row("b", "decode", root=6),))
    yield from round_of("b", "a")


def grown(serve: Serve, seed: int) -> Iterator[e.Event]:
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
        some = names[: draw.randint(0, len(names))]
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


STORIES: dict[str, tuple[Callable[[Serve, int], Iterator[e.Event]], e.Capacity]] = {
    "capped": (capped, TRIMMED), "ragged": (ragged, CAPACITY),
    "capped trees": (partial(capped, trees=True), TREES), "grown": (grown, GROWN),
    "ragged in a room of trees": (ragged, replace(CAPACITY, num_draft_tokens=6)),
}


@few(4)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "graphs"), [
    ("snapshot", False), ("columns", True), ("rerun", False), ("lazy_rerun", True)])
@pytest.mark.parametrize("story", STORIES)
def test_every_label_matches_the_ledger(checkpoint: Checkpoint, story: str, strategy: str, graphs: bool) -> None:
    rounds, room = STORIES[story]
    conv = "widened" if graphs and story in ("capped", "ragged") else "windows"  # no line of inputs has siblings
    both = both_sides(checkpoint, "ledger", room, strategy=strategy, graphs=graphs, overlap=graphs, conv=conv)
    assert [*rounds(both, 1)] and both.compared > 10_000


@few(3)
@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("story", STORIES)
def test_every_number_matches_the_reference(checkpoint: Checkpoint, story: str, graphs: bool) -> None:
    rounds, room = STORIES[story]
    both = both_sides(checkpoint, "plain", room, graphs=graphs)
    assert [*rounds(both, 2)] and both.compared > 10_000


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("story", STORIES)
def test_graphs_overlap_and_strategies_change_no_bit(checkpoint: Checkpoint, story: str) -> None:
    rounds, room = STORIES[story]
    found = list[str]()
    first = engine(checkpoint, around(load("plain"), unseen, contracts(found.append)), room)
    events = [*rounds(lambda event: event.on(first), 3)]
    settings: tuple[dict[str, Any], ...] = ({"strategy": "snapshot"}, {"graphs": True, "overlap": True}, {
        "strategy": "lazy_rerun", "conv": "widened" if story in ("capped", "ragged") else "windows"})
    told = [played(engine(checkpoint, room=room, **options), events) for options in settings]
    assert found == []
    assert_same(told[0], told[1])
    assert_same(told[0], told[2])


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("trees", [False, True])
def test_graphs_change_no_bit_of_capped_commits_on_a_gpu(checkpoint: Checkpoint, trees: bool) -> None:
    """A graph that kept the caps of its capture would stop at them in the next round."""
    room: dict[str, Any] = {"ops": "triton", "room": TREES if trees else TRIMMED, "device": "cuda"}
    first = engine(checkpoint, **room)
    events = [*capped(lambda event: event.on(first), 3, trees=trees)]
    one, other = (played(engine(checkpoint, **room, **options), events)
                  for options in ({}, {"graphs": True, "overlap": True}))  # fmt: skip
    assert_same([x.cpu() for x in one], [x.cpu() for x in other])


# ---- caps


@pytest.mark.parametrize(("caps", "match"), [
    ((4,), "cap of 'a'"), ((-1,), "cap of 'a'"), ((1, 1), "2 numbers, expected 1, one per request"),
])  # fmt: skip
def test_a_cap_that_no_window_has_is_refused(checkpoint: Checkpoint, caps: tuple[int, ...], match: str) -> None:
    subject = engine(checkpoint)
    begin(subject, (3, 4), root=5)
    subject.draft(("a",), ((1, 2, 3),))
    subject.forward((e.Row("a", "verify"),))
    before = snapshot(subject)
    with pytest.raises(BadInput, match=match):
        subject.commit(("a",), None, (), caps)
    assert untouched(subject, before, {}) > 0


@pytest.mark.parametrize("sampling", [None, Sampling(0.7)], ids=["greedy", "sampled"])
def test_the_bonus_after_a_cap_is_the_draft_that_would_follow(
    checkpoint: Checkpoint, sampling: Sampling | None
) -> None:
    both = both_sides(checkpoint, "plain", TRIMMED)
    uniforms = () if sampling is None else (0.0,) * 5  # a uniform of 0 takes every draft
    both(e.Admit("a", (3, 1, 4), sampling))
    both(e.Forward((e.Row("a", "prefill", 3, uniforms=uniforms[:1]),)))
    picks = tuple(ahead(both.truth, "a", 3)) if sampling is None else (9, 8, 7)
    both(e.Draft(("a",), (picks,)))
    both(e.Forward((e.Row("a", "verify", uniforms=uniforms),)))
    assert len(both.subject.pages()["a"]) == 4  # of the whole window: positions 0 to 6
    told: Any = both(e.Commit(("a",), None, (), (1,)))
    assert told.num_correct_drafts.tolist() == told.own_num_correct_drafts.tolist() == [1]
    assert told.bonus.tolist() == told.own_bonus.tolist() == [picks[1]]
    assert both.subject.state("a").length == 5 and len(both.subject.pages()["a"]) == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_commit_gives_back_what_no_length_needs(checkpoint: Checkpoint, overlap: bool) -> None:
    """If rounds overlap, the host knows the length at the commit after it."""
    subject, counts = engine(checkpoint, room=TRIMMED, overlap=overlap), []
    begin(subject, (3, 4), root=5)
    for _ in range(2):
        subject.draft(("a",), ((1, 2, 3),))
        subject.forward((e.Row("a", "verify"),))
        counts.append(len(subject.pages()["a"]))
        subject.commit(("a",), (e.Path((1, 2, 3), 6),), (), (0,))
        counts.append(len(subject.pages()["a"]))
    # Lengths 2, 3, 4. Overlapped, the second draft assumes length 6, and the second commit length 3 + 4.
    assert counts == ([3, 3, 5, 4] if overlap else [3, 2, 4, 2])


def test_caps_reach_the_controller(checkpoint: Checkpoint) -> None:
    """With all drafts accepted the average rises above 3 steps; capped at 0 it falls to 1."""
    wishes = []
    for caps in ((), (0,)):
        file = AdaptiveFile.of({"candidate_steps": [1, 3, 5], "warmup_batches": 0, "update_interval": 1,
                                "ema_alpha": 1.0}, field="file")  # fmt: skip
        both = both_sides(checkpoint, "plain", replace(CAPACITY, trim=True), adaptive=file)
        both(e.Admit("a", (3, 1, 4)))
        both(e.Forward((e.Row("a", "prefill", 3, 2),)))
        both(e.Draft(("a",), ((1, 2, 3),)))
        both(e.Forward((e.Row("a", "verify"),)))
        both(e.Commit(("a",), (e.Path((1, 2, 3), 6),), (), caps))
        wishes.append(both.subject.next_num_steps(1, 1))
    assert wishes == [5, 1]


# ---- own widths


def test_a_window_is_no_wider_than_the_step_count(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint)
    begin(subject, (3, 4), root=5)
    before = snapshot(subject)
    with pytest.raises(BadInput, match="a path of 4 drafts, expected at most num_steps = 3"):
        subject.draft(("a",), ((1,) * 4,), ((0, 1, 2, 3),))
    assert untouched(subject, before, {}) > 0


# ---- grown trees


@pytest.mark.parametrize(("topk", "nodes", "drafts"), [(1, 4, 3), (1, 8, 3), (2, 12, 10), (4, 5, 4), (3, 63, 21)])
def test_windows_have_as_many_nodes_as_candidates(checkpoint: Checkpoint, topk: int, nodes: int, drafts: int) -> None:
    """And with one child per node they are the head's own chains."""
    subject = engine(checkpoint, room=replace(GROWN, topk=topk, num_draft_tokens=nodes))
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
        engine(checkpoint, room=replace(GROWN, **room))


def test_pages_hold_the_rows_of_all_beams(checkpoint: Checkpoint) -> None:
    """Two of three steps run 8 rows each: 16 positions after the length, though the window has 4 drafts."""
    room = replace(GROWN, topk=8, num_draft_tokens=5, page_size=4, pages=(1, 2, 3, 4), max_tokens=9)
    subject = engine(checkpoint, room=room)
    begin(subject, (3,), root=4)
    with pytest.raises(OutOfCapacity, match="KV pages: "):
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
        subject = engine(checkpoint, ops, room=replace(GROWN, topk=2, num_draft_tokens=5))
        begin(subject, (3, 4, 9), root=5)
        begin(subject, (8,), root=2, name="b")
        drafted = subject.draft(("b", "a"))
        told.append((drafted.drafts.tolist(), drafted.own_parents.tolist()))
    assert told[0] == told[1]
