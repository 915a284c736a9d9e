"""Drafters: how far the draft head's memory is valid, several MTP layers, and drafts that are handed in.

Leaves out: what one head is fed and remembers within rounds (`draft.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

EAGLE, MTP, VANILLA = (f"instep_optimized/draft/{name}.py" for name in ("eagle", "mtp", "vanilla"))
ENGINE, ROUND = "instep_optimized/engine.py", "instep_optimized/round_for_step_count.py"
SAVED = "instep_optimized/memory/saved_states.py"

PUT = "            self.memory.units(name, layer).put((self.at[0][:count], self.at[1][:count]), rows)\n"
CLAIM = "        self._claim(request, kept.length.exact, kept.sampling)\n"
CHAINED = "            batch = windows(ops, memory, who, drafts[-1], \"draft\", 1, shift=step - 1)\n"
RUN = "        answer = self.layer(ops, fused, batch, stage)\n"
FED = "            fed = y if self.chained and number + 1 < num_steps else hidden\n"
NOTE = "                self._note(ops, draft, inputs.slots, step + 1)\n"
NOTED = "            drafts = tuple(inputs.forced[:, step] for step in range(inputs.forced.shape[1]))\n"


def _put(short: str) -> Edit:
    """Resume with `short` positions less of each pool."""
    return Edit(SAVED, PUT, f"            units, length = self.memory.units(name, layer), self.length\n"
                            f"            short = {short}\n"
                            "            units.put((self.at[0][:short], self.at[1][:short]), rows[:short])\n")


_fault = of_family("several", blind=("identity", "bytes"))

FAULTS: tuple[Fault, ...] = (
    _fault("draft-kv-shorter", "draft-validity",
           "A request comes back with draft KV up to the last whole block of 4 tokens, and all of the target's.",
           _put("length // 4 * 4 if name.startswith(\"draft\") else length"), seen=("bytes",),
           blind=("identity", "directed", "decisions")),
    _fault("draft-kv-of-another", "draft-validity",
           "A resumed request gets the target's KV back, and for the draft head what another one had saved.",
           Edit(ENGINE, CLAIM, f"{CLAIM}        for _, other in self._saved.values():\n"
                "            memory = memory.changed(**{n: other[n] for n in (\"draft_keys\", \"draft_values\")})\n"),
           trace="kept", how=Setting(ops="ledger"), seen=("labels", "bytes"), blind=()),
    _fault("draft-kv-hole", "draft-validity", "The head runs every row, and does not store the last one of a page.",
           Edit(MTP, RUN, "        from dataclasses import replace\n"
                "        kept = batch.locations.masked_fill(batch.positions % 8 == 7, -1)\n"
                "        answer = self.layer(ops, fused, replace(batch, locations=kept), stage)\n"),
           seen=("bytes", "poison"), blind=("identity", "directed")),
    _fault("draft-kv-seen-shorter", "draft-validity",
           "A draft chain sees the draft KV as if it were valid for one position less.",
           Edit(EAGLE, CHAINED, f"{CHAINED}            batch = replace(batch, before=batch.before - 1)\n"),
           trace="accepted", seen=("contracts", "derived"), blind=("identity", "bytes", "directed")),
    _fault("draft-kv-first-layer", "draft-validity", "Only the first one of three MTP layers has its KV restored.",
           _put("0 if name.startswith(\"draft\") and layer else length"), seen=("bytes",),
           blind=("identity", "directed")),
    _fault("layers-not-chained", "several-layers",
           "Every MTP layer reads the target's rows, where it should read those of the layer before.",
           Edit(VANILLA, FED, "            fed = hidden\n"), mistake="rows-of-another-layer", origin="sglang 22041"),
    _fault("layers-chained-at-fewer-steps", "several-layers",
           "A layer for which there is no step reads the layer before all the same, not the target's rows.",
           Edit(VANILLA, FED, "            fed = y if self.chained else hidden\n"), mistake="rows-of-another-layer",
           origin="sglang 22041"),
    _fault("layers-not-shifted", "several-layers", "Every MTP layer takes the tokens of the first one; each should "
           "take them one further on than the one before.",
           Edit(VANILLA, "            batch = replace(batch, tokens=tokens)\n", "            del tokens\n"),
           how=Setting(ops="ledger"), seen=("labels",)),
    _fault("handed-in-backwards", "handed-in", "A block that is handed in is taken with its last draft first.",
           Edit(ROUND, NOTED, NOTED.replace("[:, step]", "[:, -1 - step]")), trace="handed", how=Setting(ops="ledger"),
           seen=("identity",), blind=()),
    _fault("handed-in-not-noted", "handed-in",
           "The last supplied draft of a block is answered, but the window keeps its previous token.",
           Edit(ROUND, f"            for step, draft in enumerate(drafts):\n{NOTE}",
                f"            for step, draft in enumerate(drafts[:-1]):\n{NOTE}"), trace="handed",
           how=Setting(ops="ledger"), seen=("labels", "contracts"), blind=()),
)
