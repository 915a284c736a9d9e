"""The classes of faults, by family, each described in a few words.

Leaves out: the faults (`catalogue/`), and classes of missing features: pipeline stages, data-parallel groups.
"""

from __future__ import annotations

from collections.abc import Mapping

KINDS: Mapping[str, Mapping[str, str]] = {
    "rollback": {
        "commit-index": "the committed state is that of another node of the window",
        "zero-accept": "a round in which no draft is accepted is a special case, wrongly",
        "unwritten-snapshot": "the commit takes a state that the verify did not write",
        "conv-no-rollback": "the state is rolled back, the conv window is not",
        "path-handover": "the step after a commit begins from another place than the commit left",
        "scratch-replay": "accepted tokens are run again on something else than what they belong to",
        "positional-arguments": "two index arguments of an update are swapped",
        "pending-count": "too many or too few tokens are taken for those that are still to be folded in",
        "switch-loss": "what must survive a change of the step count is kept in what the change replaces",
        "stale-tile": "a part of a state is left as it was",
    },
    "rings": {
        "ring-update": "the update that is kept is not the one that the state took",
        "ring-rerun": "a kept token is run again with something of another token",
        "flush-margin": "a ring is folded with the room that the window of another round needs",
        "flush-store": "the rows of the round that folds a ring are not all stored in it",
    },
    "dispatch": {
        "prefill-as-verify": "the last tokens of a prompt are taken for a window",
        "verify-as-prefill": "a window is taken for tokens of a prompt",
        "layer-kind": "a layer is taken for one of the other kind",
    },
    "graph": {
        "stale-pad-row": "rows that pad a batch keep what the last replay left there",
        "pad-sentinel": "the index of a padding row is used as an address",
        "frozen-capture": "what was assigned after the capture is not what the graph reads",
        "stale-hidden": "a graph reads another buffer than the one that was written",
        "graph-key-collision": "two graphs that differ have the same key",
    },
    "prompts": {
        "prompt-padding": "rows that pad a forward with a prompt belong to a request, or have a page",
        "prompt-memory": "a graph reads what was freed, or a copy is kept in memory that graphs overwrite",
        "prompt-frozen": "a graph, or the eager calls in it, keep what an earlier forward had",
        "prompt-order": "segments, eager calls or graphs run where others are due, or not at all",
        "prompt-rows": "rows of a graph have tokens that are not theirs",
    },
    "slots": {
        "dirty-slot": "a slot is used again with what its last owner left",
        "caller-stride": "a stride is computed from the call, not read off the pool",
        "pool-initial-steps": "a pool is as large as the first step count needs",
        "budget-initial-steps": "the memory budget is as large as the first step count needs; the pools are larger",
        "one-slot-too-few": "a pool is smaller than its own count by one",
        "int32-offset": "an offset does not fit into the integer that holds it",
        "stride-blind": "a kernel takes a strided view for a packed one",
        "lost-write": "a result goes into a copy that is never read",
        "row-for-slot": "memory of a slot is found by the number of a batch row",
    },
    "chunks": {
        "chunk-boundary": "something is lost, or counted twice, between two chunks of a prompt",
        "state-transpose": "one path has a state the other way round",
        "checkpoint-boundary": "a state is kept under the wrong number of tokens",
    },
    "scheduling": {
        "count-permute": "counts of a batch meet the requests of another one",
        "lifecycle-loss": "a request that leaves and comes back has lost something",
    },
    "draft": {
        "mtp-hidden": "the head is fed another hidden row than the one it was trained on",
        "draft-prefill": "the head's tokens of a prompt are not shifted by one, or not ended rightly",
        "draft-chain": "a step of the chain is at another position, or runs on another draft",
        "draft-input": "what is joined for the head is joined in another order",
        "draft-kv": "the head's KV is not as long as the target's",
        "config-alias": "making the head changes the target's configuration",
    },
    "drafters": {
        "draft-validity": "the head's memory is valid for less than the target's, or is another one's",
        "several-layers": "an MTP layer is fed with what belongs to another one",
        "handed-in": "drafts that are handed in are not those that are verified",
    },
    "numerics": {
        "gate-numerics": "gates or norms are computed by a formula that is almost the right one",
        "attention-numerics": "attention turns, weighs or sums with a number that is almost the right one",
        "product-numerics": "some columns of a product are computed differently from the others",
        "state-narrowed": "a state is stored in a narrower type than declared",
        "fold-formula": "accepted tokens are folded in by another formula than decode's, and drift",
    },
    "norms": {
        "norm-eps": "an epsilon is that of another norm, or in another place",
        "norm-weight": "a weight is read as another norm's",
    },
    "paths": {
        "narrow-path": "one path of several goes through 16 bits",
        "path-order": "one path of several sums in another order",
        "path-position": "one path of several turns rows by another position",
    },
    "storage": {
        "scale-mixed": "a number meets the scale of another one",
        "scale-stale": "a scale is that of an older store, or of a later one",
        "chance-other": "stochastic rounding uses other random numbers than declared",
        "rounded-twice": "what is stored narrow is rounded more often than it is stored",
        "state-transpose": "one pool has states the other way round",
    },
    "neighbours": {
        "wrong-row": "a row meets the gate, or the sum, of another one",
        "wrong-head": "a head meets the key, or the values, of another one",
        "wrong-token": "another token's embedding is looked up",
        "wrong-channel": "a channel's history is another one's",
        "older-round": "what is handed on is older than the round",
    },
    "answers": {
        "answer-overwritten": "an answer that was given is written again",
        "kept-copy-changed": "what was put aside is changed afterwards",
    },
    "readings": {
        "written-before-read": "a number is written again before it is read",
        "lost-unless-read": "a number is older than it should be, or lost, unless it is read at once",
    },
    "sampling": {
        "draw-uniform": "a choice is drawn with another uniform than its own",
        "draw-rest": "after a rejected draft the draw is not from the target's remainder",
        "draw-numbers": "temperature, top-k or top-p are another request's, or are applied otherwise",
    },
    "prefixes": {
        "prefix-count": "a prefix is tracked under another number of tokens, or a multiple is missed",
        "prefix-state": "a prefix holds what its donor had after another token",
        "prefix-lengths": "the parts of a prefix are those after different numbers of tokens",
        "prefix-component": "a request that continues from a prefix lacks a part of it",
        "prefix-layers": "of several MTP layers a prefix has other rows than its tokens make, or a hit too few",
        "prefix-draft-row": "the draft head's last row is made of another token than the next one",
        "prefix-owner": "a prefix holds what belongs to another request",
        "prefix-changed": "a prefix keeps changing with its donor",
    },
    "crossings": {
        "tracked-step": "a prefix is taken from a window after another step than the one that reaches the multiple",
        "track-slot": "a track slot is taken, kept or written at another time than the rules say",
        "inner-prefix": "a prefix inside a chunk has the memory of another place",
        "inner-goes-on": "a chunk does not go on from the memory at a prefix inside it",
        "draw-coin": "a choice is drawn with a coin of another length",
    },
    "rounded": {
        "prefix-rounding": "a prefix's state is rounded in another way, more often, or not at all",
        "prefix-scale": "a prefix's state is read with scales that are another's, or are none",
        "prefix-wide": "what must keep its precision is rounded as a prefix's state is",
    },
    "tiers": {
        "tier-component": "what goes to the host or comes back lacks a part",
        "tier-other": "what goes to the host or comes back is another's, or of another time",
        "tier-evicted": "an evicted or moved prefix stays allocated, or takes memory of another",
    },
    "trees": {
        "tree-as-chain": "a node continues from the row before it, not from its parent",
        "commit-node": "the committed state is that of another node of the tree",
        "path-not-moved": "rows of the accepted path are not moved next to each other",
        "parents-of-another": "a window is served in the shape of another one",
        "walk": "acceptance goes down another branch than the target's choices",
        "draft-node": "the draft head runs on a node with something of another node",
        "own-window": "the verified window is not the one that the drafter proposed",
        "grown-tree": "a tree that the drafter grows has other nodes, or other parents, than the scores say",
    },
    "widths": {
        "window-width": "a window has the width of another one, of the round, or no end",
        "window-rows": "rows of windows are found by a width that is not theirs",
        "window-drafts": "drafts, or runs of the head, are not those that a window's own width asks for",
    },
    "caps": {
        "cap-value": "acceptance stops at another number than the request's own cap, or at none",
        "cap-node": "the bonus, the tokens or the state after a cap are those of another node",
        "cap-pages": "a request has other pages than those of its window before a commit, and of its length after it",
        "cap-counts": "a length, or what the controller gets, ignores the cap",
    },
    "blocks": {
        "block-rows": "the drafter reads other rows of the target than the declared ones",
        "block-context": "the context has rows that it should not have, or lacks some, or has them at other positions",
        "block-attention": "a row of a block sees more or fewer rows than those of its block",
        "block-anchor": "a block begins with another token, or at another position",
        "block-drafts": "drafts or their count are taken at another place",
        "block-kept": "what is kept of a context, or loaded, is not that of the request",
        "block-sampled": "drafts of a sampled block are kept, or its bonus is drawn, by another rule",
    },
    "experts": {
        "expert-of-another": "a row goes to an expert, or takes a share, that is another's",
        "expert-left-out": "an expert that a row has does not serve it",
        "expert-order": "the order in which a row's experts are added depends on other rows",
        "share-numerics": "shares, gates or experts are computed by a formula that is almost the right one",
    },
    "ranks": {
        "partial-sum": "a sum over ranks lacks a part, has it twice, or is rounded more than declared",
        "rank-part": "a rank has the part of a tensor that is another rank's, or no rank's",
        "rank-collective": "a result is exchanged that is one rank's, or is not exchanged",
        "rank-replica": "a rank continues with other numbers than the others have",
        "rank-elsewhere": "a rank does at another place, or not at all, what the others do",
        "rank-decision": "a rank decides for itself what all ranks must decide alike",
    },
    "others": {
        "empty-batch": "a step without rows is not left alone",
        "hot-sync": "a round waits for the host",
        "controller": "step counts are chosen from the wrong rounds, or at the wrong time",
        "batch-dependent-tile": "the order of a row's sum depends on other rows",
    },
}
