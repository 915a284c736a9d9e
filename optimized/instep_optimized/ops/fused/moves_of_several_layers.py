"""Moving the same units of several layers at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...memory_addresses import Address

if TYPE_CHECKING:
    from ..op_protocols import Ops


class Moved(NamedTuple):
    """The arguments of one `move`."""

    source: Address
    target: Address


class Moves(Protocol):
    """`move` for each pair. No pair writes memory that another pair reads."""

    def __call__(self, *, pairs: tuple[Moved, ...]) -> None: ...


def moves(ops: Ops, *, pairs: tuple[Moved, ...]) -> None:
    """Run `Moves`, or its parts."""
    if ops.moves is not None:
        ops.moves(pairs=pairs)
        return
    for pair in pairs:
        ops.move(source=pair.source, target=pair.target)
