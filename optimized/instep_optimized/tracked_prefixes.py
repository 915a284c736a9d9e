"""Tracked prefixes: the first tokens of a request, kept as copies for other requests that begin with them.

A chunk leaves everything that a prefix needs. So does a commit: the states after every node of its window are still
there, if the strategy stores them, and the final rows are in the order of the accepted path.
Leaves out: giving a prefix to a request, which is a load (`engine.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from instep_reference.contract.capacity import Capacity
from instep_reference.contract.place_names import AFTER_LAYERS

from .commit.strategy_pair import CommitPair
from .forwards import Inner, Planned
from .kept_entries_on_device_or_host import Entry
from .memory import Memory
from .memory.saved_states import NarrowStates, Peeked, read
from .ops.integer_op_protocols import Acceptance
from .ops.op_protocols import Ops
from .request_record import Request
from .transfer.to_device import sent
from .transfer.to_host import HostCopy, Roots

TOKENS, PATH, STEPS = 1, 2, 3  # the parts of a commit's copy after the accepted counts: [B, T], [B, T], [B]


@dataclass(frozen=True)
class Prefixes:
    """kept: saved states and prefixes alike, by name. Nothing is recorded if there is no interval.

    narrow: how a prefix stores its states
    """

    memory: Memory
    capacity: Capacity
    kept: dict[str, Entry]
    narrow: NarrowStates

    @property
    def on(self) -> bool:
        return self.capacity.track_interval is not None

    # The tokens of requests: a prefix is only given to a request that begins with it

    def chosen(self, requests: Mapping[str, Request], roots: Roots) -> None:
        """Record the roots that a forward has chosen."""
        for name in roots if self.on else ():
            requests[name].said.append(partial(_root_of, roots, name))

    def reachable(self, verified: Sequence[Request], track: Sequence[str]) -> list[str]:
        """Return the new names of windows that may reach a multiple, if all of their tokens are accepted."""
        every = self.capacity.track_interval or 1
        return [under for request, under in zip(verified, track, strict=False) if under and under not in self.kept
                and (request.length.exact + 1 + request.drafts) // every > request.length.exact // every]  # fmt: skip

    def steps(
        self, acceptance: Acceptance, lens: torch.Tensor, verified: Sequence[Request], track: Sequence[str]
    ) -> torch.Tensor | None:
        """Return the node of each window whose memory becomes a prefix [B], -1: none. Nothing waits for the device.

        A path reaches a multiple of the interval if the quotients of the lengths before and after it differ. lens: how
        many tokens became committed;  track: as in the event
        """
        if self.capacity.track_interval is None:
            return None
        lists = ([self.memory.slots.of(request.name) for request in verified],
                 [int(bool(under)) for under in track or ("",) * len(verified)])  # fmt: skip
        slots, named = sent(lists, lens.device)
        every, after = self.capacity.track_interval, self.memory.slot_table.length[slots]
        before = after - lens
        depth = after // every * every - before - 1  # of the last multiple, counted from the root
        nodes = acceptance.accept_index.gather(1, depth.clamp(min=0)[:, None])[:, 0]
        return torch.where((depth >= 0) & (named > 0), nodes, -1)

    def counts(self, acceptance: Acceptance, lens: torch.Tensor, steps: torch.Tensor | None) -> HostCopy:
        """Start the copy of accepted counts of every commit; if prefixes are tracked, tokens, paths and steps too.

        lens: a second copy of accept_lens, because the caller may write into those of the acceptance
        """
        more = () if steps is None else (acceptance.tokens, acceptance.accept_index, steps)
        return HostCopy(lens, *more, immutable=lens.data_ptr() != acceptance.accept_lens.data_ptr())

    def accepted(self, verified: Sequence[Request], counts: HostCopy) -> None:
        """Record the tokens that a commit has accepted, and the bonus."""
        for number, request in enumerate(verified) if self.on else ():
            request.said.append(partial(_line, counts, TOKENS, number, len(verified)))

    # The prefixes

    def of_chunks(
        self, ops: Ops, strategy: CommitPair, plan: Sequence[Planned], final: torch.Tensor
    ) -> dict[str, int]:
        """Track what the chunks of a forward have reached -> request: tokens. final [N, D]: the target's rows."""
        tracked = {}
        for p, end in zip(plan, accumulate(p.span.count for p in plan), strict=True):
            if p.row.track:
                count = p.request.length.exact  # a prompt has no pending counts
                peeked = strategy.peek(ops, self.memory.slots.of(p.request.name), count)
                self._keep(p.row.track, p.request, count, peeked, final[end - 1], forward=True)
                tracked[p.request.name] = count
        return tracked

    def inside_chunks(self, inner: Sequence[Inner]) -> dict[str, int]:
        """Track what ends inside the chunks of a forward -> name: tokens."""
        for one in inner:
            request = one.planned.request
            self._keep(one.under, request, one.tokens, one.peeked, one.final, forward=True)
            if one.tail is not None:  # in the slot table there are already rows of later tokens
                record, kept = self.kept[one.under]
                self.kept[one.under] = record, kept.changed(tail={AFTER_LAYERS: one.tail})
        return {one.under: one.tokens for one in inner}

    def of_paths(
        self, ops: Ops, strategy: CommitPair, verified: Sequence[Request], track: Sequence[str], counts: HostCopy
    ) -> dict[str, int]:
        """Track the last multiples of the interval that committed paths reach -> request: tokens. Waits for counts."""
        tracked = {}
        for number, (request, under) in enumerate(zip(verified, track, strict=False)):
            if not under:
                continue
            request.length.settle()
            path, step = _line(counts, PATH, number, len(verified)), counts.list(STEPS)[number]
            if step in path and request.row is not None:
                depth, slot = path.index(step), self.memory.slots.of(request.name)
                count = request.length.exact - len(path) + depth + 1
                peeked = strategy.peek_node(ops, slot, count, request.row, path[depth])
                self._keep(under, request, count, peeked, self.memory.slot_table.final[slot, depth], forward=False)
                tracked[request.name] = count
        return tracked

    def _keep(
        self, under: str, request: Request, count: int, peeked: Peeked, final: torch.Tensor, *, forward: bool
    ) -> None:
        """peeked: blocks after `count` tokens; final [D]: the target's row of the last one."""
        narrow = peeked
        if "state" in peeked:  # short convolutions have windows alone
            narrow = {**peeked, "state": self.narrow.keep(peeked["state"], forward=forward)}
        self.kept[under] = request.prefix(count), read(self.memory, request.name, count, narrow, final)


def _root_of(roots: Roots, name: str) -> tuple[int]:
    return (roots[name],)


def _line(counts: HostCopy, part: int, number: int, requests: int) -> list[int]:
    """Return a request's line of a table [B, T] in a commit's copy, up to its accepted tokens."""
    table = counts.list(part)
    begin = number * (len(table) // requests)
    return table[begin : begin + counts.list()[number]]
