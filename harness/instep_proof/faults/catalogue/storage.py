"""Faults of narrow storage: scales of another tile or of an older store, and pools of two layouts.

Leaves out: memory that is stored narrower than declared (`numerics.py`).
"""

from dataclasses import replace

from instep.options import FP8
from instep.setting import Setting

from .fault import USUAL, Edit, Fault, of_family

TILES, MOVE = "instep_optimized/ops/plain/scaled_tiles.py", "instep_optimized/ops/plain/copy_units.py"
WINDOW = "instep_optimized/kernels/gdn_windows/token_by_token.py"
GDN, UNITS = "instep_optimized/ops/plain/gdn.py", "instep_optimized/memory/tiled_units.py"
SNAPSHOT, BUDGET = "instep_optimized/commit/snapshot.py", "instep_optimized/memory/budget.py"
NARROW = Setting(state_dtype=FP8)
SNAPSHOTS = Setting(strategy="snapshot", state_dtype=FP8)
CHANCE = Setting(state_dtype=FP8, state_rounding="stochastic:7")
SNAPSHOTS_BY_CHANCE = Setting(strategy="snapshot", state_dtype=FP8, state_rounding="stochastic:7")
ALONG = "        along(part.per_row, who, row, S, trail.depth(row, alive))\n"

_fault = of_family("rounds", CHANCE, blind=("identity", "bytes", "directed"))

