"""A wrapper for `around` that judges every op call of an event by its contract, and logs which rows it served.

It reads indices on the host. So calls under a capture of CUDA graphs are counted and not judged, and host reads of the
judgement are not logged. On a GPU a call is judged with cached indices, and again after the event if these had changed.
Leaves out: the results of ops, and the use of the log (`checks/op_call_contracts.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from instep_optimized.memory_addresses import Address, Pages, Part
from instep_optimized.ops.check_op_calls import after, before
from instep_optimized.ops.integer_op_contracts import Outside
from instep_optimized.ops.watch_op_calls import OPS, Op, tensors_of
from instep_reference.contract.declared_rounding import Blocked, Storage
from instep_reference.contract.engine import Region
from instep_reference.contract.place_names import Place

from .batched_host_copies import alive, bare, brought, in_line, indices_on_host
from .event_log import Broken, FailedOp, Served
from .host_reads import Reads
from .kernel_calls import Exercised, Tally, counted_in
from .pool_addresses import Pools, stands

SCALES = " scales"  # suffix of the name of their pool
OURS = "instep_optimized"  # the package whose ops are not counted


class NotRun(RuntimeError):
    """Replaces a call that an interpreter would follow into foreign memory. It ends the event, not the process."""


@dataclass
class _Judged:
    """A judged call.

    broken, served  depend on its indices; further: broken clauses that do not
    lengths         for an op that is not ours, the forms that it serves, and the rows of each sequence
    """

    name: str
    place: Place | None
    broken: list[Broken]
    served: list[Served]
    lengths: list[tuple[str, list[int]]]
    further: list[Broken] = field(default_factory=list)


class Calls:
    """The log of the op calls of one event. Pass `wrapper` to `around`; call `begin` and `take` around an event."""

    def __init__(self, captures: bool, declared: Mapping[str, Storage], reads: Reads) -> None:
        """captures: the op set declares that it never waits. declared: component -> dtype of its rows."""
        self._captures, self._declared, self._reads = captures, declared, reads
        self._pools, self._on = Pools(()), False
        self.tally = Tally()  # of the whole run, for ops that are not ours
        self._addresses: list[tuple[object, ...]] = []
        self.part = 0  # of a pipeline's schedule: the tick
        self._last: Place | None = None
        self._failed_op: FailedOp | None = None
        self._clear()

    def begin(self, regions: Sequence[Region]) -> None:
        addresses: list[tuple[object, ...]] = [(region.units.data_ptr(), region.units.stride()) for region in regions]
        if addresses != self._addresses:
            self._pools, self._addresses = Pools(regions), addresses
        self._clear()
        self._on = True

    def end(self) -> None:
        self._on = False

    def take(self) -> dict[str, Any]:
        """Fields of `EventLog`."""
        judged = self._settled()
        for form, lengths in chain.from_iterable(one.lengths for one in judged):
            self.tally.ops[form] = self.tally.ops.get(form, Exercised()).with_call(lengths)
        self._indices = HostIndexCache()  # the memory of cached indices may be reused now
        return {
            "calls": self._calls, "tensors": self._tensors, "captured": self._captured,
            "broken": tuple(chain.from_iterable((*one.broken, *one.further) for one in judged)),
            "served": tuple(chain.from_iterable(one.served for one in judged)), "by": dict(self._by),
            "failed_op": self._failed_op, "wrote": tuple(self._wrote),
        }

    def wrapper(self, name: str, op: Op) -> Op:
        """The op, judged before and after its run."""
        by = f"{getattr(op, '__module__', '?')}.{getattr(op, '__qualname__', name)}"
        ours = by.partition(".")[0] == OURS

        def call(**given: Any) -> Any:
            if not self._on:
                return self._run(name, op, given)
            self._by[name] = by
            if name not in OPS:
                self._wrote.append((name, self._place(given)))
            if _capturing():
                self._captured += 1
                return self._run(name, op, given)
            with self._reads.paused():
                told = self._indices.of(len(self._judged), given) if self._reads.cuda else given
                judged = _judged(name, self._place(given), told, ours)
                judged.served = [replace(one, part=self.part) for one in judged.served] if self.part else judged.served
                judged.further += _broken(name, judged.place, self._views(name, given))
                self._judged.append(judged)
                if self._captures and not self._reads.cuda:  # its kernels are interpreted
                    self._stop(judged)
                result = None if self._captures else self._run(name, op, given)
            if self._captures:
                with self._reads.inside(name):
                    result = self._run(name, op, given)
            with self._reads.paused():
                behind = chain(after(name, given, result), self._dtypes(given, result))
                judged.further += _broken(name, self._place(given), behind)
            self._calls += 1
            self._tensors += sum(1 for value in (*given.values(), result) for _ in tensors_of(value))
            return result

        return call

    def _run(self, name: str, op: Op, given: dict[str, Any]) -> Any:
        """Run the op; if it raises, log which op it was."""
        try:
            with counted_in(self.tally) if self._on else nullcontext():
                return op(**given)
        except BaseException as error:
            self._failed_op = FailedOp(name, self._place(given), error)
            raise

    def _stop(self, judged: _Judged) -> None:
        """Raise if an index is out of range. On a GPU the driver reports it; torch's own ops raise themselves."""
        if any(isinstance(one.clause, Outside) for one in judged.broken):
            error = NotRun("not run: an index leads outside of its memory")
            self._failed_op = FailedOp(judged.name, judged.place, error)
            raise error

    def _settled(self) -> list[_Judged]:
        """All calls of the event; calls whose cached indices were stale are judged again."""
        judged = list(self._judged)
        try:
            changed = self._indices.changed()
        except RuntimeError:
            if alive("cuda"):
                raise
            changed = {}  # a kernel has killed the device, so the cached indices remain
        for number, given in changed.items():
            one = judged[number]
            again = _judged(one.name, one.place, given, not one.lengths)
            judged[number] = replace(again, further=one.further)
        return judged

    def _place(self, given: dict[str, Any]) -> Place | None:
        """The place of the result, or of the written memory, or else the previous place."""
        to = given.get("to")
        if to is not None:
            self._last = to if isinstance(to, Place) else next(iter(to))
            return self._last
        memory = given["target"].pool if isinstance(given.get("target"), Address) else given.get("pool")
        region = self._pools.of(memory) if isinstance(memory, torch.Tensor) else None
        place = None if region is None else stands(region).place
        return self._last if place is None or place.component == "length" else place

    def _views(self, name: str, given: dict[str, Any]) -> Iterator[str]:
        """Clauses about memory: it must be a view of the engine's pools, of the layer that is served."""
        if name not in OPS:  # for an op of a commit strategy only `pool` is known, which it writes
            yield from self._pools.clauses("pool", given["pool"], None) if _is_pool(given) else ()
            return
        to = given.get("to")
        layer = to.layer if isinstance(to, Place) else None
        folds, between = "inputs" in given and not len(given["inputs"].q), _between(given)
        for name, view in _memory(given):
            if not (folds and name in ("store", "store" + SCALES) and self._pools.of(view) is None) and not (
                view.data_ptr() in between and self._pools.of(view) is None):
                yield from self._pools.clauses(name, view, layer)
            right = self._declared.get("state") if "inputs" in given else None
            right, beside = (right.dtype, torch.float32) if isinstance(right, Blocked) else (right, right)
            due = beside if name.endswith(SCALES) else right
            if due is not None and not name.startswith("ring") and view.dtype != due:
                yield f"units of {name} are {view.dtype}, {due} is declared"

    def _dtypes(self, given: dict[str, Any], result: Any) -> Iterator[str]:
        """Clauses about dtypes: results are stored as the op set declares."""
        to = given.get("to")
        pairs = [(to, result)] if isinstance(to, Place) else zip(to, result, strict=True) if to else ()
        for place, tensor in pairs:
            right = self._declared.get(place.component)
            if right is not None and isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.dtype != right:
                yield f"{place.component} came back as {tensor.dtype}, {right} is declared"

    def _clear(self) -> None:
        self._calls = self._tensors = self._captured = 0
        self._judged: list[_Judged] = []
        self._indices = HostIndexCache()
        self._by: dict[str, str] = {}
        self._wrote: list[tuple[str, Place | None]] = []
        self._last = None
        self._failed_op = None


