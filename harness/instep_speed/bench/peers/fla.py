"""FLA's functions of the gated delta rule and of KDA as arms, over dense states, as its callers use them.

Leaves out: paging; the states are one tensor, without a gather. Mirrors: fla-core 0.6.0.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from instep.report.machine import release
from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.errors import Unsupported

from ..answer_check import Judged
from ..bench_types import Arm, At, Ground
from ..drawn_rows import Rows, off_from_plain

NORMED = {"scale": 1.0, "output_final_state": True}


def decode(ground: Ground, at: At, name: str, rows: Rows, parts: list[Part]) -> Arm:
    form, inputs = import_module("instep.adapters.fla").FLA.fused_recurrent_gated_delta_rule, rows.inputs(PLAIN)
    if at["state"] != "float32":
        raise Unsupported("it carries states in fp32")
    dense = [part.read.pool[part.read.units].float() for part in parts]
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.log_decay, "beta": inputs.beta}
    given = {name: x[:, None] for name, x in named.items()}

    def run(pool: torch.Tensor) -> torch.Tensor:
        units = parts[0].read.units
        core, state = form(**given, initial_state=pool[units].float(), **NORMED)
        pool[units] = state.to(pool.dtype)
        return torch.as_tensor(core[:, 0])

    return Arm(name, lambda: [form(**given, initial_state=state, **NORMED) for state in dense],
               lambda: off_from_plain(run, inputs, parts[0], truth=rows.inputs(PLAIN, wide=True)), len(dense),
               peer=release("fla-core"))  # fmt: skip


def prefill(
    ground: Ground, at: At, name: str, rows: Rows, parts: list[Part], inputs: GdnInputs, judge: Callable[..., Judged],
) -> Arm:
    """Run on rows in the activations' dtype, as a model's are."""
    form = import_module("instep.adapters.fla").FLA.chunk_gated_delta_rule
    starts = torch.arange(0, at["sequences"] * at["tokens"] + 1, at["tokens"], device=ground.device)
    given: dict[str, Any] = {name: x[None].to(ground.dtype) for name, x in zip("qkv", inputs[:3], strict=True)}
    given |= {"g": inputs.log_decay[None], "beta": inputs.beta[None], "cu_seqlens": starts}
    units = parts[0].read.units
    dense = parts[0].read.pool[units].float().contiguous()

    def run(pool: torch.Tensor) -> torch.Tensor:
        core, state = form(**given, initial_state=pool[units].contiguous(), **NORMED)
        pool[units] = state.to(pool.dtype)
        return torch.as_tensor(core[0])

    return Arm(name, lambda: [form(**given, initial_state=dense, **NORMED) for _ in parts],
               lambda: judge(run), len(parts), peer=release("fla-core"))  # fmt: skip


def kda_decode(
    ground: Ground, at: At, name: str, rows: GdnInputs, parts: list[Part], judge: Callable[..., Judged | str]
) -> Arm:
    """`fused_recurrent_kda`, over one token of each request."""
    form = _kda().fused_recurrent_kda
    given = {name: x[:, None] for name, x in zip(("q", "k", "v", "g", "beta"), rows, strict=True)}
    dense = [part.read.pool[part.read.units].contiguous() for part in parts]

    def run(pool: torch.Tensor) -> torch.Tensor:
        units = parts[0].read.units
        core, pool[units] = form(**given, initial_state=pool[units].contiguous(), **NORMED)
        return torch.as_tensor(core[:, 0]).to(ground.dtype)

    return Arm(name, lambda: [form(**given, initial_state=state, **NORMED) for state in dense],
               lambda: judge(run), len(dense), peer=release("fla-core"))  # fmt: skip


def kda_prefill(
    ground: Ground, at: At, name: str, rows: GdnInputs, parts: list[Part], judge: Callable[..., Judged | str]
) -> Arm:
    """`chunk_kda`, on rows in the activations' dtype."""
    form = _kda().chunk_kda
    starts = torch.arange(0, len(rows.v) + 1, at["tokens"], device=ground.device)
    given: dict[str, Any] = {name: x[None].to(ground.dtype) for name, x in zip("qkv", rows[:3], strict=True)}
    given |= {"g": rows.log_decay[None], "beta": rows.beta[None], "cu_seqlens": starts}
    units = parts[0].read.units
    dense = parts[0].read.pool[units].contiguous()

    def run(pool: torch.Tensor) -> torch.Tensor:
        core, pool[units] = form(**given, initial_state=pool[units].contiguous(), **NORMED)
        return torch.as_tensor(core[0])

    return Arm(name, lambda: [form(**given, initial_state=dense, **NORMED) for _ in parts],
               lambda: judge(run), len(parts), peer=release("fla-core"))  # fmt: skip


def _kda() -> Any:
    import_module("instep.adapters.fla")  # decides whether Triton interprets, before FLA imports it
    return import_module("fla.ops.kda")
