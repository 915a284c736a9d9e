"""The drafters by mode; `contract/drafters.py` says which model types have which. A new one is a line in both tables.

Leaves out: what a drafter is (`base.py`), and `external`: its drafts are the event's own, so nothing runs here.
"""

from __future__ import annotations

from .base import Make
from .eagle import Eagle
from .vanilla import Vanilla

MODES: dict[str, Make] = {"eagle": Eagle.of, "vanilla": Vanilla.of}
