"""The table of requests and the bound of writes: every function on small tables, against counts by hand.

Leaves out: which events are legal (`test_event_rules.py`), and the tables of engines (`test_write_bound.py`).
"""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from instep.trace.request_table import RequestTable, Standing
from instep.trace.write_bound import Bound, bound
from instep_reference.contract import engine as e
from instep_reference.contract.capacity import Capacity
from instep_reference.contract.event_facts import Phase
from instep_reference.contract.sampling import Sampling

ROOM = Capacity(slots=(3, 1, 4), pages=(9, 2, 7, 5, 4, 8), page_size=4, max_tokens=40)


def standing(name: str = "a", slot: int | None = 1, **more: Any) -> Standing:
    return Standing(name, **{"prompt": (1, 2, 3), "slot": slot, **more})


def table(*every: Standing, steps: int = 2, saved: Any = (), **of_room: Any) -> RequestTable:
    return RequestTable(replace(ROOM, **of_room), steps, {one.request: one for one in every}, saved=dict(saved))


# -- one request ------------------------------------------------------------------------------------------


def test_facts_of_one_request_follow_from_its_fields() -> None:
    assert [standing(length=length).unread for length in (0, 2, 3, 5)] == [3, 1, 0, 0]
    tree = standing(parents=(-1, 0, 0, 1, 0))
    assert [tree.children(node) for node in range(4)] == [[1, 2, 4], [3], [], []]
    every = (None, Sampling(temperature=0.0), Sampling(temperature=1.0))
    assert [standing(sampling=given).draws for given in every] == [False, False, True]
    for prompt, copy, prefix in (((1, 2, 3), True, False), ((1, 2, 3, 4), False, True), ((1, 2), False, False),
                                 ((1, 2, 4), False, False), ((9, 2, 3, 4), False, False)):  # fmt: skip
        assert (standing().fits(prompt), standing(prefix=True).fits(prompt)) == (copy, prefix), prompt


# -- slots, copies, prefixes ---------------------------------------------------------------------------------


def test_requests_with_a_slot_are_counted() -> None:
    some = table(standing("a", 1, root=5, phase=Phase.READY), standing("b", None, root=7, phase=Phase.PREEMPTED),
                 standing("c", 4, root=0, phase=Phase.VERIFIED), standing("d", 3, phase=Phase.READY))  # fmt: skip
    assert some.coming() == (2, 3)
    assert some.in_phase(Phase.READY) == ("a", "d") and some.in_phase(Phase.PREEMPTED, Phase.VERIFIED) == ("b", "c")
    assert some.in_phase() == () and some.copies() == {("preempt", "b")}
    then = some.as_it_stands()
    some.end("a")
    some.saved["k"] = standing()
    assert "a" in then.live and not then.saved and [one.request for one in some.ended] == ["a"]


def test_free_slots_and_rows_come_in_their_order() -> None:
    """Slots in the order of the room; request rows 2, 1, 3 of three."""
    for slots, due in (((), 3), ((3,), 1), ((3, 1), 4), ((1,), 3), ((3, 1, 4), None), ((None,), 3)):
        assert table(*(standing(str(slot), slot) for slot in slots)).free_slot() == due
    for rows, due in (((), 2), ((2,), 1), ((2, 1), 3), ((2, 3), 1), ((1, 2, 3), None), ((None, 1), 2)):
        assert table(*(standing(str(row), request_row=row) for row in rows)).free_request_row() == due
    four = replace(ROOM, slots=(1, 2, 3, 4, 5))
    order, some = [], RequestTable(four, 2)
    while (row := some.free_request_row()) is not None:
        order.append(row)
        some.live[str(row)] = standing(str(row), request_row=row)
    assert order == [2, 4, 1, 3, 5]


KEPT = {"own": standing("a", None, prefix=True, track_slot=2), "copy": standing("a", None), "host": standing(
    "a", None, prefix=True, aside=True), "other": standing("b", None, prefix=True, track_slot=1)}  # fmt: skip


def test_prefixes_on_the_device_are_counted() -> None:
    some = table(saved=KEPT, tracked=3)
    assert some.on_device() == ["own", "other"]
    assert some.copies() == {("save", "own"), ("save", "copy"), ("offload", "host"), ("save", "other")}
    assert [some.room_for(more) for more in (0, 1, 2)] == [True, True, False]
    assert table(saved=KEPT, tracked=1).room_for(0) and not table(saved=KEPT, tracked=1).room_for(1)
    assert table(saved=KEPT).room_for(99)
    assert [name for name in (*KEPT, "none") if some.own_prefix("a", name)] == ["own"]
    assert some.loadable((1, 2, 3)) == ["copy"] and some.loadable((1, 2, 3, 4)) == ["own", "other"]
    assert some.free_track_slot() == 3 and some.free_track_slot([3, None]) == 4
    assert table(saved=KEPT).free_track_slot() is None
    assert table(saved={"host": KEPT["host"], "own": KEPT["own"]}, tracked=3).free_track_slot() == 1
    assert table(saved={"other": KEPT["other"]}, tracked=1).free_track_slot() == 2


