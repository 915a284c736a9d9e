"""Draw mutants of the harness's own code, and run the tests against those whose values differ in them.

    PYTHONPATH=reference:tests:harness:optimized python -m campaigns.harness_mutants --mutants 300 --minutes 60

The code has a switch at each mutant (`switched_code.py`). Each test runs once. If an expression and its mutant have
different values, the process forks, and the child runs the rest of the test with the mutant. A failure kills the
mutant, if the test passes without it and also fails alone with it. So a mutant costs only the tests that it can change.
A later call continues: a survivor runs again in files that have changed. Leaves out: drawing
(`faults/draw_mutants.py`), and code that tests run in other processes or threads.
"""

import argparse
import ast
import builtins
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from itertools import islice
from math import comb
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from _pytest.runner import runtestprotocol

from campaigns.switched_code import SWITCH, NoSite, equal, install, site

TOP = Path(__file__).resolve().parents[2]
HARNESS = TOP / "harness"
FILE = TOP / "fixtures" / "results" / "harness-mutants.json"
SEEN = TOP / "build" / "harness-mutants.json"  # all rows, and for each the digests of the test files that it met
# The checks and their measures, the explanations, the verdict, the rules of the trace, and the bank of wrong states.
CODE = ("checks/*.py", "diagnose/**/*.py", "verdict.py", "tier_allowances.py", "trace/event_rules.py",
        "trace/request_table.py", "trace/write_bound.py", "oracle/*_states.py", "oracle/state_oracle.py")  # fmt: skip
FORK = get_context("fork")
OF_A_FILE = 3600  # processor seconds of a test file without mutants
OF_A_TEST = 20  # processor seconds of a test with a mutant, at most
# Processor seconds with a mutant after which no other case of a parametrized test begins, no other test of the file
OF_ALL_CASES, OF_ONE_FILE = 1, 8
SLOWER, STARTS = 3, 5  # a mutant that makes a test this much slower, and this many seconds in addition, hangs
WAITS = 8  # wall clock per processor second
CONFIDENCE = 0.95
# How a mutant fared. reached: tests that compute its expression; tests, left: those in which its value differs, and
# that ran, or did not as its time was over
NOTHING = {"killed_by": "", "says": "", "reached": 0, "tests": 0, "left": 0, "seconds": 0.0}


class Mutant(NamedTuple):
    """An edit of a file of the harness, package first. old: text that is in the file once"""

    file: str
    old: str
    new: str
    kind: str
    what: str
    line: int

    @property
    def id(self) -> str:
        return sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:12]

    def planted(self, text: str) -> str:
        return text.replace(self.old, self.new, 1)


def main() -> None:
    asks = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asks.add_argument("--mutants", type=int, default=300, help="how many are drawn")
    asks.add_argument("--seed", type=int, default=1, help="of the draws")
    asks.add_argument("--only", default="", help="draw mutants of files with this text in their path")
    asks.add_argument("--seconds", type=float, default=60.0, help="processor time of a mutant in one call")
    asks.add_argument("--minutes", type=float, default=1e9, help="time after which no test file is begun")
    asks.add_argument("--whole", action="store_true", help="also run the tests of `make whole`")
    asks.add_argument("--tests", type=Path, nargs="+", default=[TOP / "tests" / "harness"], help="files or folders")
    asks.add_argument("--json", type=Path, default=FILE, help="the result")
    asks.add_argument("--seen", type=Path, default=SEEN, help="where a later call continues")
    asks.add_argument("--commit", default="", help="the revision that runs")
    asked = asks.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # with the fork that runs
    end = time.monotonic() + 60 * asked.minutes
    with TemporaryDirectory() as name:
        folder = Path(name)
        drawn = in_fork(lambda: draw(asked.seed, asked.mutants, asked.only), folder, OF_A_FILE)
        mutants = [Mutant(*one) for one in drawn]
        texts = code_files()
        install({HARNESS / file: text for file, text in texts.items()},
                [(HARNESS / one.file, one.planted(texts[one.file])) for one in mutants])  # fmt: skip
        campaign = Campaign(mutants, asked, folder)
        setattr(builtins, SWITCH, Forks({}))
        warm_up()
        for file in test_files(asked.tests, campaign.code()):
            if time.monotonic() < end and (alive := campaign.alive(file)):
                campaign.run(file, alive)
            campaign.keep()
    print("\n".join(lines(json.loads(asked.json.read_text()))))


