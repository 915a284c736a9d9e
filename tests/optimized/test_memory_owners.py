"""Slots and pages: allocated in the order of the capacity, never the reserved one, never twice.

Leaves out: their memory (`test_memory_pools.py`).
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep_optimized.memory.pages import PageTable
from instep_optimized.memory.slots import Slots, request_rows
from instep_reference.contract.errors import BadInput, OutOfCapacity


def test_the_first_free_slot_in_the_order_is_taken() -> None:
    slots = Slots((7, 2, 5))
    assert [slots.take(name) for name in "abc"] == [7, 2, 5]
    assert slots.give("b") == 2
    assert slots.first() == 2
    assert slots.take("d") == 2
    assert slots.owned() == {"a": 7, "c": 5, "d": 2}
    with pytest.raises(OutOfCapacity, match="all 3 are owned"):
        slots.take("e")


def test_request_rows_are_handed_out_even_numbers_first() -> None:
    rows = request_rows(5)
    assert [rows.take(name) for name in "abcde"] == [2, 4, 1, 3, 5]
    assert (rows.give("b"), rows.give("a")) == (4, 2) and rows.take("f") == 2
    assert request_rows(1).first() == 1


@pytest.mark.parametrize("order", [(), (0, 1), (3, 3), (-1, 2)])
def test_an_order_that_names_unit_0_or_a_unit_twice_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match=r"capacity\.slots"):
        Slots(order)
    with pytest.raises(BadInput, match=r"capacity\.pages"):
        PageTable(order, 4)


def test_pages_grow_in_order_and_are_never_trimmed() -> None:
    pages = PageTable((9, 3, 6, 1), 4)
    pages.grow([("a", 4), ("b", 1)])
    assert pages.owned() == {"a": [9], "b": [3]}
    pages.grow([("a", 5)])
    pages.grow([("a", 2)])
    assert pages.of("a") == [9, 6]
    assert pages.locations("a", 3, 3) == [9 * 4 + 3, 6 * 4, 6 * 4 + 1]
    assert pages.covering(pages.of("a"), 3, 3) == {9, 6}
    assert pages.release("a") == [9, 6]
    pages.grow([("c", 1)])
    assert pages.of("c") == [9]


def test_a_growth_that_does_not_fit_changes_nothing() -> None:
    pages = PageTable((1, 2, 3), 4)
    pages.grow([("a", 4)])
    with pytest.raises(OutOfCapacity, match="KV pages: 3 more needed, 2 free"):
        pages.grow([("a", 8), ("b", 8)])
    assert pages.owned() == {"a": [1]}
    assert pages.grown([("b", 8)]) == {"b": [2, 3]}
    assert pages.owned() == {"a": [1]}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20)), max_size=20))
def test_no_page_has_two_owners(wants: list[tuple[str, int]]) -> None:
    pages = PageTable(tuple(range(8, 0, -1)), 3)
    for request, positions in wants:
        if not positions:
            pages.release(request)
            continue
        try:
            pages.grow([(request, positions)])
        except OutOfCapacity:
            assert sum(map(len, pages.owned().values())) + -(-positions // 3) > 8
        owned = [page for own in pages.owned().values() for page in own]
        assert len(set(owned)) == len(owned)
        assert 0 not in owned
