"""One arm at work: a process that serves `build`, `check`, `show` and `time`, a JSON line for a JSON line.

Leaves out: judging; who asks is `arm.py`. The engines, the replay and the reference come from whatever tree stands
first on this process's path; this folder (`perf`) is the gate's own on both sides, so both arms are timed by the same
code.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from instep.replay.participants import bare
from instep.replay.replay import Replay, served
from instep.replay.setting import Setting
from instep.report.words import divergence
from instep.trace.file import read
from instep.verdict import Exit

from .cases import Walk
from .clock import Clock
from .course import Course


def main() -> None:
    """Answer until the other end hangs up. Whatever else prints, prints to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    worker = Worker()
    for line in sys.stdin:
        asked: dict[str, Any] = msgspec.json.decode(line)
        answers.write(msgspec.json.encode(_answer(worker, asked)).decode() + "\n")


def _answer(worker: Worker, asked: dict[str, Any]) -> dict[str, Any]:
    serve: Callable[..., dict[str, Any]] = getattr(worker, asked.pop("do"))
    try:
        return serve(**asked)
    except Exception as error:  # an arm may be anybody's: what it raises is an answer
        said = " ".join(str(error).split()) or "no message"
        return {"error": said, "type": type(error).__name__}


class Worker:
    """What the arm's verbs do; `build` first."""

    def build(self, trace: str, checkpoint: str, setting: dict[str, Any]) -> dict[str, Any]:
        """Set the engine up as production has it, nothing around it, and go through the opening; says what serves."""
        if not setting["device"].startswith("cuda"):
            torch.set_num_threads(1)  # one thread: its computing time is the work that was done
        course = Course.of(read(Path(trace)))
        self.replay = Replay(course.trace, Setting(**setting), checkpoint=Path(checkpoint))
        self.clock = Clock(setting["device"])
        self.walk = Walk(bare(self.replay.plan), course)
        return {"served": served(), "files": {name: str(sys.modules[name].__file__) for name in served()}}

    def check(self) -> dict[str, Any]:
        """The course through the arm's own replay: every check, after every event."""
        outcome = self.replay.run()
        verdict = outcome.verdict
        message = divergence(outcome) if verdict.exit is Exit.DIVERGED else ""
        return {"exit": int(verdict.exit), "elements": verdict.elements, "message": message}

    def show(self, file: str) -> dict[str, Any]:
        """Walk the course once and write the states; see `arm.states` for the names."""
        shown = self.walk.show()
        tensors = {
            f"{request}/{each.name}/{layer}": tensor.detach().cpu().contiguous()
            for request, state in shown.states.items()
            for each in fields(state) if isinstance(getattr(state, each.name), dict)
            for layer, tensor in getattr(state, each.name).items()
        }
        save_file(tensors, file)
        numbers = {name: [state.length, state.root] for name, state in shown.states.items()}
        return {"numbers": numbers, "acceptance": shown.acceptance}

    def time(self, laps: int) -> dict[str, Any]:
        """Seconds per case for so many laps, [wall, cpu]; nothing is collected meanwhile."""
        gc.collect(0)
        gc.disable()
        try:
            return {"seconds": self.walk.laps(laps, self.clock)}
        finally:
            gc.enable()
