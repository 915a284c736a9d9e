"""The width in which the plain ops compute: at least fp32, fp64 when anything is fp64.

Leaves out: storage dtypes, which `__init__.py` declares.
"""

import torch

from instep_reference.contract.declared_rounding import Storage


def width(*dtypes: Storage) -> torch.dtype:
    """fp32, or fp64 when one of `dtypes` is."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the width in which the plain ops compute with it."""
    return x.to(width(x.dtype))
