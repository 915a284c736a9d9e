"""The conv by words of four channels or two: it gives the bits of the kernel that it takes over from.

Leaves out: what the right numbers are (`test_kernels.py`).
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from instep.kit.cases.case import Draw
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.kernels.convs import bf16_short_windows as words_file
from instep_optimized.kernels.convs import causal_conv as conv_file
from instep_optimized.kernels.convs.bf16_short_windows import Shape
from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_reference.contract.place_names import Place
from support.running.covering import each_value, few
from support.running.recorded_calls import calls_of

DEVICES = ["cpu" if INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)]
CHANNELS, REQUESTS, MOST = max(2 * words_file.CHANNELS, words_file.WIDEST), 11, 4
USED = [shape for known in words_file.SHAPES.values() for _, shape in known]
SHAPES = [*dict.fromkeys((Shape(2), Shape(4), *USED))]  # words of both sizes, and whatever is tuned


BATCHES: dict[str, dict[str, Any]] = {
    "live": {}, "columns": {"columns": True}, "not stored": {"stored": False}, "decodes": {"wide": 1},
    "wide": {"wide": 7}, "rows kept": {"kept": True}, "of decodes": {"kept": True, "stored": False, "wide": 1},
    "wide columns": {"columns": True, "wide": 7},
}  # fmt: skip


def named(value: Shape | str) -> str:
    return value if isinstance(value, str) else f"{value.numbers} of {value.channels}"


def rows(shapes: list[Shape], *names: str) -> Any:
    """Pairs of shapes and batches: interpreted, each one occurs in a row; on a GPU every pair does."""
    pairs = each_value(shapes, names) if INTERPRETED else list(product(shapes, names))
    return pytest.mark.parametrize(("shape", "name"), pairs, ids=named, indirect=["shape"])


@pytest.fixture(params=SHAPES, ids=named)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shape:
    """The launches, from the largest number of requests on."""
    found: Shape = request.param
    table = {several: ((known[-1][0], found),) for several, known in words_file.SHAPES.items()}
    monkeypatch.setattr(words_file, "SHAPES", table)
    return found


def batch(
    device: str, *, columns: bool = False, stored: bool = True, wide: int = MOST, step: int = 3, kept: bool = False
) -> dict[str, Any]:
    """Windows of 0 to 4 rows at every slot, between unowned rows. Some requests are fresh, some have no unit.

    kept: the window after every row is kept, for some requests
    """
    draw, numbers = Draw(11, device), range(REQUESTS)
    units = torch.tensor([REQUESTS - n if n % 6 else -1 for n in numbers], device=device)
    count = torch.tensor([n % (wide + 1) for n in numbers], device=device)
    begin = torch.tensor([(n * 5 + 3) % REQUESTS * (wide + 1) + 1 for n in numbers], device=device)
    fresh = torch.tensor([n % 4 == 1 for n in numbers], device=device)
    shape = (REQUESTS + 1, *((2,) if columns else ()), CHANNELS, step)
    pool = draw.normal(*shape, dtype=torch.bfloat16)
    column = torch.tensor([n % 2 for n in numbers], device=device) if columns else None
    read = Address(pool, units, column)
    store = Address(pool, units, None if column is None else 1 - column) if stored else None
    aside = draw.normal(REQUESTS, wide + 1, CHANNELS, step, dtype=torch.bfloat16)
    each = Address(aside, torch.tensor([n if n % 5 else -1 for n in numbers], device=device)) if kept else None
    return {
        "x": draw.normal(REQUESTS * (wide + 1) + 2, CHANNELS, dtype=torch.bfloat16),
        "weight": draw.normal(CHANNELS, step + 1, dtype=torch.bfloat16, scale=0.5),
        "parts": (Part("window", begin, count, wide, read, fresh, store, each),), "to": Place("trunk", 0, "mixed"),
    }  # fmt: skip


def copied(pool: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also where they leave something between units."""
    span = 1 + sum((size - 1) * step for size, step in zip(pool.shape, pool.stride(), strict=True))
    return pool.new_zeros(span).as_strided(pool.shape, pool.stride()).copy_(pool)


def anew(part: Part) -> tuple[Part, tuple[torch.Tensor, ...]]:
    """The part over copies of its memory, and these: the pool, and the windows that are kept after rows, if any."""
    pool, aside = copied(part.read.pool), part.per_row and replace(part.per_row, pool=part.per_row.pool.clone())
    store = part.store and replace(part.store, pool=pool)
    own = replace(part, read=replace(part.read, pool=pool), store=store, per_row=aside)
    return own, (pool,) if aside is None else (pool, aside.pool)


