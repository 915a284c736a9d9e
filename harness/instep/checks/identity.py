"""T0: who owns what, how long everything is, which words say the same thing. Exact, and against the trace alone.

Leaves out: contents of memory (`bytes.py`) and of places (`labels.py` where they are exact, T2 and T3 elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from instep_reference.contract.engine import Commit, Committed, Draft, Drafted, Forward, Forwarded, Load, Save
from instep_reference.contract.place import AFTER_LAYERS, Place, draft_stage

from ..observe.moment import Moment
from ..observe.rows import paths, rows, shares
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

    def __call__(self, moment: Moment) -> Iterator[Comparison]:
        yield from self._rooms(moment)
        yield from self._standings(moment)
        yield from self._row_counts(moment)
        self._propose(moment)
        if isinstance(moment.event, Draft):
            yield from self._drafted(moment, moment.event)
        if isinstance(moment.event, Forward):
            yield from self._forwarded(moment)
        if isinstance(moment.event, Commit):
            yield from self._committed(moment, moment.event)

    def _rooms(self, moment: Moment) -> Iterator[Comparison]:
        expected = moment.expected
        slots, predicted = dict(moment.subject_slots), dict(expected.slots_after)
        yield exact(self, moment, NOWHERE, slots, predicted, "slots are {}")
        for name in sorted(moment.subject_pages.keys() | expected.pages_after.keys()):
            pages, right = tuple(moment.subject_pages.get(name, ())), tuple(expected.pages_after.get(name, ()))
            yield exact(self, moment, NOWHERE, pages, right, "pages are {}", name)
        yield exact(self, moment, LENGTH, moment.subject.wish, moment.truth.wish, "next_num_steps wishes {}")

    def _standings(self, moment: Moment) -> Iterator[Comparison]:
        for name in moment.expected.slots_after:
            state = moment.subject.after.get(name)
            length, root = (None, None) if state is None else (state.length, state.root)
            yield exact(self, moment, LENGTH, length, moment.expected.lengths_after[name], "length is {}", name)
            yield exact(self, moment, ROOT, root, moment.expected.roots_after[name], "root is {}", name)

    def _row_counts(self, moment: Moment) -> Iterator[Comparison]:
        """Every place that the truth has, the subject has too, with the rows that the trace gives it."""
        for place, tensor in moment.truth.places.items():
            if not tensor.shape[0]:
                continue
            right = sum(share.span(place)[1] for share in shares(moment, place.stage))
            found = moment.subject.places.get(place)
            yield exact(self, moment, place, 0 if found is None else found.shape[0], right, "has {} rows")

    def _drafted(self, moment: Moment, event: Draft) -> Iterator[Comparison]:
        answer = moment.subject.answer
        assert isinstance(answer, Drafted)
        drafts, own = answer.drafts.tolist(), answer.own.tolist()
        for row, name in enumerate(event.requests):
            right = own[row] if event.picks is None else list(event.picks[row])
            yield exact(self, moment, DRAFT_PICK, drafts[row], right, "drafts are {}", name)
            for number, (place, said) in enumerate(self._heads(moment, row, name, len(own[row]))):
                yield exact(self, moment, place, own[row][number], said, f"own draft {number + 1} is {{}}", name)

    def _heads(self, moment: Moment, row: int, name: str, drafts: int) -> Iterator[tuple[Place, int]]:
        """What this side's head said for each draft, and where; nothing for a model without one, draft 1 for a tree."""
        before = moment.subject.before.get(name)
        if before is None or before.proposal is None or not drafts:
            return
        yield DRAFT_PICK, before.proposal
        for step in range(1, drafts if getattr(moment.event, "parents", None) is None else 1):
            chained = Place(f"chain.{step}", AFTER_LAYERS, "pick")
            picks = moment.subject.places.get(chained)
            if picks is not None and len(picks) > row:
                yield chained, int(picks[row])
            elif len(self.proposed.get(name, ())) > step:
                yield Place(draft_stage(step), AFTER_LAYERS, "pick"), self.proposed[name][step]

    def _propose(self, moment: Moment) -> None:
        """Remember what every MTP layer picked behind the root."""
        event = moment.event
        if isinstance(event, Save):
            self.saved[event.name] = self.proposed.get(event.request, [])
        elif isinstance(event, Load):
            self.proposed[event.request] = self.saved.get(event.name, [])
        elif isinstance(event, Forward | Commit):
            for share in shares(moment, "extend"):
                self.proposed[share.request] = []
            for place in sorted(moment.subject.places, key=Place.order):
                if place.component == "pick" and place.stage.startswith("extend"):
                    for share in shares(moment, place.stage):
                        picks = rows(moment.subject, place, share)
                        if picks is not None and len(picks) == 1:
                            self.proposed[share.request].append(int(picks[0]))

    def _forwarded(self, moment: Moment) -> Iterator[Comparison]:
        answer = moment.subject.answer
        assert isinstance(answer, Forwarded)
        seen = moment.subject.places.get(PICK)
        picks = [] if seen is None else seen.tolist()
        for share in shares(moment, "trunk"):
            name, own = share.request, answer.own.get(share.request)
            said = [] if own is None else own.tolist()
            begin, count = share.span(PICK)
            right = picks[begin : begin + count]
            yield exact(self, moment, PICK, said, right, "own choices are {}", name)
            if share.kind == "verify":
                tokens = moment.expected.windows[name]
                self.verified[name] = Window(tokens, moment.expected.parents[name], said)
            elif share.asked:
                root = moment.expected.roots_after[name]
                yield exact(self, moment, PICK, answer.roots.get(name), root, "answers the root {}", name)

    def _committed(self, moment: Moment, event: Commit) -> Iterator[Comparison]:
        answer = moment.subject.answer
        assert isinstance(answer, Committed)
        for row, (name, path) in enumerate(zip(event.requests, paths(moment, event), strict=True)):
            nodes, index = [0, *path.nodes], answer.accept_index[row].tolist()
            for field, found, right in (
                ("num_correct_drafts", int(answer.num_correct_drafts[row]), len(path.nodes)),
                ("accept_lens", int(answer.accept_lens[row]), len(nodes)),
                ("accept_index", index, nodes + [-1] * (len(index) - len(nodes))),
                ("last_correct_step_indices", int(answer.last_correct_step_indices[row]), nodes[-1]),
                ("bonus", int(answer.bonus[row]), path.bonus),
            ):
                yield exact(self, moment, PICK, found, right, f"{field} is {{}}", name)
            window = self.verified.pop(name, None)
            if window is not None and len(window.picks) == len(window.tokens):
                own = int(answer.own_num_correct_drafts[row]), int(answer.own_bonus[row])
                right_own = greedy(window)
                yield exact(self, moment, PICK, own, right_own, "own (accepted drafts, bonus) are {}", name)


def greedy(window: Window) -> tuple[int, int]:
    """(accepted drafts, bonus) that follow from the picks: go down while a child is what the target picked."""
    at = accepted = 0
    while True:
        children = [node for node, parent in enumerate(window.parents) if parent == at]
        agreeing = [node for node in children if window.tokens[node] == window.picks[at]]
        if not agreeing:
            return accepted, window.picks[at]
        at, accepted = agreeing[0], accepted + 1
