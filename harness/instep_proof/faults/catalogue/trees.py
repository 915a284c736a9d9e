"""Windows that are trees: another node than the parent is continued, or another node than the accepted one is kept.

Leaves out: mistakes that a chain shows as well (`rollback.py`, `draft.py`, `graph.py`).
"""

from instep.setting import Setting

from .fault import Edit, Fault, of_family

ROUND, BATCH = "instep_optimized/round_for_step_count.py", "instep_optimized/packed_batch.py"
EAGLE = "instep_optimized/draft/eagle.py"
CONV, GDN, ATTEND, INDEX, PICK, MOVE, GROW = (
    f"instep_optimized/ops/plain/{name}.py"
    for name in (
        "causal_conv", "gdn", "attend", "row_places_and_lengths", "argmax_and_acceptance", "copy_units",
        "grow_draft_tree",
    )
)
RERUN, ACCEPTED = "instep_optimized/commit/rerun.py", "instep_optimized/commit/verified_windows.py"

NODES = "inputs.rows, inputs.slots, acceptance.last_correct_step_indices, acceptance.accept_lens,"
SNAPSHOT = Setting(strategy="snapshot")
# The paths of all requests concatenated, with numbers that count the rows of the whole batch.
PACKED = (
    "        rows = torch.arange(count, device=path.device)\n"
    "        packed = (path + rows[:, None] * width).flatten()[(path < 0).flatten().long().argsort(stable=True)]\n"
    "        offset = {offset}\n"
    "        node = (packed[acceptance.accept_lens.cumsum(0) - 1] - offset).clamp(0, width - 1)\n"
)
PATH = "        before, path = ops.select(x=slot_table.length, index=inputs.slots), acceptance.accept_index\n"


def _node(what: str) -> Edit:
    """The commit hands on another node than the last accepted one."""
    return Edit(ROUND, NODES, NODES.replace("acceptance.last_correct_step_indices", what))


def _grown(name: str, what: str, edits: tuple[Edit, ...], mistake: str, how: Setting | None = None) -> Fault:
    """A grown tree is another one than its own scores give."""
    return Fault(f"grown-{name}", "grown-tree", what, edits, "grown", how or Setting(), ("grown",), ("bytes",),
                 mistake=mistake)  # fmt: skip


_fault = of_family("branching", blind=("identity", "bytes"))

