"""Row-invariant attention: the kernels of `..attend`, with prefill chunks in parts that are joined in order, too.

Leaves out: splitting the positions of a prefill chunk over several programs. Its bits would be the same.
"""

from __future__ import annotations

import torch

from instep_reference.contract.place_names import Place

from ...memory_addresses import Pages
from ..attention.dispatch import PART, PARTS, read, shape_of
from ..attention.expand_latents import over_expanded


def attend(*, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    """Implement `Attend`: a row's bits depend only on its query, its position, and keys and values up to there.

    In a tree these are the keys and values on the path up to the row: the bits equal those of that path as a chain.

    The bits do not depend on `most`, on other rows, on the width of the table or on the size of a page. A row always
    takes positions in the same steps and parts from 0, in a tile of the same height. Parts are joined from the first
    one on. Steps after a row's last position do not change it. In the step that contains its last position, later
    positions have
    the weight 0 exactly. (Their values must be finite: 0 times infinity is not 0.)
    """
    return _read(query, pages)


def attend_latents(*, query: torch.Tensor, pages: Pages, up: torch.Tensor, to: Place) -> torch.Tensor:
    """Implement `AttendLatents`: `attend` over expanded keys and values, whose bits depend on their latents alone."""
    return over_expanded(query, pages, up, _read)


def _read(query: torch.Tensor, pages: Pages, channels: int = 0) -> torch.Tensor:
    shape = shape_of(PARTS, query)
    return read(query, pages, shape, shape, PART, alone=True, channels=channels)
