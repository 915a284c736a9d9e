"""Which ops make every row of their result of that row alone, so that they can be served row by row.

Leaves out: which op sets do so in the same bits (`Ops.row_invariant`).
"""

from __future__ import annotations

from collections.abc import Mapping

# Ops that make a row of the result of that row alone (`attend`: and of memory), and the arguments that hold the rows.
BY_ROW: Mapping[str, tuple[str, ...]] = {
    "norm": ("x",), "linear": ("x",), "add": ("x", "y"), "concat": ("x", "y"), "gdn_inputs": ("mixed", "a", "b"),
    "gated_norm": ("core", "z"), "attention_inputs": ("projected", "key_raw", "positions"), "attend": ("query",),
    "output_gate": ("attended", "projected"), "mlp": ("x",), "moe": ("x",), "lm_head": ("x",),
}
