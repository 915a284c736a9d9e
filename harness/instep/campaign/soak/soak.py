"""Run rounds on long-lived engines, up to a number of rounds or a time; every event is compared on all sides.

The rules of `fuzz/hypothesis_machine.py` are drawn one after another, without Hypothesis around them. After some
rounds, a *stretch*, every request leaves, so that a trace can start there. Nothing is shrunk: a finding is cut to its
last stretch. Engines are rebuilt after STRETCHES of them, so that their permanent memory, such as saved copies, stays
bounded. The first engines of a session, and some later ones, serve requests that pass LONG positions. Leaves out: what
a rule does, and the file (`totals.py`).
"""

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NoReturn, TypeVar

from hypothesis import strategies as st
from hypothesis.control import BuildContext
from hypothesis.errors import StopTest
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies import SearchStrategy

from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Abort, AnyEvent, Commit, Evict, Finish, Idle, SetNumSteps
from instep_reference.contract.errors import BadInput, InstepError
from instep_reference.contract.event_facts import Phase, kind_of

from ...checks.check_interface import Check
from ...lru_cache import EVENTS, LAYERS, closed
from ...run.replay import Outcome
from ...setting import moves_labels
from ...trace.header import Model
from ...verdict import Comparison, Skipped, Tier
from ...watch.event_context import EventContext
from ..fuzz import draw_events
from ..fuzz.campaign import Result, Settings, again, drawn_plan, edges_of, impossible, must_be_free, place, write
from ..fuzz.coverage import Coverage
from ..fuzz.drawn_run import Diverged, Example
from ..fuzz.hypothesis_machine import Host, Machine, by_seed_alone
from ..fuzz.request_histories import Pair
from ..runner import Over, TrialRunner
from .totals import Found, Session, Soaked

T = TypeVar("T")

MOST_SAVED = 12  # copies per set of engines, for memory is to stay flat; where prefixes are tracked a stretch ends them
TRIES = 1000  # of one draw; half of all succeed at worst
ROUNDS = 2  # of three turns, this many are a round if one is legal
LONG = (512, 4096)  # positions that requests pass
LONG_EVERY = 4  # one of this many sets of engines has long requests, and serves one stretch
LONG_NEEDS = 200  # rounds: with fewer, the prompts of long requests would be most of the work
MAKES_ROOM = ("preempt", "abort", "finish", "evict", "offload")  # what a scheduler does when something finds no room


