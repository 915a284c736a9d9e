"""The message of a divergence: verdict, place, diagnosis, numbers, cause, and the command that reproduces it.

Leaves out: tables (`runs_document.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place

from ..checks.check_interface import counted
from ..verdict import UNDECIDABLE, Comparison, Raised, Tier
from .command_lines import command as to_type
from .command_lines import near

if TYPE_CHECKING:
    from ..run.replay import Outcome
    from ..run.run_variants import Variant

NAMES = {
    "state": "recurrent state", "conv": "conv window", "keys": "KV keys", "values": "KV values",
    "hidden": "hidden rows", "final": "final hidden rows", "log_decay": "log decay", "core": "read-out",
    "tail": "final hidden rows of the last tokens",
    "qkv": "conv input", "mixed": "conv output", "mixer": "mixer output", "length": "length", "root": "root token",
}
MEASURES = {
    Tier.IDENTITY: "differing", Tier.BITWISE: "differing bytes", Tier.DERIVED: "error", Tier.DIRECTED: "projection",
    Tier.PROPAGATED: "error", Tier.DECISIONS: "margin",
}
NUMERIC = (Tier.DERIVED, Tier.DIRECTED, Tier.PROPAGATED, Tier.DECISIONS)
UNDECLARED_VERBS = (
    "hint: this engine declares no rounding, so instep expects fp32 precision everywhere; declare narrower storage and "
    "products with `declares` on the object that `make` returns (docs/your-engine-verbs.md)"
)
UNDECLARED = (
    "hint: this op set declares no rounding, so instep expects fp32 precision everywhere; declare narrower storage and "
    "products with `rounds` and `products` (docs/declare.md)"
)
DIFFERS = "differs from the reference"
COUNTS = {UNDECIDABLE: "part", "ties": "ties", "remembered": "differing"}  # checks whose number is not an error


def divergence(outcome: Outcome) -> str:
    """The message about the first finding of a run."""
    first, lines = outcome.verdict.findings[0], []
    served = ", ".join((outcome.plan.setting.name, *otherwise(outcome.variant)))
    if outcome.located is not None:
        lines += [outcome.located.says, *(f"hint: {hint}" for hint in outcome.located.hints)]
    if silent(outcome) and first.tier in NUMERIC and not (outcome.plan.setting.led and first.explained):
        lines.append(UNDECLARED_VERBS if outcome.plan.setting.led else UNDECLARED)
    lines += outcome.remarks
    if outcome.again:
        lines.append(command(outcome, first))
    title = f"{outcome.name}, {'engine' if outcome.plan.setting.led else 'optimized'}[{served}] against reference"
    return message(title, outcome.verdict.findings, numbers(first), lines)


def message(
    title: str, findings: Sequence[Comparison], measured: str, more: Iterable[str],
    placed: Callable[[Comparison], str] | None = None,
) -> str:
    """A message: the title, place, diagnosis and numbers of the first finding, the count of others, and more lines.

    measured: the numbers of the first finding, as `numbers` renders them. placed: renders the place of a finding.
    """
    first, *others = findings
    lines = [(placed or where)(first), f"{first.diagnosis or DIFFERS}          ({measured})"]
    lines += trace(next((found.raised for found in findings if found.raised is not None), None))
    if others:
        here = all(found.event == first.event for found in others)
        following = placed(others[0]) if placed else where(others[0], short=here)
        lines.append(f"{len(others)} more{' at this event' * (here and not placed)}, next: {following}")
    word = "INCONCLUSIVE" if all(found.check == UNDECIDABLE for found in findings) else "DIVERGED"
    return "\n".join([f"{word}  {title}", *(f"  {line}" for line in (*lines, *more))])


def numbers(found: Comparison, measures: Mapping[Tier, str] = MEASURES) -> str:
    """projection 0.9996, limit 0.5; T2d directed"""
    measure = COUNTS.get(found.check, measures[found.tier])
    worst = f"{found.worst:.4f}" if measure == "projection" else f"{found.worst:.4g}"
    return f"{measure} {worst}, limit {found.allowed:.4g}; {found.tier.value} {found.check}"


def trace(raised: Raised | None) -> list[str]:
    """The place of an error that the subject raised, and its traceback; with INSTEP_TRACEBACK also our own frames."""
    if raised is None:
        return []
    frames = raised.whole if os.environ.get("INSTEP_TRACEBACK") else raised.own
    at = [f"at {near(Path(raised.file))} line {raised.line}, in {raised.function}"] if raised.file else []
    return [*at, *(f"  {line}" for line in frames.splitlines())]


def declared(outcome: Outcome) -> str:
    """The rounding that the subject declares, in one line; empty if nothing is narrower than fp32."""
    return "no rounding" if silent(outcome) else outcome.declared.said(outcome.plan.setting.width)


def silent(outcome: Outcome) -> bool:
    """Whether the subject declares nothing at all. An op set always declares the dtype of every component."""
    return not (outcome.declared.rounds or outcome.declared.products or outcome.declared.once)


def where(found: Comparison, *, short: bool = False) -> str:
    """The place, as in: event 41 commit, request "b", layer 3 recurrent state, slot 5, head 2, columns 8-15"""
    parts = [] if short else [f"event {found.event} {found.kind}"]
    if found.request is not None:
        parts.append(f'request "{found.request}"')
    parts.append(spelled(found.place))
    if found.slot is not None:
        parts.append(f"slot {found.slot}")
    if found.head is not None:
        parts.append(f"head {found.head}")
    if found.columns is not None:
        parts.append(f"columns {found.columns[0]}-{found.columns[1]}")
    if found.rank is not None:
        parts.append(f"rank {found.rank}")
    return ", ".join(parts)


def spelled(place: Place) -> str:
    """The place in words. The stage trunk is not named."""
    layer = "" if place.layer in (STAGE_LEVEL, AFTER_LAYERS) else f"layer {place.layer} "
    return f"{drafting(place.stage)}{layer}{NAMES.get(place.component, place.component)}"


def drafting(name: str) -> str:
    """The stage in words, followed by a blank, as "draft step 3 "; empty for the trunk."""
    stage, _, step = name.partition(".")
    extend = f"draft extend {step} " if step else "draft extend "  # of MTP layer `step`, where there are several
    return {"trunk": "", "extend": extend, "chain": f"draft step {int(step or 0) + 1} ",
            "block": "block "}[stage]


def exercised(outcome: Outcome) -> tuple[str, ...]:
    """A line per form of a kernel that is not ours: how often it was called, and with how many rows."""
    lines = []
    for form, kernel in outcome.exercised.items():
        if not kernel.calls:
            lines.append(f"{form}: never called")
            continue
        most = "never with more than one row" if kernel.widest == 1 else f"at most {kernel.widest} rows"
        least = f"; windows have up to {kernel.asked} rows, but no call had that many, so such calls are not tested"
        per = " of a sequence" if "." in form else ""
        lines.append(f"{form}: {counted(kernel.calls, 'call')}, {counted(kernel.rows, 'row')}, {most}{per}"
                     f"{least if kernel.widest < kernel.asked else ''}")
    return tuple(lines)


def otherwise(variant: Variant) -> tuple[str, ...]:
    """The swaps and grafts of a run, as in: gdn=triton, trunk.0.core@2 grafted."""
    swaps = [f"{op}={source}" for op, source in variant.swap.items()]
    return (*swaps, *(f"{patch} grafted" for patch in variant.patch))


def command(outcome: Outcome, found: Comparison) -> str:
    """The shortest command that shows the finding again."""
    return command_at(outcome, found.event, found.place.layer)


def command_at(outcome: Outcome, event: int, layer: int) -> str:
    """The command that replays up to an event and judges one layer. layer: as in `Place`."""
    patches = [patch for patch in outcome.variant.patch if patch.event <= event]
    until = max([event, *(patch.until for patch in patches)])
    setting = outcome.plan.setting
    words: list[object] = [*outcome.again, near(outcome.trace), *setting.words()[:2], "--until", until]
    if layer not in (STAGE_LEVEL, AFTER_LAYERS):
        words += ["--layer", layer]
    more: list[object] = ["--tiers", named(outcome.tiers)] if outcome.left_out else []
    for op, source in outcome.variant.swap.items():
        more += ["--swap", f"{op}={source}"]
    for patch in patches:
        more += ["--graft", patch]
    if outcome.elsewhere is not None:
        more += ["--checkpoint", near(outcome.elsewhere)]
    # Without the option `streams` runs every strategy.
    return to_type(words, setting, always=["strategy"] if "streams" in outcome.again else [], more=more)


def named(tiers: Collection[Tier]) -> str:
    """The tiers as an option takes them, as in T0,T2d."""
    return ",".join(tier.value for tier in Tier if tier in tiers)
