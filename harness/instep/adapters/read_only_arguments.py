"""Check that a call of a kernel leaves its read-only arguments unchanged, to the bit.

Leaves out: memory that the kernel may write, which is compared in the engine's own pools.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ..watch.digests import bits
from ..watch.kernel_calls import judged


@contextmanager
def only_read(given: Mapping[str, object]) -> Iterator[None]:
    """Compare the tensors among these arguments before and after the call, if the kernel is being judged."""
    read = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and judged()}
    before = {name: value.clone() for name, value in read.items()}
    yield
    changed = [name for name, value in read.items() if not torch.equal(bits(value), bits(before[name]))]
    if changed:
        raise ValueError(f"the kernel changed {', '.join(changed)}, which it may only read")
