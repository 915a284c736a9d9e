"""Engines with their own scheduler serve requests several times; `instep audit` judges the recordings.

Leaves out: how an engine is run (the other files here).
"""

import json
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from instep.audit.audit import audit
from instep.audit.result import of
from instep.verdict import Exit

from ..environment import TOP

REQUESTS, PROMPT, ANSWER = 48, (64, 300), (8, 24)


class Asked(NamedTuple):
    """A prompt, and how many tokens its answer has."""

    prompt: list[int]
    count: int


Recorder = Callable[[Sequence[Asked]], Sequence[Sequence[int]]]


def asked(seed: int) -> list[Asked]:
    """Requests cut out of a text, whose bytes are the tokens. Their lengths differ, so they do not end together."""
    text, drawn = (TOP / "LICENSE").read_bytes(), random.Random(seed)
    starts = [drawn.randrange(len(text) - PROMPT[1]) for _ in range(REQUESTS)]
    return [Asked(list(text[at : at + drawn.randrange(*PROMPT)]), drawn.randrange(*ANSWER)) for at in starts]


def judged(record: Recorder, times: int, model: Path, dtype: str) -> Exit:
    """Record `times` times, other requests each time. The last printed line is the finding.

    The line before it counts the tokens of which it could be decided whether they are right: `counted` reads it.
    """
    exits, first, decided, tokens = list[Exit](), "", 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(times):
            code, said, found = _once(record, asked(seed), Path(folder, f"said-{seed}.jsonl"), model, dtype)
            print(f"recording {seed}: {said}", flush=True)
            exits.append(code)
            first = first or (f"{said}; " if code is not Exit.AGREED else "")
            decided, tokens = decided + found.get("decided", 0), tokens + found.get("tokens", 0)
    print(f"judged {decided} of {tokens} tokens")
    print(f"{first}{sum(code is not Exit.AGREED for code in exits)} of {times} recordings are not right")
    return Exit.worst(exits)


def counted(said: str) -> tuple[int, int]:
    """How many tokens were decided, of how many, as `judged` printed it; nothing was, if it did not come so far."""
    lines = re.findall(r"^judged (\d+) of (\d+) tokens$", said, re.MULTILINE)
    return (int(lines[-1][0]), int(lines[-1][1])) if lines else (0, 0)


def _once(
    record: Recorder, wanted: Sequence[Asked], file: Path, model: Path, dtype: str
) -> tuple[Exit, str, Mapping[str, int]]:
    answers = record(wanted)
    for number, (one, tokens) in enumerate(zip(wanted, answers, strict=True), 1):
        if len(tokens) != one.count:  # an answer that is not there would be judged as right
            return Exit.DIVERGED, f"line {number} has {len(tokens)} of {one.count} tokens", {}
    lines = [{"prompt": one.prompt, "tokens": [*said]} for one, said in zip(wanted, answers, strict=True)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    result = of(audit(file, model, dtype=dtype))
    found = result.found
    if found["message"]:
        _, where, what = found["message"].splitlines()[:3]
        return Exit(result.exit), f"{where.strip()}: {' '.join(what.split())}", found
    said = f"{found['tokens']} tokens, {found['decided']} could be decided, {found['ties']} tied"
    return Exit(result.exit), said, found
