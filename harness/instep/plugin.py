"""The pytest plugin: every trace below `--instep-traces` is a test item per op set, and fails with its message.

    pytest --instep-traces=fixtures/traces --instep-ops=plain

An option is written with `=`. pytest looks for the root folder, and for its configuration, before it knows the options
of a plugin: it takes a value after a blank for a path to test. Every option is an ini option, too (`instep_traces`),
with underlines where the option has hyphens (`--instep-state-dtype`, `instep_state_dtype`).
Leaves out: running it (`instep.replay`). Loads neither torch nor triton nor numpy where no trace is collected: pytest
imports this file in every session of everybody who has instep installed.
"""

from __future__ import annotations

import json
import sys
from argparse import BooleanOptionalAction
from collections.abc import Generator, Iterable, Iterator
from math import isfinite
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from .options import OPTIONS
from .usage import PLAN, missing, must_be_there, must_be_tiers

if TYPE_CHECKING:
    from .kit.runs import Replayed
    from .replay.replay import Outcome
    from .trace.file import Trace
    from .trace.header import Part

TRACE = ".jsonl"
ONE_VALUE = {name: option for name, option in OPTIONS.items() if name != "ops"}  # what all items of a session share
SERVES = ("instep_engine", "instep_ops")  # one of them is given, by the command line or else by the ini file
SAYS = "instep_says"  # property of a report: a line for the end of the session
ARTIFACTS = "instep_artifacts"  # property of a report: the folder of its page, result, trace and tensors
OPENING = {"schema", "checkpoint", "capacity"}  # fields of every trace's first line


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("instep", "traces replayed through a reference and an optimized engine (--option=VALUE)")
    for name, metavar, said in (
        ("traces", "PATH", "collect every trace (*.jsonl) below this folder, or this one; may be repeated. On the "
                           "command line it stands for a path: without other paths, nothing else is collected. In an "
                           "ini file it is a list, collected where the command line names no path."),
        ("ops", "OPS", "op set, engine or module:attribute, an item each; may be repeated. Left out: the trace's own "
                       "plan. Named without traces: those that come with instep."),
        ("tiers", "TIERS", "judge these tiers alone: T0,T1,T2,T2d,T3,T4, some of them; may be repeated. "
                           "Left out: all."),
    ):  # fmt: skip
        group.addoption(f"--instep-{name}", action="append", default=[], metavar=metavar, help=said)
    said = "the model; left out: where each trace says"
    group.addoption("--instep-checkpoint", metavar="DIR", help=said)
    parser.addini("instep_checkpoint", said, default="")
    for name, (kind, says) in ONE_VALUE.items():
        said = says[0].lower() + says[1:].rstrip(".")
        how: dict[str, Any] = {"action": BooleanOptionalAction} if kind is bool else {"metavar": "NAME"}
        group.addoption(f"--instep-{name.replace('_', '-')}", help=said, **how)
        stored: Literal["bool", "string"] = "bool" if kind is bool else "string"
        parser.addini(f"instep_{name}", said, type=stored, default=None)
    group.addoption("--instep-out", metavar="DIR", help="a folder for each failure: page, result, trace, tensors")
    parser.addini("instep_traces", "folders of traces, or traces, seen from the ini file", type="paths", default=[])
    parser.addini("instep_ops", "op sets, engines or module:attribute, an item each", type="args", default=[])
    parser.addini("instep_tiers", "the tiers that are judged; left out: all", type="args", default=[])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What was compared, in a line; what engines led by verbs do not show; which tiers were left out."""
    reports = [
        report for kind, found in terminalreporter.stats.items() if kind != "rerun"
        for report in found if getattr(report, "when", "") == "call"
    ]
    told = [(str(name), str(value)) for report in reports for name, value in report.user_properties]
    mine = [(name, value) for name, value in told if name.startswith("instep_")]
    for one, other in (SERVES, SERVES[::-1]):
        if mine and config.getoption(one) and config.getini(other):
            terminalreporter.write_line(f"instep: --{one.replace('_', '-')} outranks {other} of the ini file")
    for said in [value for name, value in mine if name == SAYS] + _sum(mine):
        terminalreporter.write_line(f"instep: {said}")
    if words := _given(config, "tiers"):
        terminalreporter.write_line(f"instep: only {','.join(words)} judged; --instep-tiers left the others out")


def _sum(told: list[tuple[str, str]]) -> list[str]:
    """All runs of the session in a line, from the properties of their reports: workers of xdist send these."""
    by_name = {short: [value for name, value in told if name.partition("[")[0] == f"instep_{short}"]
               for short in ("verdict", "elements", "used", "artifacts")}  # fmt: skip
    if not by_name["verdict"]:
        return []
    from .report.terminal import largest

    verdicts = [f"{by_name['verdict'].count(word)} {word}" for word in dict.fromkeys(sorted(by_name["verdict"]))]
    used = largest(map(float, by_name["used"]))
    line = f"{', '.join(verdicts)}: {sum(map(int, by_name['elements'])):,} numbers compared"
    line += "" if used is None else (
        f", at most {used:.3g} of an allowance used" if isfinite(used) else ", in one place beyond every allowance")
    return [line, *(f"{folder}/page.html" for folder in by_name["artifacts"])]


@pytest.fixture
def instep_replayed(request: pytest.FixtureRequest) -> Any:
    """`kit.replayed` with the session's options; its numbers go to JUnit, and what diverged to `--instep-out`."""

    def run(what: Any, subject: Any = "plain", **setting: Any) -> Any:
        from .kit.runs import replayed

        typed = {"tiers": _given(request.config, "tiers"), **_typed(request.config, "engine")}
        if not hasattr(what, "checkpoint"):  # a workload has its own model
            typed["checkpoint"] = _checkpoint(request.config)
        done = replayed(what, subject, **{**typed, **setting})
        _keep(request.node, done, what)
        return done

    return run


