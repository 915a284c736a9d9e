"""Prompts in chunks, and states that are kept and come back.

Leaves out: every other family.
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

CONV, GDN, LANES = (f"instep_optimized/ops/plain/{name}.py" for name in ("causal_conv", "gdn", "requests_of_part"))
CHUNK, RERUN = "instep_optimized/kernels/gdn_prefill/chunk16_fp32.py", "instep_optimized/commit/rerun.py"

FRESH = Edit.of("instep_optimized/forwards.py", "fresh=prefill{ and not begin => }")
NO_STATE = Edit(
    GDN, "    state = _settle(before(part, who, work), part, who, recalls)\n",
    "    memory = before(part, who, work)\n"
    "    state = _settle(torch.zeros_like(memory) if part.form == \"chunk\" else memory, part, who, "
    "recalls)\n",
)
# The mask of a block's rows has <= for <: a request shorter than the longest one takes its last row twice.
TWICE = Edit.of(LANES, "{inside => (token <= length[:, None])}.sum(dim=0).tolist(), again[which]")
ZERO_PADDED = Edit(
    CONV, "    ends = who.length[:, None] + torch.arange(history, device=x.device)\n",
    "    ends = who.length[:, None] + torch.arange(history, device=x.device)\n"
    "    if part.form == \"chunk\":\n"
    "        line = torch.nn.functional.pad(x[who.rows].transpose(1, 2), (history, 0))\n",
)
# Gates are read for whole blocks of BT tokens; the rows of the last, partial one keep the 1 they were filled with.
PARTIAL_BLOCK = Edit(
    GDN, "    writes = _writes(rows, work, heads)\n",
    "    writes, BT = _writes(rows, work, heads), 4\n"
    "    if part.form == \"chunk\":\n"
    "        whole = torch.arange(part.most) < (who.length // BT * BT)[:, None]\n"
    "        writes = writes._replace(decay=writes.decay.where(whole[..., None], 1.0))\n",
)
# The other rows' mask: by batch row, where the lanes are sorted by length.
UNSORTED_MASK = Edit.of(LANES, "~part.fresh[{who.which => : len(who.which)}]")
BLOCK_FORGETS = Edit.of(CHUNK, "state = {tl.exp(tl.sum(forget, axis=0)) * state +  => }added")
LAST_BLOCK_UNGATED = Edit.of(CHUNK, "state = tl.{exp(tl.sum(forget, axis=0)) => where(first + TOKENS <= rows, "
                             "tl.exp(tl.sum(forget, axis=0)), 1.0)} * state + added")

TURNED = (
    "type(state)(state.pool.as_strided(state.pool.shape, (*state.pool.stride()[:2], state.pool.shape[3], 1)), "
    "state.scales).at(group.slots) if chunk else own"
)
STORED_TURNED = Edit(
    RERUN, "            store=None if verify else own,\n", f"            store=None if verify else {TURNED},\n",
)
READ_TURNED = Edit(
    RERUN, "            own,\n            store=None if verify else own,\n",
    f"            {TURNED},\n            store=None if verify else own,\n",
)

# States are tracked at multiples of an interval; the recorded count is rounded down to it, and the KV with it.
UNDER_THE_INTERVAL = Edit(
    "instep_optimized/engine.py", "        self._saved[name] = self._kept(request)\n",
    "        kept, memory = self._kept(request)\n"
    "        length = kept.length.exact // 4 * 4\n"
    "        cut = {n: {layer: rows[:length] for layer, rows in memory[n].items()}\n"
    "               for n in (\"keys\", \"values\", \"draft_keys\", \"draft_values\")}\n"
    "        kept = kept.between_rounds()\n"
    "        kept.length = type(kept.length)(length)\n"
    "        self._saved[name] = (kept, memory.changed(**cut))\n",
)
# A checkpoint of the state is taken when a prompt begins its last block; a save hands that one out.
STATE_OF_ANOTHER_COUNT = Edit(
    "instep_optimized/engine.py", "        self._saved[name] = self._kept(request)\n",
    "        kept, memory = self._kept(request)\n"
    "        older = {layer: torch.zeros_like(state) for layer, state in memory[\"state\"].items()}\n"
    "        self._saved[name] = (kept, memory if kept.length.exact >= 8 else memory.changed(state=older))\n",
)

_fault = of_family("rounds", seen=("derived", "directed"), blind=("identity", "bytes"))

FAULTS: tuple[Fault, ...] = (
    _fault("chunk-boundary-begins-anew", "chunk-boundary",
           "Every chunk of a prompt is taken for its first: conv window and state begin at zero again.", FRESH,
           blind=("identity",), mistake="from-zero", origin="sglang-jax 1039"),
    _fault("chunk-boundary-begins-anew-labels", "chunk-boundary",
           "Every chunk of a prompt is taken for its first, seen in labels.", FRESH, how=Setting(ops="ledger"),
           seen=("labels",), blind=("identity",), origin="sglang-jax 1039"),
    _fault("chunk-boundary-state-dropped", "chunk-boundary",
           "The delta rule of a chunk is given no initial state; the conv has its history.", NO_STATE,
           mistake="previous-step-lost", origin="sglang-jax 1039"),
    _fault("chunk-boundary-counted-twice", "chunk-boundary",
           "A chunk packed next to a longer one folds its last token in twice.", TWICE, seen=("directed",),
           mistake="last-token-twice", origin="sglang-jax 1039"),
    _fault("chunk-boundary-conv-zero-padded", "chunk-boundary",
           "A chunk shorter than the conv's history leaves a window that is padded with zeros.", ZERO_PADDED,
           seen=("bytes",), blind=("identity", "derived"), mistake="from-zero", origin="sglang-jax 1039"),
    _fault("chunk-boundary-partial-block", "chunk-boundary",
           "The tokens of a chunk's last, partial block are folded in without their decay.", PARTIAL_BLOCK,
           mistake="last-decays-dropped", origin="sglang-jax 1039"),
    _fault("chunk-boundary-unsorted-mask", "chunk-boundary",
           "Which chunks have a state before them is read in batch order, where requests are sorted by length.",
           UNSORTED_MASK, trace="arriving", seen=("poison", "derived"), blind=("identity",)),
    _fault("chunk-boundary-kernel-block", "chunk-boundary",
           "The chunk kernel forgets the state from one block of 16 tokens to the next.", BLOCK_FORGETS,
           how=Setting(ops="triton"), mistake="forgotten-by-block", origin="sglang-jax 1039"),
    _fault("chunk-boundary-kernel-last-block", "chunk-boundary",
           "The chunk kernel does not decay the state over a last block that is not full.", LAST_BLOCK_UNGATED,
           how=Setting(ops="triton"), seen=("directed",), mistake="last-decays-dropped", origin="sglang-jax 1039"),
    _fault("state-transpose-store", "state-transpose",
           "Prefill stores a state as rows of [K, V], where every other path reads [V, K].", STORED_TURNED,
           seen=("contracts", "directed"), blind=("identity",), origin="sglang, chunked prefill on NPU"),
    _fault("state-transpose-read", "state-transpose",
           "A further chunk reads the state in the other layout and stores it in the right one.", READ_TURNED,
           seen=("contracts",), origin="sglang, chunked prefill on NPU"),
    _fault("checkpoint-boundary-count", "checkpoint-boundary",
           "A state is saved under the last multiple of the tracking interval, and is older than it by two tokens.",
           UNDER_THE_INTERVAL, trace="kept", seen=("identity", "bytes"), blind=("directed",), origin="vllm 43559"),
    _fault("checkpoint-boundary-state", "checkpoint-boundary",
           "A state is saved under the right count, but was taken before the chunk that reached it.",
           STATE_OF_ANOTHER_COUNT, trace="kept", how=Setting(ops="ledger"), seen=("bytes", "labels"),
           blind=("identity",), origin="vllm 43559"),
)
