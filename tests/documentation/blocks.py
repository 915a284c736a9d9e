"""The fenced blocks of the documentation, and a runner that pastes those of one page in order, as a reader would.

The language of a block decides what happens to it, together with a comment on the line before it:

    python   run with Python; `<!-- file: NAME -->` saves it instead
    sh       run with bash; `<!-- exit: 1 -->` names the exit code that is due
    text     the output of the block before it, line by line; `...` matches anything, a line `...` other lines
    others   data (json, toml, ini, yaml): `<!-- file: NAME -->` saves them

`<!-- not run: REASON -->` and `<!-- shown: REASON -->` mark blocks that are read only. Everything runs in a temporary
folder with links to the folders of the repository. Leaves out: commands within a sentence (`test_readme.py`).
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .site import TOP

RUN, DATA = ("python", "sh"), ("json", "toml", "ini", "yaml")
READ_ONLY = ("not run", "shown")
NOTES = ("file", "exit", *READ_ONLY)
FENCE = re.compile(r"^( *)```(\w*)$")
NOTE = re.compile(r"^ *<!-- ([\w ]+): (.+) -->$")
SECONDS = 300  # for one block


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    notes: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(TOP)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and not {"file", *READ_ONLY} & self.notes.keys()


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page, with the notes on the lines directly before it."""
    lines, found, at = page.read_text().splitlines(), list[Block](), 0
    while at < len(lines):
        if (opened := FENCE.match(lines[at])) is None:
            at += 1
            continue
        end = next(n for n in range(at + 1, len(lines)) if lines[n] == f"{opened[1]}```")
        notes, before = dict[str, str](), at - 1
        while before >= 0 and (note := NOTE.match(lines[before])) is not None:
            notes[note[1]] = note[2]
            before -= 1
        text = "\n".join(line.removeprefix(opened[1]) for line in lines[at + 1 : end]) + "\n"
        found.append(Block(page, at + 1, opened[2], text, notes))
        at = end + 1
    return found


def unclear(blocks: Iterable[Block]) -> list[str]:
    """Blocks of which a reader of the page's source cannot say whether they run."""
    wrong, before = list[str](), ""
    for block in blocks:
        read_only = bool({*READ_ONLY} & block.notes.keys())
        if unknown := block.notes.keys() - {*NOTES}:
            wrong.append(f"{block.where}: the notes {sorted(unknown)}, expected {', '.join(NOTES)}")
        if block.language not in (*RUN, *DATA, "text"):
            wrong.append(f"{block.where}: the language {block.language!r}, expected {', '.join((*RUN, 'text', *DATA))}")
        if block.language in DATA and not read_only and "file" not in block.notes:
            wrong.append(f"{block.where}: data that are neither a file nor `shown`")
        if block.language == "text" and not read_only and before not in RUN:
            wrong.append(f"{block.where}: text that no block before it prints, and that is not `shown`")
        before = block.language if block.runs or (block.language == "text" and before in RUN) else ""
    return wrong


def paste(page: Path, folder: Path, commands: Path | None = None) -> list[str]:
    """Run every block of a page that runs, in order; return what differs from the page.

    commands: a folder with the commands `instep` and `python`; None means the installed ones
    """
    for entry in TOP.iterdir():
        if entry.is_dir() and not entry.name.startswith(".") and entry.name != "build":
            (folder / entry.name).symlink_to(entry)
    wrong, printed = list[str](), ""
    for block in blocks_of(page):
        if "file" in block.notes:
            (folder / block.notes["file"]).write_text(block.text)
        elif block.runs:
            done = _run(block, folder, commands or Path(sys.executable).parent)
            printed = done.stdout + done.stderr
            due = int(block.notes.get("exit", "0"))
            if done.returncode != due:
                wrong.append(f"{block.where}: exit code {done.returncode}, expected {due}\n{printed[-3000:]}")
        elif block.language == "text" and not {*READ_ONLY} & block.notes.keys():
            wrong += [f"{block.where}: not printed: {line}\n{printed}" for line in missing(block.text, printed)]
    return wrong


def missing(shown: str, printed: str) -> list[str]:
    """The lines of a page that were not printed, in their order."""
    lines, wrong = iter(printed.splitlines()), list[str]()
    for line in shown.splitlines():
        if line.strip() in ("", "..."):
            continue
        pattern = ".*".join(re.escape(part.rstrip()) for part in line.split("..."))
        if not any(re.fullmatch(pattern + r"\s*", there) for there in lines):
            wrong.append(line)
            lines = iter(printed.splitlines())
    return wrong


def _run(block: Block, folder: Path, commands: Path) -> subprocess.CompletedProcess[str]:
    command = [commands / "python", "-c"] if block.language == "python" else ["bash", "-eo", "pipefail", "-c"]
    path = f"{commands}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    left = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "PYTEST", "INSTEP"))}
    return subprocess.run(
        [*command, block.text], cwd=folder, text=True, capture_output=True, timeout=SECONDS, check=False,
        env={**left, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )
