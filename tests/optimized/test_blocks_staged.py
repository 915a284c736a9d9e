"""Prefill with explicit layouts gives the bits of `blocks.py`, and compiles with next to nothing spilled.

Leaves out: what the right numbers are (`test_kernels_blocks.py`).
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from instep.kit.cases.case import Draw
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.kernels.gdn_prefill.chunk64 import blocks
from instep_optimized.kernels.runtime import INTERPRETED, explicit
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import GdnInputs
from support.kernels.planted import on_device, planted_kernels

staged = explicit("gdn_prefill.chunk64_launches_gluon")
native = [pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="no CUDA device here")]
ON_GPU = pytest.mark.interpreted if INTERPRETED else pytest.mark.gpu  # elsewhere the texts are looked for
H, K, V = 2, 128, 128
COUNTS, SLOTS = (330, 1, 64, 0, 65, 63, 200, 16), (3, 1, 0, 2, 5, 6, -1, 7)  # more blocks than places for them
SHORT = (128, *COUNTS[1:])  # no request has more than two blocks
WHILE = 4_000_000  # cycles of the device: longer than a host takes for two launches
FRESH, BEHIND = 2, 70  # the request without a state; rows without a request
Run = tuple[torch.Tensor, torch.Tensor]  # core rows, the pool


@pytest.fixture(autouse=True)
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch is NaN before it is written, and every signal is set before it is cleared."""
    empty = torch.Tensor.new_empty

    def filled(self: torch.Tensor, *shape: Any, **named: Any) -> torch.Tensor:
        made = empty(self, *shape, **named)
        return made.fill_(torch.nan if made.is_floating_point() else 1)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def drawn(group: int, dtype: torch.dtype, narrow: bool, counts: tuple[int, ...] = COUNTS, values: int = V) -> GdnInputs:
    """Rows without a request are NaN. narrow: q and k in bf16, v in 16 bits, as `dtype`;  values: columns of a head"""
    rows, draw = sum(counts) + BEHIND, Draw(group, "cuda")
    common = draw.normal(1, H, K) * 0.5  # keys alike: what is solved is far from the identity
    q, k = (torch.nn.functional.normalize(draw.normal(rows, H, K) + common, dim=-1).bfloat16() for _ in range(2))
    v = draw.normal(rows, group * H, values, dtype=dtype)
    gates = [draw.uniform(rows, group * H, low=low, high=high) for low, high in ((-0.3, -1e-4), (0.05, 1.0))]
    for x in (q, k, v, *gates):
        x[sum(counts) :] = torch.nan
    return GdnInputs(q, k, v, *gates) if narrow else GdnInputs(q.float(), k.float(), v.float(), *gates)


def served(
    inputs: GdnInputs, dtype: torch.dtype, state: torch.dtype, chains: int | None = None, beside: bool = False,
    fused: bool = False, counts: tuple[int, ...] = COUNTS,
) -> Run:  # fmt: skip
    """By the staged kernels; chains = 0: by their twin."""
    ints, (heads, values) = Draw(0, "cuda").ints, inputs.v.shape[1:]
    pool = Draw(1, "cuda").normal(9, heads, values, K, dtype=state, scale=0.1).transpose(2, 3)
    core = torch.full((len(inputs.v), heads, values), torch.nan, dtype=dtype, device="cuda")
    fresh = torch.tensor([i == FRESH for i in range(len(counts))], device="cuda")
    here = Address(pool, ints(SLOTS))
    begin = ints([sum(counts[:i]) for i in range(len(counts))])
    part = Part("chunk", begin, ints(counts), max(counts), here, fresh, here)
    if chains == 0:
        blocks(inputs, part, core, len(core))
    else:
        assert staged.fits(inputs, part, core)
        if beside:  # both launches are waiting when the first begins: otherwise it ends before the second one comes
            torch.cuda._sleep(WHILE)
        staged.blocks_staged(inputs, part, core, len(core), chains, beside, fused)
    return core, pool.mT


