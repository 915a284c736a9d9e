"""Faults of the engine itself, planted in this process: the first finding at the fault's place names the mechanism.

The catalogue's own sentence is not used. Leaves out: single wrong computations (`test_diagnose.py`).
"""

from dataclasses import replace

import pytest

from instep.diagnose import diagnose
from instep.finding_problem import UNEXPLAINED
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep_proof.faults.catalogue import TRACES, by_id
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract.place_names import Place
from support.inputs.few_channels import few_channels
from support.running.covering import few
from support.running.planting import begun, planted_here

pytestmark = pytest.mark.slow  # replays of whole traces

SAYS = {
    "gate-l2-eps-on-the-mean": "is normed with eps on the mean of the squares, not on their sum",
    "gate-l2-eps-outside-the-root": "is normed with eps outside the root",
    "gate-beta-in-snapshots": "beta is rounded to bfloat16",
    "norm-one-plus-weight": "is scaled with 1 + w, not with w",
    "norm-cast-before-the-weight": "is rounded to bfloat16 before its weight",
    "product-narrow-tile": "is multiplied with both operands rounded to bfloat16, and so is the result, in head 3",
    "product-loud-tile-fused": "times the right value, in columns 8 to 15",
    "attention-short-log2e": "as with 1.443 for log2(e)",
    "attention-default-theta": "is rotated with a theta of 10000; it is",
    "attention-narrow-chances": "its attention weights are rounded to bfloat16",
    "draft-chain-position": "is placed 1 position too late",
    "mtp-hidden-stale": "is the head's row of the round before",
    "update-of-another-row": 'is that of request "a"',
}
TRAINED = ("gate-l2-eps-outside-the-root",)  # the norm of a random model's keys is too large to tell this eps by


def told(fault: str) -> Trace:
    name = by_id()[fault].trace
    return read(TRACES / f"{name}.jsonl") if fault in TRAINED else few_channels(name, 2)


def there(place: Place) -> Place:
    """A fault's place in a model of two layers, of which the second is the one of attention."""
    second = (place.stage, place.layer) == ("trunk", 3)
    return Place(place.stage, 1, place.component) if second else place


@few(3)
@pytest.mark.parametrize("fault", SAYS)
def test_a_planted_fault_is_explained_by_the_general_bank(fault: str) -> None:
    """Faults of the trunk with the drafts of the trace handed in: no draft head is computed then."""
    planted = by_id()[fault]
    given = planted.place.stage == "trunk"
    with planted_here(*planted.edits):
        trace = told(fault)
        replay = Replay(trace, replace(planted.how, drafter="external") if given else planted.how)
        findings = diagnose(replay, judged_from=begun(trace, planted.event), until=planted.event).verdict.findings
    place = planted.place if fault in TRAINED else there(planted.place)
    here = [found.diagnosis for found in findings if (found.event, found.place) == (planted.event, place)]
    assert here, findings[:2]
    assert any(SAYS[fault] in said for said in here), here
    names = {name for found in findings if found.explained is not None for name in found.explained.names}
    assert not planted.mistake or planted.mistake in names, names
    assert not any(UNEXPLAINED in said for said in here[:1])


def test_a_run_without_explain_has_no_explanations() -> None:
    planted = by_id()["norm-one-plus-weight"]
    with planted_here(*planted.edits):
        findings = Replay(few_channels(planted.trace, 2), planted.how).run().verdict.findings
    assert findings[0].diagnosis.startswith("relative error")


OVER_RMS = "x * torch.rsqrt(x.square().mean(dim=axes, keepdim=True) + eps)"
OTHERS = [
    # Slots have the distance of the widest window; the fault reads them with that of a narrower one.
    (by_id()["mtp-hidden-row-stride"].edits, "short", Setting(guarded=False), "post_normed",
     "reads the verified rows with a wrong stride: it takes slot r, step t from row r * 2 + t"),
    # The snapshots of another row at its own column: inside the other request's window.
    ((Edit("instep_optimized/round_for_step_count.py",
           "inputs.rows, inputs.slots, acceptance.last_correct_step_indices,",
           "inputs.rows.flip(0), inputs.slots, acceptance.last_correct_step_indices,"),),
     "ragged", Setting(strategy="snapshot"), "state", 'holds the state of request "a" after 3 tokens of its step'),
    ((Edit.of("instep_optimized/ops/plain/embed_norm_linear_head.py",
              f"return {{{OVER_RMS} * (1 + weight.to(x.dtype)) => {OVER_RMS} + (1 + weight.to(x.dtype))}}"),),
     "short", Setting(), "normed", "`over_rms(x, eps) + (1 + weight)`, not with `over_rms(x, eps) * (1 + weight)`"),
    ((Edit.of("instep_optimized/ops/plain/embed_norm_linear_head.py",
              "torch.{rsqrt => sqrt}(x.square().mean(dim=axes, keepdim=True) + eps)"),),
     "short", Setting(), "normed", "torch.sqrt((x * x).mean(-1, keepdim=True) + eps)`, not with `x * torch.rsqrt("),
    ((Edit.of("instep_optimized/forwards.py", "Span(row.request, row.kind, width_of(row, "
              "request), number, fresh={prefill and not begin => False})"),),
     "short", Setting(), "mixed", "reads a conv window that nothing wrote (poison), although the request has no"),
    ((Edit.of("instep_optimized/ops/ledger_label_ops.py", "int(who.again.{max => min}())"),),
     "ragged", Setting("ledger"), "core", "depends on the state after 1 token of the last window; 3 were accepted"),
    ((Edit.of("instep_optimized/ops/ledger_label_ops.py", "return _recurred(inputs, parts, to, recalls={True => "
              "False})"),),
     "ragged", Setting("ledger"), "core", "was made without the delta rule: tokens write what the state"),
]  # fmt: skip
OTHER_IDS = ["stride", "another row", "formula", "function", "poison", "ring", "rule"]


@few(3)
@pytest.mark.parametrize(("edits", "trace", "how", "component", "says"), OTHERS, ids=OTHER_IDS)
def test_another_stride_and_another_row_are_distinguished(
    edits: tuple[Edit, ...], trace: str, how: Setting, component: str, says: str
) -> None:
    with planted_here(*edits):
        findings = diagnose(Replay(few_channels(trace, 2), how)).verdict.findings
    first = next(found for found in findings if found.place.component == component)
    assert says in first.diagnosis and first.explained.by == ("hypothesis" if first.explained.names else "bank"), first
