"""Modify instep's engine as no event can ask for: windows of one token, eager graphs, ops that run row by row.

Numbers are rounded from outside, and requests move to another engine, too. This is the only place where a relation
reaches into an engine.

The bits of a matrix product, for example, depend on the number of rows. Two runs that bring the same tokens in
different windows or batches then differ everywhere, which hides errors in the memory ops and their calls. Row by row,
equal rows give equal bits, so the two runs must be equal bit by bit.
Leaves out: external engines, the op set's own promise (`Ops.row_invariant`), and whether the ops are right, which the
tolerance of the unwrapped run decides.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch

from instep_optimized import OptimizedEngine
from instep_optimized.graphs.capture_all_at_start import prepared
from instep_optimized.graphs.capture_and_replay import Break
from instep_optimized.graphs.prompt_segments import PromptGraphs
from instep_optimized.memory.tiled_units import Copied, tensors
from instep_optimized.memory_addresses import Pages
from instep_optimized.ops.fused import wholes
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.rowwise_op_names import BY_ROW
from instep_optimized.ops.watch_op_calls import Op
from instep_optimized.round_for_step_count import Body, Round
from instep_reference.contract.declared_rounding import Storage
from instep_reference.contract.engine import Committed, Drafted, Forwarded, Path, Row
from instep_reference.contract.place_names import See

from ...adapters import Subject
from ...oracle.reordered_arithmetic import in_two_parts
from ...oracle.storage_rounding import kept_states
from ...subject.engines.ranked import RankedEngine

T = TypeVar("T")


class _RootAlone(Round):
    """A round without drafts that still has a window: the root alone."""

    @property
    def bodies(self) -> dict[str, Body]:
        window = {"verify": Body(self.verify, width=1, choices=0), "commit": Body(self.commit, width=1, choices=2)}
        return super().bodies | window


def windows_of_one(engine: Subject) -> Subject:
    """Modify an engine so that every decode row is a window of one token; of several ranks, each of them."""
    if isinstance(engine, RankedEngine):
        engine.engines = tuple(WindowsOfOne(one) for one in engine.engines)
        return engine
    return cast(Subject, WindowsOfOne(engine))


class WindowsOfOne:
    """An engine in which every decode row is a window of one token, verified and then committed."""

    def __init__(self, engine: Subject) -> None:
        assert isinstance(engine, OptimizedEngine), "asked before"
        self._engine = engine
        # The engine refuses a window of one token, because no event asks for it.
        engine._refusals = cast(Any, _NothingRefused())
        at = engine._rounds[0]
        engine._rounds[0] = _RootAlone(0, at.strategy, at.model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        """Serve decode rows as windows. The rewritten events never mix them with other rows or with drafts."""
        if not all(row.kind == "decode" for row in rows):
            return self._engine.forward(rows)
        self._engine.set_num_steps(0)
        names = tuple(row.request for row in rows)
        said = self._engine.forward(tuple(Row(name, "verify") for name in names))
        roots = {row.request: int(said.own[row.request][0]) if row.root is None else row.root for row in rows}
        self._engine.commit(names, tuple(Path((), roots[name]) for name in names))
        return Forwarded(roots, said.own)


def rounded_from_outside(engine: Subject, rounds: Mapping[str, Storage]) -> Subject:
    """Modify an engine so that its kept states are rounded as declared; of several ranks, each of them."""
    if isinstance(engine, RankedEngine):
        engine.engines = tuple(RoundedFromOutside(one, rounds) for one in engine.engines)
        return engine
    return cast(Subject, RoundedFromOutside(engine, rounds))


class RoundedFromOutside:
    """An engine with plain prefixes, whose states are replaced by the numbers that a declared rounding leaves."""

    def __init__(self, engine: Subject, rounds: Mapping[str, Storage]) -> None:
        assert isinstance(engine, OptimizedEngine), "asked before"
        self._engine, self._declared = engine, rounds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        said = self._engine.forward(rows)
        self._round([under for row in rows for under in (*row.inner, row.track) if under], forward=True)
        return said

    def commit(
        self, requests: tuple[str, ...], accepted: tuple[Path, ...] | None = None, track: tuple[str, ...] = ()
    ) -> Committed:
        said = self._engine.commit(requests, accepted, track)
        under = dict(zip(requests, track, strict=False))
        self._round([under[name] for name in said.tracked], forward=False)
        return said

    def _round(self, names: Iterable[str], *, forward: bool) -> None:
        for name in names:
            request, kept = self._engine._saved[name]
            plain = {layer: tensors(state)[0] for layer, state in kept["state"].items()}
            state: dict[int, Copied] = {
                layer: kept_states(x, self._declared, forward=forward).to(x) for layer, x in plain.items()}  # fmt: skip
            self._engine._saved[name] = request, kept.changed(state=state)


class RingRoundedFromOutside:
    """An engine with a wide ring, whose keys and updates are replaced by the sums of two parts after every forward.

    The sum of two parts has the same parts again, so entries of earlier forwards stay as they are.
    """

    def __init__(self, engine: Subject, dtype: torch.dtype) -> None:
        assert isinstance(engine, OptimizedEngine), "asked before"
        self._engine, self._dtype = engine, dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        said, memory = self._engine.forward(rows), self._engine._memory
        for name in ("ring_k", "ring_update"):
            for layer in memory.layers(name):
                pool = memory[name].units(layer)
                pool.copy_(in_two_parts(pool, self._dtype).where(pool.isfinite(), pool))
        return said


class _NothingRefused:
    """Accepts every event."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: None


