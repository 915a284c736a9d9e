"""External: a block drafter that proposes from the tokens alone; or none, if the event gives every draft.

Leaves out: caches and heads. The memory of such a drafter is its own, and not part of a request's state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..contract.errors import Unsupported
from ..contract.place_names import See
from ..model_interface import Cache, Memory, Model, Rows
from .drafter_protocol import Asked, Proposed

Block = Callable[[Sequence[int], int], Sequence[int]]  # (all tokens, the root last; number of drafts) -> drafts

NO_OPINION = -1  # the own choice of a drafter that has none


@dataclass(frozen=True)
class External:
    """Drafts come from `block`. With None, the event must give them."""

    block: Block | None = None

    def begin(self, model: Model[Rows, Memory, Cache]) -> Proposed[Rows, Cache]:
        return Proposed()

    def extend(
        self, model: Model[Rows, Memory, Cache], before: Proposed[Rows, Cache], hidden: Rows, count: int,
        following: Sequence[int], rooted: bool, start: int, num_steps: int, see: See,
    ) -> Proposed[Rows, Cache]:
        return before

    def draft(
        self, model: Model[Rows, Memory, Cache], proposed: Proposed[Rows, Cache], tokens: Sequence[int],
        asked: Asked, see: See,
    ) -> tuple[list[int], list[int]]:
        if self.block is not None:
            own = [int(token) for token in self.block(tuple(tokens), asked.num_steps)]
            return (own if asked.picks is None else list(asked.picks)), own
        if asked.picks is None:
            raise Unsupported("no draft head is in use: a draft event must bring its picks")
        return list(asked.picks), [NO_OPINION] * len(asked.picks)