def test_a_multiple_of_the_interval_is_reached_by_tokens_after_the_length() -> None:
    for length, tokens, every in product(range(9), range(6), (None, 3, 4)):
        reached = [at for at in range(length + 1, length + tokens + 1) if every and at % every == 0]
        found = table(standing(length=length), track_interval=every).boundary("a", tokens)
        assert found == (reached[-1] if reached else None), (length, tokens, every)


def test_a_tracked_prefix_has_the_first_tokens_of_its_request() -> None:
    some = table(standing(said=(7, 8)), saved={"own": KEPT["own"]}, tracked=5)
    for under, slot, due in (("own", None, 2), ("new", None, 1), ("told", 4, 4)):
        some.track("a", under, 4, slot)
        kept = some.saved[under]
        assert (kept.prompt, kept.length, kept.track_slot, kept.prefix, kept.slot) == ((1, 2, 3, 7), 4, due, True, None)


# -- pages -----------------------------------------------------------------------------------------------------


def test_pages_of_four_positions_are_counted() -> None:
    """Six pages: request "a" has two of them, and "b" one. Both grow, or a further request comes."""
    for a, b in product(range(0, 14), (*range(0, 14), 24, 25)):
        some = table(standing("a", pages=(9, 7)), standing("b", 4, pages=(2,)))
        need = [sum(1 for first in range(0, positions, 4)) for positions in (a, b)]
        used = max(need[0], 2) + max(need[1], 1)
        assert some.pages_missing({"a": a, "b": b}) == max(used - 6, 0)
        assert some.room_of(a) is (need[0] <= 3)
        if used <= 6:
            some.grow([("b", b), ("a", a)])
            free = [5, 4, 8]
            mine = (2, *free[: max(need[1] - 1, 0)])
            assert some.live["b"].pages == mine
            assert some.live["a"].pages == (9, 7, *[page for page in free if page not in mine][: max(need[0] - 2, 0)])
            some.trim("a", a)
            assert len(some.live["a"].pages) == min(max(need[0], 2), need[0])


def test_rounds_in_flight_count_if_every_request_has_room_for_them() -> None:
    """Requests of 5 and 2 tokens, whose rounds in flight may add 3: there are pages for 24 positions, or a limit."""
    for most, tokens, worst in ((10, (2, 1), True), (9, (2, 1), False), (None, (2, 1), True), (None, (4, 7), True),
                                (None, (4, 8), False), (None, (15, 1), False)):  # fmt: skip
        some = table(standing("a", length=5, ahead=3), standing("b", 4, length=2, ahead=3), max_positions=most)
        exact = {"a": 5 + tokens[0], "b": 2 + tokens[1]}
        due = {name: count + 3 * worst for name, count in exact.items()}
        more = dict(zip("ab", tokens, strict=True))
        assert some.positions(more) == due
        some.reach(more)
        assert [some.live[name].ahead for name in "ab"] == [3 * worst] * 2
        first = len(range(0, due["a"], 4))
        assert [len(some.live[name].pages) for name in "ab"] == [first, min(len(range(0, due["b"], 4)), 6 - first)]
    assert table().positions({}) == {}


def test_windows_are_counted_by_the_host_or_the_device() -> None:
    assert table(standing(window=(1, 2, 3, 4))).width("a") == 4
    assert table(standing(window=(1, 2, 3, 4)), device_widths=True).width("a") == 3


# -- the bound of writes -----------------------------------------------------------------------------------------


def test_a_replica_may_write_its_own_units_and_no_event_red_zones() -> None:
    whole = Bound(frozenset({2}), frozenset({7}), 2, frozenset({4}), {1: Bound(frozenset({5}), rows=1)})
    for rank, name, by, units in (
        (None, "state", "slot", {2}), (0, "state", "slot", {2}), (1, "state", "slot", {5}), (1, "state@1", "slot", {5}),
        (1, "table", "slot", {2}), (1, "table@1", "slot", {2}), (None, "x", "page", {7}), (None, "x", "row", {0, 1}),
        (1, "x", "row", {0}), (None, "x", "request", {4}), (1, "x", "request", set()),
    ):  # fmt: skip
        region: Any = SimpleNamespace(red=False, rank=rank, name=name, by=by)
        assert whole.units(region) == units, (rank, name)
        region.red = True
        assert whole.units(region) == set()


def bounded(event: e.AnyEvent, then: Any, now: Any = None, rows: int = 9, **of_room: Any) -> tuple[Any, ...]:
    """The bound of an event of request "a", in pages of 4 positions. then, now: its fields before and after"""
    pages = {"pages": (10, 11, 12, 13)}
    both = [() if one is None else (standing(request_row=3, **{**pages, **one}),) for one in (then, now or then)]
    found = bound(event, *(table(*one, **of_room) for one in both), rows)
    return found.slots, found.pages, found.rows, found.request_rows


