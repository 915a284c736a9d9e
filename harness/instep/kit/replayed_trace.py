"""Replay a trace from Python, and hold the verdict: `replayed(small(), OPS).must_agree()`.

Leaves out: the replay itself (`instep.run`) and its messages (`instep.report`).
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from inspect import signature
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any, Self, cast

import pytest

from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput

from ..adapters import Maker, in_a_shell, makes
from ..diagnose import diagnose
from ..options import TIERS
from ..report.divergence_message import divergence
from ..report.outcome_data import why_inconclusive, worst
from ..run.replay import Outcome, Replay
from ..setting import Setting
from ..subject.engines.verbs import ByVerbs, is_make
from ..trace.file import Trace, read
from ..verdict import Comparison, Exit, tiers_of
from .argument_checks import must_be, must_be_setting, must_be_several, wrong
from .model_and_trace import Workload

Subject = str | Ops | Callable[..., Any]
EVENT = "the number of an event, from 0"
Failed: Any = pytest.fail.Exception


class Divergence(Failed, AssertionError):  # type: ignore[misc]
    """The sides differ, or the run is inconclusive. Its text is the message; pytest prints only this text."""

    def __init__(self, message: str) -> None:
        super().__init__(message, pytrace=False)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Replayed:
    """The outcome of a replay. outcomes: one for every op set; name: the trace's."""

    outcomes: Sequence[Outcome]
    name: str

    @property
    def exit(self) -> Exit:
        return worst(self.outcomes)

    @property
    def findings(self) -> list[Comparison]:
        """Everything that disagrees, first finding first."""
        return [found for outcome in self.outcomes for found in outcome.verdict.findings]

    @property
    def message(self) -> str:
        """The message of a divergence, or the reason why a run is inconclusive; empty if all agree."""
        found = [divergence(outcome) for outcome in self.outcomes if outcome.verdict.findings]
        if found or self.exit is Exit.AGREED:
            return "\n".join(found)
        why = dict.fromkeys(why_inconclusive(one) for one in self.outcomes if one.verdict.exit is Exit.INCONCLUSIVE)
        return f"INCONCLUSIVE  {self.name}: {'; '.join(why) or 'nothing was compared'}, which is never a pass"

    def must_agree(self) -> Self:
        """Raise `Divergence`, whose text is the message, unless everything agrees."""
        if self.exit is not Exit.AGREED:
            raise Divergence(self.message)
        return self


def replayed(
    what: Workload | Trace | PathLike[str] | str, subject: Subject = "plain", *, until: int | None = None,
    layers: Sequence[int] | None = None, tiers: Sequence[str] = (),
    checkpoint: PathLike[str] | str | Checkpoint | None = None,
    confirm: bool = False, **setting: Any,
) -> Replayed:
    """Replay a workload, a trace or the file of one.

    subject     an op set (a name, `module:attribute` or the value itself), or an engine: a `Maker`, or the `make` of
                an engine that is led by verbs
    until, layers, tiers, checkpoint    as the options of `instep replay`; a workload has its own model
    confirm     after a divergence run again with one thing otherwise, to say where it was made
    setting     what else `instep replay` takes: device, dtype, state_dtype, layout, strategy, conv, graphs, ...
    """
    must_be("what", what, (Workload, Trace, PathLike, str), "a workload, a trace or the file of one")
    must_be_setting(setting, "replayed", signature(replayed).parameters)
    must_be("until", until, (int, NoneType), EVENT)
    if until is not None and until < 0:
        raise BadInput("until", found=until, expected=EVENT)
    must_be("checkpoint", checkpoint, (PathLike, str, Checkpoint, NoneType), "a model directory, or a Checkpoint")
    must_be_several("tiers", tiers, str, f"a list, as [{TIERS[0]!r}], of {', '.join(TIERS)}")
    must_be_several("layers", () if layers is None else layers, int, "a list of layers, as [0]")
    if isinstance(what, Workload) and checkpoint is not None:
        raise BadInput("checkpoint", found="one for a workload", expected="none: a workload has its own model",
                       hint="small(**config) changes the model, and a trace takes another one")
    chosen, named = setting_of(subject, **setting)
    with ExitStack() as files:
        if isinstance(what, Workload) and chosen.led:  # such an engine reads its model from files
            what = what.write(Path(files.enter_context(TemporaryDirectory())))
            named = False
        trace: Trace
        model: Path | Checkpoint | None
        if isinstance(what, Workload):
            trace, model, named = what.trace, what.checkpoint, False
        else:
            trace = what if isinstance(what, Trace) else read(Path(what))
            model = checkpoint if checkpoint is None or isinstance(checkpoint, Checkpoint) else Path(checkpoint)
            named = named and not isinstance(model, Checkpoint)
        replay = Replay(trace, chosen, checkpoint=model)
        outcome = diagnose(replay, until=until, layers=layers, tiers=tiers_of(tiers), ladder=confirm)
    return Replayed((outcome if named else replace(outcome, again=()),), trace.header.name)


def setting_of(subject: Subject, **setting: Any) -> tuple[Setting, bool]:
    """How it is set up, and whether a command line can name it."""
    if setting.get("engine") is not None and subject != "plain":
        raise BadInput("engine", found=f"it together with {subject}", expected="only one of them")
    if isinstance(subject, str):
        return Setting.of(ops=subject, **setting), True
    if not isinstance(subject, Ops) and not callable(subject):
        raise wrong("subject", subject, "an op set or an engine: its name, or the object")
    where = importable(subject)
    name = where or str(getattr(subject, "name", getattr(subject, "__name__", type(subject).__name__)))
    if not isinstance(subject, Ops) and is_make(subject):
        return Setting.of(engine=name, handed=ByVerbs(name, subject), **setting), bool(where)
    if isinstance(subject, Ops) or (callable(subject) and makes(cast(Maker, subject))):
        return Setting.of(ops=name, handed=subject, **setting), bool(where)
    raise BadInput("subject", found=name, expected="an op set, a Maker, or make(model, room, *, num_steps, widest, "
                                                   "device, dtype)")


def importable(subject: object) -> str:
    """The address under which a command finds the same object; empty if there is none. Tests are not searched."""
    for module in list(sys.modules.values()):
        name = str(getattr(module, "__name__", ""))
        if name in ("", "__main__") or name.rpartition(".")[2].startswith(("test_", "conftest")):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is subject:
                return in_a_shell(f"{name}:{attribute}")
    return ""
