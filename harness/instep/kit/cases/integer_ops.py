"""Cases of the ops on whole numbers: place_rows, choose, advance, shift, and rows stored into pools by slot or page.

Leaves out: accept (`rows.py`) and KV rows in pages (`paged_kv.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .case import BF16, FP32, Call, Case, Draw, drawn_from
from .guarded_pools import guarded

INT64 = torch.int64
LENGTHS = (90, 7, 3, 5, 11)
TABLES = ((0, 0, 0, 0), (9, 8, 7, -1), (2, 3, -1, -1), (4, -1, -1, -1), (5, 6, 7, 1))


@dataclass(frozen=True)
class Placing:
    """For each request: slot, first row, number of rows; and the number of all rows."""

    slots: tuple[int, ...]
    begin: tuple[int, ...]
    count: tuple[int, ...]
    rows: int
    page_size: int = 4
    shift: int = 0


PLACINGS: dict[str, Placing] = {
    "decode": Placing((4, 1, 3), (0, 1, 2), (1, 1, 1), 3),
    "ragged": Placing((4, -1, 1, 2), (4, 0, 1, 7), (3, 2, 3, 1), 9),
    "idle": Placing((-1, 2, -1, -1), (0, 0, 9, 9), (2, 0, 5, 1), 12),
    "shifted": Placing((1, 2), (0, 4), (4, 4), 8, shift=-1),
    "past-the-table": Placing((4, 3), (0, 8), (8, 8), 16, shift=2),
    "pages-of-one": Placing((2, 4), (0, 2), (2, 2), 4, page_size=1, shift=-2),
    "many": Placing((1,) * 200, tuple(2 * b for b in range(200)), (1,) * 200, 400),
    "empty": Placing((), (), (), 0),
}


@drawn_from(0)
def place_rows_case(draw: Draw, placing: Placing) -> Call:
    pools = {"length": guarded((len(LENGTHS),), (1,), INT64, device=draw.device),
             "table": guarded((len(TABLES),), (4,), INT64, device=draw.device)}
    pools["length"].view.copy_(draw.ints(LENGTHS)[:, None])
    pools["table"].view.copy_(torch.tensor(TABLES))
    inputs = {
        "slots": draw.ints(placing.slots), "begin": draw.ints(placing.begin), "count": draw.ints(placing.count),
        "rows": placing.rows, "length": pools["length"].view[:, 0], "table": pools["table"].view,
        "page_size": placing.page_size, "shift": placing.shift,
    }
    return Call(inputs, pools)


@drawn_from(11)
def choose_case(draw: Draw, shape: tuple[int, ...]) -> Call:
    own, forced = (draw.uniform(*shape, low=-5, high=5).long() for _ in range(2))
    return Call({"own": own, "forced": forced}, {})


def choose_column(device: str) -> Call:
    """A column of a wider window: strides are the tensor's own."""
    window = Draw(12, device).uniform(5, 4, low=-5, high=5).long()
    return Call({"own": window[:, 1], "forced": window[:, 3]}, {})


@drawn_from(0)
def advance_case(draw: Draw, slots: Sequence[int], by: Sequence[int]) -> Call:
    pool = guarded((len(LENGTHS),), (1,), INT64, device=draw.device)
    pool.view.copy_(draw.ints(LENGTHS)[:, None])
    for slot in slots:
        if slot >= 0:
            pool.allow(slot)
    inputs = {"length": pool.view[:, 0], "slots": draw.ints(slots), "by": draw.ints(by)}
    return Call(inputs, {"length": pool})


@drawn_from(14)
def shift_case(draw: Draw, placing: Placing) -> Call:
    """Tokens at the rows of a placing. Idle requests have no rows here."""
    count = [many if slot >= 0 else 0 for slot, many in zip(placing.slots, placing.count, strict=True)]
    tokens, behind = (draw.uniform(n, low=1, high=99).long() for n in (placing.rows, len(count)))
    return Call(
        {"tokens": tokens, "begin": draw.ints(placing.begin), "count": draw.ints(count), "behind": behind}, {}
    )


@drawn_from(13)
def by_slot_case(
    draw: Draw, block: tuple[int, ...], positions: int, locations: Sequence[int], dtype: torch.dtype, swap: bool = False
) -> Call:
    """Rows [N, *block] into a pool [5, positions, *block]; `swap`: the block's last two axes exchanged in memory."""
    pool = guarded((5, positions), block or (1,), dtype, swap=swap, device=draw.device)
    for location in locations:
        if location >= 0:
            pool.allow(location // positions, location % positions)
    rows = draw.normal(len(locations), *block, scale=100.0).to(dtype)
    view = pool.view if block else pool.view[:, :, 0]
    return Call({"rows": rows, "pool": view, "locations": draw.ints(locations)}, {"pool": pool})


INDEX = [
    *(Case("place_rows", name, place_rows_case(placing), exact=True) for name, placing in PLACINGS.items()),
    Case("choose", "window", choose_case((3, 5)), exact=True),
    Case("choose", "row", choose_case((70,)), exact=True),
    Case("choose", "column", choose_column, exact=True),
    Case("choose", "empty", choose_case((0, 3)), exact=True),
    Case("advance", "skips", advance_case((3, -1, 1), (2, 9, 1)), exact=True),
    Case("advance", "idle", advance_case((-1, -1), (2, 9)), exact=True),
    Case("advance", "empty", advance_case((), ()), exact=True),
    *(Case("shift", name, shift_case(placing), exact=True) for name, placing in PLACINGS.items()),
    Case("store_rows", "mark-int64", by_slot_case((), 1, (3, -1, 1), INT64), exact=True),
    Case("store_rows", "wide-int64", by_slot_case((70,), 3, (3, 14, -1, 5), INT64), exact=True),
    Case("store_rows", "slot-fp32", by_slot_case((70,), 1, (-1, 4, 2), FP32), exact=True),
    Case("store_rows", "slot-bf16", by_slot_case((16,), 1, (-1, -1), BF16), exact=True),
    Case("store_rows", "column-major", by_slot_case((6, 16), 4, (17, 6), FP32, swap=True), exact=True),
]