DRAFT, VERIFY, COMMIT = e.Draft(("a",)), e.Forward((e.Row("a", "verify"),)), e.Commit(("a",))
DECODE = e.Forward((e.Row("a", "decode"),))
BLOCK = {"block": True}


@pytest.mark.parametrize(("event", "then", "now", "room", "pages"), [
    (DECODE, {"length": 6}, {"length": 7}, {}, {11}), (DECODE, {"length": 7}, {"length": 8}, {}, {11}),
    (DECODE, {"length": 8}, {"length": 9}, {}, {12}), (VERIFY, {"length": 7, "window": (1, 2)}, None, {}, {11, 12}),
    (VERIFY, {"length": 6, "window": (1, 2)}, None, {}, {11}),
    (DRAFT, {"length": 7}, {"length": 7, "window": (1, 2)}, {}, {11, 12}),
    (DRAFT, {"length": 6}, {"length": 6, "window": (1, 2)}, {}, {11}),
    (DRAFT, {"length": 4}, {"length": 4, "window": (1,)}, BLOCK, {11}),
    (DRAFT, {"length": 4}, {"length": 4, "window": ()}, BLOCK, {11}),
    (DRAFT, {"length": 6}, {"length": 6, "window": ()}, {}, set()),
    (e.Load("a", "k"), {"pages": ()}, {"length": 2}, {"page_size": 1}, {10, 11}),
    (DRAFT, {"length": 6}, {"length": 6, "window": (1,)}, {"topk": 3, "num_draft_tokens": 9}, {11, 12}),
    (DRAFT, {"length": 5}, {"length": 5, "window": (1,)}, {"topk": 3, "num_draft_tokens": 9}, {11}),
    (VERIFY, {"length": 6, "window": (1, 2)}, None, {"device_widths": True}, {11, 12}),
    (COMMIT, {"length": 6, "window": (1, 2, 3)}, {"length": 8}, {}, {11, 12}),
    (COMMIT, {"length": 6, "window": (1, 2)}, {"length": 8, "pages": (10, 11)}, {}, {11}),
    (COMMIT, {"length": 6, "window": (1, 2)}, {"length": 8, "pages": (10, 11)}, {"trim": True}, {11, 12, 13}),
    (VERIFY, {"length": 6, "window": (1, 2)}, None, {"trim": True}, {11}),
    (e.Load("a", "k"), {"pages": ()}, {"length": 8}, {}, {10, 11}),
    (e.Load("a", "k"), {"pages": ()}, {"length": 9}, {}, {10, 11, 12}),
    (e.Load("a", "k"), {}, {"length": 0}, {}, set()), (e.Save("a", "k"), {"length": 8}, None, {}, set()),
    (e.Preempt("a"), {"length": 2}, {"slot": None, "pages": ()}, {}, {10, 11, 12, 13}),
    (DECODE, {"length": 3, "pages": (0, 11)}, {"length": 5}, {"page_size": 2}, {11, 12}),
    (DECODE, {"length": 3, "pages": (10, 0, 7)}, {"length": 4, "pages": (10, 0, 7)}, {"page_size": 2}, set()),
])  # fmt: skip
def test_pages_that_an_event_may_write_have_positions_after_the_length(
    event: Any, then: Any, now: Any, room: Any, pages: set[int]
) -> None:
    rows = 9 if isinstance(event, e.Commit) else 1 if isinstance(event, e.Draft | e.Forward) else 0
    assert bounded(event, then, now, **room) == ({1}, pages, rows, {3})


def test_the_units_of_a_request_are_those_before_and_after() -> None:
    """An admitted request has a slot only after the event, one that ends only before, and slot 0 has no owner."""
    for event in (e.Finish("a"), e.Abort("a")):
        before = table(standing(request_row=3, pages=(9, 0)), standing("b", 4, request_row=1, pages=(2,)))
        found = bound(event, before, table(), 5)
        assert found == Bound(frozenset({1}), frozenset({9}), 0, frozenset({3}))
    after = table(standing(slot=4, request_row=2))
    assert bound(e.Admit("a", (1,)), table(), after, 5) == Bound(frozenset({4}), request_rows=frozenset({2}))
    moved = bound(e.Resume("a"), table(standing(slot=None)), after, 5)
    assert (moved.slots, moved.request_rows) == ({4}, {2})
    reserved = table(standing(slot=0, request_row=0))
    assert bound(e.Save("a", "k"), reserved, reserved, 5) == Bound()
    for event in (e.Idle(), e.SetNumSteps(0)):
        assert bound(event, after, after, 5) == Bound()
    both = table(standing(length=3, pages=(9, 2)), standing("b", 4, length=4, pages=(7, 5)))
    grown = table(standing(length=4, pages=(9, 2)), standing("b", 4, length=5, pages=(7, 5)))
    rows = e.Forward((e.Row("a", "decode"), e.Row("b", "decode")))
    assert bound(rows, both, grown, 5) == Bound(frozenset({1, 4}), frozenset({9, 5}), 2)
