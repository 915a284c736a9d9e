"""`PLAIN`: every op in straightforward torch on the engine's own pool views, any dtype, CPU or GPU.

It is a subject like the other op sets, never the yardstick. Rounding points: everything is summed in at least fp32
(fp64 when an input is fp64) and cast once, to the dtype that `rounds` declares. Leaves out: speed beyond what tests
need.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from instep_reference.contract.declared_rounding import Storage
from instep_reference.contract.place_names import COMPONENTS

from ..op_protocols import Ops, Types
from .argmax_and_acceptance import accept, pick
from .attend import attend, attention_inputs, output_gate
from .causal_conv import conv
from .compute_width import width
from .copy_units import move, move_rows, store_rows
from .embed_norm_linear_head import add, concat, embed, linear, lm_head, norm, select
from .gdn import gated_norm, gdn, gdn_inputs
from .grow_draft_tree import build_tree, select_beams, topk_tokens
from .mlp import mlp, moe
from .rerun_ring import kept_updates
from .rerun_ring_plan import plan_ring
from .row_places_and_lengths import advance, choose, place_rows, plan_path, plan_tree, shift
from .top_k_top_p_sampling import draw

KEPT_WIDE = ("q", "k", "v", "log_decay", "beta", "logits")  # not rounded to the activation dtype
WHOLE_NUMBERS = ("pick", "length", "root")


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
    embed=embed,
    norm=norm,
    linear=linear,
    add=add,
    concat=concat,
    select=select,
    conv=conv,
    gdn_inputs=gdn_inputs,
    gdn=gdn,
    kept_updates=kept_updates,
    gated_norm=gated_norm,
    attention_inputs=attention_inputs,
    store_rows=store_rows,
    attend=attend,
    output_gate=output_gate,
    mlp=mlp,
    moe=moe,
    lm_head=lm_head,
    pick=pick,
    draw=draw,
    accept=accept,
    place_rows=place_rows,
    choose=choose,
    advance=advance,
    shift=shift,
    plan_ring=plan_ring,
    plan_tree=plan_tree,
    plan_path=plan_path,
    topk_tokens=topk_tokens,
    select_beams=select_beams,
    build_tree=build_tree,
    move=move,
    move_rows=move_rows,
    keeps="update",
    trees=True,
    tiled=True,
    chances=True,
)

__all__ = ["PLAIN", "rounds", "types"]
