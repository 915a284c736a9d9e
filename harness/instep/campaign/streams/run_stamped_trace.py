"""A trace in stamps through an engine: T0, T1 and the check `stream`, without a reference.

There are two levels. `model`: the model made by hand; its values must be right to the nearest label. `op`: the inputs
of the delta rule are rounded to labels first, so every state must be right to the bit. Leaves out: numbers.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import msgspec

from instep_optimized.ops.op_protocols import GdnInputs, Ops

from ...checks.trace_bookkeeping import Identity
from ...checks.unchanged_bytes import Bytes
from ...diagnose import explain_outcome
from ...run.large_model import outcome
from ...run.lockstep import Progress
from ...run.replay import Outcome
from ...setting import Setting
from ...trace.file import Trace
from .stamp_model import USUAL, stream_checkpoint
from .stamped_trace import relabelled
from .stream_check import Stream

Level = Literal["op", "model"]
LEVELS: tuple[Level, ...] = ("op", "model")


def streamed(
    trace: Trace, setting: Setting, level: Level, *, until: int | None = None, layers: Collection[int] | None = None,
    progress: Progress | None = None, recurrence: str = USUAL,
) -> Outcome:
    """Replay the trace in stamps. `setting`: op set, strategy and so on; layers: only these are judged.

    recurrence: that of the model, a row of the contract's table
    """
    named = msgspec.structs.replace(trace.header, name=f"{trace.header.name}, stamps, {level} level")
    labelled = relabelled(replace(trace, header=named), recurrence)
    exact = level == "op"
    served = setting.op_set()
    found = explain_outcome(outcome(
        labelled.trace, stream_checkpoint(labelled.config), setting, until=until, kept=layers, progress=progress,
        ops=labels_consumed(served) if exact else served,
        judged=(Identity(), Stream(labelled, labelled.config, exact=exact), Bytes()),  # the label before the bytes
    ))  # fmt: skip
    other = () if recurrence == USUAL else ("--recurrence", recurrence)
    history = replace(found.history, texts=())  # the text of such a model means nothing
    return replace(found, history=history, again=("instep", "streams", "--level", level, *other))


def labels_consumed(ops: Ops) -> Ops:
    """The op set with the results of `gdn_inputs` rounded: keys one-hot, values labels, beta 1, no decay."""

    def rounded(**given: Any) -> GdnInputs:
        found = ops.gdn_inputs(**given)
        return GdnInputs(*(x.round() + 0.0 for x in found))  # + 0.0 turns -0 into 0, which has other bits

    return replace(ops, name=f"{ops.name}, labels consumed", gdn_inputs=rounded)
