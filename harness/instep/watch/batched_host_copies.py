"""Copy tensors of a device to the host in one batch, because a transfer takes longer than its data, and waits.

Leaves out: which tensors, and when.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast

import torch

from .digests import bits

T = TypeVar("T")
Moved = Callable[[torch.Tensor], torch.Tensor]
Bring = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]

INDEX = (torch.bool, torch.int32, torch.int64)
POOLS = ("pool", "kept")  # fields and arguments that are memory; all other integers of a call are indices


def is_away(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def settle(device: str) -> None:
    """Wait for a card: its launches fail when they are waited for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def alive(device: str) -> bool:
    """Whether a card still works: after an access beyond its memory no launch of the process does."""
    try:
        settle(device)
    except RuntimeError:
        return False
    return True


def brought(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the host: those of a device by one copy per device; those of the host as they are."""
    found, together = list(tensors), defaultdict[object, list[int]](list)
    for number, tensor in enumerate(tensors):
        if is_away(tensor):
            together[tensor.device].append(number)
    for numbers in together.values():
        numbers.sort(key=lambda number: -tensors[number].element_size())  # aligns each to its size
        lines = [in_line(tensors[number]) for number in numbers]
        parts = torch.split(torch.cat(lines).cpu(), [len(line) for line in lines])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.view(tensors[number].dtype).view(tensors[number].shape)
    return found


def in_line(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in one line: a view if they are contiguous; else a copy."""
    # An axis of one element may have any stride, also in contiguous memory.
    return bits(tensor.contiguous()).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def on_host(value: T) -> T:
    """The same answers or states, in new mappings and dataclasses, with every tensor on the host."""
    return _all_brought(value, lambda tensor: True, None, brought)


def indices_on_host(value: T, how: Bring = brought) -> T:
    """The arguments of an op with the indices, which rules read one by one, on the host; pools stay on their device."""
    return _all_brought(value, is_index, POOLS, how)


def is_index(tensor: torch.Tensor) -> bool:
    return tensor.dtype in INDEX


def bare(value: T) -> T:
    """The arguments of an op, with shapes instead of numbers that are neither indices nor memory."""
    return with_others(value, lambda x: x if is_index(x) else torch.empty_like(x, device="meta"), POOLS)


def _all_brought(value: T, asked: Callable[[torch.Tensor], bool], but: Collection[str] | None, how: Bring) -> T:
    away = {id(tensor): tensor for tensor in _tensors(value, but) if is_away(tensor) and asked(tensor)}
    moved = dict(zip(away, how([*away.values()]) if away else (), strict=True))
    return with_others(value, lambda tensor: moved.get(id(tensor), tensor), but)


def _tensors(value: Any, but: Collection[str] | None) -> Iterator[torch.Tensor]:
    """The tensors that `with_others` needs."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = (one for key, one in value.items() if key not in (but or ()))
    elif names := _names(cast(Any, type(value))):
        inner = (getattr(value, name) for name in names if name not in (but or ()))
    elif isinstance(value, tuple) and but is not None:
        inner = value
    for one in inner:
        yield from _tensors(one, but)


def with_others(value: T, moved: Moved, but: Collection[str] | None = ()) -> T:
    """The value with other tensors, except in fields with these names. but: None leaves tuples as they are."""
    if isinstance(value, torch.Tensor):
        return cast(T, moved(value))
    stays = but or ()
    if isinstance(value, dict):  # dicts only: lazily read roots stay lazy
        return cast(T, {key: one if key in stays else with_others(one, moved, but) for key, one in value.items()})
    if names := _names(cast(Any, type(value))):
        inside: dict[str, Any] = {
            name: with_others(getattr(value, name), moved, but) for name in names if name not in stays}
        return cast(T, replace(cast(Any, value), **inside))
    if isinstance(value, tuple) and but is not None:  # parts, and rows with names
        several = [with_others(inner, moved, but) for inner in value]
        return cast(T, type(value)(*several) if hasattr(value, "_fields") else tuple(several))
    return value


@cache
def _names(of: Any) -> tuple[str, ...]:
    """The fields of a dataclass; none for any other type."""
    return tuple(field.name for field in fields(of)) if is_dataclass(of) else ()
