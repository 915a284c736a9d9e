"""All settings of a trace: a replay for each row of a covering array, what it met, and what was not run.

A row is refused by the engine or the trace itself (`Replay.refuse`), so this file has no list of what is supported. A
row that is refused only while it runs, or that compares nothing, is reported with its reason, too.
Leaves out: the choice of rows (`covering_array.py`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from instep_optimized.commit import known
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.engine import Forward
from instep_reference.contract.errors import BadInput, InstepError, bytes_of

from ..checks.check_interface import counted
from ..options import CHOICES, either
from ..report.document import Data, Document, Kind, Listing, messages, short, word
from ..report.outcome_data import of as result_of
from ..report.outcome_data import why_inconclusive
from ..report.result import Result, Session
from ..report.result_difference import readable
from ..run.replay import Outcome, Replay, served
from ..setting import STOCHASTIC, Setting
from ..trace.file import Trace, decode
from ..verdict import Exit, Tier
from .covering_array import CoveringArray, Group, Row
from .runner import TrialRunner

SIZES = {"all": 2, "each": 1}  # value of --settings -> cells of a group; names of settings are as `all`
STAGES = 3  # with two, a wrong micro-batch is hidden
# Setting -> its values, the usual one first. None: those of the trace or of the op set.
FACTORS: Mapping[str, Sequence[Any] | None] = {
    "strategy": None, "conv": None, "layout": CHOICES["layout"],
    "snapshot_layout": (None, *CHOICES["snapshot_layout"]), "dtype": None,
    "state_dtype": (None, *CHOICES["state_dtype"]), "state_rounding": (None, f"{STOCHASTIC}:7"),
    **{name: (None, *CHOICES[name]) for name in ("kv_dtype", "kept_dtype", "chunk_dtype", "ring_dtype")},
    "graphs": (False, True), "prompt_graphs": None, "overlap": (False, True), "guarded": (True, False),
    "ranks": (1, 2), "experts": None, "stages": (1, STAGES), "micro_batches": (1, 2), "dp": (1, 2),
}  # fmt: skip


class Ran(msgspec.Struct, forbid_unknown_fields=True):
    """A row that was run. row: its values that are not usual; why: it was refused, or judged nothing

    found  the place of its outcome in `runs` of the file, if it diverged
    """

    row: dict[str, Any]
    exit: int
    seconds: float
    events: int = 0
    elements: int = 0
    why: str = ""
    found: int | None = None


class Rows(msgspec.Struct, forbid_unknown_fields=True):
    """The rows of one op set that were run, in all sessions. The first fields must be the same in every session."""

    trace: str
    setting: dict[str, Any]
    settings: str
    until: int | None
    judged: list[str]
    served: dict[str, str]
    factors: dict[str, list[Any]]
    ran: list[Ran] = []
    sessions: list[Session] = []


class _NotRun(msgspec.Struct, forbid_unknown_fields=True):
    values: list[tuple[str, Any]]
    why: str


class _Sums(msgspec.Struct, forbid_unknown_fields=True):
    """The sums of one op set, as `AllSettings.data` gives them."""

    ops: str
    exit: Literal[0, 1, 3]
    rows: int
    events: int
    elements: int
    seconds: float
    size: int
    met: int
    of: int
    left: list[list[tuple[str, Any]]]
    not_run: list[_NotRun]


class _Kept(msgspec.Struct):
    arrays: list[Rows]
    runs: list[dict[str, Any]]
    coverage: list[_Sums]


def named(settings: str, left: Sequence[str]) -> tuple[str, ...]:
    """The settings that vary. left: those without a typed value"""
    if settings in SIZES:
        return tuple(left)
    names = tuple(word.strip().replace("-", "_") for word in settings.split(","))
    for name in names:
        if name not in left:
            found = name if name not in FACTORS else f"{name}, which has a value"
            raise BadInput("--settings", found=found, expected=f"{either(tuple(SIZES))}, or some of {', '.join(left)}")
    return names


def factors_of(setting: Setting, trace: Trace, names: Iterable[str], *, experts: bool) -> dict[str, tuple[Any, ...]]:
    """The values of each of these settings. experts: whether the model has some"""
    ops = setting.subject()
    if not isinstance(ops, Ops):
        raise BadInput("--settings", found=setting.name, expected="an op set: an engine decides its settings itself")
    prompts = [sum(row.tokens if row.kind == "prefill" else trace.header.room().widest(max(trace.header.candidates))
                   for row in event.rows)
               for event in trace.events
               if isinstance(event, Forward) and any(row.kind == "prefill" for row in event.rows)]  # fmt: skip
    own: Mapping[str, Sequence[Any]] = {
        "strategy": tuple(known("state", ops)), "conv": tuple(known("conv", ops)),
        "dtype": (setting.dtype, *CHOICES["dtype"]),
        "prompt_graphs": (None, *(str(max(prompts)) for _ in prompts[:1])),
        "experts": CHOICES["experts"] if experts else (),
    }  # fmt: skip
    values = {name: tuple(dict.fromkeys((getattr(setting, name), *(own[name] if one is None else one))))
              for name, one in FACTORS.items() if name in names}  # fmt: skip
    return {name: several for name, several in values.items() if len(several) > 1}


class AllSettings:
    """The rows of one op set, and the array that chooses the next one.

    base     the replay with the settings that were typed
    rows     those that earlier sessions ran; new ones are added
    """

    def __init__(self, base: Replay, rows: Rows, factors: Mapping[str, Sequence[Any]]) -> None:
        self.base, self.rows = base, rows
        self.array = CoveringArray(factors, self._refusal, min(SIZES.get(rows.settings, SIZES["all"]), len(factors)))
        for ran in rows.ran:
            self._note(ran)

    def _refusal(self, row: Row) -> str:
        try:
            self.base.refuse(self.setting(row))
        except InstepError as refused:
            return str(refused)
        return ""

    def setting(self, row: Row) -> Setting:
        """A row as a setting; raises what refuses it."""
        return replace(self.base.plan.setting, **row)  # type: ignore[arg-type]

    def _note(self, ran: Ran) -> None:
        row = self.array.usual | ran.row
        if ran.why:
            self.array.fail(row, ran.why)
        else:
            self.array.met(row)

    def run(self, run: TrialRunner, play: Callable[[Setting], Outcome], runs: list[dict[str, Any]],
            session: Session) -> None:  # fmt: skip
        """Run rows until every group is met or the time is over. runs: the outcomes that diverged"""
        self.rows.sessions.append(session)
        for row in run.trials(self.array, self._name):
            ran, before = Ran(self._unusual(row), Exit.AGREED, 0.0), run.seconds
            try:
                outcome = play(self.setting(row))
            except InstepError as refused:
                ran.exit, ran.why = Exit.BAD_INPUT, str(refused)
            else:
                verdict = outcome.verdict
                ran.exit, ran.events, ran.elements = verdict.exit, verdict.events, verdict.elements
                if verdict.exit is Exit.INCONCLUSIVE:
                    ran.why = why_inconclusive(outcome)
                elif verdict.exit is Exit.DIVERGED:
                    ran.found = len(runs)
                    runs.append(msgspec.to_builtins(result_of([outcome]).data()["runs"][0]))
            ran.seconds = round(run.seconds - before, 2)
            session.seconds = round(session.seconds + ran.seconds, 2)
            self.rows.ran.append(ran)
            self._note(ran)

    def _name(self, row: Row) -> str:
        words = [f"{name} {value}" for name, value in self._unusual(row).items()]
        return f"{self.rows.setting['ops']}: {', '.join(words) or 'as typed'}"

    def _unusual(self, row: Row) -> dict[str, Any]:
        return {name: value for name, value in row.items() if value != self.array.usual[name]}

    @property
    def exit(self) -> Exit:
        """The verdict: it agrees only if every row agrees, and no group is left or was judged in vain."""
        exits = {Exit(ran.exit) for ran in self.rows.ran} - {Exit.INCONCLUSIVE, Exit.BAD_INPUT}
        rows = [self._unusual(row) for row in self.array.failed.values()]
        vain = any(ran.row in rows and ran.exit == Exit.INCONCLUSIVE for ran in self.rows.ran)
        return Exit.worst(exits | ({Exit.INCONCLUSIVE} if vain or self.array.due else set()))

    def data(self) -> dict[str, Any]:
        """The sums for readers of the file, and every group that was not run, with the reason."""
        array = self.array
        return {
            "ops": self.rows.setting["ops"], "exit": int(self.exit), "rows": len(self.rows.ran),
            "events": sum(ran.events for ran in self.rows.ran), "elements": sum(ran.elements for ran in self.rows.ran),
            "seconds": round(sum(ran.seconds for ran in self.rows.ran), 1), "size": array.size,
            "met": len(array.rows) - len(array.due), "of": len(array.rows), "left": sorted(array.due, key=repr),
            "not_run": [{"values": group, "why": why} for group, why in array.refused.items()],
        }


def begun(kept: list[Rows], rows: Rows, path: Path | None) -> Rows:
    """The rows to go on with: those of the same op set in the file, or `rows`, which join it."""
    for one in kept:
        if one.trace != rows.trace:
            raise BadInput(f"{path}: trace of {one.setting['ops']}", found=rows.trace, expected=one.trace,
                           hint="another --json file begins again")  # fmt: skip
        if one.setting["ops"] == rows.setting["ops"]:
            for field in ("setting", "settings", "until", "judged", "served", "factors"):
                if msgspec.to_builtins(getattr(one, field)) != msgspec.to_builtins(getattr(rows, field)):
                    raise BadInput(f"{path}: {field} of {rows.setting['ops']}", found=getattr(rows, field),
                                   expected=f"{getattr(one, field)}, with which it was begun",
                                   hint="another --json file begins again")  # fmt: skip
            return one
    kept.append(rows)
    return rows


def read(path: Path | None) -> tuple[list[Rows], list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows, the outcomes and the sums in a file; none if there is no file yet."""
    if path is None or not path.is_file():
        return [], [], []
    kept: _Kept = decode(bytes_of(path), _Kept, str(path), "a file that `instep replay --settings` wrote")
    if kept.runs:
        readable({"exit": 1, "runs": kept.runs}, str(path))
    names, sums = ([*map(str, each)] for each in (
        (one.setting.get("ops") for one in kept.arrays), (one.ops for one in kept.coverage)))
    if sorted(names) != sorted(sums) or len({*names}) < len(names):
        raise BadInput(f"{path}: coverage", found=sums, expected=f"one of each of {names}")
    for number, array in enumerate(kept.arrays):
        if not isinstance(array.setting.get("device"), str):
            raise BadInput(f"{path}: arrays[{number}].setting", found="no device", expected="a setting")
        for at, ran in enumerate(array.ran):
            if wrong := _wrong(ran, array.factors, len(kept.runs)):
                raise BadInput(f"{path}: arrays[{number}].ran[{at}]", found=wrong, expected="a row as it was written")
    return kept.arrays, kept.runs, msgspec.to_builtins(kept.coverage)


