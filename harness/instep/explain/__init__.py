"""Why a finding is there: the bank of explanations, for numbers and for bits, and who may say one.

Leaves out: finding anything (`checks/`), and states that follow from a wrong step, which T2d names (`hypotheses.py`).
"""

from .bank import explained
from .older import Older

__all__ = ["Older", "explained"]
