"""The `rerun` strategy: a verify stores no state after its rows; the next step runs the accepted tokens again.

For each token a verify keeps, in a ring, either the change that the token makes to the state (its update), or the
inputs of the delta rule: the op set declares which (`Ops.keeps`). Keys and updates may be split into two parts of 16
bits (`Options.ring`). The next step first runs the accepted tokens again, then its own rows. Leaves out: the
arithmetic, which is the per-token body of decode in the `gdn` op. Traffic per layer and request: 2 states, whatever the
window. A commit of chains writes nothing: the number of accepted tokens follows from the request's length.
"""

from collections.abc import Mapping

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place

from ..memory import Memory
from ..memory.budget import Sizes, mark, ring_pools, rings, units
from ..memory.pool import Demand
from ..memory.tiled_units import Copied
from ..memory_addresses import KEPT, Inputs, Keeps, Part, Ring, SplitUpdates
from ..ops.integer_op_protocols import RingPlan
from ..ops.op_protocols import GdnInputs, Ops
from ..packed_batch import Batch, Group
from ..transfer.to_device import sent
from .base import AcceptedWindows, BoundStrategy, StrategySpec, Table, Which, printed
from .slot_marks import Marks

SETTLED = "settled"

_SETTLES: Table = {action: {"state": "slot", SETTLED: "slot"} for action in ("prefill", "decode", "restore")}


def may_change(keeps: Keeps, *, trees: bool = False) -> Table:
    """Table of writes: the slot's state, its mark, and the pools of its ring."""
    ring: Mapping[str, Which] = dict.fromkeys(ring_pools(keeps), "slot")
    everything: Table = {"release": {"state": "slot", SETTLED: "slot", **ring}}
    commit: Table = {"commit": ring if trees else {}}
    return {"claim": {SETTLED: "slot"}, **_SETTLES, "verify": everything["release"], **commit, **everything}


MAY_CHANGE = may_change("update")


