"""A small world for the delta rule's memory: slots, rings and scratch in guarded pools, and requests that take turns.

Leaves out: what must be exact (`tests/optimized/test_exact.py`). Every slot of `state` and every place of a ring holds
poison until somebody writes it, and each launch is checked to write nothing but what its turns may write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from instep.kit.cases.case import Draw, at
from instep.kit.cases.conv_and_gdn import Heads
from instep.kit.cases.guarded_pools import Pool, guarded, same_bits
from instep_optimized.memory_addresses import KEPT, OWN, Address, Part, Ring, SplitUpdates
from instep_optimized.ops.op_protocols import GdnInputs, Ops

Tensor = torch.Tensor
SLOTS = 6  # 0 is unused


class ChannelHeads(Heads):
    """Heads whose log decays are [N, HV, K], one per key channel."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChannelHeads) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(("channels", *self))


class Turn(NamedTuple):
    """One request's part of a launch. Row 0 is its token number `before`; `pending` tokens before it are run again.

    slot -1: an idle row.  kept, settled: the ring takes the rows, the slot takes what was run again.
    goal: where the state after the last row goes: the slot itself, the scratch unit of that number, or nowhere.
    """

    slot: int
    rows: GdnInputs
    before: int = 0
    pending: int = 0
    kept: bool = True
    settled: bool = True
    goal: str = "nowhere"
    fresh: bool = False


@dataclass(frozen=True)
class World:
    """Pools for one op set: state and scratch [slots, HV, K, V], snapshots with `widest` columns, rings of `size` that
    keep what the op set declares. own: entries of updates, or of values; None means `size`."""

    ops: Ops
    heads: Heads
    size: int
    state: Pool
    scratch: Pool
    snapshots: Pool
    rings: tuple[Pool, ...]

    @classmethod
    def of(
        cls, ops: Ops, heads: Heads, device: str, *, size: int, swap: bool = True, widest: int = 8,
        dtype: torch.dtype = torch.float32, kept: torch.dtype = torch.float32, slots: int = SLOTS,
        own: int | None = None, split: torch.dtype | None = None,
    ) -> "World":
        H, HV, K, V = heads
        blocks = {"k": (H, K), "v": (HV, V), "update": (HV, V)}
        if isinstance(heads, ChannelHeads):
            blocks |= {"decay": (HV, K), "log_decay": (HV, K)}

        def pool(leading: tuple[int, ...], block: tuple[int, ...], of: torch.dtype, turned: bool = False) -> Pool:
            made = guarded(leading, block, of, swap=turned, device=device)
            if not of.is_floating_point:
                made.raw.fill_(-77)
            return made

        return cls(
            ops, heads, size, pool((slots,), (HV, K, V), dtype, swap), pool((slots,), (HV, K, V), dtype, swap),
            pool((slots, widest), (HV, K, V), dtype, swap),
            tuple(
                pool((slots, own or size if name in OWN else size), blocks.get(name.removesuffix("_low"), (HV,)),
                     kept if split is None or name == "decay" else split)
                for name in KEPT["split" if split else ops.keeps]._fields
            ),
        )  # fmt: skip

    @property
    def pools(self) -> tuple[Pool, ...]:
        return self.state, self.scratch, self.snapshots, *self.rings

    def part(self, turns: Sequence[Turn], *, columns: bool = False, trees: Sequence[Sequence[int]] = ()) -> Part:
        """The turns as a part, packed in their order; `columns`: the state after each row goes to snapshots; `trees`:
        the parents of every turn's rows."""
        draw = Draw(0, str(self.state.raw.device))
        count = [len(turn.rows.v) for turn in turns]
        slots = draw.ints([turn.slot for turn in turns])
        goals = {"slot": self.state, "scratch": self.scratch}
        goal = next((turn.goal for turn in turns if turn.goal != "nowhere"), "slot")
        assert all(turn.goal in ("nowhere", goal) for turn in turns), "a part stores into one pool"
        # As in an engine's verify: there is no place for the state after the rows unless it is requested.
        stores = not trees and any(turn.goal != "nowhere" for turn in turns)

        def units(chosen: Sequence[bool]) -> Tensor:
            return draw.ints([turn.slot if wanted else -1 for turn, wanted in zip(turns, chosen, strict=True)])

        return Part(
            form="window",
            begin=draw.ints([sum(count[:i]) for i in range(len(count))]),
            count=draw.ints(count),
            most=max(count),
            read=Address(self.state.view, slots),
            fresh=draw.ints([turn.fresh for turn in turns]).bool(),
            store=Address(goals[goal].view, units([turn.goal == goal for turn in turns])) if stores else None,
            per_row=Address(self.snapshots.view, slots) if columns else None,
            ring=Ring(
                KEPT["split" if len(self.rings) == len(SplitUpdates._fields) else self.ops.keeps](
                    *(pool.view for pool in self.rings)),
                units=slots,
                begin=draw.ints([(turn.before - turn.pending) % self.size for turn in turns]),
                pending=draw.ints([turn.pending for turn in turns]),
                keep=draw.ints([turn.before % self.size if turn.kept else -1 for turn in turns]),
            ),
            settled=Address(self.state.view, units([turn.settled for turn in turns])),
            parents=draw.ints([parent for tree in trees for parent in tree]) if trees else None,
        )

    def run(self, turns: Sequence[Turn], *, columns: bool = False, trees: Sequence[Sequence[int]] = ()) -> Tensor:
        """One launch; core [N, HV, V]."""
        self.allow(turns, columns)
        was = [bits(pool).clone() for pool in self.pools]
        inputs = joined([turn.rows for turn in turns])
        dtype = inputs.v.dtype
        part = self.part(turns, columns=columns, trees=trees)
        core = self.ops.gdn(inputs=inputs, parts=(part,), dtype=dtype, to=at("core"))
        for pool, old in zip(self.pools, was, strict=True):
            strays = (bits(pool) != old) & ~pool.writable
            assert not bool(strays.any()), f"{int(strays.sum())} elements were written that no turn may write"
        return core

    def allow(self, turns: Sequence[Turn], columns: bool) -> None:
        """Let these turns write, and no longer the earlier ones."""
        for pool in self.pools:
            pool.writable.fill_(False)
        for turn in (turn for turn in turns if turn.slot >= 0):
            count = len(turn.rows.v)
            if turn.settled or turn.goal == "slot":
                self.state.allow(turn.slot)
            if turn.goal == "scratch":
                self.scratch.allow(turn.slot)
            for row in range(count):
                if columns:
                    self.snapshots.allow(turn.slot, row)
                if turn.kept:
                    for pool in self.rings:
                        pool.allow(turn.slot, (turn.before + row) % pool.view.shape[1])

    def fill(self, slot: int, first: int, rows: GdnInputs) -> None:
        """Put tokens into a ring, `first` being the number of the first one; the slot holds the state before it."""
        if not len(rows.v):
            return
        pool = self.state.view
        aside = World.of(self.ops, self.heads, str(pool.device), size=len(rows.v), dtype=pool.dtype, slots=2, widest=1,
                         kept=self.rings[0].view.dtype)  # fmt: skip
        aside.state.view[1] = pool[slot]
        aside.run([Turn(1, rows, settled=False)])
        for mine, theirs in zip(self.rings, aside.rings, strict=True):
            for number in range(len(rows.v)):
                mine.view[slot, (first + number) % mine.view.shape[1]] = theirs.view[1, number]

    def kept(self, slot: int, first: int, count: int) -> tuple[Tensor, ...]:
        """The ring's entries of `count` tokens from number `first` on."""
        return tuple(
            torch.stack([pool.view[slot, (first + t) % pool.view.shape[1]] for t in range(count)])
            for pool in self.rings
        )