class Campaign:
    """The rows of the result, and what each mutant has survived."""

    def __init__(self, mutants: Sequence[Mutant], asked: argparse.Namespace, folder: Path) -> None:
        self.mutants, self.asked, self.folder = mutants, asked, folder
        known: dict[str, dict[str, Any]] = {}
        before, seen = (json.loads(file.read_text()) if file.exists() else {} for file in (asked.json, asked.seen))
        for row in (*before.get("rows", ()), *seen.get("rows", ())):
            known[row["id"]] = {**known.get(row["id"], {}), **row}  # reasons are in the first
        self.note = {name: before[name] for name in ("note",) if name in before}
        self.rows: dict[str, dict[str, Any]] = {one.id: {
            "id": one.id, "file": one.file, "line": one.line, "kind": one.kind, "what": one.what, **NOTHING,
            "commit": "", "seen": {}, **known.get(one.id, {})} for one in mutants}  # fmt: skip
        self.spent = dict.fromkeys(self.rows, 0.0)

    def code(self) -> Counter[str]:
        """The number of survivors in each mutated file."""
        return Counter(row["file"] for row in self.rows.values() if not row["killed_by"])

    def alive(self, file: Path) -> list[int]:
        """The numbers of the mutants that nothing has killed and that have not seen this text of a file."""
        return [number for number, one in enumerate(self.mutants) if not self.rows[one.id]["killed_by"]
                and self.rows[one.id]["seen"].get(name_of(file)) != self._digest(file)]  # fmt: skip

    def run(self, file: Path, alive: Sequence[int]) -> None:
        seconds = {number: self.asked.seconds - self.spent[self.mutants[number].id] for number in alive}
        plugin, digest = Forks(seconds), self._digest(file)
        setattr(builtins, SWITCH, plugin)

        def work() -> dict[str, Any]:
            try:
                run_pytest(plugin, name_of(file), self.folder, whole=self.asked.whole)
            finally:
                plugin.end()
            return {"rows": plugin.rows, "notes": plugin.notes, "tests": plugin.tests}

        begun = time.monotonic()
        found = in_fork(work, self.folder, OF_A_FILE)
        if found is None:
            print(f"{name_of(file)} DID NOT END", flush=True)
            return
        for number, of in found["rows"].items():
            one = self.mutants[int(number)]
            row = self.rows[one.id]
            row |= {"killed_by": of["killed_by"], "says": of["says"], "commit": self.asked.commit}
            for key in ("reached", "tests", "left", "seconds"):
                row[key] = round(row[key] + of[key], 1)
            self.spent[one.id] += of["seconds"]
            row["seen"][name_of(file)] = digest
        killed = sum(bool(of["killed_by"]) for of in found["rows"].values())
        left = sum(not row["killed_by"] for row in self.rows.values())
        print(f"{name_of(file)}: {killed} of {len(alive)} killed by {found['tests']} tests in "
              f"{time.monotonic() - begun:.0f} s, {left} left", flush=True)  # fmt: skip
        for says in found["notes"]:
            print(says, flush=True)

    def keep(self) -> None:
        """Write the result. A mutant that nothing has killed counts as a survivor before it has met every file, too."""
        files = {name_of(file): self._digest(file) for file in test_files(self.asked.tests, self.code())}
        rows = [{name: value for name, value in row.items() if name != "seen"} | (
            {} if row["killed_by"] else {"files": len(files.items() & row["seen"].items())})
            for row in self.rows.values()]  # fmt: skip
        words = [f"--{name} {getattr(self.asked, name):g}" for name in ("mutants", "seed", "seconds")]
        words += ["--whole"] * self.asked.whole + [f"--only {self.asked.only}"] * bool(self.asked.only)
        if self.asked.tests != [TOP / "tests" / "harness"]:
            words.append("--tests " + " ".join(name_of(place) for place in self.asked.tests))
        result = {"command": " ".join(("python -m campaigns.harness_mutants", *words)), "asked": self.asked.mutants,
                  "commit": self.asked.commit, **self.note, "files": len(files)}  # fmt: skip
        write(self.asked.json, spelled(result, rows))
        write(self.asked.seen, json.dumps({"rows": [*self.rows.values()]}))

    def _digest(self, file: Path) -> str:
        return sha256(file.read_bytes() + b"whole" * self.asked.whole).hexdigest()[:12]


