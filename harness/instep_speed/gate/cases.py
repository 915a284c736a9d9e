"""The timed cases: one event of a round, on an engine that goes through legal rounds only.

Two cheaper ways were rejected. Verifying the same window again and again is not legal, so an engine may do anything
with it: free its memory, or answer from a copy. Calling the commit strategy alone is not what a user waits for: a
commit is acceptance, the move of the states AND draft extend.

So every round is played in full: draft, verify, commit, each with the recorded choices. The clock runs only during the
case's own event, and one walk serves all cases. A lap goes through all recorded rounds. Before it, while the clock is
stopped, every request is aborted, admitted again and given its state after the prompt. So every lap is the same work on
the same bits, with the same uneven acceptance, and one lap can be timed by the host, the next by the device.

The rounds are one short trace, recorded with the reference for some model. All choices are given, so both arms do the
same work: an arm that accepts more does not look faster. Drafts are the reference's own. The number of accepted drafts
is forced: all, none, one, two and so on in turn. If they were not, a model that accepts nothing would let a wrong
commit pass and be timed. Leaves out: clocks (`clock.py`), and the choice of arms (`gate.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch

from instep.player import Player
from instep.run.build_compared_engines import Plan, reference
from instep.run.engine_without_comparison import header_of
from instep.setting import DEFAULTS, Setting
from instep.trace.event_scheduler import drive, recorded
from instep.trace.file import Trace, write
from instep.trace.header import Model, Recording, Room
from instep.trace.policy import Arrival, Policy, read_prompts
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.drafters import BLOCK
from instep_reference.contract.engine import Admit, AnyEvent, Commit, Draft, Finish, Forward
from instep_reference.contract.errors import BadInput

from .clock import NOTHING, Clock, Reading

PROMPT_TOKENS = 32  # of every request: two pages and a state that is no longer fresh
PAGE_SIZE = 16
ROUND = (Draft, Forward, Commit)


@dataclass(frozen=True)
class Course:
    """A trace in two parts: `opening` (admissions and prompts), then `rounds` of draft, verify and commit."""

    trace: Trace
    opening: tuple[AnyEvent, ...]
    rounds: tuple[tuple[AnyEvent, ...], ...]

    @classmethod
    def of(cls, trace: Trace) -> "Course":
        events = [event for event in trace.events if not isinstance(event, Finish)]
        begin = next((number for number, event in enumerate(events) if isinstance(event, Draft)), len(events))
        rounds = tuple(tuple(events[at : at + 3]) for at in range(begin, len(events), 3))
        if not rounds or any(tuple(map(type, played)) != ROUND for played in rounds):
            found = "other events" if rounds else "no round"
            raise BadInput(trace.path.name, found=found, expected="prompts, then rounds of draft, forward and commit")
        return cls(trace, tuple(events[:begin]), rounds)

    @property
    def prompts(self) -> dict[str, tuple[int, ...]]:
        """Request -> prompt, in batch order."""
        return {event.request: event.prompt for event in self.opening if isinstance(event, Admit)}


def lay(
    directory: Path, out: Path, *, batch: int, rounds: int, num_steps: int, drafter: str = DEFAULTS.drafter
) -> Course:
    """Record a course for the model in `directory` and write its trace to `out`.

    Prompts are those in the model's folder (`prompts.json`), or random tokens if there are none.
    drafter: its proposals are recorded if it is a block drafter; other drafters are given those of `eagle`
    """
    drafter = BLOCK if drafter == BLOCK else DEFAULTS.drafter
    opened = Checkpoint.open(directory, drafter)
    width, reach = num_steps + 1, PROMPT_TOKENS + (rounds + 1) * (num_steps + 1)
    pages = batch * -(-reach // PAGE_SIZE)
    room = Room(tuple(range(batch, 0, -1)), tuple(range(pages, 0, -1)), PAGE_SIZE, batch * max(PROMPT_TOKENS, width),
                reach)
    prompts = _prompts(directory, opened.config.vocab, batch)
    policy = Policy(
        "gate", "A window is verified and committed at full speed, and rightly.", room,
        tuple(Arrival(name, name, max_new=reach) for name in prompts), num_steps, rotate=False, rounds=rounds + 1,
        accept=(num_steps, 0, *range(1, num_steps)),
    )
    header, _ = header_of(policy, opened, model=Model.of(opened, directory, str(directory.resolve())), field="gate",
                          recording=Recording(drafter), directory=directory)
    plan = Plan(opened, header.room(), num_steps, Setting("reference", dtype="float64", drafter=drafter))
    steps = list(drive(policy, prompts, header, reference(plan, plan.setting.activation)))
    trace = write(out, header, [step.event for step in steps], recorded(steps))
    return Course.of(trace)


def _prompts(directory: Path, vocab: int, batch: int) -> dict[str, tuple[int, ...]]:
    """One prompt per request, all equally long: pieces of the model's own prompts, each from another place."""
    file = directory / "prompts.json"
    stored = read_prompts(file).values() if file.is_file() else ()
    long = [prompt for prompt in stored if len(prompt) >= PROMPT_TOKENS]
    sampled = torch.randint(vocab, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    found = {}
    for number in range(batch):
        tokens = tuple(sampled[number])
        if long:
            lap, which = divmod(number, len(long))
            begin = min(lap * PROMPT_TOKENS, len(long[which]) - PROMPT_TOKENS)
            tokens = long[which][begin : begin + PROMPT_TOKENS]
        found[f"r{number}"] = tokens
    return found


# draft   the proposals of a round; the recorded ones are in force
# verify  the forward of one window per request (T = num_steps + 1)
# commit  acceptance, the move of conv windows and states, and draft extend
CASES: Mapping[str, type[e.AnyEvent]] = {"draft": e.Draft, "verify": e.Forward, "commit": e.Commit}
USUAL = ("verify", "commit")  # cases of a gate that names none; with a block drafter all cases are its own
NO_DRAG: Mapping[str, float] = MappingProxyType({})
_BY_EVENT = {event: name for name, event in CASES.items()}


@dataclass(frozen=True)
class Shown:
    """The result of a walk through the course: the states, and the engine's own count of accepted drafts a window."""

    states: dict[str, e.RequestState]
    acceptance: float


class Walk:
    """An engine that walks through the course; `laps` may be called again and again."""

    def __init__(self, engine: e.Engine, course: Course) -> None:
        self.player, self.course = Player("timed", engine), course  # without observers
        for event in course.opening:
            self.player.serve(event)
        for name in course.prompts:
            self.player.serve(e.Save(name, _start(name)))

    def laps(self, count: int, clock: Clock, drag: Mapping[str, float] = NO_DRAG) -> dict[str, Reading]:
        """Play the course `count` times in each of the clock's ways, in turn; return the summed seconds of each case.

        drag: case -> part by which its events compute longer
        """
        spent = dict.fromkeys(CASES, NOTHING)
        for timed in clock.ways * count:
            self.restart()
            for event in self._events():
                work, case = partial(self.player.serve, event), _BY_EVENT.get(type(event))
                if case is None:
                    work()
                else:
                    spent[case] = spent[case].plus(timed(work, drag.get(case, 0.0)))
        return spent

    def until(self, case: str) -> e.AnyEvent:
        """Play the first round up to the case's event -> this event, which has not run yet."""
        self.restart()
        for event in self.course.rounds[0]:
            if isinstance(event, CASES[case]):
                return event
            self.player.serve(event)
        raise AssertionError(f"a round without {case}")

    def show(self) -> Shown:
        """Play the course once -> the states and the acceptance."""
        self.restart()
        accepted: list[int] = []
        for event in self._events():
            answer = self.player.serve(event).answer
            if isinstance(answer, e.Committed):
                accepted += answer.own_num_correct_drafts.tolist()
        return Shown(self.states(), sum(accepted) / len(accepted))

    def states(self) -> dict[str, e.RequestState]:
        """Request -> its logical state now."""
        return {name: self.player.engine.state(name) for name in self.course.prompts}

    def restart(self) -> None:
        """Bring every request back to the state after its prompt, by legal events."""
        for name in self.course.prompts:
            self.player.serve(e.Abort(name))
        for name, prompt in self.course.prompts.items():
            self.player.serve(e.Admit(name, prompt))
            self.player.serve(e.Load(name, _start(name)))

    def _events(self) -> Iterator[e.AnyEvent]:
        return chain.from_iterable(self.course.rounds)


def _start(name: str) -> str:
    return f"{name} after its prompt"
