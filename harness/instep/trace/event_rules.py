"""The rules: which event may follow which, and how much room there is afterwards, from the trace alone.

    waiting --prefill--> prefilling --last chunk--> ready --draft--> drafted --verify--> verified --commit--> ready
                                                    ready --decode--> ready
    between rounds: finish, preempt (resume returns to the phase before), save; anywhere: abort

Pages: a list grows to cover the positions that an event may write: length + tokens (prefill), + window (verify),
+ 1 (decode), + drafts (draft; at least the rows of a grown tree's beams; of a block drafter also the root), length
(resume, load). Its pages become free together with the slot. With capacity.trim, a commit also frees those after the
longest length that a request may have.
No request may need more positions than `max_positions`.
Between a verify and its commit nothing else runs. Leaves out: choices (`event_scheduler.py`) and computed results.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, get_args

from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import (
    ANYWHERE,
    FACTS,
    ROW_FACTS,
    Phase,
    committed_paths,
    facts,
    inner_multiples,
    kind_of,
    moves,
    named,
)
from instep_reference.contract.sampling import UNIFORM

from .file import Trace
from .header import Header
from .request_table import RequestTable, Standing

# Every kind of event or row, as a policy chooses among them.
KINDS = {
    "admit": FACTS[e.Admit], "prefill": ROW_FACTS["prefill"], "draft": FACTS[e.Draft], **ROW_FACTS,
    **{kind_of(event): FACTS[event] for event in get_args(e.AnyEvent) if event not in (e.Forward, e.Refused)},
}


class EventRules:
    """`check(event)` raises what is illegal and what would be legal; `apply(event)` advances the request table.

    A trace with a receiver has a second request table. `serving(event)` returns the rules of the engine that serves an
    event: that of its requests or of its copy. A copy that was given out is fetched by the other engine. Events without
    requests and copies are the first engine's.

    overlap  whether rounds overlap: an event then reserves pages for the most tokens that the last commit of a
             request may have accepted, because its count is not known before the next commit, a save or a preempt
    """

    def __init__(self, header: Header, *, overlap: bool = False) -> None:
        self.overlap = overlap
        self.vocab = header.checkpoint.vocab
        self.drafts_itself = header.proposes
        self.candidates = frozenset({0, *header.candidates})
        self.table = RequestTable(header.room(), header.num_steps)
        self._where = ""
        self.receives = False
        self.other: EventRules | None = None
        if header.receiver is not None:
            self.other = EventRules(header.of_receiver(), overlap=overlap)
            self.other.other, self.other.receives = self, True

    def serving(self, event: e.Event) -> "EventRules":
        """Return the rules of the engine that serves an event of a trace."""
        if self.other is None:
            return self
        if isinstance(event, e.Refused):
            return self.serving(event.of)
        first, second = (self.other, self) if self.receives else (self, self.other)
        if isinstance(event, e.Admit):
            return second if event.receiver else first
        name, names = getattr(event, "name", ""), named(event)
        if names:
            return second if names[0] in second.table.live and names[0] not in first.table.live else first
        kept = second.table.saved.get(name)
        here = second if kept is not None else first
        aside = here.table.saved[name].aside if name in here.table.saved else False
        return (first if here is second else second) if facts(event).copy == "back" and aside else here

    def check(self, event: e.Event, where: str = "", *, choices: bool = True) -> None:
        """Refuse an illegal event. `choices`: all of them must be given, as in a recorded trace."""
        if (there := self.serving(event)) is not self:
            return there.check(event, where, choices=choices)
        self._where = f"{where}: " if where else ""
        self._nobody(kind_of(event), facts(event).not_while)
        if phases := facts(event).phases:
            field = "requests" if hasattr(event, "requests") else "request"
            self._distinct(field, named(event))
            for name in named(event):
                self._phase(field, name, *phases)
        if rule := _RULES.get(type(event)) or _COPY_RULES.get(facts(event).copy):
            rule(self, event, choices)

    def apply(self, event: e.Event, where: str = "") -> None:
        """Check a complete event and take it in."""
        if (there := self.serving(event)) is not self:
            return there.apply(event, where)
        self.check(event, where)
        if self.other is not None and facts(event).copy == "back":
            self.table.saved[moves(event)] = self.other.table.saved.pop(moves(event))
        if advance := _ADVANCES.get(type(event)) or _COPY_ADVANCES.get(facts(event).copy):
            advance(self, event)
        for name in named(event):
            if facts(event).ends:
                self.table.end(name)
            elif (phase := facts(event).after) is not None:
                self.table.change(name, phase=phase)

    def legal(self) -> dict[str, tuple[str, ...]]:
        """The legal next events: kind of event or row -> the requests it may name (`admit`, `idle`: an empty name).

        set_num_steps names step counts. An event that restores a named copy names requests for which a fitting one
        exists; one that moves or drops a copy names copies.
        """
        table, free = self.table, self.table.free_slot() is not None
        kinds: dict[str, tuple[str, ...]] = {
            kind: () if table.in_phase(*said.not_while) else table.in_phase(*said.phases) if said.phases else ("",)
            for kind, said in KINDS.items()
        }
        if kinds["set_num_steps"]:
            kinds["set_num_steps"] = tuple(str(n) for n in sorted(self.candidates))
        movable = {
            "to host": tuple(name for name, kept in table.saved.items() if not kept.aside),
            "back": tuple(name for name, kept in (self.other or self).table.saved.items()
                          if kept.aside and table.room_for(kept.prefix)),
            "drop": tuple(table.saved),
        }
        for event, said in FACTS.items():
            kind = kind_of(event)
            if said.copy == "restore" and "name" in event.__struct_fields__:
                kinds[kind] = tuple(name for name in kinds[kind] if table.loadable(table.live[name].prompt))
            elif said.copy == "restore" or event is e.Admit:
                kinds[kind] = kinds[kind] if free else ()
            elif said.copy in movable:
                kinds[kind] = movable[said.copy]
        ready = table.in_phase(Phase.READY) if table.num_steps else ()
        kinds["draft"] = tuple(name for name in kinds["draft"] if name in ready)  # of others drafts may be replaced
        return {kind: names for kind, names in kinds.items() if names}

    # what is refused

    def _no(self, field: str, found: object, expected: object) -> NoReturn:
        may = ", ".join(self.legal())
        raise BadInput(f"{self._where}{field}", found=found, expected=expected, hint=f"legal here: {may}")

    def _phase(self, field: str, name: str, *phases: Phase) -> Standing:
        standing = self.table.live.get(name)
        wanted = "admitted" if phases == ANYWHERE else " or ".join(phase.value for phase in phases)
        if standing is None:
            self._no(field, f'"{name}", which is not there', f"a request that is {wanted}")
        if standing.phase not in phases:
            self._no(field, f'"{name}", which is {standing.phase.value}', f"a request that is {wanted}")
        return standing

    def _tokens(self, field: str, tokens: tuple[int, ...]) -> None:
        for index, token in enumerate(tokens):
            if not 0 <= token < self.vocab:
                self._no(f"{field}[{index}]", f"token {token}", f"a token of the vocabulary, 0 to {self.vocab - 1}")

    def _free_slot(self, field: str) -> None:
        if self.table.free_slot() is None:
            self._no(field, "no free slot", f"one of {len(self.table.capacity.slots)} slots to be free")

    def _pages(self, field: str, positions: dict[str, int]) -> None:
        if (most := self.table.capacity.max_positions) is not None:
            for name, count in positions.items():
                if count > most:
                    self._no(field, f'"{name}" at {count} positions', f"at most max_positions = {most}")
        if missing := self.table.pages_missing(positions):
            self._no(field, f"pages too few by {missing}", f"room within {len(self.table.capacity.pages)} pages")

    def _nobody(self, field: str, phases: tuple[Phase, ...]) -> None:
        """Refuse the event while a request is in one of these phases."""
        if busy := ", ".join(self.table.in_phase(*phases)):
            if Phase.DRAFTED in phases:
                self._no(field, f"{busy} within a round", "the end of the round")
            self._no(field, f"{busy} verified and not committed", "a commit first")

    def _distinct(self, field: str, names: tuple[str, ...]) -> None:
        if not names or len(set(names)) != len(names):
            self._no(field, list(names), "at least one request, none twice")


def verified(trace: Trace) -> Trace:
    """The trace, once every event in it was found legal."""
    rules = EventRules(trace.header)
    for index, event in enumerate(trace.events):
        rules.apply(event, trace.where(index))
    return trace


# a rule and an advance per kind of event that has one


def _admit(rules: EventRules, event: e.Admit, choices: bool) -> None:
    if not event.request or event.request in rules.table.live:
        rules._no("request", f'"{event.request}"', "a name that no live request has")
    if not event.prompt:
        rules._no("prompt", "no token", "at least one")
    rules._tokens("prompt", event.prompt)
    for field, found, expected in () if event.sampling is None else event.sampling.wrong():
        rules._no(f"sampling.{field}", found, expected)
    if event.given and event.sampling is not None:
        rules._no("given", "true, and a sampling", "one of them: with its sampling a request has uniforms")
    if rules.other is None and event.receiver:
        rules._no("receiver", "a request of the second engine", "the field `receiver` in the header, too")
    if rules.other is not None and event.request in rules.other.table.live:
        rules._no("request", f'"{event.request}", which the other engine serves', "a name that no live request has")
    rules._free_slot("admit")


def _admitted(rules: EventRules, event: e.Admit) -> None:
    slot = rules.table.free_slot()
    row = rules.table.free_request_row()
    rules.table.live[event.request] = Standing(
        event.request, event.prompt, slot, sampling=event.sampling, request_row=row
    )


def _draft(rules: EventRules, event: e.Draft, choices: bool) -> None:
    n = rules.table.num_steps
    if n == 0:
        rules._no("draft", "num_steps 0", "a step count above 0")
    chains = event.parents is None or all(tree == tuple(range(len(tree))) for tree in event.parents)
    grows = event.parents is not None and rules.table.capacity.topk is not None
    if event.picks is None and (choices or not rules.drafts_itself or not chains or grows):
        rules._no("picks", "nothing", "the drafts of every request")
    grown = 0 if event.picks is not None else rules.table.capacity.grown(n)
    again = [name for name in event.requests if rules.table.live[name].phase is Phase.DRAFTED]
    if again and event.picks is None:
        rules._no("requests", f"{', '.join(again)} drafted already", "picks, where drafts are replaced")
    trees = rules.table.capacity.topk is not None
    if event.own and not (rules.drafts_itself and (event.parents is not None) == trees):
        rules._no("own", "drafts that nobody gave", "a drafter in use, and the parents of a tree where it grows one")
    sizes = [grown or n] * len(event.requests) if event.parents is None else [*map(len, event.parents)]
    if event.picks is not None and [len(picks) for picks in event.picks] != sizes:
        rules._no("picks", f"{[len(picks) for picks in event.picks]} drafts", f"{sizes}, one list per request")
    if len(sizes) != len(event.requests):
        rules._no("parents", f"{len(sizes)} trees", f"{len(event.requests)}")
    for index, picks in enumerate(event.picks or ()):
        rules._tokens(f"picks[{index}]", picks)
    for index, parents in enumerate(event.parents or ()):
        _tree(rules, f"parents[{index}]", parents)
    rules._pages("draft", rules.table.positions(_drafting(rules, event)))


def _tree(rules: EventRules, field: str, parents: tuple[int, ...]) -> None:
    """Every draft continues an earlier node, no path is too long, and where nodes branch, the window has room."""
    depths = [0]
    for node, parent in enumerate(parents, start=1):
        if not 0 <= parent < node:
            rules._no(f"{field}[{node - 1}]", parent, f"an earlier node, 0 to {node - 1}")
        depths.append(depths[parent] + 1)
    most, n = rules.table.capacity.num_draft_tokens, rules.table.num_steps
    if parents != tuple(range(len(parents))):
        if most is None:
            rules._no(field, "a tree", "a chain: the header has no capacity.num_draft_tokens")
        if len(depths) > most:
            rules._no(field, f"{len(depths)} nodes with the root", f"at most capacity.num_draft_tokens = {most}")
    if max(depths) > n:
        rules._no(field, f"a path of {max(depths)} drafts", f"at most num_steps = {n}")


def _drafting(rules: EventRules, event: e.Draft) -> dict[str, int]:
    room, n = rules.table.capacity, rules.table.num_steps
    sizes = [len(picks) for picks in event.picks] if event.picks else [room.grown(n) or n] * len(event.requests)
    sizes = [room.width(n, 1 + size) - 1 for size in sizes]
    return {name: room.drafted(n, size) for name, size in zip(event.requests, sizes, strict=True)}


def _drafted(rules: EventRules, event: e.Draft) -> None:
    rules.table.reach(_drafting(rules, event))
    for index, (name, picks) in enumerate(zip(event.requests, event.picks or (), strict=True)):
        root = rules.table.live[name].root
        parents = (-1, *(event.parents[index] if event.parents else range(len(picks))))
        rules.table.change(name, window=(root, *picks), parents=parents)


def _forward(rules: EventRules, event: e.Forward, choices: bool) -> None:
    rules._distinct("rows", tuple(row.request for row in event.rows))
    if rules.table.capacity.device_widths and {row.kind for row in event.rows} >= {"prefill", "verify"}:
        rules._no("rows", "a prompt next to windows", "one of them, because of capacity.device_widths")
    for index, row in enumerate(event.rows):
        _row(rules, row, f"rows[{index}]", choices)
    _new_names(rules, [under for row in event.rows for under in (*row.inner, row.track) if under], "rows")
    total = sum(_width(rules, row) for row in event.rows)
    if total > rules.table.capacity.max_tokens:
        rules._no("rows", f"{total} tokens", f"at most max_tokens = {rules.table.capacity.max_tokens}")
    rules._pages("rows", rules.table.positions(_running(rules, event)))


def _row(rules: EventRules, row: e.Row, field: str, choices: bool) -> None:
    standing = rules._phase(f"{field}.request", row.request, *ROW_FACTS[row.kind].phases)
    most = standing.unread if row.kind == "prefill" else 1
    if not 1 <= row.tokens <= most:
        rules._no(f"{field}.tokens", row.tokens, f"1 to {most}")
    chooses = row.kind == "decode" or (row.kind == "prefill" and row.tokens == standing.unread)
    if row.root is None and chooses and choices:
        rules._no(f"{field}.root", "nothing", "the root that was chosen")
    if row.root is not None:
        if not chooses:
            rules._no(f"{field}.root", row.root, "no root: only a decode row and a last chunk choose one")
        rules._tokens(f"{field}.root", (row.root,))
    every, end = rules.table.capacity.track_interval, standing.length + row.tokens
    if row.track and (row.kind != "prefill" or every is None or end % every):
        rules._no(f"{field}.track", f"a {row.kind} row up to token {end}",
                  f"a name on prefill rows alone, up to a multiple of capacity.track_interval = {every}")
    multiples = [] if every is None else inner_multiples(standing.length, end, every)
    if row.inner and (row.kind != "prefill" or len(row.inner) != len(multiples)):
        rules._no(f"{field}.inner", f"{len(row.inner)} names on a {row.kind} row",
                  f"{len(multiples)}, one for each multiple of capacity.track_interval inside the row")
    due = uniforms_due(standing, row)
    if len(row.uniforms) != due:
        rules._no(f"{field}.uniforms", f"{len(row.uniforms)} numbers", f"{due}, " + (
            "one per node and the final one" if due > 1 else "the final one: it samples" if due else
            "as it does not sample" if not standing.draws else "as this row chooses nothing"))
    for index, uniform in enumerate(row.uniforms):
        if not 0 <= uniform < 1 or uniform % UNIFORM:
            rules._no(f"{field}.uniforms[{index}]", uniform, "a multiple of 2**-24, from 0 to below 1")


def uniforms_due(standing: Standing, row: e.Row) -> int:
    """How many uniforms a row has: one per node of a window, and the final one where something is chosen."""
    if not standing.draws or (row.kind == "prefill" and row.tokens != standing.unread):
        return 0
    return len(standing.window) + 1 if row.kind == "verify" else 1


def _width(rules: EventRules, row: e.Row) -> int:
    return rules.table.width(row.request) if row.kind == "verify" else row.tokens


def _running(rules: EventRules, event: e.Forward) -> dict[str, int]:
    return {row.request: _width(rules, row) for row in event.rows}


def _ran(rules: EventRules, event: e.Forward) -> None:
    rules.table.reach(_running(rules, event))
    for row in event.rows:
        standing = rules.table.live[row.request]
        if row.kind == "verify":
            rules.table.change(row.request, phase=ROW_FACTS["verify"].after)
            continue
        phase = Phase.PREFILLING if row.root is None else Phase.READY
        said = standing.said if row.root is None else (*standing.said, row.root)
        rules.table.change(row.request, length=standing.length + row.tokens, root=row.root, said=said, phase=phase)
        end, every = standing.length + row.tokens, rules.table.capacity.track_interval or 1
        for under, count in zip(row.inner, inner_multiples(standing.length, end, every), strict=False):
            if under:
                rules.table.track(row.request, under, count)
        if row.track:
            rules.table.track(row.request, row.track, end)


def _commit(rules: EventRules, event: e.Commit, choices: bool) -> None:
    flying = rules.table.in_phase(Phase.VERIFIED)
    if set(event.requests) != set(flying):
        rules._no("requests", list(event.requests), f"every verified request: {', '.join(flying)}")
    new = [under for name, under in zip(event.requests, event.track, strict=False)
           if under and not (rules.table.own_prefix(name, under) and event.track.count(under) == 1)]  # fmt: skip
    reachable = [under for name, under in zip(event.requests, event.track, strict=False) if under in new
                 and rules.table.boundary(name, len(rules.table.live[name].window)) is not None]  # fmt: skip
    _new_names(rules, new, "track", len(reachable))
    if event.track and (len(event.track) != len(event.requests) or rules.table.capacity.track_interval is None):
        rules._no("track", list(event.track), f"{len(event.requests)} names, and capacity.track_interval in the header")
    if event.caps and len(event.caps) != len(event.requests):
        rules._no("caps", f"{len(event.caps)} numbers", f"{len(event.requests)}, one per request")
    for index, (name, cap) in enumerate(zip(event.requests, event.caps, strict=bool(event.caps))):
        if not 0 <= cap < len(rules.table.live[name].window):
            drafts = len(rules.table.live[name].window) - 1
            rules._no(f"caps[{index}]", cap, f'0 to {drafts}, the number of drafts of "{name}"')
    if event.accepted is None:
        if choices:
            rules._no("accepted", "nothing", "a path for every request")
        return
    if len(event.accepted) != len(event.requests):
        rules._no("accepted", f"{len(event.accepted)} paths", f"{len(event.requests)}")
    for index, (name, path) in enumerate(zip(event.requests, event.accepted, strict=True)):
        at, standing = 0, rules.table.live[name]
        for depth, node in enumerate(path.nodes):
            if node not in standing.children(at):
                expected = f"a child of node {at}: {standing.children(at) or 'it has none'}"
                rules._no(f"accepted[{index}].nodes[{depth}]", node, expected)
            at = node
        rules._tokens(f"accepted[{index}].bonus", (path.bonus,))


def _committed(rules: EventRules, event: e.Commit) -> None:
    under, steps = event.track or ("",) * len(event.requests), dict[str, int]()
    slots = dict[str, int | None]()  # of new names, for windows that may reach a multiple
    for name, kept in zip(event.requests, under, strict=True):
        reaches = rules.table.boundary(name, len(rules.table.live[name].window)) is not None
        if kept and kept not in rules.table.saved and reaches:
            slots[kept] = rules.table.free_track_slot(slots.values())
    for name, path, kept in zip(event.requests, committed_paths(event), under, strict=True):
        standing = rules.table.live[name]
        said = (*standing.said, *(standing.window[node] for node in path.nodes), path.bonus)
        count = rules.table.boundary(name, 1 + len(path.nodes))
        length = standing.length + 1 + len(path.nodes)
        ahead = standing.length + rules.table.width(name) - length if rules.overlap and not kept else 0
        rules.table.change(name, length=length, root=path.bonus, said=said, window=(), parents=(), ahead=ahead)
        if rules.table.capacity.trim:
            rules.table.trim(name, length + ahead)
        if kept and count is not None:
            steps[name] = (0, *path.nodes)[count - standing.length - 1]
            rules.table.track(name, kept, count, slots.get(kept))
    rules.table.steps = steps


def _set_num_steps(rules: EventRules, event: e.SetNumSteps, choices: bool) -> None:
    if event.num_steps not in rules.candidates:
        rules._no("num_steps", event.num_steps, f"one of {sorted(rules.candidates)}")


def _steps_set(rules: EventRules, event: e.SetNumSteps) -> None:
    rules.table.num_steps = event.num_steps


def _refused(rules: EventRules, event: e.Refused, choices: bool) -> None:
    where = rules._where
    try:
        rules.check(event.of, choices=False)  # to leave a choice to the engine is legal
    except BadInput:
        if not isinstance(event.of, e.Refused):
            return
    finally:
        rules._where = where
    rules._no("of", f"{kind_of(event.of)}, which may come here", "an event that is refused here")


# Saved requests and tracked prefixes, by name, and requests that left their slots


def _keeps(rules: EventRules, event: Any, choices: bool) -> None:
    if hasattr(event, "name"):
        _new_names(rules, [event.name], "name")


def _kept(rules: EventRules, event: Any) -> None:
    rules.table.change(event.request, ahead=0)
    if hasattr(event, "name"):
        rules.table.saved[event.name] = rules.table.live[event.request]
    else:
        rules.table.change(event.request, before=rules.table.live[event.request].phase, slot=None, request_row=None,
                           pages=())  # fmt: skip


def _new_names(rules: EventRules, names: list[str], field: str, more: int | None = None) -> None:
    """Names for what is going to be kept. more: how many need room; None: all."""
    for name in names:
        there = () if rules.other is None else rules.other.table.saved
        if not name or name in rules.table.saved or name in there or names.count(name) > 1:
            rules._no(field, f'"{name}"', "a name under which nothing is kept")
    if field != "name":
        _room(rules, len(names) if more is None else more, field)


def _room(rules: EventRules, more: int, field: str) -> None:
    """Refuse the event if the device has no room for `more` further prefixes."""
    if not rules.table.room_for(more):
        rules._no(field, f"{len(rules.table.on_device())} prefixes on the device and {more} more",
                  f"room for them within capacity.tracked = {rules.table.capacity.tracked}")


def _moves(rules: EventRules, event: Any, choices: bool) -> None:
    """An event that moves a copy to the host names one on the device, and one that brings it back names one there."""
    kept, due = rules.table.saved.get(event.name), {"to host": False, "back": True}.get(facts(event).copy)
    if due and rules.other is not None:  # it comes from the other engine
        kept = rules.other.table.saved.get(event.name)
    if kept is None or due not in (None, kept.aside):
        where = {None: "", True: " on the host", False: " on the device"}[due]
        rules._no("name", f'"{event.name}"', f"a name under which something is kept{where}")
    if due:
        _room(rules, int(kept.prefix), kind_of(event))


def _moved(rules: EventRules, event: Any) -> None:
    kept, aside = rules.table.saved[event.name], facts(event).copy == "to host"
    slot = rules.table.free_track_slot() if kept.prefix and not aside else None
    rules.table.saved[event.name] = replace(kept, aside=aside, track_slot=slot)


def _dropped(rules: EventRules, event: Any) -> None:
    del rules.table.saved[event.name]


def _restores(rules: EventRules, event: Any, choices: bool) -> None:
    kept: Standing | None = rules.table.live[event.request]
    if hasattr(event, "name"):
        loadable = rules.table.loadable(rules.table.live[event.request].prompt)
        kept = rules.table.saved[event.name] if event.name in loadable else None
    else:
        rules._free_slot(kind_of(event))
    if kept is None:
        rules._no("name", f'"{event.name}"', "a name under which a request with the same prompt was saved, or a prefix "
                  "of this one's prompt is tracked, and which is on the device")
    rules._pages(kind_of(event), {event.request: kept.length})


def _restored(rules: EventRules, event: Any) -> None:
    kept = standing = rules.table.live[event.request]
    if hasattr(event, "name"):
        kept = rules.table.saved[event.name]
        rules.table.change(event.request, phase=kept.phase, length=kept.length, root=kept.root, said=kept.said,
                           ahead=0)  # fmt: skip
    else:
        rules.table.change(
            event.request, phase=standing.before or Phase.WAITING, before=None, slot=rules.table.free_slot(),
            request_row=rules.table.free_request_row())
    rules.table.grow([(event.request, kept.length)])


# Rules that depend on more than phases, by the event or by what it does with a copy. The phases are in the contract's
# table.
_RULES: dict[type[e.Event], Callable[[EventRules, Any, bool], None]] = {
    e.Admit: _admit, e.Draft: _draft, e.Forward: _forward, e.Commit: _commit, e.SetNumSteps: _set_num_steps,
    e.Refused: _refused,
}
_COPY_RULES = {"keep": _keeps, "restore": _restores, "to host": _moves, "back": _moves, "drop": _moves}
_ADVANCES: dict[type[e.Event], Callable[[EventRules, Any], None]] = {
    e.Admit: _admitted, e.Draft: _drafted, e.Forward: _ran, e.Commit: _committed, e.SetNumSteps: _steps_set,
}
_COPY_ADVANCES = {"keep": _kept, "restore": _restored, "to host": _moved, "back": _moved, "drop": _dropped}
