"""Plant source edits in a temporary copy of the packages, and run that copy in a separate process.

The product itself is never changed, and contains no switch that makes it wrong. Leaves out: the faults.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from instep.run.replay import source_digest
from instep_reference.contract.errors import BadInput

from .catalogue.fault import Edit, ExactText, Wrap
from .syntax_edit import replaced, wrapped
from .syntax_search import first_line


class Runs(Protocol):
    """Makes the processes of runs: `forks.Forks`. spent: processor seconds of the runs that have ended."""

    spent: float

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]: ...


PACKAGES = ("instep_reference", "instep_optimized", "instep")  # may have edits; a result has their digests
ENGINE = tuple(f"{package}/" for package in PACKAGES if package != "instep")  # files of an engine begin so
COPIED = (*PACKAGES, "instep_proof")  # runs of faults are in the last one
TIMEOUT_S = 300.0
forks: Runs | None = None  # makes the processes of runs (`forks.warm`); None: each is a new Python


def source(package: str) -> Path:
    """The folder from which a package would be imported, without importing it."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def planted(folder: Path, *edits: Edit | Wrap) -> Path:
    """Make a folder with a copy of the packages and the edits; without edits, the control."""
    for package in COPIED:
        # Compiled files are copied as well: they are valid for sources with the same modification time. Other files of
        # a wheel are not copied.
        shutil.copytree(source(package), folder / package, ignore=shutil.ignore_patterns("fixtures"))
    for edit in edits:
        path = folder / edit.file
        path.write_text(edited(path.read_text(), edit))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()
    return folder


def edited(text: str, edit: Edit | Wrap) -> str:
    """Apply the edit to a text; refuse it unless its old text is in the syntax tree, or in the text, exactly once."""
    if isinstance(edit, ExactText):
        begins = [at for at in range(len(text)) if edit.old and text.startswith(edit.old, at)]
        if len(begins) != 1:
            lines = [str(text.count("\n", 0, at) + 1) for at in begins]
            there = f"{len(lines)} times, in lines {', '.join(lines)}" if lines else "nowhere"
            raise BadInput(f"planting in {edit.file}", found=f"{first_line(edit.old)!r}, which is {there}",
                           expected="a text that is there exactly once",
                           hint="a longer text is there once" if lines else "the source or its layout has changed")
        return text.replace(edit.old, edit.new)
    return wrapped(text, edit) if isinstance(edit, Wrap) else replaced(text, edit.old, edit.new, edit.file)


def digests(folder: Path) -> dict[str, str]:
    """Map each package to the sha256 of its source in that folder, as `served` in a result file."""
    return {package: source_digest(folder / package) for package in PACKAGES}


def run(
    folder: Path, *args: str, cwd: Path | None = None, traceback: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `instep ARGS` with the packages of that folder alone, as a user would. traceback: of any error, on stderr."""
    return run_python(folder, "-c", "from instep.cli import main; main()", *args, cwd=cwd, traceback=traceback)


def run_python(
    folder: Path, *args: str, cwd: Path | None = None, traceback: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` with the packages of that folder first (`-P`: not the working directory)."""
    env = environment() | {"PYTHONPATH": str(folder)} | ({"INSTEP_TRACEBACK": "1"} if traceback else {})
    if forks is not None:
        return forks.run(args, cwd or folder, env, TIMEOUT_S)
    return subprocess.run(
        [sys.executable, "-P", *args], capture_output=True, text=True, check=False, cwd=cwd or folder, env=env,
        timeout=TIMEOUT_S,
    )


def environment() -> dict[str, str]:
    """The environment of a run: the user's, without the variables that configure this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
