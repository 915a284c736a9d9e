"""What hangs on where chunks and rounds ended, beside on the tokens: what MTP layers behind the first read and keep.

Layer i pairs a row with a token i places further on. What is not known yet is guessed by the layers before, and the row
is never made again; which rows a layer reads hangs on the step count, too. So two runs that bring the same tokens in
other steps may differ there, and rightly. Leaves out: everything else, of which that is not so.
"""

from __future__ import annotations

from dataclasses import replace

from instep_reference.contract.engine import RequestState
from instep_reference.contract.place import Place, draft_stage

from .by_position import PositionRecord

WHY = "what MTP layers behind the first keep hangs on where chunks and rounds ended: it is not compared"
FIRST = draft_stage(0)


def guessing(place: Place) -> bool:
    """Whether a later MTP layer of a draft extend makes it."""
    return place.stage.startswith(f"{FIRST}.")


def without_guesses(record: PositionRecord) -> PositionRecord:
    """The record as far as it hangs on the tokens alone; the very same where there are no later layers."""
    if not any(map(guessing, {place for _, place, _ in record.rows})):
        return record
    return replace(
        record, blocks=[block for block in record.blocks if not guessing(block.place)],
        standings=[replace(standing, state=_first(standing.state)) for standing in record.standings],
        rows={at: row for at, row in record.rows.items() if not guessing(at[1])},
        states={at: _first(state) for at, state in record.states.items()},
    )


def _first(state: RequestState) -> RequestState:
    keys, values = ({layer: x for layer, x in each.items() if layer < 1}
                    for each in (state.draft_keys, state.draft_values))  # fmt: skip
    return replace(state, draft_keys=keys, draft_values=values)
