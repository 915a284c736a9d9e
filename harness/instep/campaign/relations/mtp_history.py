"""Rows of later MTP layers, which depend on where chunks and rounds ended and not on the tokens alone.

MTP layer i pairs a row with the token i positions later. A token that is not known yet is guessed by the layers before,
and the row is never recomputed. The step count also decides which rows a layer reads. So two runs that bring the same
tokens in different steps may rightly differ there, and relations leave these rows out.
"""

from __future__ import annotations

from dataclasses import replace

from instep_reference.contract.engine import RequestState
from instep_reference.contract.place import Place, draft_stage

from .by_position import PositionRecord

WHY = "rows of MTP layers after the first depend on where chunks and rounds ended: not compared"
FIRST = draft_stage(0)


def guessing(place: Place) -> bool:
    """Whether a later MTP layer of a draft extend computes this place."""
    return place.stage.startswith(f"{FIRST}.")


def without_guesses(record: PositionRecord) -> PositionRecord:
    """Drop everything that depends on more than the tokens. A record without later MTP layers is returned as it is."""
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
