"""Draw mutants of the harness's own code, and run the tests against those whose values differ in them.

    PYTHONPATH=reference:tests:harness:optimized python -m campaigns.harness_mutants --mutants 300 --minutes 60

The code has a switch at each mutant (`switched_code.py`). First each test file runs once without mutants. This records
the time of each test, and the mutants whose expressions have another value in it. Then each mutant runs the tests in
which its value differs until one fails, first all quick tests. Each file is read once, in a process with a fork for
each mutant. A test that fails must pass without the mutant. A later call continues: it records new and changed test
files, and a survivor runs their tests. Leaves out: drawing (`faults/draw_mutants.py`), and values that differ in other
processes or threads of a test.
"""

import argparse
import ast
import builtins
import gc
import importlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from itertools import islice, product, zip_longest
from math import exp, lgamma, log, log1p
from multiprocessing import get_context
from operator import add
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from campaigns.switched_code import SWITCH, NoSite, equal, install, site

TOP = Path(__file__).resolve().parents[2]
HARNESS = TOP / "harness"
FILE = TOP / "fixtures" / "results" / "harness-mutants.json"
SEEN = TOP / "build" / "harness-mutants.json"  # what tests compute, and for each row what it survived
# The checks and their measures, the explanations, the verdict, the rules of the trace, and the bank of wrong states.
CODE = ("checks/*.py", "diagnose/**/*.py", "verdict.py", "tier_allowances.py", "trace/event_rules.py",
        "trace/request_table.py", "trace/write_bound.py", "oracle/*_states.py", "oracle/state_oracle.py")  # fmt: skip
FORK = get_context("fork")
OF_A_FILE = 3600  # processor seconds of a test file without mutants
QUICK = 0.5  # seconds of a test
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
    asks.add_argument("--mutants", type=int, default=300, help="how many are drawn of each seed")
    asks.add_argument("--seed", type=int, nargs="+", default=[1], help="of the draws, a sample for each")
    asks.add_argument("--only", default="", help="draw mutants of files with this text in their path")
    asks.add_argument("--seconds", type=float, default=60.0, help="processor time of a mutant in one call")
    asks.add_argument("--minutes", type=float, default=1e9, help="time after which no test file or mutant is begun")
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
        mutants, seeds = list[Mutant](), dict[str, int]()
        for seed in asked.seed:
            drawn = in_fork(partial(draw, seed, asked.mutants, asked.only), folder)[0]
            mutants += [one for one in (Mutant(*each) for each in drawn) if seeds.setdefault(one.id, seed) == seed]
        texts = code_files()
        install({HARNESS / file: text for file, text in texts.items()},
                [(HARNESS / one.file, one.planted(texts[one.file])) for one in mutants])  # fmt: skip
        campaign = Campaign(mutants, seeds, asked, folder)
        setattr(builtins, SWITCH, lambda number, value=None, other=None: value)
        warm_up()
        for file in campaign.files:
            if time.monotonic() < end and (new := campaign.unrecorded(file)):
                campaign.record(file, new)
                campaign.keep()
        for quick, file in product((True, False), campaign.files):
            if time.monotonic() < end and (due := campaign.due(file, quick=quick)):
                campaign.run(file, due, end)
                campaign.keep()
        campaign.keep()
    print("\n".join(lines(json.loads(asked.json.read_text()))))