def run(given: dict[str, Any], ops: Ops | None = None) -> tuple[torch.Tensor, ...]:
    """The result, the pool after it, and the windows that were kept after rows, if any."""
    own, memory = anew(*given["parts"])
    return (ops or TRITON).conv(**{**given, "parts": (own,)}), *memory


def consumed(
    given: dict[str, Any], head: int = words_file.CHANNELS // (4 if INTERPRETED else 8)
) -> tuple[torch.Tensor, ...]:
    """The inputs of the delta rule, and memory as `run` returns it. The heads of a program are of several kinds."""
    draw = Draw(12, str(given["x"].device))
    keys = min(3, CHANNELS // head // 2 - 1)
    values = CHANNELS // head - 2 * keys
    own, memory = anew(*given["parts"])
    found = TRITON.conv_inputs(
        x=given["x"], weight=given["weight"], parts=(own,), key_heads=keys, key_dim=head,
        a=draw.normal(len(given["x"]), values), b=draw.normal(len(given["x"]), values), A_log=draw.normal(values),
        dt_bias=draw.normal(values), to=(given["to"],) * 6,
    )  # fmt: skip
    return *found, *memory


def of_first(part: Part, count: int) -> Part:
    """The part of this many requests."""
    cut = {name: getattr(part, name)[:count] for name in ("begin", "count", "fresh")}
    held = {name: replace(one, units=one.units[:count]) for name in ("read", "store") if (one := getattr(part, name))}
    return replace(part, **cut, **held)


def apart(pool: torch.Tensor) -> torch.Tensor:
    """The same units, with one number between them."""
    wider = pool.new_zeros(len(pool), pool[0].numel() + 1)
    wider[:, 1:] = pool.flatten(1)
    return wider[:, 1:].unflatten(1, pool.shape[1:])


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts that are served by words, as they come."""
    return calls_of(monkeypatch, conv_file, "walk_words", key=lambda *given, **_: given[2])


@few(3)
@pytest.mark.parametrize("device", DEVICES)
@rows(SHAPES, "live", "columns", "not stored", "decodes", "wide", "rows kept", "of decodes")
def test_words_give_the_bits_of_the_walk(monkeypatch: pytest.MonkeyPatch, shape: Shape, device: str, name: str) -> None:
    one = batch(device, **BATCHES[name])
    seen = counted(monkeypatch)
    found = run(one)
    assert len(seen) == 1
    monkeypatch.setattr(conv_file, "words_fit", lambda *_: False)
    right = run(one)
    assert len(seen) == 1 and all(map(same_bits, found, right))
    assert all(map(same_bits, found[1:], run(one, PLAIN)[1:]))
    (part,) = one["parts"]
    spans = zip(part.begin.tolist(), part.count.tolist(), part.read.units.tolist(), strict=True)
    covered = {first + t for first, rows, unit in spans for t in range(rows) if unit >= 0}
    assert {row for row in range(len(found[0])) if found[0][row].any()} == covered
    changed = bool((found[1] != part.read.pool).any())
    assert changed is (part.store is not None)
    if part.per_row is not None:  # each row's window of the requested requests, and of no others
        written = (found[2] != part.per_row.pool).flatten(2).any(2)
        counts = [rows * (unit >= 0) for rows, unit in zip(part.count.tolist(), part.read.units.tolist(), strict=True)]
        asked = [(unit, t) for unit, rows in zip(part.per_row.units.tolist(), counts, strict=True) for t in range(rows)]
        assert {tuple(at) for at in written.nonzero().tolist()} == {(unit, t) for unit, t in asked if unit >= 0}


@few(2)
@pytest.mark.parametrize("device", DEVICES)
@rows(SHAPES[::-1], "live", "decodes", "wide columns", "rows kept", "of decodes")  # in the other order: other pairs
def test_inputs_of_the_rule_have_the_bits_of_the_walk(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, device: str, name: str
) -> None:
    """Memory is NaN before, so that unowned rows are visible."""
    one, seen = batch(device, **BATCHES[name]), counted(monkeypatch)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = consumed(one)
        assert len(seen) == 1
        monkeypatch.setattr(conv_file, "words_fit", lambda *_: False)
        right = consumed(one)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(seen) == 1 and all(map(same_bits, found, right))
    assert all(x.isfinite().all() and x.any() for x in found[:5])


@few(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", ["one", "many"])
def test_the_shortest_heads_and_long_ones_have_the_bits_of_the_walk(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, device: str, words: str
) -> None:
    one, seen = batch(device, wide=1), counted(monkeypatch)
    head = shape.numbers if words == "one" else min(words_file.CHANNELS // 2, shape.channels)
    found = consumed(one, head)
    assert len(seen) == 1
    monkeypatch.setattr(conv_file, "words_fit", lambda *_: False)
    assert all(map(same_bits, found, consumed(one, head))) and len(seen) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", [
    "few requests", "no requests", "no decodes", "fp32", "width 3", "a row kept, turned", "half a tile", "an odd step",
    "an odd number on", "taps apart", "taps half a word on", "turned", "windows in fp32", "units an odd step apart",
    "trees",
])  # fmt: skip
def test_unsupported_shape_uses_another_kernel(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, device: str, what: str
) -> None:
    one = batch(device, step=2 if what == "width 3" else 3, wide=1 if what == "no decodes" else MOST)
    (part,) = one["parts"]
    if what in ("few requests", "no requests", "no decodes"):
        ((least, _),) = words_file.SHAPES[True]
        one["parts"] = (of_first(part, least - 1 if what == "few requests" else 0),)
    elif what == "fp32":
        wide = {name: replace(part.read, pool=part.read.pool.float()) for name in ("read", "store")}
        one |= {"x": one["x"].float(), "parts": (replace(part, **wide),)}
    elif what == "a row kept, turned":
        each = Address(part.read.pool.new_zeros(REQUESTS + 1, MOST, 3, CHANNELS).mT, part.read.units)
        one["parts"] = (replace(part, per_row=each),)
    elif what == "half a tile":
        cut = {name: replace(part.read, pool=part.read.pool[:, : CHANNELS - 4]) for name in ("read", "store")}
        one |= {"x": one["x"][:, :-4], "weight": one["weight"][:-4], "parts": (replace(part, **cut),)}
    elif what == "an odd step":
        one["x"] = torch.cat([one["x"], one["x"][:, :1]], 1)[:, :-1]
    elif what == "an odd number on":
        one["x"] = torch.cat([one["x"][:, :4], one["x"]], 1)[:, 3:-1]
    elif what == "taps apart":
        one["weight"] = torch.cat([one["weight"], one["weight"]], 1)[:, :4]
    elif what == "taps half a word on":
        flat = one["weight"].flatten()
        one["weight"] = torch.cat([flat[:2], flat])[2:].view_as(one["weight"])
    elif what in ("windows in fp32", "units an odd step apart"):
        pool = part.read.pool.float() if what == "windows in fp32" else apart(part.read.pool)
        one["parts"] = (replace(part, **{name: replace(part.read, pool=pool) for name in ("read", "store")}),)
    elif what == "trees":
        roots = torch.full((len(one["x"]),), -1, device=device)
        one["parts"] = (replace(part, store=None, parents=roots),)
    elif what == "turned":
        turned = part.read.pool.transpose(1, 2).contiguous().transpose(1, 2)
        one["parts"] = (replace(part, **{name: replace(part.read, pool=turned) for name in ("read", "store")}),)
    seen = counted(monkeypatch)
    found = run(one)
    assert not seen and not (what.startswith("no ") and found[0].any())


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_begin_at_every_other_number_have_words_of_two_alone(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, device: str
) -> None:
    one, seen = batch(device), counted(monkeypatch)
    one["x"] = torch.cat([one["x"], one["x"][:, :2]], 1)[:, :-2]
    found = run(one)
    assert len(seen) == (shape.numbers == 2)
    monkeypatch.setattr(conv_file, "words_fit", lambda *_: False)
    assert all(map(same_bits, found, run(one)))


@few(1)
@pytest.mark.parametrize("device", DEVICES)
def test_head_that_is_no_whole_word_uses_another_kernel(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, device: str
) -> None:
    one, seen = batch(device, wide=1), counted(monkeypatch)
    assert all(x.isfinite().all() for x in consumed(one, head=shape.numbers // 2)) and not seen


@pytest.mark.parametrize(("requests", "numbers"), [(1, None), (2, 2), (31, 2), (32, 4)])
def test_number_of_windows_decides_the_words(requests: int, numbers: int | None) -> None:
    (part,) = batch("cpu")["parts"]
    found = words_file.shape_for(replace(part, begin=torch.zeros(requests, dtype=torch.int64)), CHANNELS)
    assert (found and found.numbers) == numbers


def test_channels_that_are_no_whole_wide_programs_have_narrow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = batch("cpu")["parts"]
    monkeypatch.setattr(words_file, "SHAPES", {True: ((1, Shape(4, 4 * words_file.CHANNELS)),)})
    found = [words_file.shape_for(part, of * words_file.CHANNELS) for of in (8, 6)]
    assert found == [Shape(4, 4 * words_file.CHANNELS), Shape(4)]
