"""Small numeric errors: `plain` with one slightly wrong op. Each has the size of an error of a real kernel.

Leaves out: faults of addresses and schedules. Found by the harness as `support.wrong.small_errors:NAME`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from instep_optimized import load
from instep_optimized.ops.op_protocols import AttentionInputs, GdnInputs, Ops

PLAIN = load("plain")
L2_EPS, TILE, LITTLE = 1e-6, 8, 1e-5


def _with(**ops: Callable[..., Any]) -> Ops:
    return replace(PLAIN, name=next(iter(ops)), **ops)


def _eps_on_the_mean(**given: Any) -> GdnInputs:
    right, H, K = PLAIN.gdn_inputs(**given), given["key_heads"], given["key_dim"]
    q, k = given["mixed"][:, : 2 * H * K].reshape(-1, 2, H, K).float().unbind(1)
    q, k = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + L2_EPS) * K**-0.5 for x in (q, k))
    return right._replace(q=q * K**-0.5, k=k)


def _scale_off(**given: Any) -> torch.Tensor:
    return PLAIN.attend(**{**given, "query": given["query"] * (1 + LITTLE)})


def _theta_off(**given: Any) -> AttentionInputs:
    return PLAIN.attention_inputs(**{**given, "theta": given["theta"] / 10})


def _narrow_beta_in_snapshots(*, inputs: GdnInputs, parts: Any, **given: Any) -> torch.Tensor:
    """The read-out takes the right beta; only the states that a commit chooses from take the rounded one."""
    looking = tuple(replace(part, store=None, per_row=None) for part in parts)
    out = PLAIN.gdn(inputs=inputs, parts=looking, **given)
    if any(part.per_row is not None for part in parts):
        inputs = inputs._replace(beta=inputs.beta.bfloat16().to(inputs.beta))
    PLAIN.gdn(inputs=inputs, parts=parts, **given)
    return out


def _loud_tile(component: str, **given: Any) -> torch.Tensor:
    out = PLAIN.linear(**given)
    if given["to"].component == component:
        out.view(len(out), -1)[:, TILE : 2 * TILE] *= 1 + LITTLE
    return out


def _cast_before_the_weight(*, weight: torch.Tensor, **given: Any) -> torch.Tensor:
    normed = PLAIN.gated_norm(weight=torch.ones_like(weight), **given)
    return normed.bfloat16().to(normed) * weight


EPS_ON_THE_MEAN = _with(gdn_inputs=_eps_on_the_mean)
SCALE_OFF = _with(attend=_scale_off)
THETA_OFF = _with(attention_inputs=_theta_off)
NARROW_BETA_IN_SNAPSHOTS = _with(gdn=_narrow_beta_in_snapshots)
LOUD_TILE_OF_Z = _with(linear=partial(_loud_tile, "z"))
LOUD_TILE_OF_QKV = _with(linear=partial(_loud_tile, "qkv"))
LOUD_TILE_OF_MIXER = _with(linear=partial(_loud_tile, "mixer"))
LOUD_TILE_OF_FUSED = _with(linear=partial(_loud_tile, "fused"))
CAST_BEFORE_THE_WEIGHT = _with(gated_norm=_cast_before_the_weight)
