"""The ops that only some model families need, with their contracts: the rest of the seam (`op_protocols.py`).

An op set may lack them, and then does not serve these families. Rules and alphabet are those of the other ops.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class StreamWeights:
    """How a block reads S residual streams and is added to them, R: a rank.

    norm [S*D];  down [R, S*D];  up [S*D, R];  inject [S, S*D], None after the last layer, where nothing is added
    streams  S
    """

    norm: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    inject: torch.Tensor | None
    streams: int


@dataclass(frozen=True)
class Hashes:
    """How n-grams of orders 2 to N become rows of tables that are stored one after another.

    multipliers  one per place of an n-gram, its own token first;  sizes: rows of each table, order by order
    heads        tables of each order;  eos: the token that ends a text
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    heads: int
    eos: int


class EmbedStreams(Protocol):
    """tokens [N] int64, table [vocab, D] -> [N, S*D]: the row of the token, once for each stream."""

    def __call__(self, *, tokens: torch.Tensor, table: torch.Tensor, streams: int, to: Place) -> torch.Tensor: ...


class ReadStreams(Protocol):
    """x [N, S*D] -> the row that a block reads [N, D], and how strongly its result goes to each stream [N, S].

        y = x / rms(x) * (1 + norm), stream by stream;  row = mean over streams of sigmoid(up silu(down y / S)) * y
        strength = 2 sigmoid(inject y / S)

    fp32 inside, one cast each. `to`: places of both; without `inject` there is no strength, and one place.
    """

    def __call__(
        self, *, x: torch.Tensor, weights: StreamWeights, eps: float, to: tuple[Place, ...]
    ) -> tuple[torch.Tensor, ...]: ...


class AddStreams(Protocol):
    """x [N, S*D], y [N, D], strength [N, S] -> each stream of x + its strength * y, in fp32, one cast."""

    def __call__(self, *, x: torch.Tensor, y: torch.Tensor, strength: torch.Tensor, to: Place) -> torch.Tensor: ...


class NormStreams(Protocol):
    """x [N, S*D] -> each stream / its rms * (1 + its part of the weight [S*D]), fp32 inside, cast back."""

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, streams: int, eps: float, to: Place
    ) -> torch.Tensor: ...


class Ngrams(Protocol):
    """tokens [N] int64, tables [rows, width] -> the rows of the n-grams that end with each token, side by side.

    Addresses point at the last N-1 tokens [N-1] int64, oldest first, each plus one; 0 is none, and so is a fresh
    request's. An n-gram is the xor of its tokens, each times its multiplier, modulo the size of a table. At and before
    an eos earlier than its own token, and before the first token, it has eos. Rows are copied bit by bit.
    """

    def __call__(
        self, *, tokens: torch.Tensor, tables: torch.Tensor, hashes: Hashes, parts: tuple[Part, ...], to: Place
    ) -> torch.Tensor: ...


class GateStreams(Protocol):
    """x, key [N, S*D], value [N, D], norms [S*D] -> sigmoid(g) value for each stream [N, S*D]. fp32, one cast.

    score = normed key . normed x / sqrt(D), stream by stream;  g = sign(score) sqrt(max(|score|, 1e-6))
    """

    def __call__(
        self, *, x: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_norm: torch.Tensor,
        query_norm: torch.Tensor, eps: float, to: Place,
    ) -> torch.Tensor: ...


class DilatedConv(Protocol):
    """`Conv` whose taps are `distance` rows apart: windows [C, (W-1) * distance]."""

    def __call__(
        self, *, x: torch.Tensor, weight: torch.Tensor, distance: int, parts: tuple[Part, ...], to: Place
    ) -> torch.Tensor: ...
