"""Confirm a cause: run the trace again with one thing changed, until the first finding is gone.

    stress  without stress
    graph   without graphs
    op      with ops of the plain set (for labels: of the ledger): first those near the place, then all of them, then
            ever smaller halves
    place   with the reference's tensor at that place, at all results of the same call, and in other layers
    memory  with the reference's tensors in every result that reads memory; or with the reference's memory after the
            event that wrote it, up to the events that read it

A cause is confirmed only if everything that is computed from there agrees. Every step but the last stops at the event
of the finding, and judges arithmetic only in the round of that event. Leaves out: explanations (`instep.diagnose`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from instep_optimized.ops import load
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.watch_op_calls import OPS
from instep_reference.contract.engine import AnyEvent, Commit, Draft, Forward
from instep_reference.contract.errors import InstepError
from instep_reference.contract.place_names import Place

from ..checks.one_sided_errors import OneSided
from ..run.replay import Outcome, Replay
from ..run.run_variants import Patch, Variant, in_memory, spelled
from ..setting import moves_labels
from ..verdict import Cause, Comparison, Located, Tier
from .ops_by_place import READERS, also_writes, memory_name, ops_of, siblings, unused_by

BEYOND = 6  # events that may read what an event wrote: two rounds
# Checks that look at calls and memory rather than at results.
DIRECT = ("contracts", "capacity", "aliasing", "graphs", "hostreads", "leaks", "copies", "bounds", "interface")
OF_RANKS = ("agreement", "collectives")  # checks that compare the ranks with each other
SHOWN = 2  # maximum number of options after the sentence
# Component -> the option that selects how it is committed, and two values, one of which is not in use.
ANOTHER = {"state": ("strategy", "snapshot", "rerun"), "conv": ("conv", "windows", "widened")}


def locate(replay: Replay, outcome: Outcome, layers: Collection[int] | None = None) -> Located:
    """Confirm the first finding of a run that diverged. layers: the layers that were judged."""
    climb = _Climb(replay, outcome, layers)
    rungs = (
        climb.all_events, climb.stress, climb.graph, climb.seen_directly, climb.led, climb.op, climb.place,
        climb.reading, climb.memory,
    )  # fmt: skip
    found = next(filter(None, (rung() for rung in rungs)), None) or climb.nothing()
    return replace(found, hints=tuple(climb.seen), replays=climb.replays)


class _Climb:
    """One ladder; a rung returns `None` when it did not help. seen: other observations, printed as hints."""

    def __init__(self, replay: Replay, outcome: Outcome, layers: Collection[int] | None) -> None:
        self.replay, self.layers, self.tiers = replay, layers, outcome.tiers
        self.found, self.compared = outcome.verdict.findings, outcome.verdict.compared
        self.first = self.found[0]
        self.event, self.at = self.first.event, self.first.place
        self.last = outcome.last if outcome.last is not None and outcome.last.index == self.event else None
        self.begin = _round_of(replay.trace.events, self.event)
        self.eager = not replay.plan.setting.graphs
        self.calm = False  # whether the finding needs no stress: then no race of a further run hides what helps
        self.unused = unused_by(self.replay.plan.checkpoint.config)
        self.replays = 0
        self.refused = False  # whether the last further run was not possible
        self.seen: list[str] = []
        no_tensor = "the reference has no tensor that could replace it"
        self.remains = "the engine raised an error" if self.first.check == "serves" else no_tensor

    # The rungs

    def all_events(self) -> Located | None:
        """Report an error that only many events show: further runs judge one round, and would not see it."""
        if self.first.check != OneSided.name:
            return None
        op = next(iter(ops_of(self.at, self.unused)), None)
        by = f"cause: op `{op}`" if op else "cause: the op that computes it"
        return self._is("place", op, f"{by} (this check compares every event from the op's own inputs)")

    def stress(self) -> Located | None:
        kinds = self.replay.plan.setting.stress
        if kinds is None:
            return None
        left = self._left(Variant(calm=True))
        if not left:
            return self._is("stress", None, f"cause: work that depends on time or on unowned memory, which --stress "
                            f"{kinds} shows (without it, {self._agree()})")  # fmt: skip
        self.calm = left[0].place == self.at
        if not self.calm:
            self.seen.append(f"without --stress, the first finding is {_at(left[0])}")
        return None

    def graph(self) -> Located | None:
        if self.eager:
            return None
        self.eager = True
        left = self._left(Variant())
        if not left:
            return self._is("graph", None, f"cause: the CUDA graph (run eagerly, {self._agree()})")
        if left[0].place != self.at:
            self.seen.append(f"run eagerly, the first finding is {_at(left[0])}")
        return None

    def seen_directly(self) -> Located | None:
        """Report a broken contract or a host read, which is a fact about a call and not about its result."""
        if self.first.check in OF_RANKS:
            return self._is("place", None, "cause: the ranks differ (this check compares ranks, not results)")
        if self.first.check not in DIRECT:
            return None
        op = next(iter(ops_of(self.at, self.unused)), None)
        return self._is("place", op, "cause: the call itself (this check looks at the call, not at its result)")

    def led(self) -> Located | None:
        """Report an engine that is driven through verbs: no tensor can be put into it, but what it showed is known."""
        if not self.replay.plan.setting.led:
            return None
        before = "everything compared before this event agrees" if self.event else "it is the first event"
        if missing := self._memory_not_compared():
            names = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
            before += f"; {names} were not compared, so an earlier event may have left them wrong"
        elif self.last is not None and self.event and not in_memory(self.at):
            before += ", its memory too: what this event computed from it is wrong"
        says = f"not confirmed: the reference's tensors cannot be put into this engine; {before}"
        return self._is("unconfirmed", None, says)

    def _memory_not_compared(self) -> list[str]:
        """Kinds of memory that this event reads and that no earlier comparison covered, so that they may be wrong.

        `answers.MEMORY` lists the kinds, and the reference's requests show which of them exist. The target reads none
        of the draft head's memory.
        """
        if self.last is None or not self.event:
            return []
        compared = {each.place for each in self.compared if each.event < self.event and each.tier is not Tier.BITWISE}
        return list(dict.fromkeys(
            memory_name(place) for state in self.last.truth.after.values() for place, tensor in state.parts()
            if tensor.numel() and place not in compared and (place.stage == "trunk" or self.at.stage != "trunk")
        ))

    def op(self) -> Located | None:
        twin, other = self._others()
        near = [op for op in dict.fromkeys((*self._keepers_ops(), *ops_of(self.at, self.unused))) if op in other]
        for op in near:
            if self._agrees({op: twin}):
                return self._by_ops([op], twin)
        if len(other) > len(near) or len(near) > 1:
            if self._agrees(dict.fromkeys(other, twin)):
                return self._by_ops(self._guilty(other, twin), twin)
            all_ops = f"with all ops of `{twin}`"
            self.remains = f"no run {all_ops} is possible" if self.refused else f"it remains {all_ops}"
        return None

    def place(self) -> Located | None:
        if not self._fits(self.at):
            return None
        beside = [place for place in siblings(self.at) if self._fits(place)]
        named = {place.component for place in beside}
        alike = dict.fromkeys([self.at, *beside, *(f.place for f in self.found if f.place.component in named)])
        for chosen in dict.fromkeys(((self.at,), tuple(beside), tuple(alike))):
            here = "this place" if len(chosen) == 1 else f"{len(chosen)} places"
            found = self._patched("place", ops_of(self.at, self.unused)[0], here, chosen)
            if found is not None:
                return found
        return None

    def reading(self) -> Located | None:
        """Replace the results that read memory: memory was right after the event before, the reads are wrong."""
        read = tuple(dict.fromkeys(f.place for f in self.found if f.place.component in READERS))
        if self.at not in read or len({place.component for place in read}) < 2:
            return None
        return self._patched("memory", None, "the reads from memory", read)

    def memory(self) -> Located | None:
        if not in_memory(self.at):
            return None
        self._another_strategy()
        own = ", ".join(self._keepers_ops())
        what = f"event {self.event}" + (f" (op {own})" if own else "")
        if self.first.request is None:
            return self._is("memory", own or None, f"{what} writes memory that belongs to no request")
        wrong = list(dict.fromkeys(f.place for f in self.found if in_memory(f.place)))
        reads = [f.place for f in self.found if f.place.component == "attended" and self._fits(f.place)]
        readers = self._readers()
        until = max([self.event, *readers[:1], *(at for at in readers if at <= self.event + BEYOND)])
        patches = tuple(Patch(place, self.event) for place in (*(wrong if readers else ()), *dict.fromkeys(reads)))
        left = self._left(Variant(patch=patches), until) if patches else self.found
        if not readers:  # then no event reads it, and it is not restored
            left = [found for found in left if found.place not in wrong]
        if left and (left[0].event == self.event or left[0].place.component not in {p.component for p in wrong}):
            names = " and ".join(dict.fromkeys(place.component for place in wrong))
            self.remains = self._not_removed(names, left[0]) if patches else (
                f"no later event reads the {names}, so nothing was restored; {_at(left[0])} disagrees, too")
            return None
        begin, end = self.event + (not reads), left[0].event if left else until
        if not reads and not (readers and readers[0] <= end):
            when = f"before event {end} corrupts it again" if readers else "later in this trace"
            return self._is("memory", own or None, f"{what} writes wrong memory; nothing reads it {when}")
        again = _until(begin, end, bool(left))
        says = f"cause: {what} writes wrong memory (with the reference's memory restored, {again})"
        return self._is("memory", own or None, says, _options(patches))

    def nothing(self) -> Located:
        return self._is("unconfirmed", None, f"not confirmed: {self.remains}")

    # Parts of them

    def _patched(self, cause: Cause, op: str | None, what: str, places: Sequence[Place]) -> Located | None:
        """Report that everything agrees with the reference's tensors there, except memory that the same ops write."""
        patches = tuple(Patch(place, self.event) for place in places)
        left = self._left(Variant(patch=patches))
        apart = [found for found in left if not any(also_writes(place, found.place) for place in places)]
        names = " and ".join(dict.fromkeys(place.component for place in places))
        if apart:
            self.remains = self._not_removed(names, apart[0])
            return None
        also = f"; the same op writes {_at(left[0])}" if left else ""
        says = f"cause: {what} (with the reference's {names}, the rest of the event agrees{also})"
        return self._is(cause, op, says, _options(patches))

    def _not_removed(self, names: str, found: Comparison) -> str:
        """The result of the last run, which had these tensors of the reference, and a finding."""
        having = f"with the reference's {names}"
        return f"no run {having} is possible" if self.refused else f"{having}, {_at(found)} still disagrees"

    def _others(self) -> tuple[str, list[str]]:
        """The plain twin of the subject's op set, and the ops that differ between the two."""
        subject = self.replay.plan.setting.subject()
        if not isinstance(subject, Ops):
            return "", []
        name = "ledger" if moves_labels(subject) else "plain"
        twin = replace(load(name), keepers=subject.keepers)
        own = [op for op, form in subject.own.items() if form is not twin.own.get(op, form)]
        return name, [op for op in OPS if op not in self.unused and getattr(subject, op) is not getattr(twin, op)] + own

    def _keepers_ops(self) -> list[str]:
        """The ops of a commit strategy that wrote this place in the event."""
        wrote = () if self.last is None else self.last.log.wrote
        return list(dict.fromkeys(op for op, place in wrote if place == self.at))

    def _guilty(self, ops: Sequence[str], twin: str) -> Sequence[str]:
        """The smallest set of ops that helps, by halving; both halves where each needs the other."""
        while len(ops) > 1:
            halves = ops[: len(ops) // 2], ops[len(ops) // 2 :]
            helps = next((half for half in halves if self._agrees(dict.fromkeys(half, twin))), None)
            if helps is None:
                break
            ops = helps
        return ops

    def _by_ops(self, ops: Sequence[str], twin: str) -> Located:
        which = "op" if len(ops) == 1 else "ops"
        names = ", ".join(f"`{op}`" for op in ops)
        says = f"cause: {which} {names} (with the {which} of `{twin}`, {self._agree()})"
        return self._is("op", ", ".join(ops), says, tuple(f"--swap {op}={twin}" for op in ops))

    def _another_strategy(self) -> None:
        option, one, two = ANOTHER.get(self.at.component, ("", "", ""))
        if option and isinstance(self.replay.plan.setting.subject(), Ops):
            other = two if getattr(self.replay.plan.setting, option) == one else one
            if not self._left(Variant(options={option: other})):
                self.seen.append(f"with --{option} {other} it agrees")

    def _fits(self, place: Place) -> bool:
        """Whether both sides have a tensor of the same shape there."""
        if self.last is None:
            return False
        reference = self.last.truth if self.last.rounded is None else self.last.rounded
        ours, right = self.last.subject.places.get(place), reference.places.get(place)
        return ours is not None and right is not None and ours.shape == right.shape and bool(ours.numel())

    def _readers(self) -> list[int]:
        """The later events that run the request that owns the memory, in the target or in the draft head."""
        found = []
        for number, event in enumerate(self.replay.trace.events[self.event + 1 :], self.event + 1):
            rows = [row.request for row in event.rows] if isinstance(event, Forward) else ()
            drafted = event.requests if isinstance(event, Draft) and self.at.stage != "trunk" else ()
            if self.first.request in (*rows, *drafted):
                found.append(number)
        return found

    def _agrees(self, swap: Mapping[str, str]) -> bool:
        return not self._left(Variant(swap=swap))

    def _left(self, variant: Variant, until: int | None = None) -> list[Comparison]:
        """The findings of a run with this change; the old findings if such a run is not possible."""
        self.replays += 1
        try:
            ran = self.replay.run(
                until=self.event if until is None else until, layers=self.layers, judged_from=self.begin,
                tiers=self.tiers,
                variant=replace(variant, eager=variant.eager or (self.eager and self.replay.plan.setting.graphs),
                                calm=variant.calm or self.calm),
            )
        except InstepError:
            self.refused = True
            return self.found
        self.refused = False
        return ran.verdict.findings

    def _agree(self) -> str:
        return "event 0 agrees" if not self.event else f"events 0 to {self.event} agree"

    def _is(self, cause: Cause, op: str | None, says: str, options: tuple[str, ...] = ()) -> Located:
        shown = f"  [{' '.join(options)}]" if 0 < len(options) <= SHOWN else ""
        return Located(self.first, cause, op, says + shown, options)


def _round_of(events: Sequence[AnyEvent], event: int) -> int:
    """The event from which the round is judged: for a commit its verify, as nothing ran between the two."""
    if not isinstance(events[event], Commit):
        return event
    return next((at for at in range(event, -1, -1) if isinstance(events[at], Forward)), event)


def _options(patches: Sequence[Patch]) -> tuple[str, ...]:
    return tuple(f"--graft {patch}" for patch in patches)


def _at(found: Comparison) -> str:
    return f"{spelled(found.place)}@{found.event}"


def _until(begin: int, end: int, again: bool) -> str:
    """events 7 to 8 agree; event 9 corrupts it again"""
    if again and begin == end:
        return f"event {begin} agrees until it corrupts it again"
    last = end - again
    agree = f"event {begin} agrees" if begin == last else f"events {begin} to {last} agree"
    return f"{agree}; event {end} corrupts it again" if again else agree
