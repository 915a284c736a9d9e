"""What a request costs in memory, pool by pool, under every commit strategy; and how many fit.

Leaves out: allocation. The figures come from the very demands that the engine's pools are made from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from instep_optimized import Options, load
from instep_optimized.commit import demands as kept_by
from instep_optimized.commit import known
from instep_optimized.commit.brought import distinct
from instep_optimized.memory.budget import FRESH, Sizes, bytes_of, bytes_per, demands, requests_that_fit
from instep_optimized.memory.pool import Demand
from instep_optimized.memory.units import SCALES
from instep_optimized.ops.base import Ops
from instep_optimized.options import check, types_of
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.drafters import in_use
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.shapes import FUSED, expected_shapes

from .replay.guard import MAKES, calling

PAGE_SIZE = 16
ONE = Capacity(slots=(1,), pages=(1,), page_size=PAGE_SIZE, max_tokens=1)  # of it, a unit costs what max_positions says


@dataclass(frozen=True)
class Need:
    """One strategy with one form of conv windows, for requests of at most `tokens` tokens, prompt and text.

    pools  name -> bytes per request, over all layers, of every pool of the strategy
    board  bytes of the lines that every engine keeps per request: length, page table, window, hidden rows in flight
    page   bytes of a KV page of PAGE_SIZE tokens, target and draft layers
    """

    strategy: str
    conv: str
    tokens: int
    pools: Mapping[str, int]
    board: int
    page: int
    wanted: tuple[Demand, ...]
    guarded: bool

    @property
    def fixed(self) -> int:
        """Bytes of a request without a token."""
        return sum(self.pools.values()) + self.board

    @property
    def per_token(self) -> float:
        return self.page / PAGE_SIZE

    @property
    def beside(self) -> int:
        """Snapshots, rings, marks: what is neither a state nor a conv window in its slot."""
        return sum(size for name, size in self.pools.items() if name not in ("state", "state" + SCALES, "conv"))

    @property
    def total(self) -> int:
        """Bytes of a request with all its tokens."""
        return self.fixed + -(-self.tokens // PAGE_SIZE) * self.page

    def allocation(self, requests: int) -> int:
        """Bytes of all pools of an engine with room for so many requests."""
        return bytes_of(requests, self.tokens, PAGE_SIZE, self.wanted, guarded=self.guarded)

    def fit(self, total: int) -> int:
        """How many requests fit in `total` bytes of pools."""
        return requests_that_fit(total, self.tokens, PAGE_SIZE, self.wanted, guarded=self.guarded)


def needs(
    config: ModelConfig, options: Options, widest: int, tokens: int, ops: Ops | None = None,
    strategies: Collection[str] = (), forms: Collection[str] = (), nodes: int | None = None,
) -> Iterator[Need]:
    """Each of these strategies with each of these forms, left out: all, as far as the engine would serve them."""
    ops = ops or load("plain")
    for strategy in strategies or known("state", ops):
        for conv in forms or known("conv", ops):
            chosen = replace(options, strategy=strategy, conv=conv)
            try:
                check(chosen, config, widest - 1, ops, nodes)
            except Unsupported:
                continue
            yield need(config, chosen, widest, tokens, ops, nodes)


def need(
    config: ModelConfig, options: Options, widest: int, tokens: int, ops: Ops | None = None, nodes: int | None = None
) -> Need:
    """The pair of strategies of these options, for chains of at most `widest` tokens and trees of at most `nodes`.

    tokens: the most of a request; the page table is as wide as they need (`Capacity.max_positions`).
    """
    ops, config = ops or load("plain"), in_use(config, options.drafter)
    room = replace(ONE, max_positions=tokens, num_draft_tokens=nodes)
    most = room.widest(widest - 1)
    sizes = Sizes(types_of(options, ops), options.layout, room, most, ops.keeps, options.snapshot_layout)
    with calling(MAKES):
        kept = kept_by(config, sizes, options.strategy, options.conv, ops)
    always = demands(config, sizes)
    pools = {demand.name: _bytes(demand, options.guarded) for demand in kept}
    board = FRESH + sum(_bytes(demand, options.guarded) for demand in always if demand.by != "page")
    page = bytes_per(always, guarded=options.guarded)["page"]
    wanted = distinct(always + kept)
    return Need(options.strategy, options.conv, tokens, pools, board, page, wanted, options.guarded)


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """All tensors of the model in one width."""
    return sum(math.prod(size) for size in expected_shapes(config, FUSED).values()) * dtype.itemsize


def spelled(count: float) -> str:
    """1.50 MiB: two decimals, in the largest unit that leaves a whole number before them."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:g} B"


def _bytes(demand: Demand, guarded: bool) -> int:
    return len(demand.layers) * demand.pitch(guarded) * demand.dtype.itemsize