def _keep(item: pytest.Item, done: Replayed, what: Any) -> None:
    """Properties of every run; of a divergence, where it is wanted, the folder. what: whose trace it was."""
    from .report.artifacts import folder_of, properties, write
    from .trace.file import Trace, read

    for outcome in done.outcomes:
        item.user_properties += properties(outcome)
    out = item.config.getoption("instep_out")
    if not out or not done.findings:
        return
    before = sum(name == ARTIFACTS for name, _ in item.user_properties)
    folder = folder_of(item.nodeid, item.config.invocation_params.dir / out, before)
    if hasattr(what, "checkpoint"):  # a workload has no file yet
        what = what.write(folder)
    write(done.outcomes, what if isinstance(what, Trace) else read(Path(what)), done.message, folder)
    item.user_properties.append((ARTIFACTS, str(folder)))


def pytest_configure(config: pytest.Config) -> None:
    """Take the folders into the paths that pytest collects."""
    config.addinivalue_line("markers", "instep: a trace that is replayed; -m 'not instep' leaves all of them out")
    if words := _given(config, "tiers"):
        must_be_tiers(words)
    for ask, engine, ops in ((config.getoption, "--instep-engine", "--instep-ops"), (config.getini, *SERVES)):
        if all(map(ask, SERVES)):
            raise pytest.UsageError(f"{engine}: found {ops} beside it, expected one of the two: who serves")
    folders = _folders(config)
    for folder in folders:
        if not folder.exists():
            raise pytest.UsageError(f"--instep-traces: {folder} is not there")
        if not any(_traces(folder)):
            raise pytest.UsageError(f"--instep-traces: no trace (*{TRACE}) below {folder}: nothing would be compared")
    if not folders:
        return
    _interpret()
    _warn_of_another_root(config)
    asking = ("--instep-traces",) if _given(config, "traces") else ("--instep-ops",)
    typed = any(str(word).startswith(asking) for word in config.invocation_params.args)
    paths = config.args_source is pytest.Config.ArgsSource.ARGS
    if any(arg.partition("::")[0].endswith(TRACE) for arg in config.args) or (paths and not typed):
        return  # the command line says what is to run
    if typed and not paths:
        config.args.clear()
    config.args.extend(str(folder) for folder in folders)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Switch Triton's interpreter on before pytest imports a test that uses instep and may import Triton first."""
    if b"instep" in module_path.read_bytes():
        _interpret()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> TraceFile | None:
    """A trace in one of the folders, or one that the command line itself names."""
    if file_path.suffix != TRACE:
        return None
    named = parent.session.isinitpath(file_path) and _is_trace(file_path)
    if not named and not any(_below(file_path, folder) for folder in _folders(parent.config)):
        return None
    # pytest names what lies outside its root folder by its last part alone, and finds nothing under that name.
    root = parent.config.rootpath
    outside: dict[str, Any] = {} if file_path.is_relative_to(root) else {"nodeid": relpath(file_path, root)}
    return TraceFile.from_parent(parent, path=file_path, **outside)


