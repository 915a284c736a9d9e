"""Draw mutants of the harness's own code, and run against each the tests of `make whole` that reach it.

    PYTHONPATH=reference:tests:harness:optimized python -m campaigns.harness_mutants --mutants 300 --minutes 60

First each test file runs without a mutant, which records the lines that every test reaches, in `build/reached/`. A
mutant then gets the tests that reach its statement, up to a limit of processor time; those that reach the fewest lines
come first. It is killed if one of them fails. They run in forks that share their fixtures, and those of a survivor run
again from the start. Several calls go on where the last one stopped; a survivor runs again if its tests have changed.
Edits of closures that exist since an import are not planted. Leaves out: drawing (`faults/draw_mutants.py`).
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from hashlib import sha256
from itertools import islice
from math import comb
from multiprocessing import get_context
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from instep.atomic_write import write_atomically
from instep.campaign.runner import TrialRunner
from instep.lru_cache import forget
from instep_proof.faults.catalogue.fault import ExactText
from instep_proof.faults.draw_mutants import edits_in_turns
from instep_reference.contract.errors import BadInput
from support.running.planting import planted_here, swaps_of

TOP = Path(__file__).resolve().parents[2]
HARNESS = TOP / "harness"
FILE = TOP / "fixtures" / "results" / "harness-mutants.json"
REACHED = TOP / "build" / "reached"
# The checks and their measures, the explanations, the verdict, the rules of the trace, and the bank of wrong states.
CODE = ("checks/*.py", "diagnose/**/*.py", "verdict.py", "tier_allowances.py", "trace/event_rules.py",
        "trace/request_table.py", "trace/write_bound.py", "oracle/*_states.py", "oracle/state_oracle.py")  # fmt: skip
FORK = get_context("fork")
OF_A_FILE = 3600  # processor seconds of a test file without a mutant
SLOWER, STARTS = 3, 20  # a mutant that makes its tests this much slower, and this many seconds in addition, hangs
OF_A_BODY = 60  # processor seconds of one test with a mutant
WAITS = 8  # wall clock per processor second
CONFIDENCE = 0.95


class Mutant(NamedTuple):
    """An edit of a file of the harness. lines: those of its statement"""

    edit: ExactText
    kind: str
    what: str
    line: int
    lines: range

    @property
    def id(self) -> str:
        return sha256("\0".join((self.edit.file, self.edit.old, self.edit.new)).encode()).hexdigest()[:12]


class Tried(NamedTuple):
    """The tests that reach a mutant, within its time. seconds: their processor time without it; left: tests left out"""

    tests: list[str]
    seconds: float
    left: int


def main() -> None:
    asks = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asks.add_argument("--mutants", type=int, default=300, help="how many are drawn")
    asks.add_argument("--seed", type=int, default=1, help="of the draws")
    asks.add_argument("--seconds", type=float, default=60.0, help="processor time of the tests of a mutant")
    asks.add_argument("--minutes", type=float, help="time after which nothing is begun")
    asks.add_argument("--tests", type=Path, default=TOP / "tests" / "harness", help="the folder of the tests")
    asks.add_argument("--json", type=Path, default=FILE, help="the result")
    asks.add_argument("--commit", default="", help="the revision that runs")
    asked = asks.parse_args()
    rows = {row["id"]: row for row in json.loads(asked.json.read_text())["rows"]} if asked.json.exists() else {}
    mutants = list(islice(drawn(asked.seed, rows), asked.mutants))
    result = {"command": "python -m campaigns.harness_mutants " + " ".join(
        f"--{name} {getattr(asked, name):g}" for name in ("mutants", "seed", "seconds")), "asked": asked.mutants,
        "commit": asked.commit}

    def keep() -> None:
        write_atomically({asked.json: spelled(result, [rows[one.id] for one in mutants if one.id in rows]).encode()})

    def advance(what: str, done: int, total: int | None) -> None:
        print(f"{done + 1} of {total}: {what}", flush=True)

    def map_tests() -> None:
        files = [file for file in by_imports(asked.tests) if not reached_file(file).exists()]
        for file in run.trials(files, lambda file: f"{file.name} without a mutant"):
            write_atomically({reached_file(file): json.dumps(without_a_mutant(file, Path(folder))).encode()})

    def run_mutants() -> None:
        several = tests_of(mutants, asked.tests, asked.seconds)
        left = [one for one in mutants if worth(rows.get(one.id), several[one.id])]
        run.keep = keep
        for file in run.trials(by_imports(asked.tests), lambda file: f"{file.name} with mutants"):
            for one, tried, test, says in killed_in_forks(file, left, several, Path(folder)):
                rows[one.id] = {**row(one, tried, asked.commit), "killed_by": test, "says": says}
                left.remove(one)
                print(test, "kills", one.edit.file, one.line, one.what, flush=True)
        for one in run.trials(left, lambda one: f"{one.edit.file} line {one.line}: {one.what}"):
            reason = rows.get(one.id, {}).get("reason", "")
            rows[one.id] = row_of(one, several[one.id], Path(folder), asked.commit)
            if reason and not rows[one.id]["killed_by"]:
                rows[one.id]["reason"] = reason
            print(rows[one.id]["killed_by"] or "SURVIVED", flush=True)

    REACHED.mkdir(parents=True, exist_ok=True)
    gc.collect()
    gc.freeze()  # a fork collects nothing of this
    run = TrialRunner(None if asked.minutes is None else 60 * asked.minutes, advance)
    with run, TemporaryDirectory() as folder:
        for share in run.shares((map_tests, run_mutants)):
            share()
    keep()
    print("\n".join(lines(json.loads(asked.json.read_text()))))


@cache
def code_files() -> dict[str, str]:
    """Map the files that are mutated, package first, to their text."""
    root = HARNESS / "instep"
    files = sorted({file for pattern in CODE for file in root.glob(pattern)})
    return {str(file.relative_to(HARNESS)): file.read_text() for file in files}


def drawn(seed: int, known: Container[str] = ()) -> Iterator[Mutant]:
    """Draw mutants that can be planted in a running process: kinds of edits in turns. known: ids of some that can"""
    texts = code_files()
    for one, edit in edits_in_turns(texts, Random(seed)):
        exact = ExactText(edit.file, edit.old, edit.new)
        mutant = Mutant(exact, one.kind, one.what, one.line, statement(texts[edit.file], one.line))
        try:
            if mutant.id not in known:
                with planted_here(exact):
                    pass
        except BadInput:  # no plain function
            continue
        yield mutant


def statement(text: str, line: int) -> range:
    """The lines of the innermost statement at a line; of a compound statement, those before its body."""
    spans = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            first = node.end_lineno or line
            if isinstance(body, list):
                first = max(node.lineno, min(getattr(each, "lineno", first) for each in body) - 1)
            if line <= first:
                spans.append(range(node.lineno, first + 1))
    return min(spans, key=len, default=range(line, line + 1))


class LinesReached:
    """A pytest plugin: the lines of files that each test reaches, in its fixtures too.

    tests: id of each test that passed -> its processor seconds, and file -> lines
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names, self.now = names, set[tuple[str, int]]()
        self.fixtures: dict[str, set[tuple[str, int]]] = {}
        self.tests: dict[str, dict[str, Any]] = {}
        self.passed: dict[str, bool] = {}

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename in self.names else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        self.now.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        outside, self.now = self.now, set()
        try:
            return (yield)
        finally:
            self.fixtures[fixturedef.argname] = self.now
            self.now = outside | self.now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.now, begun = set(), time.process_time()
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            if self.passed.get(item.nodeid):
                names = getattr(item, "fixturenames", ())
                found: dict[str, list[int]] = {}
                for file, line in self.now.union(*(self.fixtures.get(name, ()) for name in names)):
                    found.setdefault(self.names[file], []).append(line)
                seconds = round(time.process_time() - begun, 3)
                self.tests[name_of(item)] = {"seconds": seconds, "lines": found}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.passed[report.nodeid] = False
        elif report.when == "call":
            self.passed.setdefault(report.nodeid, True)


