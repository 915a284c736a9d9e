"""Launches packed by hand: requests at lengths that a test chooses, in a memory that has nothing else.

Leaves out: engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from instep_optimized.memory import Memory
from instep_optimized.ops.plain import PLAIN
from instep_optimized.packed_batch import Batch, Kind, Span, pack


@dataclass(frozen=True)
class Rows:
    """`count` rows of a request after `before` committed tokens; row: its batch row, of a verify."""

    request: str
    kind: Kind
    count: int
    before: int
    row: int = -1


def packed(memory: Memory, rows: Sequence[Rows], tokens: torch.Tensor) -> Batch:
    """The launch, with every request at its given length; it needs its slot and its pages already."""
    for each in rows:
        memory.slot_table.length[memory.slots.of(each.request)] = each.before
    spans = [Span(each.request, each.kind, each.count, each.row, fresh=each.before == 0) for each in rows]
    return pack(PLAIN, memory, spans, tokens)
