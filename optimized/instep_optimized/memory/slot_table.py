"""The slot table: the device's record of the request in every slot, so that no round has to wait for the host.

Leaves out: conv windows, states and KV (they have separate pools), the marks of the commit strategies (`commit/`),
and the size of each field (`budget.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from instep_reference.contract.sampling import Sampling

from ..sampling_inputs import numbers
from ..transfer.to_device import sent
from .pool import Pool

LAYER = 0  # the only layer of its pools: the slot table has one line per slot, whatever the number of layers


@dataclass(frozen=True)
class SlotTable:
    """Views on the slot table's pools: every field has one line per slot.

    P is the largest number of pages of a request, T the widest window. `final` and `proposed` have the dtype of hidden
    rows, all other fields but `sampling` are int64.

    length [slots]            committed tokens
    sampling [slots, 3]       temperature (0: argmax), top_k (0: all) and top_p (1: all), from admit to the end; fp32
    table [slots, P]          its KV pages in order, -1 padded
    window [slots, T]         the root, then the drafts of this round
    picks [slots, T]          of a verified window: the target's argmax at every node
    final [slots, T, D]       of a verified window: the target's final hidden rows
    proposals [slots, n]      what draft extend proposes: draft 1, and further ones of a drafter that has several layers
    proposed [slots, D]       the head's y after draft 1
    tail [slots, R, D]        if prefixes are tracked, and several MTP layers are in use: the target's final hidden
                              rows of the last R tokens at least, the row of position p at p modulo R; dtype as `final`
    ring [slots, n]           with `tail`: a page table in which every page of a slot is its line of `tail`
    features [slots, T, nD]   of a verified window, if a block drafter reads n layers of the target: their rows; dtype
                              as `final`
    parents [slots, T]        if windows may be trees: the parent of every node of this round's window, -1 for the
                              root. A draft then keeps its head's result at every node in `picks` and `final`
    nodes [slots, 1]          if the device alone knows the widths: the nodes of this round's window, root included
    """

    length: torch.Tensor
    sampling: torch.Tensor
    table: torch.Tensor
    window: torch.Tensor
    picks: torch.Tensor
    final: torch.Tensor
    proposals: torch.Tensor
    proposed: torch.Tensor
    parents: torch.Tensor | None = None
    tail: torch.Tensor | None = None
    features: torch.Tensor | None = None
    ring: torch.Tensor | None = None
    nodes: torch.Tensor | None = None

    @classmethod
    def of(cls, pools: Mapping[str, Pool], most: int) -> "SlotTable":
        """most: maximum number of positions of a request."""
        units = {name: pools[name].units(LAYER) for name in (*NAMES, PARENTS, TAIL, FEATURES, NODES) if name in pools}
        if TAIL in units:
            slots = torch.arange(len(units[TAIL]), device=units[TAIL].device)
            units["ring"] = slots[:, None].repeat(1, 1 + most // units[TAIL].shape[1])
        return cls(**{**units, "length": units["length"][:, 0]})

    def enter(self, slot: int, length: int, pages: list[int], sampling: Sampling | None) -> None:
        """Write the line of a request that takes the slot: its length, its KV pages, and how it samples."""
        self.length[slot].fill_(length)  # `length[slot] = n` would copy a number from the host and wait for the device
        for column, number in enumerate(numbers(sampling)):
            self.sampling[slot, column].fill_(number)
        self.table[slot].fill_(-1)
        self.map([(slot, number, page) for number, page in enumerate(pages)])

    def map(self, entries: list[tuple[int, int, int]]) -> None:
        """Enter pages: for each (slot, n, page), `page` becomes the n-th page of the slot's line. Waits for nothing.

        -1: the slot's request has no n-th page any more.
        """
        if entries:
            slot, number, page = sent([[entry[axis] for entry in entries] for axis in range(3)], self.table.device)
            self.table.index_put_((slot, number), page)


PARENTS, TAIL, FEATURES, NODES = "parents", "tail", "features", "nodes"
NAMES = tuple(field.name for field in fields(SlotTable) if field.default is not None)  # the fields that always exist
