"""The page table: read in place, and as wide as the longest request needs it.

Leaves out: the owners of pages (`test_memory_owners.py`) and attention itself (`test_ops_plain_memory.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instep_optimized import OptimizedEngine
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Capacity, Commit, Draft, Event, Forward, Row
from instep_reference.contract.errors import BadInput, OutOfCapacity
from support.running.covering import few
from support.worlds.engine_and_reference import engine

PAGES = 997  # no other size of a small model is as large, or a multiple of it
ROOM = Capacity(slots=(4, 1), pages=tuple(range(PAGES, 0, -1)), page_size=4, max_tokens=64)


def course() -> Iterator[Event]:
    """A mixed forward, a forward of each kind alone, a draft and a commit."""
    yield Admit("a", tuple(range(1, 10)))
    yield Admit("b", (3, 4))
    yield Forward((Row("a", "prefill", 9),))
    yield Forward((Row("b", "prefill", 2), Row("a", "decode")))
    yield Forward((Row("a", "decode"), Row("b", "decode")))
    yield Draft(("a", "b"))
    yield Forward((Row("b", "verify"), Row("a", "verify")))
    yield Commit(("a", "b"))


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every tensor that an operator gives, with the operator's name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found += [(str(func), leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


@contextmanager
def made(subject: OptimizedEngine) -> Iterator[list[str]]:
    """Names the operators that make a tensor, no view of a pool, with an axis as long as the pool has pages."""
    pools = {region.units.untyped_storage().data_ptr() for region in subject.regions()}
    names: list[str] = []
    with _Made() as watch:
        yield names
    names += [
        name for name, tensor in watch.found
        if any(size >= PAGES for size in tensor.shape) and tensor.untyped_storage().data_ptr() not in pools
    ]


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("ops", ["plain", "ledger"])
def test_no_launch_makes_a_copy_as_wide_as_the_pool(checkpoint: Checkpoint, ops: str, graphs: bool) -> None:
    subject = engine(checkpoint, ops, ROOM, graphs=graphs)
    for event in course():
        with made(subject) as wide:
            event.on(subject)
        assert not wide, f"{type(event).__name__}: {wide}"
    with made(subject) as wide:  # the watch would see one
        next(region for region in subject.regions() if region.name == "table").units.clone()
    assert wide == ["aten.clone.default"]


def tables(subject: OptimizedEngine) -> tuple[int, ...]:
    """Slots and width of the page table."""
    return tuple(next(region for region in subject.regions() if region.name == "table").units.shape)


def test_the_table_is_as_wide_as_the_pages_of_the_longest_request(checkpoint: Checkpoint) -> None:
    assert tables(engine(checkpoint, room=ROOM)) == (5, PAGES)
    assert tables(engine(checkpoint, room=replace(ROOM, max_positions=17))) == (5, 5)


@pytest.mark.parametrize("ops", ["plain", "ledger"])
def test_a_narrower_table_changes_no_answer_and_no_state(checkpoint: Checkpoint, ops: str) -> None:
    """15 positions: what the window of the longest request needs, and no more."""
    wide, narrow = (engine(checkpoint, ops, room) for room in (ROOM, replace(ROOM, max_positions=15)))
    for event in course():
        event.on(wide)
        event.on(narrow)
    for name in "ab":
        one, other = wide.state(name), narrow.state(name)
        assert (one.length, one.root, one.proposal) == (other.length, other.root, other.proposal) and one.length > 3
        for field in ("conv", "state", "keys", "values", "draft_keys", "draft_values"):
            for layer, tensor in getattr(one, field).items():
                assert torch.equal(tensor, getattr(other, field)[layer]), (field, layer)


@pytest.mark.parametrize("overlap", [False, True])
def test_engine_refuses_events_beyond_the_position_limit(checkpoint: Checkpoint, overlap: bool) -> None:
    subject = engine(checkpoint, room=replace(ROOM, max_positions=14), overlap=overlap)
    for event in list(course())[:5]:
        event.on(subject)
    Draft(("a",)).on(subject)  # drafts reach position 14: the last one that it may have
    before, pages = subject.state("a"), subject.pages()
    assert before.length == 11
    with pytest.raises(OutOfCapacity, match="'a' needs 15 positions; one request may have 14"):
        Forward((Row("a", "verify"),)).on(subject)
    assert subject.pages() == pages and torch.equal(subject.state("a").keys[1], before.keys[1])


@pytest.mark.parametrize(("most", "said"), [(3, "room for a window of 4 tokens"), (PAGES * 4 + 1, "at most 3988")])
def test_impossible_limit_is_refused(checkpoint: Checkpoint, most: int, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        engine(checkpoint, room=replace(ROOM, max_positions=most))
