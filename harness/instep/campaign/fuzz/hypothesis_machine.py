"""The state machine: Hypothesis rules over the events, each enabled when `trace/event_rules.py` allows it.

A rule draws an event. If the event rules refuse it (for example, no page is free), an engine that refuses is offered
it, and nothing may change. Some rules are a whole round, so that runs get far. Leaves out: the content of events
(`draw_events.py`, `illegal.py`), and the number of runs (`campaign.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from hypothesis import strategies as st
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from instep_reference.contract.engine import Refused
from instep_reference.contract.errors import BadInput

from . import draw_events
from .drawn_run import Example
from .illegal import illegal

BETWEEN = 7  # one in BETWEEN + 1 parts of a round is followed by another event


class Host(Protocol):
    """Builds examples and serves events on them. To end the campaign, both raise an error that Hypothesis does not
    catch."""

    @property
    def edges(self) -> tuple[int, ...]: ...

    def begin(self, choose: draw_events.Draw) -> Example: ...

    def serve(self, example: Example, event: Any) -> None: ...

    def refused(self, event: Any) -> None: ...

    def failed(self, error: Exception) -> NoReturn: ...


def legal(*kinds: str) -> Callable[[Any], Any]:
    """Enable a rule when one of these kinds of event or row may come next."""
    return precondition(lambda self: self.example is not None and bool({*kinds} & self.example.rules.legal().keys()))


class Machine(RuleBasedStateMachine):
    """Starts with two requests or more. Then any legal event may follow."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host = host
        self.example: Example | None = None

    @initialize(data=st.data(), count=st.integers(2, draw_events.SLOTS[1]), run=st.booleans())
    def begin(self, data: Any, count: int, run: bool) -> None:
        self.example = self.host.begin(data.draw)
        for _ in range(count):
            self._do(draw_events.admit, data)
        if run:
            self._do(draw_events.forward, data)

    @legal("admit")
    @rule(data=st.data())
    def enter(self, data: Any) -> None:
        """Admit a request. Half of them then load a saved state, or run their prompt at once next to the others."""
        if self._do(draw_events.admit, data) and data.draw(st.booleans()):
            if self._may("load"):
                self._do(draw_events.UPKEEP["load"], data)
            elif self._may("prefill"):  # not while a window waits for its commit
                self._do(draw_events.forward, data)

    @legal("prefill", "verify", "decode")
    @rule(data=st.data())
    def forward(self, data: Any) -> None:
        self._do(draw_events.forward, data)

    @legal("draft")
    @rule(data=st.data())
    def draft(self, data: Any) -> None:
        self._do(draw_events.draft, data)

    @legal("commit")
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        self._do(draw_events.commit, data)

    @legal("draft", "verify", "commit")
    @rule(data=st.data())
    def round(self, data: Any) -> None:
        """The rest of a round: draft, verify next to other rows, commit. Other events may come between them."""
        drawers = (("draft", draw_events.draft), ("verify", draw_events.forward), ("commit", draw_events.commit))
        for kind, drawer in drawers:
            if self._may(kind):
                self._do(drawer, data)
                if data.draw(st.integers(0, BETWEEN)) == BETWEEN:
                    self.upkeep(data)

    @legal("set_num_steps")
    @rule(data=st.data())
    def switch(self, data: Any) -> None:
        """A new step count, and then a round or a plain step with it."""
        self._do(draw_events.set_num_steps, data)
        if self._may("draft"):
            self.round(data)
        elif self._may("decode"):
            self._do(draw_events.forward, data)

    @legal(*draw_events.UPKEEP)
    @rule(data=st.data())
    def upkeep(self, data: Any) -> None:
        """One of the events other than forwards and rounds (`draw.UPKEEP`)."""
        if kinds := [kind for kind in draw_events.UPKEEP if self._may(kind)]:
            self._do(draw_events.UPKEEP[data.draw(st.sampled_from(kinds))], data)

    @precondition(lambda self: self.example is not None and self.example.refuses)
    @rule(data=st.data())
    def refuse(self, data: Any) -> None:
        """An illegal event, which must change nothing. A drawn event that is legal is skipped."""
        assert self.example is not None
        event = self._drawn(illegal, data)
        try:
            self.example.rules.check(event, choices=False)
        except BadInput:
            self.host.serve(self.example, Refused(event))

    def _may(self, kind: str) -> bool:
        return self.example is not None and draw_events.may(self.example.rules, kind)

    def _do(self, drawer: draw_events.Drawer, data: Any) -> bool:
        """Draw an event and serve it, unless the event rules refuse it -> whether it was served."""
        assert self.example is not None  # `begin` comes first
        event = self._drawn(drawer, data)
        try:
            self.example.rules.check(event)
        except BadInput:
            self.host.refused(event)
            if self.example.refuses:  # mostly there is no room for it, which an engine must find out in time
                self.host.serve(self.example, Refused(event))
            return False
        self.host.serve(self.example, event)
        return True

    def _drawn(self, drawer: draw_events.Drawer, data: Any) -> Any:
        assert self.example is not None
        try:
            return drawer(data.draw, self.example.rules, self.host.edges)
        except HypothesisException:  # its own way to end an example
            raise
        except Exception as error:  # a fault of the drawer itself: no finding, and nothing to shrink
            self.host.failed(error)
