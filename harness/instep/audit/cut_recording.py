"""Shrink a recording that an audit disagrees with: remove whole requests and the tail while its first finding stays.

Nothing else can be cut: the rest of a recording is what an engine did. Leaves out: dumps of SGLang, whose steps have no
requests.
"""

import hashlib
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors.torch import save_file

from instep_reference.contract.engine import Admit, AnyEvent, Commit
from instep_reference.contract.errors import BadInput, bytes_of

from ..campaign.runner import TrialRunner
from ..campaign.shrink import Cuts, counted_cuts, reduce, same_finding
from ..trace.cut_events import without_requests
from ..verdict import Comparison, Exit
from .audit import Audit, audit
from .recording import BATCHES, EVENTS, META, TENSORS, Batch, PlainLine, read, stated_of

STATES = ("conv", "state", "slot")


class Kept(NamedTuple):
    """The rest of a recording: its requests, and how many events, or how many tokens of each plain line."""

    requests: tuple[str, ...]
    end: int


def _without_requests(kept: Kept, gone: Sequence[str]) -> Kept | None:
    left = tuple(name for name in kept.requests if name not in gone)
    return kept._replace(requests=left) if left else None


def _without_tail(kept: Kept, gone: Sequence[int]) -> Kept | None:
    return kept._replace(end=gone[0]) if gone[-1] == kept.end - 1 and gone[0] else None


CUTS: Mapping[str, Cuts[Kept]] = {
    "requests": Cuts(lambda kept: kept.requests, _without_requests),
    "tail": Cuts(lambda kept: range(kept.end), _without_tail),
}


class ShrunkRecording(NamedTuple):
    """The smallest recording so far, what it was cut by, and its audit."""

    kept: Kept
    found: Audit
    sentence: str
    interrupted: bool


def shrink_recording(
    path: Path, model: Path, out: Path, scratch: Path, run: TrialRunner, **how: Any
) -> ShrunkRecording:
    """Shrink a recording, and write the smallest one to `out`. how: further parameters of `audit`."""
    whole, runs, interrupted, minimal = everything(path), 0, False, False
    run.advance(path.name, 0, None)
    first = audit(path, model, first=True, **how)
    if first.exit is not Exit.DIVERGED:
        raise BadInput(path.name, found="no finding", expected="a recording that an audit disagrees with",
                       hint="`instep audit` with the same options shows what it judges")
    best, wanted = (whole, first), same_finding(_first(first))

    def shows(kept: Kept) -> bool:
        nonlocal best, runs
        runs += 1
        run.advance(f"{path.name}: {len(best[0].requests)} requests, smaller recordings tried", runs, None)
        part = write_part(path, scratch / f"{runs}{path.suffix}", kept)
        try:
            found = audit(part, model, first=True, **how)
        except BadInput:
            return False
        finally:
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        same = found.exit is Exit.DIVERGED and same_finding(_first(found)) == wanted
        best = (kept, found) if same else best
        return same

    try:
        event = _first(first).event
        if not path.is_file() and event + 1 < whole.end:
            shows(whole._replace(end=event + 1))
        minimal = reduce(best[0], CUTS.values(), shows, lambda: run.over)
    except KeyboardInterrupt as error:
        run.stop(error)
        interrupted = True
    write_part(path, out, best[0])
    parts = {kind: (len(cut.parts(whole)), len(cut.parts(best[0]))) for kind, cut in CUTS.items()}
    named_parts = {"requests": parts["requests"], "tokens of each" if path.is_file() else "events": parts["tail"]}
    return ShrunkRecording(best[0], best[1], counted_cuts(runs, named_parts, minimal), interrupted)


def _first(found: Audit) -> Comparison:
    """The first finding of an audit: of tokens and counts, or else of rows and states."""
    replayed = [] if found.replay is None else found.replay.verdict.findings
    return [*found.verdict.findings, *replayed][0]


def is_plain(path: Path) -> bool:
    """Whether a file is one of prompts and answers, and no trace."""
    try:
        msgspec.json.decode(path.read_bytes().partition(b"\n")[0], type=PlainLine)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _ranks(path: Path) -> list[Path]:
    """The directories of a recording's ranks; of one rank, its own."""
    return [path] if (path / META).is_file() else [file.parent for file in sorted(path.glob(f"*/{META}"))]