class Campaign:
    """The rows of the result, what each test computes, and what each mutant has survived.

    recorded: test file -> its digest, the mutants that were looked for, and for each test that computes some of them
    its seconds, and their indices in this list: those that it computes, and those whose values differ in it
    """

    def __init__(
        self, mutants: Sequence[Mutant], seeds: Mapping[str, int], asked: argparse.Namespace, folder: Path
    ) -> None:
        self.mutants, self.asked, self.folder = mutants, asked, folder
        known: dict[str, dict[str, Any]] = {}
        before, seen = (json.loads(file.read_text()) if file.exists() else {} for file in (asked.json, asked.seen))
        for row in (*before.get("survivors", ()), *seen.get("rows", ())):
            known[row["id"]] = {**known.get(row["id"], {}), **row}  # reasons are in the first
        self.note = {name: before[name] for name in ("note",) if name in before}
        self.rows: dict[str, dict[str, Any]] = {one.id: {
            "id": one.id, "file": one.file, "line": one.line, "kind": one.kind, "what": one.what, **NOTHING,
            "commit": "", "survived": {}, **known.get(one.id, {}), "seed": seeds[one.id],
        } for one in mutants}  # fmt: skip
        self.others = [row for name, row in known.items() if name not in self.rows]
        self.recorded: dict[str, dict[str, Any]] = seen.get("recorded", {})
        self.right: dict[str, str] = seen.get("right", {})  # test that passed alone without a mutant -> digest
        self.left = dict.fromkeys(range(len(mutants)), float(asked.seconds))  # processor time of this call
        self.files = {name_of(file): self._digest(file) for file in test_files(asked.tests, {
            one.file for one in mutants if not self.rows[one.id]["killed_by"]})}  # fmt: skip
        self._find_tests()

    def unrecorded(self, file: str) -> list[int]:
        """The numbers of the living mutants that have not been looked for in this text of a test file."""
        known = {*self._known(file)["mutants"]}
        return [number for number, one in enumerate(self.mutants)
                if not self.rows[one.id]["killed_by"] and one.id not in known]  # fmt: skip

    def _known(self, file: str) -> dict[str, Any]:
        known = self.recorded.get(file, {})
        same = known.get("digest") == self.files[file]
        return known if same else {"digest": self.files[file], "mutants": [], "tests": {}}

    def record(self, file: str, numbers: Sequence[int]) -> None:
        """Run a test file without mutants, and note what its tests compute."""
        plugin = Recorder(numbers)
        setattr(builtins, SWITCH, plugin)

        def work() -> dict[str, Any]:
            run_pytest(plugin, [file], self.folder, whole=self.asked.whole)
            tests = {name: [round(met.seconds, 2), sorted(met.reached), sorted(met.differs)]
                     for name, met in plugin.tests.items() if met.reached}  # fmt: skip
            return {"tests": tests, "failed": plugin.failed}

        begun = time.monotonic()
        found, ended, _ = in_fork(work, self.folder)
        if found is None:
            print(f"{file} DID NOT END ({ended})", flush=True)
            return
        known = self._known(file)
        index = {number: place for place, number in enumerate(numbers, start=len(known["mutants"]))}
        known["mutants"] += [self.mutants[number].id for number in numbers]
        for name, (seconds, reached, differs) in found["tests"].items():
            _, *before = known["tests"].get(name, [seconds, [], []])
            new = ([index[number] for number in several] for several in (reached, differs))
            known["tests"][name] = [seconds, *map(add, before, new)]
        self.recorded[file] = known
        self._find_tests()
        print(f"{file}: {len(found['tests'])} tests compute mutants, {time.monotonic() - begun:.0f} s", flush=True)
        for name in found["failed"]:
            print(f"{name} fails without a mutant", flush=True)

    def due(self, file: str, *, quick: bool) -> dict[int, list[str]]:
        """Living mutant -> the tests of this file in which its value differs and that it has not survived."""
        found = dict[int, list[str]]()
        for number, one in enumerate(self.mutants):
            row, tests = self.rows[one.id], self.tests[one.id][1]
            if not row["killed_by"] and self.left[number] > 0:
                its = [name for name in tests if (tests[name] <= QUICK) is quick and file_of(name) == file
                       and row["survived"].get(name) != self.files[file]]  # fmt: skip
                found |= {number: sorted(its, key=tests.__getitem__)} if its else {}
        return found

    def _find_tests(self) -> None:
        """Map each mutant to the tests that compute it, and to those in which its value differs."""
        here = {one.id for one in self.mutants}
        self.tests: dict[str, tuple[set[str], dict[str, float]]] = {one.id: (set(), {}) for one in self.mutants}
        for known in map(self._known, self.files):
            ids = known["mutants"]
            for name, (seconds, reached, differs) in known["tests"].items():
                for one in {ids[place] for place in reached} & here:
                    self.tests[one][0].add(name)
                for one in {ids[place] for place in differs} & here:
                    self.tests[one][1][name] = seconds

    def run(self, file: str, due: Mapping[int, Sequence[str]], end: float) -> None:
        """Run mutants with these tests of a file until one fails, and then that test without the mutant."""
        seconds = {name: seconds for _, tests in self.tests.values() for name, seconds in tests.items()}
        limits = {name: seconds[name] for tests in due.values() for name in tests}
        left = {number: self.left[number] for number in due}
        plugin = UntilOneFails(due, limits, left, self.folder, {*self.right}, end)
        in_fork(partial(run_pytest, plugin, [file], self.folder, whole=self.asked.whole), self.folder)
        for line in plugin.results.read_text().splitlines() if plugin.results.exists() else ():
            told: dict[str, Any] = json.loads(line)
            number, ran, error = told["number"], told["ran"], told["error"]
            row = self.rows[self.mutants[number].id]
            self.left[number] -= told["seconds"]
            row |= {"commit": self.asked.commit, "seconds": round(row["seconds"] + told["seconds"], 1),
                    "tests": row["tests"] + len(ran)}  # fmt: skip
            row["survived"] |= {name: self.files[file] for name in ran}
            if error and told["right"]:
                row |= {"killed_by": ran[-1], "says": error}
                self.right[ran[-1]] = self.files[file]
            elif error:
                print(f"{ran[-1]} fails without a mutant", flush=True)
        killed = sum(bool(self.rows[self.mutants[number].id]["killed_by"]) for number in due)
        print(f"{file}: {killed} of {len(due)} mutants killed", flush=True)

    def keep(self) -> None:
        """Write the result. A mutant that nothing has killed counts as a survivor before it has met every file, too."""
        rows, met = [], Counter(one for file in self.files for one in self._known(file)["mutants"])
        for number, row in enumerate(self.rows.values()):
            if not row["killed_by"]:
                row |= {"files": met[row["id"]],
                        "left": self._left(number), "reached": len(self.tests[row["id"]][0])}  # fmt: skip
            rows.append({name: value for name, value in row.items() if name != "survived"})
        words = [f"--{name} {getattr(self.asked, name):g}" for name in ("mutants", "seconds")]
        words.insert(1, "--seed " + " ".join(map(str, self.asked.seed)))
        words += ["--whole"] * self.asked.whole + [f"--only {self.asked.only}"] * bool(self.asked.only)
        if self.asked.tests != [TOP / "tests" / "harness"]:
            words.append("--tests " + " ".join(name_of(place) for place in self.asked.tests))
        result = {"command": " ".join(("python -m campaigns.harness_mutants", *words)), "asked": self.asked.mutants,
                  "commit": self.asked.commit, **self.note, "files": len(self.files)}  # fmt: skip
        write(self.asked.json, spelled(result, rows))
        write(self.asked.seen, json.dumps({
            "rows": [*self.rows.values(), *self.others], "recorded": self.recorded, "right": self.right}))  # fmt: skip

    def _left(self, number: int) -> int:
        """The number of tests in which the value of a mutant differs, and that it has not survived."""
        survived, tests = self.rows[self.mutants[number].id]["survived"], self.tests[self.mutants[number].id][1]
        return sum(survived.get(name) != self.files[file_of(name)] for name in tests)

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


