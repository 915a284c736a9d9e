"""A toy engine core for tests of graphs: one round over a few ops with memory, on separate pools.

It has everything that goes wrong with graphs: slots, lengths, pages, padding and host numbers. Leaves out: a model.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place

D, VOCAB, TAPS, PAGE, SLOTS = 32, 64, 4, 4, 9
EMBEDDING, MIXED = Place("trunk", STAGE_LEVEL, "embedding"), Place("trunk", 0, "mixed")
HIDDEN, LOGITS = Place("trunk", 0, "hidden"), Place("trunk", AFTER_LAYERS, "logits")
PICK = Place("trunk", AFTER_LAYERS, "pick")


class Inputs(NamedTuple):
    """window [B, T]; slots, begin, count, forced [B]; fresh [B] bool."""

    window: Any
    slots: Any
    begin: Any
    count: Any  # type: ignore[assignment]
    forced: Any
    fresh: Any


class Outputs(NamedTuple):
    """hidden [B * T, D]; tokens [B, T]; before, bonus [B]."""

    hidden: torch.Tensor
    tokens: torch.Tensor
    before: torch.Tensor
    bonus: torch.Tensor


IDLE = Inputs(window=0, slots=-1, begin=0, count=0, forced=-1, fresh=False)


class World:
    """Weights and pools on a device; two worlds of one op set start with equal bits."""

    def __init__(self, ops: Ops, device: str) -> None:
        source = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=source).to(device)

        kinds = ops.types(torch.float32, torch.float32)
        self.device = device
        self.table, self.weight, self.head = normal(VOCAB, D), normal(D, TAPS), normal(VOCAB, D)
        self.conv = (normal(SLOTS, D, TAPS - 1) * 8).to(kinds.conv)
        self.kv = (normal(9 * SLOTS, PAGE, 1, D) * 8).to(kinds.kv)
        self.length = torch.arange(SLOTS, device=device) % 3
        self.pages = torch.arange(9 * SLOTS, device=device).view(SLOTS, 9)

    def pools(self) -> dict[str, torch.Tensor]:
        return {"conv": self.conv, "kv": self.kv, "length": self.length}

    def verify(self, ops: Ops, inputs: Inputs) -> Outputs:
        """Embed, convolve over the slots' windows, keep a row per position, pick, accept, advance."""
        requests, width = inputs.window.shape
        tokens = inputs.window.view(-1)
        placed = ops.place_rows(
            slots=inputs.slots, begin=inputs.begin, count=inputs.count, rows=len(tokens), length=self.length,
            table=self.pages, page_size=PAGE, shift=0,
        )
        x = ops.embed(tokens=tokens, table=self.table, to=EMBEDDING)
        here = Address(self.conv, inputs.slots)
        part = Part("window", inputs.begin, placed.count, width, here, inputs.fresh, store=here)
        mixed = ops.conv(x=x, weight=self.weight, parts=(part,), to=MIXED)
        hidden = ops.add(x=x, y=mixed, to=HIDDEN)
        ops.store_rows(rows=hidden.view(-1, 1, D), pool=self.kv, locations=placed.locations)
        picks = ops.pick(logits=ops.lm_head(x=hidden, weight=self.head, to=LOGITS), to=PICK)
        accepted = ops.accept(
            window=inputs.window, picks=picks.view(requests, width), count=inputs.count,
            forced_last=inputs.forced, forced_bonus=inputs.forced,
        )
        ops.advance(length=self.length, slots=inputs.slots, by=accepted.accept_lens)
        return Outputs(hidden, accepted.tokens, placed.before, accepted.bonus)

    def decode(self, ops: Ops, inputs: Inputs) -> Outputs:
        """The same inputs, another layout: nothing is drafted, every row advances by one and keeps no position."""
        x = ops.embed(tokens=inputs.window.view(-1), table=self.table, to=EMBEDDING)
        hidden = ops.add(x=x, y=x, to=HIDDEN)
        picks = ops.pick(logits=ops.lm_head(x=hidden, weight=self.head, to=LOGITS), to=PICK)
        ops.advance(length=self.length, slots=inputs.slots, by=inputs.count)
        bonus = ops.choose(own=picks, forced=inputs.forced)
        return Outputs(hidden, bonus.view(-1, 1), inputs.count, bonus)


def batch(slots: Sequence[int], width: int, seed: int = 0, forced: Sequence[int] | None = None) -> Inputs:
    """A window of `width` tokens for each slot, on the host."""
    requests = len(slots)
    window = torch.randint(1, VOCAB, (requests, width), generator=torch.Generator().manual_seed(seed))
    numbers = [list(slots), [b * width for b in range(requests)], [width] * requests, list(forced or [-1] * requests)]
    fresh = torch.zeros(requests, dtype=torch.bool)
    return Inputs(window, *(torch.tensor(n, dtype=torch.int64) for n in numbers), fresh)


def padded(inputs: Inputs, bucket: int) -> Inputs:
    """The same with idle rows up to the bucket."""
    return Inputs(*(
        torch.cat([x, x.new_full((bucket - len(x), *x.shape[1:]), value)])
        for x, value in zip(inputs, IDLE, strict=True)
    ))


def eagerly(body: Any, ops: Ops, inputs: Inputs, bucket: int, device: str = "cpu") -> Outputs:
    """The body without a graph, on the same padded bucket, its answer cut to the rows."""
    rows = len(inputs.slots)
    given = Inputs(*(x.to(device) for x in padded(inputs, bucket)))
    return Outputs(*(x[: rows * (len(x) // bucket)].clone() for x in body(ops, given)))


def differences(ours: Outputs, theirs: Outputs, left: World, right: World) -> list[str]:
    """Names of outputs and pools that are not equal bit by bit."""
    pairs = [*zip(Outputs._fields, ours, theirs, strict=True),
             *((name, pool, right.pools()[name]) for name, pool in left.pools().items())]
    return [name for name, x, y in pairs if x.shape != y.shape or not same_bits(x, y)]
