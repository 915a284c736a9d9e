"""How many threads torch uses on a CPU: one where tensors are small, since a second costs more than it brings.

Leaves out: the command line, which says it before torch is loaded (`cli/__init__.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 1024  # hidden width; below it a second thread makes the replay of the tiny model 3 to 30 times slower


@contextmanager
def threads_for(hidden: int) -> Iterator[None]:
    """One thread for a model of this hidden width if it is small; nothing if the user has chosen a number.

    The number from before is put back: pytest sessions and notebooks go on with it.
    """
    if hidden >= SMALL or os.environ.get("OMP_NUM_THREADS"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