def eager_graphs(engine: Subject, prompts: Sequence[int] | None = None) -> Subject:
    """Keep buckets and padding, but run the body again at every replay. prompts: buckets of packed rows."""
    if isinstance(engine, RankedEngine):
        engine.group.run([partial(eager_graphs, one, prompts) for one in engine.engines])
        return engine
    assert isinstance(engine, OptimizedEngine), "asked before"
    engine._graphs = prepared(engine._base, engine._rounds.values(), engine._device, eagerly)
    if prompts is not None:
        engine._prompt_graphs = PromptGraphs(eagerly, prompts, engine._base, engine._model, engine._device)
    return engine


@dataclass
class Again:
    """A substitute for a captured graph: runs the body again and copies the results into the captured outputs."""

    body: Callable[[], Any]
    outputs: Any

    def replay(self) -> None:
        new = self.body()
        for kept, one in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (self.outputs, new)), strict=True):
            kept.copy_(one)


def eagerly(ops: Ops, body: Callable[[Ops, Break], T]) -> tuple[Again, T]:
    """Replace graph capture: run the body once and return its outputs."""

    def at_once(eager: Callable[[torch.Tensor], None], like: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        eager(room)
        return room

    outputs = body(ops, lambda eager, like: torch.zeros(like.shape, dtype=like.dtype, device=like.device))
    return Again(lambda: body(ops, at_once), outputs), outputs


class MovingEngine:
    """Two engines with a wire between them as one engine: everything moves to the other one after each round.

    Requests move if none is within a round and none is preempted. Prefixes and saved states move with them.
    """

    def __init__(self, here: Subject, there: Subject) -> None:
        self._here: Any = here
        self._there: Any = there
        self._prompts: dict[str, tuple[Any, ...]] = {}
        self._within, self._preempted, self._named, self._aside = set[str](), set[str](), set[str](), set[str]()
        self.moves = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here, name)

    def watch(self, see: See) -> None:
        self._here.watch(see)
        self._there.watch(see)

    def admit(self, request: str, prompt: tuple[int, ...], *more: Any) -> None:
        self._here.admit(request, prompt, *more)
        self._prompts[request] = (prompt, *more)

    def draft(self, requests: tuple[str, ...], *more: Any) -> Drafted:
        drafted: Drafted = self._here.draft(requests, *more)
        self._within |= {*requests}
        return drafted

    def forward(self, rows: tuple[Row, ...]) -> Forwarded:
        done: Forwarded = self._here.forward(rows)
        self._named |= {under for row in rows for under in (*row.inner, row.track) if under}
        self._move()
        return done

    def commit(self, requests: tuple[str, ...], accepted: Any = None, track: tuple[str, ...] = (),
               caps: tuple[int, ...] = ()) -> Committed:
        done: Committed = self._here.commit(requests, accepted, track, caps)
        self._within -= {*requests}
        self._named |= {under for name, under in zip(requests, track, strict=False) if name in done.tracked}
        self._move()
        return done

    def set_num_steps(self, num_steps: int) -> None:
        self._here.set_num_steps(num_steps)
        self._there.set_num_steps(num_steps)

    def save(self, request: str, name: str) -> None:
        self._here.save(request, name)
        self._named.add(name)

    def offload(self, name: str) -> None:
        self._here.offload(name)
        self._aside.add(name)

    def fetch(self, name: str) -> None:
        self._here.fetch(name)
        self._aside.discard(name)

    def evict(self, name: str) -> None:
        self._here.evict(name)
        self._named.discard(name)
        self._aside.discard(name)

    def preempt(self, request: str) -> None:
        self._here.preempt(request)
        self._preempted.add(request)

    def resume(self, request: str) -> None:
        self._here.resume(request)
        self._preempted.discard(request)

    def finish(self, request: str) -> None:
        self._here.finish(request)
        del self._prompts[request]

    def abort(self, request: str) -> None:
        self._here.abort(request)
        del self._prompts[request]
        self._within.discard(request)
        self._preempted.discard(request)

    def _move(self) -> None:
        """Move everything to the other engine, if it can move now."""
        if self._within or self._preempted or not self._prompts:
            return
        here, there = self._here, self._there
        for name in sorted(self._named, key=lambda name: name not in self._aside):  # there is room for them at first
            if name not in self._aside:
                here.offload(name)
            there.fetch(name)
            if name in self._aside:
                there.offload(name)
        for name, given in self._prompts.items():
            begun = here.state(name).length > 0
            if begun:
                here.save(name, MOVED)
                here.offload(MOVED)
            here.abort(name)
            there.admit(name, *given)
            if begun:
                there.fetch(MOVED)
                there.load(name, MOVED)
                there.evict(MOVED)
        self._here, self._there = there, here
        self.moves += 1


