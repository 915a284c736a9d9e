"""The only scheduler: it turns prompts and a policy into events, and one engine makes every free choice.

A round: special actions, admissions, the step count, drafts, one forward (prefill chunks together with verify or decode
rows), commit, finishing. The resulting events are complete: every choice is filled in, so that any engine can follow.
A request without room for a window decodes without drafts; a request without room for a token is finished.
Leaves out: which event is legal (`event_rules.py`), and the choices (the engine makes them).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from typing import get_args

import torch
from msgspec.structs import replace

from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import Dialect
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import FACTS, Phase, inner_multiples, kind_of, tracks
from instep_reference.contract.sampling import UNIFORM

from ..player import Observer, Player
from .event_rules import EventRules, uniforms_due
from .header import Header
from .ngram_tree import picks
from .policy import Arrival, Policy, ScheduledAction
from .request_table import Standing
from .seeded_coins import coins

# (all tokens of a request, its root last; number of drafts) -> that number of drafts, or none to decode without drafts
Propose = Callable[[Sequence[int], int], Sequence[int]]


# Part of a round -> the kinds of action that a policy may request in it.
REQUESTED = {when: [kind_of(event) for event, said in FACTS.items() if said.when == when]
             for when in ("first", "then", "late")}  # fmt: skip
ASKS_WITH: Mapping[Dialect, int] = {"sglang-0.5.13": 0, "sglang-0.5.14": 0, "vllm-table": 1}  # batch, scheduled


@dataclass(frozen=True)
class Step:
    """One complete event, and the engine's answer to it."""

    event: e.AnyEvent
    answer: e.Answer | None


def drive(
    policy: Policy, prompts: Mapping[str, tuple[int, ...]], header: Header, engine: e.Engine,
    observers: Sequence[Observer] = (), propose: Propose | None = None, receiver: e.Engine | None = None,
) -> Iterator[Step]:
    """Yield events until every request is over. The engine serves each of them; `observers` see it.

    propose: makes the drafts of chains from the tokens that the host knows; None: the engine's own head makes them
    receiver: the second engine, if the header has one. It knows the copies of the first one
    """
    first = _Driver(policy, prompts, header, Player("driven", engine, observers), propose)
    if receiver is not None:
        assert header.receiver is not None and first.rules.other is not None
        there = replace(policy, capacity=header.receiver.capacity, num_steps=header.receiver.num_steps, adaptive=None,
                        controller=None, follow=False, steps=(), deeds=(), arrivals=())  # fmt: skip
        second = _Driver(there, prompts, header.of_receiver(), Player("driven", receiver, observers), propose)
        second.rules = first.rules.other
        first.other, second.other = second, first
    return first.run()


def recorded(steps: list[Step]) -> dict[str, torch.Tensor]:
    """The tensors of a trace: admitted prompts as `prompt.<event>`, the engine's own choices as `own.<event>`."""
    tensors: dict[str, torch.Tensor] = {}
    for index, step in enumerate(steps):
        if isinstance(step.event, e.Admit):
            tensors[f"prompt.{index}"] = torch.tensor(step.event.prompt)
        if (said := own_say(step.event, step.answer)) is not None:
            tensors[f"own.{index}"] = said
    return tensors


def own_say(event: e.Event, answer: e.Answer | None) -> torch.Tensor | None:
    """The engine's own choices as one int64 vector, also if the event forces others; None if the event has no choice.

    Draft: the head's argmaxes [B * n], or the tokens and then the parents of the trees that it grew; forward: the
    target's choices in batch order; commit: accepted counts [B], bonus [B].
    """
    match event, answer:
        case _, e.Drafted(own=own, own_parents=parents):
            return torch.cat([own.flatten(), *([] if parents is None else [parents.flatten()])]).cpu()
        case e.Forward(rows=rows), e.Forwarded(own=said):
            found = [said[row.request].flatten().cpu() for row in rows if row.request in said]
            return torch.cat(found) if found else None
        case _, e.Committed() as answer:
            return torch.cat([answer.own_num_correct_drafts, answer.own_bonus]).cpu()
    return None


