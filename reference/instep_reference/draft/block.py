"""A block drafter: a separate model that reads rows of several layers of the target, and drafts a block at once.

Leaves out: the computation of its rows (`Model.context`, `Model.block`). So the same steps draft with tensors and with
labels.
"""

from collections.abc import Sequence

from ..contract.errors import Unsupported
from ..contract.place_names import See
from ..model_interface import Cache, Memory, Model, Rows
from .drafter_protocol import Asked, Proposed


class BlockHead:
    """The block of a window: its root, then a mask token for each of its drafts. Row j proposes draft j.

    The block is as wide as the window. A window without drafts has a block of the root alone. Given drafts change no
    proposal, because no row reads them.

    The context of a request has a row for each committed token, and none for the root. A row depends on no later
    token: so a prefix has all its rows, and a load computes none.
    """

    def begin(self, model: Model[Rows, Memory, Cache]) -> Proposed[Rows, Cache]:
        return Proposed(model.block_caches())

    def extend(
        self, model: Model[Rows, Memory, Cache], before: Proposed[Rows, Cache], hidden: Rows, count: int,
        following: Sequence[int], rooted: bool, start: int, num_steps: int, see: See,
    ) -> Proposed[Rows, Cache]:
        return Proposed(model.context(hidden, before.caches, start, see))

    def draft(
        self, model: Model[Rows, Memory, Cache], proposed: Proposed[Rows, Cache], tokens: Sequence[int],
        asked: Asked, see: See,
    ) -> tuple[list[int], list[int]]:
        count = asked.num_steps if asked.parents is None else len(asked.parents)
        if asked.parents is not None and tuple(asked.parents) != tuple(range(count)):
            raise Unsupported("a block drafter proposes chains only: its rows have no branches")
        assert model.config.block is not None, "there is a block drafter"
        block = (tokens[-1], *(model.config.block.mask_token_id,) * count)
        said = model.pick(model.block(block, proposed.caches, len(tokens) - 1, see), "block", see)
        own = said[1:]  # the root's own row proposes nothing
        return (own if asked.picks is None else list(asked.picks)), own
