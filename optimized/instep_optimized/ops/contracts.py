"""A wrapper for `around` that judges every op call by its contract: dtypes, shapes and index ranges.

What it finds goes to `report` as a sentence; the call itself goes on. It reads indices on the host, so it belongs to
checks and debugging, not to a timed run. Leaves out: values, and which shapes fit each other (`shapes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from instep_reference.contract.place import Place

from ..layout import Address, Pages, Part, Ring
from .around import OPS, Op, Wrapper, memory_of, tensors_of
from .shapes import misfits, shapes

Report = Callable[[str], None]


def contracts(report: Report) -> Wrapper:
    """`around(ops, see, contracts(report))`: one sentence per broken clause, naming the op and its place."""

    def wrapper(name: str, op: Op) -> Op:
        @wraps(op)
        def call(**given: Any) -> Any:
            to = given.get("to")
            where = f"{name} ({to})" if isinstance(to, Place) else name
            for clause in before(name, given):
                report(f"{where}: {clause}")
            result = op(**given)
            for clause in after(name, given, result):
                report(f"{where}: {clause}")
            return result

        return call

    return wrapper


def before(name: str, given: dict[str, Any]) -> Iterator[str]:
    """The clauses that a call breaks by its arguments."""
    if name not in OPS:
        yield from _own(given)
        return
    yield from misfits(name, given)
    yield from _before(given)
    yield from RULES.get(name, _none)(given)


def after(name: str, given: dict[str, Any], result: Any) -> Iterator[str]:
    """The clauses that a call breaks by its results."""
    if name not in OPS:  # what an op of a keeper gives back is the keeper's own
        return
    yield from _after(name, given, result)
    due = shapes(name, given) or ()
    for tensor, shape in zip(result if isinstance(result, tuple) else (result,), due, strict=False):
        if tensor.shape[1:] != shape[1:]:
            yield f"{tuple(tensor.shape)} came back, {shape} is due"


def _own(given: dict[str, Any]) -> Iterator[str]:
    """Arguments of an op that only a keeper calls: addresses, and `slots` of the `pool` that it writes."""
    for name, value in given.items():
        if isinstance(value, Address):
            yield from _address(name, value)
    pool, slots = given.get("pool"), given.get("slots")
    if isinstance(pool, torch.Tensor) and isinstance(slots, torch.Tensor):
        yield from _owned("slots", slots, pool.shape[0])


def _before(given: dict[str, Any]) -> Iterator[str]:
    """Arguments of any op. Unit 0 is reserved where requests own units; row 0 of snapshots is an ordinary row."""
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
    if "tokens" in given and "table" in given:
        yield from _within("tokens", given["tokens"], given["table"].shape[0], lowest=0)


def _after(name: str, given: dict[str, Any], result: Any) -> Iterator[str]:
    """Results of any op: each has the right number of rows, and memory of its own."""
    results = result if isinstance(result, tuple) else (result,)
    expected = [given["index"].shape[0] if "index" in given else _rows(given)] * len(results)
    if name == "place_rows":  # positions and locations of rows, then what is said of requests
        expected = [given["rows"], given["rows"], *[given["slots"].shape[0]] * 3]
    inputs = {memory_of(tensor) for value in given.values() for tensor in tensors_of(value)}
    seen: set[int] = set()
    for tensor, due in zip(results, expected, strict=True):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.shape[0] != due:
            yield f"{tensor.shape[0]} rows came back, {due} are due"
        if not tensor.numel():
            continue
        if memory_of(tensor) in inputs:
            yield "a result is a view on an input"
        if memory_of(tensor) in seen:
            yield "two results share memory"
        seen.add(memory_of(tensor))


def _none(given: dict[str, Any]) -> Iterator[str]:
    return iter(())


def _place_rows(given: dict[str, Any]) -> Iterator[str]:
    """Slots have one owner each, rows of requests do not overlap, and no row stands before position 0."""
    slots, length, table = given["slots"], given["length"], given["table"]
    yield from _owned("slots", slots, min(length.shape[0], table.shape[0]))
    yield from _whole(given, "begin", "count", "length", "table")
    busy = slots >= 0
    begin, count = given["begin"][busy], given["count"][busy]
    yield from _spans(begin, count, int(count.max()) if len(count) else 0, given["rows"])
    at = length[slots[busy].clamp(0, length.shape[0] - 1)] + given["shift"]
    if bool(((at < 0) & (count > 0)).any()):
        yield f"a row would stand at position {int(at.min())}"


def _advance(given: dict[str, Any]) -> Iterator[str]:
    """Slots have one owner each, and no length shrinks."""
    yield from _owned("slots", given["slots"], given["length"].shape[0])
    yield from _whole(given, "length", "by")
    if bool(((given["by"] < 0) & (given["slots"] >= 0)).any()):
        yield f"a length would shrink by {-int(given['by'].min())}"


def _accept(given: dict[str, Any]) -> Iterator[str]:
    """No window is wider than the tensor, and no forced path longer than its window."""
    width, count, forced = given["window"].shape[1], given["count"], given["forced_correct"]
    yield from _within("count", count, width + 1, lowest=0)
    yield from _whole(given, "window", "picks", "forced_correct", "forced_bonus")
    if bool((forced >= count.clamp(min=1)).any()):
        yield "more drafts are forced than the window has"


def _plan_ring(given: dict[str, Any]) -> Iterator[str]:
    """The ring has room for the pending tokens and the rows of the launch; slots have one owner each."""
    yield from _owned("slots", given["slots"], given["settled"].shape[0])
    size, most = given["size"], given["most"]
    if most > size:
        yield f"{most} rows do not fit in {size} entries"
        return
    busy = given["slots"] >= 0
    settled = given["settled"][given["slots"][busy].clamp(0, given["settled"].shape[0] - 1)]
    pending = given["before"][busy] - settled
    room = size - most
    if bool((pending > room).any()):
        yield f"{int(pending.max())} tokens are pending; beside {most} rows the ring of {size} entries holds {room}"
    if bool((pending < 0).any()):
        yield f"{-int(pending.min())} tokens more are in the state than the request has"


def _choose(given: dict[str, Any]) -> Iterator[str]:
    own, forced = given["own"], given["forced"]
    if own.shape != forced.shape:
        yield f"own is {tuple(own.shape)}, forced is {tuple(forced.shape)}"
    yield from _whole(given, "own", "forced")


def _shift(given: dict[str, Any]) -> Iterator[str]:
    """Rows of requests do not overlap, and there is one token behind the rows of each request."""
    begin, count, behind = given["begin"], given["count"], given["behind"]
    yield from _spans(begin, count, int(count.max()) if len(count) else 0, len(given["tokens"]))
    yield from _whole(given, "tokens", "begin", "count", "behind")
    if behind.shape != begin.shape:
        yield f"{behind.numel()} tokens stand behind {len(begin)} requests"


def _whole(given: dict[str, Any], *names: str) -> Iterator[str]:
    for name in names:
        if given[name].dtype is not torch.int64:
            yield f"{name} are {given[name].dtype}, not int64"


def _owned(name: str, index: torch.Tensor, size: int) -> Iterator[str]:
    """Slots are in range, none stands twice, and none is the reserved slot 0."""
    yield from _within(name, index, size)
    yield from _distinct(name, index)
    if bool((index == 0).any()):
        yield f"{name} name slot 0, which is reserved"


# Ops on whole numbers have rules by name; the other ops are judged by the kinds of their arguments.
RULES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "place_rows": _place_rows, "advance": _advance, "accept": _accept, "choose": _choose,
    "plan_ring": _plan_ring, "shift": _shift,
}


def _rows(given: dict[str, Any]) -> int:
    """How many rows the call is about: the length of its first argument that has rows."""
    if "inputs" in given:
        return int(given["inputs"].q.shape[0])
    if "parts" in given and "rows" in given:
        return int(given["rows"])
    for name in (
        "x", "tokens", "core", "mixed", "query", "projected", "attended", "rows", "logits", "window", "own", "slots"
    ):
        if isinstance(given.get(name), torch.Tensor):
            return int(given[name].shape[0])
    return 0


def _part(part: Part, rows: int) -> Iterator[str]:
    yield from _spans(part.begin, part.count, part.most, rows)
    yield from _address("read", part.read)
    for name, address in (("store", part.store), ("settled", part.settled)):
        if address is not None:  # a scratch pool has no unit that is reserved
            yield from _address(name, address, reserved=memory_of(address.pool) == memory_of(part.read.pool))
            yield from _distinct(name, address.units)
    if part.per_row is not None:
        yield from _address("per_row", part.per_row)
        yield from _distinct("per_row", part.per_row.units)
        if part.most > part.per_row.pool.shape[1]:
            yield f"per_row: {part.most} positions do not fit in {part.per_row.pool.shape[1]} columns"
    if part.ring is not None:
        yield from _ring(part, part.ring)


def _ring(part: Part, ring: Ring) -> Iterator[str]:
    """All pools have one size (`own` a divisor of it), entries are in range, and no row is kept on a pending entry."""
    pools, own = ring.kept, ring.own.shape[1]
    shared = {pool.shape[:2] for pool in pools if pool is not ring.own}
    if len(shared) > 1 or len(ring.own) != len(pools.k) or ring.size % own:
        yield f"ring: pools of {', '.join(str(tuple(pool.shape[:2])) for pool in pools)} units and entries"
    yield from _within("ring units", ring.units, pools.k.shape[0])
    used = (ring.units >= 0) & (part.read.units >= 0)
    kept, again = used & (ring.keep >= 0), used & ~part.fresh
    yield from _distinct("ring", ring.units[kept])
    if bool((ring.units[kept] == 0).any()):
        yield "ring is unit 0, which is reserved"
    yield from _within("ring begin", ring.begin[again & (ring.pending > 0)], ring.size, lowest=0)
    yield from _within("ring pending", ring.pending[again], ring.size + 1, lowest=0)
    yield from _within("ring keep", ring.keep[used], ring.size)
    pending = ring.pending.where(again, 0)
    ahead = (ring.keep - ring.begin) % ring.size
    over = kept & (part.count > 0) & (pending > 0)
    if bool((over & ((ahead < pending) | (ahead + part.count > ring.size))).any()):
        yield "ring: a row would be kept where a token waits to be run again"
    if bool((kept & (part.count > own)).any()):
        yield f"ring: {part.most} rows do not fit in {own} entries"
    if bool((pending > own).any()):
        name = next(name for name, pool in pools._asdict().items() if pool is ring.own)
        yield f"ring: {int(pending.max())} pending tokens have no {own} entries of {name}"


def _pages(pages: Pages, rows: int) -> Iterator[str]:
    yield from _spans(pages.begin, pages.count, pages.most, rows)
    # Only the lines of requests that have rows are looked at: a line that no request owns may hold anything.
    yield from _owned("slots", pages.slots, pages.table.shape[0])
    busy = (pages.slots >= 0) & (pages.count > 0)
    lines = pages.table[pages.slots[busy].clamp(max=pages.table.shape[0] - 1)]
    yield from _within("table", lines, pages.keys.shape[0])
    if bool((lines == 0).any()):
        yield "the page table names page 0, which is reserved"
    held = (lines >= 0).sum(dim=1) * pages.keys.shape[1]
    if bool(((pages.before + pages.count)[busy] > held).any()):
        yield "a request has more positions than its pages hold"


def _spans(begin: torch.Tensor, count: torch.Tensor, most: int, rows: int) -> Iterator[str]:
    """Rows of requests lie within the batch and do not overlap."""
    if not len(begin):
        return
    if int(count.max()) > most:
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
        used = address.column[address.units >= 0] if address.units.shape == address.column.shape else address.column
        yield from _within(f"{name} columns", used, address.pool.shape[1], lowest=0)


def _within(name: str, index: torch.Tensor, size: int, lowest: int = -1) -> Iterator[str]:
    """The index is int64 and lies between `lowest` (-1 means none) and size - 1."""
    if index.dtype is not torch.int64:
        yield f"{name} are {index.dtype}, not int64"
    if index.numel() and not (int(index.min()) >= lowest and int(index.max()) < size):
        yield f"{name} run from {int(index.min())} to {int(index.max())}, there are {size}"


def _distinct(name: str, index: torch.Tensor) -> Iterator[str]:
    used = [number for number in index.tolist() if number >= 0]
    if len(set(used)) < len(used):
        yield f"{name}: two requests would write the same place"
