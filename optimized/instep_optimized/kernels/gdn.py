"""The `gdn` op: each part of a packed batch by the kernel of its form.

Leaves out: the kernels (`chunk.py`, `window.py`, and `staged.py`, which is the latter's where it fits).
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from instep_reference.contract.place import Place

from ..layout import Part
from ..ops.base import GdnInputs
from .chunk import chunk
from .runtime import INTERPRETED
from .window import window

staged: Any = None
if not INTERPRETED:
    with suppress(ImportError, AttributeError):  # a Triton whose Gluon lacks what it needs: `window` serves everything
        staged = import_module(".staged", __package__)


def gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """`Gdn` of the seam. Rows that no part covers, and rows of idle requests, stay zero."""
    core = torch.zeros_like(inputs.v, dtype=dtype)
    for part in parts:
        if part.form == "chunk":
            chunk(inputs, part, core)
        elif staged is not None and staged.fits(inputs, part, core):
            staged.staged(inputs, part, core)
        else:
            window(inputs, part, core)
    return core
