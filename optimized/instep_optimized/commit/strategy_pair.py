"""The commit strategies of an engine as one value: one per component that a layer with a recurrence keeps.

Leaves out: the strategies themselves.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from instep_reference.contract.errors import InstepError

from ..memory.component_cells import cells
from ..memory.saved_states import Kept, Peeked
from ..memory.tiled_units import shown
from ..memory_addresses import Part
from ..ops.op_protocols import Ops
from ..packed_batch import Batch
from .base import PAGES, PAGES_OF_TREES, AcceptedWindows, BoundStrategy, CommitStrategy, Table, merged

# The part of a GDN layer that reads and writes memory: ops, addresses, and its rows -> its result [N, ...].
Mixer = Callable[..., torch.Tensor]


class Mixes(Protocol):
    """Runs the mixer of each GDN layer of one forward."""

    def mix(self, ops: Ops, mixer: Mixer, rows: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """Run `mixer(ops, addresses, *rows)`. like: its result has the shape and dtype of this one."""
        ...


def _by_strategy(one: CommitStrategy, ops: Ops, accepted: AcceptedWindows) -> None:
    one.commit(ops, accepted)


def _by_length(one: CommitStrategy, ops: Ops, accepted: AcceptedWindows) -> None:
    """Move nothing: rows after the length are not read. `Round.commit` moves those of a tree, and the last rows."""


COMMITS = cells(block=_by_strategy, rows=_by_length, last=_by_length)


@dataclass(frozen=True)
class BoundPair:
    """The strategies after `bind`, by component: the addresses of one forward."""

    of: Mapping[str, BoundStrategy]

    def parts(self, component: str, layer: int) -> tuple[Part, ...]:
        """Return the addresses of the blocks that this layer reads and writes."""
        return self.of[component].parts(layer)

    def conv(self, layer: int) -> tuple[Part, ...]:
        """Return the addresses of its conv windows."""
        return self.parts("conv", layer)

    def state(self, layer: int) -> tuple[Part, ...]:
        """Return the addresses of its recurrent states."""
        return self.parts("state", layer)

    def mix(self, ops: Ops, mixer: Mixer, rows: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """Run it at once, on all rows (`Mixes`)."""
        return mixer(ops, self, *rows)

    def ran(self, ops: Ops) -> None:
        """Move marks after the last layer, because a forward commits its prefill and decode rows itself."""
        for one in self.of.values():
            one.ran(ops)


@dataclass(frozen=True)
class PeekShapes:
    """Required answers of `peek` from a strategy that an op set brings.

    shapes  component -> the layers that keep it, and the shape of a block
    """

    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def hold(self, peeked: Peeked) -> None:
        for name, (layers, shape) in self.shapes.items():
            if sorted(peeked[name]) != list(layers):
                raise TypeError(f"peek gave the layers {sorted(peeked[name])}; the model has {list(layers)}")
            for layer, unit in peeked[name].items():
                if tuple(shown(unit).shape) != shape:
                    raise TypeError(f"peek gave {list(shown(unit).shape)} for layer {layer}; expected {list(shape)}")


@dataclass(frozen=True)
class CommitPair:
    """The strategies by component, for one window width.

    asked  requirements for a strategy from an op set; None: all are built in;  trees: whether windows may be trees
    """

    of: Mapping[str, CommitStrategy]
    asked: PeekShapes | None = None
    trees: bool = False

    @property
    def may(self) -> Table:
        """Table of writes that an event may make: those of all strategies, and the KV pages."""
        return merged(PAGES_OF_TREES if self.trees else PAGES, *(one.may for one in self.of.values()))

    def bind(self, ops: Ops, batch: Batch) -> BoundPair:
        """Bind the strategies, once per forward, before the layers."""
        return BoundPair({name: one.bind(ops, batch) for name, one in self.of.items()})

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        """Commit every component, once per commit, for all layers."""
        for name, move in COMMITS.items():
            if name in self.of:
                move(self.of[name], ops, accepted)

    # Not on the hot path

    def peek(self, ops: Ops, slot: int, length: int) -> Peeked:
        """Return component -> layer -> its block after `length` tokens, as copies."""
        found = {name: one.peek(ops, slot, length) for name, one in self.of.items()}
        if self.asked is not None:
            self.asked.hold(found)
        return found

    def peek_node(self, ops: Ops, slot: int, length: int, row: int, node: int) -> Peeked:
        """Return the blocks after an accepted node of the window that was committed last."""
        where = ops, slot, length, row, node
        return {name: one.peek_node(*where) for name, one in self.of.items()}

    def restore(self, slot: int, length: int, kept: Kept) -> None:
        """Write the copied blocks into a slot, each in the physical form of its strategy."""
        for name, one in self.of.items():
            if length and name not in kept.memory:
                raise InstepError(f"the copy that is restored has no {name!r}: a mover forgot it")
            one.restore(slot, length, kept[name])

    def claim(self, slot: int) -> None:
        """Let the strategies write their marks for a slot that a request has claimed."""
        for one in self.of.values():
            one.claim(slot)
