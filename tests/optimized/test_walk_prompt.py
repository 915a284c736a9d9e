"""The conv of prompts by words: it has the bits of the kernel that it replaces, and reads no unowned memory.

Leaves out: the right numbers (`test_kernels.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from instep.kit.cases.case import Draw
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.kernels.convs import bf16_prompts as prompt_file
from instep_optimized.kernels.convs import causal_conv as conv_file
from instep_optimized.kernels.convs.bf16_prompts import Shape, silu
from instep_optimized.kernels.rowwise.gdn_inputs import WIDE, results
from instep_optimized.kernels.runtime import INTERPRETED, launch
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.fused import stored
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.place_names import Place
from support.kernels.planted import planted_kernels
from support.running.covering import each_pair, few

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.interpreted if INTERPRETED else pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # 1 / (1 + inf) is meant
]
TO = Place("trunk", 0, "mixed")
HEAD, KEYS, VALUES = 128, 4, 4
CHANNELS = (2 * KEYS + VALUES) * HEAD
FEW = Shape(4)  # rows of a program
USED = [shape for known in prompt_file.SHAPES.values() for _, shape in known]
SHAPES = [*dict.fromkeys((FEW, *USED, Shape(8, warps=1)))]


class Request(NamedTuple):
    """A prompt: its rows, its slot (0: none), whether it starts fresh, and whether its window is stored"""

    rows: int
    slot: int
    fresh: bool = False
    kept: bool = True


# Prompts of less than a window, of some blocks of rows and of a part of one more; in no order of slots.
MANY = (Request(1, 3), Request(9, 1), Request(0, 2), Request(2, 6), Request(13, 4, fresh=True), Request(6, 0),
        Request(2, 5, fresh=True), Request(3, 7), Request(8, 8, kept=False))  # fmt: skip
ONE = (Request(11, 2),)
EQUAL = (Request(10, 1), Request(10, 2))
LONG = (Request(70, 1), Request(1000, 3), Request(333, 2, fresh=True), Request(9, 4))
BATCHES = {"many": MANY, "one": ONE, "equal": EQUAL, **({} if INTERPRETED else {"long": LONG})}
KINDS = ("packed", "columns", "line", "turned", "not stored")


class Batch:
    """Prompts one after the other, between unowned rows.

    Pools have memory before unit 0. An unowned window has unit -1, which is there.
    """

    def __init__(
        self, requests: tuple[Request, ...], kind: str = "packed", apart: int = 2, channels: int = CHANNELS
    ) -> None:
        draw, slots = Draw(11, DEVICE), 1 + max(one.slot for one in requests)
        columns = slots, 3, channels, 3
        self.requests, self.kind = requests, kind
        self.shape, self.steps = {
            "columns": (columns, (9 * channels, 3 * channels, 3, 1)),
            "line": (columns, (5 * channels, 1, 5, 1)),  # windows of positions overlap
            "turned": ((slots, channels, 3), (3 * channels, 1, channels)),
        }.get(kind, ((slots, channels, 3), (3 * channels, 3, 1)))
        self.memory = draw.normal(slots, 9 * channels, dtype=torch.bfloat16)
        self.begin = [apart + at for at in accumulate((one.rows for one in requests[:-1]), initial=0)]
        rows = sum(one.rows for one in requests) + 2 * apart
        self.x = draw.normal(rows, channels + 32, dtype=torch.bfloat16)[:, 32:]
        self.weight = draw.normal(channels, 4, dtype=torch.bfloat16, scale=0.5)
        # Zeros, of which products are -0; large numbers, whose exponentials overflow; and sums of which every order of
        # the taps has other bits.
        self.x[:, ::7], self.weight[::14] = 0.0, -self.weight[::14].abs()
        self.x[:, 3::11] *= 64
        self.x[::4, 5::13], self.x[2::4, 5::13], self.weight[5::13] = 2.0**20, -(2.0**20), 1.0

    def part(self, memory: torch.Tensor) -> Part:
        """Run on this batch, with separate memory"""

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=DEVICE)

        one = self.requests
        pool = memory.flatten()[memory.shape[1] :].as_strided(  # the units of slots, which begin at 1
            (self.shape[0] - 1, *self.shape[1:]), self.steps, memory.shape[1])  # fmt: skip
        column = [ints([at] * len(one)) if len(self.shape) == 4 else None for at in (2, 1)]
        read = Address(pool, ints([each.slot - 1 for each in one]), column[0])
        kept = Address(pool, ints([each.slot - 1 if each.kept else -1 for each in one]), column[1])
        fresh = torch.tensor([each.fresh for each in one], device=DEVICE)
        return Part("chunk", ints(self.begin), ints([each.rows for each in one]), max(each.rows for each in one), read,
                    fresh, None if self.kind == "not stored" else kept)  # fmt: skip

    def conv(self, run: Callable[..., torch.Tensor] = conv_file.conv) -> tuple[torch.Tensor, ...]:
        """The result, and the memory after it"""
        memory = self.memory.clone()
        return run(x=self.x, weight=self.weight, parts=(self.part(memory),), to=TO), memory

    def consumed(self, dtypes: tuple[torch.dtype, ...] = WIDE) -> tuple[torch.Tensor, ...]:
        """The inputs of the delta rule, and the memory; all of it is NaN before"""
        draw, memory = Draw(12, DEVICE), self.memory.clone()
        found = results(self.x, KEYS, HEAD, VALUES, dtypes)
        for one in found:
            one.fill_(torch.nan)
        sides = draw.normal(len(self.x), 2 * VALUES, dtype=torch.bfloat16)
        rule = sides[:, :VALUES], sides[:, VALUES:], draw.normal(VALUES), draw.normal(VALUES)
        conv_file.consumed(found, self.x, self.weight, (self.part(memory),), rule, TO)
        return *found, memory


def counted(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., None] | None = None) -> list[Part]:
    """The parts that are served here, as they come; serve: by another kernel"""
    seen, serve = list[Part](), serve or prompt_file.walk_prompt
    monkeypatch.setattr(conv_file, "walk_prompt", lambda *given: (seen.append(given[2]), serve(*given))[1])
    return seen


def of_others(monkeypatch: pytest.MonkeyPatch, run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The results of the kernel that ran before"""
    with monkeypatch.context() as patch:
        patch.setattr(conv_file, "prompt_fits", lambda *_: False)
        return run()


