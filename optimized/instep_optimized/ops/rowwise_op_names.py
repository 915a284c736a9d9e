"""The ops whose results depend row by row on their inputs, so that they can also run row by row.

Leaves out: the op sets that give the same bits either way (`Ops.row_invariant`).
"""

from collections.abc import Mapping

# Ops whose result rows depend only on the same input row (`attend`: and on memory), and their row arguments.
BY_ROW: Mapping[str, tuple[str, ...]] = {
    "norm": ("x",), "linear": ("x",), "add": ("x", "y"), "multiply": ("x", "y"),
    "scaled_add": ("x", "y"), "lightning_inputs": ("qkv",), "embed_streams": ("tokens",), "read_streams": ("x",),
    "add_streams": ("x", "y", "strength"), "norm_streams": ("x",), "gate_streams": ("x", "key", "value"),
    "concat": ("x", "y"), "gdn_inputs": ("mixed", "a", "b"),
    "gated_norm": ("core", "z"), "attention_inputs": ("projected", "key_raw", "positions"), "attend": ("query",),
    "attend_latents": ("query",),
    "key_inputs": ("key_raw", "positions"), "selective_inputs": ("mixed", "a"), "add_skip": ("core", "v"),
    "gated_group_norm": ("core", "z"), "squared_mlp": ("x",),
    "latent_inputs": ("projected", "key_raw", "positions"),
    "output_gate": ("attended", "projected"), "mlp": ("x",), "moe": ("x",), "lm_head": ("x",),
}
