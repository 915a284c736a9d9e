"""How far a command is: one bar on stderr, gone when it is done. Nothing is printed where stderr is no terminal.

Leaves out: what is done meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[str, int, int | None], None]  # what is done now, how much of it, of how much (None: nobody knows)


@contextmanager
def progress(first: str) -> Iterator[Advance]:
    """A bar that begins with these words; what it gives takes the rest."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(escape(first), total=None)

        def advance(what: str, done: int, of: int | None) -> None:
            bar.tasks[0].total = of  # `update` takes None for "as before"
            bar.update(task, description=escape(what), completed=done)

        yield advance
