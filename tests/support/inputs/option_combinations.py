"""All options of our engine as a product: which rows are refused, and few rows that have every pair of the others.

Leaves out: running a row (`tests/harness/test_combinations.py`) and running all of them (`tests/perf/combinations.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from instep.campaign.covering_array import CoveringArray, Group, Row
from instep.cli.record import make
from instep.options import CHOICES, LAYOUTS, either
from instep.setting import FALLING, FP8, KVS, STATES, STOCHASTIC, WIDTHS, Setting
from instep.trace.file import Trace
from instep.trace.header import Room
from instep.trace.policy import Arrival, Policy, ScheduledAction
from instep_optimized.commit import OURS
from instep_optimized.draft import MODES
from instep_optimized.options import RINGS
from instep_reference.contract.drafters import HEADLESS
from support.inputs.checkpoints import MODEL_TYPES, write, write_block
from support.inputs.traces import PROMPTS

NARROW = tuple(name for name in STATES if name not in ("float64", "float32"))  # states; None: in the width
PARTS = CHOICES["ring_dtype"]
BY_CHANCE = f"{STOCHASTIC}:7"
# How tracked prefixes store states -> the options. False: none is tracked; True: as in the pool.
PREFIXES: Mapping[bool | str, Mapping[str, str]] = {
    False: {}, True: {}, "int8": {"kept_dtype": "int8"}, "chunks in bfloat16": {"chunk_dtype": "bfloat16"},
}
IN_INT8, CHUNKS = (name for name in PREFIXES if isinstance(name, str))
# The names are those of `Setting`, but for the kind of model, trees and tracked prefixes, which a trace decides.
# A family without MTP layers, or with one at most, has no row: its traces run under every option that it has
# (`tests/harness/test_families.py`).
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "kind": tuple(name for name, kind in MODEL_TYPES.items()
                  if kind.removesuffix("_text") not in (*HEADLESS, "bailing_hybrid", "nemotron_h")),
    "strategy": tuple(OURS["state"]),
    "conv": tuple(OURS["conv"]), "layout": LAYOUTS,
    "snapshot_layout": (None, *LAYOUTS), "dtype": tuple(WIDTHS), "state_dtype": (None, *NARROW),
    "state_rounding": (None, BY_CHANCE), "ring_dtype": (None, *PARTS),
    "kv_dtype": (None, *KVS), "drafter": tuple(MODES), "trees": (False, True), "tracked": tuple(PREFIXES),
    "graphs": (False, True), "overlap": (False, True), "guarded": (True, False),
}
NO_SNAPSHOTS = tuple(name for name in FACTORS["strategy"] if name != "snapshot")

# Refused combinations: all of these values together, and a part of the message.
REFUSED: tuple[tuple[Mapping[str, tuple[Any, ...]], str], ...] = (
    ({"strategy": ("lazy_rerun",), "state_dtype": NARROW}, "lazy_rerun with a state narrower than float32"),
    ({"dtype": ("float64",), "state_dtype": NARROW}, "float64 activations with a narrower state or KV"),
    ({"state_dtype": (None,), "state_rounding": (BY_CHANCE,)}, f"--state-dtype {either(FALLING)}"),
    ({"dtype": ("float64",), "kv_dtype": (FP8,)}, "float64 activations with a narrower state or KV"),
    *(({"tracked": (IN_INT8,), name: values}, "of states in float32, bfloat16 or float16") for name, values in (
        ("dtype", ("float64",)), ("state_dtype", (FP8,)), ("state_rounding", (BY_CHANCE,)))),
    *(({"tracked": (CHUNKS,), name: values}, "narrower than a pool of float32 alone") for name, values in (
        ("dtype", ("float64",)), ("state_dtype", NARROW))),
    ({"ring_dtype": PARTS, "strategy": tuple(name for name in FACTORS["strategy"] if name not in RINGS)},
     "needs a strategy with a ring"),
    ({"ring_dtype": PARTS, "dtype": ("float64",)}, "hold numbers of float32, not of float64"),
    ({"trees": (True,), "conv": ("widened",)},
     "in a widened line of inputs the conv windows of siblings would overlap"),
    ({"trees": (True,), "drafter": ("vanilla",)}, "no separate layer per branch"),
    ({"trees": (True,), "drafter": ("block",)}, "rows have no branches"),
    *(({"layout": (one,), "snapshot_layout": (other,), "strategy": NO_SNAPSHOTS},
       "only the strategy snapshot has a second pool of states")
      for one, other in (LAYOUTS, LAYOUTS[::-1])),
)  # fmt: skip
CONSTRAINED = tuple(name for name in FACTORS if any(name in told for told, _ in REFUSED))


def refusals(row: Row) -> list[str]:
    """Why a row is refused, or a part of a row; nothing: it is served."""
    return [why for told, why in REFUSED if all(row.get(name, told) in values for name, values in told.items())]


def whole(names: tuple[str, ...] = tuple(FACTORS)) -> Iterator[dict[str, Any]]:
    """Every row over these factors, refused ones among them."""
    return (dict(zip(names, values, strict=True)) for values in product(*(FACTORS[name] for name in names)))


def cells(row: Row, together: int = 2) -> Iterator[Group]:
    """The pairs of a row, or its groups of `together` cells, in the order of the factors."""
    return combinations(((name, row[name]) for name in FACTORS if name in row), together)


def array(together: int = 2) -> CoveringArray:
    """The rows that contain every pair (triple, ...) that the engine serves."""
    return CoveringArray(FACTORS, lambda row: "; ".join(refusals(row)), together, {"dtype": "float32"})


@cache
def pairwise() -> tuple[Row, ...]:
    """Few rows that contain every served pair."""
    rows, pairs = list[Row](), array()
    for row in pairs:
        rows.append(row)
        pairs.met(row)
    return tuple(rows)


def setting(row: Row, **more: Any) -> Setting:
    """The row as options."""
    known = {each.name for each in fields(Setting)}
    told = {name: value for name, value in row.items() if name in known}
    return Setting(**told, **PREFIXES[row.get("tracked", False)], **more)


def words(row: Row) -> str:
    """The row in a line."""
    return ", ".join(f"{name} {value}" for name, value in row.items())


ROOM = Room(slots=(3, 1), pages=(5, 2, 7, 1, 4, 6, 3, 8), page_size=4, max_tokens=16)
NODES = 4  # of a tree, the root among them
EVERY = 3  # tokens from one tracked prefix to the next
# A prompt's second chunk with a window, preempt and resume with tokens pending, a ragged round, a plain step.
POLICY = Policy(
    name="combination", claim="Two requests meet every kind of step.", capacity=ROOM, num_steps=2, accept=(1, 2, 0),
    arrivals=(Arrival("a", "few", chunks=(3, 2)), Arrival("b", "one")), plain=(3,), rounds=4,
    deeds=(ScheduledAction(2, "preempt", "b"), ScheduledAction(2, "resume", "b")),
)  # fmt: skip
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "full_attention_interval": 2, "intermediate_size": 24,
}


def mtp_layers(drafter: str) -> int:
    """That a model of this drafter has."""
    return POLICY.num_steps if drafter == "vanilla" else 1


def name_of(row: Row) -> str:
    """Name of the trace that a row replays. Rows that differ in other factors share it, and its reference run."""
    weights = "float16" if row["dtype"] == "float16" else "bfloat16"  # as stored: no wider than activations
    tracked = ("tracked",) * bool(row["tracked"])
    return "-".join((row["kind"], row["drafter"], "trees" if row["trees"] else "chains", *tracked, weights))


def trace(folder: Path, row: Row) -> Trace:
    """The trace of a row, with its checkpoint in `folder`."""
    name, told = name_of(row), POLICY
    model = write(folder / name, row["kind"], dtype=getattr(torch, name.rpartition("-")[2]), **SIZES,
                  mtp_num_hidden_layers=mtp_layers(row["drafter"]))  # fmt: skip
    if row["drafter"] == "block":
        write_block(model, dtype=getattr(torch, name.rpartition("-")[2]))
    if row["trees"]:
        told = replace(told, trees=(((0, 0, 1), (0, 1)),), capacity=replace(ROOM, num_draft_tokens=NODES))
    if row["tracked"]:
        # A third request continues from the prefix that the first one has reached in its second round.
        room = replace(told.capacity, track_interval=EVERY, slots=(3, 1, 2), pages=(*ROOM.pages, 9, 10, 11, 12))
        told = replace(told, capacity=room, arrivals=(*told.arrivals, Arrival("c", "few", arrive=1, max_new=2)))
    return make(model, PROMPTS, told, folder / f"{name}.jsonl", Setting(dtype="float64", drafter=row["drafter"]))
