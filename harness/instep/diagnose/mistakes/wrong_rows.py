"""Results at the wrong row, head or channel: a gather or a write to the wrong place.

For an op that makes one row from one row, a result at the wrong row and an input from the wrong row look the same.
Leaves out: ops with several inputs (`wrong_inputs.py`).
"""

from collections.abc import Iterator, Sequence

import torch

from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ...checks.error_measurement import HEAD_AXIS
from ...watch.rows_by_request import row_spans, rows
from .explanation_fit import PER_HEAD
from .finding_case import STANDS, Case, Explanation

SHOWN = 4  # pairs of rows that are printed
MOST = 256  # rows that are compared with each other at most, if each has as many numbers
MOST_TRIED = 99  # rows whose choices count as tries, so that their number stays finite


def result_rows(case: Case) -> Iterator[Explanation]:
    """Rows, heads and columns of a place, and heads of a state (others: `permuted_windows_and_shifted_caches.py`)."""
    if case.component not in STANDS and case.right.dim() > 1:
        others = [*case.rights(), *_of_forward_before(case)]
        if case.granted is None:
            others += _elsewhere(case)
        yield from permuted(case, 0, "row", others)
    axis = HEAD_AXIS.get(case.component, 1 if case.component in PER_HEAD else None)
    if axis is not None and case.right.dim() > axis:
        yield from permuted(case, axis, "head", [])
    if case.component not in STANDS and case.right.dim() > 1 and axis != case.right.dim() - 1:
        yield from permuted(case, case.right.dim() - 1, "column", [])


def _of_forward_before(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Rows of the same place in the last forward, which memory of a launch, a graph or a transfer may still have."""
    forward = case.context.earlier.forward
    if forward is None:
        return
    side = forward.truth if case.granted is None else forward.subject
    for name, span in forward.spans.items():
        theirs = rows(side, case.finding.place, span)
        if theirs is not None and len(theirs):
            yield f'of request "{name}" in the forward before', theirs


def _elsewhere(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Labels of the same place at another stage, such as an earlier step of a chain."""
    at = case.finding.place
    for place, made in case.context.truth.places.items():
        span = next((s for s in row_spans(case.context, place.stage) if s.request == case.finding.request), None)
        if (place.layer, place.component) == (at.layer, at.component) and place.stage != at.stage and span is not None:
            begin, count = span.at(place)
            family, _, step = place.stage.partition(".")
            says = f"draft step {int(step) + 1}" if family == "chain" else f"stage {place.stage}"
            yield f"of {says}", made[begin : begin + count]


def read_rows(case: Case) -> Iterator[Explanation]:
    """Logits of the wrong final rows: every row of the event through the head."""
    if case.component != "logits" or case.piece is None:
        return
    stage, head = case.finding.place.stage, case.weights.head
    final = Place(stage, AFTER_LAYERS, "final")
    kept = [
        (f'{row} of request "{name}"', each.to(head) @ head.T)
        for name, theirs in case.everybody(final) for row, each in enumerate(theirs)
    ]
    for number in range(len(case.right)):
        for whose, scores in kept if len(kept) <= MOST else ():
            wrong = case.right.clone()
            wrong[number] = scores
            yield Explanation(f"is read from the final row {whose}", wrong)


def permuted(case: Case, axis: int, what: str, others: Sequence[tuple[str, torch.Tensor]]) -> Iterator[Explanation]:
    """Find each wrong row among all right rows; it must be exactly one of them."""
    found, right = (x.to("cpu").movedim(axis, 0) for x in (case.found, case.right))
    kept = [(row, "", right[row]) for row in range(len(right))]
    for whose, theirs in others:
        if theirs.shape[1:] == case.right.shape[1:]:
            kept += [(row, f" {whose}", each.to(right)) for row, each in enumerate(theirs.movedim(axis, 0))]
    sources = torch.stack([each for _, _, each in kept]).flatten(1)
    sources, ours = (x if case.granted is None else x.double() for x in (sources, found.flatten(1).to(right)))
    if len(ours) * sources.numel() > MOST**3:
        return
    away = distance if case.granted is not None else _differing
    apart = away(ours, sources)
    at = torch.arange(len(right))
    own = apart[at, at]
    nearest = apart.argmin(1)
    moved = (nearest != at) & (apart[at, nearest] < own / 4)
    if not moved.any():
        return
    pairs = [(row, *kept[int(nearest[row])][:2]) for row in moved.nonzero().flatten().tolist()]
    ruled = len(pairs) > 2 and len({((row - other) % len(right), whose) for row, other, whose in pairs}) == 1
    if not ruled and ((away(sources[nearest[moved]], sources) == 0).sum(1) > 1).any():
        return  # it equals several rows
    wrong = right.clone()
    wrong[moved] = sources[nearest[moved]].reshape(wrong[moved].shape).to(wrong)
    tries = float(len(sources)) ** (1 if ruled else min(len(pairs), MOST_TRIED))
    yield Explanation(_sentence(what, pairs, len(right)), wrong.movedim(0, axis), tries)


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")


def _differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (other[None] != one[:, None]).sum(-1).double()


def _sentence(what: str, pairs: Sequence[tuple[int, int, str]], count: int) -> str:
    """Pairs of rows as one rule, or the first few of them."""
    steps = {(row - other) % count for row, other, _ in pairs}
    mine = not any(whose for _, _, whose in pairs)
    for step, word in ((1, "before"), (count - 1, "after")) if mine and count > 2 and len(pairs) >= count - 1 else ():
        if steps == {step}:
            return f"each {what} is that of the {what} {word} it"
    if mine and len(pairs) == count > 2 and len(steps) == 1:
        return f"{what} n is that of {what} (n - {min(steps)}) mod {count}"
    if len(pairs) > 1 and len({(other, whose) for _, other, whose in pairs}) == 1:
        _, other, whose = pairs[0]
        return f"{what}s {', '.join(str(row) for row, _, _ in pairs[:SHOWN])} are all that of {what} {other}{whose}"
    if len(pairs) > 1 and steps == {0} and len({whose for _, _, whose in pairs}) == 1:
        return f"each {what} is that{pairs[0][2]}"
    told = [f"{what} {row} is that of {what} {other}{whose}" for row, other, whose in pairs[:SHOWN]]
    more = f", and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    return ", ".join(told) + more
