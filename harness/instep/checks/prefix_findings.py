"""Findings in tracked prefixes: the name of the prefix, and known wrong contents, also of states kept narrower.

Leaves out: the comparisons, which the checks make as for a request's own memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from instep_reference.contract.declared_rounding import CHUNK, KEPT, LARGEST_INTEGER, Blocked, Storage, kept_in, read_as
from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ..finding_problem import Explained, NamedMistake, Problem, WrongContent
from ..oracle.storage_rounding import kept_states, numbers_and_scales, rounded
from ..verdict import Comparison
from ..watch.event_context import EventContext, LastForward
from ..watch.rows_by_request import rows
from .check_interface import counted, verb
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
# Known mistakes in the track slots of prefixes.
SLOT_KEPT = NamedMistake("track-slot-kept", 'the slot of "{}" is kept, although nothing was tracked under the name')
SLOT_LOW = NamedMistake("track-slot-not-taken", "no slot is taken for a window that may reach a multiple, and does not")
SLOT_HIGH = NamedMistake("track-slot-taken", "a slot is taken for a window that can reach no multiple")
SLOTS = (SLOT_KEPT, SLOT_LOW, SLOT_HIGH)
STEPS = (NO_STEP, BY_DEPTH, ONE_OFF, LAST_STEP, OF_WINDOW)

# Known mistakes in the rounding of a prefix's states (`CHUNK`, `KEPT` of the contract).
NOT_ROUNDED = NamedMistake("prefix-not-rounded", "is the state of the request, which is not rounded as declared")
PER_VALUE = NamedMistake("scale-per-value-channel", "is rounded with a scale per value channel, not per key channel")
PER_HEAD = NamedMistake("scale-per-head", "is rounded with one scale per head, not per head and key channel")
CUT_OFF = NamedMistake("prefix-cut-off", "is cut off towards zero, not rounded to nearest")
WRAPS = NamedMistake("largest-number-wraps", "has the largest number of every channel wrapped around to the other sign")
TWICE = NamedMistake("prefix-rounded-twice", "is rounded with one scale per head, and again with one per key channel")
NARROW_SCALES = NamedMistake("scales-in-16-bits", "is read with its scales in 16 bits, not in fp32")
OTHER_HEAD = NamedMistake("scales-of-another-head", "is read with the scales of other heads, {} further")
OTHER_PREFIX = NamedMistake("scales-of-another-prefix", 'is read with the scales of "{}"')
UNSCALED = NamedMistake("read-without-scales", "holds the stored numbers, not multiplied by their scales")
EARLY = NamedMistake("prefix-before-its-event", "holds the state that the request had before this event, rounded")
AS_CHUNK = NamedMistake("rounded-as-a-chunk", "is rounded as the state that a chunk leaves; a commit made this prefix")
NOT_AS_CHUNK = NamedMistake("not-rounded-as-a-chunk", "is not rounded as the state that a chunk leaves")
RUNNING = NamedMistake("running-state-rounded", "is rounded as in a prefix; a request's own state is not")
ALSO = NamedMistake("rounded-with-the-state", "is rounded as states are; a prefix keeps its bits")
ROUNDED = (NOT_ROUNDED, PER_VALUE, PER_HEAD, CUT_OFF, WRAPS, TWICE, NARROW_SCALES, OTHER_HEAD, OTHER_PREFIX, UNSCALED,
           EARLY, AS_CHUNK, NOT_AS_CHUNK, RUNNING, ALSO)  # fmt: skip
KNOWN = (OF_TOKEN, OF_REQUEST, LATE, BELONGS, HAS_NOW, KEPT_AS, *STEPS, *SLOTS, *ROUNDED)


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
    if whole > depth and found in ends:
        fitting.append(OF_WINDOW.known())
    return Explained.any_of(fitting, ", or ".join(one.says for one in fitting)) if fitting else None


def wrong_slots(found: Mapping[str, int], right: Mapping[str, int]) -> Explained | None:
    """Recognise wrong track slots: name -> slot."""
    more = [name for name in found if name not in right]
    off = [found[name] - right[name] for name in right if name in found]
    if more:
        known = SLOT_KEPT.known(more[0])
    elif len(found) == len(right):
        known = SLOT_LOW.known() if min(off, default=0) < 0 else SLOT_HIGH.known()
    else:
        return None
    return Explained.any_of([known], known.says)


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
    context: EventContext, name: str, place: Place, due: torch.Tensor, count: int, but: str = ""
) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """The content of a part of a prefix if a move took it from another request, prefix or time.

    but: a request that has the part now
    """
    yield ZERO.known(), torch.zeros_like(due)
    for request, state in context.subject.after.items():
        held = dict(state.parts()).get(place)
        if held is not None and request != but:
            of = f"after {counted(state.length)}; {counted(count)} {verb(count, 'was', 'were')} tracked"
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


NEARLY_ALL = 0.9  # of the numbers: an error of summation changes a rounded number only next to a tie
Rounds = Mapping[str, Storage]
Wrongs = Iterator[tuple[WrongContent, torch.Tensor]]


def off_the_grid(found: torch.Tensor, storage: Storage) -> NamedMistake | None:
    """The mistake of a state in a prefix, if its numbers are not numbers of the declared storage."""
    if torch.equal(rounded(found, storage), found):
        return None
    grids = [(Blocked(torch.int8, tile), known) for tile, known in (((None, 1), PER_VALUE), ((None, None), PER_HEAD))]
    return next((known for grid, known in grids if torch.equal(rounded(found, grid), found)), NOT_ROUNDED)


def misrounded(
    state: torch.Tensor, before: torch.Tensor | None, rounds: Rounds, *, forward: bool, kept: Mapping[str, torch.Tensor]
) -> Wrongs:
    """Wrong contents of a prefix that ends where its request now is.

    state: of the request; before: before the event; kept: other prefixes. Shapes: [HV, K, V] each
    """
    storages = kept_in(rounds, forward=forward)
    if not storages:
        return
    last = storages[-1]

    def as_read(x: torch.Tensor) -> torch.Tensor:
        return x.to(read_as(last))

    yield NOT_ROUNDED.known(), as_read(state)
    if before is not None:
        yield EARLY.known(), kept_states(before, rounds, forward=forward)
    if CHUNK in rounds:
        mistake = NOT_AS_CHUNK if forward else AS_CHUNK
        yield mistake.known(), as_read(kept_states(state, rounds, forward=not forward))
    if not isinstance(last, Blocked) or last.dtype.is_floating_point:
        return
    x = kept_states(state, {CHUNK: rounds[CHUNK]} if CHUNK in rounds else {}, forward=forward).float()
    for tile, known in (((None, 1), PER_VALUE), ((None, None), PER_HEAD)):
        yield known.known(), rounded(x, Blocked(last.dtype, tile))
    numbers, scales = numbers_and_scales(x, last)
    yield CUT_OFF.known(), (numbers.trunc() + 0.0) * scales  # whole numbers have one zero
    yield TWICE.known(), rounded(rounded(x, Blocked(last.dtype, (None, None))), last)
    one, most = LARGEST_INTEGER + 1, LARGEST_INTEGER
    whole = (numbers * one / most).round() + 0.0  # a scale of 1/128 of the largest number, which is then 128
    yield WRAPS.known(), torch.where(whole > most, whole - 2 * one, whole) * (scales * most / one)
    yield from misread(kept_states(state, rounds, forward=forward), rounds, kept)


def nearest_misrounding(
    found: torch.Tensor, right: torch.Tensor, rounds: Rounds, *, forward: bool
) -> WrongContent | None:
    """The wrong rounding of the right state that most numbers of a found one have, if it is nearly all of them."""
    right = (rounded(right, rounds["state"]) if "state" in rounds else right).to(found)
    shares = [(float((found == wrong).double().mean()), known)
              for known, wrong in misrounded(right, None, rounds, forward=forward, kept={})
              if wrong.dtype == found.dtype]
    share, known = max(shares, key=lambda one: one[0], default=(0.0, None))
    rest = float((found == kept_states(right, rounds, forward=forward)).double().mean())
    return known if share > max(NEARLY_ALL, rest) else None


def misread(state: torch.Tensor, rounds: Rounds, kept: Mapping[str, torch.Tensor]) -> Wrongs:
    """Wrong results of reading the state of a prefix [HV, K, V] back. kept: other prefixes."""
    storage = rounds.get(KEPT)
    if not isinstance(storage, Blocked):
        return
    numbers, scales = (part.to(state) for part in numbers_and_scales(state.float(), storage))
    yield UNSCALED.known(), numbers
    yield NARROW_SCALES.known(), numbers * scales.bfloat16().to(state)
    for far in range(1, len(state)):
        yield OTHER_HEAD.known(far), numbers * scales.roll(-far, 0)
    for name, other in kept.items():
        if other.shape == state.shape:
            yield OTHER_PREFIX.known(name), numbers * numbers_and_scales(other.float(), storage)[1].to(state)
