"""Outcomes on the terminal: one table for all runs of a trace, its history, and every divergence.

Leaves out: the message of a divergence (`divergence_message.py`) and the machine-readable form (`outcome_data.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..checks.check_interface import counted, listed
from ..verdict import Comparison, Exit, Skipped, Tier
from . import terminal_tables
from .divergence_message import declared, divergence, exercised, named, otherwise
from .document import VERDICTS
from .terminal_tables import say, table

if TYPE_CHECKING:
    from ..run.replay import Outcome
    from ..run.trace_history import History

EXACT = {Tier.IDENTITY, Tier.BITWISE}
DECIDING = {Tier.DIRECTED, Tier.DECISIONS}  # tiers that cannot decide cases that rounding could explain


def show(outcomes: Sequence[Outcome], console: Console, *, of_recording: bool = False, verbose: bool = True) -> None:
    """Print these runs: a table for every trace, or level of `streams`, then notes, history and verdicts.

    A note that several runs share is printed once.
    of_recording: the caller prints the divergence.  verbose: list what was not judged; else count it in one line
    """
    for name in dict.fromkeys(outcome.name for outcome in outcomes):
        terminal_tables.show(_runs([outcome for outcome in outcomes if outcome.name == name]), console)
    for note, style in dict.fromkeys(note for outcome in outcomes for note in _notes(outcome, verbose)):
        say(console, note, style=style)
    _history(max(outcomes, key=lambda outcome: outcome.verdict.events).history, console)
    for outcome in outcomes:
        if not outcome.verdict.findings:
            say(console, _conclusion(outcome, outcomes))
    for outcome in outcomes:
        if outcome.verdict.findings and not of_recording:
            say(console, divergence(outcome))
    if said := left_out(outcomes[0]):  # always the last line: what was not compared has not agreed
        say(console, said, style="yellow")


def left_out(outcome: Outcome) -> str:
    """The tiers that were not judged; empty if all were."""
    asked, left = named(outcome.tiers), named(outcome.left_out)
    return f"only {asked} judged; left out: {left}" if left else ""


def _notes(outcome: Outcome, verbose: bool) -> Iterator[tuple[str, str]]:
    """Lines about a run, each with its style: what was not compared, declared, served in parts or called."""
    name = outcome.plan.setting.name
    if outcome.verdict.exit is Exit.INCONCLUSIVE and not outcome.verdict.stopped:
        yield f"{name}: {_why_nothing(outcome)}", ""
    hidden = [*_skips(outcome), *not_judged(outcome)]
    yield from ((line, "dim") for line in (hidden if verbose or not hidden else [_counted(outcome)]))
    yield from ((line, "") for line in _scratch(outcome))
    if said := declared(outcome):
        yield f"{name} declares: {said}", "dim"
    if outcome.in_parts:
        yield (f"{name}: {', '.join(outcome.in_parts)}: instep ran the unfused parts to see every place; the relation "
               "`fused` compares their bits with the fused op", "dim")  # fmt: skip
    yield from ((f"{name}: {said}", "dim") for said in exercised(outcome))


def _conclusion(outcome: Outcome, among: Sequence[Outcome]) -> Text:
    """The verdict of a run that did not diverge, and its evidence. The line begins with what differs among the runs."""
    several, run = {one.name for one in among}, outcome.plan.setting.name
    if len({_strategy(one) for one in among if (one.name, one.plan.setting.name) == (outcome.name, run)}) > 1:
        run = f"{run}, {_strategy(outcome)}"
    said = f": {short(outcome.verdict.elements)} numbers compared in {outcome.served_events} of {outcome.of} events"
    return Text.assemble(f"{outcome.name}: " * (len(several) > 1), f"{run} ", VERDICTS[outcome.verdict.exit], said)


def _strategy(outcome: Outcome) -> str:
    return f"{outcome.plan.setting.strategy}, {outcome.plan.setting.conv}"


def _runs(outcomes: Sequence[Outcome]) -> Table:
    made = table(outcomes[0].name, {
        "run": "text", "tier": "word", "compared": "number", "blocks": "number", "elements": "number",
        "undecided": "number", "allowance used": "number",
    }, framed=True)
    for outcome in outcomes:
        for run, total in zip_longest(_run(outcome), tiers(outcome)):
            made.add_row(run or "", *(("",) * 6 if total is None else cells_of(total)))
        made.add_section()
    return made


def _run(outcome: Outcome) -> list[Text]:
    """The lines of a run's first column: op set, verdict, swaps and grafts, events, options, seconds."""
    word, style = VERDICTS[outcome.verdict.exit]
    return [
        Text.assemble(f"{outcome.plan.setting.name} ", (word, style)),
        *map(Text, otherwise(outcome.variant)),
        Text(f"{'served ' * outcome.led}{outcome.served_events} of {outcome.of} events"),
        *([] if outcome.led else [Text(_strategy(outcome), style="dim")]),
        *([Text("in graphs", style="dim")] if outcome.plan.setting.graphs else []),
        *([Text("packed pools", style="dim")] if outcome.packed else []),
        *(Text(f"{side} {seconds:.1f} s", style="dim") for side, seconds in outcome.seconds.items()),
    ]


