"""Step counts that a controller with one wrong rule would request.

The reference's controller is run again over the events, once for every wrong rule of its dialect. A rule explains a
step count if it gives it and, at every earlier event, the right one. Leaves out: when a step count comes into force,
which the driver decides.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple

import msgspec

from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import Commit, Committed, Forward, SetNumSteps
from instep_reference.controllers import Controller, controller
from instep_reference.controllers.sglang_0_5_12 import Brackets
from instep_reference.controllers.sglang_0_5_14 import Slots
from instep_reference.controllers.vllm_counts_by_batch import ByTable

from ...finding_problem import Explained, NamedMistake, WrongContent
from ...watch.event_context import EventContext
from .source_slips import of_function, slipped

MOST = 3  # rules that may fit at most; more of them explain nothing
MOST_SLIPS = 2  # the same for slips, without a rule
CONTROLLERS = "instep_reference.controllers"
Counts = Callable[[Sequence[int]], Sequence[int]]  # accepted drafts per request of a commit -> counted drafts
Coming = tuple[int, int]  # requests whose root is known, and all with a slot


class Told(NamedTuple):
    """Input of the controller at an event.

    decode_rows  those of a forward with rows;  counts: accepted drafts per request of a commit
    in_force     a new step count;  idle: whether this is an idle step
    coming       the requests of the next round
    wish         the right request after the event
    whole        of a commit with caps and given paths: the counts without the caps
    """

    decode_rows: int | None
    counts: tuple[int, ...] | None
    in_force: int | None
    idle: bool
    coming: Coming
    wish: int
    whole: tuple[int, ...] | None = None


def same(given: Any) -> Any:
    return given


@dataclass(frozen=True)
class Rule(NamedMistake):
    """A controller with one wrong rule.

    changes  the right controller -> one with other numbers; None: this dialect has nothing to change
    coming   the right requests of the next round, and the batch of the round before -> those that decide
    """

    changes: Callable[[Controller], Controller | None] = same
    counts: Counts = same
    idle: bool = False  # an idle step is a batch
    late: bool = False  # the last batch is not counted yet
    uncapped: bool = False  # a commit counts as if it had no caps
    coming: Callable[[Coming, int], Coming] = lambda coming, before: coming


RIGHT = Rule("", "")


def told(context: EventContext) -> Told:
    event, answer = context.event, context.truth.answer
    rows, counts, in_force, whole = None, None, None, None
    if isinstance(event, Commit) and isinstance(answer, Committed):
        counts = tuple(answer.num_correct_drafts.tolist())
        whole = tuple(len(path.nodes) for path in event.accepted) if event.caps and event.accepted else None
    elif isinstance(event, Forward) and event.rows:
        rows = sum(row.kind == "decode" for row in event.rows)
    elif isinstance(event, SetNumSteps):
        in_force = event.num_steps
    return Told(rows, counts, in_force, context.kind == "idle", context.expected.coming,
                context.truth.wanted_num_steps, whole)  # fmt: skip


class Steps(NamedTuple):
    """The controller that a run declares, in the names of `Plan.steps`."""

    num_steps: int
    adaptive: AdaptiveFile | None = None
    controlled: Controlled | None = None
    lag: int = 0

    def controller(self) -> Controller:
        return controller(self.controlled, self.num_steps, self.adaptive, self.lag)


def wrong_rule(steps: Steps, history: Sequence[Told], found: int) -> Explained | None:
    """The rule that gives the found step count, or a few that are indistinguishable; None if none does.

    A count is a small number, which many a slip gives as well. So these are counted next to a known mistake.
    """
    fitting = [rule.known() for rule in RULES if wishes(steps, rule, history, found)]
    if len(fitting) > MOST:
        return None
    slips = _one_slip(steps, history, found)
    alike = [one.says for one in slips]
    if fitting and len(slips) > 1:
        alike = [f"a slip in the rule, at any of {len(slips)} places"]
    elif not fitting and len(slips) > MOST_SLIPS:
        return None
    told = [*(one.says for one in fitting), *alike]
    if not told:
        return None
    first, *others = told
    return Explained.any_of(fitting or slips, first + (f" [equal: {'; '.join(others)}]" if others else ""))


def _one_slip(steps: Steps, history: Sequence[Told], found: int) -> list[WrongContent]:
    """The expressions of the reference's controller in which one slip gives the found step count."""
    mine = [vars(inspect.getmodule(each)) | vars(each) for each in type(steps.controller()).__mro__]
    functions = {one.__qualname__: one for names in mine for one in names.values()
                 if isinstance(one, FunctionType) and one.__module__.startswith(CONTROLLERS)}  # fmt: skip
    fitting = dict[tuple[str, str], None]()
    for name, function in functions.items():
        for slip in of_function(function):
            if (name, slip.right) in fitting:
                continue
            with slipped(function, slip):
                try:
                    fits = wishes(steps, RIGHT, history, found)
                except Exception:  # a changed rule may raise anything
                    continue
            if fits:
                fitting[name, slip.right] = None
    return [WrongContent(f"has a slip in `{right}`, as `{name}` of the reference has it") for name, right in fitting]


