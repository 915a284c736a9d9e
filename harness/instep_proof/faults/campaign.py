"""Plant faults one by one and run each next to its control, with several processes at a time.

Leaves out: a single run (`fault_runs.py`), judging (`compare_with_control.py`), and printing (`result_data.py`).
"""

import resource
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from instep.campaign.runner import TrialRunner
from instep.setting import Setting

from . import plant
from .catalogue.fault import Fault, speaking
from .compare_with_control import Judged, Session, judge
from .fault_runs import Arm, Said, both, related, replayed, spoken

T = TypeVar("T")
SLOW = "triton"  # interpreted runs take longest, so they start first
CONTROL = "control"


def campaign(
    faults: Iterable[Fault], traces: Path, run: TrialRunner | None = None, *, jobs: int = 1, text: bool = True,
    commit: str | None = None, model: str | UnsetType = UNSET,
) -> Iterator[Judged]:
    """Run every fault next to its control, which faults of the same trace and setting share.

    traces  the folder with the traces that the faults name
    text    whether each fault also generates text freely, as a test of accuracy would
    model   the digest of the model with which these traces were recorded again
    """
    run, session, spent = run or TrialRunner(), Session.now("cpu", commit), _spent()
    session.jobs, session.model = jobs, model
    ordered = sorted(faults, key=lambda fault: fault.how.ops != SLOW)
    with tempfile.TemporaryDirectory(prefix="instep-faults-") as scratch, ThreadPoolExecutor(jobs) as pool:
        runs = _Runs(Path(scratch), ordered, traces, pool)
        try:
            for fault in ordered:
                runs.begin(fault, text)
            for fault in run.trials(ordered, lambda fault: f"{len(ordered)} faults"):
                judged = runs.judged(fault, text)
                session.seconds, session.processor_seconds = round(run.seconds, 1), round(_spent() - spent, 1)
                yield replace(judged, session=session)
        finally:
            pool.shutdown(cancel_futures=True)


def _spent() -> float:
    """Processor seconds of all ended processes: the cost of a campaign, whatever the load of the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime + (0.0 if plant.forks is None else plant.forks.spent)


class _Runs:
    """All copies of the source, planted before anything runs, and all requested processes."""

    def __init__(self, folder: Path, faults: Sequence[Fault], traces: Path, pool: ThreadPoolExecutor) -> None:
        self.folder, self.traces, self.pool = folder, traces, pool
        self.copies = {CONTROL: plant.planted(folder / CONTROL)}
        self.copies |= {fault.id: plant.planted(folder / fault.id, *fault.edits) for fault in faults}
        self.asked: dict[tuple[Any, ...], Future[Any]] = {}

    def begin(self, fault: Fault, text: bool) -> None:
        for copy in (fault.id, CONTROL):
            self._arm(copy, fault)
            if text:
                self._text(copy, fault)

    def judged(self, fault: Fault, text: bool) -> Judged:
        control, faulty = (self._arm(copy, fault)() for copy in (CONTROL, fault.id))
        right, planted = (plant.digests(self.copies[copy]) for copy in (CONTROL, fault.id))
        said = (self._text(CONTROL, fault).result(), self._text(fault.id, fault).result()) if text else None
        return judge(fault, control, faulty, right, planted, said)

    def _arm(self, copy: str, fault: Fault) -> Callable[[], Arm]:
        """A replay, with the fault's relation if it has one; a call waits for both."""
        replay = self._ask(replayed, copy, fault.trace, fault.how)
        if fault.relation is None:
            return replay.result
        relation = self._ask(related, copy, fault.trace, fault.how, fault.relation)
        return lambda: both(replay.result(), relation.result())

    def _text(self, copy: str, fault: Fault) -> Future[Said]:
        return self._ask(spoken, copy, fault.trace, speaking(fault.how))

    def _ask(self, run: Callable[..., T], copy: str, trace: str, how: Setting, *more: str) -> Future[T]:
        """Start `run(folder, trace, how, out, *more)`; equal requests run once."""
        key = (run, copy, trace, how, *more)
        if key not in self.asked:
            out = self.folder / f"{len(self.asked)}.json"
            self.asked[key] = self.pool.submit(
                run, self.copies[copy], self.traces / f"{trace}.jsonl", how, out, *more
            )
        return self.asked[key]
