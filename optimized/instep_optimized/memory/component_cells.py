"""The table of components and movers: which function of each mover handles which component of a request's memory.

A mover is code that must handle every component: forget one, and a request continues from the wrong memory in it. Each
mover makes its cells from the list of the contract (`MEMORY`), by the form of a component, and iterates over them. So a
new component of a known form is moved by all of them, and a new form is refused until each mover handles it.
Leaves out: the functions, which are next to their movers (`component_table.py` collects them).

    copy      out of a request's memory and back: save, load, preempt, resume, inspection
    clear     poison what a request leaves, so that no later owner of the unit can take it for its own
    fork      the memory after a prefix of the tokens, for other requests that begin with it
    offload   to the host and back
    transfer  to another engine, with other ranks
    commit    the memory after the accepted node becomes the request's own
    padding   the address of an idle row of a graph, unit -1, at which an op reads zeros and writes nothing
    budget    the bytes that a component needs, for the memory budget
"""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from instep_reference.contract.answers import MEMORY_FACTS
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.recurrences import KEPT_BY

Mover = Literal["copy", "clear", "fork", "offload", "transfer", "commit", "padding", "budget"]
MOVERS: tuple[Mover, ...] = get_args(Mover)
Handler = TypeVar("Handler")


def cells(*, block: Handler, rows: Handler, last: Handler) -> dict[str, Handler]:
    """Return component -> the function of one mover that handles components of its form."""
    by_form = {"block": block, "rows": rows, "last": last}
    return {name: by_form[facts.form] for name, facts in MEMORY_FACTS.items() if facts.form in by_form}


def kept_by(config: ModelConfig) -> dict[str, str]:
    """Return component -> the part of the model that keeps it: every component of a request of this model."""
    found = {name: f"layer {layer} ({block})" for layer, blocks in reversed([*enumerate(config.layers)])
             for block in blocks for name in KEPT_BY.get(block, ())}  # fmt: skip
    parts = [("", "the attention layers", bool(config.attending)), ("draft_", "the draft head", config.mtp_layers > 0),
             ("block_", "the block drafter", config.block is not None)]  # fmt: skip
    found |= {f"{prefix}{name}": what for prefix, what, there in parts if there for name in ("keys", "values")}
    return found | ({"tail": "the draft head"} if config.mtp_layers > 1 else {})


def refuse_empty(table: Mapping[Mover, Mapping[str, object]], config: ModelConfig) -> None:
    """Refuse a model that keeps a component which a mover does not handle, before anything is allocated."""
    for name, keeper in kept_by(config).items():
        if name not in MEMORY_FACTS:
            raise Unsupported(f"{keeper} keeps {name!r}, which is no field of `RequestState` in the contract's "
                              f"answers.py; known: {', '.join(MEMORY_FACTS)}")  # fmt: skip
        missing = [mover for mover in MOVERS if table.get(mover, {}).get(name) is None]
        if missing:
            raise Unsupported(f"{keeper} of this model keeps {name!r}, and this engine does not move it on "
                              f"{', '.join(missing)}: fill the cell in optimized/instep_optimized/component_table.py, "
                              "or the request would continue without it")  # fmt: skip
