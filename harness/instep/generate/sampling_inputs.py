"""With what every token of a run was drawn: read from its events.

Leaves out: whether the token is the right one (`text_check.py`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from instep_reference.contract.engine import AnyEvent, Commit, Forward
from instep_reference.contract.event_facts import committed_paths
from instep_reference.sampling import Drawing

from ..trace.event_rules import EventRules
from ..trace.header import Header
from ..trace.request_table import RequestTable

Drawn = tuple[Drawing, int]  # the window, and the node whose row chose the token


def drawings(header: Header, events: Iterable[AnyEvent]) -> Mapping[str, Sequence[Drawn]]:
    """Map each request to a drawing for each of its tokens, in order; a request that takes the argmax has none."""
    rules, windows, found = EventRules(header), dict[str, Drawing](), defaultdict[str, list[Drawn]](list)
    for event in events:
        for name, drawn in drawn_at(event, rules.table, windows):
            found[name].append(drawn)
        rules.apply(event)
    return found


def drawn_at(event: AnyEvent, before: RequestTable, windows: dict[str, Drawing]) -> Iterator[tuple[str, Drawn]]:
    """The request and the drawing of each token of an event. windows: those in flight, which are updated."""
    for row in event.rows if isinstance(event, Forward) else ():
        standing = before.live[row.request]
        if not row.uniforms or standing.sampling is None:
            continue
        if row.kind == "verify":
            windows[row.request] = Drawing(standing.sampling, standing.window, standing.parents, row.uniforms)
        else:
            yield row.request, (Drawing.alone(standing.sampling, row.uniforms), 0)
    if isinstance(event, Commit) and event.accepted is not None:
        for name, path in zip(event.requests, committed_paths(event), strict=True):
            window = windows.pop(name, None)
            yield from ((name, (window, node)) for node in (0, *path.nodes) if window is not None)