def pytest_sessionstart(session: pytest.Session) -> None:
    """The process that hands items to workers collects none: it looks at once. A usage error of a worker is a crash."""
    config = session.config
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        return
    named = list[str]()
    for word, _, rest in (arg.partition("::") for arg in config.args):
        place = (config.invocation_params.dir / word).resolve()
        if word.endswith(TRACE) or any(_below(place, folder) or _below(folder, place) for folder in _folders(config)):
            named += [*_served(config), *filter(None, [rest])]
    _look(config, named)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Traces have a marker; a wrong setting is told before anything runs."""
    mine = [item for item in items if isinstance(item, TraceItem)]
    for item in mine:
        item.add_marker("instep")
    _look(config, [item.name for item in mine])


def _look(config: pytest.Config, named: list[str]) -> None:
    if named:
        must_be_there(named, _engine(config), _typed(config, "engine"), _checkpoint(config))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is run again begins without the properties of its last run."""
    item.user_properties[:] = [one for one in item.user_properties if not one[0].startswith("instep_")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The short summary and JUnit say what diverged, not the name of our exception; notes are shown (Hypothesis's)."""
    report = yield
    error, runs = call.excinfo and call.excinfo.value, sys.modules.get("instep.kit.runs")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and runs is not None and isinstance(error, runs.Divergence):
        crash.message = str(error)
        if notes := getattr(error, "__notes__", []):
            report.sections.append(("Notes", "\n".join(notes)))
    return report


class TraceFile(pytest.File):
    """A trace: one item per op set."""

    def collect(self) -> Iterator[TraceItem]:
        # The id of an item may be typed without the options of the run that printed it.
        typed = [rest for word, _, rest in (arg.partition("::") for arg in self.config.args) if rest and self._is(word)]
        for ops in dict.fromkeys((*_served(self.config), *typed)):
            yield TraceItem.from_parent(self, name=ops)

    def _is(self, word: str) -> bool:
        return (self.config.invocation_params.dir / word).resolve() == self.path.resolve()


class TraceItem(pytest.Item):
    """A trace replayed with an op set, with all that its header plans, or with an engine that is led by verbs."""

    @property
    def led(self) -> bool:
        return bool(self.name == _engine(self.config))

    def setup(self) -> None:
        if reason := missing(_given(self.config, "device") or "cpu"):
            pytest.skip(reason)

    def runtest(self) -> None:
        from instep_reference.contract.errors import Unsupported

        from .kit.runs import Replayed
        from .trace.file import read

        trace = read(self.path)
        outcomes, unsupported = [], []
        for part in self._runs(trace):
            try:
                outcomes.append(self._outcome(trace, part))
            except Unsupported as error:
                unsupported.append(str(error))
        for outcome in outcomes:
            self._tell(outcome)
        done = Replayed(outcomes, trace.header.name)
        _keep(self, done, trace)
        if outcomes or not unsupported:
            done.must_agree()
        if unsupported:
            pytest.skip("; ".join(unsupported))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message alone; a stack only when the harness itself failed."""
        from instep_reference.contract.errors import InstepError

        if isinstance(excinfo.value, pytest.fail.Exception):
            return str(excinfo.value)
        if isinstance(excinfo.value, InstepError):
            return f"instep: {' '.join(str(excinfo.value).split())}"
        return super().repr_failure(excinfo, style)

    def _tell(self, outcome: Outcome) -> None:
        """What an engine that is led by verbs was not asked, and what it did not show."""
        if not outcome.led:
            return
        from .report.terminal import not_judged

        served = f"{outcome.plan.setting.name}: served {outcome.served_events} of {outcome.of} events"
        self.user_properties.append((f"instep_served[{outcome.plan.setting.name}]", outcome.served_events))
        self.add_report_section("call", "instep", "\n".join([served, *not_judged(outcome)]))
        missing = [feed for feed, _ in outcome.shown.not_judged() if feed]
        said = f"{outcome.name}: {served}" + f"; it shows no {', '.join(missing)}" * bool(missing)
        self.user_properties.append((SAYS, said))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.path.name}[{self.name}]"

    def _runs(self, trace: Trace) -> Iterable[Part]:
        from .trace.header import Part

        return trace.header.replay if self.name == PLAN else (Part("plain" if self.led else self.name),)

    def _outcome(self, trace: Trace, part: Part) -> Outcome:
        from .kit.runs import replayed
        from .replay.setting import device_here

        named = _typed(self.config, *[] if self.led else ["engine"])
        device_here(named.get("device", "cpu"))
        return replayed(
            trace, part.ops, until=part.until, tiers=_given(self.config, "tiers"), checkpoint=_checkpoint(self.config),
            **{"strategy": part.strategy, "conv": part.conv, **named},
        ).outcomes[0]


def _interpret() -> None:
    """Ask for interpreted kernels on a machine without a GPU."""
    from instep_optimized.ops.interpreter import wanted_without_gpu

    wanted_without_gpu()


def _given(config: pytest.Config, name: str) -> Any:
    """What the command line says, else the ini file."""
    typed = config.getoption(f"instep_{name}")
    return config.getini(f"instep_{name}") if typed is None or typed == [] else typed


def _typed(config: pytest.Config, *without: str) -> dict[str, Any]:
    """The options that all items of a session share, where they are given."""
    found = {name: _given(config, name) for name in ONE_VALUE if name not in without}
    return {name: value for name, value in found.items() if value not in (None, "")}


def _engine(config: pytest.Config) -> str | None:
    """The engine led by verbs that serves; one that an ini file names yields to op sets of the command line."""
    typed = config.getoption(SERVES[1]) and not config.getoption(SERVES[0])
    return None if typed else _given(config, "engine")


def _served(config: pytest.Config) -> list[str]:
    """Who serves every trace: an item each."""
    engine = _engine(config)
    return [engine] if engine else _given(config, "ops") or [PLAN]


def _folders(config: pytest.Config) -> tuple[Path, ...]:
    """Folders, or single traces, that were asked for; those that come with instep, where an op set alone is named."""
    words = _given(config, "traces")
    if not words and config.getoption("instep_ops"):
        from .carried import fixtures

        return (fixtures() / "traces",)
    return tuple((config.invocation_params.dir / word).resolve() for word in words)


def _checkpoint(config: pytest.Config) -> Path | None:
    """A path of the command line is seen from where pytest was called, one of an ini file from there."""
    given: str | None = config.getoption("instep_checkpoint")
    if given is not None:
        return config.invocation_params.dir / given
    written = config.getini("instep_checkpoint")
    return (config.rootpath if config.inipath is None else config.inipath.parent) / written if written else None


def _warn_of_another_root(config: pytest.Config) -> None:
    """Say so when the configuration is not that of the folder in which pytest was called."""
    here, option = config.invocation_params.dir, config.getoption
    if option("rootdir") or option("inifilename") or here.is_relative_to(config.rootpath):
        return
    said = (
        f"the root folder is {config.rootpath}, and its configuration counts, not that of {here}. "
        "Write --instep-traces=PATH with =, or use the ini option instep_traces: "
        "pytest takes a value after a blank for a path to test"
    )
    try:
        config.issue_config_time_warning(pytest.PytestConfigWarning(said), stacklevel=2)
    except pytest.PytestConfigWarning:  # the configuration that counts makes warnings errors
        raise pytest.UsageError(said) from None


def _traces(folder: Path) -> Iterator[Path]:
    return iter((folder,)) if folder.is_file() else folder.rglob(f"*{TRACE}")


def _is_trace(path: Path) -> bool:
    """Whether it begins as a trace does: other plugins have files of this name, too."""
    try:
        with path.open("rb") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and first.keys() >= OPENING


def _below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder)
