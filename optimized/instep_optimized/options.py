"""Settings of an engine (frozen), and the combinations that are refused.

Leaves out: the op set and the capacity, which are separate arguments of the engine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from instep_reference.contract.capacity import MOST_NODES
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import (
    SCALED_KEPT,
    SCALED_KV,
    SCALED_STATE,
    Blocked,
    Storage,
    scaled,
)
from instep_reference.contract.drafters import BLOCK, DRAFTERS, MODES
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.grown_draft_tree import MOST_BEAMS
from instep_reference.contract.shards import COLUMNS, EXPERTS

from .commit import known
from .component_table import TABLE
from .memory.budget import Component
from .memory.component_cells import refuse_empty
from .memory_addresses import StateLayout
from .ops.op_protocols import Ops, Types

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """Settings of an engine.

    device      device of weights, pools and rows
    activation  dtype of hidden rows, KV and conv windows, as far as the op set follows it
    state       how the recurrent state is stored: a dtype, or `SCALED_STATE`; with at most 16 bits also `by_chance`
    kv          how KV and draft KV are stored; None: in the dtype of activations; or `SCALED_KV`
    kept        how tracked prefixes store states; None: as the pool does; or `SCALED_KEPT`
    chunk       dtype of the states that a forward leaves to a tracked prefix; None: that of the pool
    ring        dtype of 16 bits in which a ring has a high and a low part of keys and updates; None: they have one
                part, in the dtype of the recurrence
    layout      physical order of a state block: VK (K contiguous) or KV (V contiguous)
    snapshot_layout  the same in the pool of snapshots; None: as `layout`
    strategy    how rejected drafts are undone in the states; a name of `commit.STRATEGIES` or of `Ops.keepers`
    conv        the same in the conv windows; a name of `commit.CONV_FORMS` or of `Ops.keepers`
    drafter     how drafts are made; with the model type a key of `contract.drafters.DRAFTERS`
    guarded     red zones between units, so that a pitch is never the packed size
    graphs      draft, verify, decode and commit run as graphs, captured at the start for every step count
    batches     batch sizes for which graphs are captured; None: 1, 2, 4, ... and as many requests as there are slots.
                A batch between them runs in the next larger graph. The largest has room for all slots
    prompt_graphs  numbers of packed rows for which the target in forwards with prompts is captured, in segments between
                GDN layers; a forward runs in the next larger graph, or eagerly if it has more rows than the largest.
                None: all forwards with prompts run eagerly
    overlap     a round may be launched before the accepted counts of the previous round are known. Pages are then
                reserved for the worst case
    experts     the part of routed experts that a rank has: columns of each, or whole experts (`shards.EXPERTS`)
    scratch     index of the scratch memory of verified windows: the row in the batch, or the request's own row, as
                several batches may be in flight
    first_head  number of the first value head of a rank in the whole model
    poison      the value that fills fresh and freed units; None: fresh units are zeros, freed units stay as they are
    """

    device: str = "cpu"
    activation: torch.dtype = torch.float32
    state: Storage = torch.float32
    kv: Storage | None = None
    kept: Storage | None = None
    chunk: torch.dtype | None = None
    ring: torch.dtype | None = None
    layout: StateLayout = "VK"
    snapshot_layout: StateLayout | None = None
    strategy: str = "rerun"
    conv: str = "windows"
    drafter: str = "eagle"
    guarded: bool = True
    poison: float | None = math.nan
    overlap: bool = False
    graphs: bool = False
    batches: tuple[int, ...] | None = None
    prompt_graphs: tuple[int, ...] | None = None
    experts: str = COLUMNS
    first_head: int = 0
    scratch: Literal["row", "request"] = "row"


# A strategy that stores a state later than at its commit: the schedule would decide when a narrow state is rounded.
RINGS = ("rerun", "lazy_rerun")  # strategies with a ring
LATE = tuple(("lazy_rerun", state) for state in (torch.bfloat16, torch.float16, SCALED_STATE))


def nearest(state: Storage) -> Storage:
    """Return the same storage without stochastic rounding."""
    return state.nearest if isinstance(state, Blocked) else state


Rule = Callable[[Options, ModelConfig, int], bool]

# (whether it is refused, why, the options that cause it), one line each. o: options, c: configuration, n: the maximum
# number of drafts of a round.
REFUSED: tuple[tuple[Rule, str, tuple[str, ...]], ...] = (
    (lambda o, c, n: o.layout not in ("VK", "KV"), "a state layout is VK or KV", ("layout",)),
    (lambda o, c, n: o.snapshot_layout not in (None, "VK", "KV"),
     "the layout of snapshots is VK or KV", ("snapshot_layout",)),
    (lambda o, c, n: o.snapshot_layout not in (None, o.layout) and o.strategy != "snapshot",
     "only the strategy snapshot has a second pool of states", ("snapshot_layout", "strategy")),
    (lambda o, c, n: o.activation not in FLOATS,
     "activations are float64, float32, bfloat16 or float16", ("activation",)),
    (lambda o, c, n: nearest(o.state) not in (*FLOATS, SCALED_STATE),
     "a state is stored in float64, float32, bfloat16, float16 or float8_e4m3fn with scales", ("state",)),
    (lambda o, c, n: isinstance(o.state, Blocked) and o.state.dtype.itemsize > 2,
     "stochastic rounding is for at most 16 bits", ("state",)),
    (lambda o, c, n: o.kv not in (None, o.activation, SCALED_KV),
     "KV is stored in the dtype of activations or in float8_e4m3fn with scales", ("kv",)),
    (lambda o, c, n: o.kept not in (None, SCALED_KEPT),
     "states of prefixes are stored as in the pool or in int8 with scales", ("kept",)),
    (lambda o, c, n: o.kept is not None and o.state not in (torch.float32, torch.bfloat16, torch.float16),
     "prefixes in int8 are of states in float32, bfloat16 or float16, rounded to nearest", ("kept", "state")),
    (lambda o, c, n: o.chunk not in (None, torch.bfloat16, torch.float16),
     "the states between chunks are stored as in the pool or in 16 bits", ("chunk",)),
    (lambda o, c, n: o.chunk is not None and o.state is not torch.float32,
     "the states between chunks are narrower than a pool of float32 alone", ("chunk", "state")),
    (lambda o, c, n: o.ring not in (None, torch.bfloat16, torch.float16),
     "the parts of a ring's numbers are bfloat16 or float16", ("ring",)),
    (lambda o, c, n: o.ring is not None and o.strategy not in RINGS,
     f"a ring in two parts needs a strategy with a ring: {' or '.join(RINGS)}", ("ring", "strategy")),
    (lambda o, c, n: o.ring is not None and torch.float64 in (o.activation, o.state),
     "two parts of 16 bits hold numbers of float32, not of float64", ("ring", "activation", "state")),
    (lambda o, c, n: o.batches is not None and (not o.batches or min(o.batches) < 1),
     "graphs are captured for batches of 1 request or more", ("batches",)),
    (lambda o, c, n: o.prompt_graphs is not None and (not o.prompt_graphs or min(o.prompt_graphs) < 1),
     "graphs of prompts are captured for 1 packed row or more", ("prompt_graphs",)),
    (lambda o, c, n: o.prompt_graphs is not None and not o.graphs,
     "graphs of prompts need graphs of rounds", ("prompt_graphs", "graphs")),
    (lambda o, c, n: o.drafter == BLOCK and c.streams > 1,
     "a block drafter reads one row per token of a layer, not several streams", ("drafter",)),
    (lambda o, c, n: o.experts not in EXPERTS, "a rank has columns of experts or whole ones", ("experts",)),
    (lambda o, c, n: torch.device(o.device).type == "cuda" and not torch.cuda.is_available(),
     "there is no CUDA device here", ("device",)),
    (lambda o, c, n: o.activation is torch.float64 and (o.state is not torch.float64 or o.kv == SCALED_KV),
     "float64 activations with a narrower state or KV: nothing would be left of the width",
     ("activation", "state", "kv")),
    (lambda o, c, n: (o.strategy, nearest(o.state)) in LATE,
     "lazy_rerun with a state narrower than float32: where it is rounded would depend on the schedule",
     ("strategy", "state")),
    (lambda o, c, n: bool(c.mtp_layers) and (c.model_type, o.drafter) not in DRAFTERS,
     "this drafter is not here for this model type", ("drafter",)),
    (lambda o, c, n: o.drafter == "eagle" and c.mtp_layers > 1,
     "the eagle drafter runs one MTP layer again and again; this model has several", ("drafter",)),
    (lambda o, c, n: o.drafter == "vanilla" and 0 < c.mtp_layers < n,
     "the vanilla drafter has one MTP layer per draft, so no more drafts than layers", ("drafter",)),
    (lambda o, c, n: o.drafter == BLOCK and c.block is None,
     "block drafting needs a block drafter, and this checkpoint was opened without one", ("drafter",)),
    (lambda o, c, n: o.drafter == BLOCK and n >= MOST_NODES,
     f"the block drafter: a row's view of its block are the bits of an int64, for {MOST_NODES} rows", ("drafter",)),
)  # fmt: skip


TreeRule = Callable[[Options, ModelConfig, Ops], bool]

# The same if windows may be trees. s: the op set.
NO_TREES: tuple[tuple[TreeRule, str, tuple[str, ...]], ...] = (
    (lambda o, c, s: not s.trees,
     "windows that are trees: this op set serves chains alone, or does not say that it serves trees (`Ops.trees`)", ()),
    (lambda o, c, s: o.conv == "widened",
     "windows that are trees: in a widened line of inputs the conv windows of siblings would overlap", ("conv",)),
    (lambda o, c, s: not {o.strategy, o.conv}.isdisjoint(s.keepers),
     "windows that are trees: a strategy from an op set supports only chains", ("strategy", "conv")),
    (lambda o, c, s: o.drafter == "vanilla" and c.mtp_layers > 0,
     "windows that are trees: vanilla drafting has no separate layer per branch", ("drafter",)),
    (lambda o, c, s: o.drafter == BLOCK,
     "windows that are trees: in a block drafter rows have no branches", ("drafter",)),
)  # fmt: skip


# The same if prefixes are tracked.
NOT_TRACKED: tuple[tuple[TreeRule, str, tuple[str, ...]], ...] = (
    (lambda o, c, s: not {o.strategy, o.conv}.isdisjoint(s.keepers),
     "tracked prefixes: a strategy from an op set cannot return the memory after a node",
     ("strategy", "conv")),
)  # fmt: skip


NAMED: tuple[tuple[str, Component, str], ...] = (
    ("strategy", "state", "commit strategy"), ("conv", "conv", "form of conv window"),
)


def check(
    options: Options, config: ModelConfig, steps: int, ops: Ops, nodes: int | None = None, *, topk: int | None = None,
    interval: int | None = None, device_widths: bool = False, positions: int | None = None,
) -> None:
    """Refuse settings that this side does not support, before anything is allocated.

    steps: maximum drafts of a round;  nodes, topk, interval, device_widths, positions: `num_draft_tokens`, `topk`,
    `track_interval`, `device_widths`, `request_positions` of the capacity
    """
    for field, component, what in NAMED:
        names = known(component, ops)
        if getattr(options, field) not in names:
            raise Unsupported(f"this {what} is not here; known: {', '.join(names)} ({field} {getattr(options, field)})")
    if (config.recurrent or config.convolving) and getattr(ops, config.recurrence.name) is None:
        what = "recurrence" if config.recurrent else "op"
        raise Unsupported(f"the ops of {ops.name} have no {what} {config.recurrence.name} "
                          f"(model type {config.model_type})")  # fmt: skip
    refuse_empty(TABLE, config)
    tiled = [name for name in ("state", "kv") if scaled(getattr(options, name))]
    falls = isinstance(options.state, Blocked) and options.state.seed is not None
    if tiled and not (ops.tiled or moves_labels(ops)):
        raise Unsupported(f"the ops of {ops.name} read no scales of a pool ({', '.join(tiled)} float8_e4m3fn)")
    if falls and not (ops.chances or moves_labels(ops)):
        raise Unsupported(f"the ops of {ops.name} round states to nearest alone (state {options.state})")
    for misses, what in (
        ("mla" in config.mixers and ops.attend_latents is None, "expand no latents (`Ops.attend_latents`)"),
        ("mla" in config.mixers and config.rotary_dim and ops.latent_inputs is None,
         "turn no rows of latents (`Ops.latent_inputs`)"),
        (config.decay_bound is not None and not (ops.bounds_decay and ops.fused_gdn is None),
         "have no safe gate (`Ops.bounds_decay`)"),
        (config.router == "sigmoid" and not ops.sigmoid, "have no sigmoid router (`Ops.sigmoid`)"),
        (config.expert_limits + config.shared_limits and not ops.clamps, "clamp no SwiGLU (`Ops.clamps`)"),
        (config.recurrence.inputs == "selective" and bool(config.recurrent) and None in (
            ops.biased_conv, ops.selective_inputs, ops.add_skip, ops.gated_group_norm),
         "lack one of `Ops.biased_conv`, `selective_inputs`, `add_skip`, `gated_group_norm`"),
        (not config.mlp_gate and ops.squared_mlp is None, "have no MLP without a gate (`Ops.squared_mlp`)"),
        (config.beta_bound != 1.0 and not (ops.bounds_beta and ops.fused_gdn is None),
         "have no beta of more than 1 (`Ops.bounds_beta`)"),
        (config.convolving and not config.recurrent and ops.multiply is None, "have no gates (`Ops.multiply`)"),
        (config.residual_factors and ops.scaled_add is None, "have no factors of residuals (`Ops.scaled_add`)"),
        (config.recurrence.inputs == "projected" and ops.lightning_inputs is None,
         "make no inputs of lightning attention (`Ops.lightning_inputs`)"),
        (config.streams > 1 and None in (ops.embed_streams, ops.read_streams, ops.add_streams),
         "lack one of `Ops.embed_streams`, `read_streams`, `add_streams`"),
        (config.ple and None in (ops.ngrams, ops.gate_streams, ops.norm_streams, ops.dilated_conv),
         "lack one of `Ops.ngrams`, `gate_streams`, `norm_streams`, `dilated_conv`"),
    ):  # fmt: skip
        if misses:
            raise Unsupported(f"the ops of {ops.name} {what}, which {config.model_type} needs")
    if options.ring is not None and not ops.split:
        why = "labels have no high and low part" if moves_labels(ops) else "`Ops.split`"
        raise Unsupported(f"the ops of {ops.name} keep no ring in two parts ({why}; ring {options.ring})")
    if (tiled or falls) and not {options.strategy, options.conv}.isdisjoint(ops.keepers):
        knows, which = ("no scales", f"{', '.join(tiled)} float8_e4m3fn") if tiled else ("no chance", options.state)
        raise Unsupported(f"a strategy that an op set brings knows {knows} ({which})")
    for refused, why, fields in REFUSED:
        if refused(options, config, steps):
            said = [f"{name} {str(getattr(options, name)).removeprefix('torch.')}" for name in fields]
            if fields == ("drafter",):
                layers = f"{config.mtp_layers} MTP layer{'s' * (config.mtp_layers != 1)}"
                said += [f"model type {config.model_type}", layers, f"up to {steps} drafts"]
            raise Unsupported(f"{why} ({', '.join(said)})")
    if device_widths and ((config.mtp_layers and MODES[options.drafter].heads) or nodes or interval):
        raise Unsupported("widths that only the device knows are for chains of a block drafter or of given drafts, "
                          "without tracked prefixes")  # fmt: skip
    if options.drafter == BLOCK and not ops.trees:
        raise Unsupported(f"the ops of {ops.name} have no attention in which a row sees later rows (`Ops.trees`)")
    if config.most_positions is not None and (positions or 0) > config.most_positions:
        raise Unsupported(f"up to {positions} positions of a request (capacity.max_positions): from token "
                          f"{config.most_positions + 1} on the attention of {config.model_type} may read chosen tokens "
                          "alone, which is not computed here (max_position_embeddings)")  # fmt: skip
    if interval is not None and interval < 1:
        raise BadInput("capacity.track_interval", found=interval, expected="at least 1")
    if topk is not None:
        if nodes is None or not config.mtp_layers or options.drafter != "eagle":
            raise Unsupported("trees that the drafter grows (capacity.topk) need num_draft_tokens and eagle drafting")
        if not 1 <= topk <= min(config.vocab, MOST_BEAMS) or topk * (steps - 1) > MOST_BEAMS:
            most = min(config.vocab, MOST_BEAMS)
            expected = f"from 1 to {most}; at most {MOST_BEAMS} rows of {steps - 1} steps have a bit"
            raise BadInput("capacity.topk", found=topk, expected=expected)
    if nodes is not None and not steps < nodes <= MOST_NODES:
        expected = f"from {steps + 1}, the root and {steps} drafts, to {MOST_NODES}: ancestors are bits of an int64"
        raise BadInput("capacity.num_draft_tokens", found=nodes, expected=expected)
    for serves_none, why, fields in (*NO_TREES * (nodes is not None), *NOT_TRACKED * (interval is not None)):
        if serves_none(options, config, ops):
            said = [f"op set {ops.name}", *(f"{name} {getattr(options, name)}" for name in fields)]
            raise Unsupported(f"{why} ({', '.join(said)})")


def moves_labels(ops: Ops) -> bool:
    """Return whether the op set moves labels instead of computing: its hidden rows are integers."""
    return not ops.types(torch.float32, torch.float32).hidden.is_floating_point


def types_of(options: Options, ops: Ops) -> Types:
    """Return the storage dtypes of an op set under these options."""
    types = ops.types(options.activation, options.state)
    if moves_labels(ops):
        return types
    types = types._replace(kept=options.kept, chunk=options.chunk, ring=options.ring)
    return types if options.kv is None else types._replace(kv=options.kv)
