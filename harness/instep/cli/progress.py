"""A progress bar on stderr, removed when it is done, and a campaign's run that shows one. Only on a terminal.

Leaves out: the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..campaign.runner import Advance, TrialRunner

if TYPE_CHECKING:
    from ..report.result import Result


@contextmanager
def trial_runner(
    first: str, minutes: float | None = None, json: Path | None = None, result: Callable[[], Result] | None = None,
) -> Iterator[TrialRunner]:
    """The run of a campaign, with a bar. result: its result so far, which is written to `json` after every trial."""
    from ..atomic_write import is_replaced

    def keep() -> None:
        if json is not None and result is not None and is_replaced(json):
            result().write(json)

    seconds = None if minutes is None else 60 * minutes
    with progress(first) as advance, TrialRunner(seconds, advance, keep) as run:
        yield run


@contextmanager
def progress(first: str) -> Iterator[Advance]:
    """A bar that starts with these words; the yielded function updates it."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(first), total=None)

        def advance(what: str, done: int, of: int | None) -> None:
            bar.tasks[0].total = of  # `update` takes None for "unchanged"
            bar.update(task, description=escape(what), completed=done)

        yield advance
