"""Wrong inputs of an op: another row, head, request or tensor, or a rounded one.

The op is run again in fp64 on the subject's own inputs with one of them changed. Leaves out: ops of one input, whose
rows are rows of the result (`wrong_rows.py`), weights and formulas (`constants.py`), and memory (`wrong_memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...checks.error_measurement import HEAD_AXIS
from .finding_case import Case, Explanation, in_16_bits

# Component -> the components that its op reads, if there are several, or if it reads memory, too.
READS: dict[str, tuple[str, ...]] = {
    "mixed": ("qkv",), "state": ("update",), "gated": ("core", "z"),
    "attended": ("query", "key", "value"), "opened": ("attended", "projected"),
    "residual": ("mixer", "mixer_normed"), "hidden": ("residual", "mlp", "mlp_normed"), "skip": ("core", "v"),
    "joined": ("normed", "post_normed"),
}  # fmt: skip
READS_OF_CONVS = {**READS, "qkv": ("in_gate", "x"), "gated": ("out_gate", "mixed")}  # of short convolutions
# Ops of one input, which may have been rounded, or replaced as a whole.
READS_ONE: dict[str, tuple[str, ...]] = {
    "qkv": ("normed",), "z": ("normed",), "b": ("normed",), "a": ("normed",), "q": ("mixed",), "k": ("mixed",),
    "v": ("mixed",), "log_decay": ("a",), "beta": ("b",), "write": ("a",), "mixer": ("gated", "opened", "attended"),
    "projected": ("normed",), "in_gate": ("normed",), "out_gate": ("normed",), "x": ("normed",),
    "key_raw": ("normed",), "value": ("normed",), "query": ("projected",), "key": ("key_raw",),
    "post_normed": ("residual",), "mlp": ("post_normed",), "fused": ("joined",),
    "mixer_normed": ("mixer",), "mlp_normed": ("mlp",),
}  # fmt: skip
FAR = 4  # rows that an input may be shifted by


def inputs(case: Case) -> Iterator[Explanation]:
    gates = READS if case.own("out_gate") is None else READS_OF_CONVS
    gates = gates if case.own("skip") is None else {**gates, "gated": ("skip", "z")}
    several, alone = (reads.get(case.component, ()) for reads in (gates, READS_ONE))
    for name in (*several, *alone) if case.piece is not None else ():
        own = case.own(name)
        if own is None:
            continue
        changed = (*_moved(case, name, own), *_replaced(name, own)) if name in several else ()
        for says, other in (*changed, *((f"{name} rounded to {said}", narrow) for said, narrow in in_16_bits(own))):
            yield from case.made(f"is computed with {says}", {name: other})


def _moved(case: Case, name: str, own: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The rows of an input shifted, its heads rotated, and the rows of other requests."""
    rows = len(own)
    for step in [s for by in range(1, min(rows, FAR + 1)) for s in (by, -by) if s > 0 or by * 2 != rows]:
        where = "the row before" if step == 1 else "the row after" if step == -1 else (
            f"the row {abs(step)} {'before' if step > 0 else 'after'}")
        yield f"the {name} of {where}", own.roll(step, 0)
    axis = HEAD_AXIS.get(name)
    axis = axis if axis is not None and own.dim() > axis else 0
    heads = own.shape[axis] if axis else 1
    for step in range(1, min(heads, FAR + 1)):
        yield f"the {name} of another head: head h with that of head (h - {step}) mod {heads}", own.roll(step, axis)
    for whose, theirs in case.others(name):
        at = torch.arange(rows).clamp(max=len(theirs) - 1)
        if theirs.shape[1:] == own.shape[1:]:
            yield f"the {name} {whose}", theirs[at]


def _replaced(name: str, own: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"no {name}, but zeros", torch.zeros_like(own)
    yield f"{name} twice as large", 2 * own
    yield f"half of {name}", own / 2
    yield f"{name} of the opposite sign", -own
