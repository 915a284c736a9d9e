"""Commits with caps, and commits that give pages back, on both sides and in all forms of the engine.

Leaves out: the op that accepts (`test_index_ops.py`), and the rules that predict the pages (`test_event_rules.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput
from instep_reference.contract.sampling import Sampling
from support.inputs.rounds import begin
from support.inputs.tree_rounds import ahead, assert_same, played
from support.inputs.tree_windows import drawn, path
from support.running.covering import WHOLE, few
from support.worlds.engine_and_reference import CAPACITY, both_sides, engine, snapshot, untouched

STEPS = 3
TRIMMED = replace(CAPACITY, page_size=2, trim=True)
TREES = replace(TRIMMED, num_draft_tokens=6)


def rounds(
    serve: Callable[[e.Event], e.Answer | None], seed: int, *, trees: bool = False, forced: bool = True
) -> Iterator[e.Event]:
    """Rounds of three requests with and without caps; the paths of the last one are the engine's own."""
    draw = Random(seed)

    def served(event: e.Event) -> e.Event:
        serve(event)
        return event

    def round_of(*names: str, capped: bool = True, free: bool = not forced) -> Iterator[e.Event]:
        shapes = [drawn(draw, draw.randint(1, 6), STEPS) if trees else tuple(range(-1, draw.randint(0, STEPS)))
                  for _ in names]  # fmt: skip
        picks = tuple(tuple(draw.randrange(64) for _ in shape[1:]) for shape in shapes)
        yield served(e.Draft(names, picks, tuple(shape[1:] for shape in shapes)))
        yield served(e.Forward(tuple(e.Row(name, "verify") for name in names[::-1])))
        paths = tuple(e.Path(tuple(path(shape, len(shape) - 1)[1:]), draw.randrange(64)) for shape in shapes)
        caps = tuple(draw.randint(0, len(shape) - 1) for shape in shapes) if capped else ()
        yield served(e.Commit(names, None if free else paths, (), caps))

    for number, name in enumerate("abc"):
        yield served(e.Admit(name, tuple(range(3, 6 + 2 * number))))
    yield served(e.Forward(tuple(e.Row(name, "prefill", 3 + 2 * n, 7 + n) for n, name in enumerate("abc"))))
    for capped in (True, True, False, True):
        yield from round_of(*draw.sample("abc", 3), capped=capped)
    yield served(e.Preempt("b"))
    yield from round_of("c", "a")
    yield served(e.Resume("b"))
    yield from round_of("b", "a", "c")
    yield served(e.Finish("c"))
    yield from round_of("b", "a", free=True)


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "graphs"), [
    ("snapshot", False), ("columns", True), ("rerun", False), pytest.param("lazy_rerun", True, marks=WHOLE),
])  # fmt: skip
def test_every_label_of_capped_commits_matches_the_ledger(
    checkpoint: Checkpoint, strategy: str, graphs: bool
) -> None:
    both = both_sides(checkpoint, "ledger", TRIMMED, strategy=strategy, graphs=graphs, overlap=graphs)
    assert [*rounds(both, 1)] and both.compared > 10_000


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("forced", [False, True])
def test_every_number_of_capped_commits_matches_the_reference(
    checkpoint: Checkpoint, trees: bool, forced: bool
) -> None:
    both = both_sides(checkpoint, "plain", TREES if trees else TRIMMED, graphs=forced)
    assert [*rounds(both, 2, trees=trees, forced=forced)] and both.compared > 10_000


@pytest.mark.slow
def test_graphs_overlap_and_strategies_change_no_bit_of_capped_commits(checkpoint: Checkpoint) -> None:
    first = engine(checkpoint, room=TRIMMED)
    events = [*rounds(lambda event: event.on(first), 3)]
    settings: tuple[dict[str, Any], ...] = ({"strategy": "snapshot"}, {"graphs": True, "overlap": True},
                                            {"strategy": "lazy_rerun", "conv": "widened"})  # fmt: skip
    told = [played(engine(checkpoint, room=TRIMMED, **options), events) for options in settings]
    assert_same(told[0], told[1])
    assert_same(told[0], told[2])


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


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("trees", [False, True])
def test_graphs_change_no_bit_of_capped_commits_on_a_gpu(checkpoint: Checkpoint, trees: bool) -> None:
    """A graph that kept the caps of its capture would stop at them in the next round."""
    room: dict[str, Any] = {"ops": "triton", "room": TREES if trees else TRIMMED, "device": "cuda"}
    first = engine(checkpoint, **room)
    events = [*rounds(lambda event: event.on(first), 3, trees=trees)]
    one, other = (played(engine(checkpoint, **room, **options), events)
                  for options in ({}, {"graphs": True, "overlap": True}))  # fmt: skip
    assert_same([x.cpu() for x in one], [x.cpu() for x in other])
