"""Changes of the step count over every fill of a ring must leave the states of plain decoding.

The tokens are those of the trace. They are committed in windows of one width, until each request has committed another
number of tokens since its prompt, and then in windows of another width. So a ring that holds up to the widest windows'
tokens has every fill when the width changes. Some requests accept whole windows after the change and some only a part.
One is absent from the round of the change, one is preempted over it, and one is loaded after it.
If rows are invariant, the states of our strategies have the bytes of plain decoding. If numbers are computed, T2 and
T2d judge every commit, and T2d names a wrong state. The arithmetic of another project's keeper is not declared, so T2d
alone judges it.
Leaves out: the step counts of the trace itself (`schedule` in `same_tokens.py`), and engines without a commit strategy.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle

import torch
from msgspec.structs import replace as with_fields

from instep_optimized.commit import STRATEGIES
from instep_optimized.commit.lazy_rerun import LazyRerun
from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import kind_of, named

from ...checks.check_interface import Check
from ...checks.known_wrong_states import Directed
from ...checks.recomputed_values import Derived
from ...oracle.recomputation import Recomputation
from ...oracle.state_oracle import StateOracle, TrueRunner
from ...player import Player
from ...run.build_compared_engines import declares
from ...run.large_model import outcome
from ...run.replay import Late
from ...trace.event_rules import EventRules
from ...trace.file import Trace
from ...trace.header import Header
from ...verdict import Comparison, Skipped, Tier
from ...watch.event_context import EventContext
from .case import Case, Relation, Results, our_own
from .compare_records import bitwise, different, parts, unserved
from .position_record import serving, state_of
from .request_timelines import timelines_of

NAME = "step_changes"
# Window widths before and after the change, in tokens. Ratios 1, 2, 3 and 8, up and down.
UP = ((2, 2), (1, 2), (2, 4), (1, 3), (2, 6), (1, 8))
CHANGES = (*UP, *((after, before) for before, after in UP[1:]))
# A window of one token is a decode step, which leaves a ring of ours empty. So ratio 8 needs windows of 16 tokens,
# which rings of other projects need not hold.
OURS = ((2, 16), (16, 2))
PROMPT = 3  # tokens
PAGE_SIZE = 16
ABSENT, PREEMPTED, LOADED = "absent", "preempted", "loaded"
ALL, SOME = "all accepted", "some accepted"
BOTH, EACH = ((ALL, SOME),), ((ALL,), (SOME,))


@dataclass
class RingRequest:
    """A request of the schedule. fill: tokens to commit before the change; how: what it does at the change."""

    name: str
    fill: int
    how: str
    text: tuple[int, ...]
    length: int = 0


@dataclass
class Schedule:
    """Events of requests that commit their texts in windows of any width. num_steps: the step count in force."""

    vocab: int
    num_steps: int
    events: list[e.AnyEvent] = field(default_factory=list)

    def begin(self, requests: Sequence[RingRequest]) -> None:
        self.events += [e.Admit(one.name, one.text[:PROMPT]) for one in requests]
        self.events.append(e.Forward(tuple(e.Row(one.name, "prefill", PROMPT, one.text[PROMPT]) for one in requests)))
        for one in requests:
            one.length = PROMPT

    def round(self, width: int, taken: Sequence[tuple[RingRequest, int]]) -> None:
        """A round of windows of `width` tokens. taken: for each request the number of tokens that it commits."""
        if not taken:
            return
        if width - 1 != self.num_steps:
            self.num_steps = width - 1
            self.events.append(e.SetNumSteps(self.num_steps))
        names = tuple(one.name for one, _ in taken)
        if width == 1:
            rows = (e.Row(one.name, "decode", 1, one.text[one.length + 1]) for one, _ in taken)
            self.events.append(e.Forward(tuple(rows)))
        else:
            picks, paths = zip(*(self._window(one, count, width) for one, count in taken), strict=True)
            verify = e.Forward(tuple(e.Row(name, "verify") for name in names))
            self.events += [e.Draft(names, picks), verify, e.Commit(names, paths)]
        for one, count in taken:
            one.length += count

    def load(self, one: RingRequest, donor: RingRequest) -> None:
        """Let a new request begin with the state of another one between rounds."""
        one.text, one.length = donor.text, donor.length
        saved = e.Save(donor.name, donor.name)
        self.events += [saved, e.Admit(one.name, one.text[:PROMPT]), e.Load(one.name, donor.name)]

    def _window(self, one: RingRequest, count: int, width: int) -> tuple[tuple[int, ...], e.Path]:
        """The drafts of a window, of which the first count - 1 are right, and the accepted path."""
        following = one.text[one.length + 1 :]
        wrong = ((following[count - 1] + 1 + number) % self.vocab for number in range(width - count))
        return (*following[: count - 1], *wrong), e.Path(tuple(range(1, count)), following[count - 1])


@dataclass(frozen=True)
class Changed:
    """The events with a change of the step count, and those of plain decoding. begin: the event of the change."""

    header: Header
    events: tuple[e.AnyEvent, ...]
    plain: tuple[e.AnyEvent, ...]
    begin: int


def requests_of(case: Case, before: int, after: int, hows: Sequence[Sequence[str]]) -> list[RingRequest]:
    """Requests with every fill of our ring, and one each that is absent, preempted and loaded.

    hows: what requests with the fills 0, 1, 2, ... do, in turn
    """
    full = LazyRerun.ring_size(max(before, after))
    several = [(fill, how) for fill in range(full + 1) for how in hows[fill % len(hows)]]
    several += [(full // 2, how) for how in (ABSENT, PREEMPTED, LOADED)]
    longest = max((timeline for timeline in timelines_of(case.trace)), key=lambda timeline: len(timeline.steps))
    tokens = [*longest.prompt, *(token for step in longest.steps for token in (*step.right, step.root) if token)]
    most, found = PROMPT + full + 2 * after + before + 3, list[RingRequest]()
    vocab = case.trace.header.checkpoint.vocab
    for fill, how in several:
        begin = fill + (how == SOME)
        # A text that repeats itself would give equal bits to mistakes of different lengths.
        turns = (divmod(at, len(tokens)) for at in range(begin, begin + most))
        text = tuple((tokens[at] + turn) % vocab for turn, at in turns)
        found.append(RingRequest(f"{before} to {after} after {fill}, {how}", fill, how, text))
    return found


def changed(
    case: Case, before: int, after: int, hows: Sequence[Sequence[str]] = EACH
) -> Changed:
    """The same tokens with a change of the windows' width, and decoded one by one."""
    vocab, requests = case.trace.header.checkpoint.vocab, requests_of(case, before, after, hows)
    header = _header(case.trace.header, requests, sorted({before - 1, after - 1} - {0}))
    early, late = ([one for one in requests if (one.how == LOADED) is it] for it in (False, True))
    schedule = Schedule(vocab, header.num_steps)
    schedule.begin(early)
    for left in range(max(_rounds(one, before) for one in early), 0, -1):
        schedule.round(before, [
            (one, before if left < _rounds(one, before) else one.fill - (left - 1) * before)
            for one in early if left <= _rounds(one, before)
        ])  # fmt: skip
    begin, part = len(schedule.events), max(after // 2, 1)
    away = [one for one in early if one.how == PREEMPTED]
    schedule.events += [e.Preempt(one.name) for one in away]
    there = [one for one in early if one.how in (ALL, SOME)]
    schedule.round(after, [(one, after if one.how == ALL else part) for one in there])
    schedule.events += [e.Resume(one.name) for one in away]
    for one in late:
        schedule.load(one, next(other for other in early if (other.fill, other.how) == (one.fill, ABSENT)))
    schedule.round(after, [(one, part if one.how == ALL else after) for one in requests])
    schedule.round(before, [(one, before) for one in requests])
    schedule.round(1, [(one, 1) for one in requests])
    plain, ends = Schedule(vocab, header.num_steps), {one.name: one.length for one in requests}
    plain.begin(requests)
    while going := [(one, 1) for one in requests if one.length < ends[one.name]]:
        plain.round(1, going)
    return Changed(header, tuple(schedule.events), tuple(plain.events), begin)


def _rounds(one: RingRequest, width: int) -> int:
    """Rounds before the change. A request with few tokens joins late, and does not accept its whole first window."""
    return -(-one.fill // width)


def _header(written: Header, requests: Sequence[RingRequest], candidates: Sequence[int]) -> Header:
    """Pools that hold all requests at once, whose slots are in another order than the requests."""
    widest = candidates[-1] + 1
    pages = sum(-(-(len(one.text) + widest) // PAGE_SIZE) for one in requests)
    room = with_fields(
        written.capacity, slots=tuple(range(len(requests), 0, -1)), pages=tuple(range(1, pages + 1)),
        page_size=PAGE_SIZE, max_tokens=len(requests) * max(PROMPT, widest), max_positions=None,
        num_draft_tokens=None, topk=None, track_interval=None, tracked=None,
    )
    return with_fields(
        written, capacity=room, num_steps=candidates[0], candidates=tuple(candidates),
        adaptive={"candidate_steps": list(candidates)} if len(candidates) > 1 else None,
        recording=with_fields(written.recording, drafter="external"),
    )


def hold(case: Case) -> Results:
    setting = case.plan.setting
    alone = replace(setting, drafter="external", kept_dtype=None, chunk_dtype=None)  # no request loads a prefix
    case = replace(case, plan=replace(case.plan, setting=alone))
    ours = setting.strategy in STRATEGIES
    stateful = case.plan.checkpoint.config.recurrent
    if not stateful and not case.labels:
        yield Skipped(NAME, 0, "this model has no recurrent states that T2 and T2d could judge")
    for (before, after), layer in zip((*CHANGES, *(OURS if ours else ())), cycle(stateful or (None,)), strict=False):
        found: list[Comparison | Skipped] = []
        if not case.labels and layer is not None:
            found += _judged(case, changed(case, before, after), layer, ours=ours)
        if ours and case.rows_are_invariant and not case.stores_narrow:
            found += _compared(case, changed(case, before, after, BOTH if case.labels else EACH))
        yield from found
        if any(isinstance(one, Comparison) and not one.agrees for one in found):
            return  # an event of the next change may have a lower number


def _judged(case: Case, changed: Changed, layer: int, *, ours: bool) -> Iterator[Comparison | Skipped]:
    """T2d of one layer, restarted from the subject's own memory before each step; for our strategies T2, too."""
    plan, ops = case.plan, case.ops
    assert ops is not None, "asked before"
    said, device = declares(plan, ops), torch.device(plan.setting.device)
    oracle = StateOracle(plan.checkpoint, said.rounds, plan.setting.width, device, (layer,), said.products)
    late = (Late(check, changed.begin) for check in (Directed(oracle), *([States(oracle)] if ours else ())))
    checks: list[Check] = [TokensBefore(oracle, changed.begin), *late]
    trace = Trace(case.trace.path, changed.header, changed.events, {}, "")
    ran = outcome(trace, plan.checkpoint, plan.setting, judged=checks, ops=ops, admissions=False).verdict
    yield from (replace(one, check=NAME) for one in ran.compared)
    yield from (replace(one, check=NAME) for one in ran.skipped)


def _compared(case: Case, changed: Changed) -> Results:
    """The bytes of all states from the change on, in every layer."""
    changes = list(_states(case, changed.header, changed.events, changed.begin))
    wanted = {(name, state.length) for _, name, state in changes if isinstance(state, e.RequestState)}
    plain = list(_states(case, changed.header, changed.plain, 0, wanted))
    stopped = [one for _, _, one in (*plain, *changes) if isinstance(one, Comparison)]
    decoded = {(name, state.length): state for _, name, state in plain if isinstance(state, e.RequestState)}
    for index, name, state in changes:
        if not isinstance(state, e.RequestState) or (name, state.length) not in decoded:
            continue
        for place, mine, right in parts(state, decoded[name, state.length]):
            says = f"differs from that of plain decoding after {state.length} tokens"
            yield bitwise(NAME, index, kind_of(changed.events[index]), place, different(mine, right), says, name)
    yield from stopped


def _states(
    case: Case, header: Header, events: Sequence[e.AnyEvent], begin: int,
    wanted: Collection[tuple[str, int]] | None = None,
) -> Iterator[tuple[int, str, e.RequestState | Comparison]]:
    """Serve the events, and read every state that one from `begin` on committed; or a finding, if one was not served.

    wanted: requests and lengths; None: all
    """
    engine, rules = case.engine(header), EventRules(header, overlap=case.plan.setting.overlap)
    player = Player("step changes", engine)
    for index, event in enumerate(events):
        rules.apply(event)
        with serving(index, event) as failed:
            player.serve(event)
        if failed:
            yield index, "", unserved(NAME, failed[0])
            return
        for name in named(event) if index >= begin and isinstance(event, e.Forward | e.Commit | e.Load) else ():
            standing = rules.table.live[name]
            if not standing.window and (wanted is None or (name, standing.length) in wanted):
                yield index, name, state_of(engine, name)


class States(Derived):
    """T2 of states alone."""

    def __call__(self, context: EventContext) -> Results:
        for piece in self.oracle.at(context):
            if isinstance(piece, Recomputation) and piece.writes_state and piece.truth.state is not None:
                yield from self._state(context, piece, piece.truth.state)


class TokensBefore:
    """Compares nothing. The oracle sees the tokens before event `begin`, and spends no time on yardsticks for them."""

    name, tier = NAME, Tier.DIRECTED

    def __init__(self, oracle: StateOracle, begin: int) -> None:
        self._oracle, self._begin, self._whole = oracle, begin, oracle.runner
        oracle.runner = TrueRunner(oracle.runner.truth, oracle.runner.truth, {})

    def __call__(self, context: EventContext) -> Results:
        if context.index == self._begin:
            self._oracle.runner = self._whole
        self._oracle.at(context)
        yield from ()


RELATION = Relation(
    NAME, "a change of the step count leaves the states of plain decoding, whatever a ring holds",
    "a ring whose room is reckoned for the window that was", (Tier.BITWISE, Tier.DERIVED, Tier.DIRECTED), hold,
    our_own("an external engine has only its own commit strategy"), of_the_trace=False,
)
