"""The memory watch sees every guarded byte, red zones included, and none that may change.

Leaves out: the strategy's table itself, which is the engine's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from instep.trace.write_bound import Bound
from instep.watch.memory_changes import UNWATCHED, Changes, Watch, bits
from instep_reference.contract.engine import Idle, Region

UNITS, GAP = 5, 3
# The writes that the event rules allow, for tests of the engine's table.
EVERYTHING = Bound(frozenset(range(UNITS)), frozenset(range(UNITS)), UNITS)


class Pools:
    """A guarded state pool, seen through a transposed view, and a plain page pool in bf16."""

    def __init__(self) -> None:
        self.memory = torch.zeros(UNITS, 2 * 4 * 6 + GAP)
        self.states = self.memory[:, : 2 * 4 * 6].unflatten(1, (2, 6, 4)).mT
        self.keys = torch.zeros(4, 2, 3, dtype=torch.bfloat16)
        self.may = {"state": {2}, "keys": set()}

    def regions(self) -> list[Region]:
        return [
            Region("state", 1, "slot", self.states, self.memory[:, 2 * 4 * 6 :]),
            Region("keys", 3, "page", self.keys),
            Region("empty", 0, "page", torch.zeros(0, 4)),
        ]

    def may_change(self, event: Idle) -> dict[str, set[int]]:
        return self.may

    def slots(self) -> Any:
        return {}

    def pages(self) -> Any:
        return {}


@pytest.fixture
def pools() -> Pools:
    return Pools()


def changes(pools: Pools, write: Callable[..., Any]) -> Changes:
    watch = Watch(pools)
    watch.before(Idle(), EVERYTHING)
    write(pools)
    return watch.after()


def test_nothing_changed_and_everything_was_looked_at(pools: Pools) -> None:
    guarded = (UNITS - 1) * 48 * 4 + UNITS * GAP * 4 + pools.keys.numel() * 2
    assert changes(pools, lambda p: None) == Changes((UNITS - 1) + UNITS + 4, guarded, ())


@pytest.mark.parametrize(("write", "seen"), [
    (lambda p: p.states[2].fill_(1.0), []),  # it may change
    (lambda p: p.states[3, 1, 2, 5].fill_(1.0), [("state", 3, 2, False, ())]),  # two bytes of 1.0 are not 0
    (lambda p: p.memory[2].fill_(1.0), [("state", 2, 2 * GAP, True, ())]),
    (lambda p: p.keys[1, 0, 0].fill_(-0.0), [("keys", 1, 1, False, ())]),
    (lambda p: p.keys[1, 0, 0].fill_(float("nan")), [("keys", 1, 2, False, ())]),
    # A sum over the unit would not see it.
    (lambda p: p.keys[3, 0].copy_(p.keys[3, 0].flip(0)), [("keys", 3, 2, False, ())]),
], ids=["its own unit", "a transposed unit", "a red zone", "minus zero", "nan", "bytes swapped"])  # fmt: skip
def test_every_guarded_byte_is_seen(pools: Pools, write: Callable[..., Any], seen: list[tuple[Any, ...]]) -> None:
    pools.keys[3, 0] = torch.tensor([1.0, 2.0, 1.5])
    assert [(one.region.name, one.unit, one.bytes, one.gap, one.strides) for one in changes(pools, write).trespasses
            ] == seen  # fmt: skip


@pytest.mark.parametrize(("begin", "strides"), [(2 * 48, (48,)), (2 * 48 + 1, ())])
def test_wrong_unit_stride_is_named_with_its_distance(pools: Pools, begin: int, strides: tuple[int, ...]) -> None:
    """Unit 2, written where it would be without red zones; or next to that, which no stride explains."""
    trespasses = changes(pools, lambda p: p.memory.view(-1)[begin : begin + 48].fill_(1.0)).trespasses
    assert trespasses and {trespass.strides for trespass in trespasses} == {strides}


def test_nan_that_stays_is_no_change(pools: Pools) -> None:
    pools.keys.fill_(float("nan"))
    assert not changes(pools, lambda p: None).trespasses


def test_without_a_before_there_is_nothing_to_say(pools: Pools) -> None:
    assert Watch(pools).after() == UNWATCHED
    watch = Watch(pools)
    watch.before(Idle(), EVERYTHING)
    watch.after()
    assert watch.after() == UNWATCHED


def test_bits_are_a_view_whatever_the_strides(pools: Pools) -> None:
    view = bits(pools.states)
    assert view.dtype == torch.int32 and view.shape == pools.states.shape
    view[0, 0, 0, 0] = 1
    assert pools.states[0, 0, 0, 0] != 0
