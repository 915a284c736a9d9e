"""The memory that a request takes, pool by pool, under every commit strategy, and how many requests fit.

The figures come from the same `Demand` values from which the engine allocates its pools. Leaves out: allocation.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from instep_optimized import Options, load
from instep_optimized.commit import known
from instep_optimized.commit.external_strategies import distinct
from instep_optimized.engine_from_checkpoint import all_demands
from instep_optimized.memory.budget import FRESH, bytes_of, bytes_per, prefix_bytes, requests_that_fit
from instep_optimized.memory.pool import Demand
from instep_optimized.memory.tiled_units import SCALES
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.options import check
from instep_reference.contract.checkpoint_tensor_shapes import FUSED, expected_shapes
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.drafters import in_use
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import Unsupported

from .guarded_calls import MAKES, calling

PAGE_SIZE = 16
ONE = Capacity(slots=(1,), pages=(1,), page_size=PAGE_SIZE, max_tokens=1)  # a unit depends on max_positions alone


@dataclass(frozen=True)
class Need:
    """Memory of one strategy with one form of conv windows, for requests of at most `tokens` tokens.

    pools       name -> bytes per request, over all layers, for every pool of the strategy
    prefix      bytes of a tracked prefix of `tokens` tokens
    tracked     number of tracked prefixes on the device
    slot_table  bytes per request that every engine keeps: length, page table, window, rows in flight
    page        bytes of a KV page of PAGE_SIZE tokens, target and draft layers
    """

    strategy: str
    conv: str
    tokens: int
    pools: Mapping[str, int]
    slot_table: int
    page: int
    wanted: tuple[Demand, ...]
    guarded: bool
    prefix: int = 0
    tracked: int = 0
    scratch: Callable[[int], int] = lambda requests: 0

    @property
    def fixed(self) -> int:
        """Bytes of a request without a token."""
        return sum(self.pools.values()) + self.slot_table

    @property
    def per_token(self) -> float:
        return self.page / PAGE_SIZE

    @property
    def beside(self) -> int:
        """Bytes of snapshots, rings and marks: everything but states and conv windows."""
        return sum(size for name, size in self.pools.items() if name not in ("state", "state" + SCALES, "conv"))

    @property
    def total(self) -> int:
        """Bytes of a request with all its tokens."""
        return self.fixed + -(-self.tokens // PAGE_SIZE) * self.page

    def allocation(self, requests: int) -> int:
        """Bytes of all pools of an engine with room for `requests` requests, and of its tracked prefixes."""
        pools = bytes_of(requests, self.tokens, PAGE_SIZE, self.wanted, guarded=self.guarded)
        return pools + self.tracked * self.prefix

    def fit(self, total: int) -> int:
        """How many requests fit in `total` bytes of pools, tracked prefixes and scratch memory of ops."""
        room, requests = total - self.tracked * self.prefix, -1
        while room > 0:
            found = requests_that_fit(room, self.tokens, PAGE_SIZE, self.wanted, guarded=self.guarded)
            if found == requests or self.allocation(found) + self.scratch(found) <= total:
                return found
            requests, room = found, total - self.tracked * self.prefix - self.scratch(found)
        return 0


def needs(
    config: ModelConfig, options: Options, widest: int, tokens: int, ops: Ops | None = None,
    strategies: Collection[str] = (), forms: Collection[str] = (), nodes: int | None = None, tracked: int = 0,
) -> Iterator[Need]:
    """Yield the need of each strategy with each form that the engine supports; by default, of all of them."""
    ops = ops or load("plain")
    for strategy in strategies or known("state", ops):
        for conv in forms or known("conv", ops):
            chosen = replace(options, strategy=strategy, conv=conv)
            try:
                check(chosen, config, widest - 1, ops, nodes, interval=1 if tracked else None)
            except Unsupported:
                continue
            yield need(config, chosen, widest, tokens, ops, nodes, tracked)


def need(
    config: ModelConfig, options: Options, widest: int, tokens: int, ops: Ops | None = None, nodes: int | None = None,
    tracked: int = 0,
) -> Need:
    """The need of these options, for chains of at most `widest` tokens and trees of at most `nodes`.

    tokens: maximum length of a request, which sets the width of the page table (`Capacity.max_positions`)
    tracked: number of prefixes of `tokens` tokens on the device (`Capacity.tracked`); 0 means none
    """
    ops, config = ops or load("plain"), in_use(config, options.drafter)
    room = replace(ONE, max_positions=tokens, num_draft_tokens=nodes, track_interval=1 if tracked else None)
    most = room.widest(widest - 1)
    with calling(MAKES):
        sizes, always, kept = all_demands(config, ops, options, room, (widest - 1,))
    pools = {demand.name: _bytes(demand, options.guarded) for demand in kept}
    slot_table = FRESH + sum(_bytes(demand, options.guarded) for demand in always if demand.by != "page")
    page = bytes_per(always, guarded=options.guarded)["page"]
    wanted = distinct(always + kept)

    def scratch(requests: int) -> int:
        element = options.activation.itemsize
        return 0 if ops.scratch is None else ops.scratch(config, element, requests, tokens, PAGE_SIZE, most)

    return Need(options.strategy, options.conv, tokens, pools, slot_table, page, wanted, options.guarded,
                prefix_bytes(config, sizes, tokens), tracked, scratch)


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all tensors of the model in one dtype."""
    return sum(math.prod(size) for size in expected_shapes(config, FUSED).values()) * dtype.itemsize


def spelled(count: float) -> str:
    """Format bytes as in 1.50 MiB: two decimals, in the largest unit of which there is at least one."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:g} B"


def _bytes(demand: Demand, guarded: bool) -> int:
    return len(demand.layers) * demand.pitch(guarded) * demand.dtype.itemsize
