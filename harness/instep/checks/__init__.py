"""Table of contents of the checks: which serve a run that moves labels, and which one of numbers.

Leaves out: relations, which vary a run, and every constant (`allowance.py`).
"""

from __future__ import annotations

from ..observe.oracle import Oracle
from .base import Check
from .bytes import Bytes
from .decisions import Decisions
from .derived import Derived
from .directed import Directed
from .identity import Identity
from .labels import Labels
from .propagated import Propagated

__all__ = ["Check", "for_labels", "for_numbers"]


def for_labels() -> tuple[Check, ...]:
    """The subject moves labels (`ledger`): everything is exact."""
    return (Identity(), Labels(), Bytes())


def for_numbers(oracle: Oracle) -> tuple[Check, ...]:
    """The subject computes. In this order the directed diagnosis of a state comes before its bare size."""
    return (Identity(), Bytes(), Directed(oracle), Derived(oracle), Propagated(), Decisions())
