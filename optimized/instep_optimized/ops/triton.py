"""The table of the production kernels: `TRITON`, and its rounding points.

Importing it decides whether Triton interprets kernels (`kernels.runtime`). Leaves out: the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from instep_reference.contract.declared_rounding import Product, Storage
from instep_reference.contract.place_names import COMPONENTS

from ..kernels.attention.dispatch import attend, gated_attend, scratch
from ..kernels.convs.causal_conv import conv, conv_inputs
from ..kernels.decisions.argmax_and_acceptance import accept, pick
from ..kernels.decisions.grow_draft_tree import build_tree, select_beams, topk_tokens
from ..kernels.decisions.rerun_ring_plan import plan_ring
from ..kernels.decisions.row_places_and_lengths import advance, choose, place_rows, shift
from ..kernels.decisions.top_k_top_p_sampling import draw
from ..kernels.decisions.tree_shapes_and_acceptance import plan_path, plan_tree
from ..kernels.gdn_dispatch import gdn
from ..kernels.gdn_prefill.chunk64 import TOKENS
from ..kernels.prefill_gdn import prefill_gdn
from ..kernels.products.linear import head_pick, linear, linears, lm_head, mlp
from ..kernels.products.moe import moe
from ..kernels.rowwise.copy_units import move, move_rows, moves
from ..kernels.rowwise.gather_and_scatter_rows import concat, embed, select, store_rows
from ..kernels.rowwise.gdn_inputs import gdn_inputs
from ..kernels.rowwise.norms import add_norm, draft_inputs, gated_norm, norm
from ..kernels.rowwise.pointwise import add, output_gate
from ..kernels.rowwise.qk_norm_and_rotary import attention_inputs, kv_inputs
from ..kernels.runtime import must_round
from ..kernels.verify_gdn import verify_gdn
from ..kernels.window_gdn import window_gdn
from .op_protocols import Ops, Types
from .plain.rerun_ring import kept_updates
from .rowwise_op_names import BY_ROW

KEPT_WIDE = ("q", "k", "v", "log_decay", "beta", "update", "logits")  # stored in fp32, as they are computed
WHOLE_NUMBERS = ("pick", "length", "root")


def types(activation: torch.dtype, state: Storage) -> Types:
    """Hidden rows, conv windows and KV in the activation dtype; the recurrent state as declared."""
    must_round(activation, state)
    return Types(hidden=activation, conv=activation, state=state, kv=activation, consumed=torch.float32)


def rounds(activation: torch.dtype, state: Storage) -> Mapping[str, Storage]:
    """The activation dtype, except: fp32 for inputs and updates of the delta rule and for logits; the state's own.

    Inside an op everything is fp32, with three exceptions: the probabilities of attention are cast to the values'
    dtype, the middle rows of an MLP and of experts to the activation dtype, and prefill of 16-bit activations
    multiplies the delta rule in bf16 (`products`).
    """
    declared: dict[str, Storage] = dict.fromkeys(COMPONENTS, activation)
    declared.update(dict.fromkeys(KEPT_WIDE, torch.float32))
    declared.update(dict.fromkeys(WHOLE_NUMBERS, torch.int64))
    return declared | {"state": state}


TRITON = Ops(
    name="triton",
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
    add_norm=add_norm,
    conv_inputs=conv_inputs,
    draft_inputs=draft_inputs,
    gated_attend=gated_attend,
    head_pick=head_pick,
    kv_inputs=kv_inputs,
    linears=linears,
    moves=moves,
    prefill_gdn=prefill_gdn,
    verify_gdn=verify_gdn,
    window_gdn=window_gdn,
    products={
        "gdn.chunk": Product("bf16", block=TOKENS, residual=True, narrow=True),
        "lm_head": Product("ieee", narrow=True, sums="hopper"),  # the one product whose result is wider than 16 bits
    },
    captures=True,
    trees=True,
    tiled=True,
    chances=True,
    scratch=scratch,
    row_invariant=frozenset(BY_ROW) - {"linear", "mlp", "moe", "lm_head", "attend"},
)
