"""FlashInfer's and FlashQLA's gated delta rule as arms, called as their adapters call them; FlashInfer's attention.

Both need K = V = 128, bf16 rows, fp32 states and a Hopper card or newer. FlashInfer's verify keeps snapshots and leaves
the commit to its caller: here torch's indexed copy does it. Its ReplaySSM refuses a Hopper card. Its attention is
planned once for a batch, outside the timing, and reads our pages.
Mirrors: flashinfer-python 0.7.2.post1, flash-qla 0.1.3.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from instep.report.machine import release
from instep_optimized.memory_addresses import Pages, Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.plain.attend import extents, visible
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import Unsupported

from ..answer_check import Judged, off
from ..bench_types import Arm, At, Ground, state_dtype
from ..drawn_rows import Rows, off_from_plain, redrawn
from ..kinds.strategies import accepted_of
from .judge_peer_states import committed, pools

WORKSPACE = 256 << 20  # bytes of FlashInfer's attention workspace for the parts of a sequence


def _adapter(name: str, ground: Ground, at: At) -> Any:
    if ground.dtype is not torch.bfloat16 or at.get("state", "float32") != "float32":
        raise Unsupported("it takes bf16 rows and fp32 states")
    return import_module(f"instep.adapters.{name}")


def _rows(rows: Rows, window: int) -> dict[str, torch.Tensor]:
    named = {**rows.split, "a": rows.a, "b": rows.b}
    each = {name: x.view(-1, window, *x.shape[1:]) for name, x in named.items()}
    return {**each, "A_log": rows.A_log, "dt_bias": rows.dt_bias}


def decode(ground: Ground, at: At, name: str, rows: Rows, parts: list[Part]) -> Arm:
    run_one = _adapter("flashinfer", ground, at).KERNELS.gated_delta_rule_decode_pretranspose
    given, slots = _rows(rows, 1), parts[0].read.units.int()

    def run(pool: torch.Tensor) -> torch.Tensor:
        core, _ = run_one(**given, state=None, initial_state=pool.mT, initial_state_indices=slots)
        return torch.as_tensor(core[:, 0])

    return Arm(name, lambda: [run(form.read.pool) for form in parts],
               lambda: off_from_plain(run, rows.inputs(PLAIN), parts[0], truth=rows.inputs(PLAIN, wide=True)),
               len(parts), peer=release("flashinfer", "flashinfer-python"))  # fmt: skip


def verify(ground: Ground, at: At, name: str, rows: list[Rows], config: ModelConfig) -> Arm:
    run_one = _adapter("flashinfer", ground, at).KERNELS.gated_delta_rule_mtp
    batch, window, layers = at["batch"], at["window"], len(config.layers)
    pool = pools(ground, config, layers, batch + 1, state_dtype(at))
    kept = torch.zeros(layers, batch, window, *pool.shape[2:], device=ground.device)
    slots, step, every = ground.ints(range(1, batch + 1)), accepted_of(window) - 1, [_rows(one, window) for one in rows]

    def one(layer: int, source: torch.Tensor) -> torch.Tensor:
        core, _ = run_one(**every[layer % len(rows)], initial_state=source, initial_state_indices=slots.int(),
                          intermediate_states_buffer=kept[layer], disable_state_update=True)  # fmt: skip
        return torch.as_tensor(core).flatten(0, 1)

    def work() -> torch.Tensor:
        for layer in range(layers):
            core = one(layer, pool[layer])
            pool[layer].index_copy_(0, slots, kept[layer, :, step])
        return core  # only the last layer's result: a caller that keeps all of them allocates memory for each

    def check() -> str:
        before = pool[0].clone()
        core, after = one(0, before), before.clone()
        after[slots] = kept[0, :, step]
        return committed(ground, at, rows[0], before, core, after, slots)

    return Arm(name, work, check, layers, anew=lambda: redrawn(pool),
               peer=release("flashinfer", "flashinfer-python"))  # fmt: skip


def prefill(
    ground: Ground, at: At, name: str, rows: Rows, parts: list[Part], inputs: GdnInputs, judge: Callable[..., Judged],
) -> Arm:
    run_one = _adapter("flashinfer", ground, at).CHUNKED.chunk_gated_delta_rule
    q, k, v = (x.bfloat16() for x in inputs[:3])
    starts, slots, decay = _starts(ground, at), parts[0].read.units, inputs.log_decay.exp()

    def run(pool: torch.Tensor) -> torch.Tensor:
        core, _ = run_one(
            q=q, k=k, v=v, g=decay, beta=inputs.beta, scale=1.0, initial_state=pool.mT, output_state=pool.mT,
            output_final_state=True, state_indices=slots, cu_seqlens=starts,
        )
        return torch.as_tensor(core)

    return Arm(name, lambda: [run(form.read.pool) for form in parts], lambda: judge(run), len(parts),
               peer=release("flashinfer", "flashinfer-python"))  # fmt: skip


def flashqla(
    ground: Ground, at: At, name: str, rows: Rows, parts: list[Part], inputs: GdnInputs, judge: Callable[..., Judged],
) -> Arm:
    run_one = _adapter("flashqla", ground, at).FLASHQLA.chunk_gated_delta_rule
    q, k, v = (x[None].bfloat16() for x in inputs[:3])
    starts, slots = _starts(ground, at), parts[0].read.units
    dense = parts[0].read.pool.mT[slots]

    def call(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        core, after = run_one(
            q=q, k=k, v=v, g=inputs.log_decay[None], beta=inputs.beta[None], scale=1.0, initial_state=state,
            output_final_state=True, cu_seqlens=starts, state_v_first=True,
        )
        return torch.as_tensor(core[0]), after

    def run(pool: torch.Tensor) -> torch.Tensor:
        core, pool.mT[slots] = call(pool.mT[slots])
        return core

    return Arm(name, lambda: [call(dense) for _ in parts], lambda: judge(run), len(parts),
               peer=release("flash-qla"))  # fmt: skip


def _attend(
    ground: Ground, at: At, name: str, backend: str, query: torch.Tensor, pages: list[Pages], **judged: torch.Tensor
) -> Arm:
    if ground.dtype not in (torch.bfloat16, torch.float16):
        raise Unsupported("it takes bf16 and fp16")
    if pages[0].key_scales is not None:
        raise Unsupported("of fp8 KV it takes a scale per tensor, and none per row")
    if pages[0].ancestors is not None and backend != "fa2":
        raise Unsupported("FA3 takes no mask")
    batch, rows, form = at["batch"], at["rows"], pages[0]
    page, heads, width = form.keys.shape[1:]
    each = torch.arange(batch + 1, dtype=torch.int32, device=ground.device)
    last = torch.full((batch,), (at["behind"] + rows - 1) % page + 1, dtype=torch.int32, device=ground.device)
    room = torch.empty(WORKSPACE, dtype=torch.uint8, device=ground.device)
    planned = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(room, "NHD", backend=backend)
    planned.plan(each * rows, each * form.table.shape[1], form.table.flatten().int(), last, query.shape[1], heads,
                 width, page, causal=True, q_data_type=ground.dtype, kv_data_type=ground.dtype,
                 custom_mask=_mask(form))  # fmt: skip

    def run(one: Pages) -> torch.Tensor:
        return torch.as_tensor(planned.run(query, (one.keys, one.values)))

    return Arm(name, lambda: [run(one) for one in pages],
               lambda: off("attended", run(form), judged["truth"], judged["plain"], 1), len(pages),
               peer=release("flashinfer", "flashinfer-python"))  # fmt: skip


def _mask(form: Pages) -> torch.Tensor | None:
    """The mask of every row of trees, request after request; None: rows are causal."""
    if form.ancestors is None:
        return None
    return torch.cat([visible(form, *each).flatten() for each in extents(form)])


attend_2, attend_3 = (partial(_attend, backend=f"fa{number}") for number in (2, 3))


def _starts(ground: Ground, at: At) -> torch.Tensor:
    return torch.arange(0, at["sequences"] * at["tokens"] + 1, at["tokens"], device=ground.device)
