"""Errors that a subject raised, as findings: the op, the place, the line of its source, its traceback.

Leaves out: whether a failure is the subject's or the harness's (`subject/guarded_calls.py`).
"""

import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType, TracebackType

from instep_optimized.ranks.lockstep import RankError, RankRaised
from instep_reference.contract.engine import Event, Refused
from instep_reference.contract.event_facts import kind_of
from instep_reference.contract.place_names import STAGE_LEVEL, Place

from ..adapters.returned_tensors import WrongResult
from ..checks.capacity import judged
from ..checks.check_interface import NOWHERE, op_at
from ..checks.op_call_contracts import broken
from ..finding_problem import Problem
from ..subject.engines.verbs import MUST, PAIRS
from ..subject.guarded_calls import MAKES, SERVES, SubjectFailed, WrongType, said_by
from ..verdict import Comparison, Raised, Tier
from ..watch.event_log import NOTHING, EventLog, FailedOp
from .build_compared_engines import Participants

VERBS = (*MUST, "draft", "layers", *(verb for pair in PAIRS for verb in pair))  # callbacks that serve events
UNSEEN = Place("trunk", STAGE_LEVEL, "embedding")  # the place of a failure before the first place
OURS = ("instep.", "instep_optimized.ops.watch_op_calls")  # modules whose frames are not the subject's
THEIRS = ("instep.adapters.",)  # except these, which are tested
LIBRARIES = ("torch", "numpy", "triton")
COMMS = ("instep_optimized.ranks.lockstep", "instep_optimized.ranks.processes")  # raise for the line that calls them


def failures(participants: Participants, index: int, event: Event, failed: SubjectFailed) -> list[Comparison]:
    """The error with its place, and before it all contracts that were broken so far and all pools that are too small.
    """
    kind = kind_of(event)
    log = NOTHING if participants.built.instrumentation is None else participants.built.instrumentation.take()
    failed_op = log.failed_op
    if failed_op is not None and failed_op.error not in _chain(failed.error):
        failed_op = None  # the subject continued after that error
    broke = [*broken(log, index, kind), *_too_small(participants, log, index, kind)]
    place = NOWHERE
    if failed_op is not None:
        place = failed_op.place or UNSEEN
    elif broke:
        place = broke[0].place
    elif failed.question == SERVES or failed.question in VERBS:
        place = participants.subject.activations.last or UNSEEN
    return [*broke, failure(index, kind, failed, place, failed_op)]


def failure(
    index: int, kind: str, failed: SubjectFailed, place: Place = NOWHERE, failed_op: FailedOp | None = None
) -> Comparison:
    """The finding about an error, or about a result that is no answer."""
    question, error = failed.question, failed.error
    serves = question == SERVES or question in VERBS
    check = SERVES if serves else "interface"
    why = "the event is legal and the reference served it" if serves else "this call is legal at any time"
    if kind == kind_of(Refused):
        why = "the event is illegal here, and an engine that `refuses` must raise BadInput"
    if isinstance(error, WrongType):
        return _finding(check, index, kind, place, f"{error}; {why}" if serves else str(error), None)
    message = said_by(error)
    said = message.splitlines()[0] if message.strip() else "no message"
    what = said if isinstance(error, WrongResult) else f"raised {type(error).__name__} ({said})"
    if question in VERBS:
        where = f"{question} "
    elif failed_op is not None:
        where = f"{op_at(failed_op.op, failed_op.place)} "
    elif serves:
        where = ""
    else:
        where = "the engine, while it was built, " if question == MAKES else f"`{question}` of the engine "
    after = "" if question == MAKES else f"; {why}"
    found = _finding(check, index, kind, place, f"{where}{what}{after}", raised_of(error))
    return replace(found, rank=error.ranks[0]) if isinstance(error, RankError) and len(error.ranks) == 1 else found


def raised_of(error: BaseException) -> Raised:
    """The exception with its frames; without frames its origin is unknown. A rank's has those of the rank."""
    if isinstance(error, RankRaised) and isinstance(error.evidence, Raised):  # of a rank in another process
        return error.evidence
    if isinstance(error, RankRaised) and error.__cause__ is not None:
        return raised_of(error.__cause__)
    if isinstance(error, WrongResult) and error.code is not None:  # the kernel has returned and has no frame any more
        code, kind, whole = error.code, type(error).__name__, _spelled(error, error.__traceback__)
        return Raised(kind, str(error), code.co_filename, code.co_firstlineno, code.co_qualname, "", whole)
    frames = list(traceback.walk_tb(error.__traceback__))
    passed = COMMS if isinstance(error, RankError) else ()
    own = [each for each in frames if not _is_ours(each[0]) and each[0].f_globals.get("__name__") not in passed]
    inner = [each for each in own if not _is_librarys(each[0])] or own or frames
    file, line, function = "", 0, ""
    if inner:
        frame, line = inner[-1]
        file, function = frame.f_code.co_filename, frame.f_code.co_qualname
    if isinstance(error, RankError) and error.at is not None:
        file, line, function = error.at
    return Raised(
        type(error).__name__, said_by(error), file, line, function, _spelled(error, _from_own(error.__traceback__)),
        _spelled(error, error.__traceback__),
    )


def _finding(
    check: str, index: int, kind: str, place: Place, says: str, raised: Raised | None
) -> Comparison:
    return Comparison(
        check, Tier.IDENTITY, index, kind, place, elements=1, worst=1.0, allowed=0.0, problem=Problem("failed", says),
        raised=raised,
    )


def _too_small(participants: Participants, log: EventLog, index: int, kind: str) -> Iterator[Comparison]:
    """Pools smaller than the trace requires, as these may be the reason."""
    if log.room is None:
        return
    try:
        regions = participants.shown.regions()
    except SubjectFailed:  # then this is not the finding
        return
    yield from (pool for pool in judged(regions, log, index, kind) if not pool.agrees)


def _chain(error: BaseException | None) -> list[BaseException]:
    """The exception and its causes."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _from_own(at: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame outside the harness."""
    begin = at
    while begin is not None and _is_ours(begin.tb_frame):
        begin = begin.tb_next
    return begin or at


def _spelled(error: BaseException, frames: TracebackType | None) -> str:
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith(OURS) and not module.startswith(THEIRS)


def _is_librarys(frame: FrameType) -> bool:
    """Whether a frame is in torch, numpy, triton or Python itself; other installed packages may be tested."""
    module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    installed = any(part in file for part in ("site-packages", "dist-packages"))
    standard = file.startswith((sysconfig.get_path("stdlib"), "<frozen")) and not installed
    return module.partition(".")[0] in LIBRARIES or standard
