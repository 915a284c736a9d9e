"""Requests that leave, come back, and change their places in the batch.

Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

ENGINE, SAVED = "instep_optimized/engine.py", "instep_optimized/memory/saved_states.py"

# The batch is condensed into the order of its slots; the accepted counts stay in the order in which they came.
BY_SLOT = Edit(
    ENGINE, "        verified = self._named(requests)\n",
    "        verified = sorted(self._named(requests), key=lambda one: self._memory.slots.of(one.name))\n",
)
LENGTHS_BY_SLOT = Edit(
    ENGINE, "enumerate(verified)", "enumerate(sorted(verified, key=lambda one: self._memory.slots.of(one.name)))",
)
CONDENSED_ROWS = Edit(
    ENGINE, "[request.row for request in verified]", "range(len(verified))",
)
UNSETTLED = Edit(
    ENGINE, "        self._preempted[request] = self._kept(request)\n",
    "        kept, memory = self._kept(request)\n"
    "        slot, states = self._memory.slots.of(request), self._memory[\"state\"]\n"
    "        raw = {layer: states.units(layer)[slot].clone() for layer in memory[\"state\"]}\n"
    "        self._preempted[request] = (kept, memory.changed(state=raw))\n",
)
NO_DRAFT_KV = Edit.of(SAVED, "put(places, name, kept[name]{ =>  if not name.startswith(\"draft_\") else dict()})")
NO_PROPOSAL = Edit.of(SAVED,
                      "slot_table.{proposals[slot], slot_table.proposed[slot] = kept.proposal, => proposed[slot] =} "
                      "kept.proposed")
NO_PROPOSED = Edit.of(SAVED,
                      "slot_table.proposals[slot]{, slot_table.proposed[slot] = kept.proposal, kept.proposed =>  = "
                      "kept.proposal}")
NO_ROOT = Edit(SAVED, "        slot_table.window[slot, 0] = kept.root\n", "        pass\n")
NO_CONV = Edit(
    ENGINE, "self._round.strategy.restore(self._memory.slots.of(name), length, memory)",
    "self._round.strategy.restore(self._memory.slots.of(name), length, "
    "memory.changed(conv={n: torch.zeros_like(x) for n, x in memory[\"conv\"].items()}))",
)
SLOT_STAYS = Edit.of(ENGINE, "self._preempted.pop(request, None) is None{ =>  and self._requests[request].row is None}")
PAGES_STAY = Edit.of("instep_optimized/memory/__init__.py",
                     "self.slots.give(request), self.pages.{release => of}(request)")

_fault = of_family("kept", seen=("identity",), blind=())

FAULTS: tuple[Fault, ...] = (
    _fault("count-permute-batch", "count-permute",
           "The batch is condensed between verify and commit, and takes the accepted counts in the order of before.",
           BY_SLOT, trace="accepted", seen=("bytes", "directed", "identity"), origin="vllm 53919"),
    _fault("count-permute-lengths", "count-permute",
           "Memory takes the right counts; the host gathers them in another order, and lengths are exchanged.",
           LENGTHS_BY_SLOT, trace="accepted", how=Setting(ops="ledger"), seen=("labels", "identity"),
           origin="vllm 53919"),
    _fault("count-permute-rows", "count-permute",
           "After an abort the commit renumbers the rows of the verify, and takes those of the aborted request.",
           CONDENSED_ROWS, trace="aborted", seen=("bytes",), blind=("identity",), mistake="window-of-another-request",
           origin="vllm 53919"),
    _fault("lifecycle-loss-pending", "lifecycle-loss",
           "A preempted request keeps the state in the slot, without the tokens that would be rerun later.", UNSETTLED,
           how=Setting(ops="ledger"), seen=("labels", "bytes"), blind=("identity",), origin="sglang 35957"),
    _fault("lifecycle-loss-draft-kv", "lifecycle-loss", "A saved request is restored without the draft head's KV.",
           NO_DRAFT_KV, seen=("bytes",), blind=("identity", "directed", "decisions"), origin="sglang 35957"),
    _fault("lifecycle-loss-proposal", "lifecycle-loss",
           "A resumed request has lost the draft that was already proposed.", NO_PROPOSAL, seen=("bytes", "identity"),
           blind=("directed",), origin="sglang 35957"),
    _fault("lifecycle-loss-proposed-row", "lifecycle-loss",
           "A resumed request has lost the head's row after its proposed draft: the chain continues from another one.",
           NO_PROPOSED, seen=("bytes",), blind=("identity", "directed"), origin="sglang 35957"),
    _fault("lifecycle-loss-root", "lifecycle-loss", "A resumed request continues from the old root of its new slot.",
           NO_ROOT, how=Setting(ops="ledger"), origin="sglang 35957"),
    _fault("lifecycle-loss-conv", "lifecycle-loss",
           "A request comes back with its recurrent state and an empty conv window.", NO_CONV, seen=("bytes",),
           blind=("identity", "directed"), origin="sglang 35957"),
    _fault("lifecycle-loss-slot", "lifecycle-loss",
           "An abort between verify and commit does not free the slot and its pages.", SLOT_STAYS,
           how=Setting(ops="ledger"), origin="sglang 35957"),
    _fault("lifecycle-loss-pages", "lifecycle-loss",
           "A request that leaves gives its slot back, and none of its pages.", PAGES_STAY, how=Setting(ops="ledger"),
           origin="sglang 35957"),
)
