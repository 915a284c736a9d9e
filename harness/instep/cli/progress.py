"""A progress bar on stderr, removed when it is done. It is shown only on a terminal.

Leaves out: the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str, int, int | None], None]  # description, done, total (None: unknown)


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
