"""With what every token of a run was drawn: read from its events.

Leaves out: whether the token is the right one (`reread.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from instep_reference.contract.engine import AnyEvent, Commit, Forward
from instep_reference.sampling import Drawing

from ..trace.event_rules import EventRules
from ..trace.header import Header

Drawn = tuple[Drawing, int]  # the window, and the node whose row chose the token


def drawings(header: Header, events: Iterable[AnyEvent]) -> Mapping[str, Sequence[Drawn]]:
    """Request -> a drawing for each token that it said, in order; a request that takes the argmax has none."""
    rules, windows = EventRules(header), dict[str, Drawing]()
    found = defaultdict[str, list[Drawn]](list)
    for event in events:
        if isinstance(event, Forward):
            for row in event.rows:
                standing = rules.table.live[row.request]
                if not row.uniforms or standing.sampling is None:
                    continue
                if row.kind == "verify":
                    windows[row.request] = Drawing(standing.sampling, standing.window, standing.parents, row.uniforms)
                else:
                    found[row.request].append((Drawing.alone(standing.sampling, row.uniforms), 0))
        elif isinstance(event, Commit) and event.accepted is not None:
            for name, path in zip(event.requests, event.accepted, strict=True):
                if name in windows:
                    window = windows.pop(name)
                    found[name] += [(window, node) for node in (0, *path.nodes)]
        rules.apply(event)
    return found
