"""What a divergence comes from: a known mistake that explains the first findings, and the change that removes them.

Leaves out: finding anything (`instep.checks`), and wrong states that T2d recognises (`checks/hypotheses.py`).
"""

from .bank import explained
from .ladder import locate
from .mistakes.history import Older

__all__ = ["Older", "explained", "locate"]
