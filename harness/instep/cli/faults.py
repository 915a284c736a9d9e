"""`instep faults`: faults that engines have had, planted one by one; every one must be found, 95% of them located.

Leaves out: planting and judging (`instep.faults`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .finish import Commit, Html, Json, finish, must_be_free
from .setting import Given, takes_setting

if TYPE_CHECKING:
    from rich.console import Console

    from ..faults.base import Fault
    from ..faults.judge import Result


@takes_setting(without=("ops",))
def faults(
    given: Given,
    names: Annotated[list[str] | None, typer.Argument(help="Faults by name; left out: all.")] = None,
    family: Annotated[list[str] | None, typer.Option(help="Only of this family; may be repeated.")] = None,
    ops: Annotated[list[str] | None, typer.Option(help="Only those of this op set; may be repeated.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(
        "--checkpoint", "--model", help="Record the traces anew with this model, as one with experts; "
                                                         "left out: as they come with instep.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes at a time; left out: as many as cores.", min=1)] = None,
    no_text: Annotated[bool, typer.Option("--no-text", help="Leave out what accuracy would see of them.")] = False,
    json: Json = None,
    html: Html = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the matrix of faults and checks there, as SVG.")] = None,
    commit: Commit = None,
    list_only: Annotated[bool, typer.Option("--list", help="Print name, kind and what each does; plant none.")] = False,
) -> None:
    """Plant faults in copies of the source; exit 0: all found, 95% located, 1: not so, 3: a run said nothing."""
    import os
    from dataclasses import replace

    from rich.console import Console

    from ..atomic_write import write_atomically
    from ..faults import render
    from ..faults.matrix import Matrix
    from ..faults.picture import picture_of

    must_be_free((json, html, picture))
    chosen = _chosen(names, family, ops)
    if list_only:
        _list(chosen, Console())
        raise typer.Exit(0)
    _traces_here()
    chosen = [replace(fault, how=replace(fault.how, **given.named)) for fault in chosen]
    result = _run(chosen, jobs or os.cpu_count() or 1, not no_text, checkpoint)
    if picture is not None:
        write_atomically({picture: picture_of(Matrix.of(result)).encode()})
    finish(render.of(result, commit), json, lambda console: render.show(result, console), html=html)


def _chosen(names: list[str] | None, families: list[str] | None, ops: list[str] | None) -> list[Fault]:
    """In the catalogue's order."""
    from instep_reference.contract.errors import BadInput

    from ..faults import FAMILIES, by_id

    known = by_id()
    op_sets = sorted({fault.how.ops for fault in known.values()})
    asked = ("fault", names, known), ("--family", families, FAMILIES), ("--ops", ops, op_sets)
    for option, given, all_known in asked:
        for name in given or ():
            if name not in all_known:
                expected = _near(name, list(all_known)) if option == "fault" else ", ".join(all_known)
                raise BadInput(option, found=name, expected=f"one of {expected}",
                               hint="`instep faults --list` names all" if option == "fault" else "")
    found = [
        fault for family, faults in FAMILIES.items() if not families or family in families for fault in faults
        if (not names or fault.id in names) and (not ops or fault.how.ops in ops)
    ]
    if not found:
        where = {fault.id: f"{fault.id} ({family}, {fault.how.ops})" for family, faults in FAMILIES.items()
                 for fault in faults if fault.id in (names or ())}
        all_of = [", ".join(where.values())] * bool(where)
        all_of += [f"{option} {' '.join(given)}" for option, given in (("--family", families), ("--ops", ops)) if given]
        raise BadInput("faults", found=f"no fault that is all of: {'; '.join(all_of)}", expected="at least one")
    return found


def _traces_here() -> None:
    from instep_reference.contract.errors import BadInput

    from ..faults import TRACES

    if not TRACES.is_dir():
        raise BadInput(str(TRACES), found="no such folder", expected="the traces of the faults, which come with instep")


def _list(chosen: list[Fault], console: Console) -> None:
    """A line for each: its name, its kind, what it does."""
    from ..report.tables import say

    say(console, *(f"{fault.id}  {fault.kind}  {fault.what}" for fault in chosen))


def _near(name: str, known: list[str]) -> str:
    """The names that are most like it; all, where none is."""
    from difflib import get_close_matches

    return ", ".join(get_close_matches(name, known, n=5, cutoff=0.4) or known)


def _run(chosen: list[Fault], jobs: int, text: bool, checkpoint: Path | None) -> Result:
    from tempfile import TemporaryDirectory

    from ..faults import TRACES
    from ..faults.campaign import campaign
    from ..faults.forks import warm
    from ..faults.retrace import retraced
    from .progress import progress

    name, traces = f"{len(chosen)} faults", TRACES
    with TemporaryDirectory(prefix="instep-traces-") as folder, progress(name) as said, warm():
        if checkpoint is not None:
            traces = retraced(TRACES, (fault.trace for fault in chosen), checkpoint, Path(folder))
        return campaign(chosen, traces, jobs=jobs, text=text, progress=lambda ended, of: said(name, ended, of))
