"""The pytest plugin: every trace below `--instep-traces` is a test item per op set, and fails with its message.

Leaves out: running it (`instep.rig`). Loads neither torch nor triton nor numpy before an item runs: pytest imports
this file in every session of everybody who has instep installed.

    pytest --instep-traces fixtures/traces --instep-ops plain
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .options import OPTIONS

if TYPE_CHECKING:
    from .rig.rig import Outcome
    from .trace.file import Trace
    from .trace.header import Part

TRACE = ".jsonl"
PLAN = "plan"  # name of the item that runs what the trace's own header plans


class TraceFailed(Exception):
    """What replaying a trace came to, when that is not agreement; its text is all that is shown."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("instep", "traces replayed through a reference and an optimized engine")
    group.addoption(
        "--instep-traces", action="append", default=[], metavar="PATH",
        help="collect every trace (*.jsonl) below this folder, or this one; may be repeated. On the command line "
             "it stands for a path: without other paths, nothing else is collected.",
    )
    group.addoption(
        "--instep-ops", action="append", default=[], metavar="OPS",
        help="op set, engine or module:attribute, an item each; may be repeated. Left out: the trace's own plan.",
    )
    group.addoption("--instep-checkpoint", metavar="DIR", help="the model; left out: where each trace says")
    for name, (kind, says) in OPTIONS.items():
        if name != "ops":
            how: dict[str, Any] = {"action": "store_true", "default": None} if kind is bool else {"metavar": "NAME"}
            group.addoption(f"--instep-{name}", help=says[0].lower() + says[1:].rstrip("."), **how)


def pytest_configure(config: pytest.Config) -> None:
    """Take the folders into the paths that pytest collects."""
    folders = _folders(config)
    for folder in folders:
        if not folder.exists():
            raise pytest.UsageError(f"--instep-traces: {folder} is not there")
        if not any(_traces(folder)):
            raise pytest.UsageError(f"--instep-traces: no trace (*{TRACE}) below {folder}: nothing would be compared")
    named = any(str(word).startswith("--instep-traces") for word in config.invocation_params.args)
    if named and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args.clear()
    config.args.extend(str(folder) for folder in folders)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> TraceFile | None:
    if file_path.suffix != TRACE or not any(_below(file_path, folder) for folder in _folders(parent.config)):
        return None
    return TraceFile.from_parent(parent, path=file_path)


class TraceFile(pytest.File):
    """A trace: one item per op set."""

    def collect(self) -> Iterator[TraceItem]:
        for ops in dict.fromkeys(self.config.getoption("instep_ops")) or (PLAN,):
            yield TraceItem.from_parent(self, name=ops)


class TraceItem(pytest.Item):
    """A trace replayed with an op set, or with all that its header plans."""

    def runtest(self) -> None:
        from .report.data import worst
        from .report.words import divergence
        from .trace.file import read
        from .verdict import Exit

        trace = read(self.path)
        outcomes = [self._outcome(trace, part) for part in self._runs(trace)]
        for outcome in outcomes:
            self.user_properties.append((f"instep_elements[{outcome.plan.setting.ops}]", outcome.verdict.elements))
        diverged = [divergence(outcome) for outcome in outcomes if outcome.verdict.findings]
        if diverged:
            raise TraceFailed("\n".join(diverged))
        if worst(outcomes) is not Exit.AGREED or any(not outcome.verdict.elements for outcome in outcomes):
            raise TraceFailed(f"INCONCLUSIVE  {trace.header.name}: nothing was compared, which is never a pass")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message alone; a stack only when the harness itself failed."""
        from instep_reference.contract.errors import InstepError

        if isinstance(excinfo.value, TraceFailed):
            return str(excinfo.value)
        if isinstance(excinfo.value, InstepError):
            return f"instep: {' '.join(str(excinfo.value).split())}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.path.name}[{self.name}]"

    def _runs(self, trace: Trace) -> Iterable[Part]:
        from .trace.header import Part

        return trace.header.replay if self.name == PLAN else (Part(self.name),)

    def _outcome(self, trace: Trace, part: Part) -> Outcome:
        from .rig.rig import Rig
        from .rig.setting import Setting

        given = self.config.getoption("instep_checkpoint")
        checkpoint = None if given is None else self.config.invocation_params.dir / given
        option = self.config.getoption
        typed = {name: option(f"instep_{name}") for name in OPTIONS if name != "ops"}
        named = {name: value for name, value in typed.items() if value is not None}
        setting = Setting.of(**{"ops": part.ops, "strategy": part.strategy, "conv": part.conv, **named})
        return Rig(trace, setting, checkpoint=checkpoint).run(until=part.until)


def _folders(config: pytest.Config) -> tuple[Path, ...]:
    """Folders, or single traces, that were asked for."""
    return tuple((config.invocation_params.dir / word).resolve() for word in config.getoption("instep_traces"))


def _traces(folder: Path) -> Iterator[Path]:
    return iter((folder,)) if folder.is_file() else folder.rglob(f"*{TRACE}")


def _below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder)
