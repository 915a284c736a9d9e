"""Extract the timeline of each request from a trace, and turn timelines back into other events with the same tokens.

A rewrite keeps every choice of a request: with any batch, windows or chunks, the same tokens end up at the same
positions. A load is replaced by the steps that led to the loaded state, so every request can be served alone.
Leaves out: running the events (`position_record.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle
from typing import Literal

import msgspec

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import committed_paths, facts, inner_multiples, restores
from instep_reference.contract.sampling import Sampling

from ...trace.file import Trace
from ...trace.header import Header

TOKENS = 24  # tokens after a request's prompt that are decoded one by one


@dataclass(frozen=True)
class RewrittenTrace:
    """Rewritten events, for each the number of its event in the trace, and the header that they need."""

    header: Header
    events: tuple[e.AnyEvent, ...]
    origins: tuple[int, ...]


@dataclass(frozen=True)
class TimelineStep:
    """One step of one request.

    kind     chunk: a prefill of `tokens` prompt tokens; decode: one token; round: draft, verify and commit
    root     the token that follows the step; None: the prompt continues
    drafts   verified drafts of a round; nodes: the accepted ones; parents: those of a tree, None: a chain
    origins  numbers of the trace's events: draft, verify and commit for a round, otherwise one
    anew     whether the chunk replaces a prefix that was prefilled in other chunks, so its bits may differ
    """

    kind: Literal["chunk", "decode", "round", "preempt", "resume"]
    origins: tuple[int, ...]
    tokens: int = 0
    root: int | None = None
    drafts: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    uniforms: tuple[float, ...] = ()
    anew: bool = False

    @property
    def right(self) -> tuple[int, ...]:
        """The accepted drafts."""
        return tuple(self.drafts[node - 1] for node in self.nodes)


@dataclass
class Timeline:
    """The steps of one request since its admission."""

    request: str
    prompt: tuple[int, ...]
    admitted: int
    steps: list[TimelineStep] = field(default_factory=list)
    sampling: Sampling | None = None


Rewrite = Callable[[Timeline], Timeline]


def as_traced(trace: Trace) -> RewrittenTrace:
    """The trace itself."""
    return RewrittenTrace(trace.header, trace.events, tuple(range(len(trace.events))))


def timelines_of(trace: Trace) -> list[Timeline]:
    """The timeline of every request, in order of admission, without rounds that were never committed.

    A name that is admitted again after its end is another request: it is called "name/2".
    """
    live: dict[str, Timeline] = {}
    saved: dict[str, tuple[TimelineStep, ...]] = {}
    drafted: dict[str, tuple[int, tuple[int, ...], tuple[int, ...] | None]] = {}
    verified: dict[str, tuple[int, tuple[float, ...]]] = {}
    found: list[Timeline] = []
    for index, event in enumerate(trace.events):
        request, under = (getattr(event, field, "") for field in ("request", "name"))
        if under and facts(event).copy == "keep":
            saved[under] = tuple(live[request].steps)
        elif under and restores(event):
            away = [step for step in live[request].steps if step.kind in ("preempt", "resume")]
            loaded = [replace(step, origins=(index,) * len(step.origins)) for step in saved[under]]
            live[request].steps = away + loaded
        match event:
            case e.Admit(request=name, prompt=prompt, sampling=sampling):
                live[name] = Timeline(_new(name, found), prompt, index, sampling=sampling)
                found.append(live[name])
            case e.Draft(requests=names, picks=picks, parents=trees) if picks is not None:
                shapes = trees or (None,) * len(names)
                drafted |= {name: (index, one, its) for name, one, its in zip(names, picks, shapes, strict=True)}
            case e.Forward(rows=rows):
                for row in rows:
                    if row.kind == "verify":
                        verified[row.request] = index, row.uniforms
                    else:
                        kind: Literal["chunk", "decode"] = "chunk" if row.kind == "prefill" else "decode"
                        steps, left = live[row.request].steps, row.tokens
                        for under, tokens in _inside(row, steps, trace.header):
                            left -= tokens
                            steps.append(TimelineStep("chunk", (index,), tokens))
                            saved[under] = _prefix(steps, trace.header)
                        steps.append(TimelineStep(kind, (index,), left, row.root, uniforms=row.uniforms))
                    if row.track:
                        saved[row.track] = _prefix(live[row.request].steps, trace.header)
            case e.Commit(requests=names, track=track) if event.accepted is not None:
                for name, path in zip(names, committed_paths(event), strict=True):
                    (begun, drafts, shape), (ran, drawn) = drafted[name], verified[name]
                    step = TimelineStep("round", (begun, ran, index), 0, path.bonus, drafts, path.nodes, shape, drawn)
                    live[name].steps.append(step)
                for name, kept in zip(names, track, strict=False):
                    prefix = _prefix(live[name].steps, trace.header)  # an empty one is never loaded
                    if prefix != _prefix(live[name].steps[:-1], trace.header):
                        saved[kept] = prefix
            case e.Preempt(request=name):
                live[name].steps.append(TimelineStep("preempt", (index,)))
            case e.Resume(request=name):
                live[name].steps.append(TimelineStep("resume", (index,)))
    return found


def _inside(row: e.Row, steps: Sequence[TimelineStep], header: Header) -> Iterator[tuple[str, int]]:
    """The prefixes that are tracked inside a chunk, each with its tokens after the one before: the chunk's parts."""
    begin = start = sum(step.tokens for step in steps if step.kind == "chunk")
    multiples = inner_multiples(start, start + row.tokens, header.capacity.track_interval or 1)
    for under, end in zip(row.inner, multiples, strict=False):
        if under:
            yield under, end - begin
            begin = end


