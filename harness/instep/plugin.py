"""The pytest plugin: each trace in `--instep-traces` is a test item per op set, and fails with its message.

    pytest --instep-traces=fixtures/traces --instep-ops=plain

Write options with `=`. pytest determines the root folder and its configuration before it knows the options of a plugin,
and takes a value after a blank for a path to test. Every option is also an ini option (`instep_traces`), with
underlines instead of hyphens (`--instep-state-dtype`, `instep_state_dtype`).
Leaves out: running a trace (`instep.run`). Loads torch, triton and numpy only if a trace is collected or a test
mentions instep: pytest imports this file in every session on a machine that has instep.
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

from instep_reference.contract.errors import BadInput, InstepError, Unsupported

from .bundled import fixtures
from .options import OPTIONS, tiers_named

if TYPE_CHECKING:
    from .kit.replayed_trace import Replayed
    from .run.replay import Outcome
    from .trace.file import Trace
    from .trace.header import Part

TRACE = ".jsonl"
PLAN = "plan"  # name of the item that runs the setting from the trace's header
ONE_VALUE = {name: option for name, option in OPTIONS.items() if name != "ops"}  # that all items share
SERVES = ("instep_engine", "instep_ops")  # the command line, or else the ini file, gives one of them
SAYS = "instep_says"  # property of a report: a line of the summary
ARTIFACTS = "instep_artifacts"  # property of a report: the folder of its page, result, trace and tensors
OPENING = {"schema", "checkpoint", "capacity"}  # fields of every trace's first line


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("instep", "replay traces through a reference and an optimized engine (--option=VALUE)")
    for name, metavar, said in (
        ("traces", "PATH", "collect this trace, or every trace (*.jsonl) in this folder; may be repeated. On the "
                           "command line it counts as a path: without other paths, pytest collects nothing else. In "
                           "an ini file it is a list, which is used if the command line names no path."),
        ("ops", "OPS", "op set, engine or module:attribute; each is a test item; may be repeated. Default: the plan "
                       "in the trace. Without --instep-traces, the traces that come with instep are used."),
        ("tiers", "TIERS", "compare only these tiers, from T0,T1,T2,T2d,T3,T4; may be repeated. Default: all."),
    ):  # fmt: skip
        group.addoption(f"--instep-{name}", action="append", default=[], metavar=metavar, help=said)
    said = "the model; default: the one that each trace names"
    group.addoption("--instep-checkpoint", metavar="DIR", help=said)
    parser.addini("instep_checkpoint", said, default="")
    for name, (kind, says) in ONE_VALUE.items():
        said = says[0].lower() + says[1:].rstrip(".")
        how: dict[str, Any] = {"action": BooleanOptionalAction} if kind is bool else {"metavar": "NAME"}
        group.addoption(f"--instep-{name.replace('_', '-')}", help=said, **how)
        stored: Literal["bool", "string"] = "bool" if kind is bool else "string"
        parser.addini(f"instep_{name}", said, type=stored, default=None)
    group.addoption("--instep-out", metavar="DIR", help="write a folder for each failure: page, result, trace, tensors")
    parser.addini("instep_traces", "traces, or folders of traces, relative to the ini file", type="paths", default=[])
    parser.addini("instep_ops", "op sets, engines or module:attribute; each is a test item", type="args", default=[])
    parser.addini("instep_tiers", "the tiers that are compared; default: all", type="args", default=[])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how much was compared, what engines with verbs do not show, and which tiers were left out."""
    reports = [
        report for kind, found in terminalreporter.stats.items() if kind != "rerun"
        for report in found if getattr(report, "when", "") == "call"
    ]
    told = [(str(name), str(value)) for report in reports for name, value in report.user_properties]
    mine = [(name, value) for name, value in told if name.startswith("instep_")]
    for one, other in (SERVES, SERVES[::-1]):
        if mine and config.getoption(one) and config.getini(other):
            terminalreporter.write_line(f"instep: --{one.replace('_', '-')} overrides {other} of the ini file")
    for said in [value for name, value in mine if name == SAYS] + _sum(mine):
        terminalreporter.write_line(f"instep: {said}")
    if words := _given(config, "tiers"):
        terminalreporter.write_line(f"instep: compared only {','.join(words)}, because of --instep-tiers")


