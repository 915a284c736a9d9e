"""Plants source edits in a temporary copy of the three packages, and runs that copy in a process of its own.

Leaves out: which faults there are. The product is never touched, and contains no switch that makes it wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
PACKAGES = ("reference/instep_reference", "optimized/instep_optimized", "harness/instep")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Fault:
    """One edit. `file`: path inside the copy, package first ("instep_optimized/commit/snapshot.py");
    `old`: text that stands there exactly once; `new`: what takes its place."""

    file: str
    old: str
    new: str


def planted(tmp_path: Path, *faults: Fault) -> Path:
    """A folder with a copy of the packages in which the faults stand; without faults, the control."""
    folder = tmp_path / "planted"
    for package in PACKAGES:
        source = TOP / package
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    for fault in faults:
        path = folder / fault.file
        text = path.read_text()
        assert text.count(fault.old) == 1, f"{fault.file}: {fault.old!r} stands there {text.count(fault.old)} times"
        path.write_text(text.replace(fault.old, fault.new))
    return folder


def run(folder: Path, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`instep ARGS` with the packages of that folder alone, as a user would run it."""
    return _run(folder, "-c", "from instep.cli import main; main()", *args, cwd=cwd)


def run_python(folder: Path, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python ARGS` with the packages of that folder first (`-P`: not the working directory)."""
    return _run(folder, *args, cwd=cwd)


def _run(folder: Path, *args: str, cwd: Path | None) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment = kept | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-P", *args], capture_output=True, text=True, check=False, cwd=cwd or folder,
        env=environment, timeout=TIMEOUT_S,
    )
