"""Faults of the engine itself, planted in this process: the first finding at the fault's place says the mechanism.

The catalogue's own sentence is not asked. Leaves out: single wrong computations (`test_explain.py`).
"""

from __future__ import annotations

import pytest

from instep.explain import UNEXPLAINED
from instep.faults import TRACES, by_id
from instep.replay.replay import Replay
from instep.trace.file import read
from support.planting import planted_here

pytestmark = pytest.mark.slow  # replays of whole traces

SAYS = {
    "gate-l2-eps-on-the-mean": "is normed with eps on the mean of the squares, not on their sum",
    "gate-l2-eps-outside-the-root": "is normed with eps outside the root",
    "gate-beta-in-snapshots": "is computed with beta rounded to bfloat16",
    "norm-one-plus-weight": "is scaled with 1 + w, not with w",
    "norm-cast-before-the-weight": "is rounded to bfloat16 before its weight",
    "product-narrow-tile": "is multiplied with both operands rounded to bfloat16, and so is the result, in head 3",
    "product-loud-tile-fused": "times what is right, in columns 8 to 15",
    "attention-short-log2e": "as with 1.443 for log2(e)",
    "attention-default-theta": "is turned by a theta of 10000; it is",
    "attention-narrow-chances": "its shares are rounded to bfloat16",
    "draft-chain-position": "stands 1 position too late",
    "mtp-hidden-stale": "is the head's row of the round before",
    "update-of-another-row": 'is that of request "a"',
}


@pytest.mark.parametrize("fault", SAYS)
def test_a_planted_fault_is_explained_without_a_sentence_of_its_own(fault):
    planted = by_id()[fault]
    with planted_here(*planted.edits):
        findings = Replay(read(TRACES / f"{planted.trace}.jsonl"), planted.how).run().verdict.findings
    here = [found.diagnosis for found in findings if (found.event, found.place) == (planted.event, planted.place)]
    here = here or [findings[0].diagnosis]
    assert any(SAYS[fault] in said for said in here), here
    assert not any(UNEXPLAINED in said for said in here[:1])


def test_a_run_whose_explanations_are_not_asked_for_has_none():
    planted = by_id()["norm-one-plus-weight"]
    with planted_here(*planted.edits):
        findings = Replay(read(TRACES / f"{planted.trace}.jsonl"), planted.how).run(explain=False).verdict.findings
    assert findings[0].diagnosis.startswith("relative error")
