"""The document and the result of `instep generate`: the texts, then the figures with the verdict that supports them.

Without a check, or if the check found a fault, no speed is shown. Leaves out: making the results.
"""

import msgspec

from ..report.divergence_message import numbers, where
from ..report.document import Document
from ..report.result import Result
from ..run.trace_history import printable
from ..subject.memory_per_request import Need, spelled
from ..verdict import Comparison, Exit, Verdict
from .decode import Ask, Decoded, Speed
from .tokenizer import Words


def document(decoded: Decoded, need: Need, verdict: Verdict | None, words: Words) -> Document:
    """Every prompt and its text, the verdict, and the figures that it permits."""
    setting, speed, lines, texts = decoded.ask.setting, Speed.of(decoded), list[str](), list[str]()
    for name, prompt in decoded.ask.prompts.items():
        said = decoded.said(name)
        texts += [f'"{name}" {len(prompt)} + {len(said)} tokens',
                  f"  {printable(words.decode(prompt))}|{printable(words.decode(said))}"]  # fmt: skip
    if verdict is not None and verdict.exit is Exit.AGREED:
        alone = "" if speed.decoding is None else (
            f"{speed.decoding:.1f} tokens/s decoding ({speed.latency_ms:.2f} ms a round), ")
        lines.append(f"speed             {alone}{speed.overall:.1f} overall, prompts included")
    counts = ", ".join(f"{steps}: {count}" for steps, count in speed.steps.items())
    run = (setting.ops, setting.dtype, setting.layout, f"batches of {decoded.ask.batch}", setting.device)
    return Document("generate", exit_of(verdict), [
        judged(decoded, verdict), *lines,
        f"accepted drafts   {speed.accepted:.2f} a window",
        f"step counts       {counts} (drafts: rounds)",
        f"memory            {spelled(need.fixed)} a request and {spelled(need.per_token)} a token "
        f"({need.strategy}, {need.conv})",
        f"run               {', '.join(run)}",
        *([] if decoded.ask.sampling is None else [f"drawn             {_drawn(decoded.ask)}"]),
    ], notes=texts)  # fmt: skip


def _drawn(ask: Ask) -> str:
    said = {**msgspec.to_builtins(ask.sampling), "seed": ask.seed}
    return ", ".join(f"{name} {value:g}" for name, value in said.items())


def finding(found: Comparison) -> str:
    """The first disagreement, in one sentence."""
    return f"{where(found, short=True)}: {found.diagnosis} ({numbers(found)})"


def of(decoded: Decoded, need: Need, verdict: Verdict | None, words: Words) -> Result:
    """The same as a result. A speed is there only where the check agreed."""
    ask, speed = decoded.ask, Speed.of(decoded)
    checked = verdict is not None and verdict.exit is Exit.AGREED
    found = {
        "setup": {"ops": ask.setting.ops, "dtype": ask.setting.dtype, "layout": ask.setting.layout, "batch": ask.batch,
                  "device": ask.setting.device, "strategy": need.strategy, "conv": need.conv},
        "model": ask.checkpoint.digest,
        "sampling": None if ask.sampling is None else {**msgspec.to_builtins(ask.sampling), "seed": ask.seed},
        "checked": sorted(decoded.states) if verdict is not None else [],
        "elements": 0 if verdict is None else verdict.elements,
        "findings": [] if verdict is None else [finding(found) for found in verdict.findings],
        "speed": {"decoding": speed.decoding, "overall": speed.overall, "seconds": speed.seconds,
                  "latency_ms": speed.latency_ms} if checked else None,
        "tokens": speed.tokens, "accepted": speed.accepted,
        "steps": {str(steps): count for steps, count in speed.steps.items()},
        "memory": {"pools": dict(need.pools), "slot_table": need.slot_table, "fixed": need.fixed,
                   "per_token": need.per_token},
        "texts": {name: {"tokens": list(decoded.said(name)), "text": words.decode(decoded.said(name))}
                  for name in ask.prompts},
    }  # fmt: skip
    return Result(exit_of(verdict), ask.setting.device, found)


def exit_of(verdict: Verdict | None) -> Exit:
    """An unchecked run claims nothing, and so fails nothing."""
    return Exit.AGREED if verdict is None else verdict.exit


def judged(decoded: Decoded, verdict: Verdict | None) -> str:
    if verdict is None:
        return "not checked: no speed is shown"
    of = f"{len(decoded.states)} of {len(decoded.ask.prompts)} requests read again by the reference"
    if verdict.exit is not Exit.AGREED:
        first = f"DIVERGED  {of}: {finding(verdict.findings[0])}" if verdict.findings else (
            f"inconclusive: {of}, and nothing was compared")
        return f"{first}\n  no speed is shown; --trace FILE, then instep replay, shows where it begins"
    worst = max(one.used for one in verdict.compared)
    compared = f"{verdict.elements:,} numbers, {worst:.2f} of the allowance"
    return f"checked           {of}: tokens and states agree ({compared})"

