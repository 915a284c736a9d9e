"""The rows of an event as device tensors, packed in batch order, made once per launch.

Leaves out: which memory an op reads or writes for them (`commit/`), and the model (`model/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from .layout import Pages
from .memory import Memory

Kind = Literal["prefill", "verify", "decode", "draft"]
FORWARD_KINDS: tuple[Kind, ...] = ("prefill", "verify", "decode")
COLUMNS = 5  # tensors that a group has per request


@dataclass(frozen=True)
class Span:
    """One request's rows of a launch: `tokens` [count] int64 on the device, from position `before` on.

    row  its number in the batch: the snapshot row of a verify window
    """

    request: str
    kind: Kind
    tokens: torch.Tensor
    before: int
    row: int = -1

    @property
    def count(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True)
class Group:
    """The spans of one kind, whose state memory moves the same way; all [B] on the device, in batch order."""

    kind: Kind
    begin: torch.Tensor
    count: torch.Tensor
    most: int
    slots: torch.Tensor
    rows: torch.Tensor
    fresh: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """A packed launch of N rows for B requests. Names as in `Pages` and `Part`.

    tokens, positions, locations [N] int64;  begin, count, before [B];  table [B, width], -1 padded
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    locations: torch.Tensor
    begin: torch.Tensor
    count: torch.Tensor
    before: torch.Tensor
    table: torch.Tensor
    most: int
    reach: int
    groups: tuple[Group, ...]

    def pages(self, keys: torch.Tensor, values: torch.Tensor) -> Pages:
        """The paged KV of one layer for these rows."""
        return Pages(
            keys, values, self.table, self.begin, self.count, self.before, most=self.most, reach=self.reach
        )


def pack(spans: Sequence[Span], memory: Memory) -> Batch:
    """Pack spans in their order; kinds may be mixed as they come."""
    begins = begins_of(spans)
    lists = [memory.pages.of(span.request) for span in spans]
    width = max(map(len, lists))
    kinds = [kind for kind in FORWARD_KINDS if any(span.kind == kind for span in spans)]
    mine = [[(begin, span) for begin, span in zip(begins, spans, strict=True) if span.kind == kind] for kind in kinds]
    positions, locations, begin, count, before, table, *grouped = sent(
        [
            [at for span in spans for at in range(span.before, span.before + span.count)],
            [at for span in spans for at in memory.pages.locations(span.request, span.before, span.count)],
            begins,
            [span.count for span in spans],
            [span.before for span in spans],
            [page for pages in lists for page in pages + [-1] * (width - len(pages))],
            *(column for members in mine for column in _columns(members, memory)),
        ],
        spans[0].tokens.device,
    )
    return Batch(
        tokens=torch.cat([span.tokens for span in spans]),
        positions=positions,
        locations=locations,
        begin=begin,
        count=count,
        before=before,
        table=table.view(len(spans), width),
        most=max(span.count for span in spans),
        reach=max(span.before + span.count for span in spans),
        groups=tuple(
            _group(kind, members, grouped[COLUMNS * number : COLUMNS * (number + 1)])
            for number, (kind, members) in enumerate(zip(kinds, mine, strict=True))
        ),
    )


def sent(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Whole numbers as int64 tensors on the device, all of them in one transfer: each one would wait for the device.

    Every list starts on 16 bytes, as an allocation of its own would: a kernel sees the same alignment either way.
    """
    flat: list[int] = []
    begins = []
    for numbers in lists:
        begins.append(len(flat))
        flat += [*numbers, *[0] * (len(numbers) % 2)]
    block = torch.tensor(flat, dtype=torch.int64, device=device)
    return [block[begin : begin + len(numbers)] for begin, numbers in zip(begins, lists, strict=True)]


def ints(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def begins_of(spans: Sequence[Span]) -> list[int]:
    """The first packed row of every span."""
    return [0, *accumulate(span.count for span in spans)][: len(spans)]


def _columns(members: Sequence[tuple[int, Span]], memory: Memory) -> tuple[list[int], ...]:
    """What a group says per request, in the order of `_group`."""
    return (
        [begin for begin, _ in members],
        [span.count for _, span in members],
        [memory.slots.of(span.request) for _, span in members],
        [span.row for _, span in members],
        [int(span.before == 0) for _, span in members],
    )


def _group(kind: Kind, members: Sequence[tuple[int, Span]], columns: Sequence[torch.Tensor]) -> Group:
    begin, count, slots, rows, fresh = columns
    return Group(kind, begin, count, max(span.count for _, span in members), slots, rows, fresh.bool())