class Rerun:
    __doc__ = f"""Addresses of the rerun strategy.

    The slot holds the state after the first `settled` tokens; `settled` is the mark. The tokens from there to the
    request's length are *pending*: committed, but not yet in the state. They are in the slot's ring, each in the
    entry position % size. Example: length 10, settled 8, 8 entries: tokens 8 and 9 are pending, in entries 0 and 1.

    A verify runs the pending tokens again, stores the resulting state, and keeps its own rows in the ring.
    Rejected rows come after the request's length, so they are never pending, and later rows overwrite them. A decode
    runs the pending tokens again and stores the state after its own row. So nothing else has to be done when
    speculation ends (`num_steps` 0). Save and preempt take the folded state of `peek`. A restored request has no
    pending tokens.

    The ring has room for two of the widest windows: a program of another head may still read pending entries while new
    entries are written. (The updates have room for one window: a program reads only updates that it wrote itself.)
    For the same reason a window may be narrower or wider than the one before it.

    A node of a tree is kept in a separate entry, (length + node) % size. A commit moves the entries of the accepted
    path to the places of the tokens that they become. Only for trees does a commit write the ring.
    Writes that an event may make (units in brackets) with updates; the pools of inputs have other names:
{printed(MAY_CHANGE)}
    """

    def __init__(self, config: ModelConfig, sizes: Sizes, memory: Memory, width: int) -> None:
        trees, self._kind = sizes.capacity.trees, config.recurrence
        self.may, names = may_change(sizes.keeps, trees=trees), ring_pools(sizes.keeps)
        self._marks, self._size = Marks(memory[SETTLED].units(0)), self.ring_size(sizes.widest)
        self._spare = self.spare(self._size, width, sizes.widest)
        self._states = {layer: memory.units("state", layer) for layer in memory.layers("state")}
        self._rings = {
            layer: KEPT[sizes.keeps](*(memory[name].units(layer) for name in names)) for layer in self._states
        }

    @classmethod
    def demands(cls, config: ModelConfig, sizes: Sizes) -> tuple[Demand, ...]:
        kept = rings(config, sizes, cls.ring_size(sizes.widest), cls.own_entries(sizes.widest))
        return units("state", config, sizes), *kept, mark(SETTLED, sizes)

    @staticmethod
    def ring_size(widest: int) -> int:
        """Number of entries per slot: one window of pending tokens and one new window."""
        return 2 * widest

    @staticmethod
    def own_entries(widest: int) -> int:
        """Number of entries of the pool of updates (or values): one window, read by its own writer."""
        return widest

    @staticmethod
    def spare(size: int, width: int, widest: int) -> int:
        """Number of old tokens that a verify may leave pending: 0, as it always replays and stores that state."""
        return 0

    def bind(self, ops: Ops, batch: Batch) -> BoundStrategy:
        plans = [(group, self._plan(ops, group)) for group in batch.groups]

        # The marks move after the last layer: all layers share one plan, which uses the old marks.
        def ran(ops: Ops) -> None:
            for group, plan in plans:
                self._marks.write(ops, group.slots, plan.after)

        return BoundStrategy(lambda layer: tuple(self._part(layer, group, plan) for group, plan in plans), ran)

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        """Move nothing for chains: the length grows by the accepted tokens, so exactly these are pending.

        The pools of a ring have two sizes, and each needs a separate plan: an entry is taken modulo the number of
        entries.
        """
        if accepted.path is None:
            return
        pools = [pool for ring in self._rings.values() for pool in ring]
        plans = {
            size: ops.plan_path(accept_index=accepted.path, slots=accepted.slots, before=accepted.before, size=size)
            for size in sorted({pool.shape[1] for pool in pools})
        }
        for pool in pools:
            ops.move_rows(pool=pool, source=plans[pool.shape[1]].source, target=plans[pool.shape[1]].target)

    def peek(self, ops: Ops, slot: int, length: int) -> dict[int, Copied]:
        if not length or self._marks.of(slot) == length:  # nothing is pending: the slot holds the state itself
            return {layer: state.taken(slot, length=length) for layer, state in self._states.items()}
        # Some tokens are pending: launch without rows, so that only the pending tokens run, into scratch memory.
        slots, before = sent([[slot], [length]], self._marks.at.device)
        none = slots.new_zeros(1)
        plan = self._absorbed(ops, slots, before, none, most=0)
        return {layer: self._folded(ops, layer, slots, before, none, plan) for layer in self._states}

    def peek_node(self, ops: Ops, slot: int, length: int, row: int, node: int) -> dict[int, Copied]:
        # The ring has the accepted tokens in the order of their positions: those up to `length` are folded.
        return self.peek(ops, slot, length)

    def restore(self, slot: int, length: int, units: Mapping[int, Copied]) -> None:
        self._marks.put(slot, length)  # all tokens are in the state: nothing is pending
        if length:
            for layer, state in self._states.items():
                state.put((slot,), units[layer])

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
        """Plan rows that are committed at once (prefill, decode, a fold): pending tokens first, then the rows.

        All go into the state. The rows are not kept in the ring, so a chunk may be longer than the ring.
        """
        return ops.plan_ring(
            slots=slots, before=before, count=count, settled=self._marks.at, size=self._size,
            most=min(most, self._size), spare=None,
        )

    def _part(self, layer: int, group: Group, plan: RingPlan) -> Part:
        state = self._states[layer]
        own = state.at(group.slots)
        # A verify stores only the state before its rows (`settled`); prefill and decode store the one after them.
        # A prefill has no ring: nothing can be pending before the first verify.
        verify, chunk = group.kind == "verify", group.kind == "prefill"
        return group.part(
            own,
            store=None if verify else own,
            ring=None if chunk else self._ring(layer, group.slots, plan),
            settled=state.at(plan.settle) if verify else None,
        )

    def _ring(self, layer: int, slots: torch.Tensor, plan: RingPlan) -> Ring:
        return Ring(self._rings[layer], slots, plan.begin, plan.pending, plan.keep)

    def _folded(
        self, ops: Ops, layer: int, slots: torch.Tensor, before: torch.Tensor, none: torch.Tensor, plan: RingPlan
    ) -> Copied:
        """Return the state with the pending tokens in it, computed by the engine's own op in scratch memory."""
        state = self._states[layer]
        scratch = state.scratch(2)  # unit 0 is reserved in every pool, so the result goes to unit 1 of two
        ring = self._ring(layer, slots, plan)
        # No rows, with the dtypes and widths of rows. The parts of a split ring are narrower than rows.
        wide = ring.kept.decay.dtype if isinstance(ring.kept, SplitUpdates) else None
        gate = ring.kept.log_decay if isinstance(ring.kept, Inputs) else ring.kept.decay
        k, v, decay = (pool[0, :0].to(wide or pool.dtype) for pool in (ring.kept.k, ring.own, gate))
        ops.recurrence(self._kind)(
            inputs=GdnInputs(k, k, v, decay, v[..., 0]),
            parts=(Part(
                form="window", begin=none, count=none, most=0, read=state.at(slots), fresh=none.bool(),
                store=scratch.at(none + 1), ring=ring, before=before,
            ),),
            dtype=k.dtype, to=Place("trunk", layer, "state"),
        )
        return scratch.taken(1)


RERUN = StrategySpec(Rerun.demands, Rerun)
