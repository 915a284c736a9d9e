"""Another process that uses the device, too: it multiplies matrices until it is no longer needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_OTHER = """
import torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
x @ x
torch.cuda.synchronize()
print("begun", flush=True)
while True:
    for _ in range(20):
        x @ x
    torch.cuda.synchronize()
"""


@contextmanager
def beside_another_process() -> Iterator[None]:
    """The device gives slices of time to both: it saves the programs of a kernel that runs, and brings them back.

    A process that waits for each of its launches is rarely interrupted within one.
    """
    with subprocess.Popen([sys.executable, "-c", _OTHER], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline(), "the other process did not begin"
            yield
            assert other.poll() is None, "the other process ended"
        finally:
            other.kill()
