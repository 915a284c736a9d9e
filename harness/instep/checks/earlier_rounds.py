"""The states that every request had in its last rounds, to name a wrong state that none of the known mistakes leaves.

A stale buffer, a wrong row or a wrong stride can leave the state of any request after any token of a recent window,
accepted or not. Leaves out: the wrong states that are always tried (`wrong_state_bank.py`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..finding_problem import NamedMistake
from ..oracle.recomputation import Recomputation
from ..oracle.states_with_folded_tokens import Run
from .check_interface import counted
from .wrong_state_inputs import Scene, Wrong

KEPT = 4  # earlier rounds; a round here is an event that writes states
NOTHING = Run({})
EARLIER = NamedMistake("state-of-an-earlier-round", "holds {}")
FROM_EARLIER = NamedMistake("from-a-state-of-an-earlier-round", "was continued from {}")


class EarlierRounds:
    """Windows of the last rounds, by request and layer. Their states are computed only on request."""

    def __init__(self, scene_of: Callable[[Recomputation, Sequence[Recomputation]], Scene]) -> None:
        self._scene_of = scene_of
        self._rounds: deque[Mapping[tuple[str, int], Recomputation]] = deque(maxlen=KEPT + 1)  # the latest is last

    def add(self, pieces: Sequence[Recomputation]) -> None:
        """Add the pieces of an event that writes states."""
        kept = {
            (piece.request, piece.layer): replace(piece, yardsticks=NOTHING, own={}, near=None, wrongs=(),
                                                  dithered=None, all_ops=None)
            for piece in pieces if not piece.prefix
        }
        if kept:
            self._rounds.append(kept)

    def wrong_states(self, piece: Recomputation, scene: Scene) -> Iterator[Wrong]:
        """States that the layer of a piece of the last event may hold by mistake. scene: of that piece."""
        oldest = {key: ago for ago, kept in enumerate(reversed(self._rounds)) for key in kept}
        for ago, kept in enumerate(reversed(self._rounds)):
            when = f"{counted(ago, 'round')} ago" if ago else "in this round"
            for (request, layer), other in kept.items():
                own = request == piece.request
                if layer != piece.layer or (own and not ago):  # the states of this step are always tried
                    continue
                theirs, whose = self._scene_of(other, []), "its own" if own else "the"
                of = "" if own else f' of request "{request}"'
                for count in (theirs.count, *theirs.counts()):
                    if count == theirs.count:
                        says = f"{whose} state{of}, {when}"
                        if ago:
                            yield from (Wrong(FROM_EARLIER.known(says), state)
                                        for state in scene.carried(theirs.right))
                    elif count:
                        says = f"{whose} state{of} after {count} of {counted(len(theirs.k))} of its window, {when}"
                    elif ago == oldest[request, layer]:
                        says = f"{whose} state{of} before its window, {when}"
                    else:
                        continue  # it was left by an older round
                    yield Wrong(EARLIER.known(says), theirs.after(count))
