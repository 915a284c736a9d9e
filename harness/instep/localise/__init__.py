"""Locate a divergence: confirm the first finding by running the trace again with one thing changed.

Leaves out: finding it (`checks/`), and what else can be varied (`relations/`).
"""

from .confirm import locate

__all__ = ["locate"]
