"""Traces of a schedule of step counts: one window after the other, with a number of accepted drafts each.

Leaves out: what a commit strategy makes of them (`tests/harness/test_sglang_ring.py`).
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from instep.cli.record import make
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.header import Room
from instep.trace.policy import Arrival, Policy, Steps
from instep.verdict import Exit
from instep_reference.contract import engine as e
from support.inputs.checkpoints import write

Round = tuple[int, int]  # tokens of its window, and how many of them are accepted
_FOLDER = TemporaryDirectory(prefix="schedules-")  # until the process ends
PROMPTS = {"one": (7, 9, 3)}
ROOM = Room(slots=(3, 1), pages=tuple(range(16, 0, -1)), page_size=8, max_tokens=32)
ONE_HEAD = {  # K = V = 32, the smallest that SGLang's ring serves
    "vocab_size": 64, "num_hidden_layers": 2, "full_attention_interval": 2, "linear_num_key_heads": 1,
    "linear_num_value_heads": 1, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip


@cache
def model() -> Path:
    return write(Path(_FOLDER.name) / "model", **ONE_HEAD)


def schedule(rounds: Sequence[Round], name: str = "schedule") -> Trace:
    """One request, its prompt in one chunk, then these rounds."""
    return make(model(), PROMPTS, policy(tuple(rounds), name), Path(_FOLDER.name) / f"{name}.jsonl")


def policy(rounds: Sequence[Round], name: str) -> Policy:
    steps = [window - 1 for window, _ in rounds]
    changed = [number for number in range(1, len(steps)) if steps[number] != steps[number - 1]]
    return Policy(
        name=name, claim="The states are right after every window of the schedule.", capacity=ROOM,
        arrivals=(Arrival("a", "one", max_new=1 + sum(accepted for _, accepted in rounds)),), num_steps=steps[0],
        adaptive={"candidate_steps": sorted({*steps, 1} - {0})},
        steps=tuple(Steps(1 + number, steps[number]) for number in changed),
        accept=tuple(accepted - 1 for window, accepted in rounds if window > 1), rounds=1 + len(rounds),
    )


# Of the page of the finding: name -> windows with their accepted tokens.
SCHEDULES: dict[str, tuple[Round, ...]] = {
    "8 x 4": ((4, 4),) * 8,
    "18 x 1": ((1, 1),) * 18,
    "6 x 2, 4": (*((2, 2),) * 6, *((4, 4),) * 3),
    "14 x 1, 4": (*((1, 1),) * 14, *((4, 4),) * 2),
    "6 x 2, 8": (*((2, 2),) * 6, *((8, 8),) * 2),
    "6 x 2, 8 of which 3": (*((2, 2),) * 6, *((8, 3),) * 3),
}


def first_wrong(name: str, ops: str, strategy: str, **more: object) -> tuple[int, str] | None:
    """Replay a schedule: (the first window, from 0, whose commit is wrong, what is said of it), or None."""
    made = schedule(SCHEDULES[name], "".join(letter if letter.isalnum() else "_" for letter in name))
    verdict = Replay(made, Setting(ops, strategy=strategy, **more)).run().verdict  # type: ignore[arg-type]
    if verdict.exit is Exit.AGREED and verdict.events == len(made.events):
        return None
    finding = verdict.findings[0]
    ends = [index for index, event in enumerate(made.events) if isinstance(event, e.Commit) or (
        isinstance(event, e.Forward) and event.rows[0].kind == "decode")]  # fmt: skip
    return ends.index(finding.event), f"{finding.check} {finding.place.component}: {finding.diagnosis}"


def main(words: list[str]) -> int:
    """Replay every schedule under the ring of the release on Python's path. Exit 1: one is wrong. --json: as JSON."""
    found = {name: first_wrong(name, "peers.kernels.sglang:RING", "sglang_ring") for name in SCHEDULES}
    if words == ["--json"]:
        print(json.dumps(found))
        return 0
    for name, wrong in found.items():
        print(f"{name}: " + ("right" if wrong is None else f"window {wrong[0]}, {wrong[1]}"))
    names = [name for name, wrong in found.items() if wrong is not None]
    print(f"the state is wrong after {'; '.join(names)}" if names else "right after every schedule")
    return 1 if names else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
