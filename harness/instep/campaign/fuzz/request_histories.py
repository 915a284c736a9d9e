"""Pairs of facts about one request: an earlier one, or one of the same event, and one of the event that it is in now.

A fault may need both: a load into a request that samples, a prefix that ends within an accepted path of a tree. Every
fact alone is met soon, and a pair of them rarely. Leaves out: facts of one event alone (`coverage.py`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import committed_paths, facts, kind_of, named, restores, tracks

from .event_turns import Turn, branches, rows_of

Pair = tuple[str, str]
NOW = {  # kinds of events in which a request can be, where they need no further facts
    "draft": "drafts", "save": "is saved", "preempt": "is preempted", "resume": "resumes", "finish": "finishes",
    "abort": "is aborted",
}  # fmt: skip
ACCEPTED = ("accepts none", "accepts some", "accepts all")
# A later event of the request may depend on these. Its other facts are over with their event.
STAY = {
    "runs a later chunk": "ran its prompt in chunks", "verifies a tree": "verified a tree",
    "verifies its root alone": "verified its root alone", "runs a plain step": "ran a plain step",
    "is cut by a cap": "was cut by a cap", "gives pages back": "gave pages back", "is tracked": "was tracked",
    "is tracked inside a chunk": "was tracked inside a chunk", "is tracked inside a path": "was tracked inside a path",
    "is saved": "was saved", "resumes": "was preempted", "loads a save": "loaded a save",
    "loads a prefix": "loaded a prefix", "loads what was on the host": "loaded what was on the host",
}  # fmt: skip
ROUNDS = 4  # after which a ring of inputs has begun again under most step counts


class Histories:
    """Counts pairs of facts. `begin` starts a run, `note` counts one of its events."""

    def __init__(self) -> None:
        self.met: Counter[Pair] = Counter()
        self.begin()

    def begin(self) -> None:
        self._past: dict[str, set[str]] = {}
        self._last: dict[str, str] = {}  # what a request accepted in its last commit
        self._rounds: Counter[str] = Counter()
        self._slots: dict[str, int | None] = {}
        self._missed: set[str] = set()  # requests without which others were committed, while theirs is pending
        self._back: set[str] = set()  # copies that were on the host

    def note(self, turn: Turn) -> None:
        """Count an event, and remember it for later ones."""
        found = self._now(turn)
        self.met.update(pair for name, now in found.items() for pair in self._pairs(name, now))
        self._remember(turn, found)

    def rarity(self, turn: Turn, known: Mapping[Pair, int]) -> float:
        """The sum of 1 / (1 + times met) over the pairs of an event, which is not counted. known: pairs met before"""
        pairs = (pair for name, now in self._now(turn).items() for pair in self._pairs(name, now))
        return sum(1 / (1 + known.get(pair, 0)) for pair in pairs)

    def _pairs(self, name: str, now: set[str]) -> Iterator[Pair]:
        last = {f"{self._last[name]} last"} if name in self._last else set()
        missed = {"was absent with tokens pending"} if name in self._missed else set()
        for before in sorted(self._past.get(name, set()) | last | missed):
            yield from ((before, fact) for fact in sorted(now))
        yield from ((one, other) for one in sorted(now) for other in sorted(now) if one < other)

    def _now(self, turn: Turn) -> dict[str, set[str]]:
        """The facts of an event about each of its requests."""
        event = turn.event
        if isinstance(event, e.Refused):
            return {}
        kind = kind_of(event)
        found = {name: {NOW[kind]} if kind in NOW else set[str]() for name in named(event) if name in turn.before.live}
        for row in rows_of(turn, "prefill", "verify", "decode"):
            found[row.request] |= set(_of_row(turn, row))
        if isinstance(event, e.Commit) and event.accepted is not None:
            for name, path, whole in zip(event.requests, committed_paths(event), event.accepted, strict=True):
                drafts, count = len(turn.before.live[name].window) - 1, len(path.nodes)
                found[name].add(ACCEPTED[(count > 0) + (count == drafts > 0)])
                found[name] |= {"is cut by a cap"} if count < len(whole.nodes) else set()
                fewer = len(turn.after.live[name].pages) < len(turn.before.live[name].pages)
                found[name] |= {"gives pages back"} if fewer else set()
            for under, name in tracks(event).items():
                if under in turn.after.saved:
                    inside = turn.after.saved[under].length < turn.after.live[name].length
                    found[name] |= {"is tracked", *["is tracked inside a path"] * inside}
        under = getattr(event, "name", "")
        if facts(event).copy == "restore" and under:
            loads = {"loads a prefix" if turn.before.saved[under].prefix else "loads a save"}
            found[restores(event)] |= loads | ({"loads what was on the host"} if under in self._back else set())
        return found

    def _remember(self, turn: Turn, found: dict[str, set[str]]) -> None:
        event, live = turn.event, turn.after.live
        if isinstance(event, e.Admit):
            self._forget(event.request)
            self._past[event.request] = {"samples"} if live[event.request].draws else set()
            self._slots[event.request] = live[event.request].slot
        for name, now in found.items():
            past = self._past.setdefault(name, set())
            past |= {STAY[fact] for fact in now if fact in STAY}
            if accepted := now.intersection(ACCEPTED):
                (self._last[name],) = accepted
                self._rounds[name] += 1
                past |= {"has run many rounds"} if self._rounds[name] >= ROUNDS else set()
            if "runs a plain step" in now:
                self._last.pop(name, None)
            if isinstance(event, e.Draft | e.Forward | e.Commit):
                self._missed.discard(name)
            if name in live and live[name].slot not in (None, self._slots.get(name)):
                past.add("is in another slot")
        if isinstance(event, e.Commit):
            self._missed |= {name for name in live if name not in event.requests and name in self._last
                             and self._last[name] != ACCEPTED[0]}  # fmt: skip
        if isinstance(event, e.SetNumSteps) and event.num_steps != turn.before.num_steps:
            for name in live:
                self._past.setdefault(name, set()).add("ran when the steps changed")
        if facts(event).copy == "back":
            self._back.add(getattr(event, "name", ""))
        elif facts(event).copy == "drop":
            self._back.discard(getattr(event, "name", ""))
        for name in named(event) if facts(event).ends else ():
            self._forget(name)

    def _forget(self, name: str) -> None:
        for kept in (self._past, self._last, self._rounds, self._slots):
            kept.pop(name, None)
        self._missed.discard(name)


def _of_row(turn: Turn, row: e.Row) -> Iterator[str]:
    standing = turn.before.live[row.request]
    if row.kind == "prefill":
        yield "runs a later chunk" if standing.length else "runs a first chunk"
        if row.root is not None:
            yield "runs its last chunk"
    elif row.kind == "decode":
        yield "runs a plain step"
    elif branches(standing):
        yield "verifies a tree"
    else:
        yield "verifies its root alone" if len(standing.window) == 1 else "verifies a chain"
    if row.track:
        yield "is tracked"
    if any(row.inner):
        yield "is tracked inside a chunk"
    if len({other.kind for other in rows_of(turn, "prefill", "verify", "decode")}) > 1:
        yield "runs next to rows of another kind"