def everything(path: Path) -> Kept:
    """All of a recording."""
    if path.is_file():
        lines = [line for _, line in _plain_lines(path)]
        names = [line.request or f"line {number}" for number, line in _plain_lines(path)]
        return Kept(tuple(names), max(len(line.tokens) for line in lines))
    if not _ranks(path):
        raise BadInput(str(path), found=f"no {META}", expected="a recording that `instep attach` or its writer made, "
                       "or a file of JSON lines")  # fmt: skip
    events = read(_ranks(path)[0]).events
    return Kept(tuple(dict.fromkeys(event.request for event in events if isinstance(event, Admit))), len(events))


def _plain_lines(path: Path) -> Iterator[tuple[int, PlainLine]]:
    for number, line in enumerate(bytes_of(path).splitlines(), 1):
        if line.strip():
            yield number, msgspec.json.decode(line, type=PlainLine)


def write_part(path: Path, out: Path, kept: Kept, states: Collection[int] | None = None) -> Path:
    """Write a part of a recording. states: the events of the whole one whose states are written; None: all"""
    if path.is_file():
        lines = [msgspec.structs.replace(line, request=name, tokens=line.tokens[: kept.end],
                                         uniforms=line.uniforms[: kept.end]) for number, line in _plain_lines(path)
                 if (name := line.request or f"line {number}") in kept.requests]  # fmt: skip
        out.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        return out
    for folder in _ranks(path):
        _write_rank(folder, out / folder.relative_to(path), kept, states)
    return out


def _write_rank(folder: Path, out: Path, kept: Kept, states: Collection[int] | None) -> None:
    found, stated = read(folder), stated_of(folder)
    every = {event.request for event in found.events if isinstance(event, Admit)}
    gone = every - set(kept.requests)
    places, events, written = dict[int, int](), list[AnyEvent](), 0  # number in the whole recording -> number here
    (out / TENSORS).mkdir(parents=True)
    for number, event in enumerate(found.events[: kept.end]):
        left = without_requests((event,), gone)
        if not left:
            continue
        tensors = {name: tensor for name, tensor in found.tensors(number).items()
                   if _request_of(name) not in gone and (states is None or number in states or
                                                         name.partition(".")[0] not in STATES)}  # fmt: skip
        places[number] = len(events)
        if tensors:
            save_file(tensors, out / TENSORS / f"{len(events):06d}.safetensors")
        written += any(name.startswith("state.") for name in tensors)
        events += left
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    (out / EVENTS).write_bytes(lines)
    if found.batches:
        (out / BATCHES).write_bytes(b"".join(_batch_lines(found.batches, places, gone)))
    attached, commits = stated.attached, sum(isinstance(event, Commit) for event in events)
    if attached is not None:
        attached = msgspec.structs.replace(attached, written=written, dropped=max(commits - written, 0))
    # Without the rounds of all requests no controller can be judged. An attached recorder states the rounds of all.
    controller = None if gone and attached is None else stated.controller
    stated = msgspec.structs.replace(stated, attached=attached, controller=controller, events=len(events),
                                     sha256=hashlib.sha256(lines).hexdigest())  # fmt: skip
    (out / META).write_bytes(msgspec.json.encode(stated) + b"\n")


def _request_of(tensor: str) -> str:
    kind, _, rest = tensor.partition(".")
    return rest.rpartition(".")[0] if kind in ("conv", "state") else rest


def _batch_lines(batches: Sequence[Batch], places: Mapping[int, int], gone: Collection[str]) -> Iterator[bytes]:
    """The batches of the events that are kept. The rounds of all others are needed for the averages of step counts."""
    rounds, left = tuple[Any, ...](), partial(_left, gone)
    for batch in batches:
        rounds += batch.rounds
        if batch.event in places:
            here = msgspec.structs.replace(batch, event=places[batch.event], rows=left(batch.rows),
                                           slots=left(batch.slots), rounds=rounds)  # fmt: skip
            yield msgspec.json.encode(here) + b"\n"
            rounds = ()


def _left(gone: Collection[str], numbers: Mapping[str, int]) -> dict[str, int]:
    return {name: number for name, number in numbers.items() if name not in gone}
