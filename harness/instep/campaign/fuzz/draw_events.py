"""Draws the capacity of a run, and one event at a time, with sizes around the edges at which engines fail.

Every choice is drawn: picks, roots, accepted paths and bonuses. Leaves out: legality. The event rules say which
requests an event may name, and they check the drawn event. So no rule is written a second time here.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any, Protocol, TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace as with_fields

from instep_optimized.options import LATE, RINGS
from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import Dialect
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.event_facts import FACTS, inner_multiples, kind_of
from instep_reference.contract.sampling import Sampling

from ...adapters.strategy_by_name import OPTIONS
from ...options import INT8
from ...setting import Setting
from ...trace.event_rules import EventRules, uniforms_due
from ...trace.header import Receiver, Room
from ...trace.request_table import Standing

T = TypeVar("T")

STEPS = (1, 3, 2, 7, 4)  # candidate step counts; a failing run shrinks to the first ones
# Storage of states in tracked prefixes, and the dtype in which chunks leave them; a failing run shrinks to the first.
NARROW: Mapping[str, tuple[str | None, ...]] = {"kept_dtype": (None, INT8), "chunk_dtype": (None, "bfloat16")}
RING = "ring_dtype"
SAMPLED = (*OPTIONS, *NARROW, RING)  # strategy and conv; the drafter depends on the model, so it is not drawn
CHAINS = ("widened",)  # conv forms that serve chains alone
# The numbers of a controller, short, so that its wishes change within a run.
HASTY = {"ema_alpha": 0.5, "warmup_batches": 1, "update_interval": 2}
DIALECTS: tuple[Dialect, ...] = ("sglang-0.5.12", "sglang-0.5.14", "sglang-0.5.13", "vllm-table")
KEYS = (1, 2, 3, 4)  # batch sizes from which another slot, or entry of a table, may begin
CAPTURED = ((), (1, 4), (2, 3), (2,))  # batch sizes of decode graphs
TOPKS = (None, 2, 3, 1)  # children per node, where the drafter grows trees
SLOTS = (2, 4)  # fewest and most slots
SPREAD = 2  # slots are drawn from this many times as many, so that they are sparse
PAGE_SIZES = (4, 16, SMALLEST := 3)
TOKENS, MANY_TOKENS = 96, 512  # of one forward: above the chunk of 64 of the prefill kernels; with long prompts
ROOMY, TIGHT = 72, 24  # tokens per slot: enough for every event; so few that pages run out
LONG = (63, 64, 65)  # around the chunk of the prefill kernels; rare, as they are slow
# How requests sample; a failing run shrinks to the first ones. Most take the argmax.
SAMPLINGS = (None, None, None, Sampling(1.0), Sampling(2.0, top_k=2), Sampling(1.5, top_p=0.9), Sampling(2.0, 50, 0.8))
INTERVALS = (None, 4, 3)  # at which prefixes are tracked
TRACKED = 2  # of which this many fit on the device, if pages are few
MOST_PREFIXES = 8  # that are kept at a time: each is a copy
UNIFORMS = 1 << 12  # coarse steps, because a uniform close to 1 depends on the rounding of the last small weights
STRIDES = (1, 3, 5)  # difference of neighbouring tokens: so few drawn numbers make a long prompt


class Draw(Protocol):
    """`data.draw` of Hypothesis."""

    def __call__(self, strategy: SearchStrategy[T], /) -> T: ...


def room(draw: Draw, long: int = 0) -> Room:
    """A capacity: slots and pages in order, from the top, or permuted and sparse; enough pages, or too few.

    Pages of SMALLEST tokens, at which most windows end, are given back by commits, and there some commits have caps.
    long: tokens of long requests, for which there are further pages
    """
    count = draw(st.integers(*SLOTS))
    size = draw(st.sampled_from(PAGE_SIZES))
    each = draw(st.sampled_from((ROOMY, TIGHT)))
    pages = -(-(count * each + long) // size)
    slots, order = _order(draw, count, count * SPREAD), _order(draw, pages, pages)
    return Room(slots, order, size, MANY_TOKENS if long else TOKENS, trim=size == SMALLEST)


def candidates(draw: Draw, most: int | None = None) -> tuple[int, ...]:
    """Two or three step counts, none above `most`; the first one is in force at first."""
    steps = [count for count in STEPS if most is None or count <= most]
    return tuple(draw(st.lists(st.sampled_from(steps), min_size=min(2, len(steps)), max_size=3, unique=True)))


def controller(draw: Draw, steps: Sequence[int], *, dialects: Sequence[Dialect] = DIALECTS) -> dict[str, Any]:
    """The fields of a policy about its controller: a dialect, its file or table by batch size, and the lag.

    steps: the counts that may occur, the first one in force at first
    """
    dialect = draw(st.sampled_from(dialects))
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
    if dialect == "sglang-0.5.12":
        brackets = {str(key): {"candidate_steps": sorted(steps), **HASTY} for key in keys}
        return {"adaptive": brackets if len(keys) > 1 else {"candidate_steps": sorted(steps), **HASTY}}
    lag, counts = draw(st.integers(0, 1)), (*steps, 0)
    if dialect == "vllm-table":
        first, *others = sorted({1, *keys})
        drafts = draw(st.lists(st.sampled_from(counts), min_size=len(others), max_size=len(others)))
        table = tuple((key, key, count) for key, count in zip((first, *others), (steps[0], *drafts), strict=True))
        return {"lag": lag, "controller": Controlled(dialect, table=table, num_speculative_tokens=max(steps))}
    counts = counts if dialect == "sglang-0.5.14" else tuple(steps)
    slots: dict[str, Any] = {
        str(key): {
            "candidate_steps": draw(st.lists(st.sampled_from(counts), min_size=1, max_size=3)),
            "ceiling_coeff": draw(st.sampled_from((0, 1.0))),
            "down_hysteresis": draw(st.sampled_from((0, -0.25))),
        }
        for key in keys
    }
    slots[str(keys[0])]["candidate_steps"].append(steps[0])  # the initial count is in some slot
    captured = draw(st.sampled_from(CAPTURED))
    return {"lag": lag, "controller": Controlled(dialect, captured, file={**HASTY, **slots})}


def with_trees(draw: Draw, room: Room, steps: Sequence[int], nodes: int, *, grow: bool) -> tuple[Room, tuple[int, ...]]:
    """A capacity with room for tree windows, and the one step count of its run: no path is longer.

    grow: whether a drafter may grow trees itself; then it does in most runs
    """
    fitting = [count for count in steps if count < nodes] or [nodes - 1]
    topk = draw(st.sampled_from(TOPKS)) if grow else None
    return with_fields(room, num_draft_tokens=nodes, topk=topk), (max(fitting),)


def with_prefixes(draw: Draw, room: Room, *, always: bool = False) -> Room:
    """A capacity with or without an interval at which prefixes are tracked, and room for all of them or for few."""
    every, few = draw(st.sampled_from(INTERVALS[always:])), len(room.pages) * room.page_size < len(room.slots) * ROOMY
    return with_fields(room, track_interval=every, tracked=TRACKED if every and few else None)


def with_device_widths(draw: Draw, room: Room) -> Room:
    """A capacity in which the device alone knows the widths of windows, or the host, too; tracked prefixes need it."""
    return room if room.track_interval else with_fields(room, device_widths=draw(st.booleans()))


def receiver(draw: Draw, setting: Setting, first: Room, most: int | None, ranks: Sequence[int]) -> Receiver:
    """Draw a second engine: its pools, step count and ranks, and bf16 states if its strategy stores them.

    first: the capacity of the first engine;  most: the largest step count;  ranks: numbers that the model can have
    """
    other = with_fields(room(draw), track_interval=first.track_interval, tracked=first.tracked)
    wide = setting.state == torch.float32 and setting.ring_dtype is None
    narrow = wide and (setting.strategy, torch.bfloat16) not in LATE
    return Receiver(
        other, draw(st.sampled_from([count for count in STEPS if most is None or count <= most])),
        ranks=draw(st.sampled_from(ranks)) if setting.stages == 1 else None,
        state_dtype=draw(st.sampled_from((None, "bfloat16"))) if narrow else None)


def strategies(draw: Draw, setting: Setting, fields: Collection[str], *, trees: bool = False) -> Setting:
    """The setting with drawn strategies for states and conv windows, if they are in `fields`."""
    drawn: dict[str, Any] = {
        field: draw(st.sampled_from([name for name in setting.strategies(field) if not (trees and name in CHAINS)]))
        for field in OPTIONS if field in fields
    }  # fmt: skip
    return replace(setting, **drawn)


def narrow_prefixes(draw: Draw, setting: Setting, fields: Collection[str]) -> Setting:
    """The setting with drawn storage of the states in tracked prefixes, as far as its pool of states is wider."""
    drawn: dict[str, Any] = {}
    for field, values in NARROW.items():
        wide = torch.float32, *(torch.bfloat16, torch.float16) * (field == "kept_dtype")
        if field in fields and setting.state in wide:
            drawn[field] = draw(st.sampled_from(values))
    return replace(setting, **drawn)


def split_rings(setting: Setting, room: Room, fields: Collection[str]) -> Setting:
    """The setting with a ring in two parts, for every second number of slots, as far as it has a ring of fp32.

    Nothing is drawn, so that the examples of a seed stay as they are.
    """
    ring = RING in fields and setting.strategy in RINGS and torch.float64 not in (setting.activation, setting.state)
    return replace(setting, ring_dtype="bfloat16") if ring and len(room.slots) % 2 else setting


def admit(draw: Draw, rules: EventRules, edges: Sequence[int]) -> e.Event:
    """A new request, or one that begins with what is kept. Free names are used again."""
    name = _free_request(rules)
    kept = list(rules.table.saved.values())
    sampling = draw(st.sampled_from(SAMPLINGS))
    if bool(kept) and draw(st.booleans()):
        one = kept[draw(st.integers(0, len(kept) - 1))]
        further = _tokens(draw, rules, _size(draw, rules, edges)) if one.prefix else ()
        return e.Admit(name, (*one.prompt, *further), sampling)
    return e.Admit(name, _tokens(draw, rules, _size(draw, rules, edges)), sampling)


def admit_long(draw: Draw, rules: EventRules, edges: Sequence[int], *, past: int) -> e.Event:
    """A new request whose prompt ends up to a window before this position."""
    prompt = _tokens(draw, rules, past - draw(st.integers(0, rules.table.num_steps)))
    return e.Admit(_free_request(rules), prompt, draw(st.sampled_from(SAMPLINGS)))


def forward(draw: Draw, rules: EventRules, edges: Sequence[int]) -> e.Event:
    """Prefill, verify and decode rows as they come, in any order."""
    kinds = {name: kind for kind in ("prefill", "verify", "decode") for name in rules.legal().get(kind, ())}
    if rules.table.capacity.device_widths and {*kinds.values()} >= {"prefill", "verify"}:  # not in one forward
        less = draw(st.sampled_from(("prefill", "verify")))
        kinds = {name: kind for name, kind in kinds.items() if kind != less}
    return e.Forward(tuple(_row(draw, rules, edges, kinds[name], name) for name in _some(draw, list(kinds))))


def draft(draw: Draw, rules: EventRules, edges: Sequence[int]) -> e.Event:
    """Chains of as many drafts as the step count, or of own widths; trees if the header has room for them."""
    names, nodes = _some(draw, rules.legal()["draft"]), rules.table.capacity.num_draft_tokens
    most, chains = rules.table.num_steps, ("alike", "own widths")
    shape = draw(st.sampled_from(chains if nodes is None else (*chains, "trees", "trees")))
    if shape == "alike":
        return e.Draft(names, tuple(_tokens(draw, rules, most) for _ in names))
    shapes = tuple(tuple(range(draw(st.integers(0, most)))) if shape == "own widths" else _tree(draw, nodes or 0, most)
                   for _ in names)  # fmt: skip
    return e.Draft(names, tuple(_tokens(draw, rules, len(shape)) for shape in shapes), shapes)


def commit(draw: Draw, rules: EventRules, edges: Sequence[int]) -> e.Event:
    """A commit of all verified requests, in any order: no drafts, all drafts, or a drawn number; some have caps."""
    names = tuple(draw(st.permutations(rules.legal()["commit"])))
    share = draw(st.sampled_from(("none", "ragged", "all")))
    paths = tuple(_path(draw, rules, rules.table.live[name], share) for name in names)
    track = tuple(_under(draw, rules, name) or _in_place(draw, rules, name) for name in names)
    capped = rules.table.capacity.trim and draw(st.booleans())
    caps = tuple(draw(st.integers(0, len(rules.table.live[name].window) - 1)) for name in names if capped)
    return e.Commit(names, paths, track if any(track) else (), caps)


def set_num_steps(draw: Draw, rules: EventRules, edges: Sequence[int]) -> e.Event:
    return e.SetNumSteps(int(draw(st.sampled_from(rules.legal()["set_num_steps"]))))


def described(kind: type[e.Event], draw: Draw, rules: EventRules, edges: Sequence[int]) -> e.Event:
    """An event whose fields are a request, a copy, or both: one that the rules allow."""
    fields: list[str] = [draw(st.sampled_from(rules.legal()[kind_of(kind)]))] if kind.__struct_fields__ else []
    if len(kind.__struct_fields__) > 1:
        loadable = rules.table.loadable(rules.table.live[fields[0]].prompt)
        fields += [free_name(rules, "kept {}") if FACTS[kind].copy == "keep" else draw(st.sampled_from(loadable))]
    return kind(*fields)


Drawer = Callable[[Draw, EventRules, Sequence[int]], e.Event]
# The scheduler's actions other than forwards and rounds, by the names of the event rules.
DRAWN = {e.SetNumSteps: set_num_steps, **dict.fromkeys((e.Admit, e.Draft, e.Forward, e.Commit, e.Refused))}
DESCRIBED = [kind for kind in FACTS if kind not in DRAWN]
UPKEEP: dict[str, Drawer] = {
    kind_of(kind): drawer for kind in FACTS if (drawer := DRAWN.get(kind, partial(described, kind))) is not None
}
MOVES = [kind_of(kind) for kind in DESCRIBED if kind.__struct_fields__ == ("name",)]  # drawn if prefixes are tracked


def may(rules: EventRules, kind: str) -> bool:
    """Whether events of this kind are legal now, and drawn in a room like this."""
    return kind in rules.legal() and (kind not in MOVES or rules.table.capacity.track_interval is not None)


def _order(draw: Draw, count: int, among: int) -> tuple[int, ...]:
    match draw(st.sampled_from(("in order", "from the top", "permuted"))):
        case "in order":
            return tuple(range(1, count + 1))
        case "from the top":
            return tuple(range(among, among - count, -1))
    return tuple(draw(st.permutations(range(1, among + 1))))[:count]


def _free_request(rules: EventRules) -> str:
    taken = {**rules.table.live, **({} if rules.other is None else rules.other.table.live)}
    return next(name for number in count() if (name := chr(ord("a") + number)) not in taken)


def _some(draw: Draw, names: Sequence[str]) -> tuple[str, ...]:
    """One or more of the names, in any order; in half of the draws or more all of them."""
    order = tuple(draw(st.permutations(names)))
    return order if draw(st.booleans()) else order[: draw(st.integers(1, len(order)))]


def _size(draw: Draw, rules: EventRules, edges: Sequence[int]) -> int:
    """A number of prompt tokens: around an edge, or any."""
    window = rules.table.num_steps + 1
    sizes = st.one_of(st.sampled_from(sorted({*edges, window, window + 1})), st.integers(1, 12))
    return draw(st.sampled_from(LONG)) if draw(st.integers(0, 19)) == 19 else draw(sizes)


def _tokens(draw: Draw, rules: EventRules, count: int) -> tuple[int, ...]:
    first, stride = draw(st.integers(0, rules.vocab - 1)), draw(st.sampled_from(STRIDES))
    return tuple((first + at * stride) % rules.vocab for at in range(count))


def _tree(draw: Draw, nodes: int, longest: int) -> tuple[int, ...]:
    """The parents of its drafts: any tree with a path of at most `longest` drafts."""
    depths, parents = [0], list[int]()
    for _ in range(draw(st.integers(1, nodes - 1))):
        parents.append(draw(st.sampled_from([node for node, depth in enumerate(depths) if depth < longest])))
        depths.append(depths[parents[-1]] + 1)
    return tuple(parents)


def _row(draw: Draw, rules: EventRules, edges: Sequence[int], kind: str, name: str) -> e.Row:
    root, unread = draw(st.integers(0, rules.vocab - 1)), rules.table.live[name].unread
    if kind == "prefill":
        whole = draw(st.booleans())
        tokens = min(rules.table.capacity.max_tokens if whole else _size(draw, rules, edges), unread)
        under, every = _under(draw, rules, name), rules.table.capacity.track_interval or 1
        reached = rules.table.live[name].length + tokens
        if under and reached % every:  # up to the last multiple before that, if there is one in the chunk
            tokens, under = (less, under) if (less := tokens - reached % every) > 0 else (tokens, "")
        row = e.Row(name, "prefill", tokens, root if tokens == unread else None, track=under)
    else:
        row = e.Row(name, "decode", root=root) if kind == "decode" else e.Row(name, "verify")
    due = uniforms_due(rules.table.live[name], row)
    uniforms = (draw(st.integers(0, UNIFORMS - 1)) / UNIFORMS for _ in range(due))
    row = with_fields(row, uniforms=tuple(uniforms))
    return with_fields(row, inner=_inside(draw, rules, row)) if kind == "prefill" else row


def _in_place(draw: Draw, rules: EventRules, name: str) -> str:
    """The name of a request's own prefix, which its commit may replace; empty if it has none, or keeps it."""
    own = [under for under in rules.table.saved if rules.table.own_prefix(name, under)]
    return draw(st.sampled_from(("", *own))) if own else ""


