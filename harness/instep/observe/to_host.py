"""Tensors of a device brought to the host all at once: to ask takes longer than to answer, and whoever asks waits.

Leaves out: which tensors, and when.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch

from .digests import bits

T = TypeVar("T")
Moved = Callable[[torch.Tensor], torch.Tensor]

INDEX = (torch.bool, torch.int32, torch.int64)
POOLS = ("pool", "kept")  # fields and arguments that are memory; all other whole numbers of a call are indices


def is_away(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def brought(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the host: those of a device by one copy per device and width; those of the host as they are."""
    found, together = list(tensors), defaultdict[object, list[int]](list)
    for number, tensor in enumerate(tensors):
        if is_away(tensor):
            together[tensor.device, tensor.element_size()].append(number)
    for numbers in together.values():
        lines = [bits(tensors[number]).reshape(-1) for number in numbers]
        parts = torch.split(torch.cat(lines).cpu(), [len(line) for line in lines])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.view(tensors[number].dtype).view(tensors[number].shape)
    return found


def on_host(value: T) -> T:
    """The same answers or states, in mappings and dataclasses of their own, with every tensor on the host."""
    return _all_brought(value, lambda tensor: True, ())


def indices_on_host(value: T) -> T:
    """What an op is called with; its indices, which rules read one by one, on the host. Pools stay where they are."""
    return _all_brought(value, lambda tensor: tensor.dtype in INDEX, POOLS)


def _all_brought(value: T, asked: Callable[[torch.Tensor], bool], but: Iterable[str]) -> T:
    away = dict[int, torch.Tensor]()

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        if is_away(tensor) and asked(tensor):
            away[id(tensor)] = tensor
        return tensor

    copied = _with(value, noted, but)
    if not away:
        return copied
    moved = dict(zip(away, brought([*away.values()]), strict=True))
    return _with(copied, lambda tensor: moved.get(id(tensor), tensor), but)


def _with(value: T, moved: Moved, but: Iterable[str]) -> T:
    """The value with other tensors, but for what is called so."""
    if isinstance(value, torch.Tensor):
        return cast(T, moved(value))
    if isinstance(value, dict):  # no other mapping: roots that are read when somebody asks stay so
        return cast(T, {key: inner if key in but else _with(inner, moved, but) for key, inner in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        inside: dict[str, Any] = {each.name: getattr(value, each.name) for each in fields(value)}
        return cast(T, replace(value, **_with(inside, moved, but)))
    if isinstance(value, tuple) and but:  # parts, and rows with names
        several = [_with(inner, moved, but) for inner in value]
        return cast(T, type(value)(*several) if hasattr(value, "_fields") else tuple(several))
    return value
