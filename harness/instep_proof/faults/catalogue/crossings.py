"""Prefixes of the wrong step of a window, and prefixes inside a chunk with the memory of another place.

Leaves out: prefixes that end with a chunk, and parts that a prefix lacks (`prefixes.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

PREFIXES, UNITS = "instep_optimized/tracked_prefixes.py", "instep_optimized/sampling_inputs.py"
MIXED, PARTS = "instep_optimized/forwards.py", "instep_optimized/commit/parts_of_chunks.py"
ENGINE = "instep_optimized/engine.py"
LABELS, PLAIN = Setting(ops="ledger"), Setting()

CLAIM, RELEASE = "        self._tiers.claim(second)\n", "        self._tiers.release(second)\n"
KEEP = ("                self._keep(under, request, count, peeked, self.memory.slot_table.final[slot, depth], "
        "forward=False)\n")
IN_PLACE = (
    "                older = [name for name, (record, memory) in self.kept.items() if record.name == request.name\n"
    "                         and memory.final is not None]\n"
    "                for name in older[-1:] if under not in self.kept else ():\n"
    "                    self._keep(name, request, count, peeked, self.memory.slot_table.final[slot, depth],"
    " forward=False)\n"
)
DROP = (
    "        for under in track:\n"
    "            self._saved.pop(under, None)\n"
)

NODES = "acceptance.accept_index.gather(1, depth.clamp(min=0)[:, None])[:, 0]"
TAKEN = "parts.taken(p.row.request, cut)"
RAN = "    rows = target(ops, batch, bound if parts is None else parts.bind(bound))\n"
BEFORE = "    before = {p.row.request: commit.peek(ops, memory.slots.of(p.row.request), p.begin) for p in plan}\n"
LAST_UNIFORMS = (
    "from msgspec.structs import replace\n"
    "last = globals().setdefault('_last', {})\n"
    "given = [last.get(row.request, row.uniforms) for row in rows]\n"
    "last.update({row.request: row.uniforms for row in rows if row.uniforms})\n"
    "rows = [replace(row, uniforms=(*(*old[:-1], *[0.0] * 99)[: len(row.uniforms) - 1], old[-1])) if row.uniforms else"
    " row for row, old in zip(rows, given)]"
)

_fault = of_family("crossing", LABELS, ("identity",), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("step-one-early", "tracked-step", "The tracked step is the one before the step that reaches the multiple.",
           Edit(PREFIXES, "after // every * every - before - 1", "after // every * every - before - 2"),
           mistake="step-one-off"),
    _fault("step-one-late", "tracked-step", "The tracked step is the one after the step that reaches the multiple.",
           Edit(PREFIXES, "after // every * every - before - 1", "after // every * every - before"),
           mistake="step-missed"),
    _fault("step-without-accept-index", "tracked-step",
           "The depth of the multiple is taken for the node of the tree, as if every window were a chain.",
           Edit(PREFIXES, NODES, "depth.clamp(min=0)"), mistake="step-by-depth"),
    _fault("step-by-the-whole-window", "tracked-step",
           "A crossing is decided by the upper bound, with all drafts accepted, and not by the accepted tokens.",
           Edit(PREFIXES, "(depth >= 0) & (named > 0)",
                "((before + acceptance.tokens.shape[1]) // every > before // every) & (named > 0)"),
           mistake="step-of-the-whole-window"),
    _fault("step-of-the-last-node", "tracked-step", "The tracked step is that of the last accepted node.",
           Edit(PREFIXES, NODES, "acceptance.last_correct_step_indices"), mistake="step-of-the-last-node"),
    _fault("second-slot-not-freed", "track-slot",
           "The slot that a commit takes for a window that may reach a multiple is not freed when it reaches none.",
           Edit(ENGINE, "        self._tiers.release(second)\n", ""), blind=("bytes",), mistake="track-slot-kept"),
    _fault("second-slot-by-the-accepted-tokens", "track-slot",
           "A slot is taken after the commit, only for the windows that have reached a multiple.",
           Edit(ENGINE, CLAIM, ""), Edit(ENGINE, RELEASE, RELEASE.replace(
               "release(second)", "claim([under for under in second if under in self._saved])")),
           blind=("bytes",), mistake="track-slot-not-taken"),
    _fault("in-place-although-there-is-a-slot", "track-slot",
           "A prefix is written in place, over the request's older one, although it has another slot.",
           Edit(PREFIXES, KEEP, IN_PLACE + KEEP), seen=("copies",), blind=("identity", "bytes")),
    _fault("in-place-before-it-is-reached", "track-slot",
           "The prefix that a window may replace is dropped before the window has reached a multiple.",
           Edit(ENGINE, CLAIM, DROP + CLAIM), seen=("copies", "identity"), blind=("bytes",)),
    _fault("inner-of-a-neighbour", "inner-prefix",
           "A prefix inside a chunk has the conv windows and states of the other request in the forward.",
           Edit(PARTS, "unit = self._units[request, cut]",
                "unit = next((u for (other, _), u in self._units.items() if other != request), 1)"), trace="inner",
           how=PLAIN, seen=("bytes", "directed"), blind=("identity",), mistake="window-of-another-request"),
    _fault("inner-of-the-next-multiple", "inner-prefix",
           "A prefix inside a chunk has the conv windows and states of another multiple in it.",
           Edit(PARTS, "unit = self._units[request, cut]",
                "unit = max(u for (other, _), u in self._units.items() if other == request)"), trace="inner", how=PLAIN,
           seen=("bytes", "directed"), blind=("identity",), mistake="another-count"),
    _fault("inner-conv-of-the-chunk-end", "inner-prefix",
           "A prefix inside a chunk has the states at its multiple, and the conv windows from the end of the chunk.",
           Edit(MIXED, TAKEN, f"{{**{TAKEN}, 'conv': commit.peek(ops, memory.slots.of(p.row.request), "
                "p.begin + p.span.count)['conv']}"), trace="inner", how=PLAIN, seen=("bytes",),
           blind=("identity", "directed"), mistake="another-count"),
    _fault("inner-state-of-the-chunk-start", "inner-prefix",
           "A prefix inside a chunk has the conv windows at its multiple, and the states from before the chunk.",
           Edit(MIXED, RAN, BEFORE + RAN),
           Edit(MIXED, TAKEN, f"{{**{TAKEN}, 'state': before[p.row.request]['state']}}"), trace="inner", how=PLAIN,
           seen=("directed", "derived"), blind=("identity", "bytes"), mistake="another-count"),
    _fault("inner-final-row-one-late", "inner-prefix",
           "A prefix inside a chunk has the final row of the token after its last one.",
           Edit(MIXED, "final[begin + cut - 1]", "final[begin + cut]"), trace="inner", how=PLAIN, seen=("bytes",),
           blind=("identity",), mistake="final-row-of-another-token"),
    _fault("inner-goes-on-from-the-chunk-start", "inner-goes-on",
           "The part of a chunk after a multiple begins with the memory before the chunk.",
           Edit(PARTS, "own if self.reads is None else between.at(self.reads)", "own"), trace="inner", how=PLAIN,
           seen=("contracts", "derived", "directed"), blind=("identity",)),
    _fault("inner-goes-on-fresh", "inner-goes-on",
           "The part of the first chunk after a multiple begins with zeros, as the chunk itself does.",
           Edit(PARTS, "fresh if self.reads is None else self.begun", "fresh"), trace="inner", how=PLAIN,
           seen=("derived", "directed"), blind=("identity", "contracts")),
    _fault("coins-of-the-last-round", "draw-coin",
           "A request draws with the coins of its last round, those of the length before.",
           Wrap(UNITS, "in_units", LAST_UNIFORMS), trace="inner", how=PLAIN, seen=("draws",),
           mistake="uniforms-of-the-round-before"),
)
