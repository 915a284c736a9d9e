"""A farm: a shared folder from which several machines take the trials of one campaign. It needs no server.

    campaign/record.json         the command and the source of all trials, from the first worker
    claims/TRIAL.1/record.json   a worker's claim of a trial; TRIAL.2 is the claim of the worker that took it over
    results/TRIAL-DIGEST.json    a result, which never changes; DIGEST is that of its bytes

A trial is a command line that writes one result file, and TRIAL is a digest of that line and the source. A worker
renames a whole folder to the name of a claim, which fails if that folder is there, so one worker alone gets it. Workers
compare no clocks: a claim is stale if a worker has watched it for its limit and saw no renewal.

Leaves out: the list of trials and the merge, which each command has, and the options (`instep.cli.farm_options`).
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec

from instep_reference.contract.errors import BadInput, bytes_of

from ..atomic_write import folder_for, write_atomically
from ..report.result import content_of
from ..verdict import Exit
from .runner import TrialRunner

LIMIT_S = 300.0  # a worker renews its claims ten times in this time
POLL_S = 2.0
ATTEMPTS = 3  # claims of one trial that failed, or whose worker died
KEPT, GIVEN_BACK = "has a result", "given back"  # ends of a claim that are no failure
NOT_CLAIMED = "not claimed"
RECORD, FOUND = "record.json", "found"
PACKAGES = ("instep_reference", "instep_optimized", "instep", "instep_proof", "instep_speed")
# Fields of results that differ between two runs of one trial.
CHANGING = frozenset((
    "date", "machine", "seconds", "processor_seconds", "minutes", "rounds_per_minute", "memory_mib", "trial",
))  # fmt: skip


class Claim(msgspec.Struct):
    """A worker's claim.

    time     its begin by the worker's own clock, for readers
    limit_s  another worker takes the trial over after this time without a renewal
    beats    renewals so far
    ended    how it ended; "" if it did not
    """

    host: str = "unknown"
    pid: int = 0
    time: str = ""
    limit_s: float = LIMIT_S
    key: str = ""
    beats: int = 0
    ended: str = ""


class Ended(NamedTuple):
    """The end of a trial's process: exit code, result file, last line of stderr, and the source that it ran."""

    code: int
    content: bytes
    said: str
    source: str


class Taken(NamedTuple):
    """A trial that this worker claimed, and the path of the claim."""

    words: tuple[str, ...]
    path: Path
    claim: Claim


_children = set[subprocess.Popen[bytes]]()


def run_trial(words: Sequence[str], more: Sequence[str] = ()) -> Ended:
    """Run the command line in a new process. An executor may call this on another machine.

    more: further words that do not change the result, such as the folder of traces
    """
    with TemporaryDirectory(prefix="instep-trial-") as folder:
        file = Path(folder, "result.json")
        line = [sys.executable, "-P", "-m", "instep", *words, *more, "--json", str(file)]
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as child:
            _children.add(child)
            _, said = child.communicate()
        _children.discard(child)
        content = file.read_bytes() if file.is_file() else b""
    last = said.decode(errors="replace").strip().rpartition("\n")[2]
    return Ended(child.returncode, content, last, source_of(words))


def source_of(words: Iterable[str]) -> str:
    """The digest of instep's packages, and of the user's modules that the words name, as they are on the disk now."""
    from ..run.replay import source_digest

    digest = sha256()
    for name in (*PACKAGES, *modules_of(words)):
        top, file = name.partition(".")[0], Path(name)  # `mine`, `mine.ops` or `folder/mine.py`
        if not name.endswith(".py"):
            file = Path(f"{top}.py")
            if not file.is_file() and top.isidentifier() and (spec := find_spec(top)) is not None:
                file = Path(spec.origin or "")
        if file.name == "__init__.py":
            digest.update(source_digest(file.parent).encode())
        elif file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def modules_of(words: Iterable[str]) -> tuple[str, ...]:
    """The modules of addresses among the words, as `mine` of `mine:OPS`."""
    return tuple(sorted({word.rpartition(":")[0] for word in words if ":" in word}))


