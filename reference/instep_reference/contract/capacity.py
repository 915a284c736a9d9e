"""How much room an engine has: slots, pages, tokens, nodes. Both sides and the event rules use this.

Leaves out: the cost of the room (each side's own).
"""

from dataclasses import dataclass

MOST_NODES = 63  # maximum nodes of a tree: the ancestors of a node are bits of an int64, whose sign stays clear


@dataclass(frozen=True)
class Capacity:
    """The room of an engine, from the header of a trace. Both sides and the event rules use this.

    slots          the order in which free slots are handed out: the first free one in this order.
                   Slot 0 is reserved and never listed.
                   A request that takes a slot also takes a *request row*, and gives both back together. Request rows
                   are numbered from 1 on, one for each slot; row 0 is reserved. The first free one is handed out, the
                   even numbers before the odd ones: 2, 4, .., 1, 3, .. So it is neither the slot nor the batch row
    pages          the order in which free KV pages are handed out; page 0 is reserved.
    page_size      tokens per KV page
    max_tokens     maximum number of tokens of one forward, over all rows
    max_positions  maximum number of positions of one request, with drafts in flight; None: as many as all pages hold
    num_draft_tokens  if windows may be trees: maximum number of nodes of a window, its root included. Pools, budget and
                   pages count nodes. None: every window is a chain of the step count in force
    track_interval  prefixes of requests are tracked at multiples of this many tokens; None: none is
    trim           whether a commit gives back the pages after the longest length that the request may have then: its
                   length, or with overlapping rounds, where the last count is not known, its upper bound. False: a
                   request keeps its pages until it leaves its slot
    tracked        maximum number of tracked prefixes on the device: for one more, another goes to the host or is
                   evicted. Each takes the lowest free *track slot*, 1 to this number. A commit takes one, in batch
                   order, for each new name whose window may reach a multiple, whatever is accepted; afterwards it
                   frees those whose path reached none. None: any number, and no slots
    topk           with num_draft_tokens: in every draft event the drafter grows trees (`contract/grown_draft_tree.py`)
    with this
                   many children per node. None: the drafter proposes chains
    block          whether a block drafter drafts. A draft then also writes the row of its root. Not in the header's
                   capacity: it follows from how drafts are made
    device_widths  whether the device alone knows the widths of windows: chains of 0 to as many drafts as the step count
                   in force, as in `Draft.parents`. An engine uploads them with the draft, and its host counts every
                   window as wide as the step count: for pages, tokens and `trim`. Prompts run without windows
    """

    slots: tuple[int, ...]
    pages: tuple[int, ...]
    page_size: int
    max_tokens: int
    max_positions: int | None = None
    num_draft_tokens: int | None = None
    track_interval: int | None = None
    topk: int | None = None
    tracked: int | None = None
    block: bool = False
    trim: bool = False
    device_widths: bool = False

    def grown(self, num_steps: int) -> int:
        """Return the drafts of a tree that the drafter grows itself; 0: it grows none."""
        if self.topk is None or not num_steps:
            return 0
        return min((self.num_draft_tokens or 0) - 1, self.topk + (num_steps - 1) * self.topk**2)

    def drafted(self, num_steps: int, drafts: int) -> int:
        """Return the positions after the length that a draft event may write, for a window of `drafts` drafts.

        The draft head has rows for all beams, side by side, also for those that are not part of the window.
        """
        return max(drafts + self.block, (self.topk or 0) * (num_steps - 1))

    def width(self, num_steps: int, window: int) -> int:
        """Return the tokens that count for a window of `window` tokens, its root included."""
        return num_steps + 1 if self.device_widths else window

    def widest(self, num_steps: int) -> int:
        """Return the tokens of the widest window, if a chain has at most `num_steps` drafts a round."""
        return max(num_steps + 1, self.num_draft_tokens or 0)

    @property
    def trees(self) -> bool:
        """Whether windows may be trees."""
        return self.num_draft_tokens is not None

    @property
    def total_positions(self) -> int:
        """Number of positions that all pages hold."""
        return len(self.pages) * self.page_size

    @property
    def request_positions(self) -> int:
        """Maximum number of positions of one request."""
        return self.total_positions if self.max_positions is None else self.max_positions

    @property
    def request_pages(self) -> int:
        """Maximum number of pages of one request: the width of a page table."""
        return -(-self.request_positions // self.page_size)
