"""Kept states: a request's logical state read out of the pools, and written back into them.

Leaves out: when that happens (`engine.py`). Bits are moved, never made: what comes back is what was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from . import Memory


@dataclass(frozen=True)
class Kept:
    """What has an address in memory, as a copy: per layer, in the canonical layout (see `RequestState`)."""

    conv: dict[int, torch.Tensor]
    state: dict[int, torch.Tensor]
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    draft_keys: dict[int, torch.Tensor]
    draft_values: dict[int, torch.Tensor]


def read(memory: Memory, request: str, length: int) -> Kept:
    """Copies of everything that a request has after `length` tokens. A slot is zeros before the first token,
    whatever it holds: it was handed out poisoned."""
    at, slot = _places(memory, request, length), memory.slots.of(request)

    def units(name: str) -> dict[int, torch.Tensor]:
        found = {layer: memory[name].units(layer)[slot] for layer in memory.layers(name)}
        empty = {layer: torch.zeros_like(unit).contiguous() for layer, unit in found.items()}
        return {layer: empty[layer].copy_(unit) if length else empty[layer] for layer, unit in found.items()}

    def rows(name: str) -> dict[int, torch.Tensor]:
        return {layer: memory[name].units(layer)[at].contiguous() for layer in memory.layers(name)}

    return Kept(
        units("conv"), units("state"), rows("keys"), rows("values"), rows("draft_keys"), rows("draft_values")
    )


def copied(kept: Kept) -> Kept:
    """The same bits in memory of their own."""
    return Kept(*({layer: x.clone() for layer, x in getattr(kept, field.name).items()} for field in fields(kept)))


def write(memory: Memory, request: str, length: int, kept: Kept) -> None:
    """The reverse of `read`: the request owns a slot and pages for `length` tokens. Nothing to write for no tokens."""
    if not length:
        return
    at, slot = _places(memory, request, length), memory.slots.of(request)
    by_slot: Mapping[str, dict[int, torch.Tensor]] = {"conv": kept.conv, "state": kept.state}
    by_page: Mapping[str, dict[int, torch.Tensor]] = {
        "keys": kept.keys, "values": kept.values,
        "draft_keys": kept.draft_keys, "draft_values": kept.draft_values,
    }
    for name, layers in by_slot.items():
        for layer, unit in layers.items():
            memory[name].units(layer)[slot] = unit
    for name, layers in by_page.items():
        for layer, rows in layers.items():
            memory[name].units(layer)[at] = rows


def _places(memory: Memory, request: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and offset of every position, on the pools' device."""
    locations = memory.pages.locations(request, 0, length)
    at = torch.tensor(locations, dtype=torch.int64, device=memory.device)
    return at // memory.pages.size, at % memory.pages.size