def bits(pool: Pool) -> Tensor:
    """A pool's elements as whole numbers, so that NaNs can be compared."""
    return pool.raw.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[pool.raw.element_size()])


def joined(runs: Sequence[GdnInputs]) -> GdnInputs:
    """Rows one after the other."""
    return GdnInputs(*(torch.cat(several) for several in zip(*runs, strict=True)))


def cut(rows: GdnInputs, first: int, count: int) -> GdnInputs:
    """`count` rows from `first` on, in tensors of their own as every launch has them."""
    return GdnInputs(*(x[first : first + count].clone() for x in rows))


def stream(heads: Heads, count: int, seed: int, device: str) -> GdnInputs:
    """`count` tokens as the model makes them."""
    return delta_rows(Draw(seed, device), heads, count, (-1.0, -1e-4), 0.95)


def delta_rows(
    draw: Draw, heads: Heads, count: int, decay: tuple[float, float] = (-1.5, -1e-4), most: float = 1.0,
    shared: float = 0.0,
) -> GdnInputs:
    """Rows of the delta rule; most: of beta; shared: the part of every key that is the same direction."""
    H, HV, K, V = heads
    common = draw.normal(1, H, K) * shared
    q, k = (torch.nn.functional.normalize(draw.normal(count, H, K) + common, dim=-1) for _ in range(2))
    decays = (HV, K) if isinstance(heads, ChannelHeads) else (HV,)
    gates = draw.uniform(count, *decays, low=decay[0], high=decay[1]), draw.uniform(count, HV, low=0.05, high=most)
    return GdnInputs(q * K**-0.5, k, draw.normal(count, HV, V), *gates)


def garbage(heads: Heads, count: int, seed: int, device: str) -> GdnInputs:
    """Rejected rows: all NaN, huge, or another token's, in turn."""
    other = stream(heads, count, 7000 + seed, device)
    factor = torch.tensor([(torch.nan, 1e30, 1.0)[(seed + j) % 3] for j in range(count)], device=device)
    return GdnInputs(*(x * factor.view(-1, *[1] * (x.dim() - 1)) for x in other))


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
