"""Where a divergence was made: the first finding, confirmed by running the trace again with one thing otherwise.

Leaves out: finding it (`checks/`), and what else can be varied (`relations/`).
"""

from .confirm import locate

__all__ = ["locate"]
