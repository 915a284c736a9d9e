"""The `gdn` op: each part of a packed batch by the kernel of its form.

Leaves out: the kernels (`chunk.py`, `blocks.py`, `window.py`, and `staged.py`, which is the latter's where it fits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from instep_reference.contract.place import Place

from ..layout import Part
from ..ops.base import GdnInputs
from .blocks import blocks
from .chunk import chunk
from .runtime import INTERPRETED
from .window import window

staged: Any = None
if not INTERPRETED:
    with suppress(ImportError, AttributeError):  # a Triton whose Gluon lacks what it needs: `window` serves everything
        import_module(".layouts", __package__)
        staged = True
    if staged:  # what is wrong in our own file is raised
        staged = import_module(".staged", __package__)


def gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """`Gdn` of the seam. Prefill multiplies in bf16 where activations have 16 bits."""
    return _served(inputs, parts, dtype, {"chunk": blocks if dtype.itemsize == 2 else chunk, "window": windows})


def precise_gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """`Gdn` of the seam. Every product is fp32, whatever the activations."""
    return _served(inputs, parts, dtype, {"chunk": chunk, "window": windows})


def windows(inputs: GdnInputs, part: Part, core: torch.Tensor) -> None:
    """The staged kernel where it fits. Both give the same bits."""
    if staged is not None and staged.fits(inputs, part, core):
        staged.staged(inputs, part, core)
    else:
        window(inputs, part, core)


def _served(
    inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype,
    forms: Mapping[str, Callable[[GdnInputs, Part, torch.Tensor], None]],
) -> torch.Tensor:  # fmt: skip
    """Rows that no part covers, and rows of idle requests, stay zero."""
    core = torch.zeros_like(inputs.v, dtype=dtype)
    for part in parts:
        forms[part.form](inputs, part, core)
    return core
