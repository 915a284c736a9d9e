"""Explanations of findings, for numbers and for bits.

Leaves out: finding anything (`checks/`), and wrong states that T2d recognises (`checks/hypotheses.py`).
"""

from .bank import explained
from .older import Older

__all__ = ["Older", "explained"]
