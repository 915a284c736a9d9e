"""What `instep generate` says: the texts, then the figures beside the verdict they stand on.

Leaves out: making them. Where the check found a fault, or did not look, no figure of speed is shown.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ..budget import Need, spelled
from ..replay.history import printable
from ..report.result import Result
from ..report.words import spelled as place_spelled
from ..verdict import Comparison, Exit, Tier, Verdict
from .decode import Decoded
from .speed import Speed
from .words import Words


def texts(decoded: Decoded, words: Words, console: Console) -> None:
    """Every prompt and what was said."""
    for name, prompt in decoded.ask.prompts.items():
        said = decoded.said(name)
        console.print(Text(f'"{name}" {len(prompt)} + {len(said)} tokens', style="bold"), soft_wrap=True)
        console.print(Text.assemble(
            "  ", (printable(words.decode(prompt)), "dim"), "|", printable(words.decode(said))
        ), soft_wrap=True)


def figures(decoded: Decoded, need: Need, verdict: Verdict | None, console: Console) -> None:
    """The verdict, and what it allows to be said."""
    setting, said = decoded.ask.setting, console.print
    said(Text(_judged(decoded, verdict), style=_style(verdict)), soft_wrap=True)
    speed = Speed.of(decoded)
    if verdict is not None and verdict.exit is Exit.AGREED:
        alone = "" if speed.decoding is None else (
            f"{speed.decoding:.1f} tokens/s decoding ({speed.latency_ms:.2f} ms a round), ")
        said(f"speed             {alone}{speed.overall:.1f} overall, prompts included", highlight=False, soft_wrap=True)
    counts = ", ".join(f"{steps}: {count}" for steps, count in speed.steps.items())
    said(f"accepted drafts   {speed.accepted:.2f} a window", highlight=False, soft_wrap=True)
    said(f"step counts       {counts} (drafts: rounds)", highlight=False, soft_wrap=True)
    said(f"memory            {spelled(need.fixed)} a request and {spelled(need.per_token)} a token "
         f"({need.strategy}, {need.conv})", highlight=False, soft_wrap=True)  # fmt: skip
    run = (setting.ops, setting.dtype, setting.layout, f"batches of {decoded.ask.batch}", setting.device)
    said(f"run               {', '.join(run)}", highlight=False, soft_wrap=True)


def finding(found: Comparison) -> str:
    """The first disagreement, in one sentence."""
    measure = "margin" if found.tier is Tier.DECISIONS else "error"
    return (f'request "{found.request}", {place_spelled(found.place)}: {found.diagnosis} '
            f"({measure} {found.worst:.3g}, limit {found.allowed:.3g}; {found.tier.value})")  # fmt: skip


def of(decoded: Decoded, need: Need, verdict: Verdict | None, words: Words) -> Result:
    """The same as a result. A speed is there only where the check agreed."""
    ask, speed = decoded.ask, Speed.of(decoded)
    checked = verdict is not None and verdict.exit is Exit.AGREED
    found = {
        "setup": {"ops": ask.setting.ops, "dtype": ask.setting.dtype, "layout": ask.setting.layout, "batch": ask.batch,
                  "device": ask.setting.device, "strategy": need.strategy, "conv": need.conv},
        "model": ask.checkpoint.digest,
        "checked": sorted(decoded.states) if verdict is not None else [],
        "elements": 0 if verdict is None else verdict.elements,
        "findings": [] if verdict is None else [finding(found) for found in verdict.findings],
        "speed": {"decoding": speed.decoding, "overall": speed.overall, "seconds": speed.seconds,
                  "latency_ms": speed.latency_ms} if checked else None,
        "tokens": speed.tokens, "accepted": speed.accepted,
        "steps": {str(steps): count for steps, count in speed.steps.items()},
        "memory": {"pools": dict(need.pools), "board": need.board, "fixed": need.fixed, "per_token": need.per_token},
        "texts": {name: {"tokens": list(decoded.said(name)), "text": words.decode(decoded.said(name))}
                  for name in ask.prompts},
    }  # fmt: skip
    return Result(exit_of(verdict), ask.setting.device, found)


def exit_of(verdict: Verdict | None) -> Exit:
    """An unchecked run claims nothing, and so fails nothing."""
    return Exit.AGREED if verdict is None else verdict.exit


def _judged(decoded: Decoded, verdict: Verdict | None) -> str:
    if verdict is None:
        return "not checked: no speed is shown"
    of = f"{len(decoded.states)} of {len(decoded.ask.prompts)} requests read again by the reference"
    if verdict.exit is not Exit.AGREED:
        first = f": {finding(verdict.findings[0])}" if verdict.findings else ": nothing was compared"
        return f"DIVERGED  {of}{first}\n  no speed is shown; --trace FILE, then instep replay, tells where it begins"
    worst = max(one.headroom for one in verdict.compared)
    numbers = f"{verdict.elements:,} numbers, {worst:.2f} of the allowance"
    return f"checked           {of}: tokens and states agree ({numbers})"


def _style(verdict: Verdict | None) -> str:
    return "dim" if verdict is None else "green" if verdict.exit is Exit.AGREED else "red"