def _wrong(ran: Ran, factors: Mapping[str, Sequence[Any]], runs: int) -> str:
    """The reason why no session has written this row; "" if one may have. runs: the number of outcomes in the file"""
    if unknown := [name for name, value in ran.row.items() if value not in factors.get(name, ())]:
        return f"a value of {unknown[0]} that is not in factors"
    if ran.exit == Exit.AGREED:
        return "agreement in which nothing was compared" if ran.elements < 1 or ran.why else ""
    if ran.exit == Exit.DIVERGED:
        return "" if ran.found in range(runs) and not ran.why else "a divergence without its outcome in runs"
    return "" if ran.why and ran.exit in {Exit.BAD_INPUT, Exit.INCONCLUSIVE} else f"exit {ran.exit} without a reason"


def new_rows(base: Replay, settings: str, until: int | None, tiers: Collection[Tier],
             layers: Collection[int] | None, factors: Mapping[str, Sequence[Any]]) -> Rows:  # fmt: skip
    """No rows yet, of a replay with the settings that were typed."""
    judged = [*(tier.value for tier in Tier if tier in tiers), *(f"layer {layer}" for layer in layers or ())]
    return Rows(base.trace.sha256, base.plan.setting.data(), settings, until, judged, served(),
                {name: list(values) for name, values in factors.items()})  # fmt: skip


