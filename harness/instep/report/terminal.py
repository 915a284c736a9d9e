"""Outcomes on the terminal: one table for all runs of a trace, its history, and every divergence.

Leaves out: the words of a divergence (`words.py`) and the machine-readable form (`data.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..checks.base import listed
from ..verdict import Comparison, Exit, Tier
from . import tables
from .tables import table
from .words import declared, divergence, named, otherwise

if TYPE_CHECKING:
    from ..replay.history import History
    from ..replay.replay import Outcome

VERDICTS = {
    Exit.AGREED: ("agrees", "green"), Exit.DIVERGED: ("DIVERGED", "red"), Exit.INCONCLUSIVE: ("inconclusive", "yellow"),
}
EXACT = {Tier.IDENTITY, Tier.BITWISE}


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Everything about these runs of one trace."""
    tables.show(_runs(outcomes), console)
    for outcome in outcomes:
        if outcome.verdict.exit is Exit.INCONCLUSIVE:
            console.print(Text(f"{outcome.plan.setting.ops}: {_why_nothing(outcome)}"), soft_wrap=True)
        _skips(outcome, console)
        _scratch(outcome, console)
        if said := declared(outcome):
            console.print(Text(f"{outcome.plan.setting.ops} declares: {said}", style="dim"), soft_wrap=True)
    _history(max(outcomes, key=lambda outcome: outcome.verdict.events).history, console)
    for outcome in outcomes:
        if outcome.verdict.findings:
            console.print(Text(divergence(outcome)), soft_wrap=True)
    if outcomes[0].left_out:  # the last line, whatever the verdict: what was not asked is not agreed
        asked, left = named(outcomes[0].tiers), named(outcomes[0].left_out)
        console.print(Text(f"only {asked} judged; left out by --tiers: {left}", style="yellow"), soft_wrap=True)


def _runs(outcomes: Sequence[Outcome]) -> Table:
    made = table(outcomes[0].name, {
        "run": "text", "tier": "word", "compared": "number", "blocks": "number", "elements": "number",
        "undec.": "number", "headroom": "number",
    }, framed=True)
    for outcome in outcomes:
        for run, total in zip_longest(_run(outcome), tiers(outcome)):
            made.add_row(run or "", *(("",) * 6 if total is None else _cells(total)))
        made.add_section()
    return made


def _run(outcome: Outcome) -> list[Text]:
    """The first column of a run, one line each: its op set and verdict, what was otherwise, how far, how long."""
    word, style = VERDICTS[outcome.verdict.exit]
    return [
        Text.assemble(f"{outcome.plan.setting.ops} ", (word, style)),
        *map(Text, otherwise(outcome.variant)),
        Text(f"{outcome.verdict.events} of {outcome.of} events"),
        Text(f"{outcome.plan.setting.strategy}, {outcome.plan.setting.conv}", style="dim"),
        *([Text("in graphs", style="dim")] if outcome.plan.setting.graphs else []),
        *(Text(f"{side} {seconds:.1f} s", style="dim") for side, seconds in outcome.seconds.items()),
    ]


def _why_nothing(outcome: Outcome) -> str:
    if outcome.verdict.served:
        return "nothing was compared of what was asked for"
    return "nothing was computed: up to here there are only admissions and the like"


@dataclass(frozen=True)
class Total:
    """What a run compared in one tier; headroom: the worst measured part of the allowed, None where all was exact."""

    tier: Tier
    comparisons: int
    blocks: int
    elements: int
    undecided: int
    headroom: float | None


def tiers(outcome: Outcome) -> list[Total]:
    """One total for every tier that was compared at all."""
    totals = []
    for tier in Tier:
        mine = [compared for compared in outcome.verdict.compared if compared.tier is tier]
        if not mine:
            continue
        exact = tier in EXACT and all(compared.agrees for compared in mine)
        totals.append(Total(
            tier, len(mine), sum(compared.blocks for compared in mine), sum(compared.elements for compared in mine),
            sum(compared.undecided for compared in mine), None if exact else _worst(mine),
        ))
    return totals


def _worst(compared: Sequence[Comparison]) -> float:
    """The largest headroom; a NaN is worse than anything."""
    return max((one.headroom for one in compared), key=lambda headroom: (math.isnan(headroom), headroom))


def _cells(total: Total) -> tuple[str, ...]:
    headroom = "exact" if total.headroom is None else f"{total.headroom:.3g}"
    counts = (total.comparisons, total.blocks, total.elements, total.undecided)
    return (total.tier.value, *map(short, counts), headroom)


def short(count: int) -> str:
    """Four digits at most: 950, 12.3k, 408M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _skips(outcome: Outcome, console: Console) -> None:
    for (check, reason), count in Counter((skip.check, skip.reason) for skip in outcome.verdict.skipped).items():
        said = f"{outcome.plan.setting.ops}: {check} did not compare {count} times: {reason}"
        console.print(Text(said, style="dim"), soft_wrap=True)


def _scratch(outcome: Outcome, console: Console) -> None:
    """What the engine declares to be nobody's: there no byte was guarded."""
    alike: dict[tuple[str, frozenset[int]], list[int]] = {}
    for (region, layer), units in outcome.scratch.items():
        alike.setdefault((region, units), []).append(layer)
    for (region, units), layers in alike.items():
        where = f"{listed('layer', layers)}, {listed('unit', units)}"
        said = f"{outcome.plan.setting.ops}: {region}, {where}: declared as scratch, not guarded"
        console.print(Text(said), soft_wrap=True)


def _history(history: History, console: Console) -> None:
    first, *changes = history.steps
    steps = " ".join([str(first[1]), *(f"-> {count} (event {event})" for event, count in changes)])
    console.print(Text(f"step counts       {steps}"), soft_wrap=True)
    lengths: dict[str, list[int]] = {}
    for _, accepted in history.accepted:
        for request, length in accepted.items():
            lengths.setdefault(request, []).append(length)
    console.print(Text(f"accepted drafts   {history.mean_accepted_drafts:.2f} a window"))
    for text in history.texts:
        counts = " ".join(map(str, lengths.get(text.request, []))) or "none"
        for line in (
            Text.assemble((f'request "{text.request}"', "bold"), f" accepted lengths {counts}"),
            Text.assemble("  ", (text.spelled(text.prompt), "dim"), "|", text.spelled(text.said)),
        ):
            console.print(line, soft_wrap=True)
