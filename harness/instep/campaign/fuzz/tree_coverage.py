"""Conditions that only windows that are trees meet. They are counted where a room has `num_draft_tokens`.

Leaves out: every other condition, and the counting (`coverage.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from instep_reference.contract import engine as e

from ...trace.request_table import Standing
from .coverage_turn import Condition, Turn


def _windows(turn: Turn) -> list[Standing]:
    """The windows that a forward verifies."""
    rows = turn.event.rows if isinstance(turn.event, e.Forward) else ()
    return [turn.before.live[row.request] for row in rows if row.kind == "verify"]


def branches(standing: Standing) -> bool:
    return standing.parents != tuple(range(-1, len(standing.parents) - 1))


def _shapes_differ(turn: Turn) -> bool:
    return len({standing.parents for standing in _windows(turn) if branches(standing)}) > 1


def _beside_chain(turn: Turn) -> bool:
    return {branches(standing) for standing in _windows(turn)} == {True, False}


def _beside_prompt(turn: Turn) -> bool:
    prompts = isinstance(turn.event, e.Forward) and any(row.kind == "prefill" for row in turn.event.rows)
    return prompts and any(map(branches, _windows(turn)))


def _accepted(holds: Callable[[tuple[int, ...], int], bool]) -> Condition:
    """For a commit: whether the condition holds for the accepted drafts and the number of nodes of some tree."""

    def trees(turn: Turn) -> Iterator[tuple[tuple[int, ...], int]]:
        if isinstance(turn.event, e.Commit) and turn.event.accepted is not None:
            for name, path in zip(turn.event.requests, turn.event.accepted, strict=True):
                if branches(standing := turn.before.live[name]):
                    yield path.nodes, len(standing.parents)

    return lambda turn: any(holds(nodes, count) for nodes, count in trees(turn))


def _grown(holds: Callable[[e.Draft, int], bool]) -> Condition:
    """For a draft that grows trees: whether the condition holds for the event and the drafts of a grown tree."""

    def drafted(turn: Turn) -> bool:
        drafts = turn.before.capacity.grown(turn.before.num_steps)
        return isinstance(turn.event, e.Draft) and drafts > 0 and holds(turn.event, drafts)

    return drafted


TREES: dict[str, Condition] = {
    "trees of different shapes in one batch": _shapes_differ,
    "a tree next to a chain": _beside_chain,
    "a tree next to a prompt": _beside_prompt,
    "an accepted path that is not 1, 2, ...": _accepted(lambda nodes, _: nodes != tuple(range(1, len(nodes) + 1))),
    "nothing of a tree accepted": _accepted(lambda nodes, _: not nodes),
    "trees grown for several requests": _grown(lambda event, _: len(event.requests) > 1),
    "another window than the grown tree": _grown(lambda event, drafts: any(
        len(one) != drafts for one in event.picks or ())),
    "the last node of a tree accepted": _accepted(lambda nodes, count: nodes[-1:] == (count - 1,)),
}
