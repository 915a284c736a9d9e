"""Findings in tracked prefixes: the name of the prefix, and known wrong contents.

Leaves out: the comparisons, which the checks make as for a request's own memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ..finding_problem import Explained, NamedMistake, Problem, WrongContent
from ..verdict import Comparison
from ..watch.event_context import EventContext, LastForward
from ..watch.rows_by_request import rows
from .check_interface import counted
from .wrong_state_bank import ZERO

FINAL = Place("trunk", AFTER_LAYERS, "final")  # row of the last token of a prefix, which the draft head reads at a load

# Known mistakes in the memory of a prefix.
OF_TOKEN = NamedMistake("final-row-of-another-token", "is the final row of token {} of this event")
OF_REQUEST = NamedMistake("final-row-of-another-request", 'is a final row of request "{}"')
LATE = NamedMistake("rows-of-earlier-tokens", "holds the rows of {} earlier")
BELONGS = NamedMistake("prefix-of-another-request", 'holds what belongs to request "{}"')
HAS_NOW = NamedMistake("content-of-now", 'holds what request "{}" has now, {}')
KEPT_AS = NamedMistake("another-prefix", 'holds what is kept as "{}"')
# Known mistakes in the tracked step of a window.
BY_DEPTH = NamedMistake("step-by-depth", "it is the depth {}, not the node that accept_index has there")
ONE_OFF = NamedMistake("step-one-off", "it is the accepted node one {} the one that reaches the multiple")
LAST_STEP = NamedMistake("step-of-the-last-node", "it is the last accepted node")
OF_WINDOW = NamedMistake("step-of-the-whole-window", "the multiple is one that only the whole window reaches")
NO_STEP = NamedMistake("step-missed", "no multiple is seen, although the path reaches one")
STEPS = (NO_STEP, BY_DEPTH, ONE_OFF, LAST_STEP, OF_WINDOW)
KNOWN = (OF_TOKEN, OF_REQUEST, LATE, BELONGS, HAS_NOW, KEPT_AS, *STEPS)


def of_prefix(under: str, result: Comparison) -> Comparison:
    """The comparison with the name of its prefix; unchanged for a request's own memory, whose name is empty."""
    if not under or result.problem is None:
        return result
    return replace(result, problem=replace(result.problem, prefix=under))


def wrong_step(
    found: int, right: int, path: Sequence[int], before: int, window: int, every: int
) -> Explained | None:
    """Recognise a wrong tracked step. path: the accepted nodes, root first; window: the tokens of the window."""
    depth, whole = ((before + count) // every * every - before - 1 for count in (len(path), window))
    fitting = list[WrongContent]()
    if found < 0 <= right:
        fitting.append(NO_STEP.known())
    if right >= 0 and found == depth:
        fitting.append(BY_DEPTH.known(depth))
    for other, side in ((depth - 1, "before"), (depth + 1, "after")) if right >= 0 else ():
        if 0 <= other < len(path) and path[other] == found:
            fitting.append(ONE_OFF.known(side))
    if right >= 0 and found == path[-1]:
        fitting.append(LAST_STEP.known())
    ends = (whole, path[min(whole, len(path) - 1)], *((path[0],) if right < 0 else ()))  # a depth may be clamped
    if whole > depth and found >= 0 and found in ends:
        fitting.append(OF_WINDOW.known())
    return Explained.any_of(fitting, ", or ".join(one.says for one in fitting)) if fitting else None


def other_rows(mine: torch.Tensor, forward: LastForward, request: str) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """The final rows that a prefix of this request may have kept instead of its last token's."""
    for number, row in enumerate(mine):
        yield OF_TOKEN.known(number), row
    for name, span in forward.spans.items():
        for row in rows(forward.subject, FINAL, span) if name != request else ():  # type: ignore[union-attr]
            yield OF_REQUEST.known(name), row


def older_rows(line: torch.Tensor, count: int) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """The rows that a line has instead of its last `count` rows if it was not advanced far enough."""
    for late in range(1, 1 + len(line) - count):
        yield LATE.known(counted(late)), line[-late - count : -late]


def of_others(
    context: EventContext, request: str, place: Place, count: int
) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """The content of a prefix that was copied from another request."""
    for name, state in context.subject.after.items():
        held = dict(state.parts()).get(place)
        if name != request and held is not None:
            yield BELONGS.known(name), held[:count]


def others_kept(
    context: EventContext, name: str, place: Place, due: torch.Tensor, count: int
) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """The content of a part of a prefix if a move took it from another request, prefix or time."""
    yield ZERO.known(), torch.zeros_like(due)
    for request, state in context.subject.after.items():
        held = dict(state.parts()).get(place)
        if held is not None:
            of = f"after {counted(state.length)}; {counted(count)} {'was' if count == 1 else 'were'} tracked"
            yield HAS_NOW.known(request, of), held[: len(due)]
    for under, kept in context.earlier.saved.items():
        held = dict(kept.state.parts()).get(place)
        if under != name and held is not None:
            yield KEPT_AS.known(under), held[: len(due)]


def with_last(result: Comparison, found: torch.Tensor | None, due: int) -> Comparison:
    """Recognise a prefix that keeps rows of an MTP layer that depend on later tokens, or that lacks rows."""
    more, layer = 0 if found is None or found.dim() < 3 else len(found) - due, result.place.layer
    if not more or result.problem is None or result.place.stage == "trunk":
        return result
    which = f"{counted(abs(more), 'row')} of MTP layer {layer}" if layer else "the draft head's last row"
    if more < 0:
        clause = f"lacks {which}, which depends on no token after the prefix"
        return replace(result, problem=Problem("identified", clause))
    made = "which depends on the token" if more == 1 else "which depend on tokens"
    return replace(result, problem=Problem("identified", f"keeps {which}, {made} after the prefix"))
