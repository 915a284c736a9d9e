"""T1: memory that is moved or not written keeps its bits: pools, red zones, conv windows, KV entries, idle requests.

Moved rows are taken from the subject's own recorded activations; the trace determines their rows, slots and positions.
Leaves out: computed values (T2).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from instep_reference.contract.answers import BLOCKS
from instep_reference.contract.declared_rounding import PREFIXES, Storage, kept_in, read_as
from instep_reference.contract.engine import Commit, Forward, RequestState, SetNumSteps
from instep_reference.contract.event_facts import facts, moves, restores, tracks
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, draft_stage

from ..finding_problem import Explained, Moved, Problem, WrongContent
from ..oracle.oracle import Oracle
from ..oracle.storage_rounding import entries, kept_states, narrower
from ..verdict import Comparison, Sides, Skipped, Tier
from ..watch.event_context import EventContext, KeptCopy, LastForward, RowSpan, branching
from ..watch.facts_for_later_events import last_forward
from ..watch.memory_changes import Trespass, bits
from ..watch.pool_addresses import stands, unit_word
from ..watch.rows_by_request import row_spans, rows
from .check_interface import compared, counted, exact, verb
from .prefix_findings import (
    ALSO,
    FINAL,
    RUNNING,
    misread,
    misrounded,
    of_others,
    of_prefix,
    off_the_grid,
    older_rows,
    other_rows,
    others_kept,
    with_last,
)
from .transfer_findings import wrong_transfers
from .wrong_conv_windows import in_channels, inputs_of, remembered, shifted, wrong_windows

# (field of RequestState, stage whose rows feed it, component of those rows, component of the memory). The context of a
# block drafter is computed in the stage extend, whatever the layer.
CACHES = (
    ("keys", "trunk", "key", "keys"),
    ("values", "trunk", "value", "values"),
    ("draft_keys", "extend", "key", "keys"),
    ("draft_values", "extend", "value", "values"),
    ("block_keys", "context", "key", "keys"),
    ("block_values", "context", "value", "values"),
)


# Values that a round starts with: draft 1, the draft head's row after it, and the root.
PROPOSAL, PROPOSED = Place("extend", AFTER_LAYERS, "pick"), Place("extend", AFTER_LAYERS, "final")
ROOT = Place("trunk", AFTER_LAYERS, "root")
TAIL = Place("trunk", AFTER_LAYERS, "tail")


class Bytes:
    """No byte changes without permission, and every moved byte arrives."""

    name = "bytes"
    tier = Tier.BITWISE

    def __init__(self, oracle: Oracle | None = None) -> None:
        """oracle: knows the declared storage dtypes; None: memory is stored in the dtype of its rows."""
        self.oracle = oracle

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        yield from self._pools(context)
        busy: set[str] = set()
        forward = last_forward(context)
        if isinstance(context.event, Forward) and forward is not None:
            busy = set(forward.spans)
            for span in forward.spans.values():
                yield from self._ran(context, span, forward)
        elif isinstance(context.event, Commit):
            busy = set(context.event.requests)
            for span in row_spans(context, "extend"):
                if forward is not None and span.request in forward.spans:
                    yield from self._taken_in(context, span, forward, list(span.nodes))
        elif name := restores(context.event):
            busy = {name}
            yield from self._came_back(context, name)
        elif name := moves(context.event):
            yield from self._moved_whole(context, name)
        yield from self._tracked(context)
        for name in context.subject.before.keys() & context.subject.after.keys() - busy - context.expected.flying:
            if context.shown.memory(name):
                for result in self._unchanged(context, name, context.subject.before[name]):
                    yield result if not isinstance(context.event, SetNumSteps) else _read_by_the_new_count(result)

    def _pools(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        changes = context.changes
        if not context.shown.has("regions"):
            return
        if not changes.bytes:
            yield Skipped(self.name, context.index, "no pool bytes were watched: this engine does not show its memory")
            return
        for trespass in changes.trespasses:
            yield self._trespass(context, trespass)
        if not changes.trespasses:
            yield compared(self, context, Place("trunk", STAGE_LEVEL, "state"), changes.bytes, 0, blocks=changes.units)

    def _trespass(self, context: EventContext, trespass: Trespass) -> Comparison:
        region, unit = trespass.region, trespass.unit
        place, request, slot = stands(
                region, unit, context.expected.slots_after, context.expected.request_rows_after
            )
        where = "the red zone next to " if trespass.gap else ""
        problem = Problem("forbidden_write", f"{counted(trespass.bytes, 'byte')} changed in {where}{region.name} "
                          f"{unit_word(region)} {unit}, which this event may not write{_as_if(trespass)}")  # fmt: skip
        return compared(self, context, place, trespass.bytes, trespass.bytes, problem, request=request, slot=slot,
                        rank=region.rank)  # fmt: skip

    def _ran(self, context: EventContext, span: RowSpan, forward: LastForward) -> Iterator[Comparison | Skipped]:
        if span.kind == "verify":
            yield from self._in_flight(context, span, forward.subject.before[span.request])
        else:
            yield from self._taken_in(context, span, forward, list(range(span.count)))

    def _in_flight(self, context: EventContext, span: RowSpan, before: RequestState) -> Iterator[Comparison]:
        """A verified window before its commit: only conv windows and states may have changed up to the length."""
        after = context.subject.after[span.request]
        found = dict(after.parts())
        for place, kept in before.parts() if context.shown.memory(span.request) else ():
            if place.component not in BLOCKS:
                yield self._same(context, place, span.request, found.get(place), kept)

    def _taken_in(
        self, context: EventContext, span: RowSpan, forward: LastForward, nodes: list[int]
    ) -> Iterator[Comparison | Skipped]:
        """The memory is that of before, followed by exactly the rows at `nodes` of the forward."""
        side, ran = forward.subject, forward.spans[span.request]
        before, after = side.before[span.request], context.subject.after[span.request]
        for place, window in remembered(before):
            found = dict(after.parts()).get(place)
            if not window.numel() and found is not None and found.shape == window.shape:
                yield Skipped(self.name, context.index, "a conv of width 1 keeps no inputs: no window is compared")
                continue
            fed = inputs_of(forward, place, span.request)
            if fed is not None and len(fed) > max(nodes):
                start = window if span.start else torch.zeros_like(window)
                yield self._window(context, span, place, start, fed, nodes, forward)
        extend = next((other for other in row_spans(context, "extend") if other.request == span.request), None)
        for field, stage, source, component in CACHES:
            for layer, cache in getattr(before, field).items():
                place = Place(_stage(stage, layer), layer, source)
                drafted = None if extend is None else rows(context.subject, place, extend)
                row = drafted if stage != "trunk" else _picked(rows(side, place, ran), nodes)
                if row is not None:
                    fits = row.shape[1:] == cache.shape[1:]  # if not, the found tensor has neither shape
                    entered = self._entries(source, row.to(cache.dtype))
                    right = torch.cat((cache[: span.start], entered)) if fits else row
                    found = getattr(after, field).get(layer)
                    same = self._same(context, place._replace(component=component), span.request, found, right)
                    yield self._as_declared(same, found, row.dtype)
        final = _picked(rows(side, FINAL, ran), nodes)
        if final is not None and after.tail:
            line = torch.cat((*before.tail.values(), final))
            yield self._line(context, span.request, line, len(after.draft_keys) - 1, after.tail.get(TAIL.layer))
        if extend is not None:
            yield from self._proposed(context, extend, after)

    def _proposed(self, context: EventContext, extend: RowSpan, after: RequestState) -> Iterator[Comparison]:
        """Draft 1 of the next round and the draft head's row after it are those that the draft extend returned."""
        y, pick = (rows(context.subject, place, extend) for place in (PROPOSED, PROPOSAL))
        if extend.logit_rows and context.expected.roots_after[extend.request] is not None:
            if y is not None and len(y) == extend.count:
                yield self._same(context, PROPOSED, extend.request, after.proposal_hidden, y[-1])
            if pick is not None and len(pick) == 1:
                yield exact(self, context, PROPOSAL, after.proposal, int(pick[0]), "draft 1 is {}", extend.request)

    def _tracked(self, context: EventContext) -> Iterator[Comparison]:
        """Memory that is moved into a prefix. If the prefix ends inside a path, T2d judges its state."""
        forward, due = last_forward(context), context.expected.prefixes
        for under, name in tracks(context.event).items():
            prefix, after = context.subject.tracked.get(under), context.subject.after[name]
            if under not in due or prefix is None or forward is None or prefix.length != due[under]:
                continue  # T0 reports it
            span, begin = forward.spans[name], forward.subject.before[name].length
            nodes = [row.nodes for row in row_spans(context, "extend") if row.request == name]
            taken = list(nodes[0] if span.kind == "verify" else range(span.count))[: prefix.length - begin]
            for result in self._moved(context, span, prefix, after, forward, taken):
                yield of_prefix(under, result)

    def _moved(
        self, context: EventContext, span: RowSpan, prefix: RequestState, after: RequestState, forward: LastForward,
        taken: list[int],
    ) -> Iterator[Comparison]:
        found = dict(prefix.parts())
        for place, right in after.parts():
            if place.component == "tail":
                continue
            if place.component in ("keys", "values"):
                later = place.stage != "trunk" and not after.block_keys  # MTP layers read tokens after the row
                right = right[: max(0, prefix.length - later * (1 + place.layer))]
            elif prefix.length != after.length:
                if place.component == "state" and place in found:
                    yield from self._on_the_grid(context, span, place, found[place])
                continue
            elif place.component == "state" and self._narrow:
                yield self._rounded(context, span, place, found.get(place), right, forward)
                continue
            if right.numel() or (place in found and found[place].numel()):
                others = partial(self._in_its_place, context, span.request, place, right)
                result = self._same(context, place, span.request, found.get(place), right, others)
                yield with_last(result, found.get(place), len(right))
        for place, window in remembered(forward.subject.before[span.request]) if prefix.length != after.length else ():
            fed = inputs_of(forward, place, span.request)
            if fed is not None and len(fed) > max(taken) and window.numel():
                yield self._window(context, span, place, window, fed, taken, forward, prefix)
        final = rows(forward.subject, FINAL, span)
        if final is not None and len(final) > taken[-1]:
            others = partial(other_rows, final, forward, span.request)
            yield self._same(context, FINAL, span.request, prefix.final, final[taken[-1]], others)
            tail = torch.cat((*forward.subject.before[span.request].tail.values(), final[taken[:-1]]))
            if len(after.draft_keys) > 1 and len(tail):
                yield self._line(context, span.request, tail, len(after.draft_keys) - 1, prefix.tail.get(TAIL.layer))

    @property
    def _narrow(self) -> Mapping[str, Storage]:
        """The declared roundings of the states in tracked prefixes."""
        rounds = {} if self.oracle is None else self.oracle.rounds
        return {name: rounds[name] for name in PREFIXES if name in rounds}

    def _in_its_place(
        self, context: EventContext, request: str, place: Place, right: torch.Tensor
    ) -> Iterator[tuple[WrongContent, torch.Tensor]]:
        """Wrong contents of memory that a prefix copies."""
        yield from of_others(context, request, place, len(right))
        if self._narrow and right.dim() > 1 and right.numel():
            yield ALSO.known(), kept_states(right, self._narrow, forward=isinstance(context.event, Forward)).to(right)

    def _rounded(
        self, context: EventContext, span: RowSpan, place: Place, found: torch.Tensor | None, state: torch.Tensor,
        forward: LastForward,
    ) -> Comparison:
        """The state of a prefix that ends where its request is: the request's own, rounded once as declared."""
        made = isinstance(context.event, Forward)
        before = forward.subject.before[span.request].state.get(place.layer)

        def wrongs() -> Iterator[tuple[WrongContent, torch.Tensor]]:
            kept = self._other_states(context, "", place)
            yield from misrounded(state, before, self._narrow, forward=made, kept=kept)
            for known, its in of_others(context, span.request, place, len(state)):
                yield known, kept_states(its, self._narrow, forward=made)

        right = kept_states(state, self._narrow, forward=made)
        return self._same(context, place, span.request, found, right, wrongs)

    def _other_states(self, context: EventContext, but: str, place: Place) -> dict[str, torch.Tensor]:
        """The states of a layer in the other prefixes, by their names."""
        return {name: kept.state.state[place.layer] for name, kept in context.earlier.saved.items()
                if name != but and kept.state.final is not None and place.layer in kept.state.state}

    def _on_the_grid(
        self, context: EventContext, span: RowSpan, place: Place, found: torch.Tensor
    ) -> Iterator[Comparison]:
        """A prefix inside a path or a chunk has numbers of the declared storage. T2 judges the numbers."""
        storages, problem = kept_in(self._narrow, forward=isinstance(context.event, Forward)), None
        if not storages:
            return
        mistake = off_the_grid(found, storages[-1])
        if mistake is not None:
            clause = "its numbers are not numbers of the declared storage"
            problem = Problem("identified", clause, Explained.one_of([mistake.known()]))
        yield compared(self, context, place, found.numel(), int(mistake is not None), problem, request=span.request)

    def _line(
        self, context: EventContext, request: str, line: torch.Tensor, most: int, found: torch.Tensor | None
    ) -> Comparison:
        """The target's rows of the last `most` tokens of line [n, D]; rows of older tokens are recognised."""
        return self._same(context, TAIL, request, found, line[-most:], partial(older_rows, line, most))

    def _window(
        self, context: EventContext, span: RowSpan, place: Place, before: torch.Tensor, fed: torch.Tensor,
        nodes: list[int], forward: LastForward, prefix: RequestState | None = None,
    ) -> Comparison:
        """A window [C, inputs] after the rows `nodes` of fed [n, C]; a wrong count of rows is recognised."""
        fits = fed.dim() == before.dim() and fed.shape[1] == before.shape[0]
        right = shifted(before, fed[nodes]) if fits else fed[nodes]
        found = dict((prefix or context.subject.after[span.request]).parts()).get(place)
        found = None if found is None else in_channels(found)

        def wrongs() -> Iterable[tuple[WrongContent, torch.Tensor]]:
            verb = "tracked" if prefix is not None else "accepted" if span.kind == "commit" else "given"
            others = tuple(_others(forward, span.request, place))
            tree = branching(forward.parents.get(span.request, ())) if span.kind == "commit" else None
            return wrong_windows(before, fed, nodes, verb, others, tree) if fits else ()

        result = self._same(context, place, span.request, found, right, wrongs)
        return self._as_declared(result, found, fed.dtype)

    def _entries(self, source: str, row: torch.Tensor) -> torch.Tensor:
        """Rows as the memory stores them: rounded if it is stored in tiles, unchanged otherwise."""
        return row if self.oracle is None else entries(source, row, self.oracle.rounds)

    def _as_declared(self, result: Comparison, found: torch.Tensor | None, rows: torch.dtype) -> Comparison:
        """Fail a comparison if the memory has a dtype narrower than declared; rows are cast to that dtype."""
        declared = rows if self.oracle is None else read_as(self.oracle.rounds.get(result.place.component, rows))
        if found is None or not narrower(found.dtype, declared):
            return result
        problem = replace(result.problem or Problem("missing"), dtypes=(str(found.dtype), str(declared)))
        return replace(result, worst=max(result.worst, 1.0), problem=problem)

    def _came_back(self, context: EventContext, name: str) -> Iterator[Comparison]:
        """Memory that was preempted or saved comes back bit by bit."""
        kept = kept_of(context)
        if kept is not None and name not in context.shown.rebuilt and context.shown.memory(name):
            for result in self._unchanged(context, name, self._extended(context, kept.state)):
                yield came_back(context, result)

    def _moved_whole(self, context: EventContext, name: str) -> Iterator[Comparison]:
        """A prefix keeps its bits on the way to the host and back."""
        kept, found = context.earlier.saved.get(name), context.subject.tracked.get(name)
        if name not in context.expected.prefixes or kept is None:
            return
        right, mine = ({**dict(state.parts()), FINAL: state.final} if state else {} for state in (kept.state, found))
        for place, due in right.items():
            if due is not None and due.numel():
                others = partial(self._of_other_moves, context, name, place, due, kept.state.length)
                result = replace(self._same(context, place, "", mine.get(place), due, others), request=None, slot=None)
                if result.problem is not None:
                    moved: Moved = "to host" if facts(context.event).copy == "to host" else "back"
                    result = replace(result, problem=replace(result.problem, moved=moved))
                yield of_prefix(name, result)

    def _of_other_moves(
        self, context: EventContext, name: str, place: Place, due: torch.Tensor, count: int
    ) -> Iterator[tuple[WrongContent, torch.Tensor]]:
        """Wrong contents of a part of a prefix that moves."""
        kept = context.earlier.saved[name]
        yield from (others_kept(context, name, place, due, count) if kept.sent is None
                    else wrong_transfers(context, name, kept, place, due))
        if place.component == "state":
            yield from misread(due, self._narrow, self._other_states(context, name, place))

    def _extended(self, context: EventContext, kept: RequestState) -> RequestState:
        """A copy after its load. For a prefix, the draft head computes the last rows at this event."""
        if self._narrow and self.oracle is not None and kept.final is not None:  # read once, in the dtype of the pool
            pool = read_as(self.oracle.rounds.get("state", torch.float32))
            kept = replace(kept, state={layer: state.to(pool) for layer, state in kept.state.items()})
        spans = row_spans(context, "extend") if kept.final is not None else []
        if not spans:
            return kept
        grown: dict[str, dict[int, torch.Tensor]] = {}
        for field, stage, source, _ in CACHES:
            for layer, cache in getattr(kept, field).items() if stage == "extend" else ():
                row = rows(context.subject, Place(_stage(stage, layer), layer, source), spans[0])
                entered = cache[:0] if row is None else self._entries(source, row.to(cache.dtype))
                grown.setdefault(field, {})[layer] = torch.cat((cache[: spans[0].start], entered))
        final = torch.cat((*kept.tail.values(), kept.final[None]))  # type: ignore[index]
        layers = len(kept.draft_keys)
        tail = {TAIL.layer: final[1 - layers :]} if layers > 1 else {}
        return replace(kept, draft_keys=grown.get("draft_keys", {}), draft_values=grown.get("draft_values", {}),
                       tail=tail)

    def _unchanged(self, context: EventContext, name: str, before: RequestState) -> Iterator[Comparison]:
        after = context.subject.after.get(name)
        found = {} if after is None else dict(after.parts())
        for place, right in before.parts():
            if right.numel():
                wrongs = partial(self._misread, context, place, right)
                yield self._same(context, place, name, found.get(place), right, wrongs)
        if before.proposal_hidden is not None:
            proposed = None if after is None else after.proposal_hidden
            yield self._same(context, PROPOSED, name, proposed, before.proposal_hidden)
        if after is not None and context.shown.whole:
            yield exact(self, context, PROPOSAL, after.proposal, before.proposal, "draft 1 is {}", name)
            yield exact(self, context, ROOT, after.root, before.root, "root is {}", name)

    def _misread(
        self, context: EventContext, place: Place, right: torch.Tensor
    ) -> Iterator[tuple[WrongContent, torch.Tensor]]:
        """Wrong contents of memory that no row has changed: of a transfer, or of states, if prefixes round theirs."""
        moved = kept_of(context)
        if moved is not None and moved.sent is not None:
            yield from wrong_transfers(context, getattr(context.event, "name", ""), moved, place, right)
        if self._narrow and place.component == "state":
            yield RUNNING.known(), kept_states(right, self._narrow, forward=False).to(right)
            yield RUNNING.known(), kept_states(right, self._narrow, forward=True).to(right)
            kept = kept_of(context)
            if kept is not None and kept.state.final is not None:
                others = self._other_states(context, getattr(context.event, "name", ""), place)
                yield from misread(right, self._narrow, others)

    def _same(
        self, context: EventContext, place: Place, request: str, found: torch.Tensor | None, right: torch.Tensor,
        wrongs: Callable[[], Iterable[tuple[WrongContent, torch.Tensor]]] = tuple,
    ) -> Comparison:
        elements, wrong, sides, problem = right.numel(), 0, None, None
        if found is None or found.shape != right.shape:
            has = "nothing" if found is None else tuple(found.shape)
            wrong, problem = 1, Problem("missing", f"has {has}; expected {tuple(right.shape)}")
        elif found.dtype != right.dtype:
            wrong, problem = 1, Problem("missing", f"is {found.dtype}; expected {right.dtype}")
        elif not torch.equal(bits(found), bits(right)):
            off = bits(found) != bits(right)
            wrong = int(off.sum()) * right.element_size()
            first = tuple(off.nonzero()[0].tolist())
            total = elements * right.element_size()
            off_by = f"{wrong} of {total} bytes {verb(wrong, 'differs', 'differ')}"
            problem = Problem("differs", f"{off_by}, the first at {first}")
            sides = Sides(found, right, wrongs)
        return compared(self, context, place, elements, wrong, problem, request=request, sides=sides)


