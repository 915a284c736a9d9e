"""T0: every op call keeps its contract, and every row of a forward is served once, by the right form of its op.

The trace determines the rows, their requests and their memory. Calls inside a CUDA graph cannot be judged during its
replay, which is reported. Leaves out: how calls are judged (`watch/op_calls.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from instep_reference.contract.event_facts import facts
from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import RECURRENCES, SHORT_CONV

from ..finding_problem import Problem
from ..trace.tree_shape import lines
from ..verdict import Comparison, Skipped, Tier
from ..watch.event_context import EventContext, RowSpan
from ..watch.event_log import EventLog, Served
from ..watch.grown_tree import grown_of
from ..watch.op_calls import linked, seen
from ..watch.rows_by_request import row_spans
from .check_interface import NOWHERE, TellsOnce, compared, counted, op_at

LATENTS = "attend_latents"  # attention of layers that store latents


class Contracts(TellsOnce):
    """Shapes, dtypes, strides, layouts and index ranges of every op call; and which op served each row."""

    name = "contracts"
    tier = Tier.IDENTITY

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        log = context.log
        if not log.ops:
            yield from self.once(context, "instep does not see the op calls of this engine")
            return
        runs = bool(facts(context.event).batch)
        if not log.calls:
            if runs and log.replays:
                yield Skipped(self.name, context.index, "op calls inside a CUDA graph are not judged; run without "
                              "--graphs to judge them")  # fmt: skip
            elif runs:
                yield self._comparison(context, NOWHERE, 0, "no op was called and no graph was replayed", None)
            return
        yield from broken(log, context.index, context.kind)
        if not log.broken:
            yield self._comparison(context, NOWHERE, log.tensors, "", None, log.calls)
        if not log.captured:  # calls before a capture serve no real rows
            yield from self._served(context)
        elif runs:
            yield Skipped(self.name, context.index, "a graph was captured here, so rows of its calls are not judged")

    def _served(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        """Compare the served rows per op and place with the rows of the trace."""
        found: dict[tuple[str, Place], list[Served]] = {}
        for served in context.log.served:
            found.setdefault((served.op, served.place), []).append(served)
        called = [op for op, _ in found if op in RECURRENCES]
        short = any(place.component == "in_gate" for place in context.truth.places)
        convs = [op for op, at in found if at.component == "mixed"]
        ops = {"mixed": [*convs, SHORT_CONV.name if short else "conv"][0],
               "core": "fused_gdn" if context.shown.inside else [*called, *RECURRENCES][0]}
        latents = {_source(at.stage) for op, at in found if op == LATENTS}
        prompts = any(span.kind == "prefill" for span in row_spans(context, "trunk"))
        hidden = context.log.replays and not prompts and all(at.stage != "trunk" for _, at in found)
        for place in context.truth.places:
            attends = LATENTS if _source(place.stage) in latents else "attend"
            op = attends if place.component == "attended" else ops.get(place.component)
            if op is None or (op != attends and place.stage != "trunk"):
                continue
            if context.stages is not None and context.stages.stage_of(place) not in context.stages.here:
                continue  # of a pipeline stage in another process, which judges its own calls
            due = _due(context, op, place)
            if context.group is not None:  # the rows of one replica after those of another
                owners = context.group.owners
                due.sort(key=lambda pair: owners[pair[0].request])
            shown = any((name, at.stage) == (op, place.stage) for name, at in found)
            if due and not shown and (hidden or (op == attends and context.log.replays)):
                # A real graph hides its calls, with a prompt those of segments; the emulator shows them.
                what, option = "attention" if op == attends else op, "prompt-" * prompts
                yield Skipped(self.name, context.index, f"{what} inside a CUDA graph is not judged; run without "
                              f"--{option}graphs to judge it")  # fmt: skip
                continue
            if due:
                rows = sorted(found.get((op, place), []), key=lambda served: (served.part, served.begin))
                yield from self._matched(context, op, place, due, rows)

    def _matched(
        self, context: EventContext, op: str, place: Place, due: list[tuple[RowSpan, Served]], rows: list[Served]
    ) -> Iterator[Comparison]:
        right, given = ([(one.form, one.units, one.count, one.before, one.branches) for one in served]
                        for served in ([served for _, served in due], rows))  # fmt: skip
        total = sum(served.count for _, served in due)
        if right == given:
            yield self._comparison(context, place, total, "", None, len(due))
            return
        for number, (span, served) in enumerate(due):
            if number >= len(rows) or given[number] != right[number]:
                said = _mismatch(span, served, rows[number] if number < len(rows) else None)
                yield self._comparison(context, place, total, f"{op_at(op, place)}: {said}", span.request)
                return
        more = f"a call serves {rows[len(due)].count} rows of unit {rows[len(due)].units} that the trace does not have"
        yield self._comparison(context, place, total, f"{op_at(op, place)}: {more}", None)

    def _comparison(
        self, context: EventContext, place: Place, elements: int, said: str, request: str | None, blocks: int = 1
    ) -> Comparison:
        problem = Problem.of(said, "broken_contract")
        return compared(self, context, place, elements, bool(said), problem, request=request, blocks=blocks)


def _source(stage: str) -> str:
    """The layers that run in a stage: those of the target, of the draft head, or of a block drafter."""
    return stage if stage in ("trunk", "block") else "head"


def broken(log: EventLog, event: int, kind: str) -> list[Comparison]:
    """One comparison per broken clause, also after an event that made the subject raise."""
    found = []
    for clause in dict.fromkeys(log.broken):
        times = log.broken.count(clause)
        said = f"{op_at(clause.op, clause.place)}: {clause.clause}" + (f" ({times} times)" if times > 1 else "")
        place = clause.place or NOWHERE
        found.append(Comparison(
            Contracts.name, Contracts.tier, event, kind, place, elements=1, worst=float(times), allowed=0.0,
            problem=Problem("broken_contract", said),
        ))  # fmt: skip
    return found


def _due(context: EventContext, op: str, place: Place) -> list[tuple[RowSpan, Served]]:
    """The rows of a place in the trace: their requests, and how they must be served."""
    found = []
    stage, _, step = place.stage.partition(".")
    for span in _launched(row_spans(context, place.stage)):
        slot, pages = context.expected.slots_after.get(span.request), context.expected.pages_in_use(span.request)
        if slot is None:
            continue
        tree = context.expected.tree(span.request) if span.kind in ("verify", "draft") else None
        if span.kind == "draft" and context.expected.topk is not None:
            grown = grown_of(context, context.subject, span.request)
            if grown is None or span.nodes[-1] >= len(grown.parents):
                continue
            tree = grown.parents
        if place.component == "attended":
            # The draft head's row of a token has the position before the token, so the root's row is committed already.
            begin = before = span.start  # before: if it is no tree
            steps: Sequence[int] = range(span.count)
            if stage == "chain":
                begin, before, steps = span.start - 1, span.start + int(step) - 1, span.nodes or (int(step),)
            sets = [sum(1 << node for node in lines(tree)[at]) for at in steps] if tree else []
            if stage == "block":  # every row sees the whole block
                sets = [(1 << span.count) - 1] * span.count
            stands = seen(begin, sets) if sets else (before, ())
            served = Served(op, place, "pages", tuple(pages), span.begin, span.count, *stands)
        else:
            form = "chunk" if span.kind == "prefill" else "window"
            branches = linked(tree) if tree else ()
            served = Served(op, place, form, (slot,), span.begin, span.count, 0, branches)
        found.append((span, served))
    return found


def _launched(spans: Sequence[RowSpan]) -> list[RowSpan]:
    """The spans of a stage; the beams of one request, which are rows of one launch, form one span."""
    found = list[RowSpan]()
    for span in spans:
        if span.kind == "draft" and found and found[-1].request == span.request:
            last = found.pop()
            span = replace(last, count=last.count + 1, nodes=last.nodes + span.nodes)
        found.append(span)
    return found


def _mismatch(span: RowSpan, right: Served, found: Served | None) -> str:
    """The first difference, as a sentence."""
    whose = f'the {counted(span.count, "row")} of request "{span.request}" ({span.kind})'
    if found is None:
        return f"no call serves {whose}"
    if found.form != right.form:
        return f"{whose} are served as a {found.form}; {span.kind} rows are a {right.form}"
    if found.units != right.units:
        what = "pages" if right.form == "pages" else "slot"
        return f"{whose} are served with {what} {_units(found)}; the trace has them in {what} {_units(right)}"
    if found.count != right.count:
        return f"{whose} are served as {found.count} rows"
    if found.before == right.before:
        row = next(n for n in range(right.count) if found.branches[n : n + 1] != right.branches[n : n + 1])
        what = "sees positions" if right.form == "pages" else "continues node"
        said = [f"{', '.join(map(str, one.branches[row]))}" if one.branches else "those of a chain"
                for one in (found, right)]  # fmt: skip
        return f"{whose}: row {row} {what} {said[0]}; the trace has {said[1]}"
    return f"{whose} follow {counted(found.before, 'position')}; in the trace they follow {right.before}"


def _units(served: Served) -> str:
    return ", ".join(map(str, served.units))

