"""Paged attention for prefill chunks, verify windows, trees and decode: which kernels run, and how work is divided.

The positions of a prefill chunk are not split. Leaves out: the kernels (`prefill_chunks.py`, `split_kv.py`,
`tree_node_parts.py`; with explicit layouts `prefill_chunks_gluon.py` over 16 bits a number, `split_kv_gluon.py` over
16 or 8).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place

from ...memory_addresses import Pages
from ...ops.fused import fuses
from ..device.pool_address import Pool, Rows
from ..rowwise.pointwise import output_gate
from ..runtime import INTERPRETED, ceil_div, explicit, launch, multiprocessors, power_of_2, tile
from .online_softmax import Paged, Sizes
from .prefill_chunks import read_chunk
from .split_kv import join_parts, read_parts
from .tree_node_parts import read_alone

staged, chunks, prompts, windows = map(
    explicit,
    (
        f"attention.{name}_gluon"
        for name in ("warp_specialized_steps", "prefill_chunks", "prefill_tile_schedule", "split_kv")
    ),
)

SMALLEST_DOT, LOG2_E = 16, 1.4426950408889634
LISTED = 32  # requests, at least: fewer do not make another compiled kernel
RESIDENT = tile(8, 1)  # programs per multiprocessor that walk the list of parts; fewer run at a time
SCRATCH = 2**28  # bytes of what is not joined yet, if one tile of rows fits; more rows wait for their turn


class Division(NamedTuple):
    """Tuning constants: how the positions of a request are divided among programs.

    window  maximum number of rows of a request that is read in parts (every tree is read in parts)
    part    positions of a part: fixed, so that a row's bits do not depend on how the work is divided
    group   number of parts that are joined into a group; the groups are joined afterwards
    few     maximum number of items of one part for which each part is stored alone; above it a program joins its
            parts and stores groups
    """

    window: int
    part: int
    group: int
    few: int


COMPILED = Division(16, 128, 8, 264)
WINDOW, PART, GROUP, FEW = Division(12, 32, 2, 16) if INTERPRETED else COMPILED


class Unjoined(NamedTuple):
    """Size of the scratch memory for partial results that are not joined yet.

    few: parts over all requests, if each is stored alone; most: parts of one request; room: units of all requests;
    at_once: rows of each request that are processed together.
    """

    few: int
    most: int
    room: int
    at_once: int

    def bytes(self, heads: int, width: int) -> int:
        return 4 * self.room * self.at_once * heads * (width + 2)


def unjoined(
    requests: int, mapped: int, pooled: int, most: int, tokens: int, heads: int, kv_heads: int, width: int,
    of: Division, trees: bool = False,
) -> Unjoined:
    """Compute the scratch size for `most` rows of each request, in tiles of `tokens`.

    mapped: positions that a request may have;  pooled: positions of the pool. No two requests share a page. So together
    they have at most as many whole units as the pool, plus one broken unit each. A tree gets one unit more, because its
    paths may reach into it.
    """

    def units(positions: int) -> int:
        return min(requests * ceil_div(mapped, positions), ceil_div(pooled, positions) + (1 + trees) * requests)

    few = min(of.few // (kv_heads * ceil_div(most, tokens)), units(of.part))
    room = max(few, units(of.part * of.group))
    row = 4 * heads * (width + 2)  # bytes of one row's parts
    at_once = max(SCRATCH // max(room * row, 1) // tokens, 1) * tokens
    return Unjoined(few, ceil_div(mapped, of.part), room, min(most, at_once))


def sides_of(requests: int, mapped: int, pooled: int, tiles: int, group: int, places: int) -> int:
    """Number of row tiles that a program reads together: one if all tiles can run at a time, else two.

    Two tiles share the copied keys and values, but a program with two takes longer. The estimate assumes that a request
    fills the positions that it may have. It ignores a group that a request has only begun, because that costs little.
    mapped, pooled: as in `unjoined`;  tiles: tiles of a request times its KV heads;  group: positions of a group;
    places: programs that run at a time
    """
    groups = min(requests * max(mapped // group, 1), pooled // group + requests)
    return 1 if groups * tiles <= places else 2


class Shape(NamedTuple):
    """queries: rows (tokens times grouped heads) of a tile; positions: of a step."""

    queries: int
    positions: int
    warps: int
    stages: int
    registers: int | None = None


class Join(NamedTuple):
    """Launch shape of the joining kernel.

    rows: rows of a program; alone: groups of parts that are loaded together; pieces: number of programs that share a
    row.
    """

    rows: int
    warps: int
    alone: int
    pieces: int


FEWEST, JOINS = 64, 264  # maximum number of rows for which there are registers for more loads in flight
FEWEST_JOINED = Join(tile(1, 128), 4, tile(5, 1), tile(2, 1))  # for trees the compiler loads the parts one by one
FEW_JOINED = Join(tile(1, 128), 4, tile(3, 1), 1)
MANY_JOINED = Join(tile(1, 128), 1, 1, 1)  # one warp: LOG.md

# By the bytes of an element; other sizes use the last entry.
CHUNK = {2: Shape(128, 64, 8, 2), 4: Shape(16, 32, 8, 2)}
PARTS = {2: Shape(16, 64, 4, 2), 4: Shape(16, 32, 8, 2)}
SMALL = Shape(16, 16, 4, 1)  # interpreted
TREES_FROM = 2  # requests: a single tree is read faster without explicit layouts, with one launch fewer
# Kernels with explicit layouts, whose tiles are those above: stages, registers of a thread that reads (for parts: of a
# thread that sums values), registers of a thread that copies.
CHUNK_STAGED, PARTS_STAGED, WIDENED_PARTS = (2, 232, 40), (2, 168, 40), (2, 248, 40)


def shape_of(shapes: dict[int, Shape], query: torch.Tensor) -> Shape:
    """The tiles for these rows."""
    return SMALL if INTERPRETED else shapes.get(query.element_size(), shapes[4])


def attend(*, query: torch.Tensor, pages: Pages, to: Place) -> torch.Tensor:
    """Implement `Attend`: row j of request b sees positions 0 .. before[b] + j of its pages, or its ancestors.

    Scores and sums are fp32. The products of fp32 inputs are fp32 too (`ieee`). Probabilities are cast to the dtype of
    the values, relative to the largest score of the part (of all positions so far, in a prefill chunk).

    The bits of a row of a window or of a tree depend only on its query, its position, and the keys and values up to
    that position. So decode and verify agree, and a path of a tree equals the same chain. A row of a request with more
    than WINDOW rows in one launch differs from these in the last bits; `invariant/attend.py` makes them equal.
    """
    return read(query, pages, shape_of(CHUNK, query), shape_of(PARTS, query), PART, alone=False)


@fuses(attend=attend, output_gate=output_gate)
def gated_attend(
    *, query: torch.Tensor, pages: Pages, projected: torch.Tensor, to: tuple[Place, Place]
) -> torch.Tensor:
    """Implement `GatedAttend`: the joining kernel also applies the gate. Rows of long requests have no parts."""
    if pages.most > WINDOW or not pages.most:
        return output_gate(attended=attend(query=query, pages=pages, to=to[0]), projected=projected, to=to[1])
    opened = torch.empty_like(query, memory_format=torch.contiguous_format)
    Call.of(query, pages, opened).in_parts(shape_of(PARTS, query), PART, projected[:, :, 1])
    return opened


def read(
    query: torch.Tensor, pages: Pages, chunk: Shape, parts: Shape, part: int, *, alone: bool, channels: int = 0
) -> torch.Tensor:
    """Run attention with parts of `part` positions. alone: prefill chunks join parts too, which gives the same bits.

    channels: of a key, which scale its scores, if zeros follow them; 0: all channels
    """
    if not pages.most:
        return torch.zeros_like(query, memory_format=torch.contiguous_format)
    attended = torch.empty_like(query, memory_format=torch.contiguous_format)
    call = Call.of(query, pages, attended, channels)
    if pages.most <= WINDOW or not call.whole(chunk, part if alone else 0):
        call.in_parts(parts, part)
    return attended


def height(shape: Shape, group: int) -> tuple[int, int]:
    """Return (rows, tokens) of a tile for `group` query heads per KV head."""
    rows = max(shape.queries, power_of_2(group))
    return rows, rows // group


def scratch(
    config: ModelConfig, element: int, requests: int, positions: int, page_size: int, nodes: int,
    of: Division = COMPILED,
) -> int:
    """Maximum number of scratch bytes for partial results, over requests that fill pools of just their positions.

    element: bytes of an activation;  nodes: of the largest window. Layers run one at a time and share the scratch
    memory.
    """
    mapped, heads, most = ceil_div(positions, page_size) * page_size, config.heads, max(of.window, nodes)
    _, tokens = height(PARTS.get(element, PARTS[4]), heads // config.kv_heads)

    def taken(rows: int) -> int:
        found = unjoined(requests, mapped, requests * mapped + page_size, rows, tokens, heads, config.kv_heads,
                         config.head_dim, of)  # fmt: skip
        least = SCRATCH if found.at_once < rows else 0  # rows wait: fewer requests may still use all of SCRATCH
        return max(found.bytes(heads, config.head_dim), least)

    return max(taken(rows) for rows in range(1, most + 1))


class Call(NamedTuple):
    """Arguments that all kernels of one attention call share.

    pools: keys and values
    """

    query: torch.Tensor
    pages: Pages
    queries: Rows
    pools: tuple[Pool, Pool]
    paged: Paged
    sizes: Sizes
    attended: Rows
    constants: dict[str, Any]

    @classmethod
    def of(cls, query: torch.Tensor, pages: Pages, attended: torch.Tensor, channels: int = 0) -> Call:
        assert query.stride(2) == pages.keys.stride(3) == pages.values.stride(3) == 1, "heads are contiguous"
        width, page_size = query.shape[2], pages.keys.shape[1]
        seen = (None,) * 3 if pages.ancestors is None else (pages.ancestors, pages.ancestors.stride(0), pages.nodes)
        paged = Paged._make((pages.table, *pages.table.stride(), pages.table.shape[1] * page_size, pages.slots,
                             pages.begin, pages.count, pages.before, *seen, WINDOW))  # fmt: skip
        pools = Pool.of(pages.keys, pages.key_scales), Pool.of(pages.values, pages.value_scales)
        kv_heads = pages.keys.shape[2]
        sizes = Sizes(query.shape[1] // kv_heads, width, (channels or width) ** -0.5 * LOG2_E, kv_heads)
        constants = {"DT": max(power_of_2(width), SMALLEST_DOT), "PAGE": page_size, "WIDEN": INTERPRETED}
        return cls(query, pages, Rows.of(query), pools, paged, sizes, Rows.of(attended), constants)

    def height(self, shape: Shape) -> tuple[int, int]:
        """(rows, tokens) of a tile."""
        return height(shape, self.sizes.group)

    def staged(self, rows: int, shape: Shape, of: tuple[int, int, int]) -> Any:
        """Return `warp_specialized_steps_gluon.fitted` of such tiles; false if explicit layouts do not apply."""
        same = staged is not None and rows == shape.queries
        return same and staged.fitted(self.query, self.pages, rows, shape.positions, *of)

    def whole(self, shape: Shape, part: int) -> bool:
        """Read requests with many rows, one program per row tile over all positions  ->  whether no rows are left."""
        rows, tokens = self.height(shape)
        pages = self.pages
        if not part and pages.key_scales is None and (fit := self.staged(rows, shape, CHUNK_STAGED)):
            return self._whole_staged(fit, tokens)
        launch(
            read_chunk, (self.sizes.kv_heads, ceil_div(pages.most, tokens), pages.begin.numel()),
            self.queries, *self.pools, self.paged, self.sizes, self.attended, tokens,
            MT=rows, NT=shape.positions, PT=part, GROUP=GROUP, ORDERED=part > 0 and INTERPRETED,
            warps=shape.warps, stages=shape.stages, registers=shape.registers, **self.constants,
        )  # fmt: skip
        return False

    def _whole_staged(self, fit: tuple[Any, dict[str, int]], tokens: int) -> bool:
        """Do the work of `whole` with persistent programs. If few would run, tiles have half as many rows.

        Then every program has at least one tile. If the host knows that a single request has all rows, no rows are
        read in parts, so the kernel for parts is not launched.
        """
        pages, (pools, constants) = self.pages, fit  # the last two of `pools` are None: there are no scales
        requests, kv_heads, places = pages.begin.numel(), self.sizes.kv_heads, multiprocessors(self.query.device)
        tiles = kv_heads * ceil_div(pages.most, tokens) * requests
        sides = 1 if tokens > 1 and tiles <= places else 2
        if sides == 1:
            constants = constants | {"MT": constants["MT"] // 2}
            tokens //= 2
            tiles = kv_heads * ceil_div(pages.most, tokens) * requests
        alone = requests == 1 and pages.ancestors is None and pages.full
        launch(
            chunks.read_chunk_staged, (min(places, tiles),), self.queries, *pools[:2],
            *map(prompts.few_boxes, (pages.keys, pages.values)), self.paged, self.sizes.scale, self.attended,
            requests, len(self.query), self.sizes.group, kv_heads, tokens, BT=max(power_of_2(requests), LISTED),
            SIDES=sides, ALONE=alone, **constants,
        )  # fmt: skip
        return alone

    def in_parts(self, shape: Shape, part: int, gate: torch.Tensor | None = None) -> None:
        """Read requests of few rows, and trees: parts of their positions, then the parts joined in order.

        gate [N, heads, width]: opens the rows as they are joined
        """
        pages, (heads, width) = self.pages, self.query.shape[1:]
        requests, kv_heads, most = pages.begin.numel(), pages.keys.shape[2], min(pages.most, max(WINDOW, pages.nodes))
        rows, tokens = self.height(shape)
        (pooled, size), mapped = pages.keys.shape[:2], pages.table.shape[1]
        trees = pages.ancestors is not None
        few, most_parts, room, at_once = unjoined(
            requests, mapped * size, pooled * size, most, tokens, heads, kv_heads, width,
            Division(WINDOW, part, GROUP, FEW), trees)
        means = self.query.new_empty((room, at_once, heads, width), dtype=torch.float32)
        sums = self.query.new_empty((room, at_once, heads, 2), dtype=torch.float32)
        listed, places, sides = max(power_of_2(requests), LISTED), multiprocessors(self.query.device), 1
        form = PARTS_STAGED if pages.key_scales is None else WIDENED_PARTS
        few_trees = trees and requests < TREES_FROM
        fit = listed <= 128 and not few_trees and self.staged(rows, shape, form)
        tiles = ceil_div(at_once, 1 if trees and not fit else tokens)
        if fit:
            sides = min(tiles, sides_of(
                requests, mapped * size, pooled * size, kv_heads * tiles, part * GROUP, places))  # fmt: skip
            if sides == 1:  # warps that sum one tile need no more registers over 8 bits than over 16
                fit = fit[0], fit[1] | {"REGISTERS": PARTS_STAGED[1]}
        items = requests * most_parts * kv_heads * ceil_div(tiles, sides)
        programs = max(min(places * (1 if fit else RESIDENT), items), 1)
        opened = None if gate is None else Rows.of(gate)
        for skipped in range(0, most, at_once):
            counts = means, sums, at_once, skipped, few, room, requests
            if fit:
                launch(
                    windows.read_parts_staged, (programs,),
                    self.queries, *fit[0], self.paged, self.sizes.scale, *counts, self.sizes.group, kv_heads, tokens,
                    PT=part, GROUP=GROUP, BT=listed, SIDES=sides, **fit[1],
                )  # fmt: skip
            if trees or not fit:  # in addition to explicit layouts: the part that each tree node sees alone
                launch(
                    *((read_alone, (at_once, kv_heads, requests)) if fit else (read_parts, (programs,))),
                    self.queries, *self.pools, self.paged, self.sizes, *counts, tokens,
                    MT=rows, NT=shape.positions, PT=part, GROUP=GROUP, BT=listed, ORDERED=INTERPRETED,
                    warps=shape.warps, stages=shape.stages, registers=shape.registers, **self.constants,
                )  # fmt: skip
            joined = at_once * heads * requests
            join = FEW_JOINED if joined <= JOINS else MANY_JOINED
            join = FEWEST_JOINED if joined <= FEWEST and not trees else join
            blocks = max(requests * ceil_div(at_once * heads, join.rows) * join.pieces, 1)
            launch(
                join_parts, (blocks,),
                self.attended, opened, means, sums, self.paged,
                at_once, skipped, few, room, requests, heads, width, self.query.shape[0],
                RT=join.rows, DT=self.constants["DT"], PT=part, GROUP=GROUP, BT=listed, ALONE=join.alone,
                CT=self.constants["DT"] // join.pieces, warps=join.warps,
            )  # fmt: skip
