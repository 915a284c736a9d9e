"""The `gdn` op: each part of a packed batch by the kernel of its form.

Leaves out: the three kernels (`window.py`, `chunk.py`, `blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from instep_reference.contract.place import Place

from ..layout import Part
from ..ops.base import GdnInputs
from .blocks import blocks
from .chunk import chunk
from .window import window


def gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """`Gdn` of the seam. Prefill multiplies in bf16 where activations have 16 bits."""
    return _served(inputs, parts, dtype, {"chunk": blocks if dtype.itemsize == 2 else chunk, "window": window})


def precise_gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """`Gdn` of the seam. Every product is fp32, whatever the activations."""
    return _served(inputs, parts, dtype, {"chunk": chunk, "window": window})


def _served(
    inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype,
    forms: Mapping[str, Callable[[GdnInputs, Part, torch.Tensor], None]],
) -> torch.Tensor:  # fmt: skip
    """Rows that no part covers, and rows of idle requests, stay zero."""
    core = torch.zeros_like(inputs.v, dtype=dtype)
    for part in parts:
        forms[part.form](inputs, part, core)
    return core
