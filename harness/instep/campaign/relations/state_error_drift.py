"""Drift: the error of every head's state against fp64 stays flat over thousands of tokens.

The delta rule is contractive: every write along a key replaces what the state held there, errors included. So the error
of a correct engine settles within a few K / beta tokens, and growth is a fault. There are two
long runs. One calls the op alone, on random tokens with the gates of a layer of the model. The other goes through the
engine's layers and starts from the input bits that each layer really got.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import msgspec
import torch
from torch.nn.functional import softplus

from instep_optimized.memory.tiled_units import Units, shown
from instep_optimized.memory_addresses import Chance, Part
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_reference import gdn, trunk
from instep_reference.contract.declared_rounding import RING, Blocked, Storage, read_as
from instep_reference.contract.engine import Admit
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import STAGE_LEVEL, Place, See, unseen
from instep_reference.contract.recurrences import Recurrence
from instep_reference.norms import l2_norm
from instep_reference.weights import GdnWeights, Weights

from ...finding_problem import Problem
from ...oracle.declared_product_rounding import InChunks, Operands, launched
from ...oracle.reordered_arithmetic import Reordered
from ...oracle.storage_rounding import State, rounded
from ...run.build_compared_engines import declares, rounding
from ...run.reference_with_declared_storage import run_again
from ...tier_allowances import allowed
from ...trace.header import Room
from ...verdict import Comparison, Skipped, Tier
from .case import Case, Relation, Results
from .compare_records import unserved
from .position_record import Stopped, raised
from .request_timelines import RewrittenTrace, Timeline, TimelineStep, chain, in_turn

SPANS = 8  # parts of a run that are judged separately

# Limit for (median error of a head in the last quarter) / (the same in the second quarter). Independent errors that
# never decay add up as the square root of the number of tokens: by sqrt(7 / 3) = 1.53 between the middles of the two
# quarters. An error that grows linearly grows by 7 / 3 = 2.33. A median of 8 launches scatters by about 15%. A head may
# remember longer than a quarter, and the text may change: then the error of a correct engine grows as well. So the
# limit is multiplied by the growth of the rounded reference on the same rows.
GROWTH = 2.0
FEWEST = 8  # launches in a quarter that a median needs
CHUNK = 64  # tokens per prefill chunk
NAME = "long"
# One draw for each: whether a block is inverted by substitution alone (`oracle/declared_product_rounding.py`).
INVERSES = (False, True)


def hold(case: Case) -> Results:
    ops = case.ops
    assert ops is not None, "asked before"
    layer = case.plan.checkpoint.config.recurrent[0]
    for form in ("window", "chunk"):
        yield from judged(by_the_op(case, ops, layer, form))
    for course in through_the_layers(case, ops):
        yield from judged(course)


def judged(course: "LongRun | Stopped") -> Results:
    """Require every span to be within the allowance of the yardstick's largest error so far, and no growth."""
    if isinstance(course, Stopped):
        yield unserved("drift", course)
        return
    ends = torch.tensor(course.tokens)
    for span in range(SPANS):
        begin, end = (course.tokens[-1] * part // SPANS for part in (span, span + 1))
        within = (ends > begin) & (ends <= end)
        if bool(within.any()):
            limit = allowed(course.yardstick[ends <= end].amax(0), course.stored)
            error = course.errors[within].amax(0)
            says = f"off by {{:.1e}} within {end} tokens of {course.what}, the yardstick by at most {{:.1e}}"
            yardstick = course.yardstick[ends <= end].amax(0)
            yield _comparison(course, int(within.nonzero()[-1]), error, limit, says, yardstick)
    quarters = [(ends > course.tokens[-1] * n // 4) & (ends <= course.tokens[-1] * (n + 1) // 4) for n in range(4)]
    fewest = min(int(quarters[n].sum()) for n in (1, 3))
    if fewest < FEWEST:
        says = f"a quarter of {course.tokens[-1]} tokens has {fewest} launches, a median needs {FEWEST}"
        yield Skipped("drift", 0, f"{course.what}, whether the error grows: {says}")
    else:
        least = torch.finfo(course.stored).eps
        (early, late), (began, ended) = (
            [errors[quarters[n]].median(0).values for n in (1, 3)] for errors in (course.errors, course.yardstick)
        )
        limit = GROWTH * early.clamp_min(least) * (ended / began.clamp_min(least)).clamp_min(1.0)
        says = f"the error grows: {{:.1e}} in the last quarter of {course.tokens[-1]} tokens of {course.what}, " \
               "{:.1e} in the second"
        yield _comparison(course, len(course.tokens) - 1, late, limit, says, early)


def _comparison(
    course: "LongRun", launch: int, error: torch.Tensor, limit: torch.Tensor, says: str, beside: torch.Tensor
) -> Comparison:
    """The comparison for the head with the largest ratio of error to limit."""
    head = int((error / limit).argmax())  # a NaN counts as the largest
    worst, most = float(error[head]), float(limit[head])
    return Comparison(
        "drift", Tier.DERIVED, launch, course.kind, Place("trunk", course.layer, "state"), elements=error.numel(),
        blocks=error.numel(), worst=worst, allowed=most, head=head,
        problem=None if worst <= most else Problem("differs", says.format(worst, float(beside[head]))),
    )


def lacks(case: Case) -> str | None:
    if case.ops is None:
        return "an external engine has no op that can be run alone"
    if case.labels:
        return "labels have no error"
    if not case.plan.checkpoint.config.recurrent:
        return "this model has no state that could drift"
    return None


RELATION = Relation(
    "drift", "over thousands of tokens the error against fp64 stays flat",
    "a decay that is the difference of two sums since the first token", (Tier.DERIVED,), hold, lacks,
    of_the_trace=False,
)


@dataclass(frozen=True)
class LongRun:
    """Errors of one long run.

    what       "windows", "chunks" or "the engine"
    layer      the layer that supplies the gates or the state
    tokens     number of tokens after each launch
    errors     [launches, heads]: |x - o| / |o| per head
    yardstick  the same error of the rounded reference
    """

    what: str
    kind: str
    layer: int
    tokens: tuple[int, ...]
    errors: torch.Tensor
    yardstick: torch.Tensor
    stored: torch.dtype


def by_the_op(case: Case, ops: Ops, layer: int, form: str) -> LongRun | Stopped:
    """Run the op alone on one request; every launch starts from the state that the last one left."""
    types, state = ops.types(case.plan.setting.activation, case.plan.setting.state), case.plan.setting.width
    mixer = _mixer(Weights.of(case.plan.checkpoint, torch.float64), layer)
    inputs = sampled(case, mixer, types.consumed)
    sizes = cycle((CHUNK,) if form == "chunk" else (1, *(n + 1 for n in case.trace.header.candidates)))
    cuts = list(_cuts(case.tokens, sizes))
    pool = _pool(case, types.state, layer)
    found, core, what = [], Place("trunk", layer, "core"), f"{form}s of the op"
    recur = ops.recurrence(case.plan.checkpoint.config.recurrence)
    for launch, (begin, end) in enumerate(cuts):
        part = _part(form, pool, begin, end)
        rows = GdnInputs(*(x[begin:end].to(pool.pool.device) for x in inputs))
        try:
            recur(inputs=rows, parts=(part,), dtype=types.hidden, to=core)
        except Unsupported:
            raise
        except Exception as error:  # whatever it is: the op may be anybody's
            return Stopped(launch, form, core, f"{what}: {raised(error)} after {begin} tokens")
        found.append(shown(pool.taken(1)).cpu())
    row = case.plan.checkpoint.config.recurrence
    truth = list(_recurred(layer, row, inputs, cuts, torch.float64, None))
    products = declares(case.plan, ops).products
    operands = Operands(products, Weights.of(case.plan.checkpoint, state), chunk=form == "chunk")
    drawn = []
    for one in INVERSES:
        operands.begin(cut=True, by_substitution=one)
        with Reordered(torch.Generator().manual_seed(0), operands):
            drawn.append(list(_recurred(layer, row, inputs, cuts, state, types.state, operands)))
    return _course(what, form, layer, [end for _, end in cuts], found, truth, drawn, types.state)


def through_the_layers(case: Case, ops: Ops) -> Iterator[LongRun | Stopped]:
    """A long request through the engine; every GDN layer again in fp64, on the rows that the engine gave it."""
    record = case.recorded("a long request", lambda: long_request(case))
    if record.stopped is not None:
        yield replace(record.stopped, why=f"{record.name}: {record.stopped.why}; the event is legal")
        return
    setting = case.plan.setting
    said, stored = declares(case.plan, ops), ops.types(setting.activation, setting.state).state
    truth, narrow = (Weights.of(case.plan.checkpoint, dtype) for dtype in (torch.float64, setting.width))
    lengths, kind = [standing.state.length for standing in record.standings], record.standings[-1].kind
    for layer in case.plan.checkpoint.config.recurrent:
        place = Place("trunk", layer - 1, "hidden") if layer else Place("trunk", STAGE_LEVEL, "embedding")
        given = [record.rows.get((NAME, place, position)) for position in range(lengths[-1])]
        states = [standing.state.state.get(layer) for standing in record.standings]
        rows, found = ([one for one in given_rows if one is not None] for given_rows in (given, states))
        if len(rows) < len(given) or len(found) < len(states):
            at = place if len(rows) < len(given) else Place("trunk", layer, "state")
            lacking = f"{len(rows)} of {len(given)} rows and {len(found)} of {len(states)} states were shown"
            yield Stopped(0, kind, at, f"{record.name}: {lacking}")
            continue
        right = list(_layered(truth, layer, torch.stack(rows), lengths, unseen, None))
        operands = Operands(said.products, narrow)
        sampled = []
        for one in INVERSES:
            operands.begin(cut=True, by_substitution=one)
            with Reordered(torch.Generator().manual_seed(0), operands):
                see, ring = rounding(said.rounds), said.rounds.get(RING)
                sampled.append(list(_layered(narrow, layer, torch.stack(rows), lengths, see, stored, operands, ring)))
        yield _course("the engine", kind, layer, lengths, found, right, sampled, stored)


def long_request(case: Case) -> RewrittenTrace:
    """A prompt in chunks, then rounds in which everything is accepted; the tokens are those of the trace's prompts."""
    header, widest = case.trace.header, max(case.trace.header.candidates)
    text = [token for event in case.trace.events if isinstance(event, Admit) for token in event.prompt]
    count = max(case.tokens // 4, 2 * CHUNK)
    said = [token for token, _ in zip(cycle(text), range(count + widest + 2), strict=False)]
    read = max(count // 8 // CHUNK, 1) * CHUNK
    steps = [TimelineStep("chunk", (0,), CHUNK) for _ in range(read // CHUNK - 1)]
    steps.append(TimelineStep("chunk", (0,), CHUNK, said[read]))
    for at in range(read, count, widest + 1):
        drafts = tuple(said[at + 1 : at + 1 + widest])
        follows = said[at + 1 + widest]
        steps.append(
            TimelineStep("round", (0, 0, 0), 0, follows, drafts, chain(widest)) if widest
            else TimelineStep("decode", (0,), 1, follows)
        )
    size = header.capacity.page_size
    room = Room(header.capacity.slots, tuple(range(1, (len(said) + widest) // size + 2)), size,
                max(header.capacity.max_tokens, CHUNK))
    return in_turn([Timeline(NAME, tuple(said[:read]), 0, steps)], msgspec.structs.replace(header, capacity=room))


def sampled(case: Case, mixer: GdnWeights, dtype: torch.dtype) -> GdnInputs:
    """Tokens with correlated keys, under the layer's own gates: q, k [N, H, K]  v [N, HV, V]  gates as in its row."""
    config, count = case.plan.checkpoint.config, case.tokens
    gate = config.lengths(config.recurrence.gate)
    generator = torch.Generator().manual_seed(case.trace.header.seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

    H, HV, K, V = config.key_heads, config.value_heads, config.key_dim, config.value_dim
    q, k = (l2_norm(noise(H, K) + 1 / 2) for _ in range(2))
    rate = mixer.A_log.exp().reshape(HV, *[1] * len(gate[1:]))
    log_decay = -rate * softplus(noise(*gate) / 2 + mixer.dt_bias.reshape(gate))
    given = q * K**-0.5, k, noise(HV, V), log_decay, torch.sigmoid(noise(HV))
    return GdnInputs(*(x.to(dtype) for x in given))


def _recurred(
    layer: int, row: Recurrence, inputs: GdnInputs, cuts: Sequence[tuple[int, int]], dtype: torch.dtype,
    stored: Storage | None, operands: Operands | None = None,
) -> Iterator[torch.Tensor]:
    """The state after every launch. stored: rounded to it in between; operands: how the subject multiplies."""
    rows = [x.to(dtype) for x in inputs]
    state = torch.zeros(rows[2].shape[1], rows[1].shape[2], rows[2].shape[2], dtype=dtype)
    for begin, end in cuts:
        state = launched(operands, row, [x[begin:end] for x in rows], state)
        state = state if stored is None else rounded(state, stored, State(layer, end))
        yield state


def _layered(
    weights: Weights, layer: int, rows: torch.Tensor, lengths: Sequence[int], see: See, stored: Storage | None,
    operands: Operands | None = None, ring: Storage | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the state of a layer after each of these lengths. A step of CHUNK rows is a prefill chunk; windows are
    shorter."""
    config, mine, like = weights.config, weights.layers[layer], weights.embedding
    memory, begin = gdn.empty(config, like.dtype, like.device), 0
    rule: InChunks | None = None

    def at(component: str, tensor: torch.Tensor) -> torch.Tensor:
        place = Place("trunk", layer, component)
        tensor = see(place, rule.core() if rule is not None and component == "core" else tensor)
        if rule is not None:
            rule.keep(place, tensor)
        if operands is not None:
            operands.seen(place)
        latest[component] = tensor
        return tensor

    latest = dict[str, torch.Tensor]()
    for end in lengths:
        if operands is not None:
            operands.chunk = end - begin == CHUNK
            declared = operands.chunk and operands.forms[1] in operands.products
            rule = InChunks(operands, memory.state) if declared else None
        normed = at("normed", trunk.read(config, mine.input_norm, rows[begin:end].to(like))[0])
        before = memory.state
        memory = gdn.mix(config, _mixer(weights, layer), normed, memory, torch.arange(begin, end), at)[1]
        if isinstance(ring, torch.dtype) and 1 < end - begin < CHUNK:
            memory = gdn.GdnMemory(memory.window, run_again(latest, before, ring))
        if rule is not None and rule.state is not None:
            memory = gdn.GdnMemory(memory.window, rule.state)
        if stored is not None:
            memory = gdn.GdnMemory(memory.window, rounded(memory.state, stored, State(layer, end)))
        begin = end
        yield memory.state


def _mixer(weights: Weights, layer: int) -> GdnWeights:
    mixer = weights.layers[layer].mixer
    assert isinstance(mixer, GdnWeights), "asked of GDN layers alone"
    return mixer


def _pool(case: Case, storage: Storage, layer: int) -> Units:
    """Two states of which the second is used, in the layout of the plan."""
    config, device = case.plan.checkpoint.config, case.plan.setting.device
    HV, K, V = config.value_heads, config.key_dim, config.value_dim
    dtype, seed = (storage.dtype, storage.seed) if isinstance(storage, Blocked) else (storage, None)
    grid = storage.grid(HV, K, V) if isinstance(storage, Blocked) and storage.tile is not None else None
    beside = None if grid is None else torch.zeros(2, *grid, device=device)
    chance, turned = None if seed is None else Chance(seed, layer), case.plan.setting.layout == "VK"
    states = torch.zeros(2, HV, *((V, K) if turned else (K, V)), dtype=dtype, device=device)
    return Units(states.transpose(-1, -2) if turned else states, beside, chance)


def _part(form: str, pool: Units, begin: int, end: int) -> Part:
    def ints(value: int) -> torch.Tensor:
        return torch.tensor([value], device=pool.pool.device)

    at = pool.at(ints(1))
    count = end - begin
    return Part("chunk" if form == "chunk" else "window", ints(0), ints(count), count, at, ints(not begin).bool(),
                store=at, before=ints(begin))  # fmt: skip


def _cuts(count: int, sizes: Iterator[int]) -> Iterator[tuple[int, int]]:
    begin = 0
    while begin < count:
        end = min(begin + next(sizes), count)
        yield begin, end
        begin = end


def _course(
    what: str, kind: str, layer: int, tokens: Sequence[int], found: Sequence[torch.Tensor],
    truth: Sequence[torch.Tensor], drawn: Sequence[Sequence[torch.Tensor]], stored: Storage,
) -> LongRun:
    yardstick = torch.stack([_off(one, truth) for one in drawn]).amax(0)
    return LongRun(what, kind, layer, tuple(tokens), _off(found, truth), yardstick, read_as(stored))


def _off(found: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> torch.Tensor:
    """[launches, heads]: |x - o| / |o| of every head."""
    x, o = (torch.stack([state.double() for state in states]).flatten(2) for states in (found, truth))
    off: torch.Tensor = torch.linalg.vector_norm(x - o, dim=-1) / torch.linalg.vector_norm(o, dim=-1)
    return off
