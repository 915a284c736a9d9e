"""Rejected drafts that leave traces: the memory of a request after a commit is not that of the accepted node.

Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import USUAL, Edit, Fault, of_family

ROUND, PLAIN_GDN = "instep_optimized/round_for_step_count.py", "instep_optimized/ops/plain/gdn.py"
SNAPSHOT, COLUMNS = "instep_optimized/commit/snapshot.py", "instep_optimized/commit/columns.py"
RERUN, LAZY_RERUN = "instep_optimized/commit/rerun.py", "instep_optimized/commit/lazy_rerun.py"

ACCEPTED_WINDOWS = "inputs.rows, inputs.slots, acceptance.last_correct_step_indices, acceptance.accept_lens,"
ACCEPTED = "source=pair.snapshots.at(accepted.rows, accepted.nodes),"
RING = "ring=None if chunk else self._ring(layer, group.slots, plan),"

# Room for the updates of two windows, too: else what is pending for longer than it should be is overwritten there.
WIDE_UPDATES = Edit(RERUN, "        return widest\n", "        return 2 * widest\n")


def _node(what: str) -> Edit:
    """The commit hands on another node than the accepted one."""
    return Edit(ROUND, ACCEPTED_WINDOWS, ACCEPTED_WINDOWS.replace("acceptance.last_correct_step_indices", what))


_fault = of_family("ragged", Setting(strategy="snapshot"), ("bytes", "directed"), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("commit-index-minus-one", "commit-index", "The commit takes the state one token before the accepted node.",
           _node("(acceptance.last_correct_step_indices - 1).clamp(min=0)"), mistake="another-count",
           origin="sglang 25029"),
    _fault("commit-index-plus-one", "commit-index",
           "The number of accepted tokens serves as the index of the last one.",
           _node("acceptance.accept_lens.clamp(max=self.num_steps)"), mistake="another-count", origin="sglang 25029"),
    _fault("commit-index-last", "commit-index", "The commit takes the state of the last node, whatever was accepted.",
           _node("inputs.width - 1"), mistake="another-count", origin="sglang 25029"),
    _fault("commit-index-column-zero", "commit-index", "The commit takes column 0 of the snapshots, the root's.",
           Edit(SNAPSHOT, ACCEPTED, "source=Units(pair.snapshots.pool[:, 0]).at(accepted.rows),"),
           mistake="another-count", origin="sglang 25029"),
    _fault("commit-index-offset", "commit-index",
           "The mark of a widened conv line is the number of accepted tokens, one further than the accepted window.",
           Edit.of(COLUMNS, "self._marks.write(ops, accepted.slots, accepted.{nodes => lens})"),
           how=Setting(conv="widened"), seen=("bytes",), blind=("directed",), mistake="another-count",
           origin="sglang 25029"),
    _fault("zero-accept-skipped", "zero-accept", "The commit skips a request none of whose drafts is accepted.",
           Edit(ROUND, ACCEPTED_WINDOWS, ACCEPTED_WINDOWS.replace(
               "inputs.slots", "torch.where(acceptance.num_correct_drafts > 0, inputs.slots, -1)")),
           mistake="another-count", origin="vllm 56419"),
    _fault("zero-accept-wraps", "zero-accept",
           "The index of no accepted draft, -1, is not clamped: it is the last column.",
           _node("torch.where(acceptance.num_correct_drafts > 0, acceptance.last_correct_step_indices, -1)"),
           mistake="another-count", origin="vllm 56419"),
    _fault("unwritten-snapshot", "unwritten-snapshot", "Snapshots begin with the first draft: after a full rejection "
           "the commit takes the root's, which is not there.",
           Edit.of(PLAIN_GDN, "along(part.per_row{ =>  if row else None}, who, row, S, trail.depth(row, alive))"),
           seen=("poison", "directed", "derived"), origin="llama.cpp 28466"),
    _fault("conv-no-rollback", "conv-no-rollback",
           "The conv window is taken after the whole window, rejected drafts too.",
           Edit(SNAPSHOT, ACCEPTED, "source=pair.snapshots.at(\n                    accepted.rows, accepted.nodes if "
                "self.component == \"state\" else accepted.nodes * 0 + pair.snapshots.pool.shape[1] - 1,\n"
                "                ),"), how=USUAL, seen=("bytes",), blind=("directed",), mistake="another-count",
           origin="vllm 50272"),
    _fault("path-handover-column-zero", "path-handover",
           "A plain step reads column 0, as if the round before had accepted the root alone.",
           Edit(COLUMNS, "own, store=None if verify else own,", "own if group.kind != \"decode\" else "
                "columns.at(group.slots, column * 0),store=None if verify else own,"), trace="rounds",
           how=Setting(strategy="columns"), seen=("derived", "directed"), mistake="previous-step-in-part",
           origin="vllm 39273"),
    _fault("path-handover-pending", "path-handover",
           "A plain step does not run again what is pending from the round before.",
           Edit(RERUN, RING, "ring=self._ring(layer, group.slots, plan) if verify else None,"), trace="rounds",
           how=USUAL, seen=("derived", "directed"), mistake="previous-step-lost", origin="vllm 39273"),
    _fault("scratch-replay-state", "scratch-replay", "Accepted tokens are run again on an empty state.",
           Edit.of(PLAIN_GDN, "S = state[owing]{ =>  if age else torch.zeros_like(state[owing])}"), how=USUAL,
           seen=("directed",), mistake="from-zero", origin="rMLX 436"),
    _fault("scratch-replay-kv", "scratch-replay", "Accepted tokens go through the draft head again with an empty KV.",
           Edit(ROUND, "            batch = windows(ops, memory, who, tokens, \"draft\", width)\n",
                "            batch = windows(ops, memory, who, tokens, \"draft\", width)\n"
                "            batch = replace(batch, table=torch.full_like(batch.table, -1))\n"), how=USUAL,
           seen=("contracts", "derived"), origin="rMLX 436"),
    _fault("positional-arguments-slots", "positional-arguments",
           "Snapshot rows and slots are swapped in the state update.",
           Edit.of(ROUND, "inputs.{rows, inputs.slots => slots, inputs.rows}, acceptance.last_correct_step_indices"),
           trace="graphs", how=Setting(ops="ledger", strategy="snapshot"), seen=("bytes", "labels", "contracts"),
           origin="sglang 25029"),
    _fault("positional-arguments-ring", "positional-arguments",
           "The start and the number of the pending tokens are swapped in the ring of a launch.",
           Edit(RERUN, "slots, plan.begin, plan.pending, plan.keep", "slots, plan.pending, plan.begin, plan.keep"),
           how=USUAL, seen=("poison", "derived"), origin="sglang 25029"),
    _fault("pending-twice", "pending-count",
           "A verify stores the state after the pending tokens, and its mark stays: they are pending once more.",
           Edit(RERUN, "                self._marks.write(ops, group.slots, plan.after)",
                "                if group.kind != \"verify\":\n"
                "                    self._marks.write(ops, group.slots, plan.after)"), WIDE_UPDATES, how=USUAL,
           seen=("directed",), mistake="previous-step-twice"),
    _fault("mark-of-a-step-count", "switch-loss",
           "Every step count has a mark of its own for each slot, so a change leaves the last accepted node unknown.",
           Edit(COLUMNS, "positions(cls.component, config, sizes), mark(cls.mark, sizes)", "positions(cls.component, "
                "config, sizes), Demand(cls.mark, 'slot', (0,), max(sizes.capacity.slots) + 1, (sizes.widest,), "
                "torch.int64, means=mark(cls.mark, sizes).means)"),
           Edit(COLUMNS, "        self._marks, self._width = Marks(memory[self.mark].units(0)), width\n",
                "        self._every, self._width = memory[self.mark].units(0), width\n"
                "        self._marks = Marks(self._every[:, width - 1 : width])\n"),
           Edit(COLUMNS, "    def claim(self, slot: int) -> None:\n        self._marks.put(slot, 0)",
                "    def claim(self, slot: int) -> None:\n        self._every[slot].fill_(0)"), trace="wider",
           how=Setting(strategy="columns"), seen=("bytes",)),
    _fault("pending-never-stored", "pending-count",
           "The lazy strategy never stores: at last more is pending than the ring holds.",
           Edit(LAZY_RERUN, "return size - width - widest", "return size"), trace="full",
           how=Setting(strategy="lazy_rerun"), seen=("derived", "contracts")),
    _fault("pending-overwritten", "pending-count",
           "The ring has room for one window: what is pending from the last one is dropped for the new one.",
           Edit(RERUN, "        return 2 * widest\n", "        return widest\n"), how=USUAL, seen=("capacity",)),
    _fault("pending-after-load", "pending-count", "A loaded or resumed state claims that all its tokens are pending.",
           Edit(RERUN, "self._marks.put(slot, length)", "self._marks.put(slot, 0)"), trace="kept",
           how=Setting(ops="ledger"), seen=("bytes", "labels")),
    _fault("stale-tile", "stale-tile", "The commit leaves out one tile of 8 columns of one head.",
           Edit("instep_optimized/ops/plain/copy_units.py", "target.pool[there] = source.pool[here]",
                "block, old = source.pool[here], target.pool[there]\n"
                "if block.ndim == 4:\n"
                "    block[:, 1, :, 8:16] = old[:, 1, :, 8:16]\n"
                "target.pool[there] = block"), seen=("directed", "derived"), mistake="another-count"),
)
