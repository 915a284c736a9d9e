"""Row-invariant attention: the kernel of `..attend` with tiles of one height, and positions in steps from the first.

Leaves out: splitting positions over programs; a fixed split would do too, one that follows the longest would not.
"""

from __future__ import annotations

import torch

from instep_reference.contract.place import Place

from ...layout import Pages
from ..attend import read
from ..runtime import tile

QUERIES = {2: 64, 4: 16}  # query rows times grouped heads per program on a GPU, by bytes of an element
POSITIONS = {2: 64, 4: 32}  # positions per step
SMALLEST = 16  # the same, interpreted
WARPS, STAGES = 8, 2


def attend(*, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    """`Attend` of the seam: a row's bits depend on its query, its position and what stands at 0 .. its position.

    Not on `most`, `reach`, the width of the table or the size of a page: a row always takes positions in the same
    steps from 0 in a tile of the same height, steps behind its last position leave it alone, and in the step that
    contains it later positions weigh 0, exactly. (Those must be finite: 0 times infinity is not 0.)
    """
    size = query.element_size()
    queries, positions = tile(QUERIES.get(size, SMALLEST), SMALLEST), tile(POSITIONS.get(size, SMALLEST), SMALLEST)
    return read(query, pages, queries, positions, WARPS, STAGES, alone=True)
