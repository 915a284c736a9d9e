"""The `gdn` op: each part of a packed batch by the kernel of its form.

Leaves out: the kernels (`chunk16_fp32.py`, `chunk64.py`, `token_by_token.py`; `chunk64_launches_gluon.py` and
`launches_gluon.py` replace the last two if they fit).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from instep_reference.contract.place_names import Place

from ..memory_addresses import Part
from ..ops.op_protocols import GdnInputs
from .device.zero_uncovered_rows import result
from .gdn_prefill.chunk16_fp32 import chunk
from .gdn_prefill.chunk64 import blocks
from .gdn_windows.token_by_token import window
from .runtime import explicit

staged, blocks_staged = explicit("gdn_windows.launches_gluon"), explicit("gdn_prefill.chunk64_launches_gluon")


def gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """`Gdn` of the seam. Prefill multiplies in bf16 if activations have 16 bits."""
    return _served(inputs, parts, dtype, _blocks if dtype.itemsize == 2 else chunk)


kda = gdn  # every kernel serves both decays


def mamba2(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """`Recur` of the seam for outer products. Prompts, too, run token by token: chunks are for the delta rule."""
    return _served(inputs, parts, dtype, _outer, _outer)


_outer = partial(window, delta=False)


def precise_gdn(*, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, to: Place) -> torch.Tensor:
    """`Gdn` of the seam. Every product is fp32, whatever the activations."""
    return _served(inputs, parts, dtype, chunk)


def _blocks(inputs: GdnInputs, part: Part, core: torch.Tensor, look: int = 0) -> None:
    """Run the staged kernels if they fit. Both give the same bits."""
    fits = blocks_staged is not None and blocks_staged.fits(inputs, part, core)
    (blocks_staged.blocks_staged if fits else blocks)(inputs, part, core, look)


def windows(inputs: GdnInputs, part: Part, core: torch.Tensor, look: int = 0) -> None:
    """Run the staged kernel if it fits. Both give the same bits. look: as in `window`"""
    if staged is not None and staged.fits(inputs, part, core):
        staged.staged(inputs, part, core, look=look)
    else:
        window(inputs, part, core, look)


def _served(
    inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype, prefill: Callable[..., None],
    rows: Callable[..., None] = windows,
) -> torch.Tensor:
    """Run every part. Uncovered rows and rows of idle requests are zero; the kernels of a single part write them.

    prefill, rows: the kernels of chunks and of windows
    """
    running = parts if all(part.most for part in parts) else ()  # a part without rows launches nothing
    core, look = result(running, inputs.v, *inputs.v.shape, dtype=dtype)
    for part in parts:
        (prefill if part.form == "chunk" else rows)(inputs, part, core, look)
    return core
