"""The depthwise causal conv over packed rows, with its history in memory.

The silu after the conv is part of the op. Leaves out: nothing of the contract.
"""

from __future__ import annotations

from functools import reduce

import torch

from instep_reference.contract.place import Place

from ...layout import Part
from .lanes import Lanes, after, along, before, lanes, scatter
from .wide import wide


def conv(*, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place) -> torch.Tensor:
    """out[t] = silu(sum_j weight[:, j] * input[t - (W-1) + j]), in at least fp32, one cast to x's dtype.

    Shapes:  x (N, C)   weight (C, W)   windows in memory (C, W-1), oldest first  ->  (N, C)
    Mirrors: the short convolution of Gated DeltaNet (arXiv:2412.06464); a prefill chunk and a verify
             window are one function here. Windows keep the bits of x.
    """
    out = torch.zeros_like(x)
    for part in parts:
        who = lanes(part)
        if len(who.which):
            _run(x, weight, part, who, out)
    return out


def _run(x: torch.Tensor, weight: torch.Tensor, part: Part, who: Lanes, out: torch.Tensor) -> None:
    history = weight.shape[1] - 1
    line = torch.cat([before(part, who, x.dtype), x[who.rows].transpose(1, 2)], dim=2)  # [n, C, W-1 + most]
    # One line per request holds its history and its rows; every result and every window is a piece of the line.
    taps = zip(wide(line).unfold(2, weight.shape[1], 1).unbind(-1), wide(weight).unbind(-1), strict=True)
    # Neither a device's own sum nor its own silu: both are split by the shape of the whole call.
    total = reduce(torch.add, (tap * by[:, None] for tap, by in taps))
    mixed = total / (1 + (-total).exp())
    scatter(out, who, mixed.transpose(1, 2))
    for token, alive in enumerate(who.alive):
        along(part.per_row, who, token, line[:alive, :, token + 1 : token + 1 + history])
    # The last W-1 inputs of each request, which has its own length: inputs length .. length + W-2 of its line.
    ends = who.length[:, None] + torch.arange(history, device=x.device)
    after(part.store, who, line.gather(2, ends[:, None, :].expand(-1, x.shape[1], -1)))
