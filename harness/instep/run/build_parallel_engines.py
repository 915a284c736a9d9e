"""Engines of several pipeline stages or replicas, and the logs of their parts as one.

Each part is an engine in a thread, of which exactly one runs at any time, or a stage in a process. A stage has some of
the layers, and a replica has all of them. The parts of an engine get separate op sets, so that the calls of each are
logged separately. Leaves out: tensor-parallel ranks (`build_compared_engines.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from instep_optimized import OptimizedEngine
from instep_optimized.data_parallel import Replica
from instep_optimized.data_parallel.ops_of_group import of_group
from instep_optimized.data_parallel.replica_engine import ReplicaEngine
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.pipeline import Stage
from instep_optimized.pipeline.ops_of_stage import of_stage
from instep_optimized.pipeline.stage_engine import StageEngine
from instep_optimized.ranks.lockstep import Lockstep
from instep_optimized.ranks.processes import Processes
from instep_reference.contract import shards
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Capacity

from ..setting import Setting
from ..subject.engines.ranked import RankedEngine
from ..subject.engines.replicated import GroupEngine, Padded, noted_padding
from ..subject.engines.staged import PartedEngine, StagedEngine
from ..watch.gather_event_log import RankedInstrumentation, ReplicatedInstrumentation, StagedInstrumentation
from .patched_tensors import PatchableReplica, PatchableStage

Make = Callable[[type], Callable[..., Any]]  # a kind of engine -> what makes one of it, from its op set and its part
Ticks = Sequence[Callable[[int], None]]


def parallel_engine(
    setting: Setting, make: Make, config: ModelConfig, each: Sequence[Ops], ticks: Ticks,
    group: Processes | None = None, *, patchable: bool,
) -> PartedEngine:
    """Our engine as pipeline stages or as replicas, without observers.

    each   the op set of each part in this process;  patchable: whether parts of its memory can be replaced
    ticks  of each of these stages, what is called before each tick of its schedule
    group  the processes of the stages, if each has one
    """
    if setting.stages > 1:
        shards.config_of_stage(config, 0, setting.stages)  # refuses more stages than layers
        return staged_engine(make(PatchableStage if patchable else StageEngine), config, setting.micro_batches, each,
                             ticks, group or Lockstep(setting.stages))  # fmt: skip
    return group_engine(make(PatchableReplica if patchable else ReplicaEngine), config, each)


def staged_engine(
    make: Callable[..., Any], config: ModelConfig, micro_batches: int, each: Sequence[Ops], ticks: Ticks,
    group: Lockstep | Processes,
) -> StagedEngine:
    """Build the stages of this process. In lock step all of them are at the same tick of a schedule."""

    def clock(stage: int, tick: int) -> None:
        if isinstance(group, Lockstep):  # processes wait only for what they receive
            group.tick(stage, tick)
        if ticks:
            ticks[group.ranks.index(stage)](1 + tick)

    stages = group.run([partial(make, ops=own, stage=Stage(comm, micro_batches, partial(clock, comm.rank)))
                        for own, comm in zip(each, group.comms, strict=True)])  # fmt: skip
    group.take_calls()  # of captures
    return StagedEngine(group, stages, config, micro_batches)


def group_engine(make: Callable[..., Any], config: ModelConfig, each: Sequence[Ops]) -> GroupEngine:
    """Build the replicas, which read the owners of requests and show padded rows."""
    group, owners, padded = Lockstep(len(each)), dict[str, int](), [list[Padded]() for _ in each]
    replicas = group.run([
        partial(make, ops=own, replica=Replica(comm, owners, padded=noted_padding(into)))
        for own, comm, into in zip(each, group.comms, padded, strict=True)
    ])  # fmt: skip
    group.take_calls()  # of captures
    return GroupEngine(group, replicas, config, owners, padded)


def refuse(setting: Setting, checkpoint: Checkpoint, ops: Ops, capacity: Capacity, **steps: Any) -> None:
    """Raise the error with which our engine refuses a setting, before anything is allocated."""
    parts = max(setting.ranks, setting.stages, setting.dp)
    options, (comm, *_) = setting.options(), Lockstep(parts).comms
    if setting.stages > 1:
        stage = Stage(comm, setting.micro_batches, lambda tick: None)
        checkpoint, _ = of_stage(checkpoint, ops, options, capacity, stage)
    elif setting.dp > 1:
        checkpoint, ops = of_group(checkpoint, ops, options, capacity, Replica(comm, {}))
    OptimizedEngine.settled(checkpoint, ops, options, capacity, comm=comm if setting.ranks > 1 else None, **steps)


def joins(engine: RankedEngine) -> type[RankedInstrumentation]:
    """Return what joins the logs of an engine's ranks, stages or replicas."""
    if isinstance(engine, StagedEngine):
        return StagedInstrumentation
    return ReplicatedInstrumentation if isinstance(engine, GroupEngine) else RankedInstrumentation
