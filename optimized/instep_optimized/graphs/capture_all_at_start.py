"""The graphs of an engine: every body of every step count, captured at the start for every bucket of `batches`.

Leaves out: recording and replaying a body (`capture_and_replay.py`), and forwards with prompts (`prompt_segments.py`).
"""

from collections.abc import Iterable, Sequence

import torch

from instep_reference.contract.errors import Unsupported

from ..ops.op_protocols import Ops
from ..ranks import Comm
from ..round_for_step_count import IDLE, Round, inputs_of
from ..transfer.to_device import HOST
from . import Emulator, Recorder, Runner, buckets


def prepared(
    ops: Ops, rounds: Iterable[Round], device: torch.device, recorder: Recorder | None = None,
    batches: Sequence[int] | None = None, comm: Comm | None = None,
) -> Runner:
    """Capture CUDA graphs if the device and the op set support them; else use the emulator, which exposes stale data.

    A verify of one window of w tokens and w decodes have equally many packed rows, but they are different graphs. So
    the kind is part of the key.
    """
    rounds = list(rounds)
    slots = rounds[0].model.memory.slots.count
    sizes = buckets(slots) if batches is None else batches
    if max(sizes) < slots:
        raise Unsupported(f"graphs for batches of up to {max(sizes)} requests: there are {slots} slots (batches)")
    runner = Runner(recorder or recorder_for(ops, device, comm), sizes, device)
    for at in rounds:
        for kind, body in at.bodies.items():
            if body.later:
                continue
            # Idle inputs: the warm-up runs the body for real, and with slot -1 it changes no byte.
            nobody = inputs_of([-1], [-1], body.width, [[-1] * body.choices], HOST, tree=[[-1] * body.tree])
            runner.prepare((kind, at.num_steps), ops, body.run, nobody, IDLE)
    return runner


def recorder_for(ops: Ops, device: torch.device, comm: Comm | None = None, *, threads: bool = False) -> Recorder:
    """CUDA graphs if the device and the op set support them; else the emulator, which exposes stale data.

    threads: as in `CudaGraphs`
    """
    if device.type == "cuda" and ops.captures:
        from .cuda import CudaGraphs

        return CudaGraphs(comm, threads=threads)
    return Emulator(poison=True)
