"""The draft head: what it is fed, and what it remembers.

Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import Edit, Fault, Wrap, of_family

EAGLE, EXTEND, MTP = (f"instep_optimized/draft/{name}.py" for name in ("eagle", "proposal_after_extend", "mtp"))
ROUND, MIXED = "instep_optimized/round_for_step_count.py", "instep_optimized/forwards.py"

# The prompt's rows reach the head as the last layer left them; rounds use them after the final norm.
PRE_NORM = (
    Edit.of("instep_optimized/model/trunk.py",
            'hidden.normed(ops, self.norm, self.eps, Place(STAGE, AFTER_LAYERS, "final")){.normed => }'),
    Edit.of("instep_optimized/model/trunk.py", "TargetRows({final, features => final.normed, final.total})"),
    Edit.of(ROUND, "self._extend(ops, inputs.who(), chosen, rows.{fed => final}, 1)"),
)
CHAIN = (
    "            hidden = self.mtp.rows(ops, hidden, batch, stage)\n"
    "            own.append(self.mtp.pick(ops, hidden, stage))\n"
)
NOT_CHAINED = Edit(
    EAGLE, CHAIN,
    "            y = self.mtp.rows(ops, hidden, batch, stage)\n            own.append(self.mtp.pick(ops, y, stage))\n",
)
# The head begins its chain on the target's row after the root, not on its own.
TARGETS_ROW = Edit.of(EAGLE, "hidden = ops.select(x=memory.slot_table.{proposed => final[:, 0]}, index=who.slots)")
# If every request has one row, nothing is gathered, and rows to gather are not kept either.
STALE = Edit(EXTEND, "not number", "not number and len(y) > len(asked.last)")
# The last rows of packed requests; but a window's rows are a window apart.
PACKED_ROWS = Edit.of(ROUND, "asked = (PickRows(batch.{last => count.cumsum(0) - 1}, who.slots),) * drafter.layers")
# Right for the widest window of pools that are not guarded.
ROW_STRIDE = Edit(
    ROUND, "            fed = ops.select(x=kept[:, :width], index=inputs.slots).flatten(0, 1)\n",
    "            slots, _, wide = slot_table.final.shape\n"
    "            rows = slot_table.final.as_strided((slots, width, wide), (width * wide, wide, 1))\n"
    "            fed = ops.select(x=rows, index=inputs.slots).flatten(0, 1)\n",
)
NO_EXTEND_AT_ZERO = Edit(
    ROUND, "        self._extend(ops, inputs.who(), chosen, rows.fed, 1)\n",
    "        if self.num_steps:\n            self._extend(ops, inputs.who(), chosen, rows.fed, 1)\n",
)
LAST_ROW_MISSING = Edit.of(ROUND,
                           "who = replace(inputs.who(), count=acceptance.accept_lens{ => .clamp(max=self.num_steps)})")
PADDED_TOKEN = Edit.of(MIXED,
                       "return torch.cat([known, root]) if planned.rooted else {known => torch.cat([known[:-1], "
                       "known[:1] * 0])}")
NOT_SHIFTED = Edit.of(MIXED, "planned.request.tokens[planned.begin {+ 1 : planned.begin + planned.span.count + 1 => : "
                      "planned.begin + planned.span.count - int(planned.rooted)}]")
FURTHER_ON = Edit(EAGLE, "shift=step - 1", "shift=step")
OWN_DRAFTS = Edit(EAGLE, "who, drafts[-1], \"draft\"", "who, own[-1], \"draft\"")
HIDDEN_FIRST = Edit("instep_optimized/ops/fused.py", "x=left, y=right", "x=right, y=left")
# The head's layer count and kinds are written into the configuration that it was given, and that others hold too.
ALIASED_KINDS = Wrap(
    MTP, "MtpLayer.all", "object.__setattr__(config, \"layers\", config.drafter().layers)"
)
ALIASED_EPS = Wrap(MTP, "MtpLayer.all", "object.__setattr__(config, \"eps\", 1e-5)")

_fault = of_family("accepted", blind=("identity", "bytes", "directed"))

FAULTS: tuple[Fault, ...] = (
    _fault("mtp-hidden-pre-norm", "mtp-hidden",
           "After a prompt the head reads the target's rows before the final norm.", *PRE_NORM,
           mistake="rows-before-the-norm", origin="vllm 36531"),
    _fault("mtp-hidden-not-chained", "mtp-hidden", "Every step of a draft chain reads the head's row of the first one.",
           NOT_CHAINED, blind=("identity", "bytes"), mistake="row-of-another-step", origin="sglang 22041"),
    _fault("mtp-hidden-not-chained-labels", "mtp-hidden",
           "Every step of a draft chain reads the head's row of the first one, seen in labels.", NOT_CHAINED,
           how=Setting(ops="ledger"), seen=("labels",), blind=("identity", "bytes"), origin="sglang 22041"),
    _fault("mtp-hidden-targets-row", "mtp-hidden",
           "A draft chain begins on the target's row of the window's root, not on the head's own after draft 1.",
           TARGETS_ROW, seen=("poison", "derived"), blind=("identity", "bytes"), origin="vllm 36531"),
    _fault("mtp-hidden-stale", "mtp-hidden",
           "After a plain step the head's row after draft 1 is that of the round before.", STALE, trace="rounds",
           seen=("bytes",), blind=("identity", "directed"), origin="sglang 22041"),
    _fault("mtp-hidden-packed-rows", "mtp-hidden",
           "After a commit draft 1 is picked from row sum(accept_lens) - 1, although rows are a window apart.",
           PACKED_ROWS, seen=("bytes", "derived"), blind=("identity", "directed"), origin="vllm 36531"),
    _fault("mtp-hidden-row-stride", "mtp-hidden",
           "A commit reads the verified rows with a stride made from the step count, not with the pool's own.",
           ROW_STRIDE, seen=("poison", "derived"), blind=("identity", "directed"), origin="vllm 36531"),
    _fault("draft-kv-behind-at-zero-steps", "draft-kv",
           "While the step count is 0 nothing is drafted, and the draft head does not take in what is decoded.",
           NO_EXTEND_AT_ZERO, trace="steps", seen=("identity",), blind=("directed",)),
    _fault("draft-kv-behind-at-zero-steps-labels", "draft-kv",
           "While the step count is 0 the draft head does not take in what is decoded, seen in labels.",
           NO_EXTEND_AT_ZERO, trace="steps", how=Setting(ops="ledger"), seen=("identity", "labels"), blind=()),
    _fault("draft-kv-last-row", "draft-kv",
           "After full acceptance the last accepted position's row is missing from the draft KV.", LAST_ROW_MISSING,
           seen=("identity",), blind=("directed",)),
    _fault("draft-prefill-padded-token", "draft-prefill",
           "The last row of an unfinished chunk is paired with token 0, not with the prompt's next one.", PADDED_TOKEN,
           trace="rounds", how=Setting(ops="ledger"), seen=("labels",), blind=("identity",)),
    _fault("draft-prefill-not-shifted", "draft-prefill",
           "After a prompt, row p of the head is paired with token p, not with token p + 1.", NOT_SHIFTED,
           blind=("identity", "directed")),
    _fault("draft-chain-position", "draft-chain", "Every step of a draft chain runs one position too far on.",
           FURTHER_ON, seen=("contracts", "derived"), blind=("identity", "directed")),
    _fault("draft-chain-own-drafts", "draft-chain",
           "A draft chain continues from the head's own picks although others are in use.", OWN_DRAFTS,
           how=Setting(ops="ledger"), seen=("labels",), blind=("identity", "bytes")),
    _fault("draft-hidden-first", "draft-input",
           "The head's input is joined with the hidden row first, where its fc expects the embedding first.",
           HIDDEN_FIRST),
    _fault("config-alias-kinds", "config-alias",
           "Making the draft head writes its layer kinds into the configuration that the target holds too.",
           ALIASED_KINDS, seen=("aliasing",), blind=(), origin="sglang 23330"),
    _fault("config-alias-eps", "config-alias",
           "Making the draft head changes the norms' epsilon in the configuration that everybody holds.", ALIASED_EPS,
           seen=("aliasing",), blind=(), origin="sglang 23330"),
)
