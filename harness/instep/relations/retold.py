"""The same tokens told another way: a request's own course out of a trace, and events that repeat it.

Leaves out: running them (`story.py`). Everything that a request chose is kept: whatever the batch, the windows or the
chunks are, the same tokens stand at the same positions afterwards. A state that was loaded becomes the course that
led to it, so every request can be told alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Literal

import msgspec

from instep_reference.contract import engine as e

from ..trace.file import Trace
from ..trace.header import Header

TOKENS = 24  # of a request behind its prompt that are decoded one by one


@dataclass(frozen=True)
class Told:
    """Events with the number of the trace's event that each stands for, and the header that they assume."""

    header: Header
    events: tuple[e.AnyEvent, ...]
    origins: tuple[int, ...]


@dataclass(frozen=True)
class Beat:
    """One thing that happened to one request.

    chunk    `tokens` of the prompt; root: what follows the last of them, None: the prompt goes on
    decode   the root was committed and `root` follows
    round    `drafts` were verified, the first `accepted` are right, and `root` follows
    origins  the trace's events: of a round its draft, verify and commit, else one
    """

    kind: Literal["chunk", "decode", "round", "preempt", "resume"]
    origins: tuple[int, ...]
    tokens: int = 0
    root: int | None = None
    drafts: tuple[int, ...] = ()
    accepted: int = 0


@dataclass
class Life:
    """A request from its admission on."""

    request: str
    prompt: tuple[int, ...]
    admitted: int
    beats: list[Beat] = field(default_factory=list)


Manner = Callable[[Life], Life]


def as_traced(trace: Trace) -> Told:
    """The trace itself."""
    return Told(trace.header, trace.events, tuple(range(len(trace.events))))


def lives(trace: Trace) -> list[Life]:
    """Every request's own course, in order of admission; a round that was never committed is no part of it.

    A name that is admitted again after its end is another request: it is told as "name/2".
    """
    live: dict[str, Life] = {}
    saved: dict[str, tuple[Beat, ...]] = {}
    drafted: dict[str, tuple[int, tuple[int, ...]]] = {}
    verified: dict[str, int] = {}
    found: list[Life] = []
    for index, event in enumerate(trace.events):
        match event:
            case e.Admit(request=name, prompt=prompt):
                live[name] = Life(_new(name, found), prompt, index)
                found.append(live[name])
            case e.Draft(requests=names, picks=picks) if picks is not None:
                drafted |= {name: (index, one) for name, one in zip(names, picks, strict=True)}
            case e.Forward(rows=rows):
                for row in rows:
                    if row.kind == "verify":
                        verified[row.request] = index
                    else:
                        kind: Literal["chunk", "decode"] = "chunk" if row.kind == "prefill" else "decode"
                        live[row.request].beats.append(Beat(kind, (index,), row.tokens, row.root))
            case e.Commit(requests=names, accepted=paths) if paths is not None:
                for name, path in zip(names, paths, strict=True):
                    begun, drafts = drafted[name]
                    origins = begun, verified[name], index
                    live[name].beats.append(Beat("round", origins, 0, path.bonus, drafts, len(path.nodes)))
            case e.Save(request=name, name=kept):
                saved[kept] = tuple(live[name].beats)
            case e.Load(request=name, name=kept):
                live[name].beats += [replace(beat, origins=(index,) * len(beat.origins)) for beat in saved[kept]]
            case e.Preempt(request=name):
                live[name].beats.append(Beat("preempt", (index,)))
            case e.Resume(request=name):
                live[name].beats.append(Beat("resume", (index,)))
    return found


def _new(name: str, found: Sequence[Life]) -> str:
    before = sum(life.request.partition("/")[0] == name for life in found)
    return name if not before else f"{name}/{before + 1}"


# Manners: the same tokens, in other steps


def decoded(life: Life) -> Life:
    """Token by token, without drafts, up to TOKENS behind the prompt: as many steps show what every step does."""
    beats: list[Beat] = []
    left = TOKENS
    for beat in life.beats:
        if beat.kind not in ("round", "decode"):
            beats.append(beat)
            continue
        said = (*beat.drafts[: beat.accepted], beat.root)[:left]
        beats += [Beat("decode", beat.origins[-1:], 1, token) for token in said]
        left -= len(said)
        if not left:
            break
    return replace(life, beats=beats)


def rejected(widths: Sequence[int], vocab: int) -> Manner:
    """Every token by a round whose drafts are all wrong, so many of them in turn."""

    def manner(life: Life) -> Life:
        turn = cycle(widths)
        return replace(life, beats=[
            replace(beat, kind="round", origins=beat.origins * 3, drafts=_wrong(beat.root, next(turn), vocab))
            if beat.kind == "decode" else beat
            for beat in decoded(life).beats
        ])

    return manner


def rescheduled(counts: Sequence[int], vocab: int) -> Manner:
    """Rounds of these step counts in turn; of their drafts all are right, then all but one, and so on around."""

    def manner(life: Life) -> Life:
        steps, beats, waiting = cycle(enumerate(counts)), list[Beat](), list[Beat]()

        def flush(least: int) -> None:
            while len(waiting) > least:
                number, width = next(steps)
                accepted = min(max(width - number % 3, 0), len(waiting) - 1)
                taken, waiting[:] = waiting[: accepted + 1], waiting[accepted + 1 :]
                beats.append(_round(taken, width, vocab))

        for beat in decoded(life).beats:
            if beat.kind == "decode":
                waiting.append(beat)
                flush(max(counts) + 1)
            else:
                flush(0)
                beats.append(beat)
        flush(0)
        return replace(life, beats=beats)

    return manner