def wishes(steps: Steps, rule: Rule, history: Sequence[Told], found: int) -> bool:
    """Whether a controller with this rule requests the right counts before the last event and the found one then."""
    wrong, owed, (_, before) = rule.changes(steps.controller()), list[Told](), history[0].coming
    if wrong is None:
        return False
    for event in history:
        before = (event.decode_rows if event.counts is None else len(event.counts)) or before
        if event.in_force is not None:
            wrong.set_num_steps(event.in_force)
        if not (rule.idle or rule.late):
            count(wrong, event._replace(counts=event.whole) if rule.uncapped and event.whole else event, rule.counts)
        elif isinstance(wrong, Brackets):
            counted = event.counts is not None or (event.decode_rows is not None and wrong.in_force == 0)
            owed += [event] * (counted or (event.idle and rule.idle))
            for one in owed[:-1] if rule.late else owed:
                batch = one.decode_rows if one.counts is None else len(one.counts)
                wrong.update(1 if batch is None else batch, one.counts or ())
            owed = owed[-1:] if rule.late else []
        else:
            return False
        if wrong.next_num_steps(*rule.coming(event.coming, before)) != (
            found if event is history[-1] else event.wish
        ):  # fmt: skip
            return False
    return True


def count(wrong: Controller, event: Told, counts: Counts) -> None:
    if event.decode_rows is not None:
        wrong.forwarded(event.decode_rows)
    if event.counts is not None:
        wrong.committed(counts(event.counts))


def with_rules(change: Callable[[Any], Any]) -> Callable[[Controller], Controller | None]:
    """Change the numbers of every bracket or slot. None for a dialect without them."""

    def changed(right: Controller) -> Controller | None:
        if isinstance(right, Brackets):
            rules = {key: change(rule) for key, rule in right.resolved.rules.items()}
            return Brackets(replace(right.resolved, rules=rules))
        if isinstance(right, Slots):
            return slots(right, {key: change(slot.rule) for key, slot in right.by_key.items()})
        return None

    return changed


def slots(
    right: Slots, rules: Mapping[int, Any], captured: Sequence[int] | None = None, lag: int | None = None
) -> Slots:
    return type(right)(rules, right.captured if captured is None else captured, right.initial,
                       right.lag if lag is None else lag)  # fmt: skip


def with_slots(**changed: Callable[[Slots], Any]) -> Callable[[Controller], Controller | None]:
    """Change what all slots of a controller share: `captured`, `lag`, or the `rules` by batch size."""

    def change(right: Controller) -> Controller | None:
        if not isinstance(right, Slots):
            return None
        rules = {key: slot.rule for key, slot in right.by_key.items()}
        return slots(right, **{"rules": rules} | {name: of(right) for name, of in changed.items()})

    return change


