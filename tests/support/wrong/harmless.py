"""Edits that look like faults and cannot matter, each with the proof. They count nowhere; a harness that reports one
is wrong.

The tests run these: every event must agree, and bytes differ only if `fires` is set. Leaves out: faults
(`faults/catalogue/`).
"""

from dataclasses import dataclass

from instep.setting import Setting
from instep_proof.faults.catalogue.fault import Edit, Wrap


@dataclass(frozen=True)
class Harmless:
    """what, origin, edits, trace, how: as of a fault; proof: why it cannot matter; fires: whether any byte differs."""

    id: str
    what: str
    origin: str
    edits: tuple[Edit | Wrap, ...]
    trace: str
    how: Setting
    proof: str
    fires: bool


HARMLESS: tuple[Harmless, ...] = (
    Harmless(
        "zero-accept-clamped", "The node of a commit is clamped to be at least 0.", "vllm 56419",
        (Edit(
            "instep_optimized/round_for_step_count.py",
            "inputs.rows, inputs.slots, acceptance.last_correct_step_indices,",
            "inputs.rows, inputs.slots, acceptance.last_correct_step_indices.clamp(min=0),",
        ),),
        "ragged", Setting(strategy="snapshot"),
        "The root is always accepted, so accept_lens is at least 1 and the node, accept_lens - 1, at least 0: "
        "a clamp changes nothing. If the index counts drafts, not tokens, it is -1 for none, and a clamp hides that: "
        "this is the fault zero-accept.",
        fires=False,
    ),
    Harmless(
        "beta-by-its-definition", "The write gate is 1 / (1 + exp(-b)) and not the library's sigmoid.", "",
        (Edit(
            "instep_optimized/ops/plain/gdn.py", "beta=sigmoid(b.to(q.dtype)),",
            "beta=1 / (1 + torch.exp(-b.to(q.dtype))),",
        ),),
        "accepted", Setting(),
        "Both are within two roundings of the exact value for every b, also where exp(-b) overflows (the quotient is 0 "
        "then, as the gate is): an error of the size that every op has, which the derived tier measures and allows.",
        fires=True,
    ),
)
