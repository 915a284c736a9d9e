"""Cases of random shapes, for the ops of user kernels: recurrences, conv, attend. A number always names the same case.

Leaves out: the table of chosen shapes (`conv_and_gdn.py`, `paged_kv.py`).
"""

from collections.abc import Callable
from functools import partial
from random import Random

import torch

from instep_reference.contract.recurrences import RECURRENCES, Recurrence

from .case import BF16, FP32, Case
from .conv_and_gdn import Heads, Shape, conv_case, gdn_case
from .paged_kv import Latent, Reading, attend_case, latents_case

WIDTHS = (8, 16, 32, 64)
KINDS = ("decode", "verify", "columns", "prefill")  # what one part of a launch does


def drawn(op: str, number: int) -> Case:
    """The case of this number."""
    return DRAWERS[op](Random(f"{op} {number}"), number)


def _recurrence(row: Recurrence, dice: Random, number: int) -> Case:
    keys, shared = dice.choice((1, 2, 4)), dice.choice((1, 2, 3))
    K, V = dice.sample(WIDTHS, 2)
    return Case(row.name, f"drawn-{number}", gdn_case(
        number, _parts(dice), Heads(keys, keys * shared, K, V), FP32, dice.random() < 0.5, _activation(dice), row))


def _conv(dice: Random, number: int) -> Case:
    return Case("conv", f"drawn-{number}", conv_case(
        number, _parts(dice), dice.randrange(1, 20) * 8, dice.choice((2, 3, 4)), _activation(dice),
        dice.random() < 0.5), exact_memory=True)


def _attend(dice: Random, number: int) -> Case:
    reading = _reading(dice)
    return Case("attend", f"drawn-{number}", attend_case(number, reading, _activation(dice)))


def _attend_latents(dice: Random, number: int) -> Case:
    reading = _reading(dice)
    latent = Latent(*(dice.choice(widths) for widths in ((12, 32), (4, 8), (8, 16, 40))))
    return Case("attend_latents", f"drawn-{number}", latents_case(number, reading, latent, _activation(dice)))


def _reading(dice: Random) -> Reading:
    size, shared, kv = dice.choice((1, 4, 16)), dice.choice((1, 2, 4)), dice.choice((1, 2))
    requests = dice.randrange(1, 5)
    before = tuple(dice.randrange(0, 40) for _ in range(requests))
    count = tuple(dice.choice((0, 1, 1, 3, 5)) for _ in range(requests))
    pages = dice.sample(range(1, 400), sum(-(-(b + n) // size) for b, n in zip(before, count, strict=True)))
    tables, longest = list[tuple[int, ...]](), max(-(-(b + n) // size) for b, n in zip(before, count, strict=True))
    for b, n in zip(before, count, strict=True):
        mine, pages = pages[: -(-(b + n) // size)], pages[-(-(b + n) // size) :]
        tables.append((*mine, *(-1,) * (longest - len(mine))))
    return Reading(tuple(tables), before, count, size, kv * shared, kv, dice.choice((16, 32)), dice.randrange(3))


DRAWERS: dict[str, Callable[[Random, int], Case]] = {
    **{row.name: partial(_recurrence, row) for row in RECURRENCES.values()}, "conv": _conv, "attend": _attend,
    "attend_latents": _attend_latents,
}


def _activation(dice: Random) -> torch.dtype:
    return dice.choice((FP32, FP32, BF16))


def _parts(dice: Random) -> tuple[Shape, ...]:
    """One part, or prefill together with windows; units in any order, some requests idle."""
    kind = dice.choice((*KINDS, "beside"))
    if kind == "columns":
        return (_part(dice, kind, dice.sample(range(1, 9), dice.randrange(1, 5))),)
    units = dice.sample(range(1, 12), 6)
    if kind == "beside":
        return _part(dice, "prefill", units[:2]), _part(dice, "decode", units[2 : 2 + dice.randrange(1, 4)])
    return (_part(dice, kind, units[: dice.randrange(1, 6)]),)


def _part(dice: Random, kind: str, units: list[int]) -> Shape:
    many = len(units)
    counts = {"decode": (1,), "verify": (1, 2, 4, 5, 8), "columns": (1, 2, 3, 4), "prefill": (1, 3, 7, 16, 33, 70)}
    count = tuple(0 if dice.random() < 0.15 else dice.choice(counts[kind]) for _ in units)
    read, none = tuple(-1 if dice.random() < 0.15 else unit for unit in units), (0,) * many
    if kind == "verify":
        return Shape("window", count, read, none, per_row=tuple(dice.sample(range(7), many)), skip=dice.randrange(2))
    if kind == "columns":
        column = tuple(dice.randrange(4) for _ in units)
        return Shape("window", count, read, none, per_row=tuple(dice.sample(range(7), many)), column=column)
    fresh = tuple(int(kind == "prefill" and dice.random() < 0.5) for _ in units)
    return Shape("chunk" if kind == "prefill" else "window", count, read, fresh, store=read, skip=dice.randrange(2))