class Planted:
    """A pytest plugin: a mutant is in the code of all tests, once they are collected. Notes the first failure."""

    def __init__(self, edit: ExactText, progress: Path) -> None:
        self.edit, self.progress, self.until = edit, progress, ExitStack()
        self.passed, self.killed_by, self.says = 0, "", ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self.until.enter_context(planted_here(self.edit))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.progress.write_text(nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and not self.killed_by:
            crash = getattr(report.longrepr, "reprcrash", None)
            says = crash.message if crash is not None else str(report.longrepr)
            self.killed_by, self.says = name_of(item), (says.strip().splitlines() or [""])[0][:160]
        self.passed += report.passed and report.when == "call"
        return report

    def pytest_unconfigure(self) -> None:
        self.until.close()


class OneFork:
    """A pytest plugin: runs each test once per mutant, in a fork that its fixtures were made before.

    A fixture is made once for all mutants, so that most of them cost a fork and the body of a test. killed: id of a
    mutant -> the test that failed, and its error; only if the test passes in a last fork without a mutant
    """

    def __init__(self, mutants: Mapping[str, list[Mutant]], progress: Path) -> None:
        self.mutants, self.progress, self.killed = mutants, progress, dict[str, tuple[str, str]]()
        self.swaps: dict[str, list[tuple[FunctionType, CodeType]]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        name, found = name_of(pyfuncitem), dict[str, tuple[str, str]]()
        for one in self.mutants.get(name, ()):
            if one.id not in self.killed:
                if one.id not in self.swaps:
                    self.swaps[one.id] = swaps_of(one.edit)
                if says := self._fails(pyfuncitem, self.swaps[one.id]):
                    found[one.id] = name, says
        if found and not self._fails(pyfuncitem, []):
            self.killed |= found
        return True

    def _fails(self, item: pytest.Function, swaps: Iterable[tuple[FunctionType, CodeType]]) -> str:
        """The error with which a test ends; empty: it passes."""
        self.progress.write_text("")
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CPU, (OF_A_BODY, OF_A_BODY + 5))
            says = ""
            try:
                for function, code in swaps:
                    function.__code__ = code
                forget()
                item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
            except pytest.skip.Exception:
                pass
            except BaseException as error:
                says = f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]
            finally:
                self.progress.write_text(says)
                os._exit(0)
        _, status = os.waitpid(child, 0)
        return self.progress.read_text() or ("does not end" if status else "")


