"""Rows of the last verify that were read with a wrong stride, from the current window and not from the allocation.

The draft head reads the target's rows of the accepted tokens from a buffer with `width` steps per row. With another
width, row r, step t is read from row r * width + t. If the engine shows the buffer, its content is looked up, poison
included. Leaves out: rows of the same event (`wrong_rows.py`).
"""

from collections.abc import Iterator

import torch

from instep_reference.contract.engine import Commit
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from instep_reference.norms import rms_norm

from ...checks.check_interface import counted
from ...watch.event_context import RowSpan
from ...watch.rows_by_request import row_spans
from .finding_case import Case, Explanation
from .wrong_rows import SHOWN, distance


def addresses(case: Case) -> Iterator[Explanation]:
    """The draft head's normed hidden rows of a commit, read with another stride or from another final row."""
    forward, place = case.history.forward, case.finding.place
    if not isinstance(case.context.event, Commit) or (place.layer, place.component) != (STAGE_LEVEL, "post_normed"):
        return
    if forward is None or case.oracle is None or case.piece is None or not case.piece.span.nodes:
        return
    if case.weights.draft is None:
        return
    yield from _by_stride(case, case.weights.draft.norm_hidden, case.piece.span.nodes)
    final = forward.subject.places.get(Place("trunk", AFTER_LAYERS, "final"))
    spans = row_spans(forward, "trunk")
    mine = next((span for span in spans if span.request == case.finding.request), None)
    if final is None or mine is None:
        return
    draft, eps = case.weights.draft, case.weights.config.drafter().eps
    if not case.found.isfinite().all():
        return
    sources = rms_norm(final.to("cpu", torch.float64), draft.norm_hidden, eps)
    apart = distance(case.found.to("cpu", torch.float64), sources)
    nearest = apart.argmin(1)
    due = [mine.begin + node for node in case.piece.span.nodes]
    taken = nearest.tolist()
    if taken != due:
        yield Explanation(_sentence(taken, due, mine, spans, case.piece.span.nodes), sources[nearest],
                          len(sources) ** len(due))  # fmt: skip


def _by_stride(case: Case, weight: torch.Tensor, nodes: tuple[int, ...]) -> Iterator[Explanation]:
    """Every visible buffer of such rows [slots, steps, D], read as if its slots had another distance."""
    slot = case.context.expected.slots_after.get(case.finding.request or "", 0)
    for region in case.context.regions if slot else ():
        units = region.units
        if region.by != "slot" or units.dim() != 3 or units.shape[2:] != case.found.shape[1:] or units.is_complex():
            continue
        (pitch, step, _), begin = units.stride(), units.storage_offset()
        numbers = units.untyped_storage().nbytes() // units.element_size() - begin
        rows = units.as_strided((numbers // step, units.shape[2]), (step, 1), begin)
        for width in range(1, units.shape[1] + 1):
            taken = [slot * width + node for node in nodes]
            if width * step != pitch and max(taken) < len(rows):
                says = f"reads the verified rows with a wrong stride: it takes slot r, step t from row r * {width} + t"
                yield Explanation(
                    f"{says}, but slots of {region.name} are {pitch / step:g} rows apart",
                    rms_norm(rows[taken].to("cpu", torch.float64), weight, case.weights.config.drafter().eps))


def _sentence(taken: list[int], due: list[int], mine: RowSpan, spans: list[RowSpan], nodes: tuple[int, ...]) -> str:
    row = spans.index(mine)
    stride = (taken[0] - nodes[0]) // max(row, 1)
    if stride >= 0 and taken == [row * stride + node for node in nodes]:
        return f"reads the verified rows with a wrong stride: it takes row r, step t from row r * {stride} + t"
    told = [f"row {number} reads {_whose(other, spans)}, not {_whose(right, spans)}"
            for number, (other, right) in enumerate(zip(taken, due, strict=True)) if other != right]  # fmt: skip
    more = [f"and {counted(len(told) - SHOWN, 'more row')}"] if len(told) > SHOWN else []
    return ", ".join(told[:SHOWN] + more)


def _whose(row: int, spans: list[RowSpan]) -> str:
    span = next(span for span in spans if span.begin <= row < span.begin + span.count)
    return f'the target\'s row {row - span.begin} of request "{span.request}"'