@dataclass
class Met:
    """The mutants that a test or a fixture computes, those whose values differ in it, and its processor seconds."""

    seconds: float = 0.0
    reached: set[int] = field(default_factory=set)
    differs: set[int] = field(default_factory=set)


class Recorder:
    """A pytest plugin, and the switch: notes what each test computes. No mutant is on.

    numbers: the mutants that it looks for. A fixture of several tests counts for each test that requests it.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers, self.now, self.process = {*numbers}, Met(), 0
        self.tests, self.shared, self.failed = dict[str, Met](), dict[str, Met](), list[str]()

    def __call__(self, number: int, value: object = None, other: Callable[[], Any] | None = None) -> Any:
        if number in self.numbers and number not in self.now.differs and self._here():
            self.now.reached.add(number)
            if other is None or self._differs(value, other):
                self.now.differs.add(number)
        return value

    def _here(self) -> bool:
        """Whether this is a test, in the process and the thread that run tests."""
        return self.process == os.getpid() and threading.current_thread() is threading.main_thread()

    def _differs(self, value: object, other: Callable[[], Any]) -> bool:
        try:
            return not equal(value, other())
        except Exception:
            return True

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before, self.now, begun = self.now, Met(), time.process_time()
        self.shared[fixturedef.argname] = self.now
        try:
            return (yield)
        finally:
            used = time.process_time() - begun
            self.now.seconds += used
            before.seconds -= used
            self.now = before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.tests[label(item)] = self.now = Met()
        self.process, begun = os.getpid(), time.process_time()
        result = yield
        self.process = 0
        self.now.seconds += time.process_time() - begun
        for name in {*getattr(item, "fixturenames", ())} & {*self.shared}:
            self.now.seconds += self.shared[name].seconds
            self.now.reached |= self.shared[name].reached
            self.now.differs |= self.shared[name].differs
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and self.tests.pop(label(item), None):
            self.failed.append(label(item))
        return report


class UntilOneFails:
    """A pytest plugin: runs the tests of each mutant in their order until one fails, in a fork for each mutant.

    due: mutant -> names of tests; seconds: those of a test without a mutant; left: those of a mutant
    right: tests that pass alone without a mutant; results: gets a line for each mutant that ran
    """

    def __init__(self, due: Mapping[int, Sequence[str]], seconds: Mapping[str, float], left: Mapping[int, float],
                 folder: Path, right: set[str], end: float) -> None:  # fmt: skip
        self.due, self.seconds, self.left, self.right, self.end = due, seconds, left, right, end
        self.folder, self.results, self.ran = folder / "fork", folder / "results.jsonl", folder / "ran.jsonl"
        self.folder.mkdir(exist_ok=True)
        self.results.unlink(missing_ok=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {label(item): item for item in session.items}
        with self.results.open("a") as file:
            for number, names in self.due.items():
                if time.monotonic() >= self.end:
                    break
                its = [items[name] for name in names if name in items]
                ran, error, seconds = self._run(number, its, self.left[number])
                if error and ran[-1] not in self.right and not self._run(None, [items[ran[-1]]], OF_A_FILE)[1]:
                    self.right.add(ran[-1])
                right = bool(error) and ran[-1] in self.right
                file.write(json.dumps({"number": number, "ran": ran, "error": error, "right": right,
                                       "seconds": seconds}) + "\n")  # fmt: skip
                file.flush()
        return True

    def _run(self, number: int | None, items: Sequence[pytest.Item], limit: float) -> tuple[list[str], str, float]:
        """Run tests with a mutant until one fails -> those that ended, the error of the last, processor seconds."""
        self.ran.unlink(missing_ok=True)
        _, ended, seconds = in_fork(partial(self._serve, number, items), self.folder, limit)
        told = [json.loads(line) for line in self.ran.read_text().splitlines()] if self.ran.exists() else []
        begun = [name for name, error in told if error is None]
        errors = [(name, error) for name, error in told if error]
        if errors:
            name, error = errors[0]
            return [*(each for each in begun if each != name), name], error, seconds
        if ended in (-signal.SIGXCPU, -signal.SIGKILL):  # the time of the mutant is over
            return begun[:-1], "", seconds
        if ended >= 0 or not begun:
            return begun, "", seconds
        hangs = ended in (-signal.SIGPROF, -signal.SIGALRM)
        return begun, "does not end" if hangs else f"ends by signal {-ended}", seconds

    def _serve(self, number: int | None, items: Sequence[pytest.Item]) -> None:
        def switch(at: int, value: object = None, other: Callable[[], Any] | None = None) -> Any:
            """The value of an expression; if there is none: whether the mutant is on."""
            return value if at != number else True if other is None else other()

        setattr(builtins, SWITCH, switch)
        for item, following in zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _tell(self, name: str, error: str | None) -> None:
        with self.ran.open("a") as file:
            file.write(json.dumps([name, error]) + "\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._tell(label(item), None)
        limit = SLOWER * self.seconds[label(item)] + STARTS
        signal.setitimer(signal.ITIMER_PROF, limit)
        signal.setitimer(signal.ITIMER_REAL, WAITS * limit)
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            says = crash.message if crash is not None else str(report.longrepr)
            self._tell(label(item), (says.strip().splitlines() or [""])[0][:160] or "fails")
            os._exit(0)
        return report


def run_pytest(plugin: object, tests: Sequence[str], folder: Path, *, whole: bool) -> None:
    """Run files of tests, by their paths from the top folder."""
    whole = whole and all(TOP / "tests" in (TOP / test).resolve().parents for test in tests)  # where that option is
    words = ["-q", "-pno:benchmark", "-pno:xdist", "-pno:cacheprovider", "-m", "not gpu and not timing", *tests]
    ours = ["-c", str(TOP / "pyproject.toml"), "--basetemp", str(folder / "tests"), *["--whole"] * whole]
    pytest.main([*words, *ours], plugins=[plugin])


def file_of(test: str) -> str:
    return test.partition("::")[0]


def name_of(file: Path) -> str:
    return os.path.relpath(file, TOP)


def label(item: pytest.Item) -> str:
    """The name of a test with which pytest runs it from the top folder."""
    return f"{name_of(item.path)}::{item.nodeid.partition('::')[2]}"


def in_fork(work: Callable[[], Any], folder: Path, seconds: float = OF_A_FILE) -> tuple[Any, int, float]:
    """Call a function in a fork with this processor time -> its result or None, the exit code, processor seconds."""
    file = folder / "result.json"
    file.unlink(missing_ok=True)
    process = FORK.Process(target=_write_result, args=(work, file, seconds))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process.start()
    try:
        process.join(WAITS * seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with what it started
        process.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(file.read_text()) if file.exists() else None, process.exitcode or 0, spent


def _write_result(work: Callable[[], Any], file: Path, seconds: float) -> None:
    os.setpgrp()
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


def test_files(places: Iterable[Path], code: Iterable[str]) -> list[Path]:
    """The test files, those first that import most of these files, also by way of `tests/support`.

    code: mutated files, package first
    """
    several = (file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py")))
    names = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in code}
    files = {file.resolve(): len(names & imported(file)) for file in several}
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
    for _ in range(50 if 0 < killed < of else 0):
        share = (low + high) / 2
        tail = sum(exp(lgamma(of + 1) - lgamma(each + 1) - lgamma(of - each + 1) + each * log(share)
                       + (of - each) * log1p(-share)) for each in range(killed, of + 1))  # fmt: skip
        low, high = (low, share) if tail > 1 - CONFIDENCE else (share, high)
    return low if killed < of else (1 - CONFIDENCE) ** (1 / of) if of else 0.0


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    for row in result["survivors"]:
        yield (f"survived {row['tests']} tests ({row['reached']} reach it, {row['left']} left) of {row['files']} "
               f"files: {row['file']} line {row['line']}: {row['what']}"
               f"{': ' + row['reason'] if row.get('reason') else ''}")  # fmt: skip
    some = sum(row["files"] < result["files"] or row["left"] > 0 for row in result["survivors"])
    yield f"{some} survivors have not met all {result['files']} test files; a later call continues"
    for seed, (killed, of) in result["seeds"].items():
        yield (f"seed {seed}: {killed} of {of} mutants are killed ({result['asked']} requested), "
               f"lower 95% bound {100 * lower_bound(killed, of):.1f}%")  # fmt: skip


def spelled(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The file with a line for each survivor. seeds, code, tests: killed and all mutants of each; kills of each file"""
    def shares(name: str) -> dict[str, list[int]]:
        found = dict[str, list[int]]()
        for row in rows:
            share = found.setdefault(str(row[name]), [0, 0])
            found[str(row[name])] = [share[0] + bool(row["killed_by"]), share[1] + 1]
        return dict(sorted(found.items()))

    tests = Counter(file_of(row["killed_by"]) for row in rows if row["killed_by"])
    killed, survivors = tests.total(), [row for row in rows if not row["killed_by"]]
    head = json.dumps({**result, "killed": killed, "of": len(rows), "lower": round(lower_bound(killed, len(rows)), 4),
                       "seeds": shares("seed"), "code": shares("file"),
                       "tests": dict(sorted(tests.items()))})  # fmt: skip
    return f'{head[:-1]}, "survivors": [\n' + ",\n".join(map(json.dumps, survivors)) + "\n]}\n"


if __name__ == "__main__":
    main()