def run_pytest(plugin: object, tests: Iterable[str], folder: Path, *more: str) -> int:
    without = ("-pno:benchmark", "-pno:xdist", "-pno:cacheprovider", "-m", "not gpu and not timing")
    tests = [*tests]
    whole = ("--whole",) * (TOP / "tests" in (TOP / tests[0].partition("::")[0]).resolve().parents)  # has its conftest
    ours = (*whole, "-c", str(TOP / "pyproject.toml"), "--basetemp", str(folder / "tests"))
    words = ["-q", *ours, *without, *more, *tests]
    return int(pytest.main(words, plugins=[plugin]))


def name_of(item: pytest.Item) -> str:
    """The name of a test with which pytest runs it from the top folder."""
    return f"{os.path.relpath(item.path, TOP)}::{item.nodeid.partition('::')[2]}"


def in_fork(work: Callable[[], Any], folder: Path, seconds: float) -> Any:
    """The result of a function in a fork of this process; None: it did not end within this processor time."""
    file = folder / "result.json"
    file.unlink(missing_ok=True)
    process = FORK.Process(target=_write_result, args=(work, file, seconds))
    process.start()
    process.join(WAITS * seconds)
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
    os.chdir(TOP)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(file.parent / "hypothesis")
    sys.modules["__main__"] = ModuleType("__main__")  # what tests start does not import this module
    write_atomically({file: json.dumps(work()).encode()})
    os._exit(0)


def by_imports(folder: Path) -> list[Path]:
    """The test files, those first that import most of the mutated files, also by way of `tests/support`."""
    code = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in code_files()}
    files = {file: len(code & imported(file)) for file in folder.rglob("test_*.py")}
    return sorted(files, key=lambda file: (-files[file], file.name))


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


def reached_file(test: Path) -> Path:
    """The file of the lines that a test file reaches. Its name follows from the text of the tests and of the code."""
    known = sha256(repr((test.read_text(), sorted(code_files().items()))).encode()).hexdigest()[:12]
    return REACHED / f"{test.stem}-{known}.json"


def without_a_mutant(test: Path, folder: Path) -> dict[str, Any]:
    """Run a test file alone -> its tests that pass, and what each reaches."""
    plugin = LinesReached({str(HARNESS / name): name for name in code_files()})

    def work() -> dict[str, Any]:
        run_pytest(plugin, [str(test)], folder)
        return plugin.tests

    return in_fork(work, folder, OF_A_FILE) or {}


def tests_of(mutants: Iterable[Mutant], folder: Path, seconds: float) -> dict[str, Tried]:
    """The tests of each mutant: those that reach the fewest lines first, a file at a time, for its fixtures."""
    several = list(mutants)
    files: dict[str, dict[str, list[tuple[int, float, str]]]] = {one.id: {} for one in several}
    for test in sorted(folder.rglob("test_*.py")):
        reached = json.loads(reached_file(test).read_text()) if reached_file(test).exists() else {}
        for name, found in reached.items():
            total, here = sum(map(len, found["lines"].values())), {at: set(on) for at, on in found["lines"].items()}
            for one in several:
                if not here.get(one.edit.file, set()).isdisjoint(one.lines):
                    files[one.id].setdefault(test.name, []).append((total, found["seconds"], name))
    return {one.id: _within(files[one.id].values(), seconds) for one in several}


