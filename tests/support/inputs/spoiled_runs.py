"""A run in which one place, or one piece of memory, is spoiled, and what the findings then say.

Leaves out: what is wrong with it (`test_diagnose.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from instep.checks.recomputed_values import Derived
from instep.checks.unchanged_bytes import Bytes
from instep.diagnose import RunHistory, explained
from instep.oracle.oracle import Oracle
from instep.verdict import Comparison
from instep.watch.event_context import EventContext, RowSpan
from instep.watch.rows_by_request import row_spans, rows
from instep_reference.contract.engine import Forward
from instep_reference.contract.place_names import STAGE_LEVEL, Place
from instep_reference.weights import Weights

from . import check_contexts as m

Rows = Mapping[str, torch.Tensor]


class Scenario:
    """A run of the reference in fp32 as the subject, up to the event that is spoiled."""

    def __init__(self, directory: Any) -> None:
        self.opened = m.checkpoint(directory)
        self.contexts = m.run(self.opened, m.events_of(self.opened)[:24])
        self._oracles: dict[int, tuple[Oracle, torch.Tensor]] = {}  # by the event that follows
        self.weights, self.config = Weights.of(self.opened), self.opened.config

    def oracle(self) -> Oracle:
        return Oracle(self.opened, m.declared(torch.float32, torch.float32), torch.float32)

    def said(self, spoiled: EventContext, *, bits: bool = False) -> Sequence[Comparison]:
        """The event's findings, explained as at the end of a replay."""
        oracle, history = self._oracle_before(spoiled.index), RunHistory()
        check = Bytes() if bits else Derived(oracle)
        for context in self.contexts[: spoiled.index]:
            history(context)
        findings = [found for found in check(spoiled) if isinstance(found, Comparison) and not found.agrees]
        history(spoiled)
        return sorted(explained(findings, spoiled, oracle, history), key=Comparison.order)

    def _oracle_before(self, index: int) -> Oracle:
        """The oracle before an event, with its draws. Its memory of the right events is computed once."""
        if index not in self._oracles:
            made = self.oracle()
            for context in self.contexts[:index]:
                made.at(context)
            self._oracles[index] = made, made.runner.generator.get_state()
        kept, draws = self._oracles[index]
        mine = copy(kept)
        mine.flights, mine.previous = dict(kept.flights), dict(kept.previous)
        mine.runner.generator.set_state(draws)
        return mine

    def own(self, context: EventContext, layer: int, span: RowSpan) -> Rows:
        """The subject's rows of a layer, in fp64, and the layer's hidden rows."""
        found = {place.component: rows(context.subject, place, span).double()
                 for place in context.subject.places if (place.stage, place.layer) == ("trunk", layer)}  # fmt: skip
        before = Place("trunk", layer - 1, "hidden") if layer else Place("trunk", STAGE_LEVEL, "embedding")
        return {**found, "before": rows(context.subject, before, span).double()}

    def at_place(self, place: Place, change: Callable[[Scenario, Rows, RowSpan], torch.Tensor]) -> Comparison:
        """The first finding, once the longest request's rows of a place are what `change` makes of them."""
        context = self.packed(second=place.component in ("attended", "core", "query", "mixed"))
        span = max(row_spans(context, "trunk"), key=lambda each: each.count)
        wrong = change(self, self.own(context, max(place.layer, 0), span), span)

        def put(tensor: torch.Tensor) -> torch.Tensor:
            tensor[span.begin : span.begin + span.count] = wrong.to(tensor)
            return tensor

        found = self.said(m.with_rows(context, place, put))
        assert found, "nothing was found"
        assert found[0].place == place
        return found[0]

    def packed(self, *, second: bool) -> EventContext:
        """A forward with rows of two requests, several of one of them. second: whether it follows other forwards"""
        return next(
            context for context in self.contexts if isinstance(context.event, Forward)
            and len(spans := row_spans(context, "trunk")) > 1
            and (most := max(spans, key=lambda span: span.count)).count > 3 and bool(most.start) == second
        )


def with_row(x: torch.Tensor, row: Any, other: Any) -> torch.Tensor:
    changed = x.clone()
    changed[row] = other
    return changed
