"""Fusions: ops that an op set may have in addition to those of `op_protocols.py`, each a composition of them.

A fusion is a file here with its composition, a protocol and a field of `Ops` that is None by default, and a line of
`FUSIONS`. The model calls the composition. The composition calls the op if the op set has it, and else the parts. An op
declares the parts that it was made of (`fuses`): a set with a different part does not have the op. Leaves out: kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from instep_reference.contract.recurrences import GDN

from ..integer_op_protocols import Moved
from ..op_protocols import AddNorm, Ops
from .add_norm import add_norm
from .conv_inputs import conv_inputs
from .draft_inputs import draft_inputs
from .gated_attend import gated_attend
from .head_pick import head_pick
from .kv_inputs import kv_inputs
from .linears import linears
from .moves_of_several_layers import moves
from .prefill_gdn import prefill_gdn
from .verify_gdn import verify_gdn
from .window_gdn import window_gdn

__all__ = [
    "FUSIONS", "AddNorm", "Fusion", "Moved", "add_norm", "conv_inputs", "draft_inputs", "exact_of", "fuses",
    "gated_attend", "head_pick", "in_parts", "inside_of", "kv_inputs", "linears", "moves", "prefill_gdn", "verify_gdn",
    "wholes", "window_gdn",
]


@dataclass(frozen=True)
class Fusion:
    """Properties of a fusion.

    parts   the ops that it is the composition of
    exact   it gives the bits of its parts. So nothing is lost when the parts run instead: in a watched run (a place may
            be inside, or be replaced), and if one of the parts is swapped. False: it gives different bits, so it also
            runs when watched, and its results are judged like those of any op
    hides   components that stay inside: they cannot be shown while it runs
    shares  its results may be views on one tensor
    """

    parts: tuple[str, ...]
    exact: bool = True
    hides: frozenset[str] = frozenset()
    shares: bool = False


FUSIONS: Mapping[str, Fusion] = {
    "add_norm": Fusion(("add", "norm")),
    "conv_inputs": Fusion(("conv", "gdn_inputs"), hides=frozenset({"mixed"})),
    "draft_inputs": Fusion(("embed", "norm", "concat"), hides=frozenset({"embedding", "normed", "post_normed"})),
    "gated_attend": Fusion(("attend", "output_gate"), hides=frozenset({"attended"})),
    "head_pick": Fusion(("lm_head", "pick"), hides=frozenset({"logits"})),
    "kv_inputs": Fusion(("attention_inputs", "store_rows"), hides=frozenset({"key"})),
    "linears": Fusion(("linear",), exact=False, shares=True),
    "moves": Fusion(("move",)),
    "prefill_gdn": Fusion(
        ("conv", "gdn_inputs", GDN.name), hides=frozenset({"mixed", "q", "k", "v", "log_decay", "beta"})),
    "verify_gdn": Fusion(
        ("conv", "gdn_inputs", GDN.name), hides=frozenset({"mixed", "q", "k", "v", "log_decay", "beta"})),
    "window_gdn": Fusion(("gdn_inputs", GDN.name), hides=frozenset({"q", "k", "v", "log_decay", "beta"})),
    "fused_gdn": Fusion(
        ("gdn_inputs", GDN.name), exact=False, hides=frozenset({"q", "k", "v", "log_decay", "beta"})),
}  # fmt: skip


Op = TypeVar("Op", bound=Callable[..., object])


def fuses(**parts: Callable[..., object]) -> Callable[[Op], Op]:
    """Mark an op, as a decorator: it gives what these parts give."""

    def mark(op: Op) -> Op:
        op.fuses = op, parts  # type: ignore[attr-defined]
        return op

    return mark


def wholes(*parts: str) -> list[str]:
    """List the fusions that would still run in place of one of these ops."""
    return [name for name, fusion in FUSIONS.items() if not set(parts).isdisjoint(fusion.parts)]


def exact_of(ops: Ops) -> tuple[str, ...]:
    """Name the fusions of an op set that promise the bits of their parts."""
    return tuple(name for name, fusion in FUSIONS.items() if fusion.exact and getattr(ops, name) is not None)


def in_parts(ops: Ops) -> Ops:
    """Return the op set without its exact fusions: their parts run, with the same bits."""
    return replace(ops, **dict.fromkeys(exact_of(ops)))  # type: ignore[arg-type]


def inside_of(ops: Ops) -> frozenset[str]:
    """Name the components that cannot be shown with this op set, even when it is watched."""
    return frozenset().union(*(
        fusion.hides for name, fusion in FUSIONS.items() if not fusion.exact and getattr(ops, name) is not None
    ))  # fmt: skip
