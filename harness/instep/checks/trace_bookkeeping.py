"""T0: owners, lengths, roots, rows and answers are exactly those of the trace.

Leaves out: contents of memory (`unchanged_bytes.py`) and of places (`exact_labels.py` for labels, T2 and T3 for
numbers).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import moves, restores, tracked, tracks
from instep_reference.contract.place_names import AFTER_LAYERS, Place, draft_stage

from ..finding_problem import Explained, Problem
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext, LastForward
from ..watch.rows_by_request import paths, row_spans
from .check_interface import NOWHERE, exact, in_batch
from .prefix_findings import wrong_slots, wrong_step
from .transfer_findings import BEFORE, is_copy_of_before

LENGTH = Place("trunk", AFTER_LAYERS, "length")
ROOT = Place("trunk", AFTER_LAYERS, "root")
PICK = Place("trunk", AFTER_LAYERS, "pick")
Pages = Mapping[str, Sequence[int]]
BLOCK_PICK = Place("block", AFTER_LAYERS, "pick")  # of the root, which is not used, and of every draft
DRAFT_PICK = Place("extend", AFTER_LAYERS, "pick")  # of draft 1; other drafts have places of their steps


class Identity:
    """Compare slots, pages, lengths, roots, rows, answers and requested step counts with trace and reference."""

    name = "identity"
    tier = Tier.IDENTITY

    def __init__(self) -> None:
        self.known: dict[str, tuple[int, ...]] = {}  # pages by request, for an engine that orders them itself
        self.caps: dict[str, int] = {}  # of the last commit, in batch order

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        yield from self._rooms(context)
        yield from self._row_counts(context)
        if not context.shown.whole:
            return  # the harness made these values itself
        subject, truth = context.subject, context.truth
        yield exact(
            self, context, LENGTH, subject.wanted_num_steps, truth.wanted_num_steps, "next_num_steps requests {}"
        )
        yield from self._standings(context)
        yield from self._tracked(context)
        if isinstance(context.event, e.Draft):
            yield from self._drafted(context, context.event)
        if isinstance(context.event, e.Forward):
            yield from self._forwarded(context)
        if isinstance(context.event, e.Commit):
            yield from self._committed(context, context.event)
            self.caps = dict(zip(context.event.requests, context.event.caps, strict=False))

    def _rooms(self, context: EventContext) -> Iterator[Comparison]:
        expected, hidden = context.expected, context.shown.hidden
        slots, predicted = dict(context.subject_slots), dict(expected.slots_after)
        predicted = {name: slot for name, slot in predicted.items() if name in slots or _in_it(context, name)}
        owned: Pages = {name: mine for name, mine in context.subject_pages.items()
                        if context.shown.exact or name not in hidden or _in_it(context, name)}  # fmt: skip
        owns: Pages = {name: mine for name, mine in expected.pages_after.items()
                       if name in owned or _in_it(context, name)}  # fmt: skip
        if not context.shown.exact:
            yield from self._moved(context)
            slots, predicted = _renamed(slots, predicted)
            owned, owns = _shared(owned, owns)
        if context.shown.has("slots"):
            yield exact(self, context, NOWHERE, slots, predicted, "slots are {}")
        for name in sorted(owned.keys() | owns.keys()) if context.shown.has("pages") else ():
            pages, right = tuple(owned.get(name, ())), tuple(owns.get(name, ()))
            result = exact(self, context, NOWHERE, pages, right, "pages are {}", name)
            before = tuple(expected.pages_before.get(name, ()))
            if not result.agrees and is_copy_of_before(context, name):
                known = Explained.one_of([BEFORE.known(getattr(context.event, "name", ""))])
                result = replace(result, problem=replace(result.problem or Problem("differs"), mistake=known))
            elif pages == before and right == before[: len(right)]:
                result = _because(result, "it keeps the pages after its length, which this event gives back")
            elif right and pages == right[: len(pages)]:
                result = _because(result, "it has no pages for the last positions that it may use")
            yield result

    def _moved(self, context: EventContext) -> Iterator[Comparison]:
        """For an engine that orders pages itself: a live request keeps its pages and only gains further ones."""
        known, self.known = self.known, {}
        for name, pages in context.subject_pages.items():
            if _in_it(context, name):
                self.known[name] = tuple(pages)
            before = known.get(name)
            if before and restores(context.event) != name:
                shared = min(len(before), len(pages))
                yield exact(self, context, NOWHERE, tuple(pages[:shared]), before[:shared],
                            "pages are {}: a page moved in the table of a live request", name)  # fmt: skip

    def _standings(self, context: EventContext) -> Iterator[Comparison]:
        expected, after = context.expected, context.subject.after
        lengths, roots = ({name: right[name] for name in expected.slots_after}
                          for right in (expected.lengths_after, expected.roots_after))  # fmt: skip
        found = {name: getattr(after.get(name), "length", None) for name in lengths}
        before = {name: state.length for name, state in context.subject.before.items()}
        mistake = ""
        if isinstance(event := context.event, e.Commit) and event.caps:
            accepted = [(found.get(name) or 0) - before.get(name, 0) - 1 for name in event.requests]
            whole = [len(path.nodes) for path in event.accepted or ()] or accepted
            mistake = self._cap_mistake(event, accepted, whole)
        for result in in_batch(self, context, LENGTH, found, lengths, "length is {}", before):
            yield _because(result, mistake)
        found = {name: getattr(after.get(name), "root", None) for name in roots}
        yield from in_batch(self, context, ROOT, found, roots, "root is {}")

    def _tracked(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        """Compare the tracked steps of windows, and the token count of a prefix, in the answer and in the copy."""
        if isinstance(context.event, e.Commit) and context.expected.track_interval is not None:
            yield from self._steps(context, context.event, context.expected.track_interval)
        if (slots := context.expected.track_slots) is not None and context.log.copies is not None:
            mine = context.log.copies.track_slots
            if mine is None:
                yield Skipped(self.name, context.index, "this engine does not show the slots of its prefixes")
            else:
                result = exact(self, context, NOWHERE, dict(mine), dict(slots), "track slots are {}")
                known = wrong_slots(mine, slots) if result.problem is not None else None
                yield result if known is None else replace(
                    result, problem=Problem.of(result.problem.clause if result.problem else "", known=known))
        due, answered = context.expected.prefixes, tracked(context.event, context.subject.answer)
        for under, name in tracks(context.event).items():
            kept, reached = context.subject.tracked.get(under), due.get(under)
            if isinstance(context.event, e.Commit) and name not in context.expected.steps_to_track:
                reached = None  # no multiple, whatever is kept under the name from before
            for found, says in ((answered.get(under), "answers a prefix of {} tokens"),
                                (None if kept is None else kept.length, "keeps a prefix of {} tokens")):  # fmt: skip
                yield exact(self, context, LENGTH, found, reached, says, name)
        for under, kept in context.subject.tracked.items() if moves(context.event) else ():
            yield exact(self, context, LENGTH, kept.length, due.get(under), f'"{under}" is a prefix of {{}} tokens')

    def _steps(self, context: EventContext, event: e.Commit, every: int) -> Iterator[Comparison | Skipped]:
        """Compare the node of each window after which a prefix was taken."""
        steps = getattr(context.subject.answer, "steps_to_track", None)
        if steps is None:
            yield Skipped(self.name, context.index, "this engine does not show the tracked steps of its windows")
            return
        for row, (name, path) in enumerate(zip(event.requests, paths(context, event), strict=True)):
            found, right = int(steps[row]), context.expected.steps_to_track.get(name, -1)
            result = exact(self, context, LENGTH, found, right, "steps_to_track is {}", name)
            if result.problem is not None:
                nodes, tokens = (0, *path.nodes), len(context.expected.windows.get(name, ()))
                before = context.expected.lengths_after[name] - len(nodes)
                known = wrong_step(found, right, nodes, before, tokens, every)
                result = replace(result, problem=Problem.of(result.problem.clause, known=known))
            yield result

    def _row_counts(self, context: EventContext) -> Iterator[Comparison]:
        """Compare the row count of every place that the truth has."""
        for place, tensor in context.truth.places.items():
            if not (tensor.shape[0] and context.shown.place(place)):
                continue
            if not context.shown.whole and (place.layer == AFTER_LAYERS or not context.shown.has("watch")):
                continue  # packed by the harness
            right = sum(span.at(place)[1] for span in row_spans(context, place.stage))
            found = context.subject.places.get(place)
            yield exact(self, context, place, 0 if found is None else found.shape[0], right, "has {} rows")

    def _drafted(self, context: EventContext, event: e.Draft) -> Iterator[Comparison | Skipped]:
        answer = context.subject.answer
        assert isinstance(answer, e.Drafted)
        drafts, own = answer.drafts.tolist(), answer.own.tolist()
        if context.subject.instead:
            yield Skipped(self.name, context.index, "the window has the recorded drafts, as its own drafts differ")
        headless = isinstance(context.truth.answer, e.Drafted) and bool((context.truth.answer.own < 0).all())
        for row, name in enumerate(event.requests):
            right = own[row] if event.picks is None else list(event.picks[row])
            right = right + [-1] * (len(drafts[row]) - len(right))  # a smaller tree than others of the batch
            yield exact(self, context, DRAFT_PICK, drafts[row], right, "drafts are {}", name)
            if headless:  # drafts come from outside, so no side has its own
                yield exact(self, context, DRAFT_PICK, own[row], [-1] * len(own[row]), "own drafts are {}", name)
            if context.expected.topk is not None:
                continue  # `grown_trees.py`
            for number, place, said in self._heads(context, row, name, len(own[row])):
                yield exact(self, context, place, own[row][number], said, f"own draft {number + 1} is {{}}", name)

    def _heads(self, context: EventContext, row: int, name: str, drafts: int) -> Iterator[tuple[int, Place, int]]:
        """The draft head's picks: number of the draft from 0, place, token. Empty for a model without a draft head.

        The head picks a draft in the step of the draft's parent, which in a chain is the previous step.
        """
        before = context.subject.before.get(name)
        if before is not None and before.block_keys:
            picks = context.subject.places.get(BLOCK_PICK)
            span = next(span for span in row_spans(context, BLOCK_PICK.stage) if span.request == name)
            mine = [] if picks is None else picks[span.begin : span.begin + span.count].tolist()[1:]
            yield from ((number, BLOCK_PICK, pick) for number, pick in enumerate(mine[:drafts]))
            return
        if before is None or before.proposal is None or not drafts:
            return
        parents = context.expected.parents[name][1:]
        for number, step in enumerate(parents[:drafts]):
            chained = Place(f"chain.{step}", AFTER_LAYERS, "pick")
            picks = context.subject.places.get(chained)
            at = next((n for n, span in enumerate(row_spans(context, chained.stage)) if span.request == name), row)
            if not step:
                yield number, DRAFT_PICK, before.proposal
            elif picks is not None and len(picks) > at:
                yield number, chained, int(picks[at])
            elif len(proposed := context.earlier.proposed.get(name, ())) > step:
                yield number, Place(draft_stage(step), AFTER_LAYERS, "pick"), proposed[step]

    def _forwarded(self, context: EventContext) -> Iterator[Comparison]:
        answer = context.subject.answer
        assert isinstance(answer, e.Forwarded)
        seen = context.subject.places.get(PICK)
        picks = [] if seen is None else seen.tolist()
        for span in row_spans(context, "trunk"):
            name, own = span.request, answer.own.get(span.request)
            said = [] if own is None else own.tolist()
            begin, count = span.at(PICK)
            right = picks[begin : begin + count]
            yield exact(self, context, PICK, said, right, "own choices are {}", name)
            if span.kind != "verify" and span.logit_rows:
                root = context.expected.roots_after[name]
                yield exact(self, context, PICK, answer.roots.get(name), root, "answers the root {}", name)

    def _committed(self, context: EventContext, event: e.Commit) -> Iterator[Comparison]:
        answer = context.subject.answer
        assert isinstance(answer, e.Committed)
        stopped = self._cap_mistake(event, answer.num_correct_drafts.tolist(), [
            len(path.nodes) for path in event.accepted or ()]) if event.caps and event.accepted else ""
        for row, (name, path) in enumerate(zip(event.requests, paths(context, event), strict=True)):
            nodes, index = [0, *path.nodes], answer.accept_index[row].tolist()
            for field, found, right in (
                ("num_correct_drafts", int(answer.num_correct_drafts[row]), len(path.nodes)),
                ("accept_lens", int(answer.accept_lens[row]), len(nodes)),
                ("accept_index", index, nodes + [-1] * (len(index) - len(nodes))),
                ("last_correct_step_indices", int(answer.last_correct_step_indices[row]), nodes[-1]),
                ("bonus", int(answer.bonus[row]), path.bonus),
            ):
                yield _because(exact(self, context, PICK, found, right, f"{field} is {{}}", name), stopped)
        caps = event.caps or (None,) * len(event.requests)
        due = {name: pair for name, cap in zip(event.requests, caps, strict=True)
               if (pair := _own(context.earlier.forward, name, cap)) is not None}  # fmt: skip
        pairs = zip(answer.own_num_correct_drafts.tolist(), answer.own_bonus.tolist(), strict=True)
        own = dict(zip(event.requests, pairs, strict=True))
        forward, mistake = context.earlier.forward, ""
        if event.caps and due.keys() == set(event.requests):
            whole = [pair for name in event.requests if (pair := _own(forward, name, None)) is not None]
            mistake = self._cap_mistake(event, [own[name][0] for name in event.requests], [pair[0] for pair in whole])
            if not mistake and [own[name] for name in event.requests] == [
                (due[name][0], bonus) for name, (_, bonus) in zip(event.requests, whole, strict=True)
            ]:
                mistake = "the bonus is the choice at the node that would be accepted without the cap"
        results = in_batch(self, context, PICK, own, due, "own (accepted drafts, bonus) are {}")
        for name, result in zip(due, results, strict=True):
            drafts, right = own[name][0], due[name][0]
            more = not mistake and forward is not None and drafts > right and drafts > _longest(forward, name)
            yield _because(result, "it accepts a draft that the target did not choose" if more else mistake)

    def _cap_mistake(self, event: e.Commit, found: Sequence[int], whole: Sequence[int]) -> str:
        """The wrong caps at which all requests of a commit stopped; empty: none that is known, or the right ones.

        Caps that are equal in this batch have the first of their descriptions.

        found: the drafts that were accepted; whole: those that would be accepted without caps
        """
        caps, rows = list(event.caps), list(self.caps.values())
        wrong: dict[str, list[int]] = {
            "": caps,
            "its cap is ignored": list(whole),
            "its cap counts the bonus as a draft": [cap - 1 for cap in caps],
            "its cap is one too high": [cap + 1 for cap in caps],
            "its cap of 0 is taken for no cap": [cap or max(whole) for cap in caps],
            "it has the cap of the next row": caps[1:] + caps[:1],
            "it has the cap of the row before": caps[-1:] + caps[:-1],
            "the caps are in the reverse order": caps[::-1],
            "all requests have the cap of the first row": [caps[0]] * len(caps),
            "all requests have the highest cap of the batch": [max(caps)] * len(caps),
            "all requests have the lowest cap of the batch": [min(caps)] * len(caps),
            "it has the cap that its row had at the commit before": [*rows, *caps[len(rows) :]][: len(caps)],
            "it has the cap that it had at the commit before":
                [self.caps.get(name, cap) for name, cap in zip(event.requests, caps, strict=True)],
        }
        fitting = {tuple(at): mistake for mistake, at in reversed(wrong.items())
                   if list(found) == [min(n, max(cap, 0)) for n, cap in zip(whole, at, strict=True)]}  # fmt: skip
        return "" if "" in fitting.values() else ", or ".join(reversed(fitting.values()))


def _because(result: Comparison, mistake: str) -> Comparison:
    """Add the mistake that accounts for a difference. A difference that is identified already stays as it is."""
    problem = result.problem
    if not mistake or problem is None or problem.code == "identified":
        return result
    return replace(result, problem=Problem("identified", f"{problem.clause}: {mistake}"))


def _in_it(context: EventContext, name: str) -> bool:
    """Whether the engine itself must have the request: it has heard of the request and still serves it."""
    shown = context.shown
    return shown.memory(name) or (name in context.expected.flying and name not in shown.gone)


def _renamed(slots: Mapping[str, int], predicted: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Both maps up to renaming: each slot becomes the number of its first owner in the order of names."""
    first: dict[int, int] = {}
    found = {name: first.setdefault(slots[name], number) for number, name in enumerate(sorted(slots))}
    return found, {name: number for number, name in enumerate(sorted(predicted))}


