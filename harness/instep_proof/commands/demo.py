"""`instep demo`: plant one fault in a copy of the source, and show its message and its page.

Leaves out: all other faults, and whether they are found (`instep faults`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from instep.atomic_write import folder_for, writable
from instep.report.command_lines import near
from instep_reference.contract.errors import BadInput

if TYPE_CHECKING:
    from ..faults.catalogue.fault import Edit, Wrap

FAULT = "stale-tile"
NEXT = (
    ("instep fixtures DIR", "an example: your own kernel in the harness, with tests"),
    ("instep op mine:OPS gdn", "your op on small cases, in seconds"),
    ("instep faults --list", "other faults to plant: instep demo NAME"),
)


def demo(
    fault: Annotated[str, typer.Argument(help="A fault by name; `instep faults --list` has them all.")] = FAULT,
    html: Annotated[Path, typer.Option(help="The page to write.")] = Path("instep-demo.html"),
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="A new folder for the copy: the printed command then "
                                                                  "shows the fault again.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Plant a fault in a copy of the source and show how it is found; exit 0: found, 3: not found."""
    import shlex
    import webbrowser
    from contextlib import nullcontext
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from instep.report.terminal_tables import say

    from ..faults.catalogue import TRACES, by_id
    from ..faults.plant import planted, run

    found = by_id().get(fault)
    if found is None or found.relation is not None:
        raise BadInput("FAULT", found=fault, expected="a fault that a replay shows", hint="`instep faults --list`")
    writable(html)
    if keep is not None:
        folder_for(keep, "--keep")
        if any(keep.iterdir()):
            raise BadInput("--keep", found=f"{keep}, which is not empty", expected="a new folder, or an empty one")
    console = Console()
    say(console, "A copy of the source gets one fault.", f"  {found.what}")
    for edit in found.edits:
        say(console, *_told(edit), style="dim")
    words = ("replay", near(TRACES / f"{found.trace}.jsonl"), *found.how.words())
    say(console, "", f"$ instep {shlex.join(words)}")
    with TemporaryDirectory() if keep is None else nullcontext(keep.absolute()) as folder:
        copy = planted(Path(folder), *found.edits)
        done = run(copy, *words, "--html", str(html.absolute()), cwd=Path.cwd())
        said = done.stdout.replace(f"{copy}/", "")
    if done.returncode not in (0, 1, 3):
        raise RuntimeError(f"the replay ended with {done.returncode}: {done.stderr.strip()}")
    title, _, message = said.rpartition("DIVERGED  ")
    say(console, f"DIVERGED  {message.rstrip()}" if title else said.rstrip(), "")
    for line in _again(shlex.join(("instep", *words)), keep):
        say(console, line)
    say(console, f"The page: {html}", "Then:", *(f"  {line:24} {what}" for line, what in NEXT))
    if open_page:
        webbrowser.open(html.absolute().as_uri())
    raise typer.Exit(0 if done.returncode == 1 and found.says in said else 3)


def _again(command: str, keep: Path | None) -> list[str]:
    """The variables with which the printed command shows the fault again: those of the copy."""
    import shlex

    if keep is None:
        return ["That command agrees here, because the fault was only in the copy, and the copy is gone.",
                "With --keep DIR the copy stays, and the printed command shows the fault again."]  # fmt: skip
    return ["In the copy, this command shows the fault again:",
            f"  PYTHONPATH={shlex.quote(str(keep))} {command}"]  # fmt: skip


def _told(edit: Edit | Wrap) -> list[str]:
    """An edit as a diff: the old lines, the new lines."""
    from ..faults.catalogue.fault import Edit

    if isinstance(edit, Edit):
        gone, come = edit.old, edit.new
    else:
        gone, come = "", "\n".join(filter(None, (f"def {edit.seam}(...):", edit.arguments, edit.result)))
    lines = [f"  - {line}" for line in gone.splitlines()] + [f"  + {line}" for line in come.splitlines()]
    return [f"  {edit.file}", *lines]
