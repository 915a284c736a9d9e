"""Replay one trace with one model and one subject: build the sides, run them in step, return the outcome.

Every command builds a replay, and everything that it does is possible from Python:

    outcome = Replay(read(Path("fixtures/traces/adaptive.jsonl")), Setting("plain", strategy="columns")).run()
    assert outcome.verdict.exit == Exit.AGREED
"""

import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from instep_optimized.ops.fused import exact_of
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ranks.processes import Processes
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Draft
from instep_reference.contract.errors import BadInput
from instep_reference.contract.event_facts import kind_of
from instep_reference.contract.place_names import AFTER_LAYERS, Place

from ..checks import Check, for_free_runs, for_labels, for_numbers, of_ranks
from ..checks.one_sided_errors import not_judged
from ..checks.ops_on_own_inputs import once_in
from ..finding_problem import Problem
from ..options import IN_TURNS
from ..oracle.state_oracle import FreeOracle
from ..player import Observer
from ..setting import WIDTHS, Setting, moves_labels
from ..subject.declared_rounding import NOTHING, Declared
from ..subject.guarded_calls import SubjectFailed
from ..threads import threads_for
from ..tier_allowances import DITHERED, REDRAWS
from ..trace.event_rules import EventRules, verified
from ..trace.event_scheduler import own_say
from ..trace.file import Trace, read
from ..trace.header import Recording
from ..verdict import Comparison, Located, Skipped, Tier, Verdict, prefer_shared
from ..watch.event_context import EventContext
from ..watch.kernel_calls import Exercised
from ..watch.visible_places import WHOLE, Shown
from .build_compared_engines import Participants, Plan, candidates, participants_of
from .build_parallel_engines import refuse
from .compared_engine import RepeatedRuns
from .lockstep import EVERY_EVENT, Lockstep, Part, Progress, Settle, run
from .patched_tensors import PatchedOracle, must_fit
from .rank_processes import START, over_processes
from .run_variants import AS_IS, Variant
from .stress import stressed
from .subject_errors import failure
from .trace_history import History

PACKAGES = ("instep_reference", "instep_optimized", "instep")
EXACT = "float64"