@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "wide"])
@pytest.mark.parametrize("few", [False, True], ids=["", "block-after-block"])
@pytest.mark.parametrize(("group", "dtype", "state"), [
    (2, torch.bfloat16, torch.float32), (1, torch.float16, torch.float32), (3, torch.bfloat16, torch.bfloat16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("_", [pytest.param(None, marks=native)], ids=["cuda"])
def test_explicit_layouts_give_the_bits_of_the_others(
    group: int, dtype: torch.dtype, state: torch.dtype, few: bool, narrow: bool, _: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """few: a program prepares several blocks one after the other, of all requests; otherwise one or none."""
    if few:
        monkeypatch.setattr(staged, "multiprocessors", lambda _: 1)
    inputs = drawn(group, dtype, narrow)
    right = served(inputs, dtype, state, 0)
    assert not right[0].isnan().any() and right[0].any(2).any(1).sum() == sum(COUNTS) - 200  # all but the idle request
    for chains in (1, 2, None):
        for beside in (False, True):
            assert all(map(same_bits, served(inputs, dtype, state, chains, beside), right)), (chains, beside)
    if narrow:
        assert all(map(same_bits, served(inputs, dtype, state, fused=True), right))


def by_channel(inputs: GdnInputs, lowest: float) -> GdnInputs:
    """The same rows with a log decay of each key channel, between `lowest` and 0."""
    rows, heads = inputs.log_decay.shape
    decays = Draw(5, "cuda").uniform(rows, heads, K, low=lowest, high=-1e-4)
    decays[sum(COUNTS) :] = torch.nan
    return inputs._replace(log_decay=decays)


@pytest.mark.parametrize("lowest", [-0.3, -6.0])  # decays of a block within FAR, and not
@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "wide"])
@pytest.mark.parametrize(("group", "dtype", "state"), [
    (2, torch.bfloat16, torch.float32), (1, torch.float16, torch.float32), (6, torch.bfloat16, torch.bfloat16),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("_", [pytest.param(None, marks=native)], ids=["cuda"])
def test_a_decay_per_channel_has_the_bits_of_the_others(
    group: int, dtype: torch.dtype, state: torch.dtype, narrow: bool, lowest: float, _: None
) -> None:
    inputs = by_channel(drawn(group, dtype, narrow), lowest)
    right = served(inputs, dtype, state, 0)
    assert not right[0].isnan().any() and right[0].any(2).any(1).sum() == sum(COUNTS) - 200  # all but the idle request
    assert all(map(same_bits, served(inputs, dtype, state), right))


CHANNEL_FAULTS = {
    "keys decayed since the start": ("(leaving, lefts.index(stage), state", "(leaving, keys.index(stage), state"),
    "keys of the block before": ("full.index(stage), lefts.index(stage))", "full.index(stage), lefts.index(0))"),
    "decays of the first block again": ("of_channels += heads * 3 * TOKENS", "of_channels += 0 * heads"),
    "inverses as their transpose": ("inverses.index(stage).permute((1, 0))", "inverses.index(stage)"),
    "weights as their transpose": ("weights.index(last).permute((1, 0))", "weights.index(last)"),
    "values after the last row": ("value.load(WIDE), 0.0)", "value.load(WIDE), value.load(WIDE))"),
    "blocks of another head": ("block * heads + head\n    of_keys", "block * heads + head * 0\n    of_keys"),
}


@ON_GPU
@pytest.mark.parametrize("fault", CHANNEL_FAULTS)
def test_fault_in_blocks_with_a_decay_per_channel_changes_bits(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(("gdn_prefill.chunk64_carry_gluon", (CHANNEL_FAULTS[fault],)))
    inputs = by_channel(drawn(2, torch.bfloat16, True), -0.3)
    right = served(inputs, torch.bfloat16, torch.float32, 0)
    module = planted_kernels("gdn_prefill.chunk64_carry_gluon", (CHANNEL_FAULTS[fault],), tmp_path, monkeypatch)
    monkeypatch.setattr(staged, "carry_staged", module.carry_staged)
    found = served(inputs, torch.bfloat16, torch.float32)
    assert not all(map(same_bits, found, right))


@pytest.mark.parametrize("_", [pytest.param(None, marks=native)], ids=["cuda"])
def test_launches_on_two_streams_give_the_same_bits(_: None) -> None:
    """None waits forever: the programs that prepare wait for none, whatever else takes their multiprocessors."""
    inputs = drawn(2, torch.bfloat16, True)
    right = served(inputs, torch.bfloat16, torch.float32, 0)
    streams, found = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(served(inputs, torch.bfloat16, torch.float32, 1, True))
    torch.cuda.synchronize()
    assert all(all(map(same_bits, one, right)) for one in found)


GATES = "_gates(source, lane < TOKENS)\n        stage"
NEXT = "        key_head, next_item = item % heads, item + programs\n"
FAULTS = {
    "keys after the last row": ("prepare", "key.load(WIDE), 0.0)", "key.load(WIDE), key.load(WIDE))"),
    "weights of the head before": ("prepare", "store_box(mixed, [own, 0]", "store_box(mixed, [own - own % 128, 0]"),
    "the same block again and again": ("prepare", "if next_item < items:", "if next_item < 0:"),
    "a block decays as half of it": ("carry", "slice(TOKENS - 1, 1)", "slice(TOKENS // 2, 1)"),
    "gates of another kind": ("carry", "lines.index(stage * 3 + 1).load", "lines.index(stage * 3).load"),
    "a last block that is stored whole": ("carry", "if n * TOKENS + TOKENS <= rows", "if n * TOKENS <= rows"),
    "keys of states after the last row": ("carry", "part.load(SOME), nothing)", "part.load(SOME), part.load(SOME))"),
}
BESIDE_FAULTS = {
    "it does not wait for signals": ("carry", "if n >= ready:", "if n < 0:"),
    "a signal before the block": ("prepare", NEXT, f"{NEXT}        signal(signals + SIGNALS + item)\n"),
    "gates of the first block again and again": ("carry", GATES, GATES.replace("source", "gates + lane")),
}

# None of them hangs a launch. One without the wait of states for inverses would: a place that is freed before it was
# filled is never free again. No request has more than two blocks, so every wait is for the first use of a place.
FUSED_FAULTS = {
    "keys are not waited for": ("mbarrier.wait(landed.index(stage), phase)\n            alike", "alike"),
    "inverses of the block before": ("residual, solved.index(last)", "residual, solved.index(1 - last)"),
    "weights of the block before": ("update, mixed.index(last)", "update, mixed.index(1 - last)"),
    "gates of the first block again and again": ("lines.index(stage * 5 + 2).store", "lines.index(2).store"),
    "keys after the last row": ("_clear_behind(key, rows - n * TOKENS)", "_clear_behind(key, TOKENS)"),
    "values after the last row": ("values.index(stage), rows - n * TOKENS)", "values.index(stage), TOKENS)"),
    "what another level joins": ("join, row // HALF, SMALL", "join, row // SOLVED % 2, SMALL"),
    "pairs of another block": ("beside.slice(2 * SOLVED", "beside.slice(SOLVED"),
    "the state of another head": ("request, wide, first)\n            known", "request, 0, 0)\n            known"),
}


@ON_GPU
@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_fault_in_the_fused_kernel_changes_bits(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(("gdn_prefill.chunk64_fused_gluon", (FUSED_FAULTS[fault],)))
    inputs = drawn(2, torch.bfloat16, True, SHORT)
    right = served(inputs, torch.bfloat16, torch.float32, 0, counts=SHORT)
    module = planted_kernels("gdn_prefill.chunk64_fused_gluon", (FUSED_FAULTS[fault],), tmp_path, monkeypatch)
    monkeypatch.setattr(staged, "fused_staged", module.fused_staged)
    found = served(inputs, torch.bfloat16, torch.float32, fused=True, counts=SHORT)
    assert not all(map(same_bits, found, right))


OF_NOBODY = "gl.full((WIDE, TOKENS), 0.0, gl.float32, TILE)\n"
GIVEN = "        forget, write = _gates(0, rows, gates, LANES)\n"
COPIER = "WIDE * (v.dtype.primitive_bitwidth // 8))\n"
# Faults of a program that loops over all items, two per head: the first item is always right. None of them hangs it,
# because every wait is for the same barrier in the same phase as before.
ITEM_FAULTS: dict[str, tuple[tuple[str, str], ...]] = {
    "nothing": (),
    "keys from a place of the first item": (("key = keys.index(stage)", "key = keys.index(n % STAGES)"),),
    "values from a place of the first item": (
        ("values.index(stage).permute(", "values.index(n % STAGES).permute("),),
    "weights into a place of the first item": (("mixed.index(last).store(", "mixed.index(n % LAST).store("),),
    "decays of the first item": (("(log_decay, start, wide)", "(log_decay, start, gl.program_id(0).to(gl.int64))"),),
    "gates read for the item before": (
        (COPIER, f"{COPIER}    forget, write = gl.full([TOKENS], 0.0, gl.float32, LANES), gl.full([TOKENS], 0.0, "
                 "gl.float32, LANES)\n"),
        (GIVEN, f"        if at < gl.num_programs(0):\n    {GIVEN}"),
    ),
    "the state of the item before": (
        (OF_NOBODY, f"{OF_NOBODY}    state = gl.full((WIDE, WIDTH), 0.0, gl.float32, STATE)\n"),
        ("state = gl.load(", "own_state = gl.load("),
        ("state = state.to(gl.float32)", "state = gl.where(at < gl.num_programs(0), own_state.to(gl.float32), state)"),
    ),
    "last rows into the first columns": (("begins * core.per_row + column", "begins * core.per_row"),),
    "the last block of the item before": (("if n > 0:  # no", "if (n > 0) | ((before > 0) & (start > 0)):  # no"),),
    "fresh as the first request": (("gl.load(fresh + request)", "gl.load(fresh + request * 0)"),),
    "the first columns again": (("at % tiles * WIDE", "at * 0"),),
    "a state into the first columns": (("own, request, wide, first)", "own, request, wide, 0)"),),
    "unowned rows for the first request alone": (("clear_rest(request,", "clear_rest(request * 0,"),),
}  # fmt: skip


@ON_GPU
@pytest.mark.parametrize("fault", ITEM_FAULTS)
def test_a_fault_in_later_items_of_a_program_changes_bits(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(("gdn_prefill.chunk64_fused_gluon", ITEM_FAULTS[fault]))
    inputs = drawn(2, torch.bfloat16, True, SHORT, 2 * V)
    right = served(inputs, torch.bfloat16, torch.float32, 0, counts=SHORT)
    module = planted_kernels("gdn_prefill.chunk64_fused_gluon", ITEM_FAULTS[fault], tmp_path, monkeypatch)
    monkeypatch.setattr(staged, "fused_staged", module.fused_staged)
    monkeypatch.setattr(staged, "multiprocessors", lambda _: 1)
    found = served(inputs, torch.bfloat16, torch.float32, fused=True, counts=SHORT)
    off = [name for name, *both in zip(("core", "states"), right, found, strict=True) if not same_bits(*both)]
    assert (off == []) is (fault == "nothing"), off



LENGTHS = {  # on 132 multiprocessors, with 32 value heads
    "8 alike": ([2048] * 8, True), "4 alike": ([512] * 4, True), "nearly alike": ([1000, 1024] * 4, True),
    "most of a round": ([2048] * 3, True), "a round and a bit": ([2048] * 5, True),
    "two rounds and a bit": ([2048] * 9, False), "half a round": ([2048] * 2, False), "short": ([256] * 8, False),
    "one is long": ([8192, *[512] * 7], False),
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(name, marks=native) for name in LENGTHS])
def test_one_kernel_serves_requests_that_fill_its_rounds(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, fused = LENGTHS[case]
    monkeypatch.setattr(staged, "multiprocessors", lambda _: 132)
    kernels: list[str] = []
    monkeypatch.setattr(staged, "launch", lambda kernel, *_, **__: kernels.append(kernel.__name__))
    q, v, gate = (torch.zeros(sum(counts), *shape, device="cuda") for shape in ((16, K), (32, V), (32,)))
    none = torch.zeros(len(counts), dtype=torch.int64, device="cuda")
    pool = Address(torch.zeros(1, 32, V, K, device="cuda").transpose(2, 3), none)
    part = Part("chunk", none, none, max(counts), pool, none == 1, pool)
    staged.blocks_staged(GdnInputs(q.bfloat16(), q.bfloat16(), v.bfloat16(), gate, gate), part, v.bfloat16())
    assert (kernels == ["fused_staged"]) == fused, kernels


@ON_GPU
@pytest.mark.parametrize("fault", FAULTS | BESIDE_FAULTS)
def test_fault_in_either_kernel_changes_bits(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name, old, new), beside = (FAULTS | BESIDE_FAULTS)[fault], fault in BESIDE_FAULTS
    on_device((f"gdn_prefill.chunk64_{name}_gluon", ((old, new),)))
    monkeypatch.setattr(staged, "multiprocessors", lambda _: 1)  # a program has several blocks
    inputs = drawn(2, torch.bfloat16, True)
    right = served(inputs, torch.bfloat16, torch.float32, 0)
    module = planted_kernels(f"gdn_prefill.chunk64_{name}_gluon", ((old, new),), tmp_path, monkeypatch)
    monkeypatch.setattr(staged, f"{name}_staged", getattr(module, f"{name}_staged"))
    if beside:  # what is compiled now comes late
        served(inputs, torch.bfloat16, torch.float32, 1, beside)
    tries = 20 if fault == "a signal before the block" else 1  # it shows by who comes first
    found = (served(inputs, torch.bfloat16, torch.float32, 1, beside) for _ in range(tries))
    assert not all(same_bits(*both) for run in found for both in zip(run, right, strict=True))


@pytest.mark.parametrize("_", [pytest.param(None, marks=native)], ids=["cuda"])
def test_signals_of_a_previous_launch_change_bits(_: None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, launch = drawn(2, torch.bfloat16, True), staged.launch
    right = served(inputs, torch.bfloat16, torch.float32, 0)

    def uncleared(kernel: Any, grid: Any, *given: Any, **named: Any) -> None:
        if kernel is staged.clear:  # turns begin with 0 all the same
            given = (given[0], staged.SIGNALS.value)
        launch(kernel, grid, *given, **named)

    monkeypatch.setattr(staged, "launch", uncleared)
    assert not all(map(same_bits, served(inputs, torch.bfloat16, torch.float32, 1, True), right))
