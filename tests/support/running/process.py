"""The tool in a separate process, for tests that need a real pipe or a real stdout.

Leaves out: the fixture `instep`, which runs a command within the test's process and is much faster.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[3]
ROOTS = os.pathsep.join(str(TOP / root) for root in ("reference", "optimized", "harness", "tests"))
ENVIRONMENT = {"PYTHONPATH": ROOTS, "OMP_NUM_THREADS": "1"}


def start(*words: object, cold: bool = False, **given: Any) -> subprocess.Popen[str]:
    """`instep WORDS`; stdout and stderr are pipes unless something else is given. cold: as a shell starts it."""
    from .forked_python import Popen  # which reads the paths here

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "instep", *map(str, words)]
    how = {**pipes, "env": {**os.environ, **ENVIRONMENT}, **given}
    return (subprocess.Popen if cold else Popen)(command, text=True, **how)
