"""Check what a kernel returned, at its own call: number of tensors, shapes and dtypes.

Leaves out: the numbers, which are compared with the reference.
"""

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch

Shape = Sequence[int]


class WrongResult(TypeError):
    """The kernel returned a value that its adapter does not expect. code: the kernel's, None if it has none."""

    def __init__(self, kernel: Callable[..., object], text: str) -> None:
        self.code: CodeType | None = getattr(kernel, "__code__", None)
        super().__init__(f"{getattr(kernel, '__name__', type(kernel).__name__)} gave {text}")


def rows_of(kernel: Callable[..., object], found: object, name: str, due: Shape) -> torch.Tensor:
    """Return the rows in the expected shape. Leading axes may be split: [1, M, HV, V] has the rows of [M, HV, V].

    name: the tensor's name in an error
    """
    rows = _tensor(kernel, found, name, due)
    inner = list(due[1:])
    if rows.numel() != torch.Size(due).numel() or list(rows.shape[max(rows.dim() - len(inner), 0):]) != inner:
        raise WrongResult(kernel, f"{name} {list(rows.shape)}, expected {list(due)}")
    return rows.reshape(tuple(due))


def pair_of(kernel: Callable[..., object], found: object, **due: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and the memory that a dense kernel returned. due: name and shape of both."""
    (name, rows), (memory_name, memory) = due.items()
    expected = f"({name} {list(rows)}, {memory_name} {list(memory)})"
    if not isinstance(found, tuple | list) or len(found) != len(due):
        size = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        raise WrongResult(kernel, f"{_spelled(found)}{size}, expected {expected}")
    after = _tensor(kernel, found[1], memory_name, memory)
    if list(after.shape) != list(memory):
        raise WrongResult(kernel, f"{memory_name} {list(after.shape)}, expected {list(memory)}")
    return rows_of(kernel, found[0], name, rows), after


def _tensor(kernel: Callable[..., object], found: object, name: str, due: Shape) -> torch.Tensor:
    if not isinstance(found, torch.Tensor):
        raise WrongResult(kernel, f"{_spelled(found)} for {name}, expected a tensor {list(due)}")
    if not found.is_floating_point():
        dtype = str(found.dtype).removeprefix("torch.")
        raise WrongResult(kernel, f"{name} of {dtype}, expected floating-point numbers")
    return found


def _spelled(found: Any) -> str:
    return "None" if found is None else f"a {type(found).__name__}"
