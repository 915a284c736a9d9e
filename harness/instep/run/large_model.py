"""A run of a model that is too large for a whole reference, with all checks that need none.

The truth is the ledger of a right engine over a narrow shadow of the model. It has the owners of slots, the rows of
every place, and the results of forced choices. The right states are computed layer by layer from the subject's own
hidden rows and states (`oracle/state_oracle.py`). Memory, op calls, graphs, host reads and poison are compared as in
any run. Leaves out: T2 of other places, T3, T4.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ranks.processes import Processes
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.label_ledger import LedgerEngine

from ..checks import Check, of_ranks, structure
from ..checks.known_wrong_states import Directed
from ..checks.trace_bookkeeping import Identity
from ..checks.unchanged_bytes import Bytes
from ..oracle.state_oracle import StateOracle
from ..setting import Setting
from ..subject.declared_rounding import declared
from ..trace.event_scheduler import drive
from ..trace.file import Trace
from ..trace.header import Part
from ..trace.policy import Policy
from .build_compared_engines import Participants, Plan, build_from_ops, join_sides, ledger_participant, over
from .engine_without_comparison import header_of
from .lockstep import Lockstep, Progress, run
from .replay import Outcome, of_kernels, served
from .trace_history import History

SHADOW = {"hidden": 8, "key_heads": 1, "value_heads": 1, "key_dim": 2, "value_dim": 2, "heads": 1, "kv_heads": 1,
          "head_dim": 2, "rotary_dim": 2, "intermediate": 2}  # widths of the shadow, as the ledger only counts rows


def forced_trace(
    policy: Policy, checkpoint: Checkpoint, lengths: Mapping[str, int], seed: int, *,
    replay: tuple[Part, ...] | None = None,
) -> Trace:
    """A trace of a policy that forces every choice. Prompts of these lengths are random; tokens are the ledger's."""
    header, _ = header_of(policy, checkpoint, replay=replay)
    generator = torch.Generator().manual_seed(seed)
    prompts = {
        name: tuple(torch.randint(1, checkpoint.config.vocab, (length,), generator=generator).tolist())
        for name, length in lengths.items()
    }
    steps = header.steps(policy.name)
    ledger = LedgerEngine(shadow(checkpoint.config), **steps)
    events = tuple(step.event for step in drive(policy, prompts, header, ledger))
    return Trace(Path(f"{policy.name}.jsonl"), header, events, {}, "")


def shadow(config: ModelConfig) -> ModelConfig:
    """A model with the same layers and vocabulary, as narrow as possible."""
    narrow = {**SHADOW, "experts": min(config.experts, 2), "experts_per_token": min(config.experts_per_token, 1)}
    return replace(config, **narrow)  # type: ignore[arg-type]


def outcome(
    trace: Trace, checkpoint: Checkpoint, setting: Setting, *, until: int | None = None,
    layers: Collection[int] | None = None, also: Sequence[Check] = (), judged: Sequence[Check] | None = None,
    ops: Ops | None = None, kept: Collection[int] | None = None, again: tuple[str, ...] = (), admissions: bool = True,
    batches: tuple[int, ...] | None = None, progress: Progress | None = None, group: Processes | None = None,
) -> Outcome:
    """Replay a trace in which everything is forced, up to and including event `until`.

    layers: layers whose states are judged; None means all. also: further checks. judged: checks instead of `checks`.
    ops: the op set, wrapped. kept: layers whose results are compared; None means all. again: the command that repeats
    the run, if there is one. admissions: whether all admissions are checked. batches: the batch sizes of the engine's
    graphs. group: the processes of the ranks; every rank replays the trace.
    """
    plan = replace(Plan.of(trace.header, checkpoint, setting, trace.path.name), group=group)
    seats = participants(plan, ops, batches)
    lockstep = Lockstep(trace, seats)
    chosen = checks(checkpoint, setting, layers) if judged is None else judged
    verdict = run(lockstep, [*chosen, *also], until=until, layers=kept, progress=progress, admissions=admissions)
    ran = trace.events[: lockstep.next]
    return Outcome(
        trace.header.name, trace.path, None, plan, verdict, History.of(trace.header, ran, lockstep.rules.table),
        len(trace.events), dict(lockstep.seconds), dict(seats.built.calls), served(), lockstep.last, again=again,
        scratch=dict(seats.watch.scratch), declared=seats.declared, **of_kernels(seats),
    )



def participants(plan: Plan, ops: Ops | None = None, batches: tuple[int, ...] | None = None) -> Participants:
    """Subject and ledger; a rounded run would need a whole reference."""
    built = build_from_ops(plan, ops or plan.setting.op_set(), batches=batches)
    return join_sides(plan, built, ledger_participant("ledger", plan, shadow(plan.checkpoint.config)))


def checks(checkpoint: Checkpoint, setting: Setting, layers: Collection[int] | None = None) -> Sequence[Check]:
    """The checks without a whole reference: T0, T1 and T2d. Recomputation in fp64 runs on the subject's device."""
    said = declared(over(setting.op_set(), setting), setting.activation, setting.state, setting.kv)
    oracle = StateOracle(
        checkpoint, said.rounds, setting.width, torch.device(setting.device), layers, said.products
    )
    return Identity(), Bytes(oracle), *structure(), *of_ranks(setting.ranks), Directed(oracle)
