"""Tracked prefixes: kept under a wrong count, with the wrong parts, or of another request; and given on wrongly.

Leaves out: copies of whole requests (`chunks.py`, `changed_answers.py`, `scheduling.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

PREFIXES, ENGINE = "instep_optimized/tracked_prefixes.py", "instep_optimized/engine.py"
SAVED = "instep_optimized/memory/saved_states.py"
PAIR, RERUN = (f"instep_optimized/commit/{name}.py" for name in ("strategy_pair", "rerun"))
MIXED, ROUND = (f"instep_optimized/{name}.py" for name in ("forwards", "round_for_step_count"))
LABELS, PLAIN = Setting(ops="ledger"), Setting()
BEGIN = "request.length.exact - len(final)"

COUNT = "after // every * every"
KEEP = ("                self._keep(under, request, count, peeked, self.memory.slot_table.final[slot, depth], "
        "forward=False)\n")
OTHER_FINAL = KEEP.replace("final[slot,", "final[self.memory.slots.of(verified[0].name),")
RESTORE = "        self._round.strategy.restore(self._memory.slots.of(name), length, memory)\n"
NO_CONV = (
    "        hit = memory.final is not None\n"
    "        conv = {layer: torch.zeros_like(x) if hit else x for layer, x in memory[\"conv\"].items()}\n"
)
PUT = "self.memory.units(name, layer).put((self.at[0][:count], self.at[1][:count]), rows)"
EXTEND = "forwards.extend_prefix(self._ops, self._model, self._requests[request], memory, steps)"

_fault = of_family("prefix", PLAIN, ("bytes",), blind=("identity", "directed"))

FAULTS: tuple[Fault, ...] = (
    _fault("prefix-boundary-missed", "prefix-count",
           "A multiple that the last accepted token reaches is taken for one that is not reached yet.",
           Edit(PREFIXES, COUNT, "(after - 1) // every * every"), how=LABELS, seen=("identity",), blind=(),
           mistake="step-missed"),
    _fault("prefix-count-of-the-request", "prefix-count",
           "A prefix is kept under the length that the request has then, not under the multiple that it crossed.",
           Edit(PREFIXES, COUNT, "after"), how=LABELS, seen=("identity",), blind=(), mistake="step-of-the-last-node",
           origin="vllm 43559"),
    _fault("prefix-state-newer-than-its-key", "prefix-state",
           "The ring is folded one token further than the prefix goes.",
           Edit(RERUN, "self.peek(ops, slot, length)", "self.peek(ops, slot, length + 1)"), seen=("directed",),
           blind=("identity", "bytes"), mistake="another-count"),
    _fault("prefix-of-the-last-node", "prefix-state",
           "A commit keeps the memory after the last accepted node, although the prefix ends before it.",
           Edit(PREFIXES, "path[depth]", "path[-1]"), how=Setting(strategy="snapshot"), seen=("bytes", "directed"),
           blind=("identity",), mistake="another-count"),
    _fault("prefix-conv-of-later-tokens", "prefix-lengths",
           "A prefix is kept with the state after its last token, and with the conv window after the whole path.",
           Edit(PAIR, "return {name: one.peek_node(*where) for name, one in self.of.items()}", "return {n: one.peek("
                "ops, slot, length) if n == \"conv\" else one.peek_node(*where) for n, one in self.of.items()}"),
           mistake="another-count"),
    _fault("prefix-without-conv", "prefix-component",
           "A request that continues from a prefix gets its state and its KV, and no conv windows.",
           Edit(ENGINE, RESTORE, NO_CONV + RESTORE.replace("memory)", "memory.changed(conv=conv))")), how=LABELS,
           seen=("bytes", "labels"), blind=("identity",)),
    _fault("prefix-without-draft-kv", "prefix-component",
           "The KV of the target is written back for a prefix, that of the draft head is not.",
           Edit(SAVED, PUT, f"{PUT} if not self.prefix or name in (\"keys\", \"values\") else None"), how=LABELS,
           seen=("bytes", "labels"), blind=("identity",)),
    _fault("prefix-keeps-the-last-draft-row", "prefix-draft-row",
           "A prefix is kept with the draft head's row of its last token, which was made of the donor's next token.",
           Edit(SAVED, "less * (1 + layer)", "less * layer")),
    _fault("prefix-last-draft-row-not-written", "prefix-draft-row",
           "A request that continues from a prefix lacks the draft head's row of the last token.",
           Edit(ENGINE, EXTEND, "self._memory.slot_table.length[self._memory.slots.of(request)].add_(1)"),
           seen=("identity",), blind=()),
    _fault("prefix-last-draft-row-of-its-own-token", "prefix-draft-row",
           "The draft head's row of the last token is paired with that token itself, not with the next one.",
           Edit(MIXED, BEGIN, f"{BEGIN} - 1"), seen=("derived",), blind=("identity",)),
    _fault("prefix-of-another-request", "prefix-owner",
           "In a batch of several the prefixes are all read out of the first request's pages.",
           Edit(PREFIXES, KEEP, KEEP.replace("request, count", "verified[0], count")), blind=("identity",),
           mistake="prefix-of-another-request"),
    _fault("prefix-final-row-of-another-request", "prefix-owner",
           "In a batch of several the final rows of all prefixes are taken from the first request's line.",
           Edit(PREFIXES, KEEP, OTHER_FINAL), blind=("identity",), mistake="final-row-of-another-request"),
    _fault("prefix-final-row-by-reference", "prefix-changed",
           "The final row of a prefix is a view of the slot table: the next verify writes it.",
           Edit(SAVED, "None if final is None else final.clone()", "final"), how=LABELS, seen=("copies",),
           blind=("identity",)),
    _fault("prefix-rows-as-of-one-layer", "prefix-layers",
           "A prefix keeps as many rows of every MTP layer as of the first one, computed from the donor's next tokens.",
           Edit(SAVED, "less * (1 + layer)", "less"), trace="shared"),
    _fault("prefix-lacks-a-row-of-a-layer", "prefix-layers", "A prefix keeps one row too few of the last MTP layer.",
           Edit(SAVED, "less * (1 + layer)", "less * (1 + layer + layer // 2)"), trace="shared"),
    _fault("prefix-extended-by-one-row", "prefix-layers",
           "A hit recomputes the last row of every MTP layer, but not the rows before it, as if there were one layer.",
           Edit(SAVED, 'max(1, len(memory.layers("draft_keys")))', "1"),
           Edit(MIXED, "torch.cat((*map(shown, kept[\"tail\"].values()), kept.final[None]))", "kept.final[None]"),
           trace="shared", seen=("identity",), blind=()),
    _fault("prefix-final-rows-one-token-late", "prefix-layers",
           "A commit keeps for every token the target's row of the token before: the next prefix has older rows.",
           Edit(ROUND, "keep_tail(ops, memory, batch, fed)", "keep_tail(ops, memory, batch, fed.roll(1, 0))"),
           trace="shared", mistake="rows-of-earlier-tokens"),
    _fault("prefix-final-rows-not-brought-back", "prefix-layers",
           "A request that was preempted comes back without the final rows of its last tokens.",
           Edit.of(SAVED, "units.put(there, kept[layer]{ =>  if self.prefix else units.rows(there)})"), trace="shared",
           seen=("bytes", "poison")),
)
