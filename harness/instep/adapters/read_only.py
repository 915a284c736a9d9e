"""Around a call of somebody's kernel: what it may only read is the same afterwards, to the bit.

Leaves out: what it may write, which is compared in the engine's own pools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ..observe.digests import bits
from ..observe.exercised import judged


@contextmanager
def only_read(given: Mapping[str, object]) -> Iterator[None]:
    """The tensors among these, by the names under which the kernel knows them, while it is judged."""
    read = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and judged()}
    before = {name: value.clone() for name, value in read.items()}
    yield
    changed = [name for name, value in read.items() if not torch.equal(bits(value), bits(before[name]))]
    if changed:
        raise ValueError(f"the kernel changed {', '.join(changed)}, which it may only read")
