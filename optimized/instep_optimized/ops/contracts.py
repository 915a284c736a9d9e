"""A wrapper for `around` that judges every op call by its contract: dtypes, shapes and index ranges.

Leaves out: values. It reads indices on the host, so it belongs to checks and debugging, not to a timed run. What is
found goes to `report` as a sentence; the call itself is not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch

from instep_reference.contract.place import Place

from ..layout import Address, Pages, Part
from .around import Op, Wrapper

Report = Callable[[str], None]


def contracts(report: Report) -> Wrapper:
    """`around(ops, see, contracts(report))`: one sentence per broken clause, naming the op and its place."""

    def wrapper(name: str, op: Op) -> Op:
        @wraps(op)
        def call(**given: Any) -> Any:
            to = given.get("to")
            where = f"{name} ({to})" if isinstance(to, Place) else name
            for clause in _before(given):
                report(f"{where}: {clause}")
            result = op(**given)
            for clause in _after(given, result):
                report(f"{where}: {clause}")
            return result

        return call

    return wrapper


def _before(given: dict[str, Any]) -> Iterator[str]:
    """What the call was given. Unit 0 is reserved wherever requests own units; a snapshot's row 0 is a row."""
    rows = _rows(given)
    for part in given.get("parts", ()):
        yield from _part(part, rows)
    if isinstance(given.get("pages"), Pages):
        yield from _pages(given["pages"], rows)
    if "locations" in given:
        pool, locations = given["pool"], given["locations"]
        size = pool.shape[1]
        yield from _within("locations", locations, pool.shape[0] * size)
        if bool(((locations >= 0) & (locations < size)).any()):
            yield "a location lies on page 0, which is reserved"
        yield from _distinct("locations", locations)
        if len(locations) != rows:
            yield f"{len(locations)} locations for {rows} rows"
    if "source" in given:
        yield from _address("source", given["source"])
        yield from _address("target", given["target"], reserved=True)
    if "index" in given:
        yield from _within("index", given["index"], rows)
    if "tokens" in given:
        yield from _within("tokens", given["tokens"], given["table"].shape[0], lowest=0)


def _after(given: dict[str, Any], result: Any) -> Iterator[str]:
    """What the call gave: as many rows as were asked for, each result in memory of its own."""
    results = result if isinstance(result, tuple) else (result,)
    expected = given["index"].shape[0] if "index" in given else _rows(given)
    inputs = {_memory(tensor) for value in given.values() for tensor in _tensors(value)}
    seen: set[int] = set()
    for tensor in results:
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        if tensor.shape[0] != expected:
            yield f"{tensor.shape[0]} rows came back, {expected} are due"
        if _memory(tensor) in inputs:
            yield "a result is a view on an input"
        if _memory(tensor) in seen:
            yield "two results share memory"
        seen.add(_memory(tensor))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument: itself, or those of a bundle, of addresses and of parts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for inner in value:
            yield from _tensors(inner)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _rows(given: dict[str, Any]) -> int:
    """How many rows the call is about: of its first tensor of rows."""
    if "inputs" in given:
        return int(given["inputs"].q.shape[0])
    for name in ("x", "tokens", "core", "mixed", "query", "projected", "attended", "rows", "logits", "window"):
        if name in given:
            return int(given[name].shape[0])
    return 0


def _part(part: Part, rows: int) -> Iterator[str]:
    yield from _spans(part.begin, part.count, part.most, rows)
    yield from _address("read", part.read)
    if part.store is not None:
        yield from _address("store", part.store, reserved=True)
        yield from _distinct("store", part.store.units)
    if part.each is not None:
        yield from _address("each", part.each)
        yield from _distinct("each", part.each.units)
        if part.most > part.each.pool.shape[1]:
            yield f"each: {part.most} positions do not fit in {part.each.pool.shape[1]} columns"


def _pages(pages: Pages, rows: int) -> Iterator[str]:
    yield from _spans(pages.begin, pages.count, pages.most, rows)
    yield from _within("table", pages.table, pages.keys.shape[0])
    if bool((pages.table == 0).any()):
        yield "the page table names page 0, which is reserved"
    last = pages.before + pages.count
    if len(last) and int(last.max()) != pages.reach:
        yield f"reach is {pages.reach}, the longest request has {int(last.max())} positions"
    size = pages.keys.shape[1]
    held = (pages.table >= 0).sum(dim=1) * size
    if bool((last > held).any()):
        yield "a request has more positions than its pages hold"


def _spans(begin: torch.Tensor, count: torch.Tensor, most: int, rows: int) -> Iterator[str]:
    """Rows of requests lie within the batch and do not overlap."""
    if not len(begin):
        return
    if int(count.max()) != most:
        yield f"most is {most}, the largest count is {int(count.max())}"
    covered = [row for b, c in zip(begin.tolist(), count.tolist(), strict=True) for row in range(b, b + c)]
    if covered and (min(covered) < 0 or max(covered) >= rows):
        yield f"rows {min(covered)} to {max(covered)} of {rows} are named"
    if len(set(covered)) < len(covered):
        yield "two requests share a row"


def _address(name: str, address: Address, *, reserved: bool = False) -> Iterator[str]:
    yield from _within(f"{name} units", address.units, address.pool.shape[0])
    if reserved and bool((address.units == 0).any()):
        yield f"{name} is unit 0, which is reserved"
    if address.column is not None:
        yield from _within(f"{name} columns", address.column, address.pool.shape[1])


def _within(name: str, index: torch.Tensor, size: int, lowest: int = -1) -> Iterator[str]:
    """int64, from -1 (nothing) to size - 1."""
    if index.dtype is not torch.int64:
        yield f"{name} are {index.dtype}, not int64"
    if index.numel() and not (int(index.min()) >= lowest and int(index.max()) < size):
        yield f"{name} run from {int(index.min())} to {int(index.max())}, there are {size}"


def _distinct(name: str, index: torch.Tensor) -> Iterator[str]:
    used = [number for number in index.tolist() if number >= 0]
    if len(set(used)) < len(used):
        yield f"{name}: two requests would write the same place"