def _prefix(steps: Sequence[TimelineStep], header: Header) -> tuple[TimelineStep, ...]:
    """The chunks that bring a request's tracked tokens: its own chunks if one ends there, otherwise one chunk."""
    said = [step for step in steps if step.kind in ("chunk", "decode", "round")]
    tokens = sum(step.tokens if step.kind == "chunk" else len(step.nodes) + 1 for step in said)
    count = tokens - tokens % (header.capacity.track_interval or 1)
    chunks = [replace(step, root=None, uniforms=()) for step in steps if step.kind == "chunk"]
    ends = [*accumulate(step.tokens for step in chunks)]
    if count in ends:
        return tuple(chunks[: ends.index(count) + 1])
    return (TimelineStep("chunk", (0,), count, anew=True),)


def _new(name: str, found: Sequence[Timeline]) -> str:
    before = sum(timeline.request.partition("/")[0] == name for timeline in found)
    return name if not before else f"{name}/{before + 1}"


# Rewrites: the same tokens, in other steps


def decoded(timeline: Timeline) -> Timeline:
    """Decode token by token without drafts, for at most TOKENS tokens after the prompt, which is enough."""
    steps: list[TimelineStep] = []
    left = TOKENS
    for step in timeline.steps:
        if step.kind not in ("round", "decode"):
            steps.append(step)
            continue
        said = (*step.right, step.root)[:left]
        steps += [TimelineStep("decode", step.origins[-1:], 1, token) for token in said]
        left -= len(said)
        if not left:
            break
    return replace(timeline, steps=steps)


def rejected(widths: Sequence[int], vocab: int) -> Rewrite:
    """Bring every token by a round whose drafts are all rejected; the rounds' widths take turns."""

    def rewrite(timeline: Timeline) -> Timeline:
        turn = cycle(widths)
        return replace(timeline, steps=[
            replace(step, kind="round", origins=step.origins * 3, drafts=_wrong(step.root, next(turn), vocab))
            if step.kind == "decode" else step
            for step in decoded(timeline).steps
        ])

    return rewrite


def rescheduled(counts: Sequence[int], vocab: int) -> Rewrite:
    """Use these step counts in turn; first all drafts of a round are right, then all but one, and so on."""

    def rewrite(timeline: Timeline) -> Timeline:
        turns, steps, waiting = cycle(enumerate(counts)), list[TimelineStep](), list[TimelineStep]()

        def flush(least: int) -> None:
            while len(waiting) > least:
                number, width = next(turns)
                accepted = min(max(width - number % 3, 0), len(waiting) - 1)
                taken, waiting[:] = waiting[: accepted + 1], waiting[accepted + 1 :]
                steps.append(_round(taken, width, vocab))

        for step in decoded(timeline).steps:
            if step.kind == "decode":
                waiting.append(step)
                flush(max(counts) + 1)
            else:
                flush(0)
                steps.append(step)
        flush(0)
        return replace(timeline, steps=steps)

    return rewrite


def _round(taken: Sequence[TimelineStep], width: int, vocab: int) -> TimelineStep:
    """Decoded tokens as one round of `width` drafts, of which all but the last of these are right."""
    *right, last = taken
    if not width:
        return last
    drafts = [step.root or 0 for step in right]
    wrong = _wrong(last.root, width - len(drafts), vocab)
    return TimelineStep("round", last.origins * 3, 0, last.root, (*drafts, *wrong), chain(len(drafts)))


def chain(count: int) -> tuple[int, ...]:
    """The node ids of a chain with `count` accepted drafts."""
    return tuple(range(1, count + 1))


def exact_windows(timeline: Timeline) -> Timeline:
    """Reduce every window to its accepted path, as a chain, so that no draft is rejected."""
    return replace(timeline, steps=[
        step if step.kind != "round"
        else replace(step, drafts=step.right, nodes=chain(len(step.nodes)), parents=None) if step.nodes
        else TimelineStep("decode", step.origins[-1:], 1, step.root)
        for step in timeline.steps
    ])


