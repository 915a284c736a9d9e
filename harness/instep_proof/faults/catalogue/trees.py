"""Windows that are trees: another node than the parent is continued, or another node than the accepted one is kept.

Leaves out: mistakes that a chain shows as well (`rollback.py`, `draft.py`, `graph.py`).
"""

from __future__ import annotations

from instep.setting import Setting
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place

from .fault import Edit, Fault

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
WINDOW, STATE, MIXED, CORE = (Place("trunk", 0, component) for component in ("conv", "state", "mixed", "core"))
KEYS, QUERY, ATTENDED = (Place("trunk", 3, component) for component in ("keys", "query", "attended"))
SLOT_TABLE = Place("trunk", STAGE_LEVEL, "length")

NODES = "inputs.rows, inputs.slots, acceptance.last_correct_step_indices, acceptance.accept_lens,"
GROWN = Place("chain.0", AFTER_LAYERS, "pick")
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


def _grown(name: str, what: str, edits: tuple[Edit, ...], says: str, how: Setting | None = None) -> Fault:
    """A grown tree is another one than its own scores give."""
    return Fault(
        f"grown-{name}", "grown-tree", what, "", edits, "grown", how or Setting(), 4, GROWN, says, ("grown",),
        ("bytes",), written_for=True,
    )


FAULTS: tuple[Fault, ...] = (
    Fault(
        "tree-as-chain-state", "tree-as-chain", "A node's state continues from the row before it, whatever its parent.",
        "", (Edit(GDN, "trail = Trail(state, ancestry(part, who))", "trail = Trail(state, None)"),),
        "branching", Setting(), 5, CORE,
        "the tree is taken for a chain", ("derived", "directed"), ("identity", "bytes"),
    ),
    Fault(
        "tree-as-chain-conv", "tree-as-chain", "The conv of a node reads the rows before it, whatever its parent.",
        "", (Edit(CONV, "    parents = ancestry(part, who)\n", "    parents = None\n"),),
        "branching", Setting(), 5, MIXED,
        "the tree is taken for a chain", ("derived",), ("identity", "bytes"),
    ),
    Fault(
        "tree-as-chain-mask", "tree-as-chain",
        "A node attends to every row before it, also to those of other branches.",
        "",
        (Edit(ATTEND, "    nodes = nodes_seen(pages, begin, count)\n",
              "    nodes = None if count > 1 else nodes_seen(pages, begin, count)\n"),),
        "branching", Setting(), 5, ATTENDED,
        "the tree is taken for a chain", ("derived",), ("identity", "bytes"),
    ),
    Fault(
        "tree-as-chain-rotary", "tree-as-chain",
        "A row of the target turns by the number of its node, not by its depth.",
        "",
        (Edit(INDEX, "torch.where(covered, before[owner] + depth, 0), locations",
              "torch.where(covered, before[owner] + (depth if lead else inside), 0), locations"),),
        "branching", Setting(), 5, QUERY,
        "is rotated by the number of its node", ("derived",), ("identity", "bytes"),
    ),
    Fault(
        "commit-depth-for-node", "commit-node", "The length of the path, less one, is taken for its last node.",
        "", (_node("(acceptance.accept_lens - 1).clamp(min=0)"),),
        "branching", SNAPSHOT, 6, WINDOW,
        "whose number is the depth of the path", ("bytes", "directed"), written_for=True,
    ),
    Fault(
        "commit-first-child", "commit-node",
        "The commit takes the last node's oldest sibling: the first child of its parent.",
        "",
        (Edit(ROUND, PATH,
              PATH + "        node = acceptance.last_correct_step_indices\n"
              "        shapes = ops.select(x=parents, index=inputs.slots)\n"
              "        node = (shapes == shapes.gather(1, node[:, None])).long().argmax(dim=1)\n"),
         _node("node")),
        "branching", SNAPSHOT, 15, WINDOW,
        "a sibling of node", ("bytes", "directed"), written_for=True,
    ),
    Fault(
        "commit-window-before-node", "commit-node",
        "The window that is committed ends with the row before the last accepted node, the state is right.",
        "",
        (Edit("instep_optimized/commit/strategy_pair.py", "self.of_conv.commit(ops, accepted)",
              "from dataclasses import replace\n"
              "self.of_conv.commit(ops, replace(accepted, nodes=(accepted.nodes - 1).clamp(min=0)))"),),
        "branching", SNAPSHOT, 6, WINDOW,
        "after node", ("bytes",), written_for=True,
    ),
    Fault(
        "packed-offset-of-sizes", "commit-node",
        "The last node is looked up among the packed paths, less an offset that counts nodes; rows are T apart.",
        "",
        (Edit(ROUND, PATH, PATH + PACKED.format(offset="inputs.width.cumsum(0) - inputs.width")),
         _node("node")),
        "branching", SNAPSHOT, 6, WINDOW,
        "", ("bytes", "directed"),
    ),
    Fault(
        "ring-not-moved", "path-not-moved",
        "Kept tokens of the accepted path stay at their nodes' places in the ring.",
        "", (Edit(RERUN, "accepted.path is None", "accepted.path is not None"),),
        "branching", Setting(), 6, STATE,
        "takes the tree for a chain: holds rows 0 to", ("directed", "bytes"), written_for=True,
    ),
    Fault(
        "kv-not-moved", "path-not-moved", "Keys and values of the accepted path stay at their nodes' places.",
        "", (Edit(ACCEPTED, '("keys", "values", f"keys{SCALES}", f"values{SCALES}")', "()"),),
        "branching", Setting(), 6, KEYS,
        "was written 2 positions too late", ("bytes", "derived"),
    ),
    Fault(
        "path-moved-from-behind", "path-not-moved",
        "Entries of the path are moved from the last to the first: one is written before it was read.",
        "",
        (Edit(MOVE, "source.T, target.T", "source.T.flip(0), target.T.flip(0)"),),
        "branching", SNAPSHOT, 6, KEYS,
        "position 2 is that of position 3", ("bytes", "derived"),
    ),
    Fault(
        "parents-by-batch-row", "parents-of-another", "The shape of a window is looked up by batch row, not by slot.",
        "",
        (Edit(BATCH, "ops.plan_tree(parents=ops.select(x=parents, index=slots), slots=slots, count=count)",
              "ops.plan_tree(parents=parents[: len(slots)], slots=slots, count=count)"),),
        "branching", Setting(), 4, SLOT_TABLE,
        "which is no node before it", ("contracts", "serves"),
    ),
    Fault(
        "parents-of-the-last-replay", "parents-of-another",
        "The shapes of windows are not copied into a graph's inputs: it keeps those of its capture.",
        "vllm 44868",
        (Edit("instep_optimized/graphs/capture_and_replay.py", "    return own[: len(given)], given\n",
              "    kept = given.dim() > 1 and given.shape[1] > 8\n"
              "    return own[: len(given)], own[: len(given)] if kept else given\n"),),
        "branching", Setting(ops="ledger", graphs=True), 4, SLOT_TABLE,
        "tree of row 0 is", ("graphs", "labels", "identity"),
    ),
    Fault(
        "walk-first-child", "walk",
        "The engine's own walk goes to a node's first child, whatever the target picks there.",
        "",
        (Edit(PICK, "(window == picks.gather(1, at[:, None]))", "(window >= 0)"),),
        "branching", Setting(), 6, Place("trunk", AFTER_LAYERS, "pick"),
        "", ("identity", "decisions"),
    ),
    Fault(
        "hidden-of-the-node-before", "draft-node", "The head runs on a node with the hidden row of the node before it.",
        "",
        (Edit(EAGLE, "ops.select(x=rows, index=parent)", "y"),),
        "branching", Setting(), 4, Place("chain.2", STAGE_LEVEL, "post_normed"),
        "", ("derived",), ("identity", "bytes"),
    ),
    _grown("tie", "The higher number wins a tie of scores.", (Edit(
        GROW, "return x.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()",
        "return x.shape[1] - 1 - x.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :count]"),),
        "equal scores are ordered by the higher number first", Setting(ops="ledger")),
    _grown("parent-beside", "Scores and parents are those of the neighbouring beam.", (Edit(
        GROW, "beams = before.beams.view(requests, topk)",
        "beams = before.beams.view(requests, topk).roll(1, dims=1)"),),
        "a parent is one beam too low"),
    _grown("parent-alone", "The score is that of the right beam, the parent is the neighbouring beam.", (Edit(
        GROW, "scores, parents = above + log_probs.reshape(requests, many), beams.repeat_interleave(topk, dim=1)",
        "scores = above + log_probs.reshape(requests, many)\n"
        "parents = beams.roll(1, dims=1).repeat_interleave(topk, dim=1)"),),
        "a parent is the beam before the one whose score was added"),
    _grown("score-of-the-step", "The score of the parent is not added: a candidate has its own log-probability.", (Edit(
        GROW, "above + log_probs.reshape(requests, many)", "log_probs.reshape(requests, many)"),),
        "the score of the parent is not added"),
    _grown("probabilities-added", "Probabilities are added along a path, not their logarithms.", (
        Edit(GROW, "chances = wide(logits).log_softmax(dim=-1)", "chances = wide(logits).softmax(dim=-1)"),),
        "probabilities are added, not their logarithms"),
    _grown("last-step-alone", "The window takes the best candidates of the last step, whatever came before.", (Edit(
        GROW, "all_scores[:, new] = scores",
        "if step == num_steps:\n    all_scores[:] = -torch.inf\nall_scores[:, new] = scores"),),
        "only candidates of the last step are taken"),
    _grown("nodes-by-score", "Nodes are numbered by their scores: a parent may follow its children.", (Edit(
        GROW, "chosen = best(scores, min(nodes - 1, most)).sort(dim=1).values",
        "chosen = best(scores, min(nodes - 1, most))"),),
        "nodes are numbered by score, not in the order of their creation"),
    Fault(
        "grown-kv-of-the-column", "draft-node",
        "A beam attends to the rows of the beams with its own number, whatever its parent is.",
        "", (Edit(GROW, "before.ancestors[row]", "before.ancestors.view(requests, topk)"),),
        "grown", Setting(), 4, Place("chain.2", 0, "attended"),
        "; in the trace they follow", ("contracts", "derived"),
    ),
    Fault(
        "grown-hidden-of-the-column", "draft-node",
        "From the second step on a beam reads the row of the beam with its own number, whatever its parent is.",
        "", (Edit(EAGLE, "ops.select(x=y, index=beams.rows)",
                  "(y if len(y) == len(beams.rows) else ops.select(x=y, index=beams.rows))"),),
        "grown", Setting(), 4, Place("chain.2", STAGE_LEVEL, "post_normed"),
        "reads the head's row of", ("derived",), ("identity", "bytes"), written_for=True,
    ),
    # With every window given, none of these can be seen.
    Fault(
        "own-window-in-the-given-shape", "own-window",
        "The parents that the host gives are noted for the verify, also where it gives none: the tree has no shape.",
        "", (Edit(ROUND, "ops.store_rows(rows=parents, pool=table.parents[:, None], locations=inputs.slots)",
                  "ops.store_rows(rows=inputs.tree, pool=table.parents[:, None], locations=inputs.slots)"),),
        "own", Setting(), 4, SLOT_TABLE, "node 1 continues -1, which is no node before it", ("contracts", "derived"),
    ),
    Fault(
        "own-window-of-given-drafts", "own-window",
        "The drafts that the host gives are verified, also where it gives none: then those of token 0.",
        "", (Edit(ROUND, "rows=drafts, pool=table.window[:, None, 1 : self.width]",
                  "rows=inputs.forced.clamp(min=0), pool=table.window[:, None, 1 : self.width]"),),
        "own", Setting(), 4, Place("trunk", STAGE_LEVEL, "embedding"), "is the embedding of token 0", ("derived",),
    ),
    Fault(
        "own-window-in-another-s-shape", "own-window",
        "The host reads the shape of the first request's tree for all requests of a batch.",
        "", (Edit("instep_optimized/engine.py", "Parents(copy, number * grown, grown)", "Parents(copy, 0, grown)"),),
        "own", Setting(), 11, Place("trunk", STAGE_LEVEL, "embedding"), "3 is no child of node 0", ("serves",),
    ),
)