def _round(taken: Sequence[Beat], width: int, vocab: int) -> Beat:
    """Decoded tokens as one round of `width` drafts, of which all but the last of these are right."""
    *right, last = taken
    if not width:
        return last
    drafts = [beat.root or 0 for beat in right]
    wrong = _wrong(last.root, width - len(drafts), vocab)
    return Beat("round", last.origins * 3, 0, last.root, (*drafts, *wrong), len(drafts))


def exact_windows(life: Life) -> Life:
    """Rounds without a rejected draft: every window ends where it was accepted to."""
    return replace(life, beats=[
        beat if beat.kind != "round" else replace(beat, drafts=beat.drafts[: beat.accepted]) if beat.accepted
        else Beat("decode", beat.origins[-1:], 1, beat.root)
        for beat in life.beats
    ])


def chunked(sizes: Sequence[int]) -> Manner:
    """Prompts split at these sizes in turn; none: whole, as far as nothing else happened within them."""

    def manner(life: Life) -> Life:
        beats: list[Beat] = []
        for beat in life.beats:
            if beat.kind == "chunk" and beats and beats[-1].kind == "chunk":
                beats[-1] = replace(beat, tokens=beats[-1].tokens + beat.tokens)
            else:
                beats.append(beat)
        turn = cycle(sizes) if sizes else None
        parts = [[beat] if turn is None or beat.kind != "chunk" else list(_cut(beat, turn)) for beat in beats]
        return replace(life, beats=[part for cut in parts for part in cut])

    return manner


def _cut(beat: Beat, sizes: Iterator[int]) -> Iterator[Beat]:
    left = beat.tokens
    while left:
        size = min(next(sizes), left)
        left -= size
        yield replace(beat, tokens=size, root=None if left else beat.root)


def just_begun(life: Life) -> Life:
    """The prompt, and the first step behind it."""
    beats: list[Beat] = []
    for beat in life.beats:
        beats.append(beat)
        if beat.kind in ("decode", "round"):
            break
    return replace(life, beats=beats)


def prompt_only(life: Life) -> Life:
    """The prompt's chunks and nothing else."""
    return replace(life, beats=[beat for beat in life.beats if beat.kind == "chunk"])


def _wrong(right: int | None, count: int, vocab: int) -> tuple[int, ...]:
    """Drafts of which the first is not the token that follows."""
    return tuple(((right or 0) + 1 + number) % vocab for number in range(count))


# Telling


def alone(trace: Trace, manner: Manner = lambda life: life) -> Told:
    """One request after the other, each alone in the engine, in that manner; there is room for a whole prompt."""
    return tell([manner(life) for life in lives(trace)], trace.header)


def tell(told: Sequence[Life], written: Header) -> Told:
    """These courses, one after the other."""
    widths = {len(beat.drafts) for life in told for beat in life.beats if beat.kind == "round"}
    header = _header(written, widths, max((beat.tokens for life in told for beat in life.beats), default=1))
    pairs = list(_events(told, header.num_steps))
    return Told(header, tuple(event for event, _ in pairs), tuple(origin for _, origin in pairs))


def _header(header: Header, widths: Iterable[int], most: int) -> Header:
    """The same slots and pages for the same widest window; further step counts are candidates (nobody asks a wish)."""
    candidates = tuple(sorted({*header.candidates, *widths, 0}))
    room = msgspec.structs.replace(header.capacity, max_tokens=max(header.capacity.max_tokens, most))
    written = {"candidate_steps": list(candidates)}
    return msgspec.structs.replace(header, candidates=candidates, adaptive=written, capacity=room)


def _events(told: Sequence[Life], num_steps: int) -> Iterator[tuple[e.AnyEvent, int]]:
    for life in told:
        last = life.admitted
        yield e.Admit(life.request, life.prompt), last
        for beat in life.beats:
            last = beat.origins[-1]
            if beat.kind == "round" and len(beat.drafts) != num_steps:
                num_steps = len(beat.drafts)
                yield e.SetNumSteps(num_steps), beat.origins[0]
            yield from zip(_beat(life.request, beat), beat.origins, strict=True)
        yield e.Abort(life.request), last


def _beat(name: str, beat: Beat) -> tuple[e.AnyEvent, ...]:
    match beat.kind:
        case "chunk":
            return (e.Forward((e.Row(name, "prefill", beat.tokens, beat.root),)),)
        case "decode":
            return (e.Forward((e.Row(name, "decode", 1, beat.root),)),)
        case "preempt":
            return (e.Preempt(name),)
        case "resume":
            return (e.Resume(name),)
    path = e.Path(tuple(range(1, beat.accepted + 1)), beat.root or 0)
    return e.Draft((name,), (beat.drafts,)), e.Forward((e.Row(name, "verify"),)), e.Commit((name,), (path,))