@pytest.fixture
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shape:
    """The launches"""
    found: Shape = getattr(request, "param", FEW)
    monkeypatch.setattr(prompt_file, "SHAPES", dict.fromkeys((False, True), ((0, found),)))
    return found


@few(2)
@pytest.mark.parametrize(("shape", "name", "kind"), each_pair(SHAPES, BATCHES, KINDS), indirect=["shape"], ids=str)
def test_rows_and_windows_have_the_bits_of_conv(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, name: str, kind: str
) -> None:
    one, seen = Batch(BATCHES[name], kind, channels=3 * shape.channels), counted(monkeypatch)
    out, memory = one.conv()
    assert len(seen) == 1
    assert all(map(same_bits, (out, memory), of_others(monkeypatch, one.conv))) and len(seen) == 1
    assert same_bits(memory, one.conv(PLAIN.conv)[1])
    assert same_bits(memory, one.memory) is (kind == "not stored")
    spans = [(begin, each.rows if each.slot else 0) for begin, each in zip(one.begin, one.requests, strict=True)]
    covered = {begin + t for begin, rows in spans for t in range(rows)}
    assert {row for row in range(len(out)) if out[row].any()} == covered and len(covered) < len(out)


@few(1)
@pytest.mark.parametrize(
    ("shape", "name", "kind", "dtypes"),
    each_pair(SHAPES, BATCHES, KINDS[:3], (WIDE, stored(torch.bfloat16))), indirect=["shape"], ids=str)  # fmt: skip
