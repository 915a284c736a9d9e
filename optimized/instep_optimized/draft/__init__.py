"""The drafters by mode; `contract/drafters.py` lists the model types of each. A new drafter is a line in both tables.

Leaves out: the drafter protocol (`drafter_protocol.py`), and `external`: the event brings its drafts, so nothing runs
here.
"""

from .block import Block
from .drafter_protocol import Make
from .eagle import Eagle
from .vanilla import Vanilla

MODES: dict[str, Make] = {"eagle": Eagle.of, "vanilla": Vanilla.of, "block": Block.of}
