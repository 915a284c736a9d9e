"""The algebra of labels on int64 tensors: mix, expand, read, and the code of a place.

Constants and definitions are those of `instep_reference.contract.label_algebra`. Labels are unsigned, and torch has
int64: its sums and products wrap to the same 64 bits, and a mask makes its right shift logical. Leaves out: which op
mixes which labels (`ledger_label_ops.py`).
"""

import math
from functools import lru_cache
from zlib import crc32

import torch

from instep_reference.contract.label_algebra import MIX_A, MIX_B, MIX_C, MIX_D, SPREAD
from instep_reference.contract.place_names import Place

BITS = 64


def signed(number: int) -> int:
    """Return the int64 that has the bits of an unsigned 64-bit number."""
    number %= 1 << BITS
    return number - (1 << BITS) if number >> (BITS - 1) else number


@lru_cache(maxsize=4096)
def _number(number: int) -> torch.Tensor:
    """Return a tensor without axes with the bits of a number: torch takes three times as long for one of Python."""
    return torch.tensor(signed(number), device="cpu")


_SPREAD = signed(SPREAD)
_A, _B, _C, _D = (_number(constant) for constant in (MIX_A, MIX_B, MIX_C, MIX_D))


def mix(a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
    """Mix two labels into one; mix(a, b) is not mix(b, a). Element by element, with broadcasting.

    x = a*MIX_A + b*MIX_B + MIX_C;  x ^= x >> 29;  x *= MIX_D;  x ^= x >> 32
    """
    x = a * _A + (_number(b * MIX_B + MIX_C) if isinstance(b, int) else (b * _B).add_(_C))
    x = shift_right(x, 29).bitwise_xor_(x).mul_(_D)
    return shift_right(x, 32).bitwise_xor_(x)


def shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift logically: zeros come in from the left."""
    by, kept = _shift(bits)
    return (x >> by).bitwise_and_(kept)


@lru_cache
def _shift(bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of bits, and the mask of those that a logical shift fills from x."""
    return _number(bits), _number((1 << (BITS - bits)) - 1)


@lru_cache(maxsize=4096)
def code(place: Place) -> int:
    """Encode a place: crc32 of "family.layer.component", the same for every stage of the draft."""
    family = "trunk" if place.stage == "trunk" else "draft"
    return crc32(f"{family}.{place.layer}.{place.component}".encode("ascii"))


def expand(label: torch.Tensor, *shape: int) -> torch.Tensor:
    """Expand labels [...] -> [..., *shape]: element j of a block is label + j * SPREAD, j over the flattened block.

    The label 0 means empty, and gives zeros.
    """
    head = label[..., None]
    rows = head + _line(math.prod(shape), _SPREAD, 0, label.device)
    return rows.masked_fill_(head.logical_not(), 0).view(*label.shape, *shape)


def read(x: torch.Tensor, keep: int = 1) -> torch.Tensor:
    """Read [*kept, ...] -> labels [*kept]: the label of an intact block; an unexpected number if any element is wrong.

        l = x[0];  l + sum_j (x[j] - expand(l)[j]) * (2j + 1)

    Sums modulo 2^64 can be split: only sum_j x[j] (2j + 1) is taken over the elements. The share of expand(l) is
    l sum_j (2j + 1) + SPREAD sum_j j (2j + 1), and 0 if l is 0.
    """
    flat = x.reshape(*x.shape[:keep], math.prod(x.shape[keep:]))
    count = flat.shape[-1]
    label, found = flat[..., 0], (flat * _line(count, 2, 1, x.device)).sum(dim=-1)
    odd = count * count
    by_place = count * (count - 1) * (2 * count - 1) // 3 + count * (count - 1) // 2
    intact = label * _number(odd) + _number(SPREAD * by_place)
    return label + found - intact.masked_fill_(label.logical_not(), 0)


def _line(count: int, step: int, first: int, device: torch.device) -> torch.Tensor:
    """first + j * step for every j below `count`. Made once on the CPU; memory of a graph is not kept."""
    return (_known if device.type == "cpu" else _made)(count, step, first, device)


def _made(count: int, step: int, first: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device) * step + first


_known = lru_cache(maxsize=1024)(_made)
