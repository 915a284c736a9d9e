"""Windows of one round with different widths: chains of 0 to `num_steps` drafts, per request.

Leaves out: trees next to chains (`test_engine_trees.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput
from support.inputs.rounds import begin
from support.inputs.tree_rounds import assert_same, played
from support.running.covering import WHOLE, few
from support.worlds.engine_and_reference import CAPACITY, both_sides, engine, snapshot, untouched

STEPS = 3


def rounds(serve: Callable[[e.Event], e.Answer | None], seed: int, *, head: bool = True) -> Iterator[e.Event]:
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
        given = not head or draw.random() < 0.5
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


@few(3)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "graphs"), [
    ("snapshot", False), ("columns", True), pytest.param("rerun", True, marks=WHOLE), ("lazy_rerun", False),
])  # fmt: skip
@pytest.mark.parametrize("conv", ["windows", "widened"])
def test_every_label_of_ragged_windows_matches_the_ledger(
    checkpoint: Checkpoint, strategy: str, graphs: bool, conv: str
) -> None:
    both = both_sides(checkpoint, "ledger", CAPACITY, strategy=strategy, graphs=graphs, overlap=not graphs, conv=conv)
    assert [*rounds(both, 1)] and both.compared > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("trees", [False, True])
def test_every_number_of_ragged_windows_matches_the_reference(
    checkpoint: Checkpoint, graphs: bool, trees: bool
) -> None:
    room = replace(CAPACITY, num_draft_tokens=6) if trees else CAPACITY
    both = both_sides(checkpoint, "plain", room, graphs=graphs)
    assert [*rounds(both, 2)] and both.compared > 10_000


@pytest.mark.slow
def test_graphs_overlap_and_strategies_change_no_bit_of_ragged_windows(checkpoint: Checkpoint) -> None:
    first = engine(checkpoint)
    events = [*rounds(lambda event: event.on(first), 3)]
    settings: tuple[dict[str, Any], ...] = ({"strategy": "snapshot"}, {"graphs": True, "overlap": True},
                                            {"strategy": "lazy_rerun", "conv": "widened"})  # fmt: skip
    told = [played(engine(checkpoint, **options), events) for options in settings]
    assert_same(told[0], told[1])
    assert_same(told[0], told[2])


def test_a_window_is_no_wider_than_the_step_count(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint)
    begin(subject, (3, 4), root=5)
    before = snapshot(subject)
    with pytest.raises(BadInput, match="a path of 4 drafts, expected at most num_steps = 3"):
        subject.draft(("a",), ((1,) * 4,), ((0, 1, 2, 3),))
    assert untouched(subject, before, {}) > 0
