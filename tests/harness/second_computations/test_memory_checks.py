"""Checks of memory that is sized, written, left, poisoned or kept: every sentence and count, on pools made by hand.

Leaves out: whole runs (`test_checks.py`, `test_memory.py`), and how memory is watched (`test_digests.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import capacity, unused_positions
from instep.checks.aliasing import Aliasing
from instep.checks.declared_writes import Bounds
from instep.checks.host_reads import HostReads
from instep.checks.kept_copies import Copies
from instep.checks.leaks import Leaks
from instep.checks.poison import Poison
from instep.checks.unserved_events import NOT_OFFERED, Played
from instep.checks.unused_positions import Tails
from instep.verdict import Comparison, Skipped
from instep.watch import event_log as log
from instep.watch.event_context import RowSpan
from instep.watch.memory_changes import Looked, Wider, pattern
from instep.watch.visible_places import Shown
from instep_reference.contract import engine as e
from instep_reference.contract.capacity import Capacity
from instep_reference.contract.place_names import Place
from instep_reference.contract.pool_meaning import Meaning, Positions

ROOM = log.Room(Capacity(slots=(2, 5, 1), pages=(3, 9, 4), page_size=4, max_tokens=40), widest=4, first=2)
KEYS, STATE = Place("trunk", 0, "keys"), Place("trunk", 0, "state")


def told(found: Iterable[Any]) -> list[Any]:
    """The reason of each thing that is not compared; of each that is, the problem and the number of elements."""
    every = [*found]
    assert all((one.problem is None) is (one.worst == 0) for one in every if isinstance(one, Comparison))
    return [one.reason if isinstance(one, Skipped) else (one.diagnosis, one.elements) for one in every]


def context(**given: Any) -> Any:
    """A context in which "a" has slot 2, pages 7, 3 and 8, and request row 4, "b" 5, 1, 2 and 1, "c" 1, 4, 6 and 3."""
    expected = {"slots_before": {"a": 2, "b": 5, "c": 1}, "slots_after": {"a": 2, "b": 5, "c": 1}, "num_steps": 4,
                "pages_before": {"a": (7, 3, 8), "b": (1, 2), "c": (4,)}, "topk": None, "flying": frozenset(),
                "pages_after": {"a": (7, 3, 8), "b": (1, 2), "c": (4, 6)}, "windows": {"a": (9, 8, 7)},
                "copies": frozenset(),
                "request_rows_before": {"a": 4, "b": 1, "c": 3}, "request_rows_after": {"a": 4, "b": 1, "c": 3},
                **given.pop("expected", {})}  # fmt: skip
    known = SimpleNamespace(**expected)
    known.pages_in_use = lambda name: max(known.pages_before.get(name, ()), known.pages_after[name], key=len)
    event = given.get("event", e.Idle())
    return SimpleNamespace(**{
        "index": 3, "kind": event.__struct_config__.tag, "event": event, "expected": known, "log": log.NOTHING,
        "regions": (), "ranks": None, "stages": None, "shown": Shown(),
        "subject": SimpleNamespace(after={}, places={}), "subject_slots": {}, "subject_pages": {}, **given,
    })  # fmt: skip


def pool(shape: Sequence[int], by: str = "slot", means: Meaning | None = None, **more: Any) -> e.Region:
    return e.Region("pool", 0, by, torch.zeros(*shape), means=means, **more)  # type: ignore[arg-type]


# -- capacity -----------------------------------------------------------------------------------------------


def sized(region: e.Region, windows: Sequence[int] = (2, 3), blocks: Any = (), **of_log: Any) -> list[Any]:
    given = log.EventLog(**{"room": ROOM, **of_log})
    return told(capacity.judged([region, replace(region, red=True)], given, 3, "forward", windows, blocks))


@pytest.mark.parametrize(("by", "due", "why"), [
    ("slot", 6, "units; 6 are needed, one per slot that the trace assigns and slot 0"),
    ("page", 10, "units; 10 are needed, one per page that the trace assigns and page 0"),
    ("request", 4, "request rows; 4 are needed, one per slot and row 0"),
    ("row", 3, "rows; 3 are needed, one per request of the widest batch"),
])  # fmt: skip
def test_a_pool_needs_a_unit_for_each_number_of_the_trace(by: str, due: int, why: str) -> None:
    assert sized(pool((due, 2), by)) == [("", 1)]
    assert sized(pool((due - 1, 12), by)) == [(f"pool has {due - 1} {why}", 1)]


@pytest.mark.parametrize(("along", "due", "why"), [
    (Positions("token"), 4, "positions a page; 4 are needed"),
    (Positions("page", 2), 3, "pages a request; 3 are needed"),
    (Positions("entry", 1, 2), 8, "entries; 8 are needed for 2 of the widest windows"),
    (Positions("input", 2), 6, "inputs a line; 6 are needed for the widest window, of 4 tokens"),
    (Positions("column", 3), 4, "columns; 4 are needed for the widest window, of 4 tokens"),
    (Positions("node"), 4, "places; 4 are needed for the widest window, of 4 tokens"),
    (Positions("choice"), 4, "places; 4 are needed for the widest window, of 4 tokens"),
])  # fmt: skip
def test_a_unit_needs_a_position_for_each_of_its_meanings(along: Positions, due: int, why: str) -> None:
    shape = [6, 2, 2, 2]
    for has, says in ((due, ""), (due - 1, f"pool has {due - 1} {why}")):
        shape[along.axis] = has
        assert sized(pool(shape, means=Meaning("conv", positions=along))) == [(says, 2)]
    if along.what == "input":  # no request has a conv window yet
        assert sized(pool((6, 1, 1), means=Meaning("conv", positions=along)), windows=()) == [("", 1)]


def test_states_lie_in_the_declared_order() -> None:
    """Blocks of 2 heads of 3 x 5. In slots they are declared as KV, and as VK in batch rows and request rows."""
    room, blocks = replace(ROOM, layouts=("KV", "VK")), {(2, 3, 5), (2, 1, 5), (1, 3, 5)}
    flat, turned = torch.zeros(6, 2, 3, 5), torch.zeros(6, 2, 5, 3).transpose(2, 3)
    state = Meaning("state")
    for units, by, means, counted, says in (
        (flat, "slot", None, 2, ""), (flat, "slot", state, 2, ""), (turned, "row", state, 2, ""),
        (turned, "request", state, 2, ""),
        (turned, "slot", state, 2, "pool has 0 blocks in the order KV; 6 are needed, the declared layout"),
        (turned, "slot", None, 2, "pool has 0 blocks in the order KV; 6 are needed, the declared layout"),
        (flat, "row", state, 2, "pool has 0 blocks in the order VK; 6 are needed, the declared layout"),
        (turned, "slot", Meaning("conv"), 1, ""), (turned, "slot", Meaning("state", keeps="k"), 1, ""),
        (torch.zeros(6, 2, 5, 1).transpose(2, 3), "slot", state, 1, ""),  # one key channel has no order
        (torch.zeros(6, 9, 2, 5, 3).transpose(3, 4), "slot", state, 2,
         "pool has 0 blocks in the order KV; 6 are needed, the declared layout"),
        (torch.zeros(6, 2, 5, 4).transpose(2, 3), "slot", state, 1, ""),
        (torch.zeros(6, 1, 5, 3).transpose(2, 3), "slot", state, 2,
         "pool has 0 blocks in the order KV; 6 are needed, the declared layout"),
    ):  # fmt: skip
        region = replace(pool((1,), by, means), units=units)
        assert sized(region, blocks=blocks, room=room) == [(says, counted)], (by, means, units.shape)
        assert sized(region, blocks=blocks) == [("", 1)]  # the engine decides the layout itself
    one = replace(pool((1,)), units=torch.zeros(1, 2, 5, 3).transpose(2, 3))
    few = replace(room, capacity=replace(ROOM.capacity, slots=(0,)))
    assert sized(one, blocks=blocks, room=few) == [
        ("pool has 0 blocks in the order KV; 1 is needed, the declared layout", 2)]


@pytest.mark.parametrize(("count", "gap", "pitch", "offset", "problems"), [
    (6, 16, 80, 0, []), (6, 0, 64, 0, ["red-zone elements"]), (6, 3, 67, 0, ["aligned pitches"]),
    (6, 16, 80, 1, ["aligned pitches"]), (6, 32, 80, 0, ["elements from unit to unit"]),
    (2, 32, 80, 0, ["elements from unit to unit"]), (1, 16, 7, 0, []),
    (1, None, 7, 0, ["red-zone elements"]), (1, 15, 7, 0, ["aligned pitches"]),
])  # fmt: skip
def test_red_zones_are_between_units_and_keep_the_alignment(
    count: int, gap: int | None, pitch: int, offset: int, problems: list[str]
) -> None:
    """Units of 64 elements. The stride of a single unit means nothing."""
    memory = torch.zeros(count * max(pitch, 64) + 32)
    units = memory[-memory.data_ptr() // 4 % 16 + offset :].as_strided((count, 8, 8), (pitch, 8, 1))
    region = replace(pool((1,)), units=units, gaps=None if gap is None else torch.zeros(count, gap))
    room = replace(ROOM, capacity=replace(ROOM.capacity, slots=(count - 1,)))
    says = {"red-zone elements": "pool has 0 red-zone elements; 1 is needed after each unit",
            "elements from unit to unit": "pool has 80 elements from unit to unit; 96 are needed",
            "aligned pitches": "pool has 0 aligned pitches; 1 is needed: a multiple of 16 elements, from a base of 16 "
                               "bytes"}  # fmt: skip
    assert sized(region, guarded=True, room=room) == [("; ".join(says[name] for name in problems), 4)]


def test_a_budget_of_the_first_step_count_is_recognised() -> None:
    """2 layers of 6 units with 4 or 12 positions of 32 bytes; the first step count needs 2 positions fewer a window."""
    why = ": a budget for windows of 2 tokens, as the first step count has; the widest has 4"
    for has, windows, found, says in (
        (4, 1, 2, why), (5, 1, 3, why), (12, 3, 6, why), (12, 1, 6, why), (12, 3, 5, ""), (5, 1, 2, ""), (4, 1, 3, ""),
        (4, None, 2, ""),
    ):  # fmt: skip
        along = None if windows is None else Positions("entry", 1, windows)
        regions = [pool((6, has, 8), means=Meaning("conv", positions=along)), replace(pool((6, has, 8)), layer=1)]
        takes = 2 * 6 * has * 32
        for more in (0, 1):
            budget = {"pool": 2 * 6 * found * 32 + more, "none": 0}
            sentence = (f"the memory budget has {budget['pool']} bytes for the pool pool, which takes {takes}"
                        f"{says if not more else ''}")  # fmt: skip
            (one,) = capacity.budgeted(regions, budget, ROOM, 3, "forward")
            assert told([one]) == [(sentence, 1)] and one.place.component == "conv"
    same = replace(ROOM, first=4)
    assert told(capacity.budgeted(regions[:1], {"pool": 6 * 4 * 32}, same, 3, "forward")) == [("", 1)]
    assert told(capacity.budgeted([pool((6, 4, 8), means=Meaning("conv", positions=Positions("node")))], {}, same, 3,
                                  "forward")) == [
        ("the memory budget has 0 bytes for the pool pool, which takes 768", 1)]
    region = replace(regions[0], units=torch.zeros(3, 2))
    red = replace(region, name="red", red=True)
    budget = {"pool": 24, "red": 8, "b": 7, "c": 0}
    regions = [replace(region, means=Meaning("state")), red]
    (good, more) = capacity.budgeted(regions, budget, ROOM, 3, "forward")
    assert good.agrees and (more.worst, more.elements, more.place) == (1.0, 1, STATE)
    assert more.diagnosis == "the memory budget has bytes for b, red; the engine shows no such region"


def test_capacity_is_compared_whenever_pools_or_windows_change() -> None:
    """States of 4 heads on 2 ranks. The first window of a pool gives the length of a line."""
    region = pool((6, 5), means=Meaning("conv", positions=Positions("input")))
    check, unbudgeted = capacity.Capacity(), "this engine shows no memory budget"
    packed = "pools are packed, so there are no red zones to check"
    none = context(log=log.EventLog(room=ROOM), regions=(pool((0, 5)),))
    assert told(check(none)) == ["this engine shows no memory"] and told(check(none)) == []
    assert told(capacity.Capacity()(context(regions=(region,)))) == ["this engine shows no memory"]
    given = context(log=log.EventLog(room=ROOM), regions=(region,))
    assert told(check(given)) == [("", 1), unbudgeted, packed]
    assert told(check(given)) == [] and told(check(none)) == []
    state = SimpleNamespace(conv={0: torch.zeros(7, 3)}, state={0: torch.zeros(4, 3, 7)})
    given.subject = SimpleNamespace(after={"a": state}, places={})
    short = "pool has 5 inputs a line; 6 are needed for the widest window, of 4 tokens"
    assert told(check(given)) == [(short, 2), unbudgeted, packed]
    wrong = "pool has 0 blocks in the order KV; 6 are needed, the declared layout"
    for ranks, heads in ((SimpleNamespace(size=2), 2), (None, 4)):
        turned = replace(region, units=torch.zeros(6, heads, 7, 3).transpose(2, 3), means=None)
        given.regions, given.ranks = (turned,), ranks
        given.log = log.EventLog(room=replace(ROOM, layouts=("KV", "KV")), guarded=True,
                                 budget={"pool": turned.units.nbytes})  # fmt: skip
        first, budget = told(check(given))
        assert first[0].startswith(f"{wrong}; pool has 0 red-zone") and first[1] == 5 and budget == ("", 1)


# -- positions -----------------------------------------------------------------------------------------------


def span(request: str, kind: Any, count: int, start: int, logits: int = 1, nodes: tuple[int, ...] = ()) -> RowSpan:
    return RowSpan(request, kind, 0, count, start, 0, logits, nodes)


FORWARD = {"trunk": [span("b", "decode", 1, 5), span("a", "verify", 3, 6), span("c", "prefill", 2, 4)],
           "extend": [span("b", "decode", 1, 5), span("c", "prefill", 2, 3, logits=0)]}  # fmt: skip
COMMIT = {"extend": [span("b", "commit", 2, 5, nodes=(0, 1)), span("a", "commit", 3, 6, nodes=(0, 2, 3))]}
DRAFT = {"extend": [], "block": [span("a", "draft", 3, 6)], "chain.1": [span("a", "draft", 1, 6)],
         "chain.2": [span("a", "draft", 1, 6)], "chain.3": [span("a", "draft", 1, 6, nodes=(node,)) for node in (5, 7)],
         "chain.0": [span("a", "draft", 1, 6)]}  # fmt: skip
VERIFY, FREE = e.Forward((e.Row("b", "decode"), e.Row("a", "verify"))), frozenset(range(4))
COMMITS, DRAFTS = e.Commit(("b", "a")), e.Draft(("a", "c"))


@pytest.mark.parametrize(("event", "spans", "what", "by", "flags", "writes"), [
    (VERIFY, FORWARD, "token", "page", "", {2: {1}, 3: {2, 3}, 8: {0}, 6: {0, 1}}),
    (VERIFY, FORWARD, "token", "page", "draft", {2: {1}, 4: {3}, 6: {0}}),
    (VERIFY, FORWARD, "token", "page", "block", {2: {1}, 4: {3}, 6: {0}}),
    (VERIFY, FORWARD, "choice", "slot", "", {5: {0}}),
    (VERIFY, FORWARD, "page", "slot", "", {2: set(), 5: set(), 1: {1}}),
    (VERIFY, FORWARD, "entry", "row", "", {1: {1, 2, 3}}), (VERIFY, FORWARD, "entry", "request", "", {4: {1, 2, 3}}),
    (VERIFY, FORWARD, "node", "row", "", {1: {0, 1, 2}}), (VERIFY, FORWARD, "node", "slot", "", {2: {0, 1, 2, 3, 4}}),
    (VERIFY, FORWARD, "node", "request", "", {4: {0, 1, 2}}), (VERIFY, FORWARD, "column", "row", "", {1: {0, 1, 2}}),
    (VERIFY, FORWARD, "column", "slot", "", {5: None, 2: {0, 1, 2}, 1: None}),
    (VERIFY, FORWARD, "column", "request", "", {1: None, 4: {0, 1, 2}, 3: None}),
    (COMMITS, COMMIT, "token", "page", "", {3: {3}, 8: {0}, 9: {0, 1, 2, 3, 4}}),
    (COMMITS, COMMIT, "token", "page", "draft", {2: {1, 2}, 3: {2, 3}, 8: {0}, 9: {0, 1, 2, 3, 4}}),
    (COMMITS, COMMIT, "entry", "slot", "", {5: set(), 2: {2, 3}}),
    (COMMITS, COMMIT, "entry", "row", "", {0: set(), 1: {2, 3}}),
    (COMMITS, COMMIT, "node", "slot", "", {}), (COMMITS, COMMIT, "choice", "slot", "", {5: {0}, 2: {0}}),
    (COMMITS, {"extend": COMMIT["extend"][:1]}, "token", "page", "", {9: {0, 1, 2, 3, 4}}),
    (DRAFTS, DRAFT, "choice", "slot", "", {2: {1, 2}, 1: {1}}),
    (e.Draft(("a",), parents=((0, 1),)), DRAFT, "choice", "slot", "", {2: {1, 2, 3, 4}}),
    (DRAFTS, DRAFT, "token", "page", "draft", {3: {2, 3}}),
    (DRAFTS, DRAFT, "token", "page", "topk", {3: {2, 3}, 8: {2}}),
    (DRAFTS, DRAFT, "token", "page", "block", {3: {2, 3}, 8: {0}}), (DRAFTS, DRAFT, "token", "page", "", {}),
])  # fmt: skip
def test_positions_that_an_event_writes_are_those_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, event: Any, spans: Any, what: Any, by: Any, flags: str, writes: Any
) -> None:
    """Pages of 4 tokens, of which 5 have room in a ring. The commit gives back page 9 of "a"."""
    monkeypatch.setattr(unused_positions, "row_spans", lambda context, stage: spans.get(stage, []))
    expected: dict[str, Any] = {"windows": {"a": (9, 8, 7), "c": (1, 2)}, "topk": 2 if flags == "topk" else None}
    if isinstance(event, e.Commit):
        expected["pages_before"] = {"a": (7, 3, 8, 9), "b": (1, 2), "c": (4,)}
    size = 5 if what != "token" or isinstance(event, e.Commit) else 4
    means = Meaning("keys", draft=flags in ("draft", "topk"), block=flags == "block", positions=Positions(what))
    if isinstance(event, e.Commit) and what == "token":
        size = 4
        writes = {page: at - {4} for page, at in writes.items()}
    region = pool((10, size), by, means)
    assert unused_positions._writes(context(event=event, expected=expected), region, means.positions) == writes


def looked(after: Sequence[Sequence[int]], before: Any = None, poison: int | None = None, **of: Any) -> Looked:
    """A pool with these digests after an event; before, they were 0."""
    now = torch.tensor(after)
    gap = of.pop("gap", False)
    region = of.pop("region", None) or pool((*now.shape, 2), of.pop("by", "slot"), of.pop("means", None), **of)
    return Looked(region, gap, torch.zeros_like(now) if before is None else torch.tensor(before), now, poison)


def seen(*every: Looked, wider: tuple[Wider, ...] = ()) -> Any:
    return SimpleNamespace(looked=every, regions=tuple(one.region for one in every), wider=wider)


def test_positions_that_an_event_does_not_write_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots 0 to 4 change at some of 6 positions. Slot 2 is that of "a", and any one position may change in slot 3."""
    monkeypatch.setattr(unused_positions, "_writes", lambda *given: {2: {1, 2, 4}, 3: None, 4: {5}, 1: set()})
    means = Meaning("state", positions=Positions("column"))
    changed = [[0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1]]
    says = {0: "pool slot 0 changed at position 1; this event writes nothing there",
            1: "pool slot 1 changed at positions 0 to 2; this event writes nothing there",
            2: "pool slot 2 changed at positions 0, 3; this event writes only positions 1, 2, 4 there",
            3: "pool slot 3 changed at positions 0, 5; this event writes only one position there"}  # fmt: skip
    for skip, first in ((frozenset(), 0), (frozenset({0}), 1), (frozenset({0, 1}), 2), (frozenset({0, 1, 2}), 3)):
        one = looked(changed, means=means, scratch=skip, rank=1)
        given = context(event=VERIFY, changes=seen(one, replace(one, gap=True), looked([[1]] * 3, means=means),
                                                   looked([[1, 1]], means=Meaning("state"))))  # fmt: skip
        (found,) = Tails()(given)
        assert isinstance(found, Comparison)
        assert told([found]) == [("; ".join(says[unit] for unit in says if unit not in skip), 30)]
        assert (found.slot, found.request, found.rank, found.blocks, found.worst, found.place) == (
            first, {1: "c", 2: "a"}.get(first), 1, 5, 4.0 - len(skip), STATE)  # fmt: skip
        assert found.units == tuple(range(first, 4))
    monkeypatch.setattr(unused_positions, "_writes", lambda *given: {2: {0}, 3: None})
    (found,) = Tails()(context(event=VERIFY, changes=seen(looked([[0, 0], [0, 0], [1, 0], [0, 1]], means=means))))
    assert told([found]) == [("", 8)]
    given.event = e.Save("a", "kept")
    assert told(Tails()(given)) == []  # no event of rounds
    check, given.changes = Tails(), seen(looked([[1, 1]]), looked([[1, 1]]))
    undeclared = "pool: the engine does not declare the content (`Region.means`), so every unit is compared as a whole"
    assert told(check(given)) == [undeclared] and told(check(given)) == []
    assert told(Tails()(context(changes=seen()))) == ["this engine shows no memory"]


