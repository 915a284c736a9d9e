"""Moving the same units of several layers at once."""

from ..integer_op_protocols import Moved
from ..op_protocols import Ops


def moves(ops: Ops, *, pairs: tuple[Moved, ...]) -> None:
    """Run `Moves`, or its parts."""
    if ops.moves is not None:
        ops.moves(pairs=pairs)
        return
    for pair in pairs:
        ops.move(source=pair.source, target=pair.target)
