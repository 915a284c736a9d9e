"""Inputs of attention from a projection: queries as a result; keys and values into their pages."""

import torch

from instep_reference.contract.place_names import Place

from ...memory.tiled_units import Units
from ..op_protocols import Ops


def kv_inputs(
    ops: Ops, *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor,
    k_norm: torch.Tensor, eps: float, rotary_dim: int, theta: float, value: torch.Tensor,
    pools: tuple[Units, Units], locations: torch.Tensor, to: tuple[Place, Place],
) -> torch.Tensor:  # fmt: skip
    """Run `KvInputs`, or its parts; pools with scales always use the parts."""
    norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps, "rotary_dim": rotary_dim, "theta": theta}
    rows = {"projected": projected, "key_raw": key_raw, "positions": positions}
    if ops.kv_inputs is not None and all(pool.scales is None for pool in pools):
        return ops.kv_inputs(
            **rows, **norms, value=value, pools=(pools[0].pool, pools[1].pool), locations=locations, to=to,  # type: ignore[arg-type]
        )  # fmt: skip
    query, key = ops.attention_inputs(**rows, **norms, to=to)  # type: ignore[arg-type]
    for each, kept in zip((key, value), pools, strict=True):
        scaled = {} if kept.scales is None else {"scales": kept.scales}
        ops.store_rows(rows=each, pool=kept.pool, locations=locations, **scaled)
    return query
