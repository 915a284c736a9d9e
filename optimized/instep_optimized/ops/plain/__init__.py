"""`PLAIN`: every op in straightforward torch on the engine's own pool views, any dtype, CPU or GPU.

It is a subject like the other op sets, never the yardstick. Rounding points: everything is summed in at least fp32
(fp64 when an input is fp64) and cast once, to the dtype that `rounds` declares. Leaves out: speed beyond what tests
need.
"""

from collections.abc import Mapping

import torch

from instep_reference.contract.declared_rounding import Storage
from instep_reference.contract.place_names import COMPONENTS

from ..op_protocols import Ops, Types, ops_of
from . import (
    argmax_and_acceptance,
    attend,
    causal_conv,
    copy_units,
    embed_norm_linear_head,
    gdn,
    grow_draft_tree,
    mlp,
    rerun_ring,
    residual_streams,
    row_places_and_lengths,
    top_k_top_p_sampling,
)
from .compute_width import width

KEPT_WIDE = ("q", "k", "v", "log_decay", "beta", "write", "logits")  # not rounded to the activation dtype
WHOLE_NUMBERS = ("pick", "length", "root", "ngram")


def types(activation: torch.dtype, state: Storage) -> Types:
    """Everything is stored in the activation dtype, except the recurrent state."""
    return Types(hidden=activation, conv=activation, state=state, kv=activation, consumed=width(activation),
                 recurrence=width(activation, state))


def rounds(activation: torch.dtype, state: Storage) -> Mapping[str, Storage]:
    """Component -> the dtype in which it is stored. KEPT_WIDE is fp32 (fp64 with fp64 activations)."""
    declared: dict[str, Storage] = dict.fromkeys(COMPONENTS, activation)
    declared.update(dict.fromkeys(KEPT_WIDE, width(activation)))
    declared.update(dict.fromkeys(WHOLE_NUMBERS, torch.int64))
    return declared | {"state": state, "update": width(activation, state)}


PLAIN = Ops(
    name="plain",
    types=types,
    rounds=rounds,
    **ops_of(
        argmax_and_acceptance, attend, causal_conv, copy_units, embed_norm_linear_head, gdn, grow_draft_tree, mlp,
        rerun_ring, residual_streams, row_places_and_lengths, top_k_top_p_sampling,
    ),
    keeps="update",
    trees=True,
    tiled=True,
    chances=True,
    split=True,
    sigmoid=True,
    clamps=True,
    bounds_beta=True,
    bounds_decay=True,
)

__all__ = ["PLAIN", "rounds", "types"]
