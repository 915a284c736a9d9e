"""The embedding of another token, searched in the whole table.

Leaves out: rows of the event's other tokens, which `wrong_rows.py` finds if the table has no such row.
"""

from collections.abc import Iterator

import torch

from instep_reference.contract.engine import Drafted
from instep_reference.label_mixing import MASK, mix

from ...watch.memory_changes import pattern
from ...watch.rows_by_request import row_spans
from .finding_case import Case, Explanation
from .wrong_labels import code, embedded, heads, vocab_of
from .wrong_rows import SHOWN

POISON = -2  # in the place of a token: the poison of memory; -1 is unknown


def tokens(case: Case) -> Iterator[Explanation]:
    if case.component != "embedding" or (case.oracle is None and case.finding.check != "labels"):
        return
    if case.granted is None:
        table, poison = embedded(case, vocab_of(case)), case.context.log.poison
        if poison is not None:
            table[mix(int(pattern(poison, torch.int64)) & MASK, code(case.finding.place))] = POISON
        ours, due = ([table.get(label, -1) for label in heads(x)] for x in (case.found, case.right))
        wrong = [row for row, pair in enumerate(zip(ours, due, strict=True)) if pair[0] != pair[1]]
        if wrong and all(ours[row] != -1 for row in wrong):
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
    named = ["poison (memory that nothing wrote)" if token == POISON else f"token {token}{whose.get(token, '')}"
             for token in ours]  # fmt: skip
    told = [f"row {row} is the embedding of {named[row]}; the trace has {due[row]}" for row in wrong[:SHOWN]]
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
