"""Memory that is not the request's own: reused, out of range, at another stride, or a copy of it.

Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import USUAL, Edit, Fault, of_family

SNAPSHOT, COLUMNS = "instep_optimized/commit/snapshot.py", "instep_optimized/commit/columns.py"
RERUN, BUDGET = "instep_optimized/commit/rerun.py", "instep_optimized/memory/budget.py"

_fault = of_family("wider", Setting(ops="ledger"), ("capacity",), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("dirty-slot", "dirty-slot", "A first chunk takes the old contents of its slot as the request's own.",
           Edit("instep_optimized/forwards.py", "fresh=prefill and not begin", "fresh=False"),
           trace="ragged", how=Setting(strategy="snapshot"), seen=("poison", "derived"), origin="vllm 35219"),
    _fault("dirty-slot-mark", "dirty-slot", "The mark of a slot is not reset when another request is given the slot.",
           Edit(COLUMNS, "    def claim(self, slot: int) -> None:\n        self._marks.put(slot, 0)",
                "    def claim(self, slot: int) -> None:\n        return"),
           how=Setting(ops="ledger", strategy="columns"), seen=("contracts", "serves"), origin="vllm 35219"),
    _fault("caller-stride-snapshot", "caller-stride",
           "A verify takes the row stride of its snapshots from the step count in force, the commit from the pool.",
           Edit(SNAPSHOT, "            per_row=self.snapshots.at(group.rows) if verify else None,\n",
                "            per_row=Units(self.snapshots.pool.as_strided(self.snapshots.pool.shape, (\n"
                "                self.snapshots.pool.shape[1] * self.snapshots.pool.stride(1),\n"
                "                *self.snapshots.pool.stride()[1:],\n"
                "            ))).at(group.rows) if verify else None,\n"), how=Setting(strategy="snapshot"),
           seen=("contracts", "tails"), origin="sglang 23331"),
    _fault("caller-stride-columns", "caller-stride",
           "Slots are read and written at the stride of the step count in force; the pool is wider.",
           Edit(COLUMNS, "        own = columns.at(group.slots, column)\n", "        pool = columns.pool\n"
                "        own = Units(pool.as_strided(pool.shape, (\n"
                "            pool.stride(0) - pool.stride(1) * (pool.shape[1] - self._width), *pool.stride()[1:],\n"
                "        ))).at(group.slots, column)\n"), how=Setting(ops="ledger", strategy="columns"),
           seen=("bytes", "labels", "contracts"), origin="sglang 23331"),
    _fault("caller-stride-kernel", "caller-stride",
           "The launcher of the recurrence makes the row stride of the snapshots from the window's width.",
           Edit.of("instep_optimized/kernels/gdn_windows/token_by_token.py", "*({States.of(one, part.read) => (lambda "
                   "found: found._replace(per_unit=part.most * found.per_column) if one is part.per_row else "
                   "found)(States.of(one, part.read))} for one in (part.read, part.store, part.settled, "
                   "part.per_row))"), trace="short", how=Setting(ops="triton", strategy="snapshot"),
           seen=("bytes", "tails"), origin="sglang 23331"),
    _fault("caller-stride-ring", "caller-stride",
           "Entries of the ring are counted modulo the window in force, where the ring has room for the widest.",
           Edit(RERUN, "size=self._size,\n            most=group.most, spare=self._spare,",
                "size=2 * group.most,\n            most=group.most, spare=self._spare,"), how=USUAL, seen=("tails",),
           blind=("identity", "derived")),
    _fault("pool-initial-steps", "pool-initial-steps",
           "Pools are as wide as the first step count needs, not the widest.",
           Edit.of("instep_optimized/engine_from_checkpoint.py",
                   "options.layout, capacity, capacity.widest({max(candidates) => sorted(candidates)[-2]}),"),
           origin="sglang 23331"),
    _fault("budget-initial-steps", "budget-initial-steps",
           "The memory budget counts the windows of the first step count; the pools have those of the largest one.",
           Edit("instep_optimized/engine.py",
                "partial(budget, config, ops, options, capacity, self._controller.candidates)",
                "partial(budget, config, ops, options, capacity, (self._controller.initial,))"),
           origin="sglang 0.5.14 to 0.5.23: _handle_max_mamba_cache"),
    _fault("one-slot-too-few", "one-slot-too-few", "State pools have as many units as the highest slot's number.",
           Edit.of(BUDGET, 'component, "slot", config.keeping(component), max(sizes.capacity.slots){ + 1 => },'),
           trace="accepted", seen=("capacity", "serves"), origin="sglang 37066"),
    _fault("one-row-too-few", "one-slot-too-few", "Snapshots have one row less than a batch can have requests.",
           Edit.of(BUDGET, "units={first => first - 1} + len(sizes.capacity.slots)"), trace="graphs",
           how=Setting(ops="ledger", strategy="snapshot"), origin="sglang 37066"),
    _fault("narrow-offset", "int32-offset",
           "Places of KV rows are computed in 16 bits, as 32 bits would be in a pool that is 65536 times as long.",
           Edit("instep_optimized/ops/plain/copy_units.py", "    spots = locations[wanted]\n",
                "    spots = locations[wanted].to(torch.int16).long()\n"), trace="far", seen=("bytes", "labels"),
           origin="flashinfer 3230"),
    _fault("narrow-offset-kernel", "int32-offset",
           "The kernel of the recurrence computes where a slot begins in 16 bits, for the same reason.",
           Edit.of("instep_optimized/kernels/gdn_windows/token_by_token.py", "source = {state_of(read, unit, "
                   "tl.load(read.columns + request), head) => read.pool + (unit * read.per_unit & 0xFFFF) + "
                   "tl.load(read.columns + request) * read.per_column + head * read.per_head}"), trace="far",
           how=Setting(ops="triton"), seen=("poison", "derived"), origin="flashinfer 3230"),
    _fault("stride-blind-move", "stride-blind", "The copy kernel assumes that slots are packed.",
           Edit.of("instep_optimized/kernels/rowwise/copy_units.py",
                   "return pool, address.units, address.units, {pool.stride(0) => math.prod(pool.shape[1:])}, 0"),
           trace="short", how=Setting(ops="triton", strategy="snapshot"), seen=("bytes",), origin="sglang 12335"),
    _fault("lost-write", "lost-write", "A prefill chunk stores its state into a contiguous copy of the pool.",
           Edit("instep_optimized/ops/plain/gdn.py", "from typing import Literal, NamedTuple\n",
                "from dataclasses import replace\nfrom typing import Literal, NamedTuple\n"),
           Edit("instep_optimized/ops/plain/gdn.py", "    after(part.store, who, state)\n", "    store = part.store\n"
                "    if part.form == \"chunk\" and store is not None:\n"
                "        store = replace(store, pool=store.pool.contiguous())\n"
                "    after(store, who, state)\n"), trace="rounds", how=USUAL, seen=("poison", "directed", "derived"),
           origin="chunk prefill"),
    _fault("row-for-slot", "row-for-slot", "A verify keeps its tokens in the ring of its batch row, not of its slot.",
           Edit.of(RERUN, "ring=None if chunk else self._ring(layer, group.{slots => rows}, plan),"), trace="accepted",
           seen=("bytes", "contracts")),
)
