"""Kernels of KDA and Mamba2 with the arguments of SGLang's, vLLM's and FLA's, in torch, for tests of their adapters.

Faults, by name: "bias": the first head's bias of the gate for all; "step": the states of a window are stored a step
late; "pads": the request that pads a batch is written; "count": a commit folds a token less; "forgets": the last state
of a sequence is not stored; "stride": rows of snapshots are as far apart as the window is wide; "group": B of the next
group. States are [units, HV, V, K]. Leaves out: GDN (`fake_kernels.py`), trees, speed.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import softplus

from support.worlds.fake_kernels import normed

Keep = Callable[[int, int, torch.Tensor], None]  # (request, row of its window, state after it)
RAW = ("rawk", "rawv", "g", "beta")


def absorbed(S: torch.Tensor, k: Any, v: Any, g: Any, beta: Any) -> torch.Tensor:
    """A token in the state [HV, V, K]; g [HV, K]."""
    S, k = g.exp()[:, None] * S, normed(k.float())
    return S + (beta[:, None] * (v.float() - torch.einsum("hvk,hk->hv", S, k)))[:, :, None] * k[:, None]


class Kda:
    """The kernels of one release, with these faults."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults

    def gates(self, x: dict[str, Any], at: int) -> tuple[torch.Tensor, torch.Tensor]:
        bias, heads = x["dt_bias"].reshape(len(x["A_log"]), -1), len(x["A_log"])
        a = x["a"][at].reshape(heads, -1).float() + (bias[:1] if "bias" in self.faults else bias)
        rate, bound = x["A_log"].exp()[:, None], x["lower_bound"]
        g = -rate * softplus(a) if bound is None else bound * (rate * a).sigmoid()
        return g, x["b"][at].float().sigmoid()

    def tokens(self, S: Any, x: dict[str, Any], rows: range) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(row, state after it, read-out) of these rows."""
        for at in rows:
            S = absorbed(S, x["k"][at], x["v"][at], *self.gates(x, at))
            yield at, S, torch.einsum("hvk,hk->hv", S, normed(x["q"][at].float())) * S.shape[-1] ** -0.5

    def run(self, x: dict[str, Any], pool: Any, index: Any, ends: Any, stores: bool, keep: Keep) -> torch.Tensor:
        """Every sequence through its unit of the pool."""
        core = torch.zeros_like(x["v"])
        for n, (begin, end) in enumerate(pairwise(ends.tolist())):
            if (unit := int(index[n])) > 0 or "pads" in self.faults:
                after = pool[unit]
                for at, after, core[at] in self.tokens(pool[unit].float(), x, range(begin, end)):
                    keep(n, min(at - begin + ("step" in self.faults), end - begin - 1), after)
                if stores and "forgets" not in self.faults:
                    pool[unit] = after
        return core


def sglang(*faults: str) -> dict[str, Any]:
    """Functions of SGLang, by name."""
    kernels = Kda(*faults)

    def update(
        *, q: Any, k: Any, v: Any, initial_state_source: Any, initial_state_indices: Any, cu_seqlens: Any, is_kda: bool,
        disable_state_update: bool = False, intermediate_states_buffer: Any = None,
        intermediate_state_indices: Any = None, cache_ring: bool = False, **given: Any,
    ) -> torch.Tensor:
        assert is_kda
        x = given | {"q": q[0], "k": k[0], "v": v[0], "a": given["a"][0], "b": given["b"][0]}

        def keep(n: int, row: int, S: torch.Tensor) -> None:
            if intermediate_states_buffer is not None and intermediate_state_indices[n] >= 0:
                intermediate_states_buffer[intermediate_state_indices[n], row] = S
            at = int(cu_seqlens[n]) + row
            for name, numbers in zip(RAW, (x["k"][at], x["v"][at], *kernels.gates(x, at)), strict=True):
                if cache_ring:
                    given[f"replayssm_{name}"][initial_state_indices[n], :, row] = numbers

        return kernels.run(x, initial_state_source, initial_state_indices, cu_seqlens, not disable_state_update,
                           keep)[None]  # fmt: skip

    def packed(*, mixed_qkv: Any, initial_state: Any, out: Any, ssm_state_indices: Any, **given: Any) -> None:
        x = given | _split(mixed_qkv, initial_state)
        out[:, 0] = kernels.run(x, initial_state, ssm_state_indices, torch.arange(len(out) + 1), True, _forget)

    def commit(*, spec_state: Any, state_batch_indices: Any, accept_lens: Any, **given: Any) -> None:
        for slot, count in zip(state_batch_indices.tolist(), accept_lens.tolist(), strict=True):
            for layer, pool in enumerate(spec_state.temporal if slot >= 0 else ()):
                for row in range(count - ("count" in faults)):
                    kept = [getattr(spec_state, f"replayssm_{name}")[layer, slot, :, row] for name in RAW]
                    pool[slot] = absorbed(pool[slot], *kept)

    return {"fused_sigmoid_gating_delta_rule_update": update, "fused_recurrent_kda_packed_decode": packed,
            "commit_kda_replayssm_after_verify": commit}  # fmt: skip


def vllm(*faults: str) -> dict[str, Any]:
    """Functions of vLLM, by name. Unit 0 is its null block."""
    kernels = Kda(*faults)

    def recurrent(
        *, q: Any, k: Any, v: Any, raw_g: Any, raw_beta: Any, initial_state: Any, cu_seqlens: Any,
        ssm_state_indices: Any, num_accepted_tokens: Any, out: None, **given: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = given | {"q": q[0], "k": k[0], "v": v[0], "a": raw_g[0], "b": raw_beta[0]}
        before = ssm_state_indices.gather(1, num_accepted_tokens[:, None].long() - 1)[:, 0]

        def keep(n: int, row: int, S: torch.Tensor) -> None:
            initial_state[ssm_state_indices[n, row]] = S

        return kernels.run(x, initial_state, before, cu_seqlens, False, keep)[None], initial_state

    def packed(
        mixed_qkv: Any, *, raw_g: Any, raw_beta: Any, initial_state: Any, state_indices: Any, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = given | _split(mixed_qkv, initial_state) | {"a": raw_g[0], "b": raw_beta[0]}
        ends = torch.arange(len(mixed_qkv) + 1)
        return kernels.run(x, initial_state, state_indices, ends, True, _forget)[None], initial_state

    return {"fused_recurrent_kda": recurrent, "fused_recurrent_kda_packed_decode": packed}


def fla(*faults: str) -> dict[str, Any]:
    """Functions of FLA, by name."""
    kernels = Kda(*faults)

    def recurrent(
        *, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, use_gate_in_kernel: bool,
        **given: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = given | {"q": q[0], "k": k[0], "v": v[0], "a": g[0], "b": beta[0]}
        pool = torch.cat([torch.zeros_like(initial_state[:1]), initial_state])
        core = kernels.run(x, pool, torch.arange(1, len(pool)), cu_seqlens, True, _forget)
        return core[None], pool[1:]

    return {"fused_recurrent_kda": recurrent, "chunk_kda": recurrent}


def selective(S: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(state [HV, V, K] after a token, read-out); arguments as the kernels have them, for one token."""
    heads, dt = len(x), softplus(dt + bias)
    B, C = (rows.float().repeat_interleave(heads // len(rows), dim=0)[:, None] for rows in (B, C))
    S = (A * dt[..., None]).exp() * S.float() + B * (dt * x)[..., None]
    return S, (S * C).sum(-1) + D * x


def sglang_mamba2(*faults: str) -> dict[str, Any]:
    def update(
        state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, *, D: Any, dt_bias: Any, out: Any, dt_softplus: bool,
        z: None = None, state_batch_indices: Any = None, pad_slot_id: int = -1, disable_state_update: bool = False,
        intermediate_states_buffer: Any = None, cache_steps: int = 0, retrieve_parent_token: None = None,
        intermediate_state_indices: Any = None,
    ) -> None:
        rows = [rows if x.dim() == 4 else rows[:, None] for rows in (x, dt, B, C, out)]
        index = range(len(x)) if state_batch_indices is None else state_batch_indices.tolist()
        for n, unit in enumerate(index):
            if unit != pad_slot_id:
                S = state[unit]
                for t in range(rows[0].shape[1]):
                    x_, dt_, B_, C_ = (one[n, t] for one in rows[:4])
                    B_ = B_.roll(1, 0) if "group" in faults else B_
                    S, rows[4][n, t] = selective(S, x_, dt_, A, B_, C_, D, dt_bias)
                    if intermediate_states_buffer is not None:
                        steps = cache_steps if "stride" in faults else intermediate_states_buffer.shape[1]
                        kept = intermediate_states_buffer.view(-1, *S.shape)
                        kept[int(intermediate_state_indices[n]) * steps + t] = S
                if not disable_state_update:
                    state[unit] = S

    return {"selective_state_update": update}


def vllm_mamba2(*faults: str) -> dict[str, Any]:
    def update(
        state: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, dt_bias: Any, *, dt_softplus: bool,
        state_batch_indices: Any, dst_state_batch_indices: Any, out: Any, cu_seqlens: Any, num_accepted_tokens: Any,
        is_blackwell: bool,
    ) -> None:
        for n, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            table = state_batch_indices[n].reshape(-1)
            unit = int(table[0 if num_accepted_tokens is None else num_accepted_tokens[n] - 1 + ("step" in faults)])
            S = state[unit]
            for at in range(begin, end if unit else begin):
                B_ = B[at].roll(1, 0) if "group" in faults else B[at]
                S, out[at] = selective(S, x[at], dt[at], A, B_, C[at], D, dt_bias)
                state[table[at - begin]] = S

    return {"selective_state_update": update}


def _split(mixed: Any, states: Any) -> dict[str, Any]:
    return dict(zip("qkv", mixed.unflatten(1, (3, states.shape[1], -1)).unbind(1), strict=True))


def _forget(request: int, row: int, state: torch.Tensor) -> None:
    """A decode keeps no state of a row."""


# Module of a release -> its functions; adapter -> (function here, modules).
KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent"
ADAPTERS = {
    "sglang_kda": (sglang, ("sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
                            "sglang.kernels.ops.attention.fla.fused_recurrent",
                            "sglang.kernels.ops.attention.linear.kda_replayssm_spec_decode")),
    "vllm_kda": (vllm, (KDA,)),
    "fla_kda": (fla, ("fla.ops.kda", "fla.ops.kda.gate")),
    "sglang_mamba2": (sglang_mamba2, ("sglang.kernels.ops.mamba.triton_ops.mamba_ssm",
                                      "sglang.kernels.ops.attention.fla.fused_recurrent",
                                      "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent")),
    "vllm_mamba2": (vllm_mamba2, ("vllm.model_executor.layers.mamba.ops.mamba_ssm",)),
}  # fmt: skip
