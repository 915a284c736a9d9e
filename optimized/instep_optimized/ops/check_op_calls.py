"""A wrapper for `around` that checks every op call against its contract: dtypes, shapes and index ranges.

A finding goes to `report` as a sentence, and the call itself continues. The wrapper reads indices on the host, so it
belongs to checks and debugging, not to a timed run. Leaves out: values, and which shapes fit each other
(`op_shapes.py`).
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from instep_reference.contract.capacity import MOST_NODES
from instep_reference.contract.place_names import Place

from ..memory_addresses import OWN, Address, Pages, Part, Ring, SplitUpdates
from .fused import FUSIONS
from .integer_op_contracts import RULES, Outside, distinct, owned, spans, within
from .op_shapes import misfits, shapes
from .result_kinds import only_writes, unlike
from .watch_op_calls import OPS, Op, Wrapper, memory_of, tensors_of

Report = Callable[[str], None]


def contracts(report: Report) -> Wrapper:
    """Make the wrapper of `around(ops, see, contracts(report))`: a sentence per broken clause, with op and place."""

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
    """Find the clauses that a call breaks by its arguments."""
    if name not in OPS:
        yield from _own(given)
        return
    yield from misfits(name, given)
    yield from _before(given)
    yield from RULES.get(name, _none)(given)


def after(name: str, given: dict[str, Any], result: Any) -> Iterator[str]:
    """Find the clauses that a call breaks by its results."""
    if name not in OPS or only_writes(name):  # the results of a keeper's op are up to the keeper
        return
    if says := unlike(name, result):
        yield says
        return  # no other clause can be checked
    yield from _after(name, given, result)
    due = shapes(name, given) or ()
    for tensor, shape in zip(result if isinstance(result, tuple) else (result,), due, strict=False):
        if tensor.shape[1:] != shape[1:]:
            yield f"{tuple(tensor.shape)} came back, {shape} is due"


def _own(given: dict[str, Any]) -> Iterator[str]:
    """Check arguments of an op that only a keeper calls: addresses, and `slots` of the `pool` that it writes."""
    for name, value in given.items():
        if isinstance(value, Address):
            yield from _address(name, value)
    pool, slots = given.get("pool"), given.get("slots")
    if isinstance(pool, torch.Tensor) and isinstance(slots, torch.Tensor):
        yield from owned("slots", slots, pool.shape[0])


def _before(given: dict[str, Any]) -> Iterator[str]:
    """Check arguments of any op. Unit 0 is reserved in pools of requests; row 0 of snapshots is an ordinary row."""
    rows = _rows(given)
    for part in (*given.get("windows", ()), *given.get("parts", ())):
        yield from _part(part, rows)
    if isinstance(given.get("pages"), Pages):
        yield from _pages(given["pages"], rows)
    if "locations" in given:
        pool, locations = given["pools"][0] if "pools" in given else given["pool"], given["locations"]
        size = pool.shape[1]
        yield from within("locations", locations, pool.shape[0] * size)
        if bool(((locations >= 0) & (locations < size)).any()):
            yield "a location lies on page 0, which is reserved"
        yield from distinct("locations", locations)
        if len(locations) != rows:
            yield f"{len(locations)} locations for {rows} rows"
    if isinstance(given.get("source"), Address):
        yield from _address("source", given["source"])
        yield from _address("target", given["target"], reserved=True)
    if "index" in given:
        yield from within("index", given["index"], rows)
    if "tokens" in given and "table" in given:
        yield from within("tokens", given["tokens"], given["table"].shape[0], lowest=0)


def _after(name: str, given: dict[str, Any], result: Any) -> Iterator[str]:
    """Check results of any op: each has the right number of rows, and separate memory."""
    results = result if isinstance(result, tuple) else (result,)
    expected = [given["index"].shape[0] if "index" in given else _rows(given)] * len(results)
    if name == "place_rows":  # positions and locations per row, then numbers per request
        expected = [given["rows"], given["rows"], *[given["slots"].shape[0]] * 3]
    if name == "select_beams":  # candidates per request, then numbers per beam
        requests = len(given["tokens"] if given["before"] is None else given["before"].tokens)
        expected = [requests] * 3 + [requests * given["tokens"].shape[1]] * 5
    inputs = {memory_of(tensor) for value in given.values() for tensor in tensors_of(value)}
    seen: set[int] = set()
    for tensor, due in zip(results, expected, strict=True):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.shape[0] != due:
            yield f"rows that came back: {tensor.shape[0]}; due: {due}"
        if not tensor.numel():
            continue
        if memory_of(tensor) in inputs:
            yield "a result is a view on an input"
        if memory_of(tensor) in seen and not (name in FUSIONS and FUSIONS[name].shares):
            yield "two results share memory"
        seen.add(memory_of(tensor))


def _none(given: dict[str, Any]) -> Iterator[str]:
    return iter(())


def _rows(given: dict[str, Any]) -> int:
    """Count the rows of the call: the length of its first argument that has rows."""
    if "inputs" in given:
        return int(given["inputs"].q.shape[0])
    if "parts" in given and "rows" in given:
        return int(given["rows"])
    for name in (
        "x", "tokens", "core", "mixed", "qkv", "query", "projected", "key_raw", "attended", "rows", "logits", "window",
        "own", "slots",
    ):
        if isinstance(given.get(name), torch.Tensor):
            return int(given[name].shape[0])
    return 0


def _part(part: Part, rows: int) -> Iterator[str]:
    yield from spans(part.begin, part.count, part.most, rows)
    yield from _address("read", part.read)
    for name, address in (("store", part.store), ("settled", part.settled)):
        if address is not None:  # a scratch pool has no reserved unit
            yield from _address(name, address, reserved=memory_of(address.pool) == memory_of(part.read.pool))
            yield from distinct(name, address.units)
    if part.per_row is not None:
        yield from _address("per_row", part.per_row)
        yield from distinct("per_row", part.per_row.units)
        if part.most > part.per_row.pool.shape[1]:
            yield Outside(f"per_row: {part.most} positions do not fit in {part.per_row.pool.shape[1]} columns")
    if part.ring is not None:
        yield from _ring(part, part.ring)
    if part.parents is not None and len(part.parents) == rows:
        yield from _continued(part, part.parents)


def _continued(part: Part, parents: torch.Tensor) -> Iterator[str]:
    """Check that a row of a tree continues an earlier row of its window, or the memory before the window."""
    if parents.dtype is not torch.int64:
        yield f"parents are {parents.dtype}, not int64"
    for begin, count in zip(part.begin.tolist(), part.count.tolist(), strict=True):
        for row, parent in enumerate(parents[begin : begin + count].tolist()):
            if not -1 <= parent < row:
                yield f"parents: row {row} of a window continues row {parent}"
                return


def _ring(part: Part, ring: Ring) -> Iterator[str]:
    """Check a ring: pools of one size (`own` a divisor), entries in range, and no row kept on a pending entry."""
    pools, own = ring.kept, ring.own.shape[1]
    shared = {pool.shape[:2] for name, pool in pools._asdict().items() if name not in OWN}
    if len(shared) > 1 or len(ring.own) != len(pools.k) or ring.size % own:
        yield f"ring: pools of {', '.join(str(tuple(pool.shape[:2])) for pool in pools)} units and entries"
    if isinstance(pools, SplitUpdates):
        parts = {"k": (pools.k, pools.k_low), "update": (pools.update, pools.update_low)}
        for name, (high, low) in parts.items():
            if (high.shape, high.stride(), high.dtype) != (low.shape, low.stride(), low.dtype):
                yield f"ring: low parts of {name} have other dtypes or addresses than their high parts"
    yield from within("ring units", ring.units, pools.k.shape[0])
    used = (ring.units >= 0) & (part.read.units >= 0)
    kept, again = used & (ring.keep >= 0), used & ~part.fresh
    yield from distinct("ring", ring.units[kept])
    if bool((ring.units[kept] == 0).any()):
        yield "ring is unit 0, which is reserved"
    yield from within("ring begin", ring.begin[again & (ring.pending > 0)], ring.size, lowest=0)
    yield from within("ring pending", ring.pending[again], ring.size + 1, lowest=0)
    yield from within("ring keep", ring.keep[used], ring.size)
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
    yield from spans(pages.begin, pages.count, pages.most, rows)
    # Only the lines of requests that have rows are checked: an unowned line may hold anything.
    if pages.full and int(pages.count.sum()) != rows:
        yield f"full: counts of {int(pages.count.sum())} rows in all, of {rows}"
    yield from owned("slots", pages.slots, pages.table.shape[0])
    busy = (pages.slots >= 0) & (pages.count > 0)
    lines = pages.table[pages.slots[busy].clamp(max=pages.table.shape[0] - 1)]
    yield from within("table", lines, pages.keys.shape[0])
    if bool((lines == 0).any()):
        yield "the page table names page 0, which is reserved"
    held = (lines >= 0).sum(dim=1) * pages.keys.shape[1]
    if bool(((pages.before + pages.count)[busy] > held).any()):
        yield "a request has more positions than its pages hold"
    if pages.ancestors is not None and len(pages.ancestors) == rows:
        yield from _ancestors(pages, pages.ancestors, busy, held.tolist())


def _ancestors(pages: Pages, ancestors: torch.Tensor, busy: torch.Tensor, held: list[int]) -> Iterator[str]:
    """Check that all rows of a request are nodes or none is; a row sees the root, and nothing without a page."""
    if ancestors.dtype is not torch.int64:
        yield f"ancestors are {ancestors.dtype}, not int64"
    if not 0 < pages.nodes <= MOST_NODES:
        yield f"windows of {pages.nodes} nodes; from 1 to {MOST_NODES} have a bit"
    told = (x[busy].tolist() for x in (pages.begin, pages.count, pages.before))
    for begin, count, before, room in zip(*told, held, strict=True):
        bits = ancestors[begin : begin + count].tolist()
        if not any(bits):
            continue  # a chain in a batch with trees
        if not all(bit > 0 and bit & 1 for bit in bits):
            yield "ancestors: a node does not see the root"
        if max(bits).bit_length() > pages.nodes:
            yield f"ancestors: a row sees node {max(bits).bit_length() - 1} of {pages.nodes} nodes"
        if before + max(bits).bit_length() > room:
            yield "ancestors: a row sees a position that no page holds"


def _address(name: str, address: Address, *, reserved: bool = False) -> Iterator[str]:
    yield from within(f"{name} units", address.units, address.pool.shape[0])
    if reserved and bool((address.units == 0).any()):
        yield f"{name} is unit 0, which is reserved"
    if address.column is not None:
        used = address.column[address.units >= 0] if address.units.shape == address.column.shape else address.column
        yield from within(f"{name} columns", used, address.pool.shape[1], lowest=0)
