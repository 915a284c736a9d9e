"""The embedding of another token, searched in the whole table.

Leaves out: rows of the event's other tokens, which `wrong_rows.py` finds if the table has no such row.
"""

from collections.abc import Iterator

import torch

from instep_reference.contract.engine import Drafted

from ...watch.rows_by_request import row_spans
from .finding_case import Case, Explanation
from .wrong_labels import embedded, heads, vocab_of
from .wrong_rows import SHOWN


def tokens(case: Case) -> Iterator[Explanation]:
    if case.component != "embedding" or (case.oracle is None and case.finding.check != "labels"):
        return
    if case.granted is None:
        table = embedded(case, vocab_of(case))
        ours, due = ([table.get(label, -1) for label in heads(x)] for x in (case.found, case.right))
        wrong = [row for row, pair in enumerate(zip(ours, due, strict=True)) if pair[0] != pair[1]]
        if wrong and all(ours[row] >= 0 for row in wrong):
            yield Explanation(_sentence(case, wrong, ours, due), case.found)
        return
    rows = case.weights.embedding.to("cpu", torch.float64)
    ours, due = (nearest(x.to("cpu", torch.float64), rows) for x in (case.found, case.right))
    wrong = [row for row, pair in enumerate(zip(ours, due, strict=True)) if pair[0] != pair[1]]
    if wrong:
        yield Explanation(_sentence(case, wrong, ours, due), rows[ours], float(len(rows)) ** len(wrong))


def _sentence(case: Case, wrong: list[int], ours: list[int], due: list[int]) -> str:
    own = _own(case)
    whose = {own: ", the draft head's own pick"}
    told = [f"row {row} is the embedding of token {ours[row]}{whose.get(ours[row], '')}; the trace has {due[row]}"
            for row in wrong[:SHOWN]]  # fmt: skip
    more = [f"and {len(wrong) - SHOWN} more rows"] if len(wrong) > SHOWN else []
    return ", ".join(told + more)


def _own(case: Case) -> int | None:
    """The draft head's own pick of the draft that a chain step continues from."""
    stage, _, step = case.finding.place.stage.partition(".")
    answer, spans = case.context.subject.answer, row_spans(case.context, case.finding.place.stage)
    row = next((row for row, span in enumerate(spans) if span.request == case.finding.request), None)
    if stage != "chain" or row is None or not isinstance(answer, Drafted) or answer.own_parents is not None:
        return None
    return int(answer.own[row, int(step) - 1])


def nearest(rows: torch.Tensor, table: torch.Tensor) -> list[int]:
    """The row of a table that is nearest to each of these rows."""
    found: list[int] = torch.cdist(rows, table).argmin(1).tolist()
    return found
