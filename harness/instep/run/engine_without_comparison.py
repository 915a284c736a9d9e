"""A single optimized engine, and the header of its trace.

Leaves out: its setting (`setting.py`), and comparing it with anything (`build_compared_engines.py`, or `large_model.py`
for models that are too large for a whole reference).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from instep_optimized import OptimizedEngine
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import Capacity

from ..setting import Setting
from ..trace.header import SCHEMA, Header, Model, Part, Recording, sound
from ..trace.policy import Policy
from .build_compared_engines import Plan, candidates, optimized_engine


def engine(
    checkpoint: Checkpoint, setting: Setting, capacity: Capacity, *, ops: Ops | None = None,
    batches: tuple[int, ...] | None = None, **steps: Any,
) -> OptimizedEngine:
    """The engine without observers. ops: the op set, wrapped. batches: the batch sizes of its graphs.

    steps: as in `Plan`
    """
    plan = Plan(checkpoint, capacity, setting=setting, **steps)
    return optimized_engine(plan, ops or setting.op_set(), setting.options(batches=batches))


def header_of(
    policy: Policy, checkpoint: Checkpoint, *, model: Model | None = None, replay: tuple[Part, ...] | None = None,
    recording: Recording | None = None, created: Mapping[str, str] | None = None, field: str = "policy",
    directory: Path | None = None,
) -> tuple[Header, tuple[str, ...]]:
    """The header of a trace of this policy, and messages about changes of its step counts.

    model      the path of the checkpoint, if it is a file
    replay     the default op sets of `instep replay`; None means the policy's
    recording  the setting of the recorder;  created: names and versions of the recorder
    field      the name of the policy in errors;  directory: of the checkpoint, if it is a file
    """
    config = checkpoint.config
    model = model or Model("in memory", checkpoint.digest, checkpoint.digest, config.vocab, config.mtp_layers)
    header = Header(
        schema=SCHEMA, name=policy.name, claim=policy.claim,
        checkpoint=model, drafter=Model.of_block(checkpoint, directory, model.near),
        receiver=policy.receiver,
        capacity=policy.capacity, num_steps=policy.num_steps, candidates=(policy.num_steps,), adaptive=policy.adaptive,
        lag=policy.lag, seed=policy.seed, stop=policy.stop, replay=policy.replay if replay is None else replay,
        created=dict(created or {}), recording=recording or Recording(),
        controller=policy.controller if isinstance(policy.controller, Controlled) else None,
    )
    if header.controller is not None:
        header.controller.check(header.num_steps, f"{field}: controller")
    steps, messages = candidates(**header.steps(field))
    header = msgspec.structs.replace(header, candidates=steps)
    sound(header, field)
    return header, messages
