"""The contracts of the ops that attend over pages, and of what they read and leave with latents.

Leaves out: the ops before them with a key per head (`op_protocols.py`, whose rules hold here, too).
"""

from typing import NamedTuple, Protocol

import torch

from instep_reference.contract.place_names import Place

from ..memory_addresses import Pages


class LatentInputs(NamedTuple):
    """query [N, heads, head_dim], key [N, 1, S] (the shared part of keys): rotated. value [N, 1, R]: normed latent."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class MakeLatentInputs(Protocol):
    """projected [N, heads, head_dim + 1] (query, gate), key_raw [N, 1, R + S] (latent, shared key), positions [N].

    The last rotary_dim channels of a query, and the shared key, turn (halves rotated). The latent is normed, times
    (1 + norm) [R]. `to`: query, key, value.
    """

    def __call__(
        self, *, projected: torch.Tensor, key_raw: torch.Tensor, positions: torch.Tensor, norm: torch.Tensor,
        eps: float, rotary_dim: int, theta: float, to: tuple[Place, Place, Place],
    ) -> LatentInputs: ...


class Attend(Protocol):
    """query [N, heads, head_dim] over paged KV, causal, softmax scale head_dim ** -0.5 -> [N, heads, head_dim].

    Position p of request b is on page table[slots[b], p // page_size] at offset p % page_size. No row sees a position
    for which the table has -1 or no column. The table is read in place: it is wide, so it must not be copied.
    """

    def __call__(self, *, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor: ...


class AttendLatents(Protocol):
    """`attend` over pages of latents: keys [pages, page_size, 1, S], values [pages, page_size, 1, R] -> [N, heads, V].

    up [heads * (head_dim - S + V), R] expands a latent to each head's key, then its value. A key ends in the S channels
    that are stored as keys.
    """

    def __call__(self, *, query: torch.Tensor, pages: Pages, up: torch.Tensor, to: Place) -> torch.Tensor: ...


class OutputGate(Protocol):
    """attended [N, heads, head_dim] * sigmoid(gate half of projected [N, heads, 2, head_dim]).

    With `Ops.latent_inputs` also a gate per head, the last channel of projected [N, heads, head_dim + 1].
    """

    def __call__(self, *, attended: torch.Tensor, projected: torch.Tensor, to: Place) -> torch.Tensor: ...
