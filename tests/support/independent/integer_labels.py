"""The algebra of labels in plain Python integers, for tests of the ledger ops.

Leaves out: tensors, except to write a finished block down. Written from `instep_reference.contract.label_algebra`.
"""

from functools import reduce
from zlib import crc32

import torch

from instep_reference.contract.label_algebra import MIX_A, MIX_B, MIX_C, MIX_D, SPREAD
from instep_reference.contract.place_names import Place

Tensor = torch.Tensor
WORD = 2**64
BIG = [0xDEADBEEFCAFEBABE, 7, WORD - 1, 0x8000000000000001]  # the top bit set, too


def mixed(*labels: int) -> int:
    """Labels mixed from the left, with unbounded integers and explicit masks."""

    def two(a: int, b: int) -> int:
        x = (a * MIX_A + b * MIX_B + MIX_C) % WORD
        x ^= x >> 29
        x = x * MIX_D % WORD
        return x ^ (x >> 32)

    return reduce(two, labels)


def stamp(component: str, layer: int = 0, family: str = "trunk") -> int:
    return crc32(f"{family}.{layer}.{component}".encode())


def folded(chain: int, k: int, v: int, log_decay: int, beta: int) -> tuple[int, int]:
    """The update of a token after a chain in layer 0, and the chain with the token."""
    update = mixed(chain, k, v, log_decay, beta, stamp("update"))
    return update, mixed(chain, mixed(k, log_decay, update))


def here(component: str) -> Place:
    return Place("trunk", 0, component)


def block(label: int, *shape: int) -> Tensor:
    """The right elements of a block, one Python integer at a time; nothing is all zeros."""
    count = torch.Size(shape).numel()
    numbers = [(label + j * SPREAD) % WORD if label else 0 for j in range(count)]
    return torch.tensor([n - WORD if n >> 63 else n for n in numbers]).view(shape)


def rows(labels: list[int], *shape: int) -> Tensor:
    return torch.stack([block(label, *shape) for label in labels])


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def labels_of(seed: int, count: int) -> list[int]:
    """Different labels that look like nothing."""
    return [mixed(seed, j) for j in range(count)]
