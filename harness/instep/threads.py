"""Set the number of torch's CPU threads: one for small models, for which a second thread makes everything slower.

Leaves out: the command line, which sets the number before torch is loaded (`cli/__init__.py`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 1024  # hidden width; below it a second thread makes the replay of the tiny model 3 to 30 times slower


@contextmanager
def threads_for(hidden: int) -> Iterator[None]:
    """Use one thread for a model with a small hidden width, unless the user has set OMP_NUM_THREADS.

    The previous number is restored, so that pytest sessions and notebooks keep theirs.
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
