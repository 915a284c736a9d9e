"""End a command with a result: its options of output files, the files, the printed document, and the exit code.

Leaves out: other ends (`exit_process.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from instep_reference.contract.errors import BadInput

from ..atomic_write import writable, write_atomically
from ..report.document import Document
from ..verdict import Exit
from .subject_options import annotated, with_parameters

if TYPE_CHECKING:
    from ..report.result import Result

# Field of `Files` -> its type and its help text.
OUTPUTS: Mapping[str, tuple[Any, str]] = {
    "json": (Path, "Write the result to this file."),
    "html": (Path, "Write the result to this file as an HTML page."),
    "sarif": (Path, "Write the findings to this file as SARIF, which code hosts show."),
    "annotate": (bool, "Print findings as GitHub annotations; default: in GitHub Actions."),
    "commit": (str, "Revision of the source, for the result file."),
}


@dataclass(frozen=True)
class Files:
    """The requested output of a command.

    annotate  print findings as GitHub annotations; None: in a job of GitHub Actions
    commit    the revision of the source, for the result
    """

    json: Path | None = None
    html: Path | None = None
    sarif: Path | None = None
    annotate: bool | None = False
    commit: str | None = None

    def must_be_free(self, *read: Path, more: Sequence[Path | None] = ()) -> None:
        """Refuse paths that cannot be written, before anything runs. read: the files that the command reads."""
        given = [file for file in (self.json, self.html, self.sarif, *more) if file is not None]
        for file in given:
            writable(file, *read, *(other for other in given if other is not file))

    def finish(
        self, result: Result, document: Document | None = None, *, trace: Path | None = None,
        charts: Callable[[], Mapping[str, Any]] = dict, interrupted: bool = False,
    ) -> NoReturn:
        """Write the files, then print, so that the files are complete even if the terminal's reader has gone.

        document     that of the result; None: made from its data
        interrupted  Ctrl-C ended the command before its last run, so agreement so far is inconclusive
        trace        the trace whose lines are the events of the findings
        charts       further data for the page's charts
        """
        from rich.console import Console

        from ..report.document import document_of
        from ..report.terminal_tables import write

        if interrupted:
            result = replace(result, exit=Exit.worst((Exit(result.exit), Exit.INCONCLUSIVE)),
                             found={**result.found, "interrupted": True})  # fmt: skip
        data = result.data(of_file=self.html is not None)
        if self.json is not None:
            result.write(self.json)
        document = document or document_of(data)
        if self.html is not None:
            from ..report.html.write_page import page_of

            write_atomically({self.html: page_of(data, charts(), document)})
        wanted = os.environ.get("GITHUB_ACTIONS") == "true" if self.annotate is None else self.annotate
        if self.sarif is not None or wanted:
            from ..report.sarif import notices, sarif, workflow_commands

            found = notices(result, trace)
            if self.sarif is not None:
                write_atomically({self.sarif: sarif(found)})
            if wanted:
                print(*workflow_commands(found), sep="\n")
        write(document, Console())
        if interrupted:
            print("interrupted: this is what ran until then")
        raise typer.Exit(int(result.exit))


def writes(*names: str, **says: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options of output; its parameter `files` receives them. says: other help texts"""
    declared = {"annotate": ("--annotate/--no-annotate",)}
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotated(kind, typer.Option(
            *declared.get(name, ()), help=says.get(name, text), show_default=False,
        ))) for name, (kind, text) in OUTPUTS.items() if name in names or name in says
    ]  # fmt: skip
    return with_parameters("files", added, lambda typed: Files(**typed))


def joins_alone(
    others: Sequence[Path], command: str, verb: str, *, with_options: bool, **files: Path | None
) -> None:
    """Refuse `--join` together with options of a run, without a file that takes the others in, or without the others.

    verb: the work of the command without `--join`;  files: option -> the requested file
    """
    if with_options:
        raise BadInput("--join", found="options of a run, too", expected=f"one of them: to join {verb} nothing")
    if not any(files.values()):
        raise BadInput("--join", found=f"no {' or '.join(f'--{option}' for option in files)}",
                       expected="the file that takes the others in")  # fmt: skip
    for path in others:
        if not path.is_file():
            raise BadInput("--join", found=f"no file {path}", expected=f"a file that `instep {command}` wrote")