def _inside(draw: Draw, rules: EventRules, row: e.Row) -> tuple[str, ...]:
    """Names for prefixes inside a chunk: for none of the multiples there, or for any of them."""
    every, start = rules.table.capacity.track_interval, rules.table.live[row.request].length
    multiples = [] if every is None else list(inner_multiples(start, start + row.tokens, every))
    if not multiples or len(rules.table.saved) + len(multiples) >= MOST_PREFIXES or not draw(st.booleans()):
        return ()
    there = () if rules.other is None else rules.other.table.saved
    used = (*rules.table.saved, *there, row.track)
    free = (under for number in count() if (under := f"{row.request}, {number}") not in used)
    return tuple(under if draw(st.booleans()) else "" for under in islice(free, len(multiples)))


def _under(draw: Draw, rules: EventRules, name: str) -> str:
    """A name under which a prefix is tracked; where none may be, or none shall be, an empty one."""
    table = rules.table
    room = table.capacity.track_interval is not None and len(table.saved) < MOST_PREFIXES
    return free_name(rules, f"{name}, {{}}") if room and draw(st.booleans()) else ""


def free_name(rules: EventRules, name: str) -> str:
    """A name with a number under which nothing is kept; after an eviction an old one, if possible."""
    there = {} if rules.other is None else rules.other.table.saved
    return next(free for number in count() if (free := name.format(number)) not in {**rules.table.saved, **there})


def _path(draw: Draw, rules: EventRules, standing: Standing, share: str) -> e.Path:
    drafts = len(standing.window) - 1
    count = {"none": 0, "all": drafts}.get(share)
    count = draw(st.integers(0, drafts)) if count is None else count
    nodes: list[int] = []
    while len(nodes) < count and (children := standing.children(nodes[-1] if nodes else 0)):
        nodes.append(draw(st.sampled_from(children)) if len(children) > 1 else children[0])
    return e.Path(tuple(nodes), draw(st.integers(0, rules.vocab - 1)))