def _read_by_the_new_count(result: Comparison) -> Comparison:
    """The comparison at a change of the step count, which writes no memory. Only its interpretation can change."""
    if result.problem is None or result.problem.code != "differs":
        return result
    clause = f"changed with the step count, as if a mark or a cursor was not carried over: {result.problem.clause}"
    return replace(result, problem=replace(result.problem, clause=clause))


def kept_of(context: EventContext) -> KeptCopy | None:
    """The copy that the event must bring back."""
    name, request = getattr(context.event, "name", ""), restores(context.event)
    return (context.earlier.saved.get(name) if name else context.earlier.preempted.get(request)) if request else None


def came_back(context: EventContext, result: Comparison) -> Comparison:
    """The comparison as one of memory that a load or a resume brought back."""
    if result.problem is None:
        return result
    draft = draft_alone(context, result.place)
    return replace(result, problem=replace(result.problem, moved="back", draft=draft))


def draft_alone(context: EventContext, place: Place) -> str:
    """A clause for a load or resume that brought back the target's memory but not all of the draft head's KV.

    The draft head's memory has its own valid range. Empty in all other cases.
    """
    kept, after = kept_of(context), context.subject.after.get(restores(context.event))
    if kept is None or after is None or place.stage == "trunk" or place.component not in ("keys", "values"):
        return ""
    if kept.state.final is not None:  # a prefix, whose last row of the draft head is computed at this event
        return ""
    found, right = (dict(state.parts()) for state in (after, kept.state))
    if not all(one.stage != "trunk" or torch.equal(bits(found[one]), bits(its)) for one, its in right.items()
               if one in found):  # fmt: skip
        return ""
    mine, due = found.get(place), right[place]
    valid = 0
    if mine is not None and mine.shape == due.shape and len(due):
        valid = int((bits(mine) == bits(due)).flatten(1).all(1).cumprod(0).sum())
    far = f"is valid only for its first {valid} of {len(due)} positions" if valid else "did not"
    return f"the target's memory came back, the draft KV {far}: "


def _as_if(trespass: Trespass) -> str:
    if not trespass.strides:
        return ""
    by, pitch = unit_word(trespass.region), trespass.region.units.stride(0)
    strides = " or ".join(map(str, trespass.strides))
    return f": as if {by}s were {strides} elements apart; they are {pitch} apart"


def _stage(family: str, layer: int) -> str:
    return draft_stage(layer) if family == "extend" else "extend" if family == "context" else family


def _others(forward: LastForward, request: str, place: Place) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The other requests of a forward: name, window before it, and inputs that the op read."""
    for name in forward.spans:
        before, fed = forward.subject.before[name], inputs_of(forward, place, name)
        window = dict(remembered(before)).get(place)
        if name != request and window is not None and fed is not None:
            yield name, window if before.length else torch.zeros_like(window), fed


def _picked(rows: torch.Tensor | None, nodes: list[int]) -> torch.Tensor | None:
    return None if rows is None or len(rows) <= max(nodes) else rows[nodes]
