"""The depthwise causal conv over packed rows, with its history in memory.

The silu after the conv is part of the op `conv`; a short convolution has none.
"""

from collections.abc import Callable
from functools import reduce

import torch

from instep_reference.contract.place_names import Place

from ...memory_addresses import Part
from .compute_width import wide
from .requests_of_part import Lanes, after, along, ancestry, before, lanes, scatter


def conv(*, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place) -> torch.Tensor:
    """out[t] = silu(sum_j weight[:, j] * input[t - (W-1) + j]), in at least fp32, one cast to x's dtype.

    Shapes:  x (N, C)   weight (C, W)   windows in memory (C, W-1), oldest first  ->  (N, C)
    Mirrors: the short convolution of Gated DeltaNet (arXiv:2412.06464); a prefill chunk and a verify
             window are one function here. Windows keep the bits of x.
    """
    return _over(x, weight, parts, _silu)


def biased_conv(
    *, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, parts: tuple[Part, ...], to: Place
) -> torch.Tensor:
    """Do `conv` with a bias (C) that is added before silu. Mirrors: the short convolution of Mamba2."""
    return _over(x, weight, parts, lambda total: _silu(total + wide(bias)[:, None]))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def short_conv(*, x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], to: Place) -> torch.Tensor:
    """Do `conv` without the silu."""
    return _over(x, weight, parts, lambda total: total)


def dilated_conv(
    *, x: torch.Tensor, weight: torch.Tensor, distance: int, parts: tuple[Part, ...], to: Place
) -> torch.Tensor:
    """Do `conv` with taps that are `distance` rows apart. Windows in memory are (C, (W-1) * distance)."""
    return _over(x, weight, parts, _silu, distance)


def _over(
    x: torch.Tensor, weight: torch.Tensor, parts: tuple[Part, ...], then: Callable[[torch.Tensor], torch.Tensor],
    distance: int = 1,
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for part in parts:
        who = lanes(part)
        if len(who.which):
            _run(x, weight, part, who, out, then, distance)
    return out


def _run(
    x: torch.Tensor, weight: torch.Tensor, part: Part, who: Lanes, out: torch.Tensor,
    then: Callable[[torch.Tensor], torch.Tensor], distance: int,
) -> None:
    history = (weight.shape[1] - 1) * distance
    line = torch.cat([before(part, who, x.dtype), x[who.rows].transpose(1, 2)], dim=2)  # [n, C, W-1 + most]
    # One line per request holds its history and its rows; every result and every window is a slice of the line.
    pieces = pieces_of(line, part, who, history + 1)  # [n, C, most, W]; with a distance W-1 of them between two taps
    taps = zip(wide(pieces[..., ::distance]).unbind(-1), wide(weight).unbind(-1), strict=True)
    # torch's own sum and silu are not used: on a device their bits depend on the shape of the whole call.
    mixed = then(reduce(torch.add, (tap * by[:, None] for tap, by in taps)))
    scatter(out, who, mixed.transpose(1, 2))
    for token, alive in enumerate(who.alive):
        along(part.per_row, who, token, pieces[:alive, :, token, 1:])
    # The last W-1 inputs of each request, which has its own length: inputs length .. length + W-2 of its line.
    ends = who.length[:, None] + torch.arange(history, device=x.device)
    after(part.store, who, line.gather(2, ends[:, None, :].expand(-1, x.shape[1], -1)))


def pieces_of(line: torch.Tensor, part: Part, who: Lanes, width: int) -> torch.Tensor:
    """The W inputs that every row reads, its own last. In a chain these are neighbours on the line.

    Shapes:  line (n, .., W-1 + most)  ->  (n, .., most, W)
    """
    parents = ancestry(part, who)
    if parents is None:
        return line.unfold(-1, width, 1)
    spots = _taps_of(parents, width)
    each = spots.flatten(1).view(len(line), *(1,) * (line.dim() - 2), -1)
    return line.gather(-1, each.expand(*line.shape[:-1], -1)).view(*line.shape[:-1], *spots.shape[1:])


def _taps_of(parents: torch.Tensor, width: int) -> torch.Tensor:
    """Locate a row's inputs on its request's line, oldest first: parents [n, most] -> [n, most, W].

    Row t is at W-1 + t, after the history. A row is preceded by its parent, and the root by the history.
    """
    history = torch.arange(-1, width - 2, device=parents.device).clamp(min=0).expand(len(parents), -1)
    behind = torch.cat([history, parents + width - 1], dim=1)  # for every place on the line the previous place
    taps = [torch.arange(width - 1, behind.shape[1], device=parents.device).expand(len(parents), -1)]
    for _ in range(width - 1):
        taps.insert(0, behind.gather(1, taps[0]))
    return torch.stack(taps, dim=-1)