def _within(files: Iterable[list[tuple[int, float, str]]], seconds: float) -> Tried:
    ordered = [each for file in sorted(sorted(file) for file in files) for each in file]
    chosen, spent = list[str](), 0.0
    for _, cost, name in ordered:
        if spent + cost <= seconds:
            chosen.append(name)
            spent += cost
    return Tried(chosen, round(spent, 1), len(ordered) - len(chosen))


def worth(row: Mapping[str, Any] | None, tried: Tried) -> bool:
    """Whether a mutant needs a run: it had none, or it survived other tests."""
    return row is None or (not row["killed_by"] and row["ran"] != digest(tried))


def digest(tried: Tried) -> str:
    texts = {name: (TOP / name).read_text() for name in {test.partition("::")[0] for test in tried.tests}}
    return sha256(repr((tried.tests, sorted(texts.items()))).encode()).hexdigest()[:12]


def row(one: Mutant, tried: Tried, commit: str) -> dict[str, Any]:
    return {"id": one.id, "file": one.edit.file, "line": one.line, "kind": one.kind, "what": one.what, "killed_by": "",
            "says": "", "tests": 0, "left": tried.left, "ran": digest(tried), "commit": commit}  # fmt: skip


def killed_in_forks(
    file: Path, mutants: Iterable[Mutant], several: Mapping[str, Tried], folder: Path
) -> list[tuple[Mutant, Tried, str, str]]:
    """Run the tests of a file in forks with mutants -> those that are killed, by which test, and its error."""
    tests: dict[str, list[Mutant]] = {}
    by_id = {one.id: one for one in mutants}
    for one in by_id.values():
        for test in several[one.id].tests:
            if test.startswith(f"{os.path.relpath(file, TOP)}::"):
                tests.setdefault(test, []).append(one)
    if not tests:
        return []
    plugin = OneFork(tests, folder / "fork")

    def work() -> dict[str, tuple[str, str]]:
        run_pytest(plugin, tests, folder)
        return plugin.killed

    found = in_fork(work, folder, OF_A_FILE) or {}
    return [(by_id[name], several[name], *killed) for name, killed in found.items()]


def row_of(one: Mutant, tried: Tried, folder: Path, commit: str) -> dict[str, Any]:
    """Run the tests of a mutant from the start, fixtures too. killed_by: the test that failed; empty: none did."""
    untried = row(one, tried, commit)
    if not tried.tests:
        return untried
    progress = folder / "progress"
    plugin = Planted(one.edit, progress)

    def work() -> dict[str, Any]:
        code = run_pytest(plugin, tried.tests, folder, "-x")
        return {"code": code, "killed_by": plugin.killed_by, "says": plugin.says, "tests": plugin.passed}

    progress.write_text("")
    found = in_fork(work, folder, SLOWER * tried.seconds + STARTS)
    if found is None:
        at = progress.read_text()
        return {**untried, "killed_by": at, "says": "does not end" if at else "NOTHING RAN"}
    if found["killed_by"] and not passes_alone(found["killed_by"], folder):
        return {**untried, "says": f"{found['killed_by']} fails alone without a mutant"}
    if found["code"] not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {found['code']} for {tried.tests[:3]}")
    return {**untried, "killed_by": found["killed_by"], "says": found["says"], "tests": found["tests"]}


@cache
def passes_alone(test: str, folder: Path) -> bool:
    """Whether a test passes without a mutant when no other test ran before it."""
    return in_fork(lambda: run_pytest(object(), [test], folder), folder, OF_A_FILE) == pytest.ExitCode.OK


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
            yield (f"survived {row['tests']} tests: {row['file']} line {row['line']}: {row['what']}"
                   f"{': ' + row['reason'] if row.get('reason') else ''}")  # fmt: skip
    yield (f"{result['killed']} of {result['of']} mutants are killed ({result['asked']} requested), "
           f"lower 95% bound {100 * result['lower']:.1f}%")  # fmt: skip


def spelled(result: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """The file with a line for each mutant."""
    killed = sum(bool(row["killed_by"]) for row in rows)
    head = json.dumps({**result, "killed": killed, "of": len(rows), "lower": round(lower_bound(killed, len(rows)), 4)})
    return f'{head[:-1]}, "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


if __name__ == "__main__":
    main()
