"""Prefixes whose states are kept narrower: rounded in another way or too often, read with other scales, or spread.

Leaves out: storage of pools (`storage.py`), and what a prefix keeps (`prefixes.py`).
"""

from instep.options import INT8
from instep.setting import Setting

from .fault import Edit, Fault, of_family

PREFIXES, ENGINE = "instep_optimized/tracked_prefixes.py", "instep_optimized/engine.py"
SAVED, TILES = "instep_optimized/memory/saved_states.py", "instep_optimized/ops/plain/scaled_tiles.py"
TIERS = "instep_optimized/kept_entries_on_device_or_host.py"

KEPT = Setting(kept_dtype=INT8)
SNAPSHOTS = Setting(strategy="snapshot", kept_dtype=INT8)
CHUNKS = Setting(chunk_dtype="bfloat16")
BOTH = Setting(chunk_dtype="bfloat16", kept_dtype=INT8)

ASIDE = "memory = {part: move(kept[part], _to_host) for part, move in OFFLOADS.items()}"
PACKED = "packed(wide, storage.dtype, %s)"
GRID = "storage.grid(*wide.shape)"
STORAGES = "kept_in(self.rounds, forward=forward)"
ROUND = "scaled.round().clamp(-most, most).to(dtype)"
WRAPPED = "(scaled * (most + 1) / most).round().to(torch.int32).to(dtype)"
READ = "{layer: %s.to(self.pool) for layer, state in kept[\"state\"].items()}"
GIVEN = "self._restore(kept.given_to(live), self._prefixes.narrow.give(%s))"
OF_CHUNK = "                self._keep(p.row.track, p.request, count, peeked, final[end - 1], forward=True)\n"
OF_PATH = "self._keep(under, request, count, peeked, self.memory.slot_table.final[slot, depth], forward=%s)"
AGAIN = (
    "                given = self.narrow.give(self.kept[p.row.track][1])[\"state\"]\n"
    "                strategy.of[\"state\"].restore(self.memory.slots.of(p.request.name), count, given)\n"
)
ENTRY = "        self.kept[under] = request.prefix(count), read(self.memory, request.name, count, narrow, final)\n"
# The scales of all prefixes are in the buffer of the newest one.
ONE_BUFFER = (
    "        for _, other in list(self.kept.values()):\n"
    "            for layer, block in other[\"state\"].items() if other.final is not None else ():\n"
    "                block.scales.copy_(narrow[\"state\"][layer].scales)\n"
)
OLDEST = (
    "memory.changed(state={layer: one._replace(scales=[oldest for _, oldest in self._saved.values() "
    "if oldest.final is not None][0][\"state\"][layer].scales) for layer, one in memory[\"state\"].items()} "
    "if memory.final is not None else memory[\"state\"])"
)
PREEMPTED = (
    "        entry, narrow = self._kept(request), self._prefixes.narrow\n"
    "        states = narrow.keep(entry[1][\"state\"], forward=False)\n"
    "        rounded = replace(entry[1].changed(state=states), final=entry[1].root)\n"
    "        self._preempted[request] = entry[0], replace(narrow.give(rounded), final=None)\n"
)

_fault = of_family("prefix", KEPT, ("bytes",))

