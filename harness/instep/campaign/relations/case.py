"""A relation and its input: a trace, a model, the engine under test, and a cache of its runs.

Leaves out: the relations (`same_events.py`, `same_tokens.py`, and a file for each larger one), and how two runs are
compared (`compare_records.py`, `same_events.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from msgspec.structs import replace as with_fields

from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.rowwise_op_names import BY_ROW
from instep_optimized.transfer_between_engines import Wire
from instep_reference.contract.declared_rounding import PREFIXES, RING
from instep_reference.contract.engine import Admit, Load
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.event_facts import tracks

from ...adapters import Maker, Subject
from ...run.build_compared_engines import Plan, bare, declares, optimized_engine, rounded_participant, truth_participant
from ...run.compared_engine import Participant
from ...setting import moves_labels
from ...subject.engines.engine_from_verbs import DerivedEngine
from ...subject.engines.verbs import ByVerbs
from ...trace.file import Trace
from ...trace.header import Header
from ...verdict import Comparison, Skipped, Tier
from .engine_modifications import row_by_row
from .position_record import PositionRecord, PositionRecorder
from .request_timelines import RewrittenTrace, as_traced

Through = Callable[[Subject], Subject]


@dataclass
class Case:
    """A trace, the model and the engine under test. Each run is made once and cached under its name.

    bitwise  require equal bits as if the op set had declared all rows invariant
    tokens   length of the drift run, in tokens
    by_rows  whether the op set serves rows one by one (`engine_modifications.py`); the names of its runs then say so
    """

    trace: Trace
    plan: Plan
    found: Ops | Maker | ByVerbs
    bitwise: bool = False
    tokens: int = 2048
    by_rows: bool = False
    _records: dict[str, PositionRecord] = field(default_factory=dict)
    _events: dict[str, RewrittenTrace] = field(default_factory=dict)  # the events of each record

    @classmethod
    def of(
        cls, trace: Trace, plan: Plan, *, until: int | None = None, bitwise: bool = False, tokens: int = 2048
    ) -> "Case":
        """Build a case from a plan; with `until`, the trace ends at this event."""
        trace.header.must_have_one_engine(f"{trace.path.name} line 1")
        if "squeeze" in plan.setting.stresses:
            raise BadInput("--stress", found="squeeze with a relation, which runs many events at a time",
                           expected="jitter, poison or neighbour; squeeze with `instep replay`")  # fmt: skip
        cut = trace if until is None else replace(trace, events=trace.events[: until + 1])
        recording = with_fields(cut.header.recording, drafter=plan.setting.mode)
        cut = replace(cut, header=with_fields(cut.header, recording=recording))
        return cls(cut, plan, plan.setting.subject(), bitwise, tokens)

    @cached_property
    def drawn(self) -> frozenset[str]:
        """The requests of the trace that sample."""
        return frozenset(
            event.request for event in self.trace.events if isinstance(event, Admit) and event.sampling is not None)

    @property
    def ops(self) -> Ops | None:
        """The op set under test; None for an external engine."""
        return self.found if isinstance(self.found, Ops) else None

    @cached_property
    def led(self) -> DerivedEngine | None:
        """An engine driven through callbacks, built to read its declarations; None for any other engine."""
        made = bare(self.plan) if isinstance(self.found, ByVerbs) else None
        return made if isinstance(made, DerivedEngine) else None

    @property
    def labels(self) -> bool:
        return moves_labels(self.ops)

    @property
    def rows_are_invariant(self) -> bool:
        """Whether a row's bits depend on no other row: true for labels, and if an op set or a maker declares it."""
        if self.bitwise or self.labels:
            return True
        if self.ops is None:
            return getattr(self.found, "row_invariant", False) is True
        return self.ops.row_invariant >= BY_ROW.keys()

    @cached_property
    def row_by_row(self) -> "Case | None":
        """The same case with an op set that serves rows one by one; None for an external engine."""
        if self.ops is None:
            return None
        # Such an op reads the number of rows on the host, so it cannot be captured in a graph.
        plan = replace(self.plan, setting=replace(self.plan.setting, graphs=False, prompt_graphs=None))
        return replace(self, plan=plan, found=row_by_row(self.ops), by_rows=True, _records={})

    def engine(self, header: Header, ops: Ops | None = None, wire: Wire | None = None, **options: Any) -> Subject:
        """Build an engine with the capacity and step counts of a header; `options` overrides fields of `Options`.

        wire: to another engine
        """
        plan, setting, found = self.plan, self.plan.setting, ops or self.found
        plan = replace(plan, capacity=header.room(), wire=wire, **header.steps(self._line))
        if not isinstance(found, Ops):
            if options.keys() - {"layout"}:
                raise Unsupported("an external engine has no such options")
            return bare(replace(plan, setting=replace(setting, **options)))
        return optimized_engine(plan, found, setting.options(**options))

    def recorded(
        self, name: str, recorded: Callable[[], RewrittenTrace], through: Through = lambda engine: engine,
        options: Mapping[str, Any] | None = None,
    ) -> PositionRecord:
        """Record the subject on these events; `through` wraps the engine before it serves them."""
        name += ", row by row" * self.by_rows
        if name not in self._records:
            events = self._events[name] = recorded()
            engine = through(self.engine(events.header, **(options or {})))
            self._records[name] = PositionRecorder(name, Participant(name, engine, asked=False), events).run()
        return self._records[name]

    def traced(self) -> PositionRecord:
        """Record the subject on the unchanged trace."""
        return self.recorded("the trace", lambda: as_traced(self.trace))

    def truth(self) -> PositionRecord:
        """Record the fp64 reference on the trace."""
        if "truth" not in self._records:
            truth = truth_participant(self.plan, asked=False)
            self._records["truth"] = PositionRecorder("truth", truth, as_traced(self.trace)).run()
        return self._records["truth"]

    def rounded(self, draw: int = 0, of: str | None = None) -> PositionRecord:
        """Record one draw of the rounded reference (`run/build_compared_engines.py`), on the events of `of`."""
        name = f"rounded {draw}{'' if of is None else f' of {of}'}"
        if name not in self._records:
            events, plan = as_traced(self.trace) if of is None else self._events[of], self.plan
            header = events.header
            if of is not None:
                plan = replace(plan, capacity=header.room(), **header.steps(self._line))
            sampled = rounded_participant(plan, self.led or self.found, draw, asked=False)
            self._records[name] = PositionRecorder(name, sampled, events).run()
        return self._records[name]

    @cached_property
    def stores_narrow(self) -> bool:
        """Whether storing a state, or a window's tokens, loses bits, so that bits depend on where rounds end."""
        declared = declares(self.plan, self.led or self.found)
        return self.splits_ring or (not self.labels and "state" in declared.narrow(self.plan.setting.width))

    @cached_property
    def splits_ring(self) -> bool:
        """Whether a ring keeps the tokens of windows in two parts, which lose bits."""
        return not self.labels and RING in declares(self.plan, self.led or self.found).rounds

    @cached_property
    def reads_narrow_prefixes(self) -> bool:
        """Whether a request continues from a prefix that is kept narrower, so its bits are not those of a prefill."""
        made = {name for event in self.trace.events for name in tracks(event)}
        narrow = declares(self.plan, self.led or self.found).rounds.keys() & PREFIXES
        return bool(narrow) and any(isinstance(event, Load) and event.name in made for event in self.trace.events)

    @property
    def _line(self) -> str:
        return f"{self.trace.path.name} line 1"


