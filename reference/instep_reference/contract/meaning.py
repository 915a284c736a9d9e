"""What a pool means: the component that its units hold, and what the positions of a unit are.

Leaves out: the memory itself (`Region` in `engine.py`). An engine declares this beside its pools, and the harness
knows no pool by its name: which positions an event writes, and how many there must be, follows from these words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

What = Literal["token", "node", "choice", "column", "entry", "page", "input"]
WHATS: tuple[str, ...] = get_args(What)


@dataclass(frozen=True)
class Positions:
    """The axis along which a unit has positions, and what a position is.

    token    a token of the request: page by page, in order. Units are pages
    node     what a verify keeps of one node of its window
    choice   a token of the round: the root in position 0, draft j in position j
    column   the memory after one node of the window. A decode and a prefill chunk write one column: the engine knows
             which
    entry    what a verify keeps of one token: it stands at the token's position modulo the number of entries
    page     the number of a KV page: position n holds the request's n-th page
    input    one input of a conv: a line in which the windows of all nodes overlap

    axis     which axis of `Region.units` it is (axis 0 counts the units)
    windows  for how many of the widest windows there must be room; of "entry" alone
    """

    what: What
    axis: int = 1
    windows: int = 1


@dataclass(frozen=True)
class Meaning:
    """component  what a unit holds, as places name it: "state", "conv", "keys", "values"; "length" for whatever else an
    engine knows of a request, which belongs to no layer
    draft      the layers are counted in the draft head
    positions  of a unit; None: a unit has none, it is written as a whole
    keeps      the place whose rows stand here in the same bits ("update", "k"); empty: none is said
    """

    component: str
    draft: bool = False
    positions: Positions | None = None
    keeps: str = ""
