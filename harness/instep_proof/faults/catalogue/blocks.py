"""The block drafter: the rows that it reads, its context, its blocks, and what is kept of it.

Leaves out: MTP layers (`draft.py`, `drafters.py`), and widths of windows (`widths.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

BLOCK, TRUNK = "instep_optimized/draft/block.py", "instep_optimized/model/trunk.py"
ENGINE, ROUND = "instep_optimized/engine.py", "instep_optimized/round_for_step_count.py"
SAVED = "instep_optimized/memory/saved_states.py"
DRAW, UNITS = "instep_optimized/ops/plain/top_k_top_p_sampling.py", "instep_optimized/sampling_inputs.py"
ACCEPT = "instep_optimized/ops/plain/argmax_and_acceptance.py"
LABELS, PLAIN = Setting(ops="ledger"), Setting()

WINDOWS = 'batch = windows(ops, memory, who, tokens, "draft", width%s)'
BITS = "replace(batch, nodes=Nodes(None, batch.positions, ops.select(x=self.bits, index={rows => %s}), width))"
FED = "fed = ops.select(x={kept[:, :width] => %s}, index=inputs.slots).flatten(0, 1)"
EXTEND = "        self._extend(ops, inputs.who(), chosen, rows.fed, 1)\n"

_fault = of_family("block", PLAIN)

FAULTS: tuple[Fault, ...] = (
    _fault("block-rows-before-the-layer", "block-rows", "The drafter reads the rows that a declared layer gets.",
           Edit(TRUNK, "            hidden = layer(ops, hidden, batch, bound)\n"
                "            if number in self.read:\n                hidden = hidden.summed(ops)\n"
                "                features = hidden.x if features is None else ops.concat(\n"
                "                    x=features, y=hidden.x, to=Place(STAGE, number, \"features\"))\n",
                "            if number in self.read:\n                hidden = hidden.summed(ops)\n"
                "                features = hidden.x if features is None else ops.concat(\n"
                "                    x=features, y=hidden.x, to=Place(STAGE, number, \"features\"))\n"
                "            hidden = layer(ops, hidden, batch, bound)\n"), blind=("identity", "bytes"),
           mistake="rows-after-another-layer", origin="sglang dflash"),
    _fault("block-rows-in-reverse-order", "block-rows", "The rows of the declared layers are side by side in reverse.",
           Edit.of(TRUNK, "x={features => hidden.x}, y={hidden.x => features}, to=Place(STAGE, number, \"features\")")),
    _fault("block-rows-of-the-token-before", "block-rows", "The context of a token is that of the token before it.",
           Edit.of(BLOCK, "x={hidden => hidden.roll(1, 0)}, weight=weights.fc, shape=(config.hidden,), "
                   "to=Place(CONTEXT, STAGE_LEVEL, \"fused\")"), mistake="targets-rows-shifted"),
    _fault("block-rows-by-batch-row", "block-rows",
           "A commit reads the rows of the request with the number of the row.",
           Edit.of(ROUND, "fed = ops.select(x=kept[:, :width], index={inputs.slots => inputs.rows}).flatten(0, 1)")),
    _fault("block-rows-by-the-step-count", "block-rows",
           "The kept rows are found with a stride that follows the step count, not with that of the pool.",
           Edit.of(ROUND, FED % "kept.as_strided((len(kept), width, kept.shape[2]), (width * kept.shape[2], "
                   "kept.shape[2], 1))"), seen=("derived", "poison")),
    _fault("block-context-of-rejected-drafts", "block-context",
           "The context also takes in the drafts that were refused.",
           Edit.of(ROUND, "who = replace(inputs.who(), count={acceptance.accept_lens => inputs.width})"), how=LABELS,
           seen=("identity", "tails"), blind=("directed",)),
    _fault("block-context-without-decodes", "block-context", "The context does not take in what is decoded.",
           Edit(ROUND, EXTEND, "        drafter = self.model.drafter\n"
                f"        if drafter is None or not drafter.at_once:\n    {EXTEND}"), seen=("identity", "poison"),
           blind=("directed",)),
    _fault("block-context-one-position-late", "block-context", "Keys of the context are rotated one position too far.",
           Edit.of(BLOCK,
                   "key_raw=key_raw, positions={batch.positions => batch.positions + 1}, k_norm=layer.weights.k_norm"),
           blind=("identity", "bytes"), mistake="context-keys-at-the-next-position"),
    _fault("block-context-normed-by-the-layer", "block-context",
           "The context passes the input norm of every layer, as only some drafters have it.",
           Edit.of(BLOCK, "ops, x={rows => ops.norm(x=rows, weight=layer.norm, eps=config.eps, to=Place(CONTEXT, "
                   "number, \"context\"))}, weight=layer.weights.inputs[queries:]"), blind=("bytes",),
           mistake="context-through-the-layers-norm", origin="sglang dflash"),
    _fault("block-causal", "block-attention", "A row of a block does not see the rows after it.",
           Edit(BLOCK, "        batch = replace(batch, nodes=Nodes(None, batch.positions, ops.select(x=self.bits, "
                "index=rows), width))\n", "        assert rows is not None\n"), seen=("contracts", "derived"),
           blind=("bytes",)),
    _fault("block-sees-behind-its-end", "block-attention", "A narrow block sees rows up to the step count.",
           Edit.of(BLOCK, BITS % "rows.clamp(min=width) * (rows > 0)"), seen=("contracts",), blind=("bytes",)),
    _fault("block-sees-the-root-alone", "block-attention", "Rows of a block see the context and the root alone.",
           Edit.of(BLOCK, BITS % "rows.clamp(max=1)"), seen=("contracts", "derived"), blind=("bytes",)),
    _fault("block-at-the-last-committed-token", "block-anchor", "A block begins at the position before its root.",
           Edit(BLOCK, WINDOWS % "", WINDOWS % ", shift=-1"), seen=("tails", "bytes"), blind=()),
    _fault("block-root-is-not-the-bonus", "block-anchor",
           "A block begins with the target's choice at the window's root.",
           Edit.of(BLOCK, "root = ops.select(x=memory.slot_table.{window => picks}[:, :width], index=who.slots)"),
           how=LABELS, seen=("labels",)),
    _fault("block-mask-is-another-token", "block-anchor", "The mask token is 0, not the one of the configuration.",
           Edit.of(BLOCK, "[-1, *[{config.block.mask_token_id => 0}] * (widest - 1)]")),
    _fault("block-drafts-one-row-early", "block-drafts", "A draft is the pick at the row before its own.",
           Edit.of(BLOCK, "own = [column(ops, picks, draft) for draft in range({1, width => width - 1})]"), how=LABELS,
           seen=("identity",), blind=()),
    _fault("block-count-with-the-bonus", "block-drafts", "The accepted drafts of a block are counted with the bonus.",
           Edit.of(ACCEPT, "Acceptance({correct => lens}, lens, path, correct.clone(), bonus, own, own_bonus, tokens)"),
           how=LABELS, seen=("identity",), blind=("bytes",), origin="sglang 25029"),
    _fault("block-not-kept", "block-kept", "A preempted request comes back without its context.",
           Edit.of(SAVED, "put(places, name, kept[name]{ =>  if not name.startswith(\"block_\") else dict()})"),
           how=LABELS, seen=("bytes", "poison")),
    _fault("block-of-another-request", "block-kept", "A preempted request comes back with the context of another one.",
           Edit(ENGINE, "self._preempted[request] = self._kept(request)", "kept, memory = self._kept(request)\n"
                "_, other = self._kept(next(name for name in self._requests if name != request))\n"
                "rows = {layer: x[: kept.length.exact] for layer, x in other[\"block_keys\"].items()}\n"
                "self._preempted[request] = kept, memory.changed(block_keys=rows)\n"), how=LABELS,
           seen=("labels", "bytes")),
    _fault("block-prefix-without-context", "block-kept", "A hit of a prefix restores no context.",
           Edit.of(SAVED, "count = {len(tensors(rows)[0]) => len(tensors(rows)[0]) if not self.prefix or not "
                   "name.startswith(\"block_\") else 0}\n"
                   "self.memory.units(name, layer).put((self.at[0][:count], self.at[1][:count]), rows{ => [:count]})"),
           how=LABELS, seen=("bytes", "poison")),
    _fault("block-prefix-one-row-short", "block-kept", "A prefix has a row less of the context, as of an MTP layer.",
           Edit.of(SAVED, "less = name.startswith({\"draft_\" => (\"draft_\", \"block_\")}) and self.prefix"),
           how=LABELS, seen=("bytes",)),
    _fault("block-padded-row-of-a-graph", "block-kept",
           "A padded row of a graph writes what is kept of a verify into slot 1, from its capture on.",
           Edit.of(ROUND, "Inputs(0, 0, {0 => 1}, 0, -1, 0, 0, -1, -1)"),
           Edit.of(ROUND, "keep_window(ops, slot_table, {inputs.slots => ops.choose(own=inputs.begin, "
                   "forced=inputs.slots)}, picks, rows, width)"), how=Setting(graphs=True), seen=("poison",),
           blind=("directed",)),
    _fault("block-sampled-one-coin", "block-sampled",
           "All drafts of a block are compared with the uniform of the root.",
           Edit.of(DRAW, "(uniforms[rows.owner, {rows.node => 0}], final[rows.owner])"), trace="coins", seen=("draws",),
           mistake="uniform-of-the-root"),
    _fault("block-sampled-without-the-total", "block-sampled",
           "A uniform is compared with the weight of a draft, not with its part of all weights.",
           Edit.of(DRAW, "{(first * (sums[:, -1] + rest.sum(dim=1)))[:, None] => first[:, None]} < sums"),
           trace="coins", seen=("draws",), mistake="weights-without-their-total"),
    _fault("block-sampled-coins-at-the-end", "block-sampled",
           "The uniforms of a block that is narrower than the step count are at the end of its row.",
           Edit.of(UNITS, "(*{row.uniforms[:-1] => [0.0] * (width + 1 - len(row.uniforms))}, *{[0.0] * (width + 1 - "
                   "len(row.uniforms)) => row.uniforms[:-1]}, *row.uniforms[-1:])"), trace="coins", seen=("draws",),
           mistake="uniforms-after-a-zero"),
    _fault("block-sampled-later-drafts", "block-sampled",
           "All later drafts of a block are candidates after a node, not the next one alone.",
           Edit.of(DRAW, "child = (above {== => >=} node[:, None]) & (place > 0) & (place < count[owner][:, None]) & "
                   "covered[:, None]"), trace="coins", seen=("draws",), mistake="later-drafts-as-children"),
    _fault("block-sampled-keeps-later-drafts", "block-sampled", "Drafts that are kept after a refused one are counted.",
           Edit.of(ACCEPT, "right.long(){.cumprod(dim=1) => }.sum(dim=1)"), trace="coins", seen=("identity",),
           blind=("directed",)),
    _fault("block-sampled-bonus-one-row-late", "block-sampled",
           "The bonus is the choice one row after the kept drafts.",
           Edit.of(ACCEPT, "(said, picks.gather(1, {own => (own + 1).clamp(max=picks.shape[1] - 1)}[:, None])[:, 0])"),
           trace="coins", seen=("identity",), blind=("directed",)),
)