@dataclass(frozen=True)
class Outcome:
    """A verdict with its evidence.

    name      the name of the trace; of: its number of events; elsewhere: the model, if it is not where the trace has it
    seconds   wall clock per side without checks; calls: op -> how often the subject's op set was called
    served    package -> sha256 of the imported source
    last      the context of the last event that was served; located: the cause of a divergence, once it is known
    variant   changes compared with a plain run
    scratch   region and layer -> units that the engine declares as scratch memory, which any event may write
    oracle    the oracle of a run that diverged and recomputed the subject's layers, until the findings are explained
    """

    name: str
    trace: Path
    elsewhere: Path | None
    plan: Plan
    verdict: Verdict
    history: History
    of: int
    seconds: dict[str, float]
    calls: dict[str, int]
    served: dict[str, str]
    last: EventContext | None = None
    located: Located | None = None
    again: tuple[str, ...] = ("instep", "replay")  # the command that gives this outcome; () if there is none
    variant: Variant = AS_IS
    scratch: Mapping[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    tiers: frozenset[Tier] = frozenset(Tier)  # tiers that were judged
    declared: Declared = NOTHING  # the subject's declared rounding
    shown: Shown = WHOLE  # its visible data at the last event
    exercised: Mapping[str, Exercised] = field(default_factory=dict)  # calls of kernels that are not ours
    oracle: PatchedOracle | None = field(default=None, repr=False)
    in_parts: tuple[str, ...] = ()  # exact fusions of the op set, of which the parts run while they are watched
    remarks: tuple[str, ...] = ()  # sentences about the first finding that do not follow from a comparison
    packed: bool = False  # pools without red zones and padding, because kernels take no strides

    @property
    def led(self) -> bool:
        """Whether the subject is an engine driven through callbacks."""
        return self.plan.setting.led

    @property
    def served_events(self) -> int:
        """The number of events that the subject served, without those that name only requests that have left."""
        return self.verdict.events - self.verdict.unserved

    @property
    def left_out(self) -> tuple[Tier, ...]:
        """The tiers that were not selected, in their order; the verdict does not cover them."""
        return tuple(tier for tier in Tier if tier not in self.tiers)


class Replay:
    """A trace with everything that is needed to run it repeatedly.

    setting     the setting of the subject; its drafter defaults to that of the recording
    checkpoint  the model, as a directory or in memory; None means the trace's model
    checks      checks to run instead of all that apply
    """

    def __init__(
        self, trace: Trace, setting: Setting | None = None, *, checkpoint: Path | Checkpoint | None = None,
        checks: Callable[[Plan], Sequence[Check]] | None = None,
    ) -> None:
        self.trace, header = verified(trace), trace.header
        directory, self.elsewhere = None, None
        if isinstance(checkpoint, Checkpoint):
            opened = checkpoint
        else:
            self.elsewhere, directory = checkpoint, checkpoint or _model_of(trace)
            mode = (setting or Setting()).recorded(header.recording).mode
            opened = Checkpoint.open(directory, mode)
        (setting or Setting()).must_draft(opened.config)
        header.checkpoint.must_be(opened, directory, trace.path.name)
        if header.drafter is not None and opened.config.block is not None:
            header.drafter.must_be_block(opened, directory, trace.path.name)
        known, _ = candidates(**header.steps(f"{trace.path.name} line 1"))
        if set(header.candidates) != set(known):
            raise BadInput(f"{trace.path.name} line 1: candidates", found=header.candidates, expected=known)
        self.plan = self._planned(opened, setting or Setting(), directory)
        self.checks, self.checkpoint = checks, checkpoint

    def refuse(self, setting: Setting) -> None:
        """Raise the error with which our engine or the trace refuses another setting, before anything is allocated."""
        for plan in self._plans(self._planned(self.plan.checkpoint, setting, self.plan.directory)):
            ops = plan.setting.subject()
            if isinstance(ops, Ops):
                refuse(plan.setting, plan.checkpoint, ops, plan.capacity, **plan.steps)

    def _planned(self, checkpoint: Checkpoint, setting: Setting, directory: Path | None) -> Plan:
        header = self.trace.header
        plan = Plan.of(header, checkpoint, setting.recorded(header.recording), f"{self.trace.path.name} line 1",
                       directory)  # fmt: skip
        must_hold(checkpoint, plan.setting.dtype)
        return plan

    def _plans(self, plan: Plan) -> tuple[Plan, ...]:
        """The plan of each engine of the trace."""
        return (plan,) if self.trace.header.receiver is None else plan.of_receiver(
            self.trace.header, f"{self.trace.path.name} line 1")

    def run(
        self, *, until: int | None = None, layers: Iterable[int] | None = None, progress: Progress | None = None,
        variant: Variant = AS_IS, also: Sequence[Check] = (), judged_from: int = 0,
        tiers: Collection[Tier] = frozenset(Tier), past_lost: bool = False, settle: Settle | None = None,
        part: Part = EVERY_EVENT,
    ) -> Outcome:
        """Replay from the start, up to and including event `until`.

        layers: keep only findings of these layers. variant: changes of this run. also: further checks, which see every
        event context. judged_from: the event at which checks of arithmetic begin, not within a round; earlier events
        must be known to agree. tiers: run only checks of these tiers. An exception of the subject is always a finding.
        past_lost, settle, part: as in `lockstep.run`.
        Leaves out: why the sides differ (`instep.diagnose`).
        """
        how: dict[str, Any] = {
            "until": until, "layers": layers, "variant": variant, "judged_from": judged_from, "tiers": tiers,
            "past_lost": past_lost, "settle": settle, "part": part,
        }
        setting = self.plan.setting
        if setting.comm == IN_TURNS:
            return self._run(None, progress=progress, also=also, **how)
        if self.trace.header.receiver is not None:
            self._plans(self.plan)  # refuses processes
        others = partial(self._run, progress=None, also=(), **how)
        if START[setting.comm] == "spawn":
            if setting.handed is not None or isinstance(self.checkpoint, Checkpoint):
                raise BadInput("--comm", found=f"{setting.comm} with an op set or a model in memory",
                               expected="their names, which new processes can read")  # fmt: skip
            others = partial(_again, self.trace.path, setting, self.elsewhere, self.checks, how)
        own = partial(self._run, progress=progress, also=also, **how)
        return over_processes(max(setting.ranks, setting.stages), setting.comm, own, others)

    def _run(self, group: Processes | None, *, variant: Variant, **how: Any) -> Outcome:
        """Replay in this process, under the stress of the setting. group: the processes of the ranks, if there are any

        how: the other parameters of `run`
        """
        with stressed(self.plan.setting, calm=variant.calm) as under:
            outcome = self._compared(group, under.observers, variant=variant, **how)
        outcome.verdict.stressed = under.results()
        return outcome

    def _compared(
        self, group: Processes | None, observers: Sequence[Observer], *, until: int | None,
        layers: Iterable[int] | None, progress: Progress | None, variant: Variant, also: Sequence[Check],
        judged_from: int, tiers: Collection[Tier], past_lost: bool, settle: Settle | None, part: Part,
    ) -> Outcome:
        """Build all engines, serve the trace, and compare. observers: further ones of the subject"""
        layers, end = None if layers is None else tuple(layers), len(self.trace.events) - 1
        must_fit(variant.patch, self.plan.in_use.config, end if until is None else min(until, end))
        must_have(layers or (), self.plan.in_use.config)
        plans = self._plans(self.plan)
        try:
            sides = [participants_of(replace(plan, group=group), variant) for plan in plans]
        except SubjectFailed as failed:
            return self._unmade(failed, variant)
        for side in sides:
            side.subject.observers = (*observers, *side.subject.observers)
        oracles = [None if self.checks is not None else oracle_for(plan, participants, variant)
                   for plan, participants in zip(plans, sides, strict=True)]  # fmt: skip
        judges = [
            [Late(check, judged_from) if judged_from else check
             for check in self._judges(plan, participants, oracle, variant) if check.tier in tiers]
            for plan, participants, oracle in zip(plans, sides, oracles, strict=True)
        ]
        second = Lockstep(self.trace, sides[1], follows=part.follows) if len(sides) > 1 else None
        lockstep = Lockstep(self.trace, sides[0], follows=part.follows, receiver=second)
        if second is not None:
            second.checks = [*judges[1], *also]
        chosen = judges[0]
        with threads_for(self.plan.checkpoint.config.hidden):
            if part.begin:
                lockstep.begin(part.begin)
            verdict = run(lockstep, [*chosen, *also], until=until, layers=layers, progress=progress,
                          past_lost=past_lost, settle=settle, part=part)
        verdict.compared = prefer_shared(verdict.compared)
        ran, at = self.trace.events[: lockstep.next], lockstep.at_last
        participants, oracle = at.participants, oracles[sides.index(at.participants)]
        return Outcome(
            self.trace.header.name, self.trace.path, self.elsewhere, self.plan, verdict,
            History.of(self.trace.header, ran, *lockstep.tables()), len(self.trace.events), lockstep.all_seconds(),
            dict(participants.built.calls), served(), at.last, variant=variant,
            scratch=dict(participants.watch.scratch), tiers=frozenset(tiers), declared=participants.declared,
            shown=WHOLE if at.last is None else at.last.shown,
            oracle=oracle if verdict.findings and isinstance(oracle, PatchedOracle) else None,
            **of_kernels(participants),
        )

    def _judges(
        self, plan: Plan, participants: Participants, oracle: PatchedOracle | FreeOracle | None, variant: Variant,
    ) -> Sequence[Check]:
        """The checks of one engine."""
        if self.checks is not None:
            return self.checks(plan)
        recorded = RecordedChoices(self.trace.recorded, self.trace.header.recording, plan.setting.mode)
        return checks_for(oracle, participants.repeated_runs, recorded, plan.setting.ranks, plan.setting.stages,
                          plan.setting.dp, uncalibrated=_uncalibrated(plan.setting, variant))  # fmt: skip

    def _unmade(self, failed: SubjectFailed, variant: Variant) -> Outcome:
        """The outcome if building the subject raised: a finding at the first event."""
        event, header = self.trace.events[0], self.trace.header
        found = failure(0, kind_of(event), failed)
        history, seconds = History.of(header, (), EventRules(header).table), {"reference": 0.0, "subject": 0.0}
        return Outcome(
            header.name, self.trace.path, self.elsewhere, self.plan, Verdict([found], served=False), history,
            len(self.trace.events), seconds, {}, served(), variant=variant,
        )


def _again(
    trace: Path, setting: Setting, checkpoint: Path | None, checks: Callable[[Plan], Sequence[Check]] | None,
    how: Mapping[str, Any], group: Processes,
) -> Outcome:
    """Run the same replay in a new process that has nothing of this one."""
    return Replay(read(trace), setting, checkpoint=checkpoint, checks=checks)._run(group, progress=None, also=(), **how)


def _uncalibrated(setting: Setting, variant: Variant) -> str:
    """Why small errors to one side are not judged in a run with this setting; empty: they are."""
    return not_judged("" if variant.swap else _op_set(setting), setting.device)


def _op_set(setting: Setting) -> str:
    """The name of the op set that runs; empty for one that was handed over, and for an engine."""
    return setting.ops if setting.handed is None and setting.engine is None else ""


class Late:
    """A check of arithmetic that sees events only from a given one on; exact checks see all."""

    def __init__(self, check: Check, begin: int) -> None:
        self.name, self.tier = check.name, check.tier
        self._check, self._begin = check, begin

    def __call__(self, context: EventContext) -> Iterable[Comparison | Skipped]:
        early = context.index < self._begin and self.tier not in (Tier.IDENTITY, Tier.BITWISE)
        return () if early else self._check(context)


# Weights that an engine keeps wide for all activations.
KEPT_WIDE = (".A_log", ".dt_bias", ".linear_attn.norm.weight", ".o_norm.weight", ".e_score_correction_bias",
             ".mixer.norm.weight", ".mixer.D")


def must_hold(checkpoint: Checkpoint, dtype: str) -> None:
    """Refuse activations narrower than the weights: an engine would cast these, a rounding that is not declared."""
    width = WIDTHS[dtype]
    for name, tensor in checkpoint.tensors.items():
        if not name.endswith(KEPT_WIDE) and torch.promote_types(width, tensor.dtype) != width:
            stored = str(tensor.dtype).removeprefix("torch.")
            raise BadInput(
                "--dtype", found=dtype, expected=f"one that holds the weights as they are stored ({name}: {stored})",
                hint="cast the checkpoint first; then both sides read the same weights",
            )


def _model_of(trace: Trace) -> Path:
    """The directory of the trace's model."""
    directory = trace.path.parent / trace.header.checkpoint.near
    if not directory.is_dir():
        raise BadInput(f"the model of {trace.path.name}", found=f"no directory {directory}",
                       expected="the model that the trace was recorded with",
                       hint="--model DIR (in pytest --instep-checkpoint DIR) sets its folder")
    return directory


def must_have(layers: Iterable[int], config: ModelConfig) -> None:
    """Refuse layers that the model does not have."""
    count = max(len(config.layers), config.mtp_layers,
                0 if config.block is None else config.block.num_hidden_layers)  # fmt: skip
    for layer in layers:
        if not 0 <= layer < count:
            raise BadInput("--layer", found=layer, expected=f"a layer of the model, 0 to {count - 1}")


def must_reach(until: int | None, trace: Trace) -> None:
    """Refuse a last event that the trace does not have."""
    last = len(trace.events) - 1
    if until is not None and until > last:
        raise BadInput("--until", found=until, expected=f"an event of {trace.path.name}, 0 to {last}")


def oracle_for(
    plan: Plan, participants: Participants, variant: Variant = AS_IS
) -> PatchedOracle | FreeOracle | None:
    """The oracle of one run; None if the subject moves labels and nothing is recomputed."""
    if moves_labels(participants.built.ops):
        return None
    declared = participants.declared
    if participants.built.engine is not None and not participants.built.engine.shows_layers:
        memory = participants.built.instrumentation is not None
        return FreeOracle(
            plan.in_use, declared.rounds, plan.setting.width, declared.products, redraws=REDRAWS,
            dithered=DITHERED, memory=memory, repeated_runs=participants.repeated_runs,
        )
    setting = plan.setting
    oracle = PatchedOracle(
        plan.in_use, declared.rounds, setting.width, declared.products,
        once_in(_op_set(setting), setting.device, declared.products), declared.once)
    oracle.patches = frozenset(variant.patch)
    return oracle


def of_kernels(participants: Participants) -> dict[str, Any]:
    """The fields of an outcome about kernels that are not ours."""
    ops, log = participants.built.ops, participants.built.instrumentation
    return {"exercised": {} if log is None else log.exercised, "packed": ops is not None and ops.packed,
            "in_parts": () if ops is None else exact_of(ops)}


def checks_for(
    oracle: PatchedOracle | FreeOracle | None, repeated_runs: RepeatedRuns | None,
    recorded: "RecordedChoices | None" = None, ranks: int = 1, stages: int = 1, replicas: int = 1,
    uncalibrated: str | None = None,
) -> tuple[Check, ...]:
    """All checks that apply to these sides. Checks keep data of their run, so each run needs new ones.

    repeated_runs: further draws of the rounded run; None means none. recorded: the check against the choices of a
    recorded trace, if there are any. ranks, stages, replicas: of the subject. uncalibrated: as in `for_numbers`
    """
    if oracle is None:
        return (*of_ranks(ranks, stages, replicas), *for_labels())
    checks = (for_free_runs(oracle, repeated_runs) if isinstance(oracle, FreeOracle)
              else for_numbers(oracle, repeated_runs, uncalibrated))  # fmt: skip
    checks = (*of_ranks(ranks, stages, replicas), *checks)
    return checks if recorded is None else (recorded, *checks)


class RecordedChoices:
    """A check of the reference: compare every choice of the fp64 reference, forced or not, with the recorded one.

    A changed reference would change the expectations of both sides unnoticed. The recording engine's own choices, which
    are stored with the trace, reveal it. A recorder with another width or drafter may choose differently; then the
    check is skipped with that reason.
    """

    name = "remembered"
    tier = Tier.DECISIONS

    def __init__(self, recorded: Mapping[str, torch.Tensor], recording: Recording, drafter: str) -> None:
        self.recorded, self.other = recorded, ""
        if recording.dtype != EXACT:
            self.other = f"the recorder chose in {recording.dtype}; the reference chooses in {EXACT}"
        elif recording.drafter != drafter:
            self.other = f"the recorder drafted with {recording.drafter}; {drafter} is replayed"

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        said = own_say(context.event, context.truth.answer)
        if said is None:
            return
        known = self.recorded.get(f"own.{context.index}")
        if known is None or self.other:
            unsaid = "the trace has no choices of its recorder"
            yield Skipped(self.name, context.index, self.other or unsaid)
            return
        same = said.shape == known.shape
        if same and not said.numel():  # windows of the root alone
            return
        wrong = int((said != known).sum()) if same else said.numel()
        stage = "chain.1" if isinstance(context.event, Draft) else "trunk"
        yield Comparison(
            self.name, self.tier, context.index, context.kind, Place(stage, AFTER_LAYERS, "pick"),
            elements=said.numel(), worst=float(wrong), allowed=0.0,
            problem=None if wrong == 0 else Problem("differs", (
                f"the reference now chooses {said.tolist()}; when the trace was recorded, it chose "
                f"{known.tolist() if same else 'another number of tokens'}"
            )),
        )


def served() -> dict[str, str]:
    """The source that was imported: a digest over the files of each package."""
    return {name: _imported(Path(str(sys.modules[name].__file__)).parent) for name in PACKAGES}


def source_digest(root: Path) -> str:
    """The digest of the Python files in a folder."""
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


_imported = cache(source_digest)  # once, as later changes of files are not imported