def chunked(sizes: Sequence[int]) -> Rewrite:
    """Split prompts into chunks of these sizes in turn; without sizes, merge adjacent chunks."""

    def rewrite(timeline: Timeline) -> Timeline:
        steps: list[TimelineStep] = []
        for step in timeline.steps:
            if step.kind == "chunk" and steps and steps[-1].kind == "chunk":
                steps[-1] = replace(step, tokens=steps[-1].tokens + step.tokens)
            else:
                steps.append(step)
        turn = cycle(sizes) if sizes else None
        parts = [[step] if turn is None or step.kind != "chunk" else list(_cut(step, turn)) for step in steps]
        return replace(timeline, steps=[part for cut in parts for part in cut])

    return rewrite


def _cut(step: TimelineStep, sizes: Iterator[int]) -> Iterator[TimelineStep]:
    left = step.tokens
    while left:
        size = min(next(sizes), left)
        left -= size
        yield replace(step, tokens=size, root=None if left else step.root)


def just_begun(timeline: Timeline) -> Timeline:
    """The prompt, and the first step after it."""
    steps: list[TimelineStep] = []
    for step in timeline.steps:
        steps.append(step)
        if step.kind in ("decode", "round"):
            break
    return replace(timeline, steps=steps)


def prompt_only(timeline: Timeline) -> Timeline:
    """The prompt's chunks alone."""
    return replace(timeline, steps=[step for step in timeline.steps if step.kind == "chunk"])


def _wrong(right: int | None, count: int, vocab: int) -> tuple[int, ...]:
    """Wrong drafts: the first one differs from the token that follows."""
    return tuple(((right or 0) + 1 + number) % vocab for number in range(count))


# The events of rewritten timelines


def alone(trace: Trace, rewrite: Rewrite = lambda timeline: timeline) -> RewrittenTrace:
    """Rewrite every request and serve one after the other, each alone, with room for a whole prompt."""
    return in_turn([rewrite(timeline) for timeline in timelines_of(trace)], trace.header)


def in_turn(timelines: Sequence[Timeline], written: Header) -> RewrittenTrace:
    """The events of these timelines, one after the other."""
    steps = [step for timeline in timelines for step in timeline.steps]
    widths = {len(step.drafts) for step in steps if step.kind == "round" and step.parents is None}
    trees = any(step.parents is not None for step in steps)
    header = _header(written, widths, max((step.tokens for step in steps), default=1), trees=trees)
    pairs = list(_events(timelines, header.num_steps))
    return RewrittenTrace(header, tuple(event for event, _ in pairs), tuple(origin for _, origin in pairs))


def _header(header: Header, widths: Iterable[int], most: int, *, trees: bool) -> Header:
    """Keep slots, pages and the widest window, and add the step counts in use to the candidates.

    With tree windows the step count stays unchanged. Without any, the room for trees is dropped. No run reads the
    controller's wish.
    """
    if trees:
        room = msgspec.structs.replace(header.capacity, max_tokens=max(header.capacity.max_tokens, most))
        return msgspec.structs.replace(header, capacity=room)
    candidates = tuple(sorted({*header.candidates, *widths, 0}))
    tokens = max(header.capacity.max_tokens, most)
    room = msgspec.structs.replace(header.capacity, max_tokens=tokens, num_draft_tokens=None, topk=None)
    written = {"candidate_steps": list(candidates)}
    return msgspec.structs.replace(header, candidates=candidates, adaptive=written, controller=None, capacity=room)


def _events(timelines: Sequence[Timeline], num_steps: int) -> Iterator[tuple[e.AnyEvent, int]]:
    for timeline in timelines:
        last = timeline.admitted
        yield e.Admit(timeline.request, timeline.prompt, timeline.sampling), last
        for step in timeline.steps:
            last = step.origins[-1]
            if step.kind == "round" and step.parents is None and len(step.drafts) != num_steps:
                num_steps = len(step.drafts)
                yield e.SetNumSteps(num_steps), step.origins[0]
            yield from zip(_events_of(timeline.request, step), step.origins, strict=True)
        yield e.Abort(timeline.request), last


def _events_of(name: str, step: TimelineStep) -> tuple[e.AnyEvent, ...]:
    match step.kind:
        case "chunk":
            return (e.Forward((e.Row(name, "prefill", step.tokens, step.root, step.uniforms),)),)
        case "decode":
            return (e.Forward((e.Row(name, "decode", 1, step.root, step.uniforms),)),)
        case "preempt":
            return (e.Preempt(name),)
        case "resume":
            return (e.Resume(name),)
    path, shape = e.Path(step.nodes, step.root or 0), None if step.parents is None else (step.parents,)
    verify = e.Row(name, "verify", uniforms=step.uniforms)
    return e.Draft((name,), (step.drafts,), shape), e.Forward((verify,)), e.Commit((name,), (path,))
