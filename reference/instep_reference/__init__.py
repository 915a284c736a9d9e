"""The reference: the model, its draft head and a round of speculation, in plain PyTorch, in the dtype of the weights.

Leaves out: speed. The names of the axes, here and in all three packages:

  B   requests                     H   key heads of a GDN layer       K   width of a key head
  T   tokens in a row or window    HV  value heads (HV / H = r)       V   width of a value head
  N   packed rows of an event      C   conv channels, 2HK + HV*V      W   width of the causal conv
  M   rows that need logits        L   tokens in memory               D   width of a hidden row
  E   experts                      I   inner width of an MLP          R   channels of a head that are rotated

"Width" also means the dtype of the computation: fp64 for the truth, or fp32, which `see` may round further. In
`Mirrors:`, transformers (HF) is any version from 5.17 up to 6. The version of the parity table is in
`fixtures/results/parity.json`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import ReferenceEngine
    from .label_ledger import LedgerEngine
    from .weights import Weights

__all__ = ["LedgerEngine", "ReferenceEngine", "Weights"]

_HOMES = {"LedgerEngine": "label_ledger", "ReferenceEngine": "engine", "Weights": "weights"}


def __getattr__(name: str) -> object:
    """Import a public name on first use. Parts of the contract must be readable without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return found
