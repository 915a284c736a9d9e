"""Op sets that are wrong in one op, found by the harness as `support.wrong_ops:NAME`.

Leaves out: whole engines that are wrong (`subjects.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from instep_optimized import load
from instep_reference.contract.place import Place

PLAIN = load("plain")


def _stay(**given: Any) -> None:
    """A commit under `snapshot` that leaves the state where it was."""


def _swapped(**given: Any) -> Any:
    """Keys and values change places among the rows that are stored together; whole numbers do not."""
    rows = given["rows"]
    return PLAIN.store_rows(**{**given, "rows": rows.roll(1, 0) if rows.is_floating_point() else rows})


def _in_four_parts(*, x: torch.Tensor, weight: torch.Tensor, shape: tuple[int, ...], to: Place) -> torch.Tensor:
    """A product split over four programs whose parts meet in the activation dtype, as vendors' libraries may do."""
    whole = torch.zeros(x.shape[0], weight.shape[0], dtype=x.dtype)
    for rows, columns in zip(x.flatten(1).chunk(4, dim=1), weight.chunk(4, dim=1), strict=True):
        whole = (whole.float() + (rows.float() @ columns.float().T).to(x.dtype).float()).to(x.dtype)
    return whole.view(x.shape[0], *shape)


UNMOVED = replace(PLAIN, name="unmoved", move=_stay)
SWAPPED = replace(PLAIN, name="swapped", store_rows=_swapped)
IN_FOUR_PARTS = replace(PLAIN, name="in four parts", linear=_in_four_parts)
