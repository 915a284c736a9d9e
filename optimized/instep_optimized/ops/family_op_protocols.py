"""The ops that only some model families need, with their contracts: the rest of the seam (`op_protocols.py`).

An op set may lack them, and then does not serve these families. Rules and alphabet are those of the other ops.
"""

from __future__ import annotations

from typing import Protocol

import torch

from instep_reference.contract.place_names import Place

from ..memory_addresses import Part


class BiasedConv(Protocol):
    """`Conv` with a bias [C] that is added to the sum, before silu."""

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, parts: tuple[Part, ...], to: Place
    ) -> torch.Tensor: ...


class ShortConv(Protocol):
    """`Conv` without the silu, over rows x [N, D]: the memory of a layer with a gated short convolution."""

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place
    ) -> torch.Tensor: ...


class AddSkip(Protocol):
    """core, v [N, HV, V], weight [HV] -> core + weight v, in fp32, one cast to the dtype of core."""

    def __call__(
        self, *, core: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, to: Place
    ) -> torch.Tensor: ...


class GatedGroupNorm(Protocol):
    """core, z [N, HV, V] -> y = core silu(z), divided by its rms over the heads of a group, times weight [HV*V].

    Group g of `groups` has the heads g HV/groups and following. In fp32, one cast.
    """

    def __call__(
        self, *, core: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, groups: int, to: Place
    ) -> torch.Tensor: ...


class SquaredMlp(Protocol):
    """x [N, D], up [I, D], down [D, I] -> down(relu(up x)^2)."""

    def __call__(self, *, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, to: Place) -> torch.Tensor: ...


class ScaledAdd(Protocol):
    """x, y [N, D] -> alpha * x + beta * y, in fp32, cast once."""

    def __call__(self, *, x: torch.Tensor, y: torch.Tensor, alpha: float, beta: float, to: Place) -> torch.Tensor: ...


class Multiply(Protocol):
    """x, y [N, D] -> x * y."""

    def __call__(self, *, x: torch.Tensor, y: torch.Tensor, to: Place) -> torch.Tensor: ...