def from_requests(more: int) -> Callable[[Controller], Controller | None]:
    """Let every entry of a table begin at `more` requests more."""

    def change(right: Controller) -> Controller | None:
        if not isinstance(right, ByTable):
            return None
        right.starts = {max(first + more, 1) if first > 1 else 1: drafts for first, drafts in right.starts.items()}
        return right

    return change


def _with(**changed: object) -> Callable[[Controller], Controller | None]:
    return with_rules(lambda rule: msgspec.structs.replace(
        rule, **{name: value for name, value in changed.items() if name in rule.__struct_fields__}))  # fmt: skip


RULES = (
    Rule("controller-no-warm-up", "the first batches decide already: there is no warm-up", _with(warmup_batches=0)),
    Rule("controller-every-batch", "it decides after every batch", _with(update_interval=1)),
    Rule("controller-counts-idle-steps", "an idle step counts as a batch", idle=True),
    Rule("controller-one-batch-late", "the last batch is not counted yet", late=True),
    Rule("controller-counts-the-bonus", "the bonus counts among the accepted drafts",
         counts=lambda counts: [count + 1 for count in counts]),
    Rule("controller-uncapped", "drafts after a request's cap count as accepted", uncapped=True),
    Rule("controller-best-request", "the best request of a batch counts for all",
         counts=lambda counts: [max(counts, default=0)] * len(counts)),
    Rule("controller-worst-request", "the worst request of a batch counts for all",
         counts=lambda counts: [min(counts, default=0)] * len(counts)),
    Rule("controller-sums", "accepted drafts are summed over a batch, with no mean",
         counts=lambda counts: [sum(counts)] * len(counts)),
    Rule("controller-no-average", "the last batch decides alone, with no average", _with(ema_alpha=1.0)),
    Rule("controller-alpha-swapped", "the average weighs the past by alpha and the last batch by 1 - alpha",
         with_rules(lambda rule: msgspec.structs.replace(rule, ema_alpha=1 - rule.ema_alpha))),
    Rule("controller-hysteresis-swapped", "the hysteresis of up and that of down are swapped",
         with_rules(lambda rule: msgspec.structs.replace(
             rule, down_hysteresis=rule.up_hysteresis, up_hysteresis=rule.down_hysteresis))),
    Rule("controller-hysteresis-negative", "each hysteresis has the opposite sign",
         with_rules(lambda rule: msgspec.structs.replace(
             rule, down_hysteresis=-rule.down_hysteresis, up_hysteresis=-rule.up_hysteresis))),
    Rule("controller-no-hysteresis", "there is no hysteresis", _with(down_hysteresis=0.0, up_hysteresis=0.0)),
    Rule("controller-no-ceiling", "there is no ceiling", _with(ceiling_coeff=0.0)),
    Rule("controller-batch-before", "the batch of the round before decides, not the requests of the next round",
         coming=lambda coming, before: (before, before)),
    Rule("controller-not-padded", "a batch is not padded to a captured size before its slot is chosen",
         with_slots(captured=lambda right: ())),
    Rule("controller-smallest-slot", "the slot of the smallest batches decides for every batch", with_slots(
        rules=lambda right: dict.fromkeys(right.by_key, right.by_key[min(right.by_key)].rule))),
    Rule("controller-results-late", "the results of a round are counted a round too late",
         with_slots(lag=lambda right: right.lag + 1)),
    Rule("controller-results-early", "the results of a round are counted before they are known",
         with_slots(lag=lambda right: max(right.lag - 1, 0))),
    Rule("controller-known-roots-alone", "requests without a known root do not count",
         coming=lambda coming, before: (coming[0], coming[0])),
    Rule("controller-table-one-late", "an entry of the table begins one request too late", from_requests(1)),
    Rule("controller-table-one-early", "an entry of the table begins one request too early", from_requests(-1)),
)  # fmt: skip