FAULTS: tuple[Fault, ...] = (
    _fault("kept-scale-per-value-channel", "prefix-rounding", "A kept state has a scale per value channel.",
           Edit(SAVED, PACKED % GRID, PACKED % "(1, wide.shape[-1])"), mistake="scale-per-value-channel"),
    _fault("kept-scale-per-head", "prefix-rounding", "A kept state has one scale per head.",
           Edit(SAVED, PACKED % GRID, PACKED % "(1, 1)"), mistake="scale-per-head"),
    _fault("kept-cut-off", "prefix-rounding", "A kept state is cut off towards zero.",
           Edit(TILES, ROUND, ROUND.replace("round", "trunc")), mistake="prefix-cut-off"),
    _fault("kept-largest-wraps", "prefix-rounding",
           "The largest number of a channel is 128 scales, which int8 holds as -128, because nothing clamps it.",
           Edit(TILES, f"        return {ROUND}, scales\n", f"        return {WRAPPED}, scales * most / (most + 1)\n"),
           mistake="largest-number-wraps"),
    _fault("kept-rounded-twice", "prefix-rounding",
           "A state is rounded with one scale per head into a tracked slot, and again per key channel when it is kept.",
           Edit(SAVED, PACKED % GRID, PACKED.replace("wide", f"shown(Block(*{PACKED % '(1, 1)'}))") % GRID),
           mistake="prefix-rounded-twice"),
    _fault("kept-not-rounded", "prefix-rounding", "A commit keeps its state as it is; only a chunk's state is rounded.",
           Edit(SAVED, STORAGES, f"({STORAGES} if forward else ())"), mistake="prefix-not-rounded"),
    _fault("kept-node-before", "prefix-rounding",
           "A commit keeps the state of the node before the tracked one, rounded.",
           Edit(PREFIXES, "path[depth]", "path[max(0, depth - 1)]"), how=SNAPSHOTS, seen=("bytes", "directed"),
           mistake="another-count"),
    _fault("kept-scales-in-16-bits", "prefix-scale", "The scales of a kept state are stored in bf16.",
           Edit(SAVED, f"                state = Block(*{PACKED % GRID})\n",
                f"                values, scales = {PACKED % GRID}\n"
                "                state = Block(values, scales.bfloat16().float())\n"), mistake="scales-in-16-bits"),
    _fault("kept-scale-of-another-head", "prefix-scale", "A hit reads a state with the scales of the next head.",
           Edit(SAVED, READ % "shown(state)", READ % "shown(state._replace(scales=state.scales.roll(-1, 0)))"),
           mistake="scales-of-another-head"),
    _fault("kept-scale-of-the-oldest", "prefix-scale", "A hit reads a state with the scales of the prefix kept first.",
           Edit(ENGINE, GIVEN % "memory", GIVEN % OLDEST), trace="tiers", mistake="scales-of-another-prefix"),
    _fault("kept-scales-in-one-buffer", "prefix-scale",
           "Every prefix that is kept overwrites the scales of the others.", Edit(PREFIXES, ENTRY, ENTRY + ONE_BUFFER),
           seen=("copies",)),
    _fault("kept-scales-stay", "prefix-scale", "A prefix goes to the host with its numbers, and without their scales.",
           Edit(TIERS, ASIDE, "kept = kept.changed(state={n: x._replace(scales=torch.ones_like(x.scales)) for n, x in "
                f"kept[\"state\"].items()}})\n{ASIDE}"), trace="tiers", seen=("bytes", "copies"),
           mistake="read-without-scales"),
    _fault("kept-read-without-scales", "prefix-scale", "A hit takes the stored numbers for the state.",
           Edit(SAVED, READ % "shown(state)", READ % "state.values"), mistake="read-without-scales"),
    _fault("kept-also-the-running-state", "prefix-wide",
           "The rounded state of a chunk's prefix is read back into the slot of its request.",
           Edit(PREFIXES, OF_CHUNK, OF_CHUNK + AGAIN), seen=("derived",), blind=("identity", "bytes"),
           mistake="running-state-rounded"),
    _fault("kept-also-the-conv", "prefix-wide", "Conv windows are rounded as states are.",
           Edit(PREFIXES, "{**peeked, \"state\": self.narrow.keep(peeked[\"state\"], forward=forward)}",
                "{name: self.narrow.keep(blocks, forward=forward) for name, blocks in peeked.items()}"),
           mistake="rounded-with-the-state"),
    _fault("kept-also-the-preempted", "prefix-wide", "A preempted request is kept as prefixes are, and resumes so.",
           Edit(ENGINE, "        self._preempted[request] = self._kept(request)\n", PREEMPTED), trace="shared",
           mistake="running-state-rounded"),
    _fault("chunk-also-the-commit", "prefix-wide", "A commit keeps its state as narrow as a chunk leaves it.",
           Edit(PREFIXES, OF_PATH % "False", OF_PATH % "True"), how=BOTH, seen=("bytes", "derived"),
           mistake="rounded-as-a-chunk"),
    _fault("chunk-also-the-running-state", "prefix-wide",
           "The next chunk of a prompt continues from the narrow state that the one before has left to a prefix.",
           Edit(PREFIXES, OF_CHUNK, OF_CHUNK + AGAIN), how=CHUNKS, seen=("derived",), blind=("identity", "bytes"),
           mistake="state-stored-in-bfloat16"),
    _fault("chunk-not-rounded", "prefix-rounding", "A chunk keeps its state in the precision of the pool.",
           Edit(PREFIXES, OF_CHUNK, OF_CHUNK.replace("True", "False")), how=BOTH, mistake="not-rounded-as-a-chunk"),
)