FAULTS: tuple[Fault, ...] = (
    _fault("scale-of-neighbour", "scale-mixed", "A state is read with the scale of the neighbouring tile.",
           Edit.of(TILES, "opened(address.pool[at], address.scales[at]{ => .roll(1, -3)})"), how=NARROW,
           seen=("derived", "directed"), blind=()),
    _fault("scale-of-neighbour-kernel", "scale-mixed", "The kernel reads a state with the scale of the next head.",
           Edit.of(WINDOW, "scales_at(read, unit, tl.load(read.columns + request), {head => head ^ 1}, at_v, V)"),
           trace="short", how=Setting(ops="triton", state_dtype=FP8), seen=("derived", "directed"), blind=()),
    _fault("scale-not-committed", "scale-stale", "A commit copies the numbers of a state, and not their scales.",
           Edit(MOVE, "        target.scales[there] = source.scales[here]\n", "        pass\n"), trace="ragged",
           how=SNAPSHOTS, seen=("derived", "directed"), blind=()),
    _fault("scale-not-restored", "scale-stale", "A loaded state keeps the old scales of its slot.",
           Edit(UNITS, "            self.scales[at] = scales\n", "            pass\n"), trace="kept", how=NARROW,
           seen=("bytes", "poison"), blind=()),
    _fault("scale-of-the-page", "scale-stale", "The scale of a KV row is written for the whole page.",
           Edit(MOVE, "    put(Address(pool, spots, scales=scales), (spots // size, spots % size), rows[wanted])\n",
                "    put(Address(pool, spots, scales=scales), (spots // size, spots % size), rows[wanted])\n"
                "    if scales is not None:\n"
                "        scales[spots // size] = scales[spots // size, spots % size][:, None]\n"),
           how=Setting(kv_dtype=FP8), seen=("bytes", "tails"), blind=()),
    _fault("rounded-per-token", "rounded-twice",
           "A window rounds the state after each of its tokens, not at its commit.",
           Edit(GDN, ALONG, f"{ALONG}        state[:alive] = as_stored(part.read, S)\n"), how=SNAPSHOTS,
           seen=("derived", "own_inputs"), blind=(), mistake="stored-per-token"),
    _fault("chance-never-advanced", "chance-other", "Every state falls by the same numbers, whatever tokens are in it.",
           Edit.of(TILES, "uniforms(address.chance, {tokens => torch.zeros_like(tokens)}, tuple(x.shape[1:]))"),
           mistake="random-bits-of-another-length"),
    _fault("chance-to-nearest", "chance-other", "States are rounded to nearest, where chance is declared.",
           Edit(TILES, "    info, size = torch.finfo(dtype), x.abs()\n",
                "    if x.ndim:\n        return x.to(dtype)\n    info, size = torch.finfo(dtype), x.abs()\n"),
           mistake="rounded-to-nearest"),
    _fault("chance-of-the-batch-row", "chance-other",
           "The rounding of a state depends on the row of its request in the launch.",
           Edit.of(TILES, "uniforms(address.chance, tokens{ =>  + torch.arange(len(tokens))}, tuple(x.shape[1:]))"),
           mistake="random-bits-of-another-length"),
    _fault("chance-of-the-layer", "chance-other", "All layers fall by the numbers of the first one.",
           Edit("instep_optimized/memory/__init__.py", "Chance(seed, layer, self._first)", "Chance(seed, 0)"),
           mistake="random-bits-of-another-layer"),
    _fault("chance-of-the-depth", "chance-other",
           "The rounding of a snapshot depends on the number of nodes before its own, which differs between siblings.",
           Edit(GDN, "trail.depth(row, alive)", "row + 1"), trace="branching", how=SNAPSHOTS_BY_CHANCE,
           blind=("identity", "bytes"), mistake="random-bits-of-another-length"),
    _fault("chance-cut-off", "chance-other", "States in bf16 are cut off towards zero, where chance is declared.",
           Edit(TILES, "steps.floor() + (chance < steps - steps.floor())", "steps.floor()"),
           how=replace(CHANCE, state_dtype="bfloat16"), seen=("derived", "directed"), blind=("identity", "bytes"),
           mistake="truncated"),
    _fault("chance-of-every-head", "chance-other", "The kernel restarts the count of a state's elements in every head.",
           Edit(WINDOW, "(head.to(tl.int32) * K + tl.arange(0, KI)[None, None, None, :]) * V + tile_v",
                "tl.arange(0, KI)[None, None, None, :] * V + tile_v"), trace="short", how=replace(CHANCE, ops="triton"),
           mistake="random-bits-of-one-head"),
    _fault("chance-of-the-slot", "chance-other", "The rounding of a state after a prefill depends on its slot.",
           Edit("instep_optimized/kernels/gdn_prefill/load_and_store_state.py", "tl.load(before + request) + rows",
                "unit"), trace="short", how=replace(CHANCE, ops="triton", state_dtype="bfloat16"),
           mistake="random-bits-of-another-length", origin="flashinfer 2645, vllm 35753 (as made)"),
    _fault("chance-of-half-a-seed", "chance-other", "The kernel takes the lower word of a seed.",
           Edit("instep_optimized/kernels/device/stochastic_rounding.py", "_word(chance.seed >> 32)", "0"),
           trace="short", how=replace(CHANCE, ops="triton", state_rounding=f"stochastic:{(1 << 32) + 7}"),
           mistake="random-bits-of-half-a-seed"),
    _fault("chance-of-the-depth-kernel", "chance-other", "The same in a kernel: it counts rows for nodes.",
           Edit(WINDOW, "depth_of(parents, t) if TREE else t + 1", "t + 1"), trace="branching",
           how=replace(SNAPSHOTS_BY_CHANCE, ops="triton"), blind=("identity", "bytes"),
           mistake="random-bits-of-another-length"),
    _fault("turned-while-speculating", "state-transpose",
           "States are transposed when windows have drafts: the pool changes its layout, but its users do not know.",
           Edit(BUDGET, "self.layout == \"VK\"", "(self.layout == \"VK\") == (self.widest == 1)"), how=USUAL,
           seen=("capacity",), blind=(), origin="sglang, chunked prefill on NPU"),
    _fault("layouts-of-two-pools", "state-transpose",
           "A commit takes a snapshot to lie as the slots do, where snapshots have a layout of their own.",
           Edit(SNAPSHOT, "source=pair.snapshots.at(accepted.rows, accepted.nodes),",
                "source=(pair.snapshots if pair.slots.pool.ndim != 4 else Units(pair.snapshots.pool.as_strided(\n"
                "                    pair.snapshots.pool.shape, (*pair.snapshots.pool.stride()[:3],\n"
                "                                                *pair.slots.pool.stride()[2:]),\n"
                "                ))).at(accepted.rows, accepted.nodes),"), trace="ragged",
           how=Setting(strategy="snapshot", snapshot_layout="KV"), seen=("contracts", "directed", "derived"), blind=(),
           origin="sglang, chunked prefill on NPU"),
)
