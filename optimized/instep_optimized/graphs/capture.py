"""The graphs of an engine: every body of every step count, captured at the start for every bucket.

Leaves out: how a body is recorded and replayed (`runner.py`), and forwards of several kinds, which always run eagerly.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..graphs import Emulator, Recorder, Runner, buckets
from ..ops.base import Ops
from ..round import IDLE, Round, inputs_of
from ..transfer.to_device import HOST


def prepared(
    ops: Ops, rounds: Iterable[Round], device: torch.device, recorder: Recorder | None = None
) -> Runner:
    """CUDA graphs where the device and the op set have them; elsewhere the emulator, which makes stale data show.

    A verify of one window of w tokens and w decodes have equally many packed rows, but they are different graphs. So
    the kind is part of the key.
    """
    rounds = list(rounds)
    runner = Runner(recorder or _recorder(ops, device), buckets(rounds[0].model.memory.slots.count), device)
    for at in rounds:
        for kind, body in at.bodies.items():
            if body.later:
                continue
            # Idle inputs: the warm-up runs the body for real, and with slot -1 it changes no byte.
            nobody = inputs_of([-1], [-1], body.width, [[-1] * body.choices], HOST, tree=[[-1] * body.tree])
            runner.prepare((kind, at.num_steps), ops, body.run, nobody, IDLE)
    return runner


def _recorder(ops: Ops, device: torch.device) -> Recorder:
    if device.type == "cuda" and ops.captures:
        from .cuda import CudaGraphs

        return CudaGraphs()
    return Emulator(poison=True)
