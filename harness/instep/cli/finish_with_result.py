"""End a command with a result: write the requested files, print it, return the exit code.

Leaves out: other ends (`exit_process.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..report.result import Result

Json = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
Commit = Annotated[str | None, typer.Option(help="Revision of the source, for the result file.")]
Html = Annotated[Path | None, typer.Option(help="Write the result to this file as an HTML page.")]
Sarif = Annotated[Path | None, typer.Option(help="Write the findings to this file as SARIF, which code hosts show.")]
Annotate = Annotated[bool | None, typer.Option(
    "--annotate/--no-annotate", show_default=False,
    help="Print findings as GitHub annotations; default: in GitHub Actions.")]


def must_be_free(files: Sequence[Path | None], *read: Path) -> None:
    """Refuse paths that cannot be written, before anything runs. read: the files that the command reads."""
    from ..atomic_write import writable

    given = [file for file in files if file is not None]
    for file in given:
        writable(file, *read, *(other for other in given if other is not file))


def joins_alone(
    others: Sequence[Path], command: str, verb: str, *, with_options: bool, **files: Path | None
) -> None:
    """Refuse `--join` together with options of a run, without a file that takes the others in, or without the others.

    verb: the work of the command without `--join`;  files: option -> the requested file
    """
    from instep_reference.contract.errors import BadInput

    if with_options:
        raise BadInput("--join", found="options of a run, too", expected=f"one of them: to join {verb} nothing")
    if not any(files.values()):
        raise BadInput("--join", found=f"no {' or '.join(f'--{option}' for option in files)}",
                       expected="the file that takes the others in")  # fmt: skip
    for path in others:
        if not path.is_file():
            raise BadInput("--join", found=f"no file {path}", expected=f"a file that `instep {command}` wrote")


def finish(
    result: Result, json: Path | None, show: Callable[[Console], None] | None = None, *, sarif: Path | None = None,
    annotate: bool | None = False, trace: Path | None = None, html: Path | None = None,
    charts: Callable[[], Mapping[str, Any]] = dict, interrupted: bool = False,
) -> NoReturn:
    """Write the files, then print, so that the files are complete even if the terminal's reader has gone.

    show      prints the result; None: print its document
    interrupted  Ctrl-C ended the command before its last run, so agreement so far is inconclusive
    annotate  None: in a job of GitHub Actions
    trace     the trace whose lines are the events of the findings
    charts    further data for the page's charts
    """
    from rich.console import Console

    from ..verdict import Exit

    if interrupted:
        result = replace(result, exit=Exit.worst((Exit(result.exit), Exit.INCONCLUSIVE)),
                         found={**result.found, "interrupted": True})  # fmt: skip
    if json is not None:
        result.write(json)
    if html is not None:
        from ..atomic_write import write_atomically
        from ..report.html.replay import printed
        from ..report.html.write_page import page_of

        write_atomically({html: page_of(result.data(), charts(), "" if show is None else printed(show))})
    wanted = os.environ.get("GITHUB_ACTIONS") == "true" if annotate is None else annotate
    if sarif is not None or wanted:
        from ..atomic_write import write_atomically
        from ..report.sarif import notices, workflow_commands
        from ..report.sarif import sarif as as_sarif

        found = notices(result, trace)
        if sarif is not None:
            write_atomically({sarif: as_sarif(found)})
        if wanted:
            print(*workflow_commands(found), sep="\n")
    if show is None:
        from ..report.document_choice import document_of
        from ..report.terminal_tables import write

        write(document_of(result.data()), Console())
    else:
        show(Console())
    if interrupted:
        print("interrupted: this is what ran until then")
    raise typer.Exit(int(result.exit))
