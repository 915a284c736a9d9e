"""The `gdn` op: each part of a packed batch by the kernel of its form.

Leaves out: the two kernels (`window.py`, `chunk.py`).
"""

from __future__ import annotations

import torch

from instep_reference.contract.place import Place

from ..layout import Part
from ..ops.base import GdnInputs
from .chunk import chunk
from .window import window

FORMS = {"chunk": chunk, "window": window}


def gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """`Gdn` of the seam. Rows that no part covers, and rows of idle requests, stay zero."""
    core = torch.zeros_like(inputs.v, dtype=dtype)
    for part in parts:
        FORMS[part.form](inputs, part, core)
    return core
