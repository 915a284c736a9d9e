"""The process of one arm. It serves `build`, `check`, `show` and `time`, with one JSON line per request and answer.

The engines, the replay and the reference come from the tree that is first on this process's path. This folder is
the gate's own in both arms, so both are timed by the same code. Leaves out: the requests (`process.py`), and judging
the answers.
"""

import gc
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from instep.diagnose import diagnose
from instep.report.divergence_message import divergence
from instep.run.build_compared_engines import bare
from instep.run.replay import Replay, served
from instep.setting import Setting
from instep.trace.file import read

from .cases import Course, Walk
from .clock import Clock


def main() -> None:
    """Answer until the input is closed. All other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    worker = Worker()
    for line in sys.stdin:
        asked: dict[str, Any] = msgspec.json.decode(line)
        answers.write(msgspec.json.encode(_answer(worker, asked)).decode() + "\n")


def _answer(worker: "Worker", asked: dict[str, Any]) -> dict[str, Any]:
    serve: Callable[..., dict[str, Any]] = getattr(worker, asked.pop("do"))
    try:
        return serve(**asked)
    except Exception as error:  # an arm may be foreign code: an exception is an answer
        said = " ".join(str(error).split()) or "no message"
        return {"error": said, "type": type(error).__name__}


class Worker:
    """The questions as methods; `build` must come first."""

    def build(
        self, trace: str, checkpoint: str, setting: dict[str, Any], clocks: Collection[str] = ()
    ) -> dict[str, Any]:
        """Build the engine without any observer, and play the opening -> which sources serve."""
        if not setting["device"].startswith("cuda"):
            torch.set_num_threads(1)  # with one thread the computing time is the work that was done
        course = Course.of(read(Path(trace)))
        self.replay = Replay(course.trace, Setting(**setting), checkpoint=Path(checkpoint))
        self.clock = Clock(setting["device"], clocks=clocks)
        self.walk = Walk(bare(self.replay.plan), course)
        return {"served": served(), "files": {name: str(sys.modules[name].__file__) for name in served()}}

    def check(self) -> dict[str, Any]:
        """Replay the course with the arm's own harness: every check after every event."""
        outcome = diagnose(self.replay)
        verdict = outcome.verdict
        message = divergence(outcome) if verdict.findings else ""
        undecided = getattr(verdict, "undecided", False)  # an older source tree has no such verdict
        return {"exit": int(verdict.exit), "elements": verdict.elements, "message": message, "undecided": undecided}

    def show(self, file: str) -> dict[str, Any]:
        """Walk through the course once and write the states; `arm.states` has the names."""
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

    def time(self, laps: int, drag: dict[str, float]) -> dict[str, Any]:
        """Seconds per case for `laps` laps, [wall, cpu, device]. The garbage collector is off meanwhile.

        drag: case -> part by which its events compute longer
        """
        gc.collect(0)
        gc.disable()
        try:
            return {"seconds": self.walk.laps(laps, self.clock, drag)}
        finally:
            gc.enable()
