"""The write set of an event: the units of the pools that it needs and may write, known before it runs.

Pages are reserved for the largest number of positions that is possible. A request gives pages back all at once, or at a
commit those after its length (`Capacity.trim`).
Leaves out: running the event.
"""

from collections.abc import Mapping, Sequence

from instep_reference.contract import engine as e
from instep_reference.contract.errors import OutOfCapacity

from ..memory import Memory
from ..memory.slot_table import FEATURES, NAMES, NODES, PARENTS, TAIL
from ..request_record import Request
from .base import Action, RequestWrites, Table

Requests = Mapping[str, Request]
# Fields of a slot's line in the slot table that each action may write, whatever the strategy.
_LINE: dict[Action, tuple[str, ...]] = {
    "claim": ("length", "sampling", "table"),
    "prefill": ("length", "table", "window", "proposals", "proposed", TAIL),
    "verify": ("table", "picks", "final", FEATURES),
    "decode": ("length", "table", "window", "proposals", "proposed", TAIL),
    "draft": ("table", "window"),
    "commit": ("length", "window", "proposals", "proposed", TAIL),
    "release": (*NAMES, TAIL, FEATURES),
    "restore": ("length", "table", "window", "proposals", "proposed", TAIL),
}
# Further fields, if windows may be trees.
_OF_TREES: dict[Action, tuple[str, ...]] = {
    "draft": (PARENTS, "picks", "final"), "commit": ("final",), "release": (PARENTS,),
}
_OF_TRIMS: dict[Action, tuple[str, ...]] = {"commit": ("table",)}  # further fields, if a commit gives pages back
# Further fields, if the device alone knows the widths of windows.
_OF_WIDTHS: dict[Action, tuple[str, ...]] = {"draft": (NODES,), "release": (NODES,)}
Wants = list[tuple[str, int]]


def slot_table(room: e.Capacity) -> Table:
    """Fields of a slot's line in the slot table that each action may write."""
    further = (_OF_TREES if room.trees else {}, _OF_TRIMS if room.trim else {},
               _OF_WIDTHS if room.device_widths else {})  # fmt: skip
    return {action: dict.fromkeys((*names, *(name for more in further for name in more.get(action, ()))), "slot")
            for action, names in _LINE.items()}  # fmt: skip


def width_of(row: e.Row, request: Request) -> int:
    """Number of tokens of a row."""
    if row.kind == "verify":
        return 1 + request.drafts
    return row.tokens if row.kind == "prefill" else 1


def check_tokens(rows: Sequence[e.Row], requests: Requests, capacity: e.Capacity) -> None:
    """Refuse a forward that carries more tokens than there is room for."""
    tokens = sum(width_of(row, requests[row.request]) for row in rows)
    if tokens > capacity.max_tokens:
        raise OutOfCapacity(f"a forward of {tokens} tokens; there is room for {capacity.max_tokens}")


def forward_wants(rows: Sequence[e.Row], requests: Requests, *, exact: bool = False) -> Wants:
    """List (request, positions) for which a forward needs pages, from the largest possible or the exact lengths."""
    return [(row.request, _length(requests[row.request], exact) + width_of(row, requests[row.request])) for row in rows]


def draft_wants(drafts: Mapping[str, int], requests: Requests, *, exact: bool = False) -> Wants:
    """List (request, positions) for which a draft with these numbers of tokens needs pages."""
    return [(name, _length(requests[name], exact) + count) for name, count in drafts.items()]


def drafts_of(event: e.Draft, num_steps: int, room: e.Capacity) -> dict[str, int]:
    """Number of positions after its length that each request of a draft needs."""
    grown = 0 if event.picks is not None else room.grown(num_steps)
    trees = event.parents if event.parents and not room.device_widths else (
        [range(grown or num_steps)] * len(event.requests))
    return {name: room.drafted(num_steps, len(tree)) for name, tree in zip(event.requests, trees, strict=True)}


def _length(request: Request, exact: bool) -> int:
    return request.length.exact if exact else request.length.most


def _grown(memory: Memory, worst: Wants, exact: Wants) -> dict[str, list[int]]:
    """Return the page lists after an event. If the worst case finds no room, the exact lengths are used instead."""
    try:
        return memory.pages.grown(worst)
    except OutOfCapacity:
        return memory.pages.grown(exact)


def writes_of(
    event: e.Event, live: Requests, saved: Mapping[str, int], preempted: Mapping[str, int], num_steps: int,
    memory: Memory, room: e.Capacity, *, overlap: bool = False,
) -> list[RequestWrites]:
    """List the actions of `event` on each request, and the units that it may write.

    saved, preempted  the lengths of states that are kept aside, by name
    overlap           pages are reserved for the worst case; without overlap the event first waits for exact lengths
    """
    slots, rows, pages = memory.slots, memory.request_rows, memory.pages

    def of(
        action: Action, name: str, lists: Mapping[str, list[int]], count: int, row: int | None = None
    ) -> RequestWrites:
        written = frozenset(pages.covering(lists[name], live[name].length.exact, count))
        return RequestWrites(action, slots.of(name), -1 if row is None else row, written, request_row=rows.of(name))

    match event:
        case e.Admit():
            return [RequestWrites("claim", slots.first(), request_row=rows.first())]
        case e.Forward():
            # Without overlap the engine settles lengths first, so its "worst case" is the exact length already.
            worst, exact = (forward_wants(event.rows, live, exact=known) for known in (not overlap, True))
            lists = _grown(memory, worst, exact)
            return [
                of(row.kind, row.request, lists, width_of(row, live[row.request]), number)
                for number, row in enumerate(event.rows)
            ]
        case e.Draft():
            drafts = drafts_of(event, num_steps, room)
            worst, exact = (draft_wants(drafts, live, exact=known) for known in (not overlap, True))
            lists = _grown(memory, worst, exact)
            # Draft 1 is known from the last extend, and nothing follows the last draft: the others run. If a tree is
            # grown, its beams run, whatever window is given. A block drafter runs the root and every draft.
            beams = None if room.topk is None else room.drafted(num_steps, 0)
            return [of("draft", name, lists, (count if room.block else max(0, count - 1)) if beams is None else beams)
                    for name, count in drafts.items()]  # fmt: skip
        case e.Commit():
            lists = pages.owned()  # the verify has reserved pages for the whole window
            first = {name: -(-(live[name].length.exact + 1) // pages.size) for name in event.requests if room.trim}
            return [*(of("commit", name, lists, 1 + live[name].drafts, live[name].row) for name in event.requests),
                    *(RequestWrites("release", -1, owned=frozenset(lists[name][first[name] :])) for name in first)]
        case e.Finish() | e.Abort() | e.Preempt():
            owner = event.request
            if owner not in slots.owned():  # an abort of a preempted request: it owns nothing
                return []
            owned = frozenset(pages.of(owner))
            return [RequestWrites("release", slots.of(owner), owned=owned, request_row=rows.of(owner))]
        case e.Load() | e.Resume():
            kept = saved[event.name] if isinstance(event, e.Load) else preempted[event.request]
            slot, row = (
                units.of(event.request) if isinstance(event, e.Load) else units.first() for units in (slots, rows)
            )
            grown = pages.grown([(event.request, kept)])[event.request]
            filled = frozenset(pages.covering(grown, 0, kept))
            # A resume claims its slot first. For a load this adds nothing: a restore may write all that a claim may.
            return [RequestWrites("claim", slot, request_row=row),
                    RequestWrites("restore", slot, written=filled, request_row=row)]  # fmt: skip
        case _:
            return []
