"""Digests of memory, computed on its device: one int64 per block of a unit, from every byte and its position.

A word is mixed over all bits before and after it is weighed, so that the digest shows both words that change places and
changes that cancel in a plain sum. Leaves out: which memory is digested, and the meaning of a change
(`memory_changes.py`).
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

# Integers of the same width: a view that works for any strides of the pool.
INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 23}  # words at a time: scratch that fits a cache, or few launches
SMALL = 1 << 17  # words of memory that is digested together with other memory
SPREAD = 29  # high bits that are folded down before a word is weighed, because a product carries upwards only
FOLD = 32  # bits of the high half that is folded down before the sum


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View memory as integers of the same width, so that equality is equality of bytes."""
    return tensor.view(INTEGER_OF_WIDTH[tensor.element_size()])


def words(units: torch.Tensor, blocks: int = 1) -> torch.Tensor:
    """View [units, ...] as [units, blocks, n] integers in physical order, of the widest possible type.

    blocks: number of equal pieces of a unit along its first inner axis. A unit with gaps has no such view and is
    copied.
    """
    shape, itemsize = units.shape, units.element_size()
    inner = units[0].numel()
    if not _dense(units) or (blocks > 1 and units.stride(1) * shape[1] != inner):
        units = units.contiguous()
    lines = units.as_strided((shape[0], blocks, inner // blocks), (units.stride(0), inner // blocks, 1))
    for width in (8, 4, 2, 1):
        sizes = (inner // blocks * itemsize, units.stride(0) * itemsize, units.storage_offset() * itemsize)
        if all(size % width == 0 for size in sizes):
            return lines.view(INTEGER_OF_WIDTH[width])
    raise AssertionError("every size is a multiple of one byte")


def digests(lines: torch.Tensor) -> torch.Tensor:
    """Digest [units, blocks, n] integers to [units, blocks] int64 on the same device, without waiting.

    Every change of a single word changes the digest: all steps except the sum are invertible.
    """
    weights = _weights(lines.shape[2], lines.device)
    step = max(1, AT_ONCE[lines.device.type] // max(1, lines[0].numel()))
    if len(lines) <= step:
        return _digests(lines, weights)
    return torch.cat([_digests(lines[begin : begin + step], weights) for begin in range(0, len(lines), step)])


def together(many: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`digests` of several tensors on one device; small ones are joined to save launches."""
    small = [number for number, lines in enumerate(many) if 0 < lines.numel() <= SMALL]
    found = dict(zip(small, _in_one_line([many[number] for number in small]), strict=True)) if small else {}
    return [found[number] if number in found else digests(lines) for number, lines in enumerate(many)]


def _in_one_line(many: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Compute each block's sum as a difference of prefix sums: integers wrap around, and stay exact."""
    shapes = [(lines.shape[0], lines.shape[1], lines.shape[2]) for lines in many]
    weights, ends = _layout(tuple(shapes), many[0].device)
    sums = _mixed(torch.cat([lines.reshape(-1) for lines in many]), weights).cumsum(0)[ends]
    sums[1:] -= sums[:-1].clone()
    parts = torch.split(sums, [units * blocks for units, blocks, _ in shapes])
    return [part.view(shape[:2]) for part, shape in zip(parts, shapes, strict=True)]


@lru_cache(maxsize=4)
def _layout(shapes: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For lines of these shapes in a row: the weight of every word, and the last word of every block."""
    weights = torch.cat([_weights(words, device).repeat(units * blocks) for units, blocks, words in shapes])
    sizes = torch.cat([torch.full((units * blocks,), words) for units, blocks, words in shapes])
    return weights, (sizes.cumsum(0) - 1).to(device)


def _digests(lines: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return _mixed(lines, weights).sum(-1)


def _mixed(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    words = words.to(torch.int64)
    mixed = _shifted(words, SPREAD)
    mixed ^= words
    mixed *= weights
    mixed ^= _shifted(mixed, FOLD)
    return mixed


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right with zeros; an arithmetic shift would map x and its complement together."""
    shifted = numbers >> by
    shifted &= (1 << (64 - by)) - 1
    return shifted


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """[count] odd numbers without a pattern: an odd factor loses no bit."""
    generator = torch.Generator().manual_seed(count)
    sampled = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return (sampled * 2 + 1).to(device)


def _dense(units: torch.Tensor) -> bool:
    """Whether each unit is one piece of memory without gaps, in any order of its axes."""
    reached = 1
    for step, size in sorted((step, size) for step, size in zip(units.stride()[1:], units.shape[1:], strict=True)):
        if size > 1 and step != reached:
            return False
        reached *= size
    return True
