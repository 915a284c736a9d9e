"""The two commit strategies of an engine as one value: one for the recurrent states, one for the conv windows.

Leaves out: the strategies themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..memory.tiled_units import Copied, shown
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


@dataclass(frozen=True)
class BoundPair:
    """Both strategies after `bind`: the addresses of one forward."""

    of_conv: BoundStrategy
    of_state: BoundStrategy

    def conv(self, layer: int) -> tuple[Part, ...]:
        """Return the addresses of the conv windows that this layer reads and writes."""
        return self.of_conv.parts(layer)

    def state(self, layer: int) -> tuple[Part, ...]:
        """Return the addresses of the recurrent states that this layer reads and writes."""
        return self.of_state.parts(layer)

    def mix(self, ops: Ops, mixer: Mixer, rows: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
        """Run it at once, on all rows (`Mixes`)."""
        return mixer(ops, self, *rows)

    def ran(self, ops: Ops) -> None:
        """Move marks after the last layer, because a forward commits its prefill and decode rows itself."""
        self.of_conv.ran(ops)
        self.of_state.ran(ops)


@dataclass(frozen=True)
class PeekShapes:
    """Required answers of `peek` from a strategy that an op set brings: each GDN layer's window and state.

    conv_window [C, W-1], state_block [HV, K, V]: their shapes
    """

    layers: tuple[int, ...]
    conv_window: tuple[int, ...]
    state_block: tuple[int, ...]

    def hold(self, conv: Mapping[int, Copied], state: Mapping[int, Copied]) -> None:
        for found, shape in ((conv, self.conv_window), (state, self.state_block)):
            if sorted(found) != list(self.layers):
                raise TypeError(f"peek gave the layers {sorted(found)}; the model has {list(self.layers)}")
            for layer, unit in found.items():
                if tuple(shown(unit).shape) != shape:
                    raise TypeError(f"peek gave {list(shown(unit).shape)} for layer {layer}; expected {list(shape)}")


@dataclass(frozen=True)
class CommitPair:
    """Both strategies, for one window width.

    asked  requirements for a strategy from an op set; None: both are built in;  trees: whether windows may be trees
    """

    of_conv: CommitStrategy
    of_state: CommitStrategy
    asked: PeekShapes | None = None
    trees: bool = False

    @property
    def may(self) -> Table:
        """Table of writes that an event may make: those of both strategies, and the KV pages."""
        return merged(PAGES_OF_TREES if self.trees else PAGES, self.of_conv.may, self.of_state.may)

    def bind(self, ops: Ops, batch: Batch) -> BoundPair:
        """Bind both strategies, once per forward, before the layers."""
        return BoundPair(self.of_conv.bind(ops, batch), self.of_state.bind(ops, batch))

    def commit(self, ops: Ops, accepted: AcceptedWindows) -> None:
        """Commit with both strategies, once per commit, for all layers."""
        self.of_conv.commit(ops, accepted)
        self.of_state.commit(ops, accepted)

    # Not on the hot path

    def peek(
        self, ops: Ops, slot: int, length: int
    ) -> tuple[Mapping[int, Copied], Mapping[int, Copied]]:
        """Return (conv windows {layer: [C, W-1]}, states {layer: [HV, K, V]}) after `length` tokens, as copies."""
        conv, state = self.of_conv.peek(ops, slot, length), self.of_state.peek(ops, slot, length)
        if self.asked is not None:
            self.asked.hold(conv, state)
        return conv, state

    def peek_node(
        self, ops: Ops, slot: int, length: int, row: int, node: int
    ) -> tuple[Mapping[int, Copied], Mapping[int, Copied]]:
        """Return both after an accepted node of the window that was committed last."""
        where = ops, slot, length, row, node
        return self.of_conv.peek_node(*where), self.of_state.peek_node(*where)

    def restore(
        self, slot: int, length: int, conv: Mapping[int, Copied], state: Mapping[int, Copied]
    ) -> None:
        """Write both into a slot, each in the physical form of its strategy."""
        self.of_conv.restore(slot, length, conv)
        self.of_state.restore(slot, length, state)

    def claim(self, slot: int) -> None:
        """Let both strategies write their marks for a slot that a request has claimed."""
        self.of_conv.claim(slot)
        self.of_state.claim(slot)