def code_files() -> dict[str, str]:
    """Map the files that are mutated, package first, to their text."""
    root = HARNESS / "instep"
    files = sorted({file for pattern in CODE for file in root.glob(pattern)})
    return {str(file.relative_to(HARNESS)): file.read_text() for file in files}


def draw(seed: int, count: int, only: str) -> list[Mutant]:
    """Draw mutants: kinds of edits in turns. It imports what is mutated, so it runs in a fork."""
    from instep_proof.faults.draw_mutants import edits_in_turns

    texts = {file: text for file, text in code_files().items() if only in file}
    trees = {file: ast.parse(text) for file, text in texts.items()}

    def drawn() -> Iterator[Mutant]:
        for one, edit in edits_in_turns(texts, seed):
            mutant = Mutant(edit.file, edit.old, edit.new, one.kind, one.what, one.line)
            with suppress(NoSite):
                site(trees[edit.file], texts[edit.file], mutant.planted(texts[edit.file]))
                yield mutant

    return [*islice(drawn(), count)]


def warm_up() -> None:
    """Import what every test needs, so that a fork has it."""
    for file in code_files():
        importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    importlib.import_module("instep.cli")
    gc.collect()
    gc.freeze()


class Forks:
    """A pytest plugin: runs each test once, and forks it where the value of a mutant differs. It is the switch.

    left: number of a mutant -> its processor seconds. rows: what each met, and what killed it. tests: how many passed.
    notes: tests that kill nothing, and why
    """

    def __init__(self, left: Mapping[int, float]) -> None:
        self.left = {**left}
        self.rows: dict[int, dict[str, Any]] = {number: {**NOTHING} for number in left}
        self.tests, self.notes = 0, list[str]()
        self.killed: dict[str, list[tuple[int, str]]] = {}  # test -> mutants that it would kill, and its error
        self.now, self.function, self.error = "", "", ""  # a test, without its parameters, and its failure
        self.cases = Counter[tuple[int, str]]()  # seconds of a mutant in all cases of a test
        self.last, self.shared = False, 0  # whether it is the last of its file; fixtures of several tests that begin
        self.process, self.reached, self.forked, self.hung = 0, set[int](), set[int](), list[tuple[int, float]]()
        self.wider = set[int]()  # mutants that a fixture of several tests met: one child runs the rest of the file
        self.mutant: int | None = None  # that of a child
        self.pipe, self.wide = -1, False

    def __call__(self, number: int, value: object = None, other: Callable[[], Any] | None = None) -> Any:
        """The value of an expression; if there is none: whether the mutant is on."""
        before, on = (False, True) if other is None else (value, None)
        if self.mutant is None:
            on = number in self.left and number not in self.forked and self._here() and (
                other is None or self._differs(number, value, other)) and self._fork(number)
        else:
            on = self.mutant == number
        return before if not on else True if other is None else other()

    def _here(self) -> bool:
        """Whether this is a test, in the process and the thread that run tests."""
        return self.process == os.getpid() and threading.current_thread() is threading.main_thread()

    def _differs(self, number: int, value: object, other: Callable[[], Any]) -> bool:
        self.reached.add(number)
        try:
            return not equal(value, other())
        except Exception:
            return True

    def _fork(self, number: int) -> bool:
        """Whether this is the child, in which the mutant is on. The parent returns when the child has ended."""
        self.reached.add(number)
        self.forked.add(number)
        if self.shared:
            self.wider.add(number)
        row = self.rows[number]
        over = min(self.left[number], OF_ONE_FILE) <= row["seconds"] or self.cases[number, self.function] > OF_ALL_CASES
        if over or len(os.listdir("/proc/self/task")) > 1:  # a child would wait for threads that it does not have
            row["left"] += 1
            return False
        seconds, status = self._child(number, 3 * OF_A_TEST if self.shared else OF_A_TEST)
        if self.mutant is not None:
            return True
        row |= {"tests": row["tests"] + 1, "seconds": row["seconds"] + seconds}
        self.cases[number, self.function] += seconds
        if status in (signal.SIGXCPU, signal.SIGKILL):
            self.hung += [(number, seconds)] * (not self.shared)
        elif status:
            self.killed.setdefault(self.now, []).append((number, f"ends by signal {status}"))
        return False

    def _child(self, number: int, limit: int) -> tuple[float, int]:
        """Fork, and wait for the child -> its processor seconds, and its signal. The child returns at once."""
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            os.setpgrp()
            self.mutant, self.pipe, self.wide = number, writes, self.shared > 0
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            return 0.0, 0
        os.close(writes)
        watch = os.pidfd_open(child)
        ended = bool(select.select([watch], [], [], WAITS * limit)[0])
        os.close(watch)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with what it started
        _, status, used = os.wait4(child, 0)
        os.set_blocking(reads, False)
        with suppress(BlockingIOError):
            test, says = json.loads(os.read(reads, 1 << 16) or b'["", ""]')
            if test:
                self.killed.setdefault(test, []).append((number, says))
        os.close(reads)
        return used.ru_utime + used.ru_stime, os.WTERMSIG(status) if ended and os.WIFSIGNALED(status) else 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """At the end run each test that kills a mutant from its start with it, fixtures too: it must fail."""
        result = yield
        self.killed, self.shared = {}, 0
        items = {label(item): item for item in session.items}
        for number, row in self.rows.items():
            if row["killed_by"]:
                self.now, self.last, self.error = row["killed_by"], True, ""
                _, status = self._child(number, 3 * OF_A_TEST)
                if self.mutant is not None:
                    forget = importlib.import_module("instep.lru_cache").forget
                    forget()
                    item: Any = items[self.now]
                    item._initrequest()
                    runtestprotocol(item, log=False)
                    self.end()
                if not status and number not in {one for several in self.killed.values() for one, _ in several}:
                    self.notes.append(f"{self.now} passes alone with mutant {number}, which it seemed to kill")
                    row |= {"killed_by": "", "says": ""}
        return result

    def end(self) -> None:
        """End a child, and tell its parent."""
        if self.mutant is not None:
            os.write(self.pipe, json.dumps([self.error and self.now, self.error]).encode())
            os._exit(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        several = fixturedef.scope != "function"
        self.shared += several
        try:
            return (yield)
        finally:
            self.shared -= several

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self.now, self.last, self.error = label(item), nextitem is None, ""
        self.function = self.now.partition("[")[0]
        self.reached, self.hung = set(), []
        self.forked = self.wider | {number for several in self.killed.values() for number, _ in several}
        self.process, begun = os.getpid(), time.process_time()
        result = yield
        if self.error or not self.wide:
            self.end()
        self.process = 0
        if self.mutant is None:
            self._count(time.process_time() - begun)
        return result

    def _count(self, seconds: float) -> None:
        """Count what mutants met in a test that took this processor time without them."""
        for number in self.reached:
            self.rows[number]["reached"] += 1
        killed = self.killed.pop(self.now, []) + [
            (one, "does not end") for one, used in self.hung if used > SLOWER * seconds + STARTS]  # fmt: skip
        if self.error:
            self.notes.append(f"{self.now} fails without a mutant")
            return
        self.tests += 1
        for number, says in killed:
            self.rows[number] |= {"killed_by": self.now, "says": says}
            self.left.pop(number, None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and not self.error:
            crash = getattr(report.longrepr, "reprcrash", None)
            says = crash.message if crash is not None else str(report.longrepr)
            self.error = (says.strip().splitlines() or [""])[0][:160] or "fails"
        if self.last and report.when == "call":  # its teardown is that of several tests
            self.end()
        return report


def run_pytest(plugin: object, tests: str, folder: Path, *, whole: bool) -> None:
    """Run a file of tests or one of them, by its path from the top folder."""
    whole = whole and TOP / "tests" in (TOP / tests.partition("::")[0]).resolve().parents  # where that option is
    words = ["-q", "-pno:benchmark", "-pno:xdist", "-pno:cacheprovider", "-m", "not gpu and not timing", tests]
    ours = ["-c", str(TOP / "pyproject.toml"), "--basetemp", str(folder / "tests"), *["--whole"] * whole]
    pytest.main([*words, *ours], plugins=[plugin])


def name_of(file: Path) -> str:
    return os.path.relpath(file, TOP)


def label(item: pytest.Item) -> str:
    """The name of a test with which pytest runs it from the top folder."""
    return f"{name_of(item.path)}::{item.nodeid.partition('::')[2]}"


def in_fork(work: Callable[[], Any], folder: Path, seconds: float) -> Any:
    """The result of a function in a fork of this process; None: it did not end within this processor time."""
    file = folder / "result.json"
    file.unlink(missing_ok=True)
    process = FORK.Process(target=_write_result, args=(work, file, seconds))
    process.start()
    try:
        process.join(WAITS * seconds)
    finally:
        if process.exitcode is None:
            process.kill()
            process.join()
    return json.loads(file.read_text()) if file.exists() else None


def _write_result(work: Callable[[], Any], file: Path, seconds: float) -> None:
    limit = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(TOP)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(file.parent / "hypothesis")
    sys.modules["__main__"] = ModuleType("__main__")  # what tests start does not import this module
    write(file, json.dumps(work()))
    os._exit(0)


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


def test_files(places: Iterable[Path], code: Mapping[str, int]) -> list[Path]:
    """The test files, those first that import the files of most survivors, also by way of `tests/support`.

    code: survivors in each mutated file, package first
    """
    several = (file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py")))
    names = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): one for file, one in code.items()}
    files = {file.resolve(): sum(names.get(name, 0) for name in imported(file)) for file in several}
    return sorted(files, key=lambda file: (-files[file], file.name))


@cache
def imported(test: Path) -> set[str]:
    """The modules that a file of the tests imports, itself or by way of `tests/support`."""
    left, found = {test}, set[str]()
    while left:
        file, names = left.pop(), set[str]()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
            elif isinstance(node, ast.Import):
                names |= {each.name for each in node.names}
        files = (TOP / "tests" / f"{name.replace('.', '/')}.py" for name in names - found)
        left |= {each for each in files if each.is_file()}
        found |= names
    return found


def lower_bound(killed: int, of: int) -> float:
    """The lower 95% bound of a share (Clopper and Pearson, one-sided)."""
    low, high = 0.0, killed / of if of else 0.0
    for _ in range(50):
        share = (low + high) / 2
        tail = sum(comb(of, each) * share**each * (1 - share) ** (of - each) for each in range(killed, of + 1))
        low, high = (low, share) if tail > 1 - CONFIDENCE else (share, high)
    return low


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    for row in result["rows"]:
        if not row["killed_by"]:
            yield (f"survived {row['tests']} tests ({row['reached']} reach it) of {row['files']} files: {row['file']} "
                   f"line {row['line']}: {row['what']}{': ' + row['reason'] if row.get('reason') else ''}")  # fmt: skip
    some = sum(not row["killed_by"] and row["files"] < result["files"] for row in result["rows"])
    yield f"{some} survivors have not met all {result['files']} test files; a later call continues"
    yield (f"{result['killed']} of {result['of']} mutants are killed ({result['asked']} requested), "
           f"lower 95% bound {100 * result['lower']:.1f}%")  # fmt: skip


def spelled(result: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """The file with a line for each mutant."""
    killed = sum(bool(row["killed_by"]) for row in rows)
    head = json.dumps({**result, "killed": killed, "of": len(rows), "lower": round(lower_bound(killed, len(rows)), 4)})
    return f'{head[:-1]}, "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


if __name__ == "__main__":
    main()
