"""Meaning of a pool: the component that its units hold, and the meaning of a unit's positions.

An engine declares this with its pools. The harness does not recognize a pool by its name: the positions that an event
writes, and the required number of positions, follow from this declaration. Leaves out: the memory itself (`Region` in
`engine.py`).
"""

from dataclasses import dataclass
from typing import Literal, get_args

What = Literal["token", "node", "choice", "column", "entry", "page", "input"]
WHATS: tuple[str, ...] = get_args(What)


@dataclass(frozen=True)
class Positions:
    """The axis along which a unit has positions, and what a position is.

    token    a token of the request: page by page, in order. Units are pages
    node     memory that a verify keeps of one node of its window
    choice   a token of the round: the root in position 0, draft j in position j
    column   the memory after one node of the window. A decode and a prefill chunk write one column, and only the engine
             knows which
    entry    memory that a verify keeps of one token, in the entry: the token's position modulo the number of entries
    page     the number of a KV page: position n holds the request's n-th page
    input    one input of a conv, in a line in which the windows of all nodes overlap

    axis     the axis of `Region.units` that has the positions (axis 0 counts the units)
    windows  only for "entry": the number of widest windows for which there must be room
    """

    what: What
    axis: int = 1
    windows: int = 1


@dataclass(frozen=True)
class Meaning:
    """Contents of one pool.

    component  what a unit holds, with the name that places have: "state", "conv", "keys", "values". "length" is for
               all other data of a request, which belongs to no layer
    draft      whether the layers are those of the draft head, or of a block drafter
    block      whether they are those of a block drafter
    positions  the positions of a unit; None: it has none and is written as a whole
    keeps      the place whose rows are in the pool with the same bits ("update", "k"), or their high parts; empty: none
               is declared
    """

    component: str
    draft: bool = False
    positions: Positions | None = None
    keeps: str = ""
    block: bool = False
