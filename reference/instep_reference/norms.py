"""The three normalisations of these models: RMS, gated RMS, and l2.

Each computes in the dtype of its input. Leaves out: casts.
"""

from typing import Literal

import torch
from torch.nn import functional as F

L2_EPS = 1e-6  # inside the root, on the sum of squares: FLA's l2norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * (1 + weight). The stored weights lie around zero.

    Shapes:  x (..., D)   weight (D,)  ->  (..., D)
    Mirrors: transformers `Qwen3_5RMSNorm`, without its casts to fp32.
    """
    return over_rms(x, eps) * (1 + weight)


def gated_norm(
    core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, gate: Literal["silu", "sigmoid"]
) -> torch.Tensor:
    """core / rms(core) * weight * gate(z). The stored weights lie around one; the gate comes last.

    Shapes:  core, z (..., V)   weight (V,)  ->  (..., V)
    Mirrors: transformers `Qwen3_5RMSNormGated`, without its casts (HF casts before the weight).
    """
    opening = F.silu(z) if gate == "silu" else torch.sigmoid(z)
    return over_rms(core, eps) * weight * opening


def gated_group_norm(
    core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, groups: int
) -> torch.Tensor:
    """y / rms(y) * weight with y = core * silu(z). The gate comes first, and the heads of a group have one rms.

    Shapes:  core, z (..., HV, V)   weight (HV*V,)  ->  (..., HV, V); group g has the heads g HV/groups and following
    Mirrors: transformers 5.24 `NemotronHRMSNormGated`, without its casts (HF casts before the weight).
    """
    gated = (core * F.silu(z)).reshape(*core.shape[:-2], groups, len(weight) // groups)  # (..., groups, HV*V / groups)
    return (over_rms(gated, eps).flatten(-2) * weight).reshape(core.shape)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def over_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
