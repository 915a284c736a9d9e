"""The law: which event may follow which, and what the trace alone says about the room afterwards.

    waiting --prefill--> prefilling --last chunk--> ready --draft--> drafted --verify--> verified --commit--> ready
                                                    ready --decode--> ready
    between rounds: finish, preempt (resume returns to where it stood), save; anywhere: abort

Pages: a list grows to cover the positions that an event may write: length + tokens (prefill), + window (verify),
+ 1 (decode), + num_steps (draft), length (resume, load); it is never trimmed, and given back when the slot is.
No request may need more positions than `max_positions`.
Between a verify and its commit nothing else runs. Leaves out: who chooses (`drive.py`) and what is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput

from .book import Book, Phase, Standing
from .file import Trace
from .header import Header

BETWEEN_ROUNDS = (Phase.WAITING, Phase.PREFILLING, Phase.READY)


class Law:
    """`check(event)` raises what is illegal and what would be legal; `apply(event)` advances the book.

    overlap  whether rounds overlap: an event then reserves pages for the most tokens that the last commit of a
             request may have accepted, because its count is not known before the next commit, a save or a preempt
    """

    def __init__(self, header: Header, *, overlap: bool = False) -> None:
        self.overlap = overlap
        self.vocab = header.checkpoint.vocab
        self.drafts_itself = header.checkpoint.mtp_layers > 0
        self.candidates = frozenset({0, *header.candidates})
        self.book = Book(header.room(), header.num_steps)
        self._where = ""

    def check(self, event: e.Event, where: str = "", *, choices: bool = True) -> None:
        """Refuse an illegal event. `choices`: all of them must be given, as in a recorded trace."""
        self._where = f"{where}: " if where else ""
        _RULES[type(event)](self, event, choices)

    def apply(self, event: e.Event, where: str = "") -> None:
        """Check a complete event and take it in."""
        self.check(event, where)
        _ADVANCES[type(event)](self, event)

    def legal(self) -> dict[str, tuple[str, ...]]:
        """What may come next: kind of event or row -> the requests it may name (`admit`, `idle`: an empty name).

        set_num_steps names step counts; load names requests for which some saved state has the same prompt.
        """
        book, in_phase = self.book, self.book.in_phase
        flying = in_phase(Phase.VERIFIED)
        drafted = in_phase(Phase.DRAFTED)
        prompts = {kept.prompt for kept in book.saved.values()}
        kinds = {
            "admit": ("",) if book.free_slot() is not None else (),
            "prefill": () if flying else in_phase(Phase.WAITING, Phase.PREFILLING),
            "draft": () if flying or book.num_steps == 0 else in_phase(Phase.READY),
            "verify": () if flying else drafted,
            "decode": () if flying else in_phase(Phase.READY),
            "commit": flying,
            "set_num_steps": () if flying or drafted else tuple(str(n) for n in sorted(self.candidates)),
            "save": tuple(n for n in in_phase(Phase.PREFILLING, Phase.READY)),
            "load": tuple(n for n in in_phase(Phase.WAITING) if book.live[n].prompt in prompts),
            "preempt": in_phase(*BETWEEN_ROUNDS),
            "resume": in_phase(Phase.PREEMPTED) if book.free_slot() is not None else (),
            "finish": in_phase(Phase.READY),
            "abort": tuple(book.live),
            "idle": () if flying else ("",),
        }
        return {kind: names for kind, names in kinds.items() if names}

    # what is refused

    def _no(self, field: str, found: object, expected: object) -> NoReturn:
        may = ", ".join(self.legal())
        raise BadInput(f"{self._where}{field}", found=found, expected=expected, hint=f"legal here: {may}")

    def _phase(self, field: str, name: str, *phases: Phase) -> Standing:
        standing = self.book.live.get(name)
        wanted = " or ".join(phase.value for phase in phases)
        if standing is None:
            self._no(field, f'"{name}", which is not there', f"a request that is {wanted or 'admitted'}")
        if phases and standing.phase not in phases:
            self._no(field, f'"{name}", which is {standing.phase.value}', f"a request that is {wanted}")
        return standing

    def _tokens(self, field: str, tokens: tuple[int, ...]) -> None:
        for index, token in enumerate(tokens):
            if not 0 <= token < self.vocab:
                self._no(f"{field}[{index}]", f"token {token}", f"a token of the vocabulary, 0 to {self.vocab - 1}")

    def _free_slot(self, field: str) -> None:
        if self.book.free_slot() is None:
            self._no(field, "no free slot", f"one of {len(self.book.capacity.slots)} slots to be free")

    def _pages(self, field: str, positions: dict[str, int]) -> None:
        if (most := self.book.capacity.max_positions) is not None:
            for name, count in positions.items():
                if count > most:
                    self._no(field, f'"{name}" at {count} positions', f"at most max_positions = {most}")
        if missing := self.book.pages_missing(positions):
            self._no(field, f"pages too few by {missing}", f"room within {len(self.book.capacity.pages)} pages")

    def _nothing_in_flight(self, field: str) -> None:
        if flying := self.book.in_phase(Phase.VERIFIED):
            self._no(field, f"{', '.join(flying)} verified and not committed", "a commit first")

    def _distinct(self, field: str, names: tuple[str, ...]) -> None:
        if not names or len(set(names)) != len(names):
            self._no(field, list(names), "at least one request, none twice")


def verified(trace: Trace) -> Trace:
    """The trace, once every event in it was found legal."""
    law = Law(trace.header)
    for index, event in enumerate(trace.events):
        law.apply(event, trace.where(index))
    return trace


# one rule and one advance per kind of event


def _admit(law: Law, event: e.Admit, choices: bool) -> None:
    if not event.request or event.request in law.book.live:
        law._no("request", f'"{event.request}"', "a name that no live request has")
    if not event.prompt:
        law._no("prompt", "no token", "at least one")
    law._tokens("prompt", event.prompt)
    law._free_slot("admit")


def _admitted(law: Law, event: e.Admit) -> None:
    law.book.live[event.request] = Standing(event.request, event.prompt, law.book.free_slot())


def _draft(law: Law, event: e.Draft, choices: bool) -> None:
    n = law.book.num_steps
    law._nothing_in_flight("draft")
    law._distinct("requests", event.requests)
    for name in event.requests:
        law._phase("requests", name, Phase.READY)
    if n == 0:
        law._no("draft", "num_steps 0", "a step count above 0")
    if event.picks is None and (choices or not law.drafts_itself or event.parents is not None):
        law._no("picks", "nothing", "the drafts of every request")
    sizes = [n] * len(event.requests) if event.parents is None else [max(len(tree), 1) for tree in event.parents]
    if event.picks is not None and [len(picks) for picks in event.picks] != sizes:
        law._no("picks", f"{[len(picks) for picks in event.picks]} drafts", f"{sizes}, one list per request")
    if len(sizes) != len(event.requests):
        law._no("parents", f"{len(sizes)} trees", f"{len(event.requests)}")
    for index, picks in enumerate(event.picks or ()):
        law._tokens(f"picks[{index}]", picks)
    for index, parents in enumerate(event.parents or ()):
        for node, parent in enumerate(parents, start=1):
            if not 0 <= parent < node:
                law._no(f"parents[{index}][{node - 1}]", parent, f"an earlier node, 0 to {node - 1}")
    law._pages("draft", law.book.positions(_drafting(law, event)))


def _drafting(law: Law, event: e.Draft) -> dict[str, int]:
    sizes = [len(picks) for picks in event.picks] if event.picks else [law.book.num_steps] * len(event.requests)
    return dict(zip(event.requests, sizes, strict=True))


def _drafted(law: Law, event: e.Draft) -> None:
    law.book.reach(_drafting(law, event))
    for index, (name, picks) in enumerate(zip(event.requests, event.picks or (), strict=True)):
        root = law.book.live[name].root
        parents = (-1, *(event.parents[index] if event.parents else range(len(picks))))
        law.book.change(name, phase=Phase.DRAFTED, window=(root, *picks), parents=parents)


def _forward(law: Law, event: e.Forward, choices: bool) -> None:
    law._nothing_in_flight("forward")
    law._distinct("rows", tuple(row.request for row in event.rows))
    for index, row in enumerate(event.rows):
        _row(law, row, f"rows[{index}]", choices)
    total = sum(_width(law, row) for row in event.rows)
    if total > law.book.capacity.max_tokens:
        law._no("rows", f"{total} tokens", f"at most max_tokens = {law.book.capacity.max_tokens}")
    law._pages("rows", law.book.positions(_running(law, event)))


def _row(law: Law, row: e.Row, field: str, choices: bool) -> None:
    standing = law._phase(f"{field}.request", row.request, *_ROW_PHASES[row.kind])
    most = standing.unread if row.kind == "prefill" else 1
    if not 1 <= row.tokens <= most:
        law._no(f"{field}.tokens", row.tokens, f"1 to {most}")
    chooses = row.kind == "decode" or (row.kind == "prefill" and row.tokens == standing.unread)
    if row.root is None and chooses and choices:
        law._no(f"{field}.root", "nothing", "the root that was chosen")
    if row.root is not None:
        if not chooses:
            law._no(f"{field}.root", row.root, "no root: only a decode row and a last chunk choose one")
        law._tokens(f"{field}.root", (row.root,))


_ROW_PHASES = {
    "prefill": (Phase.WAITING, Phase.PREFILLING), "verify": (Phase.DRAFTED,), "decode": (Phase.READY,),
}


def _width(law: Law, row: e.Row) -> int:
    return len(law.book.live[row.request].window) if row.kind == "verify" else row.tokens


def _running(law: Law, event: e.Forward) -> dict[str, int]:
    return {row.request: _width(law, row) for row in event.rows}


def _ran(law: Law, event: e.Forward) -> None:
    law.book.reach(_running(law, event))
    for row in event.rows:
        standing = law.book.live[row.request]
        if row.kind == "verify":
            law.book.change(row.request, phase=Phase.VERIFIED)
            continue
        phase = Phase.PREFILLING if row.root is None else Phase.READY
        said = standing.said if row.root is None else (*standing.said, row.root)
        law.book.change(row.request, length=standing.length + row.tokens, root=row.root, said=said, phase=phase)


def _commit(law: Law, event: e.Commit, choices: bool) -> None:
    law._distinct("requests", event.requests)
    for name in event.requests:
        law._phase("requests", name, Phase.VERIFIED)
    flying = law.book.in_phase(Phase.VERIFIED)
    if set(event.requests) != set(flying):
        law._no("requests", list(event.requests), f"every verified request: {', '.join(flying)}")
    if event.accepted is None:
        if choices:
            law._no("accepted", "nothing", "a path for every request")
        return
    if len(event.accepted) != len(event.requests):
        law._no("accepted", f"{len(event.accepted)} paths", f"{len(event.requests)}")
    for index, (name, path) in enumerate(zip(event.requests, event.accepted, strict=True)):
        at, standing = 0, law.book.live[name]
        for depth, node in enumerate(path.nodes):
            if not 0 < node < len(standing.window) or standing.parents[node] != at:
                children = [child for child, parent in enumerate(standing.parents) if parent == at]
                law._no(f"accepted[{index}].nodes[{depth}]", node, f"a child of node {at}: {children or 'it has none'}")
            at = node
        law._tokens(f"accepted[{index}].bonus", (path.bonus,))


def _committed(law: Law, event: e.Commit) -> None:
    for name, path in zip(event.requests, event.accepted or (), strict=True):
        standing = law.book.live[name]
        said = (*standing.said, *(standing.window[node] for node in path.nodes), path.bonus)
        accepted = 1 + len(path.nodes)
        law.book.change(
            name, phase=Phase.READY, length=standing.length + accepted, root=path.bonus, said=said, window=(),
            parents=(), ahead=len(standing.window) - accepted if law.overlap else 0,
        )


def _set_num_steps(law: Law, event: e.SetNumSteps, choices: bool) -> None:
    if busy := law.book.in_phase(Phase.DRAFTED, Phase.VERIFIED):
        law._no("set_num_steps", f"{', '.join(busy)} within a round", "the end of the round")
    if event.num_steps not in law.candidates:
        law._no("num_steps", event.num_steps, f"one of {sorted(law.candidates)}")


def _steps_set(law: Law, event: e.SetNumSteps) -> None:
    law.book.num_steps = event.num_steps


def _save(law: Law, event: e.Save, choices: bool) -> None:
    law._phase("request", event.request, Phase.PREFILLING, Phase.READY)
    if not event.name or event.name in law.book.saved:
        law._no("name", f'"{event.name}"', "a name under which nothing is kept")


def _saved(law: Law, event: e.Save) -> None:
    law.book.change(event.request, ahead=0)
    law.book.saved[event.name] = law.book.live[event.request]


def _load(law: Law, event: e.Load, choices: bool) -> None:
    standing = law._phase("request", event.request, Phase.WAITING)
    kept = law.book.saved.get(event.name)
    if kept is None or kept.prompt != standing.prompt:
        law._no("name", f'"{event.name}"', "a name under which a request with the same prompt was saved")
    law._pages("load", {event.request: kept.length})


def _loaded(law: Law, event: e.Load) -> None:
    kept = law.book.saved[event.name]
    law.book.change(event.request, phase=kept.phase, length=kept.length, root=kept.root, said=kept.said)
    law.book.grow([(event.request, kept.length)])


def _preempt(law: Law, event: e.Preempt, choices: bool) -> None:
    law._phase("request", event.request, *BETWEEN_ROUNDS)


def _preempted(law: Law, event: e.Preempt) -> None:
    phase = law.book.live[event.request].phase
    law.book.change(event.request, phase=Phase.PREEMPTED, before=phase, slot=None, pages=(), ahead=0)


def _resume(law: Law, event: e.Resume, choices: bool) -> None:
    standing = law._phase("request", event.request, Phase.PREEMPTED)
    law._free_slot("resume")
    law._pages("resume", {event.request: standing.length})


def _resumed(law: Law, event: e.Resume) -> None:
    standing = law.book.live[event.request]
    slot = law.book.free_slot()
    law.book.live[event.request] = replace(standing, phase=standing.before or Phase.WAITING, before=None, slot=slot)
    law.book.grow([(event.request, standing.length)])


def _finish(law: Law, event: e.Finish, choices: bool) -> None:
    law._phase("request", event.request, Phase.READY)


def _abort(law: Law, event: e.Abort, choices: bool) -> None:
    law._phase("request", event.request)


def _over(law: Law, event: e.Finish | e.Abort) -> None:
    law.book.end(event.request)


def _idle(law: Law, event: e.Idle, choices: bool) -> None:
    law._nothing_in_flight("idle")


def _idled(law: Law, event: e.Idle) -> None:
    """Nothing moves."""


_RULES: dict[type[e.Event], Callable[[Law, Any, bool], None]] = {
    e.Admit: _admit, e.Draft: _draft, e.Forward: _forward, e.Commit: _commit, e.SetNumSteps: _set_num_steps,
    e.Save: _save, e.Load: _load, e.Preempt: _preempt, e.Resume: _resume, e.Finish: _finish, e.Abort: _abort,
    e.Idle: _idle,
}
_ADVANCES: dict[type[e.Event], Callable[[Law, Any], None]] = {
    e.Admit: _admitted, e.Draft: _drafted, e.Forward: _ran, e.Commit: _committed, e.SetNumSteps: _steps_set,
    e.Save: _saved, e.Load: _loaded, e.Preempt: _preempted, e.Resume: _resumed, e.Finish: _over, e.Abort: _over,
    e.Idle: _idled,
}