def _sum(told: list[tuple[str, str]]) -> list[str]:
    """Sum up the runs of the session from the properties of their reports, which workers of xdist send, too."""
    by_name = {short: [value for name, value in told if name.partition("[")[0] == f"instep_{short}"]
               for short in ("verdict", "elements", "used", "artifacts")}  # fmt: skip
    if not by_name["verdict"]:
        return []
    from .report.outcome_data import largest

    verdicts = [f"{by_name['verdict'].count(word)} {word}" for word in dict.fromkeys(sorted(by_name["verdict"]))]
    used = largest(map(float, by_name["used"]))
    line = f"{', '.join(verdicts)}: {sum(map(int, by_name['elements'])):,} numbers compared"
    line += "" if used is None else (
        f", at most {used:.3g} of an allowance used" if isfinite(used) else ", in one place beyond every allowance")
    return [line, *(f"{folder}/page.html" for folder in by_name["artifacts"])]


@pytest.fixture
def instep_replayed(request: pytest.FixtureRequest) -> Any:
    """`kit.replayed` with the options of the session. Its figures go to JUnit, and divergences to `--instep-out`."""

    def run(what: Any, subject: Any = "plain", **setting: Any) -> Any:
        from .kit.replayed_trace import replayed

        typed = {"tiers": _given(request.config, "tiers"), **_typed(request.config, "engine")}
        if not hasattr(what, "checkpoint"):  # a workload has its own model
            typed["checkpoint"] = _checkpoint(request.config)
        done = replayed(what, subject, **{**typed, **setting})
        _keep(request.node, done, what)
        return done

    return run