def not_judged(outcome: Outcome) -> list[str]:
    """Lines about memory and results that an engine driven through callbacks does not show, so none is judged."""
    return [
        f"{outcome.plan.setting.name}: not judged: {what}{f' [shows no {feed}]' * bool(feed)}"
        for feed, what in outcome.shown.not_judged()
    ]


def _counted(outcome: Outcome) -> str:
    """One line in place of those of `_skips` and `not_judged`."""
    kinds, skipped = len(outcome.shown.not_judged()), len(outcome.verdict.skipped)
    parts = [f"{counted(kinds, 'kind')} of results and memory that the engine does not show"] * bool(kinds)
    parts += [f"{counted(skipped, 'comparison')}, each with a reason"] * bool(skipped)
    return f"{outcome.plan.setting.name}: not judged: {'; '.join(parts)} (--verbose lists them)"


def _why_nothing(outcome: Outcome) -> str:
    if outcome.led and not outcome.shown.feeds & {"logits", "final", "state", "kv"}:
        return "nothing was compared: the engine shows neither logits, nor final rows, nor states"
    if outcome.verdict.served:
        return "nothing was compared: the selected tiers and layers have no comparison here"
    return "nothing was computed: up to here the trace has only events such as admissions"


@dataclass(frozen=True)
class Total:
    """The comparisons of a run in one tier. used: worst error / allowed error; None if all comparisons were exact.

    undecided  undecided pairs of a block and a wrong state (T2d), or choices (T4)
    pairs      all such pairs or choices; 0 for a tier that decides everything
    """

    tier: Tier
    comparisons: int
    blocks: int
    elements: int
    undecided: int
    pairs: int
    used: float | None


def tiers(outcome: Outcome) -> list[Total]:
    """One total for every tier in which something was compared."""
    totals = []
    for tier in Tier:
        mine = [compared for compared in outcome.verdict.compared if compared.tier is tier]
        if not mine:
            continue
        totals.append(Total(
            tier, len(mine), sum(compared.blocks for compared in mine), sum(compared.elements for compared in mine),
            sum(compared.undecided for compared in mine),
            sum(compared.pairs or compared.blocks for compared in mine) if tier in DECIDING else 0, most_used(mine),
        ))
    return totals


def most_used(compared: Sequence[Comparison]) -> float | None:
    """The largest used part of an allowance, where a NaN is the largest; None if everything was exact."""
    return largest(one.used for one in compared if one.tier not in EXACT or not one.agrees)


def largest(parts: Iterable[float]) -> float | None:
    """The largest part, where a NaN is the largest; None if there is no part."""
    return max(parts, key=lambda part: (math.isnan(part), part), default=None)


def cell(used: float | None) -> str:
    """A used part as the cell of a table."""
    return "exact" if used is None else f"{used:.3g}"


def cells_of(total: Total) -> tuple[str, ...]:
    undecided = f"{short(total.undecided)} of {short(total.pairs)}" if total.pairs else ""
    counts = map(short, (total.comparisons, total.blocks, total.elements))
    return (total.tier.value, *counts, undecided, cell(total.used))


def short(count: int) -> str:
    """A count in at most four digits, as in 950, 12.3k, 408M."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _skips(outcome: Outcome) -> Iterator[str]:
    """A line for every reason; a result file of an audit has them all."""
    alike: dict[tuple[str, str], list[Skipped]] = {}
    for skip in outcome.verdict.skipped:
        alike.setdefault((skip.check, skip.reason), []).append(skip)
    for (check, reason), skips in alike.items():
        said = f"{len(skips)} times" if check == "played" else f"{check} did not compare {len(skips)} times:"
        first = f", first at event {skips[0].event}, {skips[0].where}" * bool(skips[0].where)
        yield f"{outcome.plan.setting.name}: {said} {reason}{first}"


def _scratch(outcome: Outcome) -> Iterator[str]:
    """The units that the engine declares as scratch: no byte of them was compared."""
    alike: dict[tuple[str, frozenset[int]], list[int]] = {}
    for (region, layer), units in outcome.scratch.items():
        alike.setdefault((region, units), []).append(layer)
    for (region, units), layers in alike.items():
        where = f"{listed('layer', layers)}, {listed('unit', units)}"
        yield f"{outcome.plan.setting.name}: {region}, {where}: declared as scratch, so not compared"


def _history(history: History, console: Console) -> None:
    first, *changes = history.steps
    steps = " ".join([str(first[1]), *(f"-> {count} (event {event})" for event, count in changes)])
    lengths: dict[str, list[int]] = {}
    for _, accepted in history.accepted:
        for request, length in accepted.items():
            lengths.setdefault(request, []).append(length)
    say(console, f"step counts       {steps}", f"accepted drafts   {history.mean_accepted_drafts:.2f} a window")
    for text in history.texts:
        counts = " ".join(map(str, lengths.get(text.request, []))) or "none"
        say(
            console, Text.assemble((f'request "{text.request}"', "bold"), f" accepted lengths {counts}"),
            Text.assemble("  ", (text.spelled(text.prompt), "dim"), "|", text.spelled(text.said)),
        )