class Seeded:
    """Draws from a strategy with a seed, as `data.draw` of Hypothesis does."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)

    def draw(self, strategy: SearchStrategy[T]) -> T:
        with by_seed_alone():
            for _ in range(TRIES):
                data = ConjectureData(random=self._random)
                try:
                    with BuildContext(data, wrapped_test=Seeded.draw):  # without one, a list of no element is an error
                        return data.draw(strategy)
                except StopTest:  # a draw that the strategy itself gave up, such as a list without room for one more
                    continue
        raise InstepError(f"{TRIES} draws from {strategy} gave up; expected a value: its conditions hold too rarely")


class Turns(Machine):
    """Served by the host; `turn` plays one rule that is enabled, most often a round."""

    def __init__(self, host: Host, example: Example, data: Seeded) -> None:
        super().__init__(host)
        self.example, self._data, self._full = example, data, False
        self._named = {rule.function.__name__: rule for rule in self.rules}

    def enter_some(self) -> None:
        """Two requests or more."""
        for _ in range(self._data.draw(st.integers(2, draw_events.SLOTS[1]))):
            self._do(draw_events.admit, self._data)

    def turn(self) -> None:
        """After a refusal the next event frees room, or else the same event would be refused many times in a row."""
        full, self._full = self._full, False
        if full and (kinds := [kind for kind in MAKES_ROOM if self._may(kind)]):
            self._do(draw_events.UPKEEP[self._data.draw(st.sampled_from(kinds))], self._data)
            return
        enabled = sorted(
            name for name, rule in self._named.items() if all(holds(self) for holds in rule.preconditions)
        )
        usual = "round" in enabled and self._data.draw(st.integers(0, 2)) < ROUNDS
        name = "round" if usual else self._data.draw(st.sampled_from(enabled))
        self._named[name].function(self, data=self._data)

    def is_past(self, name: str, past: int) -> bool:
        live = self.event_rules.table.live
        return name in live and live[name].length > past

    def go_long(self, name: str, past: int) -> str:
        """One event or turn towards a request beyond this position -> its name, which is new if it is over or none."""
        live = dict(self.event_rules.table.live)
        if name not in live and not self._full:
            self._do(partial(draw_events.admit_long, past=past), self._data)
            return next(iter(self.event_rules.table.live.keys() - live.keys()), "")
        if name in live and live[name].phase in (Phase.WAITING, Phase.PREFILLING) and self._may("prefill"):
            self._do(draw_events.forward, self._data)
        else:
            self.turn()
        return name

    def leave(self, num_steps: int) -> None:
        """Every request ends, and the step count is `num_steps` again: from here a trace can begin."""
        assert self.example is not None
        table = self.example.rules.table
        for name, standing in list(table.live.items()):
            self.host.serve(self.example, Finish(name) if standing.phase is Phase.READY else Abort(name))
        for name in list(table.saved) if table.capacity.track_interval is not None else ():
            self.host.serve(self.example, Evict(name))
        if table.num_steps != num_steps:
            self.host.serve(self.example, SetNumSteps(num_steps))
        self.host.serve(self.example, Idle())

    def _do(self, drawer: draw_events.Drawer, data: Seeded) -> bool:
        served = super()._do(drawer, data)
        self._full = not served
        return served

    def _may(self, kind: str) -> bool:
        assert self.example is not None
        full = kind == "save" and len(self.example.rules.table.saved) >= MOST_SAVED
        return not full and super()._may(kind)


STRETCHES = 10  # that one set of engines serves
RECOMPUTED = (Tier.DERIVED,)  # the most expensive tiers, judged at one of this many events
LEFT_OUT = (Tier.PROPAGATED, Tier.DECISIONS)  # which need a whole rounded run, and which `replay` and `fuzz` judge


class Every:
    """A check that runs at one of `every` events only."""

    def __init__(self, check: Check, every: int) -> None:
        self.name, self.tier, self._check, self._every = check.name, check.tier, check, every

    def __call__(self, context: EventContext) -> Iterable[Comparison | Skipped]:
        return () if context.index % self._every else self._check(context)


def sparing(every: int) -> Callable[[Sequence[Check]], Sequence[Check]]:
    """The checks of a soak. Labels are exact, so with them every check runs at every event."""

    def chosen(checks: Sequence[Check]) -> Sequence[Check]:
        return [Every(check, every) if check.tier in RECOMPUTED else check
                for check in checks if check.tier not in LEFT_OUT]  # fmt: skip

    return chosen


class Soak:
    """One session; implements `machine.Host`. After it, `soaked` has its sums, `found` what parted the sides.

    rounds  the limit for the rounds of all sessions; None means no limit
    """

    def __init__(
        self, settings: Settings, soaked: Soaked, session: Session, runner: TrialRunner, rounds: int | None = None,
    ) -> None:
        self.settings = replace(settings, number=len(soaked.found) + 1)
        must_be_free(self.settings)
        self.soaked, self.session, self.runner, self.rounds = soaked, session, runner, rounds
        self.opened = Checkpoint.open(settings.checkpoint, settings.setting.mode)
        self.model = Model.of(self.opened, settings.checkpoint, ".")
        self.edges = edges_of(self.opened)
        self.coverage = Coverage()
        subject = settings.setting.subject()
        # Labels of long requests are quick on a CPU, where numbers may take hours for them.
        quick = settings.setting.device != "cpu" or moves_labels(subject if isinstance(subject, Ops) else None)
        short = "with numbers on a CPU" if not quick else f"in fewer than {LONG_NEEDS} rounds"
        self._long = quick and (rounds is None or rounds >= LONG_NEEDS)
        self.coverage.without = impossible(self.settings, self.opened, short="" if self._long else short)
        self.known: Mapping[Pair, int] = {}  # nothing is drawn towards unmet pairs: a soak is long
        self.found: Outcome | None = None
        self._sets = 0  # of engines, in this session
        soaked.sessions.append(session)

    def run(self) -> None:
        try:
            self._go_on()
            while self.found is None:
                self._engines()
        except (Over, KeyboardInterrupt) as error:  # what was served counts
            self.runner.stop(error)
        self._sum_up()
        if not self.session.events:  # the rounds were all there
            self.soaked.sessions.remove(self.session)

    def _engines(self) -> None:
        """One set of engines, from its first stretch to its last."""
        data = Seeded(f"{self.soaked.seed}/{self.soaked.engines}")
        long, stretches = (LONG, 1) if self._begins_long() else ((), STRETCHES)
        self.soaked.engines += 1
        self._sets += 1
        further = sum(long) + len(long) * draw_events.TOKENS
        plan, header = drawn_plan(data.draw, self.settings, self.opened, self.model, further)
        self.coverage.begin(overlap=plan.setting.overlap, heads=header.heads,
                            buckets=plan.setting.prompt_buckets or (), block=header.drafter is not None,
                            stages=plan.setting.stages, micro_batches=plan.setting.micro_batches, dp=plan.setting.dp)
        example = Example(plan, header, sparing(self.soaked.every), self.soaked.every)
        self.coverage.offers(example.refuses)
        turns, self._begins = Turns(self, example, data), [0]
        try:
            with closed(EVENTS, LAYERS):  # no event comes twice
                for _ in range(stretches):
                    self._stretch(turns, plan.num_steps, long)
                    self._begins.append(len(example.events))
        except Diverged:
            self._keep(example)

    def _begins_long(self) -> bool:
        """Whether the next engines have long requests."""
        enough = self.rounds is None or self.rounds - self.soaked.rounds >= LONG_NEEDS
        return self._long and enough and self._sets % LONG_EVERY == 0

    def _stretch(self, turns: Turns, num_steps: int, long: Sequence[int] = ()) -> None:
        until = self.session.rounds + self.soaked.stretch
        turns.enter_some()
        try:
            for past in long:
                name = ""
                while not turns.is_past(name, past):
                    self._go_on()
                    name = turns.go_long(name, past)
            while self.session.rounds < until:
                turns.turn()
        except Over:
            turns.leave(num_steps)
            raise
        turns.leave(num_steps)
        self.soaked.stretches += 1
        self._sum_up()
        self.runner.keep()  # from here the next session would go on

    # what the machine asks of its host

    def begin(self, choose: object) -> NoReturn:
        raise NotImplementedError("the example is there before the turns")

    def serve(self, example: Example, event: AnyEvent) -> None:
        leaving = kind_of(event) == "idle" and not example.rules.table.live
        table, elements = example.rules.table, example.elements
        before = table.as_it_stands()
        example.serve(event, last=leaving)  # every answer is compared once more where requests leave
        self.session.events += 1
        self.session.elements += example.elements - elements
        self.coverage.note(before, event, example.rules.table, example.served)
        if isinstance(event, Commit):
            self.session.rounds += 1
            name = f"rounds of soak [{self.soaked.name}], seed {self.soaked.seed}"
            self.runner.advance(name, self.soaked.rounds, self.rounds)
            self._go_on()

    def refused(self, event: Any) -> None:
        self.soaked.refused += 1

    def failed(self, error: Exception) -> NoReturn:
        raise error

    # how far it is

    def _go_on(self) -> None:
        if self.runner.over or (self.rounds is not None and self.soaked.rounds >= self.rounds):
            raise Over

    def _sum_up(self) -> None:
        self.session.seconds = round(self.runner.seconds, 1)
        self.session.memory_mib = (*self.session.memory_mib[:1], memory_mib())
        self.soaked.count(self.coverage.met)
        self.soaked.impossible = self.coverage.impossible
        self.coverage.met.clear()

    def _keep(self, example: Example) -> None:
        """Write the trace of a finding, from the last stretch's begin on, or else from further back, and shrink it."""
        outcome, shows = None, False
        for begin in reversed(self._begins):
            try:
                write(example, self.settings, begin)
                outcome, shows, _ = again(example, self.settings, TrialRunner(self.settings.shrink_s))
            except BadInput:  # it loads what was saved before
                continue
            if shows:
                break
        assert outcome is not None  # from its first event on, it is legal
        self.found = outcome
        message = outcome.verdict.findings[0].diagnosis
        self.soaked.found.append(Found(self.soaked.rounds, str(place(self.settings)), shows, message))


def campaign(settings: Settings, runner: TrialRunner, rounds: int | None) -> Result:
    """The rounds with which `instep fuzz` begins, as the result of a campaign. rounds None: until the time is over."""
    setting = settings.setting
    soaked = Soaked(setting.data(), "", settings.seed)
    soaking = Soak(settings, soaked, Session.now(setting.device, None), runner, rounds)
    soaking.run()
    soaking.coverage.met.update(soaked.conditions)
    return Result(
        soaking.settings, soaking.coverage, soaked.stretches, soaked.rounds, soaked.events, soaked.elements,
        runner.seconds, Counter(event=soaked.refused), soaking.found,
        all(one.again for one in soaked.found), interrupted=runner.interrupted,
    )


def memory_mib() -> int:
    """Memory of the process now, or its maximum if the system does not report the current value."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() >> 20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)