MOVED = "a request that moves"


def row_by_row(ops: Ops) -> Ops:
    """Call every op that does not declare invariant rows once per row."""
    apart: dict[str, Any] = {
        name: _attended(op) if name.startswith("attend") else _apart(op, rows)
        for name, rows in BY_ROW.items() if name not in ops.row_invariant and (op := getattr(ops, name)) is not None
    }
    apart |= dict.fromkeys(wholes(*apart))
    return replace(ops, **apart, captures=False, row_invariant=frozenset(BY_ROW))


def _apart(op: Op, rows: tuple[str, ...]) -> Op:
    def call(**given: Any) -> Any:
        count = len(given[rows[0]])
        if not count:
            return op(**given)
        # A clone is aligned, as a separate row would be.
        made = [op(**given | {name: given[name][row : row + 1].clone() for name in rows}) for row in range(count)]
        if isinstance(made[0], torch.Tensor):
            return torch.cat(made)
        return type(made[0])(*(torch.cat(parts) for parts in zip(*made, strict=True)))

    return call


def _attended(op: Op) -> Op:
    """Attend with one query row at a time, on the pages as they are; rows that belong to no request are zero."""

    def call(**given: Any) -> Any:
        query, pages = given["query"], given["pages"]
        out = torch.zeros_like(query) if (up := given.get("up")) is None else query.new_zeros(pages.expanded(query, up))
        for request, (begin, count) in enumerate(zip(pages.begin.tolist(), pages.count.tolist(), strict=True)):
            for row in range(count):
                at = slice(begin + row, begin + row + 1)
                out[at] = op(**given | {"query": query[at].clone(), "pages": _alone(pages, request, row)})
        return out

    return call


def _alone(pages: Pages, request: int, row: int) -> Pages:
    one, at = slice(request, request + 1), int(pages.begin[request]) + row
    bits = 0 if pages.ancestors is None else int(pages.ancestors[at])
    if bits:
        return _side_by_side(pages, request, bits)
    count = pages.count[one]
    return replace(
        pages, slots=pages.slots[one], begin=torch.zeros_like(count), count=torch.ones_like(count),
        before=pages.before[one] + row, most=1, ancestors=None, nodes=0,
    )


def _side_by_side(pages: Pages, request: int, bits: int) -> Pages:
    """Copy the entries that a tree node sees without gaps, so that the sum has the bits of a chain."""
    before, size, table = int(pages.before[request]), pages.keys.shape[1], pages.table
    seen = torch.tensor([*range(before), *(before + n for n in range(bits.bit_length()) if bits >> n & 1)])
    seen = seen.to(table.device)
    spots = table[pages.slots[request], seen // size], seen % size
    count = -(-len(seen) // size)
    keys, values, *scales = (
        None if x is None
        else torch.cat((x[spots], x.new_zeros(count * size - len(seen), *x.shape[2:]))).view(count, size, *x.shape[2:])
        for x in (pages.keys, pages.values, pages.key_scales, pages.value_scales)
    )
    assert keys is not None and values is not None, "of a pool there may be no scales"
    none = torch.zeros_like(pages.count[:1])
    return Pages(keys, values, torch.arange(count, device=table.device).to(table)[None], slots=none, begin=none,
                 count=none + 1, before=none + len(seen) - 1, most=1, key_scales=scales[0],
                 value_scales=scales[1])  # fmt: skip
