"""Per-event cache of index tensors copied to the host, so that an index shared by many op calls is copied once.

A copy from the device waits, and with several processes on the device it waits for its turn: at every call that would
take longer than the event. So later calls are judged by the cached values. The tensors that they really got are kept on
the device, and compared once after the event (`otherwise`).
Leaves out: the rules by which calls are judged (`op_calls.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from .host_copies import bare, brought, in_line, indices_on_host

Given = dict[str, Any]
Key = tuple[object, ...]  # the address of an index, and how it is read there


class Told:
    """The cache of one event; calls are known by a number."""

    def __init__(self) -> None:
        # With the tensor itself: while it is held, its memory cannot serve another index.
        self._known: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self._later: dict[int, tuple[Given, list[Key], torch.Tensor]] = {}

    def of(self, call: int, given: Given) -> Given:
        """The arguments of the call, with its indices on the host."""
        return indices_on_host(given, partial(self._brought, call, given))

    def _brought(self, call: int, given: Given, indices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        keys = [_key(index) for index in indices]
        new = {key: index for key, index in zip(keys, indices, strict=True) if key not in self._known}
        if again := {key: index for key, index in zip(keys, indices, strict=True) if key not in new}:
            self._later[call] = bare(given), [*again], torch.cat([in_line(index) for index in again.values()])
        for (key, index), here in zip(new.items(), brought([*new.values()]), strict=True):
            self._known[key] = index, here
        return [self._known[key][1] for key in keys]

    def otherwise(self) -> Mapping[int, Given]:
        """The calls whose indices differ from those by which they were judged, with the real ones; numbers that are
        neither indices nor memory as shapes only. This waits for the device once.
        """
        if not self._later:
            return {}
        found = {}
        lines = torch.cat([line for _, _, line in self._later.values()]).cpu()
        given = torch.split(lines, [len(line) for _, _, line in self._later.values()])
        for (call, (shapes, keys, _)), line in zip(self._later.items(), given, strict=True):
            here = [self._known[key][1] for key in keys]
            if not torch.equal(line, torch.cat([in_line(index) for index in here])):
                parts = torch.split(line, [index.numel() * index.element_size() for index in here])
                right = {key: part.clone().view(index.dtype).view(index.shape)
                         for key, part, index in zip(keys, parts, here, strict=True)}  # fmt: skip
                found[call] = indices_on_host(shapes, partial(self._as_given, right))
        return found

    def _as_given(self, right: Mapping[Key, torch.Tensor], indices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that were known before the call; the others were copied for it."""
        return [right[key] if key in right else self._known[key][1] for key in map(_key, indices)]


def _key(index: torch.Tensor) -> Key:
    return index.device, index.data_ptr(), index.dtype, index.shape, index.stride()