def _judged(name: str, place: Place | None, told: dict[str, Any], ours: bool) -> _Judged:
    """Judge a call. told: its arguments, with indices on the host."""
    known, broken = name in OPS, _broken(name, place, before(name, told))
    return _Judged(name, place, broken, [*_served(name, told)] if known else [],
                   [*_lengths(name, told)] if known and not ours else [])  # fmt: skip


def _broken(name: str, place: Place | None, clauses: Iterator[str]) -> list[Broken]:
    found = []
    try:
        for clause in clauses:  # one by one, to keep those that come before an error
            found.append(Broken(name, place, clause))
    except (RuntimeError, IndexError, ValueError, TypeError) as error:  # arguments so wrong that a rule raised
        found.append(Broken(name, place, f"was called in a way that cannot be judged ({error})"))
    return found


def _is_pool(given: Mapping[str, Any]) -> bool:
    return isinstance(given.get("pool"), torch.Tensor)


def _memory(given: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The memory that a call reads or writes, by its name in the contract."""
    for part in (*given.get("windows", ()), *given.get("parts", ())):
        assert isinstance(part, Part)
        for name in ("read", "store", "per_row", "settled"):
            if (address := getattr(part, name)) is not None:
                yield from _beside(name, address.pool, address.scales)
        if part.ring is not None:
            for name, pool in part.ring.kept._asdict().items():
                yield f"ring {name}", pool
    if isinstance(given.get("pages"), Pages):
        pages = given["pages"]
        yield from _beside("keys", pages.keys, pages.key_scales)
        yield from _beside("values", pages.values, pages.value_scales)
    if "pool" in given:
        yield from _beside("pool", given["pool"], given.get("scales"))
    for name in ("source", "target") if isinstance(given.get("source"), Address) else ():
        yield from _beside(name, given[name].pool, given[name].scales)
    for name in ("length", "settled"):
        if isinstance(given.get(name), torch.Tensor):
            yield name, given[name]


def _beside(name: str, pool: torch.Tensor, scales: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
    """A pool, and the scales of its tiles if it has any."""
    yield name, pool
    if scales is not None:
        yield name + SCALES, scales


def _between(given: dict[str, Any]) -> set[int]:
    """Addresses of memory that a part of the call stores and a later one reads: prefixes inside chunks."""
    stored, found = set[int](), set[int]()
    for part in (*given.get("windows", ()), *given.get("parts", ())):
        if part.form == "chunk":
            found |= {x.data_ptr() for x in _pool_of(part.read) if x.data_ptr() in stored}
            stored |= {x.data_ptr() for x in _pool_of(part.store)}
    return found


def _pool_of(address: Address | None) -> list[torch.Tensor]:
    """The memory of an address, and that of its scales."""
    return [] if address is None else [x for x in (address.pool, address.scales) if x is not None]


def _served(name: str, given: dict[str, Any]) -> Iterator[Served]:
    """The rows that a call with memory serves, and their form."""
    to = given.get("to")
    if not isinstance(to, Place):
        return
    yield from _of_parts(name, to, given.get("parts", ()))
    pages = given.get("pages")
    if isinstance(pages, Pages):
        extents = (x.tolist() for x in (pages.slots, pages.begin, pages.count, pages.before))
        for slot, begin, count, before in zip(*extents, strict=True):
            if count and slot >= 0:
                held = tuple(page for page in pages.table[slot].tolist() if page >= 0)
                sets = [] if pages.ancestors is None else pages.ancestors[begin : begin + count].tolist()
                yield Served(name, to, "pages", held, begin, count, *seen(before, sets if any(sets) else ()))


def _of_parts(name: str, to: Place, parts: Sequence[Part]) -> list[Served]:
    """The rows of parts. A part that reads what an earlier one of the call has stored, and has the rows after it,
    continues its chunk: a prefix was kept between the two."""
    found, ends = list[Served](), dict[tuple[int, int], int]()  # memory and unit -> the chunk that was stored there
    for part in parts:
        lists = part.read.units.tolist(), part.begin.tolist(), part.count.tolist()
        parents = None if part.parents is None else part.parents.tolist()
        stored = [] if part.store is None or len(parts) < 2 else part.store.units.tolist()
        for number, (unit, begin, count) in enumerate(zip(*lists, strict=True)):
            if not count:
                continue
            at = ends.get((part.read.pool.data_ptr(), unit), -1)
            if at >= 0 and part.form == found[at].form == "chunk" and begin == found[at].begin + found[at].count:
                found[at] = replace(found[at], count=found[at].count + count)
            else:
                mine = range(-1, count - 1) if parents is None else parents[begin : begin + count]
                found.append(Served(name, to, part.form, (unit,), begin, count, 0, linked(mine)))
                at = len(found) - 1
            if stored and part.store is not None:
                ends[part.store.pool.data_ptr(), stored[number]] = at
    return found


def linked(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`Served.branches` of rows with separate memory."""
    return () if list(parents) == list(range(-1, len(parents) - 1)) else tuple((parent,) for parent in parents)


def seen(before: int, sets: Sequence[int]) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """`Served.before` and `Served.branches` of rows of attention.

    before: the position of node 0. sets: the nodes that each row sees, as bits. The positions that the first row sees
    without a gap, except itself, are before the rows. Example: with before 8 and sets 0b1 and 0b101, the rows follow 8
    positions; the first sees position 8, the second positions 8 and 10.
    """
    if not sets:
        return before, ()
    if len(sets) > 1 and len({*sets}) == 1:  # the rows of a block, which see each other
        seen_by_all = tuple(before + node for node in range(sets[0].bit_length()) if sets[0] >> node & 1)
        return before, (seen_by_all,) * len(sets)
    rows = [[before + node for node in range(bits.bit_length()) if bits >> node & 1] for bits in sets]
    first = next(at for at in range(before, before + 65) if at not in rows[0][:-1])
    branches = tuple(tuple(at for at in row if at >= first) for row in rows)
    chain = all(row == tuple(range(first, first + number + 1)) for number, row in enumerate(branches))
    return first, () if chain else branches


def _lengths(name: str, given: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """The forms of an op that a call serves, and the rows of each sequence; all rows are one without sequences."""
    for part in given.get("parts", ()):
        yield f"{name.removeprefix('fused_')}.{part.form}", [count for count in part.count.tolist() if count]
    if isinstance(given.get("pages"), Pages):
        yield name, [count for count in given["pages"].count.tolist() if count]
    elif "parts" not in given:
        yield name, [next((len(x) for value in given.values() for x in tensors_of(value) if x.dim()), 0)]


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


Given = dict[str, Any]
Key = tuple[object, ...]  # the address of an index, and how it is read there


class HostIndexCache:
    """Index tensors of one event on the host; an index shared by many op calls is copied once.

    A copy from the device waits, and with several processes on the device it waits for its turn: at every call that
    would take longer than the event. So later calls are judged by the cached values. The tensors that they really got
    are kept on the device, and compared once after the event (`changed`). Calls are known by a number.
    """

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

    def changed(self) -> Mapping[int, Given]:
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
