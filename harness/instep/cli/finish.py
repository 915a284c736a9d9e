"""How a command that came to a result ends: the file where it is asked for, the terminal, the exit code.

Leaves out: commands that end otherwise (`ending.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.result import Result


def finish(result: Result, json: Path | None, show: Callable[[Console], None]) -> NoReturn:
    """`show` prints the result; its file is written first, so that it is whole whoever reads the terminal."""
    from rich.console import Console

    if json is not None:
        result.write(json)
    show(Console())
    raise typer.Exit(int(result.exit))
