"""Another process that takes turns with this one on the device: it multiplies matrices until it is no longer needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_OTHER = """
import torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
    print("turn", flush=True)
"""


@contextmanager
def taken_in_turns() -> Iterator[None]:
    """What runs for some milliseconds here is interrupted: the device saves its programs, and brings them back."""
    with subprocess.Popen([sys.executable, "-c", _OTHER], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            yield
        finally:
            other.kill()