def _shared(pages: Pages, predicted: Pages) -> tuple[Pages, Pages]:
    """Pages with more than one owner, or twice in one request; in the trace there are none."""
    owners = Counter(page for mine in pages.values() for page in mine)
    shared: Pages = {name: [page for page in mine if owners[page] > 1 or name not in predicted]
                     for name, mine in pages.items()}  # fmt: skip
    none = {name: mine for name, mine in predicted.items() if mine and name not in pages}
    return shared, {**{name: [] for name in shared}, **none}


def _own(forward: LastForward | None, name: str, cap: int | None) -> tuple[int, int] | None:
    """(accepted drafts, bonus) of a window in flight, from the subject's own picks and the cap."""
    answer = None if forward is None else forward.subject.answer
    if forward is None or not isinstance(answer, e.Forwarded) or name not in forward.windows:
        return None
    own, tokens = answer.own.get(name), forward.windows[name]
    picks = [] if own is None else own.tolist()
    return greedy(tokens, forward.parents[name], picks, cap) if len(picks) == len(tokens) else None


def _longest(forward: LastForward, name: str) -> int:
    """Count the drafts on the longest path of a window that the subject's own picks choose, without a cap."""
    answer, tokens = forward.subject.answer, forward.windows[name]
    assert isinstance(answer, e.Forwarded), "as a path is due"
    picks, depths = answer.own[name].tolist(), {0: 0}
    for node, parent in enumerate(forward.parents[name]):
        if parent in depths and tokens[node] == picks[parent]:
            depths[node] = depths[parent] + 1
    return max(depths.values())


def greedy(
    tokens: Sequence[int], parents: Sequence[int], picks: Sequence[int], cap: int | None = None
) -> tuple[int, int]:
    """(accepted drafts, bonus) from the picks: descend while a child is the token that the target picked."""
    at = accepted = 0
    while True:
        agreeing = [node for node, parent in enumerate(parents) if parent == at and tokens[node] == picks[at]]
        if not agreeing or accepted == cap:
            return accepted, picks[at]
        at, accepted = agreeing[0], accepted + 1
