"""T0: who owns what, how long everything is, which words say the same thing. Exact, and against the trace alone.

Leaves out: contents of memory (`bytes.py`) and of places (`labels.py` where they are exact, T2 and T3 elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from instep_reference.contract.engine import Commit, Committed, Draft, Drafted, Forward, Forwarded, Load, Save
from instep_reference.contract.place import AFTER_LAYERS, Place, draft_stage

from ..observe.context import EventContext
from ..observe.rows import paths, row_spans, rows
from ..verdict import Comparison, Tier
from .base import NOWHERE, exact

LENGTH = Place("trunk", AFTER_LAYERS, "length")
ROOT = Place("trunk", AFTER_LAYERS, "root")
PICK = Place("trunk", AFTER_LAYERS, "pick")
DRAFT_PICK = Place("extend", AFTER_LAYERS, "pick")  # of draft 1; the others stand at their steps


@dataclass(frozen=True)
class Window:
    """What was verified: tokens, parents and this side's own pick, per node."""

    tokens: Sequence[int]
    parents: Sequence[int]
    picks: Sequence[int]


class Identity:
    """Slots, pages, lengths, roots, rows, answers and wishes are what the trace, or the other side, says."""

    name = "identity"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        self.verified: dict[str, Window] = {}
        self.proposed: dict[str, list[int]] = {}  # by the draft extend, one per MTP layer
        self.saved: dict[str, list[int]] = {}

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        yield from self._rooms(context)
        yield from self._standings(context)
        yield from self._row_counts(context)
        self._propose(context)
        if isinstance(context.event, Draft):
            yield from self._drafted(context, context.event)
        if isinstance(context.event, Forward):
            yield from self._forwarded(context)
        if isinstance(context.event, Commit):
            yield from self._committed(context, context.event)

    def _rooms(self, context: EventContext) -> Iterator[Comparison]:
        expected = context.expected
        slots, predicted = dict(context.subject_slots), dict(expected.slots_after)
        yield exact(self, context, NOWHERE, slots, predicted, "slots are {}")
        for name in sorted(context.subject_pages.keys() | expected.pages_after.keys()):
            pages, right = tuple(context.subject_pages.get(name, ())), tuple(expected.pages_after.get(name, ()))
            yield exact(self, context, NOWHERE, pages, right, "pages are {}", name)
        subject, truth = context.subject, context.truth
        yield exact(
            self, context, LENGTH, subject.wanted_num_steps, truth.wanted_num_steps, "next_num_steps wishes {}"
        )

    def _standings(self, context: EventContext) -> Iterator[Comparison]:
        for name in context.expected.slots_after:
            state = context.subject.after.get(name)
            length, root = (None, None) if state is None else (state.length, state.root)
            yield exact(self, context, LENGTH, length, context.expected.lengths_after[name], "length is {}", name)
            yield exact(self, context, ROOT, root, context.expected.roots_after[name], "root is {}", name)

    def _row_counts(self, context: EventContext) -> Iterator[Comparison]:
        """Every place that the truth has, the subject has too, with the rows that the trace gives it."""
        for place, tensor in context.truth.places.items():
            if not tensor.shape[0]:
                continue
            right = sum(span.at(place)[1] for span in row_spans(context, place.stage))
            found = context.subject.places.get(place)
            yield exact(self, context, place, 0 if found is None else found.shape[0], right, "has {} rows")

    def _drafted(self, context: EventContext, event: Draft) -> Iterator[Comparison]:
        answer = context.subject.answer
        assert isinstance(answer, Drafted)
        drafts, own = answer.drafts.tolist(), answer.own.tolist()
        for row, name in enumerate(event.requests):
            right = own[row] if event.picks is None else list(event.picks[row])
            yield exact(self, context, DRAFT_PICK, drafts[row], right, "drafts are {}", name)
            for number, (place, said) in enumerate(self._heads(context, row, name, len(own[row]))):
                yield exact(self, context, place, own[row][number], said, f"own draft {number + 1} is {{}}", name)

    def _heads(self, context: EventContext, row: int, name: str, drafts: int) -> Iterator[tuple[Place, int]]:
        """What this side's head said for each draft, and where; nothing for a model without one, draft 1 for a tree."""
        before = context.subject.before.get(name)
        if before is None or before.proposal is None or not drafts:
            return
        yield DRAFT_PICK, before.proposal
        for step in range(1, drafts if getattr(context.event, "parents", None) is None else 1):
            chained = Place(f"chain.{step}", AFTER_LAYERS, "pick")
            picks = context.subject.places.get(chained)
            if picks is not None and len(picks) > row:
                yield chained, int(picks[row])
            elif len(self.proposed.get(name, ())) > step:
                yield Place(draft_stage(step), AFTER_LAYERS, "pick"), self.proposed[name][step]

    def _propose(self, context: EventContext) -> None:
        """Remember what every MTP layer picked behind the root."""
        event = context.event
        if isinstance(event, Save):
            self.saved[event.name] = self.proposed.get(event.request, [])
        elif isinstance(event, Load):
            self.proposed[event.request] = self.saved.get(event.name, [])
        elif isinstance(event, Forward | Commit):
            for span in row_spans(context, "extend"):
                self.proposed[span.request] = []
            for place in sorted(context.subject.places, key=Place.order):
                if place.component == "pick" and place.stage.startswith("extend"):
                    for span in row_spans(context, place.stage):
                        picks = rows(context.subject, place, span)
                        if picks is not None and len(picks) == 1:
                            self.proposed[span.request].append(int(picks[0]))

    def _forwarded(self, context: EventContext) -> Iterator[Comparison]:
        answer = context.subject.answer
        assert isinstance(answer, Forwarded)
        seen = context.subject.places.get(PICK)
        picks = [] if seen is None else seen.tolist()
        for span in row_spans(context, "trunk"):
            name, own = span.request, answer.own.get(span.request)
            said = [] if own is None else own.tolist()
            begin, count = span.at(PICK)
            right = picks[begin : begin + count]
            yield exact(self, context, PICK, said, right, "own choices are {}", name)
            if span.kind == "verify":
                tokens = context.expected.windows[name]
                self.verified[name] = Window(tokens, context.expected.parents[name], said)
            elif span.logit_rows:
                root = context.expected.roots_after[name]
                yield exact(self, context, PICK, answer.roots.get(name), root, "answers the root {}", name)

    def _committed(self, context: EventContext, event: Commit) -> Iterator[Comparison]:
        answer = context.subject.answer
        assert isinstance(answer, Committed)
        for row, (name, path) in enumerate(zip(event.requests, paths(context, event), strict=True)):
            nodes, index = [0, *path.nodes], answer.accept_index[row].tolist()
            for field, found, right in (
                ("num_correct_drafts", int(answer.num_correct_drafts[row]), len(path.nodes)),
                ("accept_lens", int(answer.accept_lens[row]), len(nodes)),
                ("accept_index", index, nodes + [-1] * (len(index) - len(nodes))),
                ("last_correct_step_indices", int(answer.last_correct_step_indices[row]), nodes[-1]),
                ("bonus", int(answer.bonus[row]), path.bonus),
            ):
                yield exact(self, context, PICK, found, right, f"{field} is {{}}", name)
            window = self.verified.pop(name, None)
            if window is not None and len(window.picks) == len(window.tokens):
                own = int(answer.own_num_correct_drafts[row]), int(answer.own_bonus[row])
                right_own = greedy(window)
                yield exact(self, context, PICK, own, right_own, "own (accepted drafts, bonus) are {}", name)


def greedy(window: Window) -> tuple[int, int]:
    """(accepted drafts, bonus) that follow from the picks: go down while a child is what the target picked."""
    at = accepted = 0
    while True:
        children = [node for node, parent in enumerate(window.parents) if parent == at]
        agreeing = [node for node in children if window.tokens[node] == window.picks[at]]
        if not agreeing:
            return accepted, window.picks[at]
        at, accepted = agreeing[0], accepted + 1