def digest_of(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


@dataclass
class Farm:
    """A worker of the farm.

    record       what all workers share: the words that all trials have, the source of instep
    trials       the command lines in order; it may be called again, and may have no end
    total        their number; None: no end
    found        options for the folder of traces, which do not change a result
    until_found  no trial begins after one has found a divergence
    """

    folder: Path
    record: Mapping[str, str | None]
    trials: Callable[[], Iterable[tuple[str, ...]]]
    total: int | None = None
    found: bool = False
    until_found: bool = False
    limit_s: float = LIMIT_S
    poll_s: float = POLL_S
    host: str = field(default_factory=socket.gethostname)
    diverged: bool = False
    _seen: dict[Path, tuple[bytes, float]] = field(default_factory=dict)
    _read: dict[str, str] = field(default_factory=dict)
    _sources: dict[tuple[str, ...], str] = field(default_factory=dict)
    _keys: set[str] = field(default_factory=set)  # of the claims of this worker
    _beaten: float = 0.0

    def open(self) -> None:
        """Make the folder, or refuse the folder of another campaign or source, and results that cannot be merged."""
        for name in ("claims", "results", *([FOUND] if self.found else [])):
            folder_for(folder := self.folder / name, "--farm")
            if not os.access(folder, os.W_OK):
                raise BadInput("--farm", found=f"{folder}, which cannot be written",
                               expected="a folder that every worker's user may write")  # fmt: skip
        if not _place(self.folder / "campaign", msgspec.json.encode(self.record)):
            there: Any = _decoded(self.folder / "campaign" / RECORD)
            for name, value in self.record.items():
                if not isinstance(there, dict) or there.get(name) != value:
                    other = there.get(name) if isinstance(there, dict) else there
                    raise BadInput(f"--farm {self.folder}", found=f"a campaign with {name} {other}",
                                   expected=f"{name} {value}", hint="name another folder")  # fmt: skip
        self.results()

    def name(self, words: Sequence[str]) -> str:
        """The name of a trial."""
        return digest_of(msgspec.json.encode([self.source(words), *words]))

    def source(self, words: Sequence[str]) -> str:
        """The source of a trial, as it was when this worker first needed it."""
        modules = modules_of(words)
        if modules not in self._sources:
            self._sources[modules] = source_of(words)
        return self._sources[modules]

    # ---- the work

    def work(self, run: TrialRunner, executor: Executor, jobs: int) -> None:
        """Run trials, `jobs` at a time, until none is left, a divergence was found, or the time is over."""
        running: dict[Future[Ended], Taken] = {}
        try:
            for taken in run.trials(self._claims(run, running, jobs), lambda taken: self._progress(running)):
                more = ("--out", str(self.folder / FOUND)) if self.found else ()
                running[executor.submit(run_trial, taken.words, more)] = taken
            while running:
                self._collect(running)
        finally:
            for future in running:
                future.cancel()
            for child in list(_children) if running else ():
                child.terminate()
            for taken in running.values():
                self._end(taken, GIVEN_BACK)

    def _progress(self, running: Mapping[Any, object]) -> str:
        of = "" if self.total is None else f" of {self.total}"
        return f"{len(self.done())}{of} trials are there, {1 + len(running)} run here"

    def _claims(
        self, run: TrialRunner, running: dict[Future[Ended], Taken], jobs: int
    ) -> Iterator[Taken]:
        """Claim a trial whenever one can run. Wait as long as other workers have trials that may become stale."""
        while not (run.over or self.diverged):
            if len(running) < jobs:
                taken, waits = self._claim_next()
                if taken is not None:
                    yield taken
                    continue
                if not running and not waits:
                    return
            self._collect(running)

    def _collect(self, running: dict[Future[Ended], Taken]) -> None:
        """Wait a moment, renew the claims, and keep the results of ended trials."""
        if running:
            wait(running, self.poll_s, FIRST_COMPLETED)
        else:
            time.sleep(self.poll_s)
        if time.monotonic() - self._beaten > self.limit_s / 10:
            self._beaten = time.monotonic()
            for taken in running.values():
                taken.claim.beats += 1
                self._write(taken)
        for future in [one for one in running if one.done()]:  # `wait` does not return cancelled ones
            taken = running[future]
            try:
                self._keep(taken, future.result())
            except (BadInput, KeyboardInterrupt):
                raise
            except (Exception, CancelledError) as error:  # the executor lost it: its worker died, for example
                self._end(taken, f"{type(error).__name__}: {error}")
            del running[future]

    def _keep(self, taken: Taken, ended: Ended) -> None:
        if ended.source != (source := self.source(taken.words)):
            raise BadInput(f"--farm {self.folder}", found=f"source {ended.source} after a trial",
                           expected=f"source {source}, with which it was claimed",
                           hint="change no source while a campaign runs; --executor needs the same one")  # fmt: skip
        if ended.code == Exit.BAD_INPUT:
            raise BadInput(f"instep {' '.join(taken.words)}", found=ended.said.removeprefix("instep: "),
                           expected="a trial that runs")  # fmt: skip
        try:
            found = msgspec.json.decode(ended.content)
            code = found["exit"]
        except (msgspec.DecodeError, KeyError, TypeError):
            self._end(taken, f"exit code {ended.code} without a result: {ended.said}")
            return
        found["trial"] = {"words": taken.words, "source": ended.source, "host": taken.claim.host}
        content = content_of(found)
        write_atomically({self.folder / "results" / f"{self.name(taken.words)}-{digest_of(content)}.json": content})
        self._end(taken, KEPT)
        self.diverged |= self.until_found and code == Exit.DIVERGED

    # ---- claims

    def done(self) -> set[str]:
        """The names of the trials that have a result. Reads new results if a divergence ends the campaign."""
        files = [file for file in os.listdir(self.folder / "results") if file.endswith(".json") and file[0] != "."]
        if self.until_found:
            for file in set(files) - self._read.keys():
                found: Any = _decoded(self.folder / "results" / file)
                self._read[file] = ""
                self.diverged |= isinstance(found, dict) and found.get("exit") == Exit.DIVERGED
        return {file.partition("-")[0] for file in files}

    def _claim_next(self) -> tuple[Taken | None, bool]:
        """The first trial that is free; and whether another worker has one that may become free."""
        there, waits = set(os.listdir(self.folder / "claims")), False
        done = self.done()  # after the claims: a claim ends after its result is there
        if self.diverged:
            return None, False
        for words in self.trials():
            name = self.name(words)
            if name in done:
                continue
            earlier = self._earlier(name, there)
            if earlier and not self._is_free(self._path(name, len(earlier)), earlier[-1]):
                waits = True
            elif _spent(earlier) < ATTEMPTS:
                path = self._path(name, len(earlier) + 1)
                claim = Claim(self.host, os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"), self.limit_s,
                              uuid4().hex)  # fmt: skip
                self._keys.add(claim.key)
                if _place(path, msgspec.json.encode(claim)):
                    taken = Taken(tuple(words), path, claim)
                    if name not in self.done():
                        return taken, True
                    self._end(taken, GIVEN_BACK)
                waits = True
        return None, waits

    def _path(self, name: str, number: int | str) -> Path:
        return self.folder / "claims" / f"{name}.{number}"

    def _earlier(self, name: str, there: set[str]) -> list[Claim]:
        """All claims of the trial, in order."""
        found = list[Claim]()
        while f"{name}.{len(found) + 1}" in there:
            found.append(_claim(self._path(name, len(found) + 1)))
        return found

    def _is_free(self, path: Path, claim: Claim) -> bool:
        """Whether the claim has ended, its worker died on this machine, or it is stale."""
        if claim.ended or (claim.host == self.host and not self._lives(claim)):
            return True
        content, now = msgspec.json.encode(claim), time.monotonic()
        seen, since = self._seen.setdefault(path, (content, now))
        if seen != content:
            self._seen[path] = content, now
        return seen == content and now - since > claim.limit_s

    def _lives(self, claim: Claim) -> bool:
        """Whether the worker of a claim on this machine may live. A restarted container has its old process number."""
        return claim.key in self._keys if claim.pid == os.getpid() else _lives(claim.pid)

    def _end(self, taken: Taken, why: str) -> None:
        taken.claim.ended = why
        self._write(taken)

    def _write(self, taken: Taken) -> None:
        write_atomically({taken.path / RECORD: msgspec.json.encode(taken.claim)})

    # ---- the results

    def results(self) -> list[Path]:
        """The results, one of each trial. Refuses damaged and foreign files, and results of a trial that differ."""
        wrong, outcomes = list[str](), dict[tuple[str, ...], dict[bytes, Path]]()
        for path in sorted((self.folder / "results").glob("[!.]*.json")):
            content, (name, _, digest) = bytes_of(path), path.stem.partition("-")
            found: Any = _decoded(path)
            if digest_of(content) != digest or not isinstance(found, dict) or "trial" not in found:
                wrong.append(f"{path.name} was edited or written in part")
            elif (other := found["trial"]["source"]) != (source := self.source(words := found["trial"]["words"])):
                wrong.append(f"{path.name} is of source {other}, this campaign of {source}")
            elif name != self.name(words):
                wrong.append(f"{path.name} is of another trial, `instep {' '.join(words)}`")
            else:
                lasting = msgspec.json.encode(_lasting(found), order="sorted")
                outcomes.setdefault(tuple(words), {}).setdefault(lasting, path)
        wrong += [f"{' and '.join(path.name for path in several.values())} are different results of `instep "
                  f"{' '.join(words)}`" for words, several in outcomes.items() if len(several) > 1]  # fmt: skip
        if wrong:
            raise BadInput(f"{self.folder / 'results'}", found="; ".join(wrong), expected="one result of each trial",
                           hint="delete the wrong files and start a worker again, or name another folder")  # fmt: skip
        return [next(iter(outcomes[words].values())) for words in sorted(outcomes, key=_in_order)]

    def left(self) -> list[str]:
        """A line for each trial without a result, if there is an end: its claim, or why it is lost."""
        done, there = self.done(), set(os.listdir(self.folder / "claims"))
        lines = list[str]()
        for words in self.trials() if self.total is not None else ():
            if (name := self.name(words)) in done:
                continue
            says, earlier = NOT_CLAIMED, self._earlier(name, there)
            if earlier:
                last, free = earlier[-1], self._is_free(self._path(name, len(earlier)), earlier[-1])
                says = f"claimed by process {last.pid} of {last.host} at {last.time}"
                if free and _spent(earlier) >= ATTEMPTS:
                    says = (f"lost after {_spent(earlier)} attempts ({last.ended or 'its worker died'}); to try again, "
                            f"delete {self._path(name, '*')}")  # fmt: skip
                elif free:
                    says = f"free ({last.ended or 'its worker died'})"
            lines.append(f"instep {' '.join(words)}: {says}")
        return lines


def _place(path: Path, content: bytes) -> bool:
    """Make the folder of a record, and return whether it is ours.

    A rename onto a folder that is not empty fails. A network file system may repeat a rename that had succeeded and
    report that it failed, so the content decides.
    """
    aside = path.with_name(f".{uuid4().hex}")
    aside.mkdir()
    (aside / RECORD).write_bytes(content)
    try:
        aside.rename(path)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not path.is_dir():
            raise
        with suppress(OSError):
            return (path / RECORD).read_bytes() == content
        return False
    return True


def _decoded(path: Path) -> Any:
    """The JSON of a file; None if it has none."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _claim(path: Path) -> Claim:
    """The claim at a path; one of an unknown worker if its record is damaged."""
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode((path / RECORD).read_bytes(), type=Claim)
    return Claim()


def _spent(earlier: Sequence[Claim]) -> int:
    return sum(claim.ended not in (KEPT, GIVEN_BACK) for claim in earlier)


def _lives(pid: int) -> bool:
    """Whether a process of this machine lives, or may live."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _lasting(value: Any) -> Any:
    """A result without the fields that differ between two runs of one trial."""
    if isinstance(value, dict):
        return {name: _lasting(inner) for name, inner in value.items() if name not in CHANGING}
    return [_lasting(inner) for inner in value] if isinstance(value, list) else value


def _in_order(words: Sequence[str]) -> list[str | int]:
    """A key that sorts command lines with their numbers by size: text and number in turns."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split("([0-9]+)", " ".join(words)))]
