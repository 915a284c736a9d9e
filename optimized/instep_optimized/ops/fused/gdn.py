"""The delta rule from the conv's output to the read-out in one call, with norms and gates inside.

Leaves out: kernels for it. The op sets of this package run `gdn_inputs`, then `gdn`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from instep_reference.contract.place_names import Place

from ...memory_addresses import Part


class FusedGdn(Protocol):
    """`gdn_inputs`, then `gdn`, with the arguments of both. -> core [N, HV, V].

    No part has a ring: what a ring keeps of a token stays inside the call.
    """

    def __call__(
        self, *, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
        key_heads: int, key_dim: int, parts: tuple[Part, ...], dtype: torch.dtype, to: Place,
    ) -> torch.Tensor: ...
