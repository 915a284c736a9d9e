"""Describe an event in a line of text: its requests, their numbers of tokens, and their lengths afterwards.

Leaves out: what an engine computes. Describing a trace needs no model.
"""

from collections.abc import Callable, Iterator
from typing import Any

from instep_reference.contract import engine as e
from instep_reference.contract.event_facts import committed_paths, facts, kind_of, tracks
from instep_reference.contract.sampling import Sampling

from .event_rules import EventRules
from .file import Trace
from .request_table import RequestTable, Standing
from .tree_shape import depths

Live = dict[str, Standing]


def told(trace: Trace) -> Iterator[tuple[int, str, str]]:
    """Number, kind and text of every event. Raises BadInput at the first event that is not legal."""
    rules = EventRules(trace.header, overlap=trace.header.recording.overlap)
    for index, event in enumerate(trace.events):
        at = rules.serving(event)
        before = dict(at.table.live)
        at.apply(event, trace.where(index))
        yield index, kind_of(event), said(event, before, at.table) + "; at the receiver" * at.receives


def said(event: e.Event, before: Live, after: RequestTable) -> str:
    """The text of one event. before: the live requests before it; after: the request table after it."""
    text = WORDS.get(type(event), _shown)(event, before, after.live)
    kept = [f'{request} under "{name}"' for name, request in tracks(event).items()]
    return f"{text}; tracks {', '.join(kept)}" if kept else text


def _admit(event: e.Admit, before: Live, after: Live) -> str:
    return f"{event.request} into slot {after[event.request].slot}: {count(len(event.prompt), 'token')}" + (
        "" if event.sampling is None else f", {sampled(event.sampling)}")


def _draft(event: e.Draft, before: Live, after: Live) -> str:
    parts = []
    for name in event.requests:
        parents = after[name].parents
        branches = parents != tuple(range(-1, len(parents) - 1))
        deep = f", a tree {max(depths(parents))} deep" if branches else ""
        parts.append(f"{name}: {count(len(parents) - 1, 'draft')}{deep}")
    return "; ".join(parts)


def _forward(event: e.Forward, before: Live, after: Live) -> str:
    return "; ".join(_row(row, before[row.request]) for row in event.rows)


def _row(row: e.Row, standing: Standing) -> str:
    if row.kind == "verify":
        return f"{row.request}: verifies {count(len(standing.window), 'token')} after {standing.length}"
    if row.kind == "decode":
        return f"{row.request}: decodes 1 after {standing.length}"
    until = standing.length + row.tokens
    return f"{row.request}: prompt {standing.length} to {until} of {len(standing.prompt)}"


def _commit(event: e.Commit, before: Live, after: Live) -> str:
    parts = []
    caps = event.caps or (None,) * len(event.requests)
    for name, path, cap in zip(event.requests, committed_paths(event), caps, strict=False):
        nodes, drafts = path.nodes, len(before[name].window) - 1
        which = f" (nodes {' '.join(map(str, nodes))})" if nodes != tuple(range(1, len(nodes) + 1)) else ""
        limit = "" if cap is None else f", capped at {cap}"
        parts.append(f"{name}: {len(nodes)} of {count(drafts, 'draft')}{which}{limit}, now {after[name].length}")
    return "; ".join(parts) or f"{', '.join(event.requests)}: as the engine itself accepts"


def _steps(event: e.SetNumSteps, before: Live, after: Live) -> str:
    return f"{count(event.num_steps, 'draft')} a round"


def _shown(event: e.Event, before: Live, after: Live) -> str:
    """The text of the description, with the numbers of the request before and after the event."""
    request, words = getattr(event, "request", ""), {name: getattr(event, name) for name in event.__struct_fields__}
    if request in before:
        words |= {"tokens": count(before[request].length, "token"), "phase": before[request].phase.value}
    if request in after:
        words |= {"now": after[request].length, "slot": after[request].slot}
    return facts(event).shown.format(**words)


def _refused(event: e.Refused, before: Live, after: Live) -> str:
    return f"{kind_of(event.of)}, which is illegal here"


WORDS: dict[type[e.Event], Callable[[Any, Live, Live], str]] = {
    e.Admit: _admit, e.Draft: _draft, e.Forward: _forward, e.Commit: _commit, e.SetNumSteps: _steps,
    e.Refused: _refused,
}


def sampled(sampling: Sampling) -> str:
    """How a request chooses, in words."""
    named = {"temperature": sampling.temperature, "top-k": sampling.top_k, "top-p": sampling.top_p}
    return ", ".join(f"{name} {value:g}" for name, value in named.items() if value is not None)


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
