"""The table of the production kernels: `TRITON`, and its rounding points.

Importing it decides whether Triton interprets kernels (`kernels.runtime`). Leaves out: the kernels themselves.
"""

from collections.abc import Mapping

import torch

from instep_reference.contract.declared_rounding import Product, Storage
from instep_reference.contract.place_names import COMPONENTS, Place
from instep_reference.contract.recurrences import RECURRENCES

from ..kernels import gdn_dispatch, gdn_fusions
from ..kernels.attention import dispatch, expand_latents
from ..kernels.convs import causal_conv
from ..kernels.decisions import (
    argmax_and_acceptance,
    grow_draft_tree,
    rerun_ring_plan,
    row_places_and_lengths,
    top_k_top_p_sampling,
    tree_shapes_and_acceptance,
)
from ..kernels.gdn_prefill.chunk64 import TOKENS
from ..kernels.products import linear, moe
from ..kernels.rowwise import copy_units, gather_and_scatter_rows, gdn_inputs, norms, pointwise, qk_norm_and_rotary
from ..kernels.runtime import must_round
from .op_protocols import Ops, Types, ops_of
from .plain.rerun_ring import kept_updates
from .rowwise_op_names import BY_ROW

KEPT_WIDE = ("q", "k", "v", "log_decay", "beta", "write", "update", "logits")  # stored in fp32, as they are computed
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


def key_inputs(
    *, key_raw: torch.Tensor, positions: torch.Tensor, k_norm: torch.Tensor, eps: float, rotary_dim: int,
    theta: float, to: Place,
) -> torch.Tensor:
    """`MakeKeyInputs` of the seam. The kernel also turns a view of the keys as queries, which are dropped."""
    return qk_norm_and_rotary.attention_inputs(
        projected=key_raw[:, :, None].expand(-1, -1, 2, -1), key_raw=key_raw, positions=positions, q_norm=k_norm,
        k_norm=k_norm, eps=eps, rotary_dim=rotary_dim, theta=theta, to=(to, to)).key


TRITON = Ops(
    name="triton",
    types=types,
    rounds=rounds,
    **ops_of(
        gdn_dispatch, gdn_fusions, dispatch, expand_latents, causal_conv,
        argmax_and_acceptance, grow_draft_tree, rerun_ring_plan, row_places_and_lengths, top_k_top_p_sampling,
        tree_shapes_and_acceptance, linear, moe, copy_units, gather_and_scatter_rows, gdn_inputs, norms,
        pointwise, qk_norm_and_rotary,
    ),
    kept_updates=kept_updates,
    key_inputs=key_inputs,
    keeps="update",
    products={
        **{row.forms[1]: Product("bf16", block=TOKENS, residual=True, narrow=True) for row in RECURRENCES.values()
           if row.update == "delta"},
        "lm_head": Product("ieee", narrow=True, sums="hopper"),  # the one product whose result is wider than 16 bits
    },
    captures=True,
    bounds_beta=True,
    bounds_decay=True,
    trees=True,
    tiled=True,
    chances=True,
    split=True,
    sigmoid=True,
    clamps=True,
    row_invariant=frozenset(BY_ROW) - {
        "linear", "mlp", "squared_mlp", "moe", "lm_head", "attend", "attend_latents"},
)
