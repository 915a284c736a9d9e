"""The recurrence with a decay per key channel (KDA): decodes, re-runs before a verify of 4, and prompts.

A re-run is one launch: three pending tokens run again and settle in the slot, then four rows are kept in the ring. Rows
are fp32 in windows, and have the activations' dtype for a peer's prompts. The floor counts all that a launch must move:
states, rows, read-outs and ring entries. Decodes are judged as in `decode.py` and prompts as in `prefill.py`; a re-run
must have the bits of one-token launches.
Leaves out: norms, gates and conv before it, and the index ops of a round.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from instep.subject.declared_rounding import declared
from instep_optimized.memory_addresses import Address, Part, Ring, Updates
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.recurrences import RECURRENCES

from ..answer_check import Judged, first, same
from ..bench_types import REAL, TINY, TO, Arm, At, Cell, Ground, Kind, Size
from ..drawn_rows import STATE, like, off_from_plain, on, part, redrawn
from ..kernels_of_peers import arms as peers
from .prefill import Truth

ROW = next(row for row in RECURRENCES.values() if row.decay == "channel")
HEADS = {"tiny": 2, "default": 32, "full": 32}  # those of Kimi-Linear, of keys and of values
BATCHES = {"tiny": (2,), "default": (8, 64, 1), "full": (1, 2, 4, 8, 16, 32, 64, 128)}
PROMPTS = {"tiny": ((1, 70),), "default": ((1, 8192),), "full": ((1, 2048), (1, 8192), (8, 2048), (1, 32768))}
PENDING, WINDOW, SIZE = 3, 4, 8  # tokens that run again, rows of a verify, entries of a ring
PEER = {ROW.forms[1]: Product("bf16", block=64)}
Run = Callable[[torch.Tensor], torch.Tensor]  # from a pool, which it changes, to read-outs


def cells(ground: Ground, size: Size) -> Iterator[At]:
    for batch in BATCHES[size]:
        for form in ("rerun", "decode"):
            yield {"form": form, "batch": batch, "heads": HEADS[size]}
    for sequences, tokens in PROMPTS[size]:
        yield {"form": "prefill", "batch": sequences, "tokens": tokens, "heads": HEADS[size]}


def drawn(ground: Ground, rows: int, heads: int) -> GdnInputs:
    """Rows whose channels remember from one token to thousands."""
    _, keys, values = TINY if ground.tiny else REAL
    wide = partial(ground.drawn, dtype=torch.float32)
    q, k = (torch.nn.functional.normalize(wide(rows, heads, keys), dim=-1) for _ in range(2))
    return GdnInputs(q * keys**-0.5, k, wide(rows, heads, values), -(wide(rows, heads, keys) * 2 - 4).exp(),
                     wide(rows, heads).sigmoid())  # fmt: skip


def pool_of(ground: Ground, units: int, heads: int) -> torch.Tensor:
    _, keys, values = TINY if ground.tiny else REAL
    return ground.drawn(units, heads, values, keys, dtype=torch.float32).mul_(STATE).transpose(2, 3)


def make(ground: Ground, at: At) -> Cell:
    heads, batch, each = at["heads"], at["batch"], at.get("tokens", WINDOW if at["form"] == "rerun" else 1)
    rows, slots = drawn(ground, batch * each, heads), list(range(batch, 0, -1))
    state = 4.0 * batch * rows.k[0].numel() * rows.v.shape[2]
    least, most = (1, 4) if at["form"] == "prefill" else (2, 48)
    layers = ground.layers(state, least, most)
    pools = [pool_of(ground, batch + 1, heads) for _ in range(layers)]
    wide = sum(x.numel() for x in rows) * (ground.dtype.itemsize if at["form"] == "prefill" else 4.0)
    cell = Cell([], read=state + wide, written=state + rows.v.numel() * ground.dtype.itemsize,
                anew=lambda: redrawn(*pools))  # fmt: skip
    if at["form"] == "rerun":
        entry = 4.0 * batch * heads * (2 * rows.k.shape[2] + rows.v.shape[2])
        cell.read, cell.written = cell.read + PENDING * entry, cell.written + WINDOW * entry
    parts = [part(ground, "chunk" if at["form"] == "prefill" else "window", slots, each, pool) for pool in pools]
    truth = Truth(rows, parts[0], ROW)

    def judge(run: Run, products: Mapping[str, Product] = PEER) -> Judged | str:
        if at["form"] == "prefill":
            return truth.judge(run, products)
        return off_from_plain(run, rows, parts[0], row=ROW)

    for name, ops in ground.sets.items():
        if ops.recurrence(ROW) is None:
            cell.absent[name] = f"it has no recurrence {ROW.name}"
        elif at["form"] == "rerun":
            cell.arms.append(_Rerun.of(ground, ops, rows, parts).arm(name))
        else:
            said = declared(ops, ground.dtype, torch.float32).products
            cell.arms.append(_arm(name, ops, ground, rows, parts, partial(judge, products=said)))
    return peers(f"channel_decay {at['form']}", ground, at, cell, rows=rows, parts=parts, judge=judge)


def _arm(
    name: str, ops: Ops, ground: Ground, rows: GdnInputs, parts: list[Part], judge: Callable[[Run], Judged | str]
) -> Arm:
    core = partial(ops.recurrence(ROW), inputs=rows, dtype=ground.dtype, to=TO)
    return Arm(name, lambda: [core(parts=(one,)) for one in parts],
               lambda: judge(lambda pool: core(parts=(on(parts[0], pool),))), len(parts))  # fmt: skip


@dataclass(frozen=True)
class _Rerun:
    """Windows of every layer with the three tokens before them in the rings, as one launch left them."""

    ops: Ops
    rows: GdnInputs
    parts: list[Part]
    ahead: GdnInputs
    dtype: torch.dtype

    @classmethod
    def of(cls, ground: Ground, ops: Ops, rows: GdnInputs, parts: list[Part]) -> "_Rerun":
        if ops.keeps != "update":
            raise Unsupported("its rings keep no updates")
        batch, (heads, keys), values = len(parts[0].begin), rows.k.shape[1:], rows.v.shape[2]
        wide = partial(torch.zeros, dtype=torch.float32, device=ground.device)
        ahead = drawn(ground, batch * PENDING, heads)
        made, units, zero = [], parts[0].read.units, torch.zeros_like(parts[0].begin)
        for one in parts:
            kept = Updates(*(wide(batch + 1, SIZE, heads, width) for width in (keys, keys, values)))
            none = Ring(kept, units, zero, zero, zero)
            fill = part(ground, "window", [0] * batch, PENDING, one.read.pool)
            fill = Part("window", fill.begin, fill.count, PENDING, one.read, one.fresh, ring=none)
            ops.recurrence(ROW)(inputs=ahead, parts=(fill,), dtype=ground.dtype, to=TO)
            ring = Ring(kept, units, zero, torch.full_like(zero, PENDING), torch.full_like(zero, PENDING))
            made.append(Part("window", one.begin, one.count, WINDOW, one.read, one.fresh, ring=ring,
                             settled=one.read))  # fmt: skip
        return cls(ops, rows, made, ahead, ground.dtype)

    def arm(self, name: str) -> Arm:
        core = partial(self.ops.recurrence(ROW), inputs=self.rows, dtype=self.dtype, to=TO)
        return Arm(f"{name} rerun", lambda: [core(parts=(one,)) for one in self.parts], self.check, len(self.parts))

    def check(self) -> str:
        """The settled states and all read-outs have the bits of one-token launches from the same states."""
        (one, *_), op = self.parts, partial(self.ops.recurrence(ROW), dtype=self.dtype, to=TO)
        own, alone = (like(one.read.pool, torch.float32) for _ in range(2))
        # The ring's tokens continue the states that the pool had when they were kept. Keep them again, from these.
        here, zero = Address(own, one.read.units), torch.zeros_like(one.begin)
        assert one.ring is not None
        kept = Ring(one.ring.kept, one.ring.units, zero, zero, zero)
        counts = torch.full_like(one.count, PENDING)
        fill = Part("window", zero + torch.arange(len(zero), device=zero.device) * PENDING, counts, PENDING, here,
                    one.fresh, ring=kept)  # fmt: skip
        op(inputs=self.ahead, parts=(fill,))
        form = Part("window", one.begin, one.count, WINDOW, here, one.fresh, ring=one.ring, settled=here)
        core, cores = op(inputs=self.rows, parts=(form,)), []
        for rows, each in ((self.ahead, PENDING), (self.rows, WINDOW)):
            for token in range(each):
                given = GdnInputs(*(x[token::each].contiguous() for x in rows))
                single = Part("window", torch.arange(len(zero), device=zero.device), zero + 1, 1,
                              Address(alone, one.read.units), one.fresh, Address(alone, one.read.units))  # fmt: skip
                cores.append(op(inputs=given, parts=(single,)))
            if each == PENDING:
                said = same("the settled states", own, alone)
        return first(said, same("the read-outs", core, torch.stack(cores[PENDING:], 1).flatten(0, 1)))


KIND = Kind("a layer", cells, make, bar="fla chunked")
