"""The table of components and movers of this engine, collected from the modules of the movers.

Leaves out: what a mover is (`memory/component_cells.py`).
"""

from collections.abc import Mapping

from .commit.strategy_pair import COMMITS
from .kept_entries_on_device_or_host import OFFLOADS
from .memory import CLEARS
from .memory.budget import BUDGETS
from .memory.component_cells import Mover
from .memory.saved_states import COPIES, FORKS
from .round_for_step_count import IDLES
from .transfer_between_engines import TRANSFERS

# Mover -> component -> the function that handles it. A mover without this component does not touch its memory.
TABLE: Mapping[Mover, Mapping[str, object]] = {
    "copy": COPIES, "clear": CLEARS, "fork": FORKS, "offload": OFFLOADS, "transfer": TRANSFERS, "commit": COMMITS,
    "padding": IDLES, "budget": BUDGETS,
}