# -- poison and leaks --------------------------------------------------------------------------------------------

WITH = log.EventLog(poison=5.0)


def test_new_pools_and_free_units_hold_poison() -> None:
    """Digest 9 is poison. Slots 1, 2 and 5 are owned, slot 0 is scratch, and batch rows have no owner."""
    assert told(Poison()(context(changes=seen(looked([[1]]))))) == ["this engine does not poison unowned memory"]
    pools = looked([[1, 1], [9, 1], [1, 1], [9, 9], [9, 1], [1, 1], [1, 9]], poison=9, scratch=frozenset({0}), rank=1,
                   before=[[9, 9], [9, 9], [9, 9], [9, 9], [9, 9], [9, 9], [9, 9]])  # fmt: skip
    rows = looked([[1, 1]], before=[[9, 1]], by="row", poison=9)
    gaps, other = (looked([[4]] * 5, gap=True, before=before)
                   for before in ([[4]] * 5, [[4], [5], [4], [5], [5]]))  # fmt: skip
    check, given = Poison(), context(log=WITH, changes=seen(pools, rows, gaps, other, looked([[1, 1]])))
    used = [("pool slot 4 is free and not poison; so are 1 slot more", 6)]
    assert told(check(given)) == [
        ("", 14), ("pool row 0 is new and not poison", 2), ("", 5),
        ("pool: the red zones differ from each other: something wrote there while the engine was built", 5), *used]
    (found,) = check(given)  # pools are new once
    assert told([found]) == used
    assert isinstance(found, Comparison)
    assert (found.worst, found.blocks, found.slot, found.rank) == (2.0, 3, 4, 1)
    owned = looked([[1], [1], [1]], poison=9, by="request")
    held = {"request_rows_before": {"a": 0}, "request_rows_after": {"b": 1, "c": 2}}
    assert told(check(context(log=WITH, changes=seen(owned), expected=held))) == []
    held["request_rows_after"] = {"b": 1}
    assert told(check(context(log=WITH, changes=seen(owned), expected=held))) == [
        ("pool request row 2 is free and not poison", 1)]
    held["request_rows_after"] = {"b": 3}
    assert told(check(context(log=WITH, changes=seen(owned), expected=held))) == [
        ("pool request row 1 is free and not poison; so are 1 request row more", 2)]
    pages = looked([[1], [1], [1], [1], [9], [1], [1], [1], [1], [9]], poison=9, by="page")
    assert told(check(context(log=WITH, changes=seen(pages)))) == [
        ("pool page 0 is free and not poison; so are 1 page more", 3)]


