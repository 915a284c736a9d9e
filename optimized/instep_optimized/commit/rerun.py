"""The `rerun` strategy: verify stores no new state; it keeps what each token does to one (or what the delta rule
consumed of it, as the op set declares), and the next step runs the accepted tokens again before its own.

Leaves out: the running, which is the per-token body of decode and stands behind the `gdn` op. Traffic per layer and
request: 2 states, whatever the window. A commit writes nothing: the request's length says what was accepted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place import Place

from ..batch import Batch, Group
from ..layout import KEPT, Address, Keeps, Part, Ring
from ..memory import Memory
from ..memory.budget import Sizes, mark, ring_pools, rings, units
from ..memory.pool import Demand
from ..ops.base import GdnInputs, Ops, RingPlan
from .base import AcceptedWindows, BoundStrategy, StrategySpec, Table, printed
from .marks import Marks
from .snapshot import taken

SETTLED = "settled"

_SETTLES: Table = {action: {"state": "slot", SETTLED: "slot"} for action in ("prefill", "decode", "restore")}


def may_change(keeps: Keeps) -> Table:
    """What each event may write: the slot's state, its mark, and the pools of its ring."""
    everything: Table = {"release": {"state": "slot", SETTLED: "slot", **dict.fromkeys(ring_pools(keeps), "slot")}}
    return {"claim": {SETTLED: "slot"}, **_SETTLES, "verify": everything["release"], "commit": {}, **everything}


MAY_CHANGE = may_change("update")


class Rerun:
    __doc__ = f"""Addresses of the rerun strategy.

    The slot holds the state after `settled` tokens, the mark; tokens from there to the request's length are pending
    and stand in the slot's ring, each at its position modulo the ring's size. A verify runs the pending ones again,
    stores the state that they make, and keeps its own rows in the ring; rows that are rejected are overwritten by the
    next window, whose positions they have. A decode runs the pending ones again and stores the state after its row: so
    when speculation is left (`num_steps` 0) nothing else has to be done. Save and preempt take `peek`'s folded state,
    and a restored request has nothing pending.

    The ring has room for two of the widest windows, pending and new: a program of another head may still read the
    ones while the others are written. (Updates have room for one, as each program reads its own.) So it serves a
    window that is narrower, or wider, than the one before, too.
    What an event may change (units in brackets), where updates are kept; inputs have pools of their own names:
{printed(MAY_CHANGE)}
    """

    def __init__(self, config: ModelConfig, sizes: Sizes, memory: Memory, width: int) -> None:
        self.may, names = may_change(sizes.keeps), ring_pools(sizes.keeps)
        self._marks, self._size = Marks(memory[SETTLED].units(0)), self.ring_size(sizes.widest)
        self._spare = self.spare(self._size, width, sizes.widest)
        self._states = {layer: memory["state"].units(layer) for layer in memory.layers("state")}
        self._rings = {
            layer: KEPT[sizes.keeps](*(memory[name].units(layer) for name in names)) for layer in self._states
        }

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        kept = rings(config, sizes, cls.ring_size(sizes.widest), cls.own_entries(sizes.widest))
        return units("state", config, sizes), *kept, mark(SETTLED, sizes)

    @staticmethod
    def ring_size(widest: int) -> int:
        """Entries per slot: for the pending window and the new one."""
        return 2 * widest

    @staticmethod
    def own_entries(widest: int) -> int:
        """Entries of updates, or of values: for one window, as nobody else reads a program's own (see `Ring`)."""
        return widest

    @staticmethod
    def spare(size: int, width: int, widest: int) -> int:
        """How many tokens may stay pending when a window was verified: none."""
        return 0

    def bind(self, ops: Ops, batch: Batch) -> BoundStrategy:
        plans = [(group, self._plan(ops, group)) for group in batch.groups]

        def ran(ops: Ops) -> None:
            for group, plan in plans:
                self._marks.write(ops, group.slots, plan.after)

        return BoundStrategy(lambda layer: tuple(self._part(layer, group, plan) for group, plan in plans), ran)

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        """Nothing moves: the accepted tokens are pending from now on, the rejected ones are not."""

    def peek(self, ops: Ops, slot: int, length: int) -> dict[int, torch.Tensor]:
        if not length or self._marks.of(slot) == length:
            return {layer: taken(state[slot], length) for layer, state in self._states.items()}
        slots, before = (self._marks.at.new_tensor([number]) for number in (slot, length))
        none = slots.new_zeros(1)
        plan = self._absorbed(ops, slots, before, none, most=0)
        return {layer: self._folded(ops, layer, slots, none, plan) for layer in self._states}

    def restore(self, slot: int, length: int, units: Mapping[int, torch.Tensor]) -> None:
        self._marks.put(slot, length)
        if length:
            for layer, state in self._states.items():
                state[slot] = units[layer]

    def claim(self, slot: int) -> None:
        self._marks.put(slot, 0)

    def _plan(self, ops: Ops, group: Group) -> RingPlan:
        if group.kind != "verify":
            return self._absorbed(ops, group.slots, group.before, group.count, most=group.most)
        return ops.plan_ring(
            slots=group.slots, before=group.before, count=group.count, settled=self._marks.at, size=self._size,
            most=group.most, spare=self._spare,
        )

    def _absorbed(
        self, ops: Ops, slots: torch.Tensor, before: torch.Tensor, count: torch.Tensor, *, most: int
    ) -> RingPlan:
        """Rows that go into the state, behind all that is pending. A chunk keeps nothing: it may be longer than the
        ring."""
        return ops.plan_ring(
            slots=slots, before=before, count=count, settled=self._marks.at, size=self._size,
            most=min(most, self._size), spare=None,
        )

    def _part(self, layer: int, group: Group, plan: RingPlan) -> Part:
        state = self._states[layer]
        own = Address(state, group.slots)
        verify, chunk = group.kind == "verify", group.kind == "prefill"
        return group.part(
            own,
            store=None if verify else own,
            ring=None if chunk else self._ring(layer, group.slots, plan),
            settled=Address(state, plan.settle) if verify else None,
        )

    def _ring(self, layer: int, slots: torch.Tensor, plan: RingPlan) -> Ring:
        return Ring(self._rings[layer], slots, plan.begin, plan.pending, plan.keep)

    def _folded(
        self, ops: Ops, layer: int, slots: torch.Tensor, none: torch.Tensor, plan: RingPlan
    ) -> torch.Tensor:
        """The state with the pending tokens in it, made by the engine's own op in scratch memory of the same form."""
        state, scratch_unit = self._states[layer], none + 1
        scratch = state.new_empty_strided((2, *state.shape[1:]), state.stride())
        ring = self._ring(layer, slots, plan)
        k, v = (pool[0, :0] for pool in (ring.kept.k, ring.own))
        ops.gdn(
            inputs=GdnInputs(k, k, v, v[..., 0], v[..., 0]),
            parts=(Part(
                form="window", begin=none, count=none, most=0, read=Address(state, slots), fresh=none.bool(),
                store=Address(scratch, scratch_unit), ring=ring,
            ),),
            dtype=k.dtype, to=Place("trunk", layer, "state"),
        )
        return taken(scratch[1], length=1)


RERUN = StrategySpec(Rerun.demands, Rerun)