def test_inputs_of_the_rule_have_the_bits_of_conv(
    monkeypatch: pytest.MonkeyPatch, shape: Shape, name: str, kind: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    one, seen = Batch(BATCHES[name], kind), counted(monkeypatch)
    found = one.consumed(dtypes)
    assert len(seen) == 1
    right = of_others(monkeypatch, lambda: one.consumed(dtypes))
    assert len(seen) == 1 and all(map(same_bits, found, right))
    assert all(x.isfinite().all() and x.any() for x in found[:5])


def test_number_of_columns_decides_the_walk(monkeypatch: pytest.MonkeyPatch,) -> None:
    monkeypatch.setattr(prompt_file, "NARROW", 1)
    part, wide = Batch(ONE).part(Batch(ONE).memory), Shape(4).channels
    for rule, known in prompt_file.SHAPES.items():
        keys, bounds = rule * wide, [least // (8 * wide) for least, _ in known]
        assert bounds == sorted(bounds, reverse=True) and bounds[-1] == 0
        sized = [prompt_file.shape_for(replace(part, most=max(most, 1)), 8 * wide, keys) for most in bounds]
        assert sized == [shape for _, shape in known]
        below = [prompt_file.shape_for(replace(part, most=most - 1), 8 * wide, keys) for most in bounds[:-1]]
        assert below == [shape for _, shape in known[1:]]
    short = known[-1][1]
    narrow = [prompt_file.shape_for(part, *of) for of in ((8 * wide + 128,), (8 * wide, 128), (8 * wide, wide))]
    assert narrow == [short._replace(warps=1)] * 2 + [short]


def test_a_narrow_program_gives_the_bits_of_a_wide_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one, seen = Batch(ONE, channels=3 * 128), counted(monkeypatch)
    monkeypatch.setattr(prompt_file, "NARROW", 1)
    found = one.conv()
    assert len(seen) == 1 and all(map(same_bits, found, of_others(monkeypatch, one.conv))) and len(seen) == 1


@few(1)
@pytest.mark.parametrize("several", [False, True])
def test_parts_of_a_batch_run_one_by_one(monkeypatch: pytest.MonkeyPatch, shape: Shape, several: bool) -> None:
    """The rows that neither covers are zero."""
    one, seen = Batch(MANY), counted(monkeypatch)
    memory = one.memory.clone()
    whole = one.part(memory)

    def cut(at: slice) -> Part:
        fields = {name: getattr(whole, name)[at] for name in ("begin", "count", "fresh")}
        held = {name: replace(getattr(whole, name), units=getattr(whole, name).units[at]) for name in ("read", "store")}
        return replace(whole, **fields, **held)

    parts = (cut(slice(0, 4)), cut(slice(4, None))) if several else (whole,)
    out = conv_file.conv(x=one.x, weight=one.weight, parts=parts, to=TO)
    assert len(seen) == len(parts) and all(map(same_bits, (out, memory), one.conv()))


@pytest.mark.parametrize("what", [
    "short prompts", "no requests", "trees", "every row kept", "fp32", "windows in fp32", "width 3", "half a tile",
    "an odd step", "an odd number on", "taps apart", "heads of two kinds in a program", "nothing",
])  # fmt: skip
def test_unsupported_shape_uses_another_kernel(monkeypatch: pytest.MonkeyPatch, shape: Shape, what: str) -> None:
    one = Batch(EQUAL)
    part, x, weight, heads = one.part(one.memory), one.x, one.weight, (None, 0, 0)
    if what == "short prompts":
        part = replace(part, most=8)
    elif what == "no requests":
        part = replace(part, begin=part.begin[:0])
    elif what == "trees":
        part = replace(part, form="window", store=None, parents=part.begin)
    elif what == "every row kept":
        part = replace(part, per_row=Address(part.read.pool[:, None], part.read.units))
    elif what in ("fp32", "windows in fp32"):
        wide = replace(part.read, pool=part.read.pool.float())
        x = x.float() if what == "fp32" else x
        part = replace(part, read=wide, store=wide)
    elif what == "width 3":
        weight = weight[:, :3].contiguous()
    elif what == "half a tile":
        x, weight = x[:, :-64], weight[:-64]
    elif what == "an odd step":
        x = torch.cat([x, x[:, :1]], 1)[:, :-1]
    elif what == "an odd number on":
        x = torch.cat([x[:, :8], x], 1)[:, 1:-7]
    elif what == "taps apart":
        weight = torch.cat([weight, weight], 1)[:, :4]
    elif what == "heads of two kinds in a program":
        heads = None, HEAD, KEYS - 1
        monkeypatch.setattr(prompt_file, "NARROW", FEW.warps)
    mixed = None if heads[1] else x
    assert prompt_file.fits(x, weight, part, mixed, *heads[1:]) is (what == "nothing")
    assert prompt_file.fits(one.x, one.weight, one.part(one.memory), None, HEAD, KEYS)


Texts = tuple[tuple[str, str], ...]
STORED = "kept = at_word < tl.where(goal >= 0, every, 0)"
FAULTS: dict[str, Texts] = {
    "a former request's window": (("tl.where(known, every, 0)", "every"),),
    "a request without a unit": (("if (unit >= 0) & (first < rows)", "if first < rows"),),
    "an unowned window": ((STORED, STORED.replace("goal >= 0", "goal >= -1")),),
    "a window that is not stored": ((STORED, STORED.replace("goal >= 0", "goal >= 2")),),
    "the window before the last row": (("behind = rows - 3 + w", "behind = rows - 4 + w"),),
    "a short prompt's history, turned": (("behind == -2, middle, newest", "behind == -2, newest, middle"),),
    "another position's history": (("tl.load(read.columns + request)", "unit * 0"),),
    "another position's window": (("tl.load(store.columns + request)", "unit * 0"),),
    "the oldest input of a block": (("tl.load(row - 3 * x_row, mask", "tl.load(row - 2 * x_row, mask"),),
    "the newest input of a block": (("tl.load(row - x_row, mask", "tl.load(row - 2 * x_row, mask"),),
    "a window's halves": (("(2 * at_word + at_pair) * store.per", "(2 * at_word + 1 - at_pair) * store.per"),),
    "history's halves": (("window + (channel + 1) * step", "window + channel * step"),),
    "the row after the last one": (("live = at_word * 0 + t < left", "live = at_word * 0 + t <= left"),),
    "an input after the last row": (("mask=at_word * 0 + t < left", "mask=at_word * 0 + t < left - 1"),),
    "unowned rows": (("spans.rows, requests) == 0", "spans.rows, requests) == -1"),),
    "unowned rows next to a request": (("< ends - begins", "< 1"),),
    "the last, unowned row": (("tl.minimum(begins + share, look)", "tl.minimum(begins + share, look - 1)"),),
    "a zero with a sign": (("tl.fma(number(inputs[t][pair], half), number(taps[channel], 0), 0.0)",
                            "number(inputs[t][pair], half) * number(taps[channel], 0)"),),
    "another order of taps": (("number(inputs[t + tap][pair], half) * number(taps[channel], tap)",
                               "number(inputs[t + 4 - tap][pair], half) * number(taps[channel], 4 - tap)"),),
    "words, turned": (("tl.join(pairs[0], pairs[1])", "tl.join(pairs[1], pairs[0])"),),
}  # fmt: skip
RULE_FAULTS: dict[str, Texts] = {
    "keys are scaled": (("tl.where(query, rule.scale, 1.0)", "rule.scale"),),
    "queries among the keys": (("tl.where(query, rule.q, rule.k)", "rule.k"),),
    "keys of the first heads": (("at - tl.where(query, 0, keys)", "at % keys % (HT * NUMBERS)"),),
    "a query after the last row": (("< left\n                    unit_of", "<= left\n                    unit_of"),),
    "a value after the last row": (("< left\n                    tl.store(out + t * width",
                                     "<= left\n                    tl.store(out + t * width"),),
    "gates of the row before": (("(start + line).to(tl.int64)", "(start + line - 1).to(tl.int64)"),),
    "gates of the first rows alone": (("line + of * 0 < rows", "line + of * 0 < 3"),),
    "gates of the first heads alone": (("line + of * 0 < rows", "(line + of * 0 < rows) & (of < 2)"),),
}  # fmt: skip
SOUND: dict[str, Texts] = {
    "nothing": (),
    "a search for unowned rows without any": (("< ends - begins", "<= ends - begins"),),
}


@few(2)
@pytest.mark.parametrize("fault", [*FAULTS, *SOUND])
def test_a_fault_in_the_kernel_changes_bits(
    fault: str, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = planted_kernels("convs.bf16_prompts", (SOUND | FAULTS)[fault], tmp_path, monkeypatch)
    monkeypatch.setattr(other, "SHAPES", prompt_file.SHAPES)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is NaN
    try:
        runs = Batch(MANY, "columns", channels=shape.channels).conv, Batch(ONE, apart=9, channels=shape.channels).conv
        right = [one for run in runs for one in run()]
        seen = counted(monkeypatch, other.walk_prompt)
        found = [one for run in runs for one in run()]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(same_bits, right, found)) is (fault in SOUND) and len(seen) == len(runs)


@few(1)
@pytest.mark.parametrize("fault", [*RULE_FAULTS, "nothing"])
def test_fault_in_the_inputs_of_the_rule_changes_bits(
    fault: str, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = planted_kernels("convs.bf16_prompts", (SOUND | RULE_FAULTS)[fault], tmp_path, monkeypatch)
    monkeypatch.setattr(other, "SHAPES", prompt_file.SHAPES)
    one = Batch(MANY)
    right = one.consumed()
    seen = counted(monkeypatch, other.walk_prompt)
    found = one.consumed()
    assert all(map(same_bits, right, found)) is (fault == "nothing") and len(seen) == 1


@triton.jit
def _activated(totals, found, NATIVE: tl.constexpr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(found + at, silu(tl.load(totals + at), NATIVE))


@pytest.mark.skipif(INTERPRETED, reason="no CUDA device here")
def test_the_short_form_of_silu_has_the_bits_of_the_compilers_own() -> None:
    """For 2^24 numbers, every 256th that there is: all exponents, both signs, what is not finite."""
    totals = (torch.arange(1 << 24, device=DEVICE, dtype=torch.int64) * 256 + 101).to(torch.int32).view(torch.float32)
    short, own = torch.empty_like(totals), torch.empty_like(totals)
    for found, native in ((short, True), (own, False)):
        launch(_activated, (len(totals) // 1024,), totals, found, NATIVE=native, warps=4)
    there = ~own.isnan()
    assert torch.equal(short.isnan(), own.isnan()) and int(there.sum()) > 1 << 23
    apart = (short.view(torch.int32) != own.view(torch.int32)) & there
    assert not apart.any(), (int(apart.sum()), totals[apart][:5], short[apart][:5], own[apart][:5])
