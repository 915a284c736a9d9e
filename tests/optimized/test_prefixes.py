"""Tracked prefixes: what is kept of chunks and accepted paths, by way of the host, and requests that go on from it.

Leaves out: the checks that look at them in a replay (`tests/harness/test_prefixes.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from instep_optimized import OptimizedEngine
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, OutOfCapacity
from support.inputs.checkpoints import TWO_LAYERS, write
from support.running.covering import WHOLE, few
from support.worlds.engine_and_reference import CAPACITY, both_sides, engine

pytestmark = pytest.mark.slow  # whole replays or commands

EVERY, STEPS = 4, 5
TRACKED = replace(CAPACITY, track_interval=EVERY)
CHAIN, TREE = tuple(range(STEPS)), (0, 0, 2, 2, 3)
PROMPT, PICKS, ROOT = (5, 9, 33, 2, 40, 17), (21, 22, 23, 24, 25), 12


def story(shape: tuple[int, ...], path: tuple[int, ...]) -> Iterator[e.Event]:
    """A chunk and two accepted paths are tracked; requests in other slots go on from them, and are tracked again."""
    yield e.Admit("a", PROMPT)
    yield e.Admit("b", (7, 8, 9))
    yield e.Forward((e.Row("b", "prefill", 3, root=3), e.Row("a", "prefill", 4, track="four")))
    yield e.Forward((e.Row("a", "prefill", 2, root=ROOT), e.Row("b", "decode", root=6)))
    for number in range(2):  # in the second round nodes before 8 are pending for strategies that run tokens again
        yield e.Draft(("a", "b"), (PICKS, PICKS), None if shape == CHAIN else (shape, shape))
        yield e.Forward((e.Row("b", "verify"), e.Row("a", "verify")))
        paths = (e.Path(path[:2], 1), e.Path(path, 2)) if number else (e.Path(path, 30), e.Path((), 31))
        yield e.Commit(("a", "b"), paths, ("twelve", "b at eight") if number else ("eight", "not reached"))
    said = (*PROMPT, ROOT, *(PICKS[node - 1] for node in path), 30, *(PICKS[node - 1] for node in path[:2]))
    yield e.Finish("a")
    names = ("four", "eight", "twelve", "b at eight")
    yield from (*map(e.Offload, names), *map(e.Fetch, names[2::-1]), e.Evict("b at eight"))  # next to a donor
    for name, under, count in (("c", "four", 4), ("d", "eight", 8)):
        yield e.Admit(name, (*said[:count], 63, 1, 2, 3))
        yield e.Load(name, under)
    last = e.Row("c", "prefill", 4, root=4, track="of a hit")
    yield e.Forward((e.Row("d", "prefill", 3), e.Row("b", "decode", root=5), last))
    yield e.Draft(("c",), (PICKS,), None if shape == CHAIN else (shape,))
    yield e.Forward((e.Row("c", "verify"), e.Row("d", "prefill", 1, root=9)))
    yield e.Commit(("c",), (e.Path(path, 1),), ("twelve of c",))
    yield from (e.Abort("b"), e.Evict("four"))
    yield e.Admit("e", (*said[:12], 60))
    yield e.Load("e", "twelve" if len(said) > 12 else "eight")
    yield e.Forward((e.Row("e", "prefill", 1, root=1), e.Row("c", "decode", root=3)))


def checked(
    checkpoint: Checkpoint, ops: str, shape: tuple[int, ...], *, nodes: int | None = None, **options: Any
) -> OptimizedEngine:
    room, watched = replace(TRACKED, num_draft_tokens=nodes), not options.get("graphs")
    both = both_sides(checkpoint, ops, room, num_steps=STEPS, watched=watched, **options)
    both.serve(story(shape, (1, 2, 3) if shape == CHAIN else (2, 3, 5)))
    assert both.tracked == [
        ("forward", 4), ("commit", 8), ("commit", 12), ("commit", 8), ("forward", 8), ("commit", 12)]
    return both.subject


@few(2)
@pytest.mark.parametrize(("strategy", "conv", "nodes", "shape"), [
    *((strategy, conv, None, CHAIN) for strategy, conv in zip(STRATEGIES, [*CONV_FORMS] * 2, strict=True)),
    *(pytest.param(strategy, "windows", nodes, shape, marks=WHOLE if strategy == "columns" else ())  # trees: the others
      for strategy, nodes, shape in zip(STRATEGIES, (6, 6, 8, 8), (TREE, TREE, TREE, CHAIN), strict=True))])
def test_labels_of_prefixes_and_of_requests_that_load_them_are_right(
    checkpoint: Checkpoint, strategy: str, conv: str, nodes: int | None, shape: tuple[int, ...]
) -> None:
    checked(checkpoint, "ledger", shape, nodes=nodes, strategy=strategy, conv=conv)


@few(2)
@pytest.mark.parametrize(("ops", "options"), [
    ("ledger", {"strategy": "columns", "conv": "widened"}), ("plain", {"overlap": True}),
    ("plain", {"strategy": "snapshot", "graphs": True})])  # fmt: skip
def test_every_mtp_layer_of_a_prefix_is_right(
    tmp_path_factory: pytest.TempPathFactory, ops: str, options: dict[str, Any]
) -> None:
    """A path of 4 tokens, a chunk of 2: the last rows of 5 layers were made in several events."""
    folder = tmp_path_factory.mktemp("layers")
    layers = Checkpoint.open(write(folder, "dense", **TWO_LAYERS, mtp_num_hidden_layers=STEPS))
    kept = checked(layers, ops, CHAIN, drafter="vanilla", **options).prefix("eight")
    assert [len(rows) for rows in kept.draft_keys.values()] == [7, 6, 5, 4, 3]
    assert [len(rows) for rows in kept.tail.values()] == [STEPS - 1]


def inside() -> Iterator[e.Event]:
    """Prefixes inside the chunks of two requests of one forward, next to a window; others go on from them."""
    prompt = tuple(range(30, 48))
    yield from (e.Admit("w", (1, 2)), e.Forward((e.Row("w", "prefill", 2, root=3),)), e.Draft(("w",), (PICKS,)))
    yield from (e.Admit("a", prompt), e.Admit("b", PROMPT))
    yield e.Forward((e.Row("b", "prefill", 5, inner=("b at four",)), e.Row("w", "verify"),
                     e.Row("a", "prefill", 14, inner=("a at four", "", "a at twelve"))))
    yield e.Commit(("w",), (e.Path((1, 2), 9),), ("w at four",))
    yield e.Forward((e.Row("a", "prefill", 4, root=4, inner=("a at sixteen",)), e.Row("w", "decode", root=5)))
    for name, under, count in (("c", "a at twelve", 12), ("d", "b at four", 4)):
        yield e.Abort("w" if name == "c" else "a")
        yield e.Admit(name, (*(prompt if name == "c" else PROMPT)[:count], 60, 61, 62, 63, 59, 58))
        yield e.Load(name, under)
    yield from (e.Abort("b"), e.Offload("a at sixteen"), e.Fetch("a at sixteen"))
    yield e.Forward((e.Row("d", "prefill", 6, root=2, track="", inner=("d at eight",)), e.Row("c", "prefill", 3)))
    yield e.Forward((e.Row("c", "prefill", 3, root=7, inner=("c at sixteen",)), e.Row("d", "decode", root=8)))
    yield from (e.Admit("e", (*prompt[:16], 5)), e.Load("e", "a at sixteen"))
    yield e.Forward((e.Row("e", "prefill", 1, root=1), e.Row("c", "decode", root=3)))


INSIDE = [("commit", 4), *(("forward", count) for count in (4, 4, 8, 12, 16, 16))]


@few(2)
@pytest.mark.parametrize(("ops", "options"), [
    ("ledger", {}), ("ledger", {"strategy": "columns", "conv": "widened", "overlap": True}),
    ("plain", {"strategy": "snapshot", "graphs": True}), ("plain", {"strategy": "lazy_rerun"}),
])  # fmt: skip
def test_prefixes_inside_chunks_are_right(checkpoint: Checkpoint, ops: str, options: dict[str, Any]) -> None:
    both = both_sides(checkpoint, ops, TRACKED, num_steps=STEPS, watched=not options.get("graphs"), **options)
    both.serve(inside())
    assert sorted(both.tracked) == INSIDE


@few(2)
@pytest.mark.parametrize("ops", ["ledger", "plain"])
def test_a_prefix_inside_a_chunk_has_the_rows_of_every_mtp_layer(
    tmp_path_factory: pytest.TempPathFactory, ops: str
) -> None:
    """5 layers, multiples of 4: some of the last rows are in the chunk before, which the ring holds no longer."""
    folder = tmp_path_factory.mktemp("layers")
    layers = Checkpoint.open(write(folder, "dense", **TWO_LAYERS, mtp_num_hidden_layers=STEPS))
    both = both_sides(layers, ops, TRACKED, num_steps=STEPS, drafter="vanilla")
    both.serve(inside())
    kept = both.subject.prefix("a at sixteen")
    assert [len(rows) for rows in kept.draft_keys.values()] == [15, 14, 13, 12, 11]
    assert [len(rows) for rows in kept.tail.values()] == [STEPS - 1]


@pytest.mark.parametrize(("options", "shape"), [
    ({"strategy": "lazy_rerun"}, TREE), ({"strategy": "columns", "conv": "widened", "overlap": True}, CHAIN),
    ({"strategy": "snapshot", "graphs": True}, CHAIN)])  # fmt: skip
def test_numbers_are_right_too_while_rounds_overlap_and_in_graphs(
    checkpoint: Checkpoint, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    checked(checkpoint, "plain", shape, nodes=None if shape == CHAIN else STEPS + 1, **options)


@pytest.mark.parametrize(("event", "says"), [
    (e.Load("c", "four"), "a longer prompt that begins with this prefix"),
    (e.Load("d", "four"), "a longer prompt that begins with this prefix"),
    (e.Forward((e.Row("a", "prefill", 1, track="k"),)), "up to a multiple of track_interval = 4"),
    (e.Forward((e.Row("d", "prefill", 4, root=1, track="four"),)), "a name under which nothing is kept"),
    (e.Forward((e.Row("d", "prefill", 4, root=1, inner=("k",)),)), "0, one for each multiple of track_interval = 4"),
    (e.Forward((e.Row("c", "prefill", 5, root=1, inner=("four",)),)), "a name under which nothing is kept"),
    (e.Forward((e.Row("c", "prefill", 5, root=1, track="", inner=("k", "l")),)), "2 names; expected 1"),
    (e.Commit((), None, ("k",)), "1 names; expected 0"),
    (e.Offload("k"), "nothing of that name; expected one of four"),
    (e.Offload("away"), "what is on the host; expected one of four"),
    (e.Fetch("four"), "nothing of that name on the host; expected one of away"),
    (e.Load("c", "away"), "load of 'away': found what is on the host"),
    (e.Evict("k"), "nothing of that name"),
    (e.Forward((e.Row("c", "prefill", 4, track="away"),)), "a name under which nothing is kept"),
])  # fmt: skip
def test_illegal_prefix_events_are_refused(checkpoint: Checkpoint, event: e.Event, says: str) -> None:
    subject = engine(checkpoint, "ledger", TRACKED, num_steps=STEPS)
    others = e.Admit("c", (*PROMPT[:3], 1, 2)), e.Admit("d", PROMPT[:4])
    track = e.Forward((e.Row("a", "prefill", 4, track="four"),))
    for before in (e.Admit("a", PROMPT), track, *others, e.Save("a", "away"), e.Offload("away")):
        before.on(subject)
    with pytest.raises(BadInput) as refused:
        event.on(subject)
    assert says.replace("; ", ", ") in str(refused.value)


def test_a_prefix_for_which_the_device_has_no_room_changes_nothing(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint, "ledger", replace(TRACKED, tracked=1), num_steps=STEPS)
    for name in "ab":
        subject.admit(name, PROMPT)
    rows = [e.Row(name, "prefill", 4, track=name) for name in "ab"]
    with pytest.raises(OutOfCapacity, match="there is room for 1"):
        subject.forward(tuple(rows))
    assert subject.state("a").length == 0 and not subject.copies()
    for event in (e.Forward((rows[0],)), e.Offload("a"), e.Forward((rows[1],))):
        event.on(subject)
    with pytest.raises(OutOfCapacity):
        subject.fetch("a")
    assert set(subject.copies()) == {("offload", "a"), ("save", "b")}
    for event in (e.Offload("b"), e.Evict("b"), e.Fetch("a")):
        event.on(subject)
    assert subject.prefix("a").length == 4 and set(subject.copies()) == {("save", "a")}


def in_a_round(subject: OptimizedEngine, paths: dict[str, int], track: dict[str, str]) -> None:
    """One round of these requests; paths: how many drafts each accepts."""
    names = tuple(paths)
    subject.draft(names, tuple(PICKS for _ in names))
    subject.forward(tuple(e.Row(name, "verify") for name in names))
    subject.commit(names, tuple(e.Path(CHAIN[1 : count + 1], 1) for count in paths.values()),
                   tuple(track.get(name, "") for name in names))  # fmt: skip


def test_a_second_track_slot_is_taken_only_if_a_multiple_is_in_reach(checkpoint: Checkpoint) -> None:
    """Windows of 6 tokens, multiples of 8: at 9 tokens the next one is out of reach, at 7 and 6 it is in reach."""
    room = replace(TRACKED, track_interval=8, tracked=2)
    subject = engine(checkpoint, "ledger", room, num_steps=STEPS)
    for name, count in (("a", 9), ("b", 6), ("c", 7)):
        subject.admit(name, tuple(range(count)))
        subject.forward((e.Row(name, "prefill", count, root=1),))
    in_a_round(subject, {"a": 0, "b": 0, "c": 2}, {"a": "no reach", "b": "not reached", "c": "reached"})
    assert subject.track_slots() == {"reached": 2}, "b's window took slot 1, and a's took none"
    in_a_round(subject, {"b": 2, "c": 0}, {"b": "b at eight", "c": "reached"})
    assert subject.track_slots() == {"reached": 2, "b at eight": 1}
    assert subject.prefix("reached").length == 8
    for name, says in (("b at eight", "a name under which nothing is kept"), ("more", "there is room for 2")):
        with pytest.raises((BadInput, OutOfCapacity), match=says):
            in_a_round(subject, {"c": 3}, {"c": name})
        subject.abort("c")
        subject.admit("c", tuple(range(7)))
        subject.forward((e.Row("c", "prefill", 7, root=1),))
    in_a_round(subject, {"c": 1}, {"c": "reached"})
    assert subject.prefix("reached").length == 8 and subject.track_slots() == {"reached": 2, "b at eight": 1}
    subject.offload("reached")
    in_a_round(subject, {"c": 5}, {"c": "c at sixteen"})
    assert subject.track_slots() == {"b at eight": 1}, "15 tokens reach no multiple"
    subject.evict("b at eight")
    subject.fetch("reached")
    assert subject.track_slots() == {"reached": 1}


@pytest.mark.parametrize(("ops", "options"), [("ledger", {"overlap": True}), ("plain", {"strategy": "snapshot"})])
def test_a_prefix_replaced_in_place_is_right(checkpoint: Checkpoint, ops: str, options: dict[str, Any]) -> None:
    def events() -> Iterator[e.Event]:
        yield e.Admit("a", PROMPT)
        yield e.Forward((e.Row("a", "prefill", 6, root=1, inner=("mine",)),))
        for count in (0, 3, 1):  # 7 tokens: not reached; 11: at 8; 13: at 12
            yield e.Draft(("a",), (PICKS,))
            yield e.Forward((e.Row("a", "verify"),))
            yield e.Commit(("a",), (e.Path(CHAIN[1 : count + 1], 1),), ("mine",))
        yield e.Finish("a")
        yield e.Admit("b", (*PROMPT, 1, 1, PICKS[0], PICKS[1], PICKS[2], 1, 7))
        yield e.Load("b", "mine")
        yield e.Forward((e.Row("b", "prefill", 1, root=2),))

    both = both_sides(checkpoint, ops, replace(TRACKED, tracked=1), num_steps=STEPS, **options).serve(events())
    assert both.tracked == [("forward", 4), ("commit", 8), ("commit", 12)]


def test_prefixes_inside_a_chunk_without_room_change_nothing(checkpoint: Checkpoint) -> None:
    subject = engine(checkpoint, "ledger", replace(TRACKED, tracked=1), num_steps=STEPS)
    subject.admit("a", (*PROMPT, *PROMPT))
    with pytest.raises(OutOfCapacity, match="there is room for 1"):
        subject.forward((e.Row("a", "prefill", 12, root=1, inner=("four", "eight"), track="twelve"),))
    assert subject.state("a").length == 0 and not subject.copies()
    subject.forward((e.Row("a", "prefill", 11, inner=("", "eight")),))
    assert subject.prefix("eight").length == 8


def test_interval_of_zero_is_refused_before_allocation(checkpoint: Checkpoint) -> None:
    with pytest.raises(BadInput, match="track_interval"):
        engine(checkpoint, "ledger", replace(CAPACITY, track_interval=0), num_steps=STEPS)
