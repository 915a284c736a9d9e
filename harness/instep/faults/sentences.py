"""Faults whose sentence was written for them, and the definition of that.

A sentence is written for a fault if it is a hypothesis: the harness computes what this one mistake would leave, and
names the mistake if that is what it found. Hypotheses are the catalogue of the delta rule (`explain/mistakes.py`), the
wrong states, windows, rows, draws and trees that the checks know (`checks/`), and the wrong rules of a controller
(`explain/wishes.py`). Every other sentence is general. A check reports what it compared ("length is 4; expected 6"),
and the bank reports a change that any op may have ("is twice the right value"). Both also describe unforeseen faults.

A campaign records in `named_by` which of the three named a fault. `WRITTEN_FOR` holds the faults with "hypothesis"
there; `instep faults` reports a fault that is named by another part, and `tests/harness/test_faults_readme.py` compares
the recorded results.
"""

from __future__ import annotations

HYPOTHESIS = "hypothesis"

WRITTEN_FOR = frozenset({
    "chance-cut-off", "chance-never-advanced", "chance-of-every-head", "chance-of-half-a-seed",
    "chance-of-the-batch-row", "chance-of-the-depth", "chance-of-the-depth-kernel", "chance-of-the-layer",
    "chance-of-the-slot", "chance-to-nearest", "chunk-boundary-begins-anew", "chunk-boundary-conv-zero-padded",
    "chunk-boundary-counted-twice", "chunk-boundary-kernel-block", "chunk-boundary-kernel-last-block",
    "chunk-boundary-partial-block", "chunk-boundary-state-dropped", "commit-depth-for-node",
    "commit-first-child", "commit-index-column-zero", "commit-index-last", "commit-index-minus-one",
    "commit-index-offset", "commit-index-plus-one", "commit-window-before-node", "controller-one-batch-late",
    "conv-no-rollback", "count-permute-rows", "draw-numbers-inverse", "draw-numbers-resumed",
    "draw-numbers-row", "draw-numbers-top-p", "draw-rest-children", "draw-uniform-final", "draw-uniform-node",
    "draw-uniform-packed", "draw-uniform-row", "fold-of-its-own", "fold-rounds-in-between",
    "gate-beta-in-snapshots", "gate-exp-of-running-sums", "grown-hidden-of-the-column", "grown-last-step-alone",
    "grown-nodes-by-score", "grown-parent-alone", "grown-parent-beside", "grown-probabilities-added",
    "grown-score-of-the-step", "grown-tie", "head-of-key-modulo", "layers-chained-at-fewer-steps",
    "layers-not-chained", "mtp-hidden-not-chained", "mtp-hidden-pre-norm", "narrow-beta-in-windows",
    "narrow-key-in-decode", "narrow-state-read-in-decode", "offload-newer-than-its-key",
    "path-handover-column-zero", "path-handover-pending", "pending-twice",
    "prefix-final-row-of-another-request", "prefix-final-rows-one-token-late", "prefix-of-another-request",
    "prefix-of-the-last-node", "prefix-state-newer-than-its-key", "rerun-next-decay", "rerun-rejected-update",
    "ring-not-moved", "row-before-decays", "row-of-another-lane", "scratch-replay-state", "stale-tile",
    "state-stored-narrow", "update-before-the-decay", "update-kernel-keeps-the-value", "update-of-another-row",
    "zero-accept-skipped", "zero-accept-wraps",
})  # fmt: skip
