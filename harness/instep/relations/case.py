"""What a relation is given: a trace, a model, who serves it, and the runs of it that were made so far.

Leaves out: which runs a relation compares, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from msgspec.structs import replace as with_fields

from instep_optimized import OptimizedEngine
from instep_optimized.ops.base import Ops
from instep_optimized.ops.by_row import BY_ROW
from instep_reference.contract.adaptive import AdaptiveFile
from instep_reference.contract.engine import Admit
from instep_reference.contract.errors import Unsupported

from ..adapters import Maker, Subject
from ..engines.derived import DerivedEngine
from ..engines.verbs import ByVerbs
from ..replay.guard import MAKES, calling
from ..replay.participant import Participant
from ..replay.participants import Plan, bare, declares, enough_memory, rounded_participant, truth_participant
from ..replay.setting import moves_labels
from ..trace.file import Trace
from ..trace.header import Header
from .by_position import PositionRecord, PositionRecorder
from .row_by_row import row_by_row
from .timeline import RewrittenTrace, as_traced

Through = Callable[[Subject], Subject]


@dataclass
class Case:
    """A trace, the model, and who serves it; runs are made once and kept under their name.

    bitwise  hold bit by bit whatever an op set with invariant rows promises, whatever this one declares
    tokens   how long the drift is watched
    by_rows  the op set serves rows one by one (`row_by_row.py`); the names of its runs say so
    """

    trace: Trace
    plan: Plan
    found: Ops | Maker | ByVerbs
    bitwise: bool = False
    tokens: int = 2048
    by_rows: bool = False
    _records: dict[str, PositionRecord] = field(default_factory=dict)
    _events: dict[str, RewrittenTrace] = field(default_factory=dict)  # of these records

    @classmethod
    def of(
        cls, trace: Trace, plan: Plan, *, until: int | None = None, bitwise: bool = False, tokens: int = 2048
    ) -> Case:
        """From a plan; `until`: the trace up to this event."""
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
        """The op set under test; None: an engine of somebody else."""
        return self.found if isinstance(self.found, Ops) else None

    @cached_property
    def led(self) -> DerivedEngine | None:
        """An engine that is led by verbs, for what it declares: nothing is known of it before it was made."""
        made = bare(self.plan) if isinstance(self.found, ByVerbs) else None
        return made if isinstance(made, DerivedEngine) else None

    @property
    def labels(self) -> bool:
        return moves_labels(self.ops)

    @property
    def rows_are_invariant(self) -> bool:
        """Whether a row's bits hang on no other row: labels' do not; an op set or a maker of engines may declare it."""
        if self.bitwise or self.labels:
            return True
        if self.ops is None:
            return getattr(self.found, "row_invariant", False) is True
        return self.ops.row_invariant >= BY_ROW.keys()

    @cached_property
    def row_by_row(self) -> Case | None:
        """The same, with an op set that serves rows one by one; None: somebody else's engine takes no op set."""
        if self.ops is None:
            return None
        # No graph holds such an op: how many rows there are is read on the host.
        plan = replace(self.plan, setting=replace(self.plan.setting, graphs=False))
        return replace(self, plan=plan, found=row_by_row(self.ops), by_rows=True, _records={})

    def engine(self, header: Header, ops: Ops | None = None, **options: Any) -> Subject:
        """A new engine with the room and the step counts of a header; `options`: fields of `Options` that differ."""
        plan, setting, found = self.plan, self.plan.setting, ops or self.found
        room, adaptive = header.room(), self._adaptive(header)
        if not isinstance(found, Ops):
            if options.keys() - {"layout"}:
                raise Unsupported("an engine of somebody else has no such options")
            setting, steps = replace(setting, **options), header.num_steps
            return bare(replace(plan, setting=setting, capacity=room, num_steps=steps, adaptive=adaptive))
        with calling(MAKES), enough_memory(room):
            return OptimizedEngine(
                plan.checkpoint, found, setting.options(**options), room, num_steps=header.num_steps, adaptive=adaptive
            )

    def recorded(
        self, name: str, recorded: Callable[[], RewrittenTrace], through: Through = lambda engine: engine,
        options: Mapping[str, Any] | None = None,
    ) -> PositionRecord:
        """What the subject says to these events; `through`: what stands between the events and the engine."""
        name += ", row by row" * self.by_rows
        if name not in self._records:
            events = self._events[name] = recorded()
            engine = through(self.engine(events.header, **(options or {})))
            self._records[name] = PositionRecorder(name, Participant(name, engine, asked=False), events).run()
        return self._records[name]

    def traced(self) -> PositionRecord:
        """The trace as it is."""
        return self.recorded("the trace", lambda: as_traced(self.trace))

    def truth(self) -> PositionRecord:
        """The reference in fp64, on the trace."""
        if "truth" not in self._records:
            truth = truth_participant(self.plan, asked=False)
            self._records["truth"] = PositionRecorder("truth", truth, as_traced(self.trace)).run()
        return self._records["truth"]

    def rounded(self, draw: int = 0, of: str | None = None) -> PositionRecord:
        """A draw of the reference in the declared width (`replay/participants.py`). of: on the events of that record"""
        name = f"rounded {draw}{'' if of is None else f' of {of}'}"
        if name not in self._records:
            events, plan = as_traced(self.trace) if of is None else self._events[of], self.plan
            header = events.header
            if of is not None:
                adaptive = self._adaptive(header)
                plan = replace(plan, capacity=header.room(), num_steps=header.num_steps, adaptive=adaptive)
            sampled = rounded_participant(plan, self.led or self.found, draw, asked=False)
            self._records[name] = PositionRecorder(name, sampled, events).run()
        return self._records[name]

    @cached_property
    def stores_narrow(self) -> bool:
        """Whether states lose bits where they are stored: then they hang on where rounds and chunks end."""
        declared = declares(self.plan, self.led or self.found)
        return not self.labels and "state" in declared.narrow(self.plan.setting.width)

    def _adaptive(self, header: Header) -> AdaptiveFile | None:
        return header.adaptive_file(f"{self.trace.path.name} line 1")