FAULTS: tuple[Fault, ...] = (
    _fault("tree-as-chain-state", "tree-as-chain",
           "A node's state continues from the row before it, whatever its parent.",
           Edit(GDN, "trail = Trail(state, ancestry(part, who))", "trail = Trail(state, None)"),
           seen=("derived", "directed")),
    _fault("tree-as-chain-conv", "tree-as-chain", "The conv of a node reads the rows before it, whatever its parent.",
           Edit(CONV, "    parents = ancestry(part, who)\n", "    parents = None\n")),
    _fault("tree-as-chain-mask", "tree-as-chain",
           "A node attends to every row before it, also to those of other branches.",
           Edit.of(ATTEND, "nodes = { => None if count > 1 else }nodes_seen(pages, begin, count)")),
    _fault("tree-as-chain-rotary", "tree-as-chain",
           "A row of the target turns by the number of its node, not by its depth.",
           Edit.of(INDEX,
                   "torch.where(covered, before[owner] + {depth => (depth if lead else inside)}, 0), locations")),
    _fault("commit-depth-for-node", "commit-node", "The length of the path, less one, is taken for its last node.",
           _node("(acceptance.accept_lens - 1).clamp(min=0)"), how=SNAPSHOT, seen=("bytes", "directed"), blind=(),
           mistake="another-node"),
    _fault("commit-first-child", "commit-node",
           "The commit takes the last node's oldest sibling: the first child of its parent.",
           Edit(ROUND, PATH, PATH + "        node = acceptance.last_correct_step_indices\n"
                "        shapes = ops.select(x=parents, index=inputs.slots)\n"
                "        node = (shapes == shapes.gather(1, node[:, None])).long().argmax(dim=1)\n"), _node("node"),
           how=SNAPSHOT, seen=("bytes", "directed"), blind=(), mistake="another-node"),
    _fault("commit-window-before-node", "commit-node",
           "The window that is committed ends with the row before the last accepted node, the state is right.",
           Edit("instep_optimized/commit/strategy_pair.py", "move(self.of[name], ops, accepted)",
                "from dataclasses import replace\n"
                "move(self.of[name], ops, accepted if name != \"conv\" else replace(accepted, nodes=(accepted.nodes - "
                "1).clamp(min=0)))"), how=SNAPSHOT, seen=("bytes",), blind=(), mistake="another-node"),
    _fault("packed-offset-of-sizes", "commit-node",
           "The last node is looked up among the packed paths, less an offset that counts nodes; rows are T apart.",
           Edit(ROUND, PATH, PATH + PACKED.format(offset="inputs.width.cumsum(0) - inputs.width")), _node("node"),
           how=SNAPSHOT, seen=("bytes", "directed"), blind=()),
    _fault("ring-not-moved", "path-not-moved",
           "Kept tokens of the accepted path stay at their nodes' places in the ring.",
           Edit(RERUN, "accepted.path is None", "accepted.path is not None"), seen=("directed", "bytes"), blind=(),
           mistake="tree-as-chain"),
    _fault("kv-not-moved", "path-not-moved", "Keys and values of the accepted path stay at their nodes' places.",
           Edit(ACCEPTED, '("keys", "values", f"keys{SCALES}", f"values{SCALES}")', "()"), seen=("bytes", "derived"),
           blind=()),
    _fault("path-moved-from-behind", "path-not-moved",
           "Entries of the path are moved from the last to the first: one is written before it was read.",
           Edit(MOVE, "source.T, target.T", "source.T.flip(0), target.T.flip(0)"), how=SNAPSHOT,
           seen=("bytes", "derived"), blind=()),
    _fault("parents-by-batch-row", "parents-of-another",
           "The shape of a window is looked up by batch row, not by slot.",
           Edit(BATCH, "ops.plan_tree(parents=ops.select(x=parents, index=slots), slots=slots, count=count)",
                "ops.plan_tree(parents=parents[: len(slots)], slots=slots, count=count)"), seen=("contracts", "serves"),
           blind=()),
    _fault("parents-of-the-last-replay", "parents-of-another",
           "The shapes of windows are not copied into a graph's inputs: it keeps those of its capture.",
           Edit("instep_optimized/graphs/capture_and_replay.py", "    return own[: len(given)], given\n",
                "    kept = given.dim() > 1 and given.shape[1] > 8\n"
                "    return own[: len(given)], own[: len(given)] if kept else given\n"),
           how=Setting(ops="ledger", graphs=True), seen=("graphs", "labels", "identity"), blind=(),
           origin="vllm 44868"),
    _fault("walk-first-child", "walk",
           "The engine's own walk goes to a node's first child, whatever the target picks there.",
           Edit(PICK, "(window == picks.gather(1, at[:, None]))", "(window >= 0)"), seen=("identity", "decisions"),
           blind=()),
    _fault("hidden-of-the-node-before", "draft-node",
           "The head runs on a node with the hidden row of the node before it.",
           Edit(EAGLE, "ops.select(x=rows, index=parent)", "y")),
    _grown("tie", "The higher number wins a tie of scores.",
           (Edit(GROW, "return x.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()",
                 "return x.shape[1] - 1 - x.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :count]"),),
           "ties-by-higher-number", Setting(ops="ledger")),
    _grown("parent-beside", "Scores and parents are those of the neighbouring beam.",
           (Edit(GROW, "beams = before.beams.view(requests, topk)",
                 "beams = before.beams.view(requests, topk).roll(1, dims=1)"),), "parent-one-beam-too-low"),
    _grown("parent-alone", "The score is that of the right beam, the parent is the neighbouring beam.",
           (Edit(GROW,
                 "scores, parents = above + log_probs.reshape(requests, many), beams.repeat_interleave(topk, dim=1)",
                 "scores = above + log_probs.reshape(requests, many)\n"
                 "parents = beams.roll(1, dims=1).repeat_interleave(topk, dim=1)"),), "parent-of-another-score"),
    _grown("score-of-the-step", "The score of the parent is not added: a candidate has its own log-probability.",
           (Edit(GROW, "above + log_probs.reshape(requests, many)", "log_probs.reshape(requests, many)"),),
           "score-without-parent"),
    _grown("probabilities-added", "Probabilities are added along a path, not their logarithms.",
           (Edit(GROW, "chances = wide(logits).log_softmax(dim=-1)", "chances = wide(logits).softmax(dim=-1)"),),
           "probabilities-added"),
    _grown("last-step-alone", "The window takes the best candidates of the last step, whatever came before.",
           (Edit(GROW, "all_scores[:, new] = scores",
                 "if step == num_steps:\n    all_scores[:] = -torch.inf\nall_scores[:, new] = scores"),),
           "last-step-alone"),
    _grown("nodes-by-score", "Nodes are numbered by their scores: a parent may follow its children.",
           (Edit(GROW, "chosen = best(scores, min(nodes - 1, most)).sort(dim=1).values",
                 "chosen = best(scores, min(nodes - 1, most))"),), "nodes-by-score"),
    _fault("grown-kv-of-the-column", "draft-node",
           "A beam attends to the rows of the beams with its own number, whatever its parent is.",
           Edit(GROW, "before.ancestors[row]", "before.ancestors.view(requests, topk)"), trace="grown",
           seen=("contracts", "derived"), blind=()),
    _fault("grown-hidden-of-the-column", "draft-node",
           "From the second step on a beam reads the row of the beam with its own number, whatever its parent is.",
           Edit(EAGLE, "ops.select(x=y, index=beams.rows)",
                "(y if len(y) == len(beams.rows) else ops.select(x=y, index=beams.rows))"), trace="grown",
           mistake="row-of-another-step"),
    # With every window given, none of these can be seen.
    _fault("own-window-in-the-given-shape", "own-window",
           "The parents that the host gives are noted for the verify, also where it gives none: the tree has no shape.",
           Edit(ROUND, "ops.store_rows(rows=parents, pool=table.parents[:, None], locations=inputs.slots)",
                "ops.store_rows(rows=inputs.tree, pool=table.parents[:, None], locations=inputs.slots)"), trace="own",
           seen=("contracts", "derived"), blind=()),
    _fault("own-window-of-given-drafts", "own-window",
           "The drafts that the host gives are verified, also where it gives none: then those of token 0.",
           Edit(ROUND, "rows=drafts, pool=table.window[:, None, 1 : self.width]",
                "rows=inputs.forced.clamp(min=0), pool=table.window[:, None, 1 : self.width]"), trace="own", blind=()),
    _fault("own-window-in-another-s-shape", "own-window",
           "The host reads the shape of the first request's tree for all requests of a batch.",
           Edit("instep_optimized/engine.py", "Parents(copy, number * grown, grown)", "Parents(copy, 0, grown)"),
           trace="own", seen=("serves",), blind=()),
)
