"""Requests that go through rounds of speculation in a `World`, checked after each against one-token decoding.

Leaves out: how the right states are found (each test's own), and the op sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.ops.op_protocols import GdnInputs

from .rings import Turn, World, cut, joined

WIDEST = 8
DEED = st.one_of(  # (window, accepted of it); one token decoded; nothing
    st.integers(1, WIDEST).flatmap(lambda window: st.tuples(st.just(window), st.integers(0, window))),
    st.sampled_from([(1, -1), (0, 0)]),
)
Deed = tuple[int, int]
DECODE, IDLE = (1, -1), (0, 0)


class Right(NamedTuple):
    """A request's tokens; its state before each of them and after the last one; what makes rejected rows."""

    rows: GdnInputs
    states: Sequence[torch.Tensor]
    wrong: Callable[[int, int], GdnInputs]  # (count, seed)

    def window(self, before: int, window: int, accepted: int) -> GdnInputs:
        """The tokens that will be accepted, followed by rejected ones."""
        return joined([cut(self.rows, before, accepted), self.wrong(window - accepted, before + 3 * accepted)])


class Life:
    """A request: how many of its tokens are committed, and as of how many the state in its slot is."""

    def __init__(self, slot: int, right: Right, start: int) -> None:
        self.slot, self.right, self.start, self.length, self.settled = slot, right, start, 0, 0

    def turn(self, deed: Deed, spare: int) -> Turn:
        """Its part in a round; up to `spare` pending tokens stay pending."""
        (window, accepted), before = deed, self.length
        if deed == IDLE or before + window > len(self.right.rows.v):
            return Turn(-1, cut(self.right.rows, 0, 1))
        owed, number = before - self.settled, self.start + before
        if deed == DECODE:
            self.length = self.settled = before + 1
            return Turn(self.slot, cut(self.right.rows, before, 1), number, owed, False, False, "slot")
        settles = owed > spare
        self.length, self.settled = before + accepted, before if settles else self.settled
        return Turn(self.slot, self.right.window(before, window, accepted), number, owed, True, settles)

    def fold(self) -> Turn:
        """To scratch, without rows."""
        nothing, number = cut(self.right.rows, 0, 0), self.start + self.length
        return Turn(self.slot, nothing, number, self.length - self.settled, False, False, "scratch")


def walk(world: World, lives: Sequence[Life], rounds: Sequence[Sequence[Deed]], lazy: bool) -> None:
    """After every round the folded states are those of one-token decoding, and folding has changed nothing."""
    spare = world.size - 2 * WIDEST if lazy else -1
    for life in lives:
        world.state.view[life.slot] = life.right.states[0]
    for deeds in rounds:
        world.run([life.turn(deed, spare) for life, deed in zip(lives, deeds, strict=True)])
        world.run([life.fold() for life in lives])
        for life in lives:
            folded = world.scratch if life.length > life.settled else world.state
            assert same_bits(folded.view[life.slot], life.right.states[life.length])
            assert same_bits(world.state.view[life.slot], life.right.states[life.settled])
