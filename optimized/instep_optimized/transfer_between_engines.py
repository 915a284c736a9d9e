"""Entries on their way to another engine, which has other pools, ranks, step counts and dtypes of states.

An offload gives an entry out: each rank puts its parts of it into the wire, under the entry's name. A fetch of the
other engine takes it in: each rank merges the parts by the declaration of the shards, and cuts its own parts out. Parts
are in the canonical layout of `RequestState`, so pages have no size here. An incomplete entry is an error.
Leaves out: memory in tiles, which is refused, and which entry moves (the events decide).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from instep_reference.contract import shards
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import Blocked
from instep_reference.contract.errors import InstepError, Unsupported
from instep_reference.contract.label_algebra import SPREAD

from .memory import Memory
from .memory.component_cells import cells
from .memory.saved_states import Kept, copied_alone, copy_layers
from .ops.op_protocols import Types
from .ranks import Comm
from .request_record import Request
from .transfer.to_host import Arrival

# layer -> the rows that this engine's memory has of an entry, None: a whole block; or no requirement at all
Due = dict[int, int | None] | None
STEP = SPREAD - (1 << 64) if SPREAD >> 63 else SPREAD  # as a signed number


class Sent(dict[int, tuple[Request, Kept, Arrival]]):
    """An entry that was given out: rank of the sender -> its record and parts.

    ranks   of the sender;  taken: the ranks of the other engine that have their parts
    homes   the sender's own tables of entries on the host, which have the entry until it was taken
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.taken, self.homes = ranks, set[int](), list[dict[str, Any]]()


class Wire(dict[str, Sent]):
    """The entries between two engines, by name. Both engines, and all their ranks, have the same wire."""


@dataclass(frozen=True)
class Courier:
    """One rank's access to a wire.

    config  of the whole model;  state: dtype of its states;  labels: whether its rows are labels instead of numbers
    home    the table of this rank's entries on the host
    """

    wire: Wire
    rank: int
    size: int
    config: ModelConfig
    memory: Memory
    state: torch.dtype
    labels: bool
    home: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, wire: Wire, comm: Comm | None, config: ModelConfig, memory: Memory, types: Types, labels: bool) -> Self:
        """Make the courier of one rank of an engine. Raises `Unsupported` if its memory is stored in tiles."""
        narrow = not labels and not (types.kept is None and types.chunk is None)
        if isinstance(types.state, Blocked) or isinstance(types.kv, Blocked) or narrow:
            raise Unsupported("a transfer between engines with states or KV in tiles, or with narrow prefixes")
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        return cls(wire, rank, size, config, memory, types.state, labels)

    def give(self, name: str) -> None:
        """Put this rank's parts of an entry into the wire."""
        sent = self.wire.setdefault(name, Sent(self.size))
        sent[self.rank] = self.home[name]
        sent.homes.append(self.home)

    def take(self, name: str) -> tuple[Request, Kept]:
        """Return this rank's part of an entry. It is in host memory, and its states have the dtype of this engine."""
        sent = self.wire[name]
        if len(sent) != sent.ranks:
            raise InstepError(f'the entry "{name}" has parts of {len(sent)} of {sent.ranks} ranks')
        for *_, arrival in sent.values():
            arrival.wait()
        request, first, _ = sent[0]
        split = shards.memory(self.config)
        whole: dict[str, Any] = {}
        for part, due in TRANSFERS.items():
            layers = due(self, part, request.length.exact, prefix=first.final is not None)
            given = [sent[rank][1][part] for rank in range(sent.ranks)]
            if layers is None:
                whole[part] = copy_layers(given[0], torch.clone)
                continue
            if any(set(one) != set(layers) for one in given):
                found = sorted({*given[0]})
                raise InstepError(f'the entry "{name}" has {part} of the layers {found}; expected {sorted(layers)}')
            whole[part] = {
                layer: self._part(f'{part} of layer {layer} in "{name}"', split.get(part),
                                  [one[layer] for one in given], count)
                for layer, count in layers.items()}  # fmt: skip
        whole |= {"state": {
            layer: state.to(self.state) if state.is_floating_point() else state
            for layer, state in whole.get("state", {}).items()}}  # fmt: skip
        return request, copied_alone(first, whole, torch.clone)

    def taken(self, name: str) -> None:
        """Take the entry out of the wire and away from the sender, once every rank has its part."""
        self.wire[name].taken.add(self.rank)
        if len(self.wire[name].taken) == self.size:
            for home in self.wire.pop(name).homes:
                home.pop(name, None)

    def blocks_due(self, name: str, length: int, *, prefix: bool) -> Due:
        return dict.fromkeys(self.memory.layers(name))

    def rows_due(self, name: str, length: int, *, prefix: bool) -> Due:
        less = name.startswith("draft_") and prefix  # as in `Places.rows` of `memory/saved_states.py`
        return {layer: max(0, length - less * (1 + layer)) for layer in self.memory.layers(name)}

    def none_due(self, name: str, length: int, *, prefix: bool) -> Due:
        """Require nothing: every rank has the whole component, and the part of the first rank is taken."""
        return None

    def _part(
        self, what: str, shard: shards.Shard | None, parts: Sequence[Any], count: int | None
    ) -> torch.Tensor:
        """Merge the parts of the sender's ranks, and cut out that of this rank."""
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise Unsupported(f"a transfer of memory in tiles ({what})")
        first: torch.Tensor = parts[0]
        if count is not None and any(len(part) != count for part in parts):
            raise InstepError(f"{what} has {[len(part) for part in parts]} rows; expected {count}")
        if shard is None:
            return first.clone()
        whole = first.new_empty((*first.shape[: shard.axis], shard.length, *first.shape[shard.axis + 1 :]))
        for rank in reversed(range(len(parts))):
            index = _held(shard, rank, len(parts))
            if parts[rank].shape[shard.axis] != len(index):
                raise InstepError(f"{what} has {parts[rank].shape[shard.axis]} entries of rank {rank} on axis "
                                  f"{shard.axis}; expected {len(index)}")  # fmt: skip
            whole.index_copy_(shard.axis, index, self._renumbered(parts[rank], shard, index, 1))
        index = _held(shard, self.rank, self.size)
        return self._renumbered(whole.index_select(shard.axis, index), shard, index, -1)

    def _renumbered(self, x: torch.Tensor, shard: shards.Shard, index: torch.Tensor, sign: int) -> torch.Tensor:
        """Renumber the elements of label blocks, of which every rank numbers its own part from 0."""
        if not self.labels or x.is_floating_point():
            return x
        column = shard.axis == 0 and x.dim() == 2  # a conv window has a block per column
        width = 1 if column else math.prod(x.shape[shard.axis + 1 :])
        moved = (index - torch.arange(len(index))) * (sign * width) * STEP
        return torch.where(x == 0, 0, x + moved.reshape(-1, *[1] * (x.dim() - shard.axis - 1)))


TRANSFERS = cells(block=Courier.blocks_due, rows=Courier.rows_due, last=Courier.none_due)


def _held(shard: shards.Shard, rank: int, size: int) -> torch.Tensor:
    return torch.tensor([entry for span in shard.spans(rank, size) for entry in span])
