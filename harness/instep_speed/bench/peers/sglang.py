"""SGLang's kernels as arms, called as its GDN backend calls them, in packed pools [units, HV, V, K].

    verify_and_scatter  `fused_sigmoid_gating_delta_rule_update` with snapshots, then
                        `fused_mamba_state_scatter_with_mask` over all layers
    replay              ReplaySSM (0.5.23): `gdn_replayssm_spec_decode` with its cursors; a row without room for two
                        more windows is folded by `commit_gdn_replayssm_circular`
    decode, packed_decode, prefill, conv
    mixer_packed, mixer_gated  `causal_conv1d_update`, then a decode of its rows

The kernels compute norms and gates inside, so they are compared with our arms that do so too. If the package is only
unpacked, its modules are loaded from the wheel one by one. Leaves out: trees. Mirrors: sglang 0.5.12 to 0.5.23.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from instep.adapters import stubbed_imports
from instep.report.machine import release
from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import Unsupported

from ..answer_check import first
from ..bench_types import Arm, At, Ground, state_dtype
from ..drawn_rows import WIDE, Rows, off_from_plain, redrawn
from ..kinds.mixer import Judge, Layer
from ..kinds.strategies import accepted_of
from .judge_peer_states import committed, pools, read_out

RING = 16  # tokens that ReplaySSM keeps of a request before it folds them
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # rows, pool, slots -> read-outs
INSIDE = {"softplus_beta": 1.0, "softplus_threshold": 20.0, "use_qk_l2norm_in_kernel": True}


def _kernels() -> Any:
    """The adapter, which finds the kernels of every release, in an unpacked wheel if the package is not installed."""
    return stubbed_imports.load("instep.adapters.sglang", stubbed_imports.sglang)


def _gated(rows: Rows, starts: torch.Tensor, **more: Any) -> torch.Tensor:
    packed = {name: x[None] for name, x in rows.split.items()}
    core: torch.Tensor = _kernels().GATED(
        A_log=rows.A_log, a=rows.a, dt_bias=rows.dt_bias, b=rows.b, cu_seqlens=starts, **packed, **INSIDE, **more)
    return core[0]


def _starts(ground: Ground, batch: int, window: int) -> torch.Tensor:
    return torch.arange(0, batch * window + 1, window, device=ground.device)


def decode(ground: Ground, at: At, name: str, rows: Rows, parts: list[Part]) -> Arm:
    _kernels()  # raises here if there are none, and not while the arm is judged
    starts, slots = _starts(ground, at["batch"], 1), parts[0].read.units.int()

    def run(pool: torch.Tensor) -> torch.Tensor:
        return _gated(rows, starts, initial_state_source=pool.mT, initial_state_indices=slots)

    return _over_pools(name, run, rows, parts)


def packed_decode(ground: Ground, at: At, name: str, rows: Rows, parts: list[Part]) -> Arm:
    rule, slots = _packed(rows), parts[0].read.units.int()
    return _over_pools(name, lambda pool: rule(rows.mixed, pool, slots), rows, parts)


def _packed(rows: Rows) -> Rule:
    packed, out = _kernels().PACKED, torch.empty_like(rows.split["v"])[:, None]

    def rule(mixed: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        packed(mixed_qkv=mixed, a=rows.a, b=rows.b, A_log=rows.A_log, dt_bias=rows.dt_bias,
               scale=rows.config.key_dim**-0.5, initial_state=pool.mT, out=out, ssm_state_indices=slots,
               use_qk_l2norm_in_kernel=True)  # fmt: skip
        return torch.as_tensor(out[:, 0])

    return rule


def prefill(ground: Ground, at: At, name: str, rows: Rows, parts: list[Part], inputs: GdnInputs, **judged: Any) -> Arm:
    kernels = _kernels()
    places = f"{kernels.NOW}.attention.fla.chunk", f"{kernels.THEN}.fla.chunk"
    chunk = kernels.take("ChunkGatedDeltaRuleFunction", *places)
    starts, slots = _starts(ground, at["sequences"], at["tokens"]), parts[0].read.units.int()
    q, k, v = (x[None].to(ground.dtype) for x in inputs[:3])

    def run(pool: torch.Tensor) -> torch.Tensor:
        core, _ = chunk.apply(q, k, v, inputs.log_decay[None], inputs.beta[None], 1.0, pool.mT, slots, starts, False)
        return torch.as_tensor(core[0])

    return Arm(name, lambda: [run(form.read.pool) for form in parts], lambda: judged["judge"](run), len(parts),
               peer=release("sglang"))  # fmt: skip


def _over_pools(name: str, run: Callable[[torch.Tensor], torch.Tensor], rows: Rows, parts: list[Part]) -> Arm:
    def check() -> str:
        return off_from_plain(run, rows.inputs(PLAIN), parts[0], truth=rows.inputs(PLAIN, wide=True))

    return Arm(name, lambda: [run(form.read.pool) for form in parts], check, len(parts), peer=release("sglang"))


def conv(ground: Ground, at: At, name: str, inputs: list[torch.Tensor], weight: torch.Tensor,
         pools: list[torch.Tensor], judge: Callable[..., str]) -> Arm:  # fmt: skip
    """Shift the live window, as a decode does. As with ours, every pool has separate rows."""
    if at["rows"] > 16:
        raise Unsupported("causal_conv1d_update is for windows")
    _kernels()
    update = import_module("instep.adapters.sglang_commit")._conv("causal_conv1d_update")
    slots = ground.ints(range(1, at["batch"] + 1)).int()
    even = [x.clone().view(at["batch"], at["rows"], -1).mT for x in inputs]  # older releases overwrite them

    def run(pool: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = update(even[0].clone(), pool, weight, None, "silu", conv_state_indices=slots)
        return found.mT.reshape(inputs[0].shape)

    def in_place(rows: torch.Tensor, pool: torch.Tensor) -> object:
        return update(rows, pool, weight, None, "silu", conv_state_indices=slots)

    def anew() -> None:
        for own, x in zip(even, inputs, strict=True):
            own.mT.copy_(x.view(own.mT.shape))

    return Arm(name, lambda: [in_place(*one) for one in zip(even, pools, strict=True)], lambda: judge(run), len(pools),
               anew=anew, peer=release("sglang"))  # fmt: skip


def mixer_packed(ground: Ground, at: At, name: str, rows: Rows, layers: list[Layer], judge: Judge) -> Arm:
    return _mixer(name, _packed(rows), layers, judge)


def mixer_gated(ground: Ground, at: At, name: str, rows: Rows, layers: list[Layer], judge: Judge) -> Arm:
    starts = _starts(ground, at["batch"], 1)

    def rule(mixed: torch.Tensor, states: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return _gated(replace(rows, mixed=mixed), starts, initial_state_source=states.mT, initial_state_indices=slots)

    return _mixer(name, rule, layers, judge)


def _mixer(name: str, rule: Rule, layers: list[Layer], judge: Judge) -> Arm:
    """The conv overwrites its rows, so it gets separate ones, and the judge gets a copy."""
    _kernels()
    update, slots = import_module("instep.adapters.sglang_commit")._conv("causal_conv1d_update"), layers[0].slots.int()
    drawn, layers = layers, [replace(layer, x=layer.x.clone()) for layer in layers]

    def run(layer: Layer) -> torch.Tensor:
        mixed = update(layer.x, layer.windows, layer.weight, None, "silu", conv_state_indices=slots)
        return rule(mixed, layer.states, slots)

    def check() -> str:
        return judge(lambda layer: run(replace(layer, x=layer.x.clone())))

    def anew() -> None:
        for own, layer in zip(layers, drawn, strict=True):
            own.x.copy_(layer.x)

    return Arm(name, lambda: [run(layer) for layer in layers], check, len(layers), anew=anew, peer=release("sglang"))


def verify_and_scatter(ground: Ground, at: At, name: str, rows: list[Rows], config: ModelConfig) -> Arm:
    batch, window, layers, stored = at["batch"], at["window"], len(config.layers), state_dtype(at)
    _kernels()
    adapter = import_module("instep.adapters.sglang_commit")
    scatter = adapter.take("fused_mamba_state_scatter_with_mask",
                           *(f"{place}.mamba_state_scatter_triton" for place in adapter.MAMBA))  # fmt: skip
    pool = pools(ground, config, layers, batch + 1, stored)
    kept = torch.zeros(layers, batch, window, *pool.shape[2:], dtype=stored, device=ground.device)
    slots, own = (ground.ints(x).int() for x in (range(1, batch + 1), range(batch)))
    starts, steps = _starts(ground, batch, window), ground.ints([accepted_of(window) - 1] * batch).int()

    def verify(layer: int, source: torch.Tensor) -> torch.Tensor:
        return _gated(
            rows[layer % len(rows)], starts, initial_state_source=source, initial_state_indices=slots,
            disable_state_update=True, intermediate_states_buffer=kept[layer], intermediate_state_indices=own,
            cache_steps=window,
        )

    def work() -> torch.Tensor:
        for layer in range(layers):
            core = verify(layer, pool[layer])
        scatter(pool, kept, slots, steps)
        return core  # only the last layer's result: a caller that keeps all of them allocates memory for each

    def check() -> str:
        before = pool[0].clone()
        core = verify(0, before)
        after = before.clone()
        scatter(after[None], kept[:1].contiguous(), slots, steps)
        return committed(ground, at, rows[0], before, core, after, slots.long())

    return Arm(name, work, check, layers, anew=lambda: redrawn(pool), peer=release("sglang"))


def replay(ground: Ground, at: At, name: str, rows: list[Rows], config: ModelConfig) -> Arm:
    """Move cursors by the accepted tokens, and fold at the commit. With windows of 4 every third round folds, which the
    mean of samples includes.

    A ring folds as soon as it has no room for two more windows. As in SGLang 0.5.20 to 0.5.23, a verify is one launch
    per layer, and a commit one of all layers; a ring that is narrower than fp32 also has low parts.
    """
    if state_dtype(at) is not torch.float32:
        raise Unsupported("it keeps fp32 checkpoints")
    _kernels()
    try:
        module = import_module("sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode")
    except ImportError:
        raise Unsupported("not in this release") from None
    batch, window, layers = at["batch"], at["window"], len(config.layers)
    slots, heads, values, keys = batch + 1, config.value_heads, config.value_dim, config.key_dim

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, device=ground.device, dtype=dtype)

    pool = pools(ground, config, layers, slots, torch.float32)
    wide, narrow, low = (layers, slots, heads, RING), (layers, slots, config.key_heads, RING), None
    d, k, g = zeros(*wide, values, dtype=ground.dtype), zeros(*narrow, keys, dtype=ground.dtype), zeros(*wide)
    if ground.dtype is not torch.float32:
        low = torch.zeros_like(d), torch.zeros_like(k)
    out = zeros(batch * window, heads, values, dtype=ground.dtype)
    starts, index = _starts(ground, batch, window).int(), ground.ints(range(1, slots)).int()
    cursor, base, flush = (zeros(slots, dtype=kind) for kind in (torch.int32, torch.int32, torch.int8))
    accepted = ground.ints([accepted_of(window)] * batch).int()

    def verify(layer: int, source: torch.Tensor) -> torch.Tensor:
        one = rows[layer % len(rows)]
        low_d, low_k = (None, None) if low is None else (low[0][layer], low[1][layer])
        found: torch.Tensor = module.gdn_replayssm_spec_decode(
            **one.split, a=one.a, b=one.b, A_log=one.A_log, dt_bias=one.dt_bias, checkpoint_state=source,
            d_cache=d[layer], k_cache=k[layer], g_cache=g[layer], rawv_cache=low_d, rawk_cache=low_k, beta_cache=None,
            out=out, query_start_loc=starts, ssm_state_indices=index, replay_indices=index, write_pos=cursor,
            cache_base=base, is_flush=flush, max_cache_len=RING, max_spec_len=window, launch_mode="verify",
        )
        return found

    def commit(states: torch.Tensor, count: int = layers) -> None:
        low_d, low_k = (None, None) if low is None else (low[0][:count], low[1][:count])
        module.commit_gdn_replayssm_spec(cursor, base, flush, accepted, index, RING, window)
        module.commit_gdn_replayssm_circular(
            checkpoint_state=states, d_cache=d[:count], k_cache=k[:count], g_cache=g[:count], d_residual_cache=low_d,
            k_residual_cache=low_k, state_batch_indices=index, replay_indices=index, write_pos=cursor,
            cache_base=base, is_flush=flush, accept_lens=accepted,
        )

    def work() -> torch.Tensor:
        for layer in range(layers):
            core = verify(layer, pool[layer])
        commit(pool)
        return core

    def anew() -> None:
        redrawn(pool)
        for cell in (cursor, base, flush):
            cell.zero_()

    def check() -> str:
        """Compare the read-outs of every round until one has read a folded checkpoint, which only they can judge."""
        before, said = pool[0].clone(), list[str]()
        whole = before.mT.clone().to(WIDE)
        for number in range(RING // accepted_of(window) + 2):  # the last but one folds at the latest
            core = verify(0, before).clone()
            said.append(read_out(ground, at, rows[0], whole, core, f"the read-out of round {number + 1}"))
            commit(before[None], 1)
        for cell in (cursor, base, flush):
            cell.zero_()
        return first(*said)

    period = max(0, RING - 2 * window) // accepted_of(window) + 1
    return Arm(name, work, check, layers, period=period, anew=anew, peer=release("sglang"))