def result(
    trace: Trace, several: Sequence[AllSettings], kept: Sequence[Rows], runs: Sequence[dict[str, Any]],
    earlier: Sequence[dict[str, Any]], commit: str | None,
) -> Result:
    """The file: sums for readers, every row, and the outcomes that diverged.

    kept, earlier: the rows of all op sets, and the sums of those that this session may not have
    """
    devices = sorted({str(one.setting["device"]) for one in kept})
    now = {one.rows.setting["ops"]: one.data() for one in several}
    coverage = [*(one for one in earlier if one["ops"] not in now), *now.values()]
    return Result(Exit.worst(Exit(one["exit"]) for one in coverage), ", ".join(devices), {
        "trace": trace.header.name, "claim": trace.header.claim, "warnings": trace.warnings,
        "coverage": coverage, "arrays": kept, "runs": runs,
    }, commit)  # fmt: skip


# ---- the document of the data

def document(found: Data) -> Document:
    rows = [(array["setting"]["ops"], ran) for array in found["arrays"] for ran in array["ran"]]
    heads: dict[str, Kind] = {
        "ops": "word", "more options": "text", "verdict": "word", "events": "number",
        "elements": "number", "seconds": "number",
    }  # fmt: skip
    table = Listing(heads, [
        (ops, " ".join(_option(name, value) for name, value in ran["row"].items()) or "none", _verdict(ran),
         str(ran["events"]), short(ran["elements"]), f"{ran['seconds']:.1f}") for ops, ran in rows
    ], f"{found['trace']}: rows", [n for n, (_, ran) in enumerate(rows) if ran["exit"] == Exit.DIVERGED])  # fmt: skip
    return Document(
        str(found["trace"]), Exit(found["exit"]), [_conclusion(one) for one in found["coverage"]],
        found.get("claim", ""), messages(found["runs"]), [table], {},
        notes=[*found.get("warnings", ()), *(line for one in found["coverage"] for line in _not_run(one))],
        omitted=[line for one in found["coverage"] for line in _left(one)],
    )