class _Driver:
    def __init__(
        self, policy: Policy, prompts: Mapping[str, tuple[int, ...]], header: Header, player: Player,
        propose: Propose | None = None,
    ) -> None:
        self.policy, self.prompts, self.player, self.propose = policy, prompts, player, propose
        self.rules = EventRules(header, overlap=policy.overlap)
        self.most = header.room().request_positions
        self.queue = deque(sorted(policy.arrivals, key=lambda arrival: arrival.arrive))
        self.arrivals: dict[str, Arrival] = {}
        self.deeds = list(policy.deeds)
        lag = max(policy.lag, int(policy.overlap))
        self.wish_delay = lag if header.controller is None else header.controller.wish_delay(lag)
        # Which of the two numbers of the coming round the wish depends on: the driver asks only if that is above 0.
        self.asks_with = None if header.controller is None else ASKS_WITH.get(header.controller.dialect)
        self.wanted: deque[int] = deque()
        self.forced = 0  # how many forced acceptances were used
        self.widened = 0  # how many widths were used
        self.capped = 0  # how many caps were used
        self.ending: set[str] = set()  # the requests that were complete after the round before
        self.round = 0
        self.behind: dict[str, tuple[int, int]] = {}  # where rounds overlap: tokens before the last one, its drafts
        self.dice = Random(policy.seed)
        self.used: dict[str, None] = {}  # prefixes by name, the one that was used longest ago first
        self.other: _Driver | None = None  # of the other engine of a trace with two
        self.transfers = list(policy.transfers)

    def run(self) -> Iterator[Step]:
        drivers = (self,) if self.other is None else (self, self.other)
        while (self.queue or any(one.rules.table.live for one in drivers)) and self.round < self.policy.rounds:
            yield from self._moving(drivers)
            for one in drivers:
                one.round = self.round
                yield from one._contexts(*REQUESTED["first"])
                yield from one._contexts(*REQUESTED["then"])
                yield from one._admissions()
                yield from one._contexts(*REQUESTED["late"])
                yield from one._step_count()
                yield from one._one_round()
                yield from one._finishing()
            self.round += 1
        for one in drivers:
            for name, standing in list(one.rules.table.live.items()):
                yield one._do(e.Finish(name) if standing.phase is Phase.READY else e.Abort(name))
        for transfer in self.transfers:
            never = f'"{transfer.request}", never possible from round {transfer.round} on'
            raise BadInput("policy transfers", found=never, expected="a request that is there then, and room for it")
        for action in self.deeds:
            never = f'{action.do} "{action.request}", never possible from round {action.round} on'
            raise BadInput("policy deeds", found=never, expected="a request that is there then")

    # the parts of a round

    def _moving(self, drivers: "Sequence[_Driver]") -> Iterator[Step]:
        """The transfers that are due and possible now."""
        for transfer in list(self.transfers):
            here = next((one for one in drivers if transfer.request in one.rules.table.live), None)
            if here is None or here.other is None or transfer.round > self.round:
                continue
            if transfer.prefix:
                saved = here.rules.table.saved
                names = [under for under in here.rules.table.on_device() if saved[under].request == transfer.request]
                if names and here.other.rules.table.room_for(1):
                    self.transfers.remove(transfer)
                    moved = max(names, key=lambda under: saved[under].length)
                    yield here._do(e.Offload(moved))
                    yield here.other._do(e.Fetch(moved))
                    here.other._use([moved])
            elif here._may_move(transfer.request, transfer.name):
                self.transfers.remove(transfer)
                yield from here._move(transfer.request, transfer.name)

    def _may_move(self, name: str, under: str) -> bool:
        """Whether a request can move to the other engine now."""
        assert self.other is not None
        standing, there = self.rules.table.live[name], self.other.rules.table
        if standing.phase not in FACTS[e.Save].phases or under in self.rules.table.saved or under in there.saved:
            return False
        fits = there.capacity.max_positions is None or standing.length <= there.capacity.max_positions
        return fits and there.free_slot() is not None and there.room_of(standing.length)

    def _move(self, name: str, under: str) -> Iterator[Step]:
        assert self.other is not None
        self.other.arrivals[name] = self.arrivals[name]
        gives, takes = transferring(self.rules.table.live[name], under, receiver=self.other.rules.receives)
        yield from map(self._do, gives)
        yield from map(self.other._do, takes)

    def _contexts(self, *kinds: str, when: str = "between") -> Iterator[Step]:
        """The special actions that are due and legal now. An action that is not legal yet waits for a later round."""
        for action in list(self.deeds):
            if action.round <= self.round and action.do in kinds and action.when == when and self._can(action):
                self.deeds.remove(action)
                yield self._do(_event(action))

    def _can(self, action: ScheduledAction) -> bool:
        standing = self.rules.table.live.get(action.request)
        if action.when != "between" and (standing is None or standing.phase.value != action.when):
            return False
        try:
            self.rules.check(_event(action))
        except BadInput:
            return False
        return True

    def _admissions(self) -> Iterator[Step]:
        while self.queue and self.queue[0].arrive <= self.round and self.rules.table.free_slot() is not None:
            arrival = self.queue.popleft()
            if arrival.receiver and self.other is not None and not self.rules.receives:
                self.other.queue.append(arrival)
                continue
            if arrival.prompt not in self.prompts:
                raise BadInput("policy arrivals", found=f'prompt "{arrival.prompt}"', expected=f"{list(self.prompts)}")
            self.arrivals[arrival.request] = arrival
            prompt = (*self._text(arrival), *self.prompts[arrival.prompt])
            if len(prompt) > self.most:
                raise BadInput(f'prompt "{arrival.prompt}"', found=f"{len(prompt)} tokens",
                               expected=f"at most {self.most}, the positions that a request may have")
            yield self._do(e.Admit(arrival.request, prompt, arrival.sampling, receiver=self.rules.receives))
            yield from self._hit(arrival.request, prompt)

    def _text(self, arrival: Arrival) -> tuple[int, ...]:
        """All tokens so far of the request that this arrival continues."""
        there = {standing.request: standing for standing in (*self.rules.table.ended, *self.rules.table.live.values())}
        if arrival.behind and arrival.behind not in there:
            raise BadInput("policy arrivals", found=f'behind "{arrival.behind}"', expected=f"one of {[*there]}")
        return (*there[arrival.behind].prompt, *there[arrival.behind].said) if arrival.behind else ()

    def _hit(self, name: str, prompt: tuple[int, ...]) -> Iterator[Step]:
        """Load the longest tracked prefix that the prompt begins with, as far as there is room for it."""
        kept = {under: s.length for under, s in self.rules.table.saved.items() if s.prefix and s.fits(prompt)}
        under = max(kept, key=lambda one: kept[one], default="")
        if under and not self.rules.table.pages_missing({name: kept[under]}):
            self._use([under])
            if self.rules.table.saved[under].aside:
                yield from self._make_room(1, under)
                yield self._do(e.Fetch(under))
            yield self._do(e.Load(name, under))

    def _use(self, names: Collection[str]) -> None:
        self.used = {name: None for name in self.used if name not in names} | dict.fromkeys(names)

    def _make_room(self, prefixes: int, wanted: str = "") -> Iterator[Step]:
        """Make room for more prefixes: the least recently used ones go to the host, and from there they are evicted.

        wanted: a prefix that must not be evicted
        """
        while not self.rules.table.room_for(prefixes) and (here := self._by_use(aside=False)):
            yield self._do(e.Offload(here[0]) if self.policy.host else e.Evict(here[0]))
            if len(there := [one for one in self._by_use(aside=True) if one != wanted]) > self.policy.host:
                yield self._do(e.Evict(there[0]))

    def _by_use(self, *, aside: bool) -> list[str]:
        """Prefixes on the host, or on the device."""
        saved = self.rules.table.saved
        return [name for name in self.used if name in saved and saved[name].prefix and saved[name].aside == aside]

    def _step_count(self) -> Iterator[Step]:
        wanted_num_steps = self.rules.table.num_steps
        if self.policy.follow:
            due = self.wanted[0] if self.wish_delay and len(self.wanted) == self.wish_delay else wanted_num_steps
            batch, scheduled = self._coming(due)
            if self.asks_with is None or (batch, scheduled)[self.asks_with]:
                self.wanted.append(self.player.engine.next_num_steps(batch, scheduled))
            if len(self.wanted) > self.wish_delay:
                wanted_num_steps = self.wanted.popleft()
        for steps in self.policy.steps:
            wanted_num_steps = steps.num_steps if steps.round == self.round else wanted_num_steps
        if wanted_num_steps != self.rules.table.num_steps:
            yield self._do(e.SetNumSteps(wanted_num_steps))

    def _coming(self, num_steps: int) -> tuple[int, int]:
        """The requests that decode or verify in this round, and those that have rows in it, with this step count."""
        names = self._turned(Phase.WAITING, Phase.PREFILLING, Phase.READY)
        return len(self.rules.table.in_phase(Phase.READY)), len(self._shares(names, num_steps + 1))

    def _one_round(self) -> Iterator[Step]:
        table = self.rules.table
        speculate = table.num_steps > 0 and self.round not in self.policy.plain
        phases: tuple[Phase, ...] = Phase.WAITING, Phase.PREFILLING, Phase.DRAFTED, Phase.READY
        if table.capacity.device_widths and table.in_phase(*phases[:2]):  # prompts run without windows
            speculate, phases = False, phases[:2]
        shapes = self.policy.trees[self.round % len(self.policy.trees)] if self.policy.trees else ()
        room, steps = table.capacity, table.num_steps
        drafts = room.drafted(steps, max(map(len, shapes), default=room.grown(steps) or steps))
        ready = [name for name in self._turned(Phase.READY) if self._left(name) > drafts]
        if speculate and ready and (drafting := self._trees(ready, shapes) if shapes else self._chains(ready)).requests:
            yield self._do(drafting)
            yield from self._contexts("abort", "refused", when="drafted")
        rows = self._rows(self._turned(*phases))
        if not rows:
            return
        if self.policy.overlap:
            standings = [table.live[row.request] for row in rows]
            self.behind = {one.request: (len(one.said), max(len(one.window) - 1, 0)) for one in standings}
        yield from self._make_room(sum(map(bool, (under for row in rows for under in (*row.inner, row.track)))))
        step = self._do(e.Forward(tuple(rows)))
        yield step
        yield from self._contexts("abort", "refused", when="verified")
        assert isinstance(step.answer, e.Forwarded)
        if flying := [row.request for row in rows if row.request in table.in_phase(Phase.VERIFIED)]:
            track = self._lazily(flying) if self.policy.lazy else self._tracking(flying)
            if not self.policy.lazy:
                yield from self._make_room(sum(map(bool, track)))
            caps = self._caps(flying)
            yield self._do(e.Commit(tuple(flying), self._paths(flying, step.answer.own, caps), track, caps))
            for name, under in zip(flying, track if self.policy.lazy else (), strict=False):
                for older in [one for one in self._own(name) if one != under and under in table.saved]:
                    yield self._do(e.Evict(older))

    def _finishing(self) -> Iterator[Step]:
        known, self.ending = self.ending, set(filter(self._ended, self.rules.table.in_phase(Phase.READY)))
        for name in self.rules.table.in_phase(Phase.READY):
            # If rounds overlap, the next round is launched before the accepted counts of the last one are known.
            if name in (known if self.policy.overlap else self.ending) or not self._left(name):
                yield self._do(e.Finish(name))

    def _ended(self, name: str) -> bool:
        standing = self.rules.table.live[name]
        said = standing.said if self.policy.overlap else standing.said[-1:]
        return len(standing.said) >= self.arrivals[name].max_new or self.policy.stop in said

    # choices of the driver

    def _left(self, name: str) -> int:
        """How many more positions the request may have."""
        return max(self.most - self.rules.table.live[name].length, 0)

    def _turned(self, *phases: Phase) -> list[str]:
        """The requests in these phases, in this round's batch order."""
        names = list(self.rules.table.in_phase(*phases))
        turn = self.round % len(names) if names and self.policy.rotate else 0
        return names[turn:] + names[:turn]

    def _rows(self, names: list[str]) -> list[e.Row]:
        """A row for every drafted or decoding request, and prefill rows as far as tokens have room."""
        rows = []
        for name, tokens in self._shares(names).items():
            phase = self.rules.table.live[name].phase
            if phase in (Phase.DRAFTED, Phase.READY):
                rows.append(self._drawing(e.Row(name, "verify" if phase is Phase.DRAFTED else "decode")))
            else:
                *inner, under = self._prefixes(name, tokens)
                rows.append(self._drawing(e.Row(name, "prefill", tokens, track=under, inner=tuple(inner))))
        few = self._few([under for row in rows for under in (*row.inner, row.track)])
        return [replace(row, inner=tuple(islice(few, len(row.inner))), track=next(few)) for row in rows]

    def _shares(self, names: list[str], window: int = 1) -> dict[str, int]:
        """The tokens of every request that has a row: windows first, prompts as far as there is room.

        window: tokens of a request that has no drafts yet
        """
        live = {name: self.rules.table.live[name] for name in names}
        windows = {name: (standing.window and self.rules.table.width(name)) or window for name, standing in live.items()
                   if standing.phase in (Phase.DRAFTED, Phase.READY)}  # fmt: skip
        room, shares = self.rules.table.capacity.max_tokens - sum(windows.values()), dict[str, int]()
        for name, standing in live.items():
            if name in windows:
                shares[name] = windows[name]
            elif tokens := min(self._chunk(standing), room, self._to_boundary(standing)):
                room -= tokens
                shares[name] = tokens
        return shares

    def _tracking(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names for the prefixes of windows that may reach a multiple of the interval."""
        named = tuple(self._prefix(name, len(self.rules.table.live[name].window)) for name in names)
        return tuple(self._few(named)) if any(named) else ()

    def _own(self, name: str) -> list[str]:
        """The prefixes of a request on the device, the shortest first."""
        saved = self.rules.table.saved
        return sorted((under for under in saved if self.rules.table.own_prefix(name, under)),
                      key=lambda under: saved[under].length)  # fmt: skip

    def _lazily(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names for the prefixes of windows: new ones as far as slots are free, and those of the newest prefixes."""
        table, track = self.rules.table, list[str]()
        for name in names:
            new = self._prefix(name, len(table.live[name].window))
            fits = table.room_for(1 + sum(under not in table.saved for under in track if under))
            track.append(new if fits or not new else next(iter(self._own(name)[-1:]), ""))
        return tuple(track) if any(track) else ()

    def _prefix(self, name: str, tokens: int) -> str:
        """A name for the prefix that a request may reach with `tokens` more tokens; empty if it reaches none."""
        return next(self._free(name)) if self.rules.table.boundary(name, tokens) is not None else ""

    def _prefixes(self, name: str, tokens: int) -> list[str]:
        """Names for the prefixes inside the next `tokens` tokens of a prompt, and at the end; an empty one: none."""
        every, names = self.rules.table.capacity.track_interval, self._free(name)
        if every is None:
            return [""]
        start = self.rules.table.live[name].length
        inner = [next(names) for _ in inner_multiples(start, start + tokens, every)]
        return [*inner, "" if (start + tokens) % every else next(names)]

    def _free(self, name: str) -> Iterator[str]:
        """Names under which nothing is kept. Names of evicted entries are used again, as an engine may not rely on what
        a name meant before."""
        table = self.rules.table
        names = (f"{name}, {number}" for number in count(len(table.saved) if table.capacity.tracked is None else 0))
        there = {} if self.rules.other is None else self.rules.other.table.saved
        return (under for under in names if under not in table.saved and under not in there)

    def _few(self, names: Sequence[str]) -> Iterator[str]:
        """The names, as many as the device has room for; the others become empty."""
        left = self.rules.table.capacity.tracked
        for name in names:
            yield name if left is None or left > 0 else ""
            left = None if left is None else left - bool(name)

    def _drawing(self, row: e.Row) -> e.Row:
        """The row, with uniforms where its request draws."""
        standing, seed = self.rules.table.live[row.request], self.arrivals[row.request].seed
        due = uniforms_due(standing, row)
        if seed is not None and due:  # a row that is no window is one of its last token
            nodes = due - 1 if row.kind == "verify" else 1
            return replace(row, uniforms=coins(seed, standing.length + row.tokens - 1, nodes)[-due:])
        return replace(row, uniforms=tuple(self.dice.randrange(round(1 / UNIFORM)) * UNIFORM for _ in range(due)))

    def _to_boundary(self, standing: Standing) -> int:
        """How many tokens there are to the next multiple of the interval, at which chunks end."""
        every = self.rules.table.capacity.track_interval
        return standing.unread if every is None or self.policy.inner else every - standing.length % every

    def _chunk(self, standing: Standing) -> int:
        """The next chunk size of the request's own list. After its end the list starts again."""
        sizes, done = self.arrivals[standing.request].chunks, 0
        for index in range(standing.length + 1 if sizes else 0):
            size = sizes[index % len(sizes)]
            done += size
            if done > standing.length:
                return min(done - standing.length, standing.unread)
        return standing.unread

    def _chains(self, names: list[str]) -> e.Draft:
        """A draft of chains. A request without proposed tokens is not in it, and decodes."""
        found = {} if self.propose is None else {name: self._proposed(name, self.propose) for name in names}
        if found:
            return e.Draft(tuple(filter(found.get, names)), tuple(filter(None, found.values())))
        return e.Draft(tuple(names), parents=tuple(map(self._chain, names)) if self.policy.widths else None)

    def _chain(self, name: str) -> tuple[int, ...]:
        """The parents of a chain with the next width of the policy."""
        width = self.policy.widths[self.widened % len(self.policy.widths)]
        self.widened += 1
        return tuple(range(min(width, self.rules.table.num_steps)))

    def _proposed(self, name: str, propose: Propose) -> tuple[int, ...]:
        """The proposed drafts of a request.

        With overlapping rounds the host does not know the result of the last round yet. All its drafts count as
        accepted, and its bonus is proposed as well.
        """
        standing, count = self.rules.table.live[name], self.rules.table.num_steps
        said, drafts = self.behind.get(name, (len(standing.said), -1))
        return tuple(propose((*standing.prompt, *standing.said[:said]), drafts + 1 + count))[drafts + 1 :]

    def _trees(self, names: list[str], shapes: Sequence[tuple[int, ...]]) -> e.Draft:
        """A draft of given shapes and tokens."""
        parents = tuple(shapes[number % len(shapes)] for number in range(len(names)))
        tokens = []
        for name, shape in zip(names, parents, strict=True):
            standing, proposal = self.rules.table.live[name], self.player.engine.state(name).proposal
            text = (*standing.prompt, *standing.said)
            tokens.append(picks(text, shape, proposal, self.rules.vocab, self.dice))
        return e.Draft(tuple(names), tuple(tokens), parents)

    def _caps(self, names: list[str]) -> tuple[int, ...]:
        """The next caps of the policy."""
        caps = []
        for name in names if self.policy.caps else ():
            cap = self.policy.caps[self.capped % len(self.policy.caps)]
            caps.append(min(cap, len(self.rules.table.live[name].window) - 1))
            self.capped += 1
        return tuple(caps)

    def _paths(
        self, names: list[str], own: Mapping[str, torch.Tensor], caps: Sequence[int]
    ) -> tuple[e.Path, ...] | None:
        """The paths to force, by the policy or because of the stop token; None: the engine accepts by itself."""
        standings = [self.rules.table.live[name] for name in names]
        stopped = not self.policy.overlap and any(self.policy.stop in standing.window[1:] for standing in standings)
        if not self.policy.accept and not stopped:
            return None
        return tuple(self._path(standing, own[standing.request].tolist(), cap)
                     for standing, cap in zip(standings, caps or (None,) * len(names), strict=True))  # fmt: skip

    def _path(self, standing: Standing, own: list[int], cap: int | None) -> e.Path:
        nodes = self._forced(standing) if self.policy.accept else _greedy(standing, own)
        kept = nodes[:cap]
        accepted = [standing.window[node] for node in kept]
        if self.policy.stop in accepted and not self.policy.overlap:
            count = accepted.index(self.policy.stop)
            return e.Path(tuple(nodes[:count]), accepted[count])
        return e.Path(tuple(nodes), own[kept[-1] if kept else 0])

    def _forced(self, standing: Standing) -> list[int]:
        """A path of as many drafts as the policy forces, or up to a leaf. Children of a fork take turns."""
        count, turn = self.policy.accept[self.forced % len(self.policy.accept)], self.forced
        self.forced += 1
        nodes: list[int] = []
        while len(nodes) < count and (children := standing.children(nodes[-1] if nodes else 0)):
            nodes.append(children[turn % len(children)])
        return nodes

    def _do(self, event: e.AnyEvent) -> Step:
        where = f"policy, round {self.round}"
        self.rules.check(event, where, choices=False)
        answer = self.player.serve(event).answer
        complete = filled(event, answer)
        if self.policy.own and isinstance(event, e.Draft) and event.picks is None and isinstance(complete, e.Draft):
            complete = replace(complete, own=True)
        self.rules.apply(complete, where)
        self._use(tracks(complete))
        return Step(complete, answer)


def transferring(
    standing: Standing, under: str, *, receiver: bool
) -> tuple[tuple[e.AnyEvent, ...], tuple[e.AnyEvent, ...]]:
    """The events that move a request to another engine under a name, of this engine and of the other one.

    receiver: whether the other one is the second engine. Its last event frees the name
    """
    name = standing.request
    over = e.Finish(name) if standing.phase is Phase.READY else e.Abort(name)
    admit = e.Admit(name, standing.prompt, standing.sampling, receiver=receiver)
    return (e.Save(name, under), e.Offload(under), over), (admit, e.Fetch(under), e.Load(name, under), e.Evict(under))


def _greedy(standing: Standing, own: list[int]) -> list[int]:
    """The path that the engine's own choices accept."""
    nodes: list[int] = []
    while True:
        at = nodes[-1] if nodes else 0
        agreeing = [child for child in standing.children(at) if standing.window[child] == own[at]]
        if not agreeing:
            return nodes
        nodes.append(agreeing[0])


def filled(event: e.AnyEvent, answer: e.Answer | None) -> e.AnyEvent:
    """The event with the choices that the engine made filled in."""
    match event, answer:
        case e.Draft(picks=None), e.Drafted(drafts=drafts, own_parents=parents):
            shapes = event.parents if parents is None else tuple(tuple(one) for one in parents.tolist())
            counts = [drafts.shape[1]] * len(drafts) if shapes is None else map(len, shapes)
            picks = tuple(tuple(one[:count]) for one, count in zip(drafts.tolist(), counts, strict=True))
            return replace(event, picks=picks, parents=shapes)
        case e.Forward(rows=rows), e.Forwarded(roots=roots):
            return replace(event, rows=tuple(
                replace(row, root=roots[row.request]) if row.root is None and row.request in roots else row
                for row in rows
            ))
        case e.Commit(accepted=None), e.Committed() as said:
            paths = zip(said.accept_index.tolist(), said.accept_lens.tolist(), said.bonus.tolist(), strict=True)
            return replace(event, accepted=tuple(
                e.Path(tuple(nodes[1:length]), bonus) for nodes, length, bonus in paths
            ))
    return event


def _event(action: ScheduledAction) -> e.AnyEvent:
    kind = next(event for event in get_args(e.AnyEvent) if kind_of(event) == action.do)
    event: e.AnyEvent = kind(*(getattr(action, field) for field in kind.__struct_fields__))
    return event
