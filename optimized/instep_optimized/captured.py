"""The graphs of an engine: every body of every step count, captured at the start for every bucket.

Leaves out: how a body is recorded and replayed (`graphs/`), and forwards of several kinds, which are never held.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .graphs import Emulator, Recorder, Runner, buckets
from .ops.base import Ops
from .round import IDLE, Body, Round, inputs_of


def prepared(
    ops: Ops, rounds: Iterable[Round], device: torch.device, recorder: Recorder | None = None
) -> Runner:
    """CUDA graphs where the device and the op set have them; elsewhere the emulator, which finds what goes stale.

    A verify of width w and w decodes have equally many rows, and are different graphs: the kind is part of the key.
    """
    rounds = list(rounds)
    runner = Runner(recorder or _recorder(ops, device), buckets(rounds[0].model.memory.slots.count), device)
    for at in rounds:
        bodies: list[tuple[str, Body, int, int]] = [("decode", at.decode, 1, 1)]
        if at.num_steps:
            bodies += [
                ("draft", at.draft, 1, at.num_steps), ("verify", at.verify, at.width, 0),
                ("commit", at.commit, at.width, 2),
            ]
        for kind, body, width, choices in bodies:
            nobody = inputs_of([-1], [-1], width, [[-1] * choices], device)
            runner.prepare((kind, at.num_steps), ops, body, nobody, IDLE)
    return runner


def _recorder(ops: Ops, device: torch.device) -> Recorder:
    if device.type == "cuda" and ops.captures:
        from .graphs.cuda import CudaGraphs

        return CudaGraphs()
    return Emulator()