def _verdict(ran: Data) -> str:
    return "refused" if ran["exit"] == Exit.BAD_INPUT else word(ran["exit"])


def _things(one: Data, count: int) -> str:
    return counted(count, "pair" if one["size"] > 1 else "value")


def _conclusion(one: Data) -> str:
    return (f"{one['ops']} {word(one['exit'])}: {one['met']} of {_things(one, one['of'])} of settings in "
            f"{counted(one['rows'], 'run')}, {short(one['elements'])} numbers compared")  # fmt: skip


def _not_run(one: Data) -> Iterator[str]:
    """A line for each reason and for each group with it."""
    reasons: dict[str, list[Group]] = {}
    for each in one["not_run"]:
        reasons.setdefault(each["why"], []).append(each["values"])
    for why, groups in reasons.items():
        yield f"{one['ops']}, not run: {'; '.join(_listed(groups))}: {why}"


def _left(one: Data) -> Iterator[str]:
    if one["left"]:
        yield (f"{one['ops']}: {_things(one, len(one['left']))} left when the time was over (the same command with its "
               f"--json file goes on): {'; '.join(_listed(one['left']))}")  # fmt: skip


def _option(name: str, value: Any) -> str:
    """A value as its option."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return option if value else f"--no-{option[2:]}"
    return f"no {option}" if value is None else f"{option} {value}"


def _listed(groups: Iterable[Sequence[Sequence[Any]]]) -> Iterator[str]:
    """The groups in words; those that differ in the last value together."""
    alike: dict[str, list[str]] = {}
    for group in groups:
        words = [_option(name, value) for name, value in group] or ["every setting"]
        alike.setdefault(words[0], []).extend(words[1:])
    yield from (first if not others else f"{first} with {', '.join(others)}" for first, others in alike.items())
