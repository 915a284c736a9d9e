"""Prefixes inside a prompt chunk: the chunk runs in parts, and the memory between two of them is kept.

The first part of a chunk reads the request's own memory, each further one what the part before it has stored, and the
last one stores into the request's own memory. The memory between parts is new, in the form of the pool. An op runs the
parts of a call in their order. Leaves out: which prefixes are kept (`tracked_prefixes.py`), and the addresses of a
request's own memory, which the strategy chooses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from ..memory.saved_states import Peeked
from ..memory.tiled_units import Copied, Units
from ..memory_addresses import Address, Part
from ..packed_batch import Span
from ..transfer.to_device import sent
from .base import BoundStrategy
from .strategy_pair import BoundPair

FIRST = 1  # unit 0 is reserved in every pool


@dataclass(frozen=True)
class _Wave:
    """Parts of several chunks that run together. [n] int64 each: the chunks' numbers, first rows, row counts.

    begun          [n] bool, false: a part that continues another one is not fresh
    reads, stores  units between parts; None: the request's own memory;  most: the largest count, on the host
    """

    numbers: torch.Tensor
    offset: torch.Tensor
    count: torch.Tensor
    begun: torch.Tensor
    most: int
    reads: torch.Tensor | None
    stores: torch.Tensor | None

    def part(self, whole: Part, between: Units) -> Part:
        """Build the part of an op call. whole: the chunks uncut, as the strategy addresses them."""
        assert whole.store is not None and whole.before is not None, "a chunk stores the memory after its last row"
        own, fresh = _some(whole.read, self.numbers), whole.fresh[self.numbers]
        return Part(
            "chunk", whole.begin[self.numbers] + self.offset, self.count, self.most,
            own if self.reads is None else between.at(self.reads),
            fresh if self.reads is None else self.begun,
            _some(whole.store, self.numbers) if self.stores is None else between.at(self.stores),
            before=whole.before[self.numbers] + self.offset,
        )


class PartsOfChunks:
    """The parts of the chunks of one forward. A chunk's cuts are numbers of rows after which its memory is kept."""

    def __init__(self, spans: Sequence[Span], cuts: Mapping[str, Sequence[int]], device: torch.device) -> None:
        """spans: of the forward, in batch order;  cuts: request -> its cuts, rising"""
        prompts = [span for span in spans if span.kind == "prefill"]
        self._between: dict[tuple[str, int], Units] = {}  # component, layer
        self._units: dict[tuple[str, int], int] = {}  # request, cut
        for name, its in cuts.items():
            for cut in its:
                self._units[name, cut] = FIRST + len(self._units)
        waves, last = dict[int, list[tuple[int, ...]]](), max(map(len, cuts.values()), default=0)
        for number, span in enumerate(prompts):
            its = cuts.get(span.request, ())
            ends = (0, *its, span.count)
            for wave, (begin, end) in enumerate(pairwise(ends)):
                # Uncut chunks, then first parts, and so on; last parts store into own memory, so they run together.
                place = -1 if not its else last if end == span.count else wave
                reads, stores = (self._units.get((span.request, at), -1) for at in (begin, end))
                waves.setdefault(place, []).append((number, begin, end - begin, reads, stores))
        ordered = [list(zip(*waves[place], strict=True)) for place in sorted(waves)]
        flat = iter(sent([column for columns in ordered for column in columns], device))
        self._waves = []
        for columns in ordered:
            numbers, offset, count, read, store = (next(flat) for _ in columns)
            self._waves.append(_Wave(
                numbers, offset, count, numbers < 0, max(columns[2]), read if max(columns[3]) >= FIRST else None,
                store if max(columns[4]) >= FIRST else None))

    def bind(self, bound: BoundPair) -> BoundPair:
        """Return the addresses of a forward with its chunks in parts."""
        return BoundPair({
            name: BoundStrategy(partial(self._of_layer, name, one), one.ran) for name, one in bound.of.items()})

    def taken(self, request: str, cut: int) -> Peeked:
        """Copy the blocks after the first `cut` rows of a request's chunk. Call it after the run."""
        unit = self._units[request, cut]
        found = dict[str, dict[int, Copied]]()
        for (name, layer), between in self._between.items():
            found.setdefault(name, {})[layer] = between.taken(unit)
        return found

    def _of_layer(self, name: str, bound: BoundStrategy, layer: int) -> tuple[Part, ...]:
        return self._cut(name, layer, bound.parts(layer))

    def _cut(self, name: str, layer: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        found = list[Part]()
        for part in parts:
            if part.form != "chunk":
                found.append(part)
                continue
            assert part.store is not None, "a chunk stores the memory after its last row"
            pool, scales = (x if x is None or part.store.column is None else x[:, 0]
                            for x in (part.store.pool, part.store.scales))  # fmt: skip
            assert pool is not None, "an address has a pool"
            between = Units(pool, scales, part.store.chance).scratch(FIRST + len(self._units))
            self._between[name, layer] = between
            found += [wave.part(part, between) for wave in self._waves]
        return tuple(found)


def _some(address: Address, numbers: torch.Tensor) -> Address:
    column = None if address.column is None else address.column[numbers]
    return replace(address, units=address.units[numbers], column=column)