def _keep(item: pytest.Item, done: Replayed, what: Any) -> None:
    """Add the properties of every run to the item, and write the folder of a divergence if `--instep-out` is given."""
    from .report.html.failure_folder import folder_of, properties, write
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
    """Add the folders of traces to the paths that pytest collects."""
    config.addinivalue_line("markers", "instep: a replayed trace; -m 'not instep' leaves all of them out")
    if words := _given(config, "tiers"):
        _must_be_tiers(words)
    for ask, engine, ops in ((config.getoption, "--instep-engine", "--instep-ops"), (config.getini, *SERVES)):
        if all(map(ask, SERVES)):
            raise pytest.UsageError(f"{engine}: found {ops} as well, expected only one of them")
    folders = _folders(config)
    for folder in folders:
        if not folder.exists():
            raise pytest.UsageError(f"--instep-traces: {folder} does not exist")
        if not any(_traces(folder)):
            raise pytest.UsageError(f"--instep-traces: {folder} has no trace (*{TRACE})")
    if not folders:
        return
    _interpret()
    _warn_of_another_root(config)
    asking = ("--instep-traces",) if _given(config, "traces") else ("--instep-ops",)
    typed = any(str(word).startswith(asking) for word in config.invocation_params.args)
    paths = config.args_source is pytest.Config.ArgsSource.ARGS
    if any(arg.partition("::")[0].endswith(TRACE) for arg in config.args) or (paths and not typed):
        return  # the command line names what to run
    if typed and not paths:
        config.args.clear()
    config.args.extend(str(folder) for folder in folders)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Switch Triton's interpreter on before pytest imports a test that uses instep and may import Triton first."""
    if b"instep" in module_path.read_bytes():
        _interpret()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> TraceFile | None:
    """Collect a trace in one of the folders, or one that the command line names."""
    if file_path.suffix != TRACE:
        return None
    named = parent.session.isinitpath(file_path) and _is_trace(file_path)
    if not named and not any(_below(file_path, folder) for folder in _folders(parent.config)):
        return None
    # pytest names a file outside its root folder by its last part alone, and then does not find it by that name.
    root = parent.config.rootpath
    outside: dict[str, Any] = {} if file_path.is_relative_to(root) else {"nodeid": relpath(file_path, root)}
    return TraceFile.from_parent(parent, path=file_path, **outside)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Check the options early in the process that distributes items. A usage error in a worker would be a crash."""
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
    """Mark the traces, and refuse a wrong setting before anything runs."""
    mine = [item for item in items if isinstance(item, TraceItem)]
    for item in mine:
        item.add_marker("instep")
    _look(config, [item.name for item in mine])


def _look(config: pytest.Config, named: list[str]) -> None:
    if named:
        _must_be_there(named, _engine(config), _typed(config, "engine"), _checkpoint(config))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remove the properties of an earlier run if a test is run again."""
    item.user_properties[:] = [one for one in item.user_properties if not one[0].startswith("instep_")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Print the divergence instead of our exception's name in the summary and in JUnit, and the notes of Hypothesis."""
    report = yield
    error, runs = call.excinfo and call.excinfo.value, sys.modules.get("instep.kit.replayed_trace")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and runs is not None and isinstance(error, runs.Divergence):
        crash.message = str(error)
        if notes := getattr(error, "__notes__", []):
            report.sections.append(("Notes", "\n".join(notes)))
    return report


class TraceFile(pytest.File):
    """A trace, with one item per op set."""

    def collect(self) -> Iterator[TraceItem]:
        # A user may type the id of an item without the options of the run that printed it.
        typed = [rest for word, _, rest in (arg.partition("::") for arg in self.config.args) if rest and self._is(word)]
        for ops in dict.fromkeys((*_served(self.config), *typed)):
            yield TraceItem.from_parent(self, name=ops)

    def _is(self, word: str) -> bool:
        return (self.config.invocation_params.dir / word).resolve() == self.path.resolve()


class TraceItem(pytest.Item):
    """A trace replayed with an op set, with the plan in its header, or with an engine that has verbs."""

    @property
    def led(self) -> bool:
        return bool(self.name == _engine(self.config))

    def setup(self) -> None:
        if reason := _missing(_given(self.config, "device") or "cpu"):
            pytest.skip(reason)

    def runtest(self) -> None:
        from .kit.replayed_trace import Replayed
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
        """Print only the message; print a stack if the harness itself failed."""
        if isinstance(excinfo.value, pytest.fail.Exception):
            return str(excinfo.value)
        if isinstance(excinfo.value, InstepError):
            return f"instep: {' '.join(str(excinfo.value).split())}"
        return super().repr_failure(excinfo, style)

    def _tell(self, outcome: Outcome) -> None:
        """Report events that an engine with verbs did not serve, and results that it did not show."""
        if not outcome.led:
            return
        from .report.outcome_data import not_judged

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
        from .kit.replayed_trace import replayed
        from .setting import device_here

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
    """The value from the command line, or else from the ini file."""
    typed = config.getoption(f"instep_{name}")
    return config.getini(f"instep_{name}") if typed is None or typed == [] else typed


def _typed(config: pytest.Config, *without: str) -> dict[str, Any]:
    """The given options that all items of a session share."""
    found = {name: _given(config, name) for name in ONE_VALUE if name not in without}
    return {name: int(value) if ONE_VALUE[name][0] is int and str(value).isdecimal() else value
            for name, value in found.items() if value not in (None, "")}  # fmt: skip


def _engine(config: pytest.Config) -> str | None:
    """The engine with verbs, if there is one. Op sets of the command line override an engine of the ini file."""
    typed = config.getoption(SERVES[1]) and not config.getoption(SERVES[0])
    return None if typed else _given(config, "engine")


def _served(config: pytest.Config) -> list[str]:
    """The op sets or the engine that serve every trace; each is an item."""
    engine = _engine(config)
    return [engine] if engine else _given(config, "ops") or [PLAN]


def _folders(config: pytest.Config) -> tuple[Path, ...]:
    """The requested folders and traces; if only an op set is named, the traces that come with instep."""
    words = _given(config, "traces")
    if not words and config.getoption("instep_ops"):
        return (fixtures() / "traces",)
    return tuple((config.invocation_params.dir / word).resolve() for word in words)


def _checkpoint(config: pytest.Config) -> Path | None:
    """The model. A path on the command line is relative to the current directory, one in an ini file to that file."""
    given: str | None = config.getoption("instep_checkpoint")
    if given is not None:
        return config.invocation_params.dir / given
    written = config.getini("instep_checkpoint")
    return (config.rootpath if config.inipath is None else config.inipath.parent) / written if written else None


def _warn_of_another_root(config: pytest.Config) -> None:
    """Warn if pytest uses the configuration of another folder than the current one."""
    here, option = config.invocation_params.dir, config.getoption
    if option("rootdir") or option("inifilename") or here.is_relative_to(config.rootpath):
        return
    said = (
        f"pytest uses the configuration of the root folder {config.rootpath}, not of {here}. "
        "Write --instep-traces=PATH with =, or use the ini option instep_traces: "
        "pytest takes a value after a blank for a path to test"
    )
    try:
        config.issue_config_time_warning(pytest.PytestConfigWarning(said), stacklevel=2)
    except pytest.PytestConfigWarning:  # that configuration turns warnings into errors
        raise pytest.UsageError(said) from None


def _traces(folder: Path) -> Iterator[Path]:
    return iter((folder,)) if folder.is_file() else folder.rglob(f"*{TRACE}")


def _is_trace(path: Path) -> bool:
    """Whether the first line is that of a trace. Other plugins use this file name extension, too."""
    try:
        with path.open("rb") as lines:
            first = json.loads(lines.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and first.keys() >= OPENING


def _below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder)


def _must_be_there(named: Iterable[str], engine: str | None, typed: dict[str, Any], checkpoint: Path | None) -> None:
    """Raise one usage error for an unknown op set, setting or model, before anything runs.

    named: names of the op sets and engines, as in test items
    engine: the one of them that is driven through callbacks
    typed: the setting that all items share
    """
    from instep_optimized.ops.interpreter import wanted_on
    from instep_reference.contract.checkpoint import OnDisk

    from .adapters import find
    from .setting import Setting
    from .subject.engines.verbs import find as find_engine

    wanted_on(typed.get("device", "cpu"))  # as the command does, before a module of the user imports Triton
    option = "ops"
    try:
        for name in dict.fromkeys(named):
            given, option = dict(typed), "engine" if name == engine else "ops"
            if name == PLAN:  # the strategies of its op sets are not known yet
                given = {field: value for field, value in typed.items() if field not in ("strategy", "conv")}
            else:
                (find_engine if name == engine else find)(name)
                given[option] = name
            if not _missing(given.get("device", "cpu")):
                Setting.of(**given)
        option = "checkpoint"
        if checkpoint is not None:
            OnDisk.open(checkpoint)
    except InstepError as error:
        said = " ".join(str(error).split())
        said = f"--instep-{said.removeprefix('--')}" if said.startswith("--") else f"--instep-{option}: {said}"
        raise pytest.UsageError(said) from None


def _must_be_tiers(words: list[str]) -> None:
    try:
        tiers_named(words)
    except BadInput as error:
        raise pytest.UsageError(f"--instep-tiers: found {error.found}, expected {error.expected}") from None


def _missing(device: str) -> str:
    """Why this machine lacks the device; empty if it is there, or if the name is no device."""
    import torch

    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        return ""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "" if int(number or 0) < there else f"this machine has no CUDA device {number or 0}: it has {there}"
