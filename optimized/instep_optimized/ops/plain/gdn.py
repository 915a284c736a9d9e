"""The gated delta rule over packed rows, token by token, and what goes into it.

Leaves out: chunked products; both forms of a part are the same loop here, over all requests and heads at once.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import sigmoid, silu, softplus

from instep_reference.contract.place import Place

from ...layout import Part
from ..base import GdnInputs
from .lanes import Lanes, after, along, before, lanes, scatter
from .wide import wide, width

L2_EPS = 1e-6  # added to the sum of squares, inside the root


def gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """Carry one K x V memory per value head through every request's rows.

        S <- exp(log_decay) S;   S <- S + k (beta (v - S^T k))^T;   o <- S^T q

    Shapes:  q, k (N, H, K)   v (N, HV, V)   log_decay, beta (N, HV)   states in memory (HV, K, V)  ->  (N, HV, V)
    Units:   log_decay in nats; q already scaled by K ** -0.5.
    Mirrors: Gated DeltaNet (arXiv:2412.06464), the recurrent form. The running state is never rounded within
             a call; `each` and `store` round a copy to the pool's dtype.
    """
    out = torch.zeros(inputs.v.shape, dtype=dtype, device=inputs.v.device)
    for part in parts:
        who = lanes(part)
        if len(who.which):
            _run(inputs, part, who, out)
    return out


def _run(inputs: GdnInputs, part: Part, who: Lanes, out: torch.Tensor) -> None:
    work = width(inputs.q.dtype, part.read.pool.dtype)
    group = inputs.v.shape[1] // inputs.q.shape[1]
    q, k = (x.to(work)[who.rows].repeat_interleave(group, dim=2)[..., None] for x in (inputs.q, inputs.k))
    v = inputs.v.to(work)[who.rows]
    decay = inputs.log_decay.to(work).exp()[who.rows][..., None, None]
    beta = inputs.beta.to(work)[who.rows][..., None]
    state, core = before(part, who, work), torch.zeros_like(v)
    for token, alive in enumerate(who.alive):
        S, key = state[:alive], k[:alive, token]
        S *= decay[:alive, token]
        surprise = beta[:alive, token] * (v[:alive, token] - (S * key).sum(dim=-2))
        S += key * surprise[..., None, :]
        core[:alive, token] = (S * q[:alive, token]).sum(dim=-2)
        along(part.each, who, token, S)
    scatter(out, who, core)
    after(part.store, who, state)


def gdn_inputs(
    *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    key_heads: int, key_dim: int, to: tuple[Place, ...],
) -> GdnInputs:
    """Split the conv's output, normalise q and k, and turn a, b into gates; all in at least fp32, no cast back.

        q, k: x / sqrt(sum x^2 + 1e-6), q times K ** -0.5;  log_decay = -exp(A_log) softplus(a + dt_bias)

    Shapes:  mixed (N, 2HK + HV*V)   a, b (N, HV)   A_log, dt_bias (HV)  ->  q, k (N, H, K)  v (N, HV, V)  gates (N, HV)
    Mirrors: Qwen3-Next in transformers, which keeps beta in the activation dtype; here it stays fp32 on every path.
    """
    keys, heads = key_heads * key_dim, a.shape[1]
    rows, x = mixed.shape[0], wide(mixed)
    q, k = (part.reshape(rows, key_heads, key_dim) for part in (x[:, :keys], x[:, keys : 2 * keys]))
    v = x[:, 2 * keys :].clone(memory_format=torch.contiguous_format)
    log_decay = -wide(A_log).to(q.dtype).exp() * softplus(a.to(q.dtype) + dt_bias.to(q.dtype))
    return GdnInputs(
        q=_unit(q) * key_dim**-0.5,
        k=_unit(k),
        v=v.view(rows, heads, v.shape[1] // heads),
        log_decay=log_decay,
        beta=sigmoid(b.to(q.dtype)),
    )


def gated_norm(
    *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float,
    gate: Literal["silu", "sigmoid"], to: Place,
) -> torch.Tensor:
    """core / rms(core) * weight * gate(z) over V, in at least fp32, one cast at the end.

    Shapes:  core, z (N, HV, V)   weight (V)  ->  (N, HV, V)
    """
    x, opened = wide(core), silu(wide(z)) if gate == "silu" else sigmoid(wide(z))
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * wide(weight) * opened).to(core.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)
