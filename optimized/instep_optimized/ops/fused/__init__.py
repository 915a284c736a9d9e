"""Fusions: ops that an op set may have beside those of `base.py`, each defined as the composition of some of these.

A fusion is a file here with its protocol and its composition, a field of `Ops` that is None by default, and a line of
`FUSIONS`. The model calls the composition. That calls the op where the op set has it, and the parts where it does not.
Leaves out: kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .add_norm import AddNorm, MakeAddNorm, add_norm
from .conv_inputs import ConvInputs, conv_inputs
from .gdn import FusedGdn
from .linears import Linears, linears

if TYPE_CHECKING:
    from ..base import Ops

__all__ = [
    "FUSIONS", "AddNorm", "ConvInputs", "FusedGdn", "Fusion", "Linears", "MakeAddNorm", "add_norm", "conv_inputs",
    "in_parts", "inside_of", "linears",
]


@dataclass(frozen=True)
class Fusion:
    """parts   the ops that it is the composition of
    exact   it gives the bits of its parts. So nothing is lost when the parts serve instead: where somebody watches (a
            place may be inside, or be replaced), and where one of the parts is swapped. False: it has bits of its own,
            so it serves also where it is watched, and its results are judged like those of any op
    hides   components that stay inside: nobody can show them while it serves
    """

    parts: tuple[str, ...]
    exact: bool = True
    hides: frozenset[str] = frozenset()


FUSIONS: Mapping[str, Fusion] = {
    "add_norm": Fusion(("add", "norm")),
    "conv_inputs": Fusion(("conv", "gdn_inputs"), hides=frozenset({"mixed"})),
    "linears": Fusion(("linear",), exact=False),
    "fused_gdn": Fusion(
        ("gdn_inputs", "gdn"), exact=False, hides=frozenset({"q", "k", "v", "log_decay", "beta"})),
}  # fmt: skip


def in_parts(ops: Ops) -> Ops:
    """The op set without its exact fusions: their parts serve, with the same bits."""
    return replace(ops, **{name: None for name, fusion in FUSIONS.items() if fusion.exact})  # type: ignore[arg-type]


def inside_of(ops: Ops) -> frozenset[str]:
    """The components that nobody can show of this op set, also when it is watched."""
    return frozenset().union(*(
        fusion.hides for name, fusion in FUSIONS.items() if not fusion.exact and getattr(ops, name) is not None
    ))  # fmt: skip