# ---- the type of a relation: a claim that something stays equal when a run is varied

__all__ = ["Case", "Relation", "Results", "not_by_verbs", "our_own"]

Results = Iterator[Comparison | Skipped]


@dataclass(frozen=True)
class Relation:
    """One claim about two runs of a trace.

    says     the claim, in one sentence
    catches  an example of a wrong engine that the relation detects; a test plants one
    tiers    the first tier is used when the case is exact, the last when it is not
    hold     yields the comparisons
    lacks    returns why the relation does not apply to a case; None: it applies
    of_the_trace  whether the relation replays the trace's own events
    to_the_finding  whether a trace that ends with the event of a finding shows the same finding
    """

    name: str
    says: str
    catches: str
    tiers: tuple[Tier, ...]
    hold: Callable[[Case], Results]
    lacks: Callable[[Case], str | None] = lambda case: None
    of_the_trace: bool = True
    to_the_finding: bool = True


def our_own(what: str) -> Callable[[Case], str | None]:
    """Apply only to instep's engine; `what` is the reason printed for any other engine."""
    return lambda case: what if case.ops is None else None


def not_by_verbs(what: str) -> Callable[[Case], str | None]:
    """Do not apply to engines driven through callbacks; `what` is the callback that they would need."""
    return lambda case: what if case.led is not None else None
