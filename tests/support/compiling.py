"""What kernels with explicit layouts take when they are compiled for a GPU, on any machine.

Leaves out: compiling (`compiled.py`), which needs a process in which kernels are not interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Taken:
    """By a kernel: bytes of a thread's stack, where spilled numbers are; bytes of shared memory; copies in its code."""

    kernel: str
    stack: int
    shared: int
    copies: int


def taken(*what: str) -> list[Taken]:
    """what: an argument of `compiled.py`"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = ":".join(sys.path)
    command = [sys.executable, "-m", "support.compiled", *what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return [Taken(one["kernel"], int(one["usage"].split("STACK:")[1].split()[0]), one["shared"], one["copies"])
            for one in told]  # fmt: skip
