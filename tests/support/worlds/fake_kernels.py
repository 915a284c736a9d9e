"""Kernels with the arguments of SGLang's, vLLM's, FlashInfer's and FlashQLA's, a few lines of torch each, for the tests
of their adapters.

Leaves out: speed, trees, and whatever the adapters do not use. States are [units, HV, V, K].
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import silu, softplus


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gates(A_log: Any, a: Any, dt_bias: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return -A_log.exp() * softplus(a + dt_bias), b.sigmoid()


def token(S: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    k = k.repeat_interleave(len(v) // len(k), dim=0)
    S = g.exp()[:, None, None] * S
    return S + torch.einsum("hv,hk->hvk", beta[:, None] * (v - torch.einsum("hvk,hk->hv", S, k)), k)


def rows_of(cu_seqlens: Any) -> list[range]:
    ends = cu_seqlens.tolist()
    return [range(*pair) for pair in pairwise(ends)]


class Kernels:
    """slip   the stride of snapshot rows is made of `cache_steps`"""

    def __init__(self, slip: bool = False) -> None:
        self.slip = slip

    def fused_recurrent_gated_delta_rule_update(
        self, *, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state_source: Any,
        initial_state_indices: Any, cu_seqlens: Any, disable_state_update: bool = False,
        intermediate_states_buffer: Any = None, intermediate_state_indices: Any = None, cache_steps: int | None = None,
    ) -> torch.Tensor:
        pool, kept, core = initial_state_source, intermediate_states_buffer, torch.empty_like(v)
        for rows, unit, row in zip(
            rows_of(cu_seqlens), initial_state_indices.tolist(), intermediate_state_indices.tolist(), strict=True
        ):
            S = pool[unit].clone()
            for t, at in enumerate(rows):
                S = token(S, k[0, at], v[0, at], g[0, at], beta[0, at])
                query = scale * q[0, at].repeat_interleave(len(S) // q.shape[2], dim=0)
                core[0, at] = torch.einsum("hvk,hk->hv", S, query)
                if kept is not None:
                    unit = row * (cache_steps if self.slip else kept.shape[1]) + t
                    kept[unit // kept.shape[1], unit % kept.shape[1]] = S
            if not disable_state_update:
                pool[unit] = S
        return core

    def fused_sigmoid_gating_delta_rule_update(
        self, *, A_log: Any, a: Any, dt_bias: Any, softplus_beta: float, softplus_threshold: float, q: Any, k: Any,
        v: Any, b: Any, use_qk_l2norm_in_kernel: bool, intermediate_state_indices: Any, **given: Any,
    ) -> torch.Tensor:
        g, beta = gates(A_log, a, dt_bias, b)
        rows = given["initial_state_indices"] if intermediate_state_indices is None else intermediate_state_indices
        return self.fused_recurrent_gated_delta_rule_update(
            q=normed(q), k=normed(k), v=v, g=g[None], beta=beta[None], scale=k.shape[-1] ** -0.5,
            intermediate_state_indices=rows, **given,
        )  # fmt: skip

    def fused_recurrent_gated_delta_rule_packed_decode(
        self, *, mixed_qkv: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, scale: float, initial_state: Any, out: Any,
        ssm_state_indices: Any, use_qk_l2norm_in_kernel: bool,
    ) -> None:
        heads, width, dim = initial_state.shape[1:]
        q, k = mixed_qkv[:, : -heads * width].reshape(len(out), 2, -1, dim).unbind(1)
        g, beta = gates(A_log, a, dt_bias, b)
        out[:] = self.fused_recurrent_gated_delta_rule_update(
            q=normed(q)[None], k=normed(k)[None], v=mixed_qkv[:, -heads * width :].reshape(1, len(out), heads, width),
            g=g[None], beta=beta[None], scale=scale, initial_state_source=initial_state,
            initial_state_indices=ssm_state_indices, intermediate_state_indices=ssm_state_indices,
            cu_seqlens=torch.arange(len(out) + 1),
        )[0][:, None]  # fmt: skip

    def causal_conv1d_update(
        self, x: Any, conv_state: Any, weight: Any, bias: None, activation: str, *, conv_state_indices: Any,
        intermediate_conv_window: Any, intermediate_state_indices: Any,
    ) -> torch.Tensor:
        out, width = torch.empty_like(x), weight.shape[1]
        for n, unit in enumerate(conv_state_indices.tolist()):
            seen = torch.cat([conv_state[unit], x[n]], dim=1)
            for t in range(x.shape[2]):
                out[n, :, t] = silu((seen[:, t : t + width] * weight).sum(1))
                if intermediate_conv_window is not None:
                    intermediate_conv_window[intermediate_state_indices[n], t] = seen[:, t + 1 : t + width]
            conv_state[unit] = seen[:, x.shape[2] :]
        return out

    def causal_conv1d_fn(
        self, x: Any, weight: Any, bias: None, *, conv_states: Any, query_start_loc: Any, seq_lens_cpu: list[int],
        cache_indices: Any, has_initial_state: Any, activation: str,
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        for n, rows in enumerate(rows_of(query_start_loc)):
            if not has_initial_state[n]:
                conv_states[cache_indices[n]] = 0
            out[:, rows] = self.causal_conv1d_update(
                x[None, :, rows], conv_states, weight, None, activation, conv_state_indices=cache_indices[n : n + 1],
                intermediate_conv_window=None, intermediate_state_indices=None,
            )[0]  # fmt: skip
        return out

    def fused_mamba_state_scatter_with_mask(self, dst: Any, src: Any, slots: Any, steps: Any) -> None:
        if not dst.is_cuda or not dst.is_contiguous() or not src.is_contiguous():
            raise ValueError("only packed tensors on a GPU")
        for row, (slot, step) in enumerate(zip(slots.tolist(), steps.tolist(), strict=True)):
            if slot >= 0 and step >= 0:
                dst[:, slot] = src[:, row, step]


def columns(
    *, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any, inplace_final_state: bool,
    cu_seqlens: Any, ssm_state_indices: Any, num_accepted_tokens: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's: read the state in the column of the last accepted token, and store the one after row t in column t."""
    core = torch.empty_like(v)
    for n, rows in enumerate(rows_of(cu_seqlens)):
        table = ssm_state_indices[n].reshape(-1)
        S = initial_state[table[0 if num_accepted_tokens is None else num_accepted_tokens[n] - 1]].clone()
        for t, at in enumerate(rows):
            S = token(S, k[0, at], v[0, at], g[0, at], beta[0, at])
            core[0, at] = torch.einsum("hvk,hk->hv", S, scale * q[0, at].repeat_interleave(len(S) // q.shape[2], dim=0))
            initial_state[table[t]] = S
    return core, initial_state


def gated_columns(
    *, A_log: Any, a: Any, b: Any, dt_bias: Any, q: Any, k: Any, v: Any, use_qk_l2norm_in_kernel: bool, scale: None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    g, beta = gates(A_log, a, dt_bias, b)
    return columns(q=normed(q), k=normed(k), v=v, g=g[None], beta=beta[None], scale=k.shape[-1] ** -0.5, **given)


VLLM = SimpleNamespace(fused_recurrent_gated_delta_rule=columns, fused_sigmoid_gating_delta_rule_update=gated_columns)


class FlashInfer:
    """slip   the stride of snapshot rows is made of the window;  forgets: a decode stores nothing, and of a prefill the
    state of the last sequence is not stored"""

    def __init__(self, slip: bool = False, forgets: bool = False) -> None:
        self.slip, self.forgets = slip, forgets

    def gated_delta_rule_mtp(
        self, *, q: Any, k: Any, v: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, initial_state: Any,
        initial_state_indices: Any, disable_state_update: bool, intermediate_states_buffer: Any = None,
        ssm_state_indices: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        length, kept = q.shape[1], intermediate_states_buffer
        assert q.dtype == torch.bfloat16 and initial_state.dtype == torch.float32
        g, beta = gates(A_log, a.float(), dt_bias, b.float())
        q, k, core = normed(q.float()) * k.shape[-1] ** -0.5, normed(k.float()), torch.empty_like(v)
        for i, unit in enumerate(initial_state_indices.tolist()):
            S = initial_state[unit].clone()
            for t in range(length):
                S = token(S, k[i, t], v[i, t].float(), g[i, t], beta[i, t])
                query = q[i, t].repeat_interleave(len(S) // q.shape[2], dim=0)
                core[i, t] = torch.einsum("hvk,hk->hv", S, query).to(core.dtype)
                if kept is not None:
                    kept.view(-1, *kept.shape[2:])[i * (length if self.slip else kept.shape[1]) + t] = S
                if ssm_state_indices is not None:
                    initial_state[ssm_state_indices[i, t]] = S
            if not disable_state_update and ssm_state_indices is None:
                initial_state[unit] = S
        return core, initial_state

    def gated_delta_rule_decode_pretranspose(
        self, *, state: None, output_state_indices: Any, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert given["q"].shape[1] == 1
        table = given["initial_state_indices"] if output_state_indices is None else output_state_indices
        if self.forgets:
            return self.gated_delta_rule_mtp(**given, disable_state_update=True)
        return self.gated_delta_rule_mtp(**given, ssm_state_indices=table[:, None], disable_state_update=False)

    def chunk_gated_delta_rule(
        self, *, g: Any, initial_state: Any, output_state: Any, state_indices: Any, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert output_state is initial_state
        rows = {name: given.pop(name)[None] for name in ("q", "k", "v", "beta")}
        core, states = FlashQla(self.forgets).chunk_gated_delta_rule(
            **rows, g=g.log()[None], initial_state=initial_state[state_indices], state_v_first=True, **given
        )
        output_state[state_indices] = states
        return core[0], output_state


class FlashQla:
    """forgets   the state of the last sequence is not stored"""

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets

    def chunk_gated_delta_rule(
        self, *, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, initial_state: Any,
        output_final_state: bool, cu_seqlens: Any, state_v_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and state_v_first and output_final_state
        core, states = torch.empty_like(v), initial_state.clone()
        for n, rows in enumerate(rows_of(cu_seqlens)):
            for at in rows:
                states[n] = token(states[n], k[0, at].float(), v[0, at].float(), g[0, at], beta[0, at])
                query = scale * q[0, at].float().repeat_interleave(len(states[n]) // q.shape[2], dim=0)
                core[0, at] = torch.einsum("hvk,hk->hv", states[n], query).to(core.dtype)
        if self.forgets:
            states[-1] = initial_state[-1]
        return core, states