def test_poison_that_is_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN of arithmetic counts if there is no poison. Sums of numbers that are not summed here prove nothing."""
    monkeypatch.setattr("instep.checks.poison.whose", lambda context, place, row: f"of row {row}")
    nan, own = -torch.tensor(torch.nan), torch.tensor(torch.nan)
    one, two, flat = torch.zeros(4, 2), torch.zeros(4, 2), torch.zeros(3)
    one[1, 0] = nan
    two[1, 0], two[2:] = nan, own
    flat[1:] = own
    numbers = torch.zeros(3, 2)
    numbers[1] = 5.0
    for poison, tensor, says, first in (
        (torch.nan, one, "1 of 8 elements is NaN, but not with the bits of the poison, the first in row 1", 1),
        (torch.nan, two, "4 of 8 elements are poison (nan), the first in row 2", 2),
        (torch.nan, flat, "2 of 3 elements are poison (nan), the first in row 1", 1),
        (5.0, numbers, "2 of 6 elements are poison (5), the first in row 1", 1), (5.0, one, "", None),
        (torch.nan, numbers, "", None), (torch.nan, torch.tensor([1, 2]), "", None),
        (torch.nan, torch.tensor([1, pattern(torch.nan, torch.int64)]),
         "1 of 2 elements is poison (nan), the first in row 1", 1),
        (torch.nan, torch.tensor([torch.inf, -torch.inf]), "", None),
    ):  # fmt: skip
        given = context(log=log.EventLog(poison=poison), changes=seen())
        given.subject = SimpleNamespace(after={}, places={KEYS: tensor, STATE: tensor[:0]})
        (found,) = Poison()(given)
        assert told([found]) == [(says, tensor.numel())]
        assert isinstance(found, Comparison) and found.request == (None if first is None else f"of row {first}")
        assert found.worst == int(says.partition(" ")[0] or 0)
    state = SimpleNamespace(parts=lambda: [(KEYS, numbers), (STATE, numbers)])
    for flying, places in ((frozenset(), [KEYS, STATE]), (frozenset({"a"}), [KEYS]), (frozenset({"b"}), [KEYS, STATE])):
        given = context(log=WITH, changes=seen(), expected={"flying": flying},
                        subject=SimpleNamespace(after={"a": state}, places={}))  # fmt: skip
        assert [(one.place, one.request) for one in Poison()(given)] == [(place, "a") for place in places]


def test_memory_of_a_request_that_left_is_free_unowned_and_poison() -> None:
    """Request "a" had slot 2, pages 7, 3 and 8, and request row 4. A pool without poison says nothing."""
    slots = looked([[9, 9], [9, 9], [9, 1], [1, 1]], poison=9, rank=1)
    pages = looked([[9]] * 3 + [[1]] + [[9]] * 4, poison=9, by="page")
    rows = looked([[9]] * 5, poison=9, by="request")
    left = [('data of request "a" is still in 1 position of pool slot 2', 2),
            ('data of request "a" is still in pool page 3; data of request "a" is still in pool page 8', 3),
            ("", 1)]  # fmt: skip
    nothing = "this engine does not poison released memory, so only its owner is compared"
    last = {"slots_after": {}}
    for event in (e.Finish("a"), e.Abort("a"), e.Preempt("a")):
        given = context(event=event, log=WITH, changes=seen(slots, pages, rows, looked([[1]]),
                                                            looked([[1]], by="row", poison=9)))  # fmt: skip
        assert told(Leaks()(given)) == [("", 4), *left]
    given.subject_slots, given.subject_pages = {"b": 2, "c": 3}, {"b": [3, 5], "c": [7, 3], "d": []}
    owned = [('slot 2 is owned by "b"; page 3 is owned by "b"; page 7 is owned by "c"; page 3 is owned by "c"', 4)]
    (first, second, *_) = Leaks()(given)
    assert told([first]) == owned and isinstance(second, Comparison)
    assert (second.request, second.rank, second.worst, second.place.component) == ("a", 1, 1.0, "length")
    given = context(event=e.Finish("a"), changes=seen(), expected=last, subject_slots={"b": 2},
                    subject_pages={"b": [1], "c": []})  # fmt: skip
    check = Leaks()
    assert told(check(given)) == [nothing, ('slot 2 is owned by "b"', 4),
                                  ('slot 2 is owned by "b"; pages [1] are owned by "b"', 1)]  # fmt: skip
    assert told(check(replace_event(given, e.Finish("z")))) == told(check(replace_event(given, e.Idle()))) == []
    for shown in (Shown(whole=False, feeds=frozenset({"slots"}), exact=False), Shown(whole=False)):
        given = context(event=e.Finish("a"), log=WITH, changes=seen(slots), shown=shown)
        assert told(Leaks()(given)) == []
    empty = context(event=e.Finish("a"), log=WITH, changes=seen(pages), expected={"pages_before": {"a": ()}})
    assert told(Leaks()(empty)) == [("", 1)]


def replace_event(given: Any, event: e.AnyEvent) -> Any:
    return SimpleNamespace(**{**vars(given), "event": event})


# -- tables, owners, reads, copies ---------------------------------------------------------------------------------


def test_write_tables_are_no_wider_than_the_rules_and_scratch_has_no_owner() -> None:
    check = Bounds()
    nothing = "this engine shows no memory to compare its table with"
    assert told(check(context(changes=seen()))) == [nothing] and told(check(context(changes=seen()))) == []
    one = pool((6, 2), rank=1)
    room = log.EventLog(room=ROOM)
    for by, allowed, rule in (("slot", {1, 2}, "slots 1, 2, of the requests that it names"),
                              ("page", {4}, "page 4, with the positions that it writes"),
                              ("row", {0}, "row 0, of its batch"), ("request", set(), "nothing there"),
                              ("request", {3}, "request row 3, of the requests that it names")):  # fmt: skip
        region = replace(one, by=by)  # type: ignore[arg-type]
        wider = Wider(region, frozenset({0, 3}), frozenset(allowed))
        units = {"request": "request rows"}.get(by, f"{by}s")
        given = context(event=VERIFY, changes=SimpleNamespace(regions=(region,), wider=(wider,)), log=room)
        (found,) = check(given)
        assert told([found]) == [(f"the engine's table lets this forward write pool {units} 0, 3; the event rules "
                                  f"allow {rule}", 2)] and found.rank == 1  # fmt: skip
    for by, units, scratch, says in (
        ("slot", 6, {0, 4}, ""), ("slot", 6, {0, 1, 5}, "slots 1, 5"), ("page", 10, {0, 4}, "page 4"),
        ("page", 10, {0, 1}, ""), ("row", 3, {0, 1, 2}, ""), ("row", 3, {2}, "row 2"), ("row", 4, {3}, ""),
        ("request", 4, {0}, ""), ("request", 4, {3}, "request row 3"),
        ("request", 4, {0, 1, 2, 3}, "request rows 1, 2, 3"),
    ):  # fmt: skip
        region = pool((units, 2), by, scratch=frozenset(scratch))
        due = f"pool declares {says} as scratch, which the trace gives to requests" if says else ""
        given = context(changes=SimpleNamespace(regions=(region, pool((3, 1))), wider=()), log=room)
        assert told(check(given)) == [("", 2), (due, len(scratch))], (by, scratch)
        given.log = log.NOTHING
        assert told(check(given)) == [("", 2), ("", len(scratch))]
    regions = (pool((2, 1), means=Meaning("state")), pool((2, 1)), pool((2, 1), means=Meaning("keys")))
    (one,) = check(context(changes=SimpleNamespace(regions=regions, wider=())))
    assert isinstance(one, Comparison) and (one.place, one.elements) == (STATE, 3)


def test_no_two_owners_share_memory() -> None:
    """Two configurations of 3 and 4 fields, two pools of which one overlaps the other, and an answer."""
    was = "x" * 101
    configs = (log.Config("the config", "it was made", 3, {"layers": ("1", "2"), "": (was, "z")}),
               log.Config("the other", "it ran", 4, {}))  # fmt: skip
    memory = torch.zeros(10)
    one, two = (replace(pool((1,)), name=name, units=memory[begin : begin + 4].view(2, 2))
                for name, begin in (("one", 0), ("two", 3)))  # fmt: skip
    answered = log.Answered(2, ("state", "keys"), ("bonus of event 1", "own of event 2"), 3)
    check = Aliasing()
    given = context(log=log.EventLog(configs=configs, answered=answered), regions=(one, two, pool((0, 2))))
    changed = ("the config, layers, changed while it was made: it was 1 and is 2; the config changed while it was "
               f"made: it was {'x' * 100} and is z")  # fmt: skip
    rest = [("the answer is a view of state, which the next event overwrites; the answer is a view of keys, which the "
             "next event overwrites", 2), ("earlier answers changed while this event ran: bonus of event 1, own of "
                                           "event 2", 1)]  # fmt: skip
    dropped = "kept answers take so much memory that the oldest are dropped, so later changes of these are not seen"
    shared = ("units of one (layer 0) and units of two (layer 0) share memory", 4)
    assert told(check(given)) == [(changed, 7), shared, *rest, dropped]
    assert told(check(given)) == [(changed, 7), *rest]
    given.regions, given.log = (two,), log.EventLog(answered=log.Answered(0))
    assert told(check(given)) == [("", 2)]
    assert told(check(context())) == []
    assert told(Aliasing()(context())) == ["this engine shows no memory, so overlapping pools cannot be found"]
    given.log = log.EventLog(answered=log.Answered(3))
    assert told(check(given)) == [("", 3)]


def test_host_reads_are_limited_by_module_and_event() -> None:
    to_host, commit = "instep_optimized.transfer.to_host", "instep_optimized.commit.ring"
    own = log.HostRead("instep.watch", "gdn")

    def read(event: Any, *reads: tuple[str, str], **more: Any) -> list[Any]:
        of_log = log.EventLog(ops="mine", trapped=True, calls=4, reads=(own, *(log.HostRead(*one) for one in reads)))
        return told(HostReads()(context(event=event, log=of_log, **more)))

    assert told(HostReads()(context(log=log.EventLog(ops="mine")))) == ["host reads of this engine are not watched"]
    assert told(HostReads()(context(log=log.EventLog(trapped=True)))) == ["host reads of this engine are not watched"]
    assert read(VERIFY, (to_host, "")) == [("", 5)]
    twice = "the host reads the device {} (between ops; instep_optimized.transfer.to_host, {} allowed)"
    assert read(VERIFY, *[(to_host, "")] * 2) == [(twice.format("2 times", 1), 5)]
    stray = "the host reads the device 1 time (op gdn; mine.kernel)"
    assert read(VERIFY, ("mine.kernel", "gdn"), (to_host, "")) == [(stray, 5)]
    assert read(e.Idle(), (to_host, "gdn")) == [
        (f"the host reads the device 1 time (op gdn; {to_host})", 5)]
    stages = SimpleNamespace(parts=[("a",), ("b",)])
    assert read(VERIFY, *[(to_host, "")] * 3, stages=stages) == [("", 5)]
    assert read(VERIFY, *[(to_host, "")] * 4, stages=stages) == [(twice.format("4 times", 3), 5)]
    assert read(e.Save("a", "k"), *[(commit, "")] * 4, (to_host, "")) == [("", 5)]
    assert read(e.Save("a", "k"), *[(commit, "")] * 5) == [
        (f"the host reads the device 5 times (between ops; {commit}, 4 allowed)", 5)]
    tracked = e.Commit(("a", "b"), track=("k", "l"))
    assert read(tracked, *[(commit, "")] * 4, *[(commit, "gdn")] * 4, *[(to_host, "")] * 3) == [("", 5)]


def test_kept_copies_are_there_as_long_as_they_should() -> None:
    a, b, c, d = copies = [("save", "a"), ("save", "b"), ("preempt", "c"), ("offload", "d")]
    check = Copies()
    assert told(check(context())) == ["this engine does not show the copies that it keeps"]
    assert told(check(context())) == []
    due = {"copies": frozenset(copies)}
    truth = SimpleNamespace(answer=SimpleNamespace(tracked={"r": 4, "s": 8}))

    def kept(event: Any, shown: Any = frozenset(copies), **more: Any) -> list[Any]:
        of_log = log.EventLog(copies=log.Copies(shown, **{"elements": 0, **more}))
        return told(Copies()(context(event=event, log=of_log, expected=due, truth=truth)))

    names = {a: 'the copy that save kept as "a"', c: 'the copy that preempt kept of "c"',
             d: 'the copy that offload kept as "d"', ("save", "z"): 'the copy that save kept as "z"'}  # fmt: skip
    assert kept(e.Idle(), elements=6) == [("", 6)] and kept(e.Idle()) == [("", 1)]
    assert kept(e.Idle(), frozenset({a, b, ("save", "z")})) == [
        (f"{names[d]} is missing; {names[c]} is missing; {names['save', 'z']} is kept although it was dropped", 1)]
    assert kept(e.Idle(), changed=((a, "keys"), (c, "state"), (a, "conv")), held=(d, c), stayed=(d,)) == [
        (f"{names[a]} changed while this event ran: keys, conv; {names[c]} changed while this event ran: state; "
         f"{names[d]} is gone, but its memory is still held; {names[c]} is gone, but its memory is still held; "
         f"{names[d]} is not in host memory", 1)]  # fmt: skip
    for event, moved in ((e.Offload("d"), d), (e.Fetch("a"), a)):
        assert kept(event, changed=((moved, "keys"), (moved, "conv"))) == [
            ("", 1), (f'the copy "{moved[1]}" changed when it moved: keys, conv', 1)]
    commit = e.Commit(("r", "s"), track=("a", "b"))  # replaces prefixes in place
    assert kept(commit, changed=((a, "keys"), (b, "conv"), (c, "state"))) == [
        (f"{names[c]} changed while this event ran: state", 1)]


def test_events_that_were_not_served_are_reported() -> None:
    refused = e.Refused(e.Idle())
    for event, shown, says in ((e.Idle(), Shown(said=("x", "y")), ["x", "y"]), (refused, Shown(), []),
                               (refused, Shown(refuses=False, said=("x",)), ["x", NOT_OFFERED]),
                               (e.Idle(), Shown(refuses=False), [])):  # fmt: skip
        assert told(Played()(context(event=event, shown=shown))) == says
