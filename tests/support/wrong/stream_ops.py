"""Op sets that put states where they do not belong, for exact streams: found as `support.wrong.stream_ops:NAME`.

Leaves out: wrong numbers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from instep_optimized import load
from instep_optimized.memory_addresses import Part

PLAIN = load("plain")


def _moved(column: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Commits under `snapshot` that take another column."""

    def move(*, source: Any, target: Any) -> None:
        PLAIN.move(source=replace(source, column=column(source.column)), target=target)

    return move


def _in_chunks(changed: Callable[[Part], Part]) -> Any:
    """Prefill chunks with something of theirs changed."""

    def gdn(*, parts: tuple[Part, ...], **given: Any) -> Any:
        return PLAIN.gdn(parts=tuple(changed(part) if part.form == "chunk" else part for part in parts), **given)

    return gdn


def _swapped(part: Part) -> Part:
    return replace(part, store=replace(part.store, units=part.store.units.roll(1)))


def _turned(part: Part) -> Part:
    return replace(part, store=replace(part.store, pool=part.store.pool.transpose(-1, -2)))


def _begun_anew(part: Part) -> Part:
    return replace(part, fresh=torch.ones_like(part.fresh))


def _signed(*, parts: tuple[Part, ...], **given: Any) -> Any:
    """States whose zeros have a sign: equal numbers, other bits."""
    out = PLAIN.gdn(parts=parts, **given)
    for store in (part.store for part in parts if part.store is not None):
        for unit in store.units.tolist():
            store.pool[unit] = torch.where(store.pool[unit] == 0, -0.0, store.pool[unit])
    return out


BEFORE = replace(PLAIN, name="column before", move=_moved(lambda column: (column - 1).clamp(min=0)))
SWAPPED = replace(PLAIN, name="swapped", gdn=_in_chunks(_swapped))
TURNED = replace(PLAIN, name="turned", gdn=_in_chunks(_turned))
BEGUN_ANEW = replace(PLAIN, name="begun anew", gdn=_in_chunks(_begun_anew))
SIGNED = replace(PLAIN, name="signed", gdn=_signed)
