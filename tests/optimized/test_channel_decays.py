"""The delta rule with a decay per key channel: decodes, windows, trees, tokens that run again, and prompts.

Right is a plain loop in fp64, written from the definition. Leaves out: a decay per head, which the other tests of these
kernels have; the compiled code of both (`test_compiled.py`).
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instep.campaign.streams.run_stamped_trace import streamed
from instep.kit.cases.case import Draw, at
from instep.kit.cases.guarded_pools import same_bits
from instep.oracle.declared_product_rounding import in_chunks
from instep.oracle.reordered_arithmetic import Reordered
from instep.setting import Setting
from instep.tier_allowances import YARDSTICK_FACTOR
from instep_optimized.commit import STRATEGIES
from instep_optimized.kernels.gdn_dispatch import gdn, windows
from instep_optimized.kernels.gdn_prefill import chunk16_fp32, chunk64
from instep_optimized.kernels.runtime import INTERPRETED
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.triton import TRITON
from instep_reference import chunked_delta_rule
from instep_speed.bench.drawn_rows import alone
from support.inputs.few_channels import few_channels
from support.kernels.planted import on_device, planted_kernels
from support.running.covering import WHOLE, few
from support.running.recorded_calls import calls_of
from support.running.verdicts import agreed
from support.worlds.rings import ChannelHeads, Life, Right, Turn, World, cut, delta_rows, garbage, stream, walk

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else [pytest.mark.interpreted]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a fault is compiled for each test")
native = pytest.mark.skipif(INTERPRETED, reason="no CUDA device here")
SMALL = ChannelHeads(1, 2, 20, 12)  # neither a power of two nor square
KIMI = ChannelHeads(32, 32, 128, 128)
FP32 = 1e-6  # relative: a few roundings of fp32
# A multiple of the error of `by_bf16_products`: the kernel has the same roundings, at other places and in other sums.
FACTOR = 1.5
Tensor = torch.Tensor
# Decays, and how much of every key is common to all. "rare": most are weak, and some channel of a block forgets all.
# "late": as "rare", in the second half of a block alone.
REGIMES = {"usual": ((-1.0, -1e-3), 0.5), "rare": ((-0.2, -1e-3), 0.5), "late": ((-0.2, -1e-3), 0.5),
           "weak": ((-1e-3, -1e-5), 0.0), "strong": ((-200.0, -1e-4), 0.0), "none": ((0.0, 0.0), 1.0)}  # fmt: skip


@pytest.fixture(autouse=True)
def _rejected_rows_may_overflow() -> Iterator[None]:
    with np.errstate(all="ignore"):  # the interpreter computes them with numpy
        yield


def by_the_definition(inputs: GdnInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Read-outs [N, HV, V] and states [N, HV, K, V] after every token, from a state [HV, K, V], in fp64."""
    q, k, v, log_decay, beta = (x.double() for x in inputs)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    state, out, after = state.double(), [], []
    for t in range(len(v)):
        state = state * log_decay[t].exp()[:, :, None]
        known = (state * k[t][:, :, None]).sum(1)
        state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - known))[:, None, :]
        out.append((state * q[t][:, :, None]).sum(1))
        after.append(state)
    return torch.stack(out), torch.stack(after)


def by_bf16_products(inputs: GdnInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The chunked form, 64 tokens at a time, with every operand of a product rounded to bf16 -> read-outs, state"""
    def narrow(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    q, k, v, log_decay, beta = (x.double() for x in inputs)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    state, out = state.double(), []
    for rows in torch.arange(len(v)).split(64):
        Q, U, B, G = (x[rows].transpose(0, 1) for x in (q, k, beta, log_decay))
        G, B = G.cumsum(1), B[:, :, None]
        later = torch.ones(len(rows), len(rows), dtype=torch.bool, device=v.device).triu(1)
        D = (G[:, :, None] - G[:, None]).masked_fill(later[..., None], float("-inf")).exp()  # [HV, i, j, K]
        A = B * torch.einsum("hik,hijk,hjk->hij", narrow(U), D, narrow(U)).tril(-1)
        P = torch.einsum("hik,hijk,hjk->hij", narrow(Q), D, narrow(U))
        T = torch.linalg.inv(torch.eye(len(rows), dtype=A.dtype, device=A.device) + A)
        left = B * (v[rows].transpose(0, 1) - narrow(U * G.exp()) @ narrow(state))
        update = narrow(narrow(T) @ narrow(left))
        out.append((narrow(Q * G.exp()) @ narrow(state) + narrow(P) @ update).transpose(0, 1))
        state = G[:, -1].exp()[:, :, None] * state + narrow(U * (G[:, -1:] - G).exp()).mT @ update
    return torch.cat(out), state


def relative(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def served(kernel: Callable[..., None], form: Any, inputs: GdnInputs, pool: Tensor, counts: tuple[int, ...]) -> Any:
    """Requests packed one after the other, number i in unit i + 1 -> the core in fp32, and the pool afterwards"""
    ints, kept = Draw(0, HERE).ints, pool.clone(memory_format=torch.preserve_format)
    here = Address(kept, ints(range(1, len(counts) + 1)))
    fresh = torch.zeros(len(counts), dtype=torch.bool, device=HERE)
    begin = ints([sum(counts[:i]) for i in range(len(counts))])
    core = torch.full((sum(counts), *inputs.v.shape[1:]), torch.nan, device=HERE)
    kernel(inputs, Part(form, begin, ints(counts), max(counts), here, fresh, here), core, len(core))
    return core, kept


def states(heads: ChannelHeads, units: int) -> Tensor:
    return Draw(2, HERE).normal(units, heads.HV, heads.V, heads.K).transpose(2, 3)


# Windows -------------------------------------------------------------------------------------------------------------
def errors_of_windows(window: Any, heads: ChannelHeads) -> list[float]:
    """Relative errors of two windows of one request, in which two of three tokens run again, and of a tree."""
    rows = stream(heads, 6, 3, HERE)
    world = World.of(TRITON, heads, HERE, size=8, slots=3)
    world.state.view[1:] = base = Draw(4, HERE).normal(*world.state.view[1:].shape)

    def run(turn: Turn, tree: tuple[int, ...] = ()) -> Tensor:
        part = world.part([turn], columns=True, trees=[tree] if tree else ())
        core = torch.full((len(turn.rows.v), heads.HV, heads.V), torch.nan, device=HERE)
        window(turn.rows, part, core)
        return core

    def lacks(core: Tensor, taken: GdnInputs, path: list[int], state: Tensor | None = None) -> list[float]:
        out, after = by_the_definition(taken, base[0])
        found = world.snapshots.view[1, path]
        whole = [] if state is None else [relative(state, after[1])]
        return [relative(core[path], out[-len(path) :]), relative(found, after[-len(path) :]), *whole]

    first = run(Turn(1, cut(rows, 0, 3), settled=False))
    errors = lacks(first, cut(rows, 0, 3), [0, 1, 2])
    path = [0, 1, 3, 4]  # tokens 3 and 4 follow token 1
    second = run(Turn(1, cut(rows, 3, 2), 2, 2))
    errors += lacks(second, GdnInputs(*(x[path] for x in rows)), [0, 1], world.state.view[1])
    world.state.view[1] = base[0]
    grown = run(Turn(1, cut(rows, 0, 5)), (-1, 0, 1, 0, 3))
    for path in ([0, 1, 2], [0, 3, 4]):
        errors += lacks(grown, GdnInputs(*(x[path] for x in rows)), path)
    return errors


def test_windows_trees_and_reruns_follow_the_definition() -> None:
    for heads in (SMALL, *([KIMI] if HERE == "cuda" else [])):
        assert all(error <= FP32 for error in errors_of_windows(windows, heads))


WINDOW_FAULTS = {
    "the decay of the neighbouring channel": ("return fetch(source + every_k,", "return fetch(source + (every_k ^ 1),"),
    "one decay for all channels": ("return fetch(source + every_k,", "return fetch(source + every_k * 0,"),
    "the decay after the update": (
        "step(state, query, key, kq, value, decay, write, DELTA)",
        "step(state, query, key, kq, value, decay * 0.0 + 1.0, write, DELTA)\n        state = state * decay"),
    "no exponential of a log decay": (
        "tl.exp(decay_at(log_decay, every_k, in_k, x.channels, WHOLE)), tl",
        "decay_at(log_decay, every_k, in_k, x.channels, WHOLE), tl"),
    "rings keep log decays": ("tl.store(places, decay.to", "tl.store(places, tl.log(decay).to"),
    "rings keep decays at the next entry": (
        "places = kept_decay + entry * ring", "places = kept_decay + (entry + 1) % ring_size * ring"),
    "tokens run again with the decays of the first head": (
        "kept_decay = ring.decay + kept_by * ring.decay_per_unit + head * ring.decay_per_head",
        "kept_decay = ring.decay + kept_by * ring.decay_per_unit"),
    "branches decay by log decays": (
        "tl.exp(decay_at(log_decay + back * x.log_decay.per_row, every_k, in_k, x.channels, WHOLE)),",
        "decay_at(log_decay + back * x.log_decay.per_row, every_k, in_k, x.channels, WHOLE),"),
    "branches decay by their own row": ("decay_at(log_decay + back * x.log_decay.per_row,", "decay_at(log_decay,"),
}  # fmt: skip


@few(2)
@interpreted
@pytest.mark.parametrize("fault", WINDOW_FAULTS)
def test_fault_in_a_window_exceeds_its_bound(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = planted_kernels("gdn_windows.token_by_token", (WINDOW_FAULTS[fault],), tmp_path, monkeypatch)
    assert not all(error <= 10 * FP32 for error in errors_of_windows(planted.window, SMALL))


def decoded(heads: ChannelHeads, seed: int, tokens: int) -> Right:
    """A request's tokens, and its states as one-token launches leave them."""
    rows, pool = stream(heads, tokens, seed, HERE), states(heads, 2)
    after = [pool[1].clone()]
    for t in range(tokens):
        _, pool = served(windows, "window", cut(rows, t, 1), pool, (1,))
        after.append(pool[1].clone())
    return Right(rows, after, lambda count, seed: garbage(heads, count, seed, HERE))


@pytest.mark.parametrize("heads", [SMALL, *([ChannelHeads(4, 4, 128, 128)] if HERE == "cuda" else [])], ids=str)
def test_reruns_have_the_bits_of_one_token_launches(heads: ChannelHeads) -> None:
    """Rings wrap; rejected rows are NaN, huge, or another token's; states settle at once and late."""
    rounds = [((4, 2), (3, 3)), ((1, -1), (5, 1)), ((8, 3), (2, 0)), ((3, 2), (1, -1))]
    rights = [decoded(heads, 20 + slot, 16) for slot in (2, 5)]
    for lazy in (False, True):
        lives = [Life(slot, right, 6 + slot) for slot, right in zip((2, 5), rights, strict=True)]
        walk(World.of(TRITON, heads, HERE, size=19), lives, rounds, lazy)
        assert [life.length for life in lives] == [8, 5]


@native
@pytest.mark.parametrize(("requests", "dtype"), [
    (1, torch.float32), (20, torch.float32), (70, torch.float32), (260, torch.float32), (130, torch.bfloat16),
], ids=str)  # fmt: skip
def test_explicit_layouts_have_the_bits_of_the_compiler(
    requests: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that run tokens again, the same with the state after each row, and decodes; each in the shape that
    serves so many requests."""
    file: Any = sys.modules["instep_optimized.kernels.gdn_dispatch"]
    heads, ran = ChannelHeads(4, 4, 128, 128), calls_of(monkeypatch, file.staged, "staged", key=lambda *_, **__: "")
    rows, ones = stream(heads, 8, 41, "cuda"), stream(heads, requests, 43, "cuda")

    def outcome() -> list[Tensor]:
        world = World.of(TRITON, heads, "cuda", size=8, slots=requests + 1, dtype=dtype)
        world.state.view[1:] = Draw(42, "cuda").normal(1, *world.state.view.shape[1:]).to(dtype)
        for slot in range(1, requests + 1):
            world.fill(slot, slot, cut(rows, 0, 3))
        turns = [Turn(slot, cut(rows, 3, 4), slot + 3, slot % 4, fresh=slot % 9 == 8)
                 for slot in range(1, requests + 1)]  # fmt: skip
        cores = [world.run(turns, columns=True), world.run(turns)]
        cores.append(world.run([Turn(1, cut(rows, 7, 1), 0, kept=False, settled=False, goal="slot")]))
        cores += served(windows, "window", ones, states(heads, requests + 1).mT.to(dtype).mT, requests * (1,))
        return [*cores, *(one.view[1:].clone() for one in (world.state, world.snapshots, *world.rings))]

    found = outcome()
    assert len(ran) == requests + 4, "a ring is filled by a launch of its own"
    monkeypatch.setattr(file, "staged", None)
    for one, right in zip(found, outcome(), strict=True):
        assert bool(right.isfinite().any()) and same_bits(one, right)
    assert len(ran) == requests + 4


GUESS = ("    near = gl.minimum(gl.maximum(", "    near = units - 1 - gl.minimum(gl.maximum(")
NOTICED = "        if leads & ((near != unit) | (known == 0)):\n"
Edits = tuple[tuple[str, str], ...]
GUESSES: dict[str, Edits] = {
    "right": (), "wrong": (GUESS,), "wrong, unnoticed": (GUESS, (NOTICED, NOTICED.replace("near != unit", "unit < 0"))),
    "right, fresh unnoticed": ((NOTICED, NOTICED.replace("known == 0", "unit < 0")),),
    "the others copy none": (("        if not LEADS or not leads:\n", "        if not LEADS:\n"),),
}  # fmt: skip
LATER: dict[str, Edits] = {
    "right": (), "wrong": (GUESS, ("(behind % heads)", "(heads - 1 - behind % heads)")),
    "no decay of the last row": (("copied(log_decay, row_k < rows,", "copied(log_decay, row_k < rows - 1,"),),
    "one beta": (("copied_gates(beta + row * x.beta.per_row,", "copied_gates(beta + row * 0,"),),
}  # fmt: skip


@pytest.mark.parametrize(("requests", "does", "guess"), [
    *((70, "leads", guess) for guess in GUESSES), *((130, "ahead", guess) for guess in LATER),
])  # fmt: skip
def test_state_of_a_wrong_guess_is_copied_again(
    requests: int, does: str, guess: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first programs copy the state of a guessed unit, or programs prefetch states. Some requests are idle."""
    edits = (GUESSES if does == "leads" else LATER)[guess]
    on_device(("gdn_windows.token_by_token_gluon", edits))
    file: Any = sys.modules["instep_optimized.kernels.gdn_dispatch"]
    heads = ChannelHeads(4, 4, 128, 128)
    assert getattr(file.staged.shape_for("channels", 4, requests * 4 * 128), does)
    other = planted_kernels("gdn_windows.token_by_token_gluon", edits, tmp_path, monkeypatch)
    monkeypatch.setattr(file.staged, "staged_window", other.staged_window)
    rows = stream(heads, 4, 41, "cuda")

    def outcome() -> list[Tensor]:
        world = World.of(TRITON, heads, "cuda", size=8, slots=requests + 1)
        world.state.view[1:] = Draw(42, "cuda").normal(requests, *world.state.view.shape[1:])
        for pool, seed in zip(world.rings, (43, 44, 45), strict=True):
            pool.view[1:] = Draw(seed, "cuda").normal(1, *pool.view.shape[1:]).sigmoid()
        turns = [Turn(-1 if slot % 5 == 0 else slot, rows, 4, slot % 4, fresh=slot % 3 == 0)
                 for slot in range(1, requests + 1)]  # fmt: skip
        return [world.run(turns), world.state.view[1:].clone()]

    found = outcome()
    monkeypatch.setattr(file, "staged", None)
    right = all(same_bits(*both) for both in zip(found, outcome(), strict=True))
    assert right is (guess in ("right", "wrong"))


@WHOLE
@interpreted
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_engine_with_kernels_moves_the_memory_of_every_strategy(strategy: str) -> None:
    """Labels go through a hand-made model whose layers have decays per channel."""
    trace = few_channels("ragged", 2)
    found = agreed(streamed(trace, Setting("triton", strategy=strategy), "model", until=7, recurrence="kda"))
    assert {"conv", "state"} <= {one.place.component for one in found.compared if one.check == "stream"}


# Prompts -------------------------------------------------------------------------------------------------------------
COUNTS = (1, 17, 64, 65, 130)


def errors_of_prompts(kernel: Callable[..., None], regime: str, counts: tuple[int, ...], heads: ChannelHeads) -> Any:
    """For each request: the errors of its read-outs and state, and those of `by_bf16_products`."""
    decay, shared = REGIMES[regime]
    rows = delta_rows(Draw(1, HERE), heads, sum(counts), decay, shared=shared)
    if regime == "rare":
        rows.log_decay[9::23, :, 3::50] = -1e7
    elif regime == "late":
        rows.log_decay[40::64, :, 3::50] = -100.0
    pool = states(heads, len(counts) + 1)
    core, after = served(kernel, "chunk", rows, pool, counts)
    for number, count in enumerate(counts):
        span = slice(sum(counts[:number]), sum(counts[:number]) + count)
        one = GdnInputs(*(x[span] for x in rows))
        right, ended = by_the_definition(one, pool[number + 1])
        twin, left = by_bf16_products(one, pool[number + 1])
        yield (relative(core[span], right), relative(after[number + 1], ended[-1]),
               relative(twin, right), relative(left, ended[-1]))  # fmt: skip


@few(2)
@pytest.mark.parametrize("regime", REGIMES)
def test_prompts_follow_the_definition_as_exactly_as_declared(regime: str) -> None:
    for core, state, core_twin, state_twin in errors_of_prompts(chunk64.blocks, regime, COUNTS, SMALL):
        assert core <= FACTOR * core_twin and state <= FACTOR * state_twin
    for core, state, *_ in errors_of_prompts(chunk16_fp32.chunk, regime, (1, 17, 40), SMALL):
        assert core <= FP32 and state <= FP32


@native
@pytest.mark.parametrize("regime", REGIMES)
def test_prompts_of_real_heads_follow_the_definition(regime: str) -> None:
    for core, state, core_twin, state_twin in errors_of_prompts(chunk64.blocks, regime, (300, 64, 5), KIMI):
        assert core <= FACTOR * core_twin and state <= FACTOR * state_twin
    for core, state, *_ in errors_of_prompts(chunk16_fp32.chunk, regime, (100,), KIMI):
        assert core <= FP32 and state <= FP32


def apart(kernel: Callable[..., None], strong: float, tokens: int) -> tuple[float, float]:
    """How far the kernel is from the declared yardstick, and from the truth, as shares of the yardstick's error.

    The first is over all numbers, the second that of the worst head, by its largest number as in T2.
    """
    heads = ChannelHeads(8, 8, 8, 8)  # with few numbers, errors depend on what exactly is rounded
    rows, pool = delta_rows(Draw(1, HERE), heads, tokens, (-strong, -1e-4)), states(heads, 2)
    right = by_the_definition(rows, pool[1])
    core, after = served(kernel, "chunk", rows, pool, (tokens,))
    operands = alone("kda.chunk", TRITON.products)
    with Reordered(torch.Generator().manual_seed(0), operands):
        declared = in_chunks(operands, rows, pool[1])
    far, worst = [], []
    for x, r, o, axis in zip((core, after[1]), declared, (right[0], right[1][-1]), (1, 0), strict=True):
        far.append(float((x - r).norm() / (r - o).norm()))
        own, due = ((one - o).abs().transpose(0, axis).flatten(1).amax(1) for one in (x, r))
        worst.append(float((own / due).max()))
    return max(far), max(worst)


# (strength of decays, tokens): all exponents near that of the middle token, and all far from it. Triangles of more
# tokens are joined by products of three matrices, and the kernel begins with the other two.
ALIKE, ROUNDED = ((1.0, 16), (300.0, 16)), 0.1


def test_kernel_rounds_what_is_declared_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs that the yardstick sums without rounding, or scales by other numbers, show as a kernel's slip does."""
    for case in ALIKE:
        far, worst = apart(chunk64.blocks, *case)
        assert far <= ROUNDED and worst <= 2
    monkeypatch.setattr(chunked_delta_rule, "NEAR", 0.0)
    assert apart(chunk64.blocks, *ALIKE[0])[0] > 3 * ROUNDED
    monkeypatch.setattr(chunked_delta_rule, "_pairs_by_products", lambda *rows: chunked_delta_rule._pairs(*rows[:3]))
    assert apart(chunk64.blocks, *ALIKE[0])[0] > 3 * ROUNDED


SLIPS = {
    "gates of 16 bits": ("gates + at * (C + KT) + i, write)", "gates + at * (C + KT) + i, write.to(tl.bfloat16))"),
    "decays of 16 bits": ("tl.exp2(end))", "tl.exp2(end).to(tl.bfloat16))"),
    "sums of decays of 16 bits": (
        "tl.cumsum(forget, axis=0)  # [C, KS], G", "tl.cumsum(forget, axis=0).to(tl.bfloat16).to(tl.float32)"),
    "keys of 16 bits": (
        "# [C, KS]\n        forget", "\n        keys = keys.to(tl.bfloat16).to(tl.float32)\n        forget"),
    "states of 16 bits": (
        "narrow = state.to(", "state = state.to(tl.bfloat16).to(tl.float32)\n        narrow = state.to("),
    "recalled values of 16 bits": (
        "dot(keys, narrow, WIDEN, False)", "dot(keys, narrow, WIDEN, False).to(tl.bfloat16).to(tl.float32)"),
}  # fmt: skip
BEYOND = ("updates decay since the start of the block", "a query does not see its own token", "a value is not gated")


@few(2)
@interpreted
@pytest.mark.parametrize("fault", [*SLIPS, *BEYOND])
def test_undeclared_rounding_is_apart_from_the_yardstick(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any rounding more than is declared is apart from the yardstick; a slip is also beyond what T2 allows."""
    text = SLIPS[fault] if fault in SLIPS else BLOCK_FAULTS[fault]
    planted = planted_kernels("gdn_prefill.chunk64", (text,), tmp_path, monkeypatch)
    far, worst = apart(planted.blocks, 1.0, 3)  # nothing has decayed much
    assert far > 3 * ROUNDED and (fault in SLIPS or worst > 10 * YARDSTICK_FACTOR)


def test_prompt_has_the_bits_of_itself_alone() -> None:
    rows, pool = stream(SMALL, 70, 5, HERE), states(SMALL, 4)
    for kernel in (chunk64.blocks, chunk16_fp32.chunk):
        core, after = served(kernel, "chunk", rows, pool, (3, 66, 1))
        alone, kept = served(kernel, "chunk", cut(rows, 3, 66), pool[1:3], (66,))
        assert same_bits(core[3:69], alone) and same_bits(after[2], kept[1])


def test_dispatch_takes_decays_per_channel_in_both_forms() -> None:
    """bf16 activations take blocks of 64, fp32 activations blocks of 16; windows take neither."""
    rows, pool = stream(SMALL, 5, 6, HERE), states(SMALL, 2)
    for dtype, form, kernel in ((torch.bfloat16, "chunk", chunk64.blocks), (torch.float32, "chunk", chunk16_fp32.chunk),
                                (torch.float32, "window", windows)):  # fmt: skip
        right, kept = served(kernel, form, rows, pool, (5,))

        def through(inputs: GdnInputs, part: Part, core: Tensor, _: int, dtype: torch.dtype = dtype) -> None:
            core.copy_(gdn(inputs=inputs, parts=(part,), dtype=dtype, to=at("core")))

        core, after = served(through, form, rows, pool, (5,))
        assert same_bits(core, right.to(dtype).float()) and same_bits(after, kept)


def test_inputs_have_a_decay_of_every_channel() -> None:
    """Alone, and with the conv before them; a is a view of wider rows, as the linear maps leave it."""
    (H, HV, K, V), draw = SMALL, Draw(9, HERE)
    x, weight = draw.normal(7, 2 * H * K + HV * V), draw.normal(2 * H * K + HV * V, 1)
    a, b = draw.normal(7, HV * K + 3)[:, : HV * K].view(7, HV, K), draw.normal(7, HV)
    rule = {"a": a, "b": b, "A_log": draw.normal(HV), "dt_bias": draw.normal(HV, K), "key_heads": H, "key_dim": K}
    pool = Address(draw.normal(2, 2 * H * K + HV * V, 0), draw.ints([1]))
    part = Part("chunk", draw.ints([0]), draw.ints([7]), 7, pool, draw.ints([0]).bool())
    mixed = torch.nn.functional.silu(x * weight[:, 0])
    assert TRITON.conv_inputs is not None
    for found in (TRITON.gdn_inputs(mixed=mixed, **rule, to=5 * (at("q"),)),
                  TRITON.conv_inputs(x=x, weight=weight, parts=(part,), **rule, to=6 * (at("q"),))):  # fmt: skip
        q, k, v = mixed.double().split([H * K, H * K, HV * V], dim=1)
        q, k = (torch.nn.functional.normalize(y.view(7, H, K), dim=-1) for y in (q, k))
        decay = -rule["A_log"].double().exp()[:, None] * torch.log1p((a.double() + rule["dt_bias"]).exp())
        for one, right in zip(found, (q * K**-0.5, k, v.view(7, HV, V), decay, b.double().sigmoid()), strict=True):
            assert one.shape == right.shape and relative(one, right) <= FP32


BLOCK_FAULTS = {
    "the decays of the neighbouring channels": (
        "load(log_decay + at_k[None, :],", "load(log_decay + (at_k ^ 1)[None, :],"),
    "decays by powers of two": ("other=0.0) * LOG2E, LEAST)", "other=0.0), LEAST)"),
    "a bound above decays": ("LEAST = tl.constexpr(-126.0)", "LEAST = tl.constexpr(-1.0)"),
    "rare: no least decay": ("LEAST = tl.constexpr(-126.0)", "LEAST = tl.constexpr(-1e30)"),
    "late: exponents after the middle count as near": ("tl.max(tl.max(tl.abs(over),", "tl.max(tl.max(over,"),
    "rare: one product for exponents of any size": ("FAR = tl.constexpr(100.0)", "FAR = tl.constexpr(1e30)"),
    "earlier tokens do not decay": ("(keys * tl.exp2(-over))", "keys"),
    "later keys do not decay": ("tl.trans((keys * decay).to", "tl.trans(keys.to"),
    "later queries do not decay": ("tl.trans((queries * decay).to", "tl.trans(queries.to"),
    "the next channels replace those before": ("WIDEN, False, seen)", "WIDEN, False)"),
    "rare: the boundary of a half is late": ("== HALF - 1)[:, None]", "== HALF + HALF // 2)[:, None]"),
    "rare: the boundary of a half is one token early": ("== HALF - 1)[:, None]", "== max(HALF - 2, 0))[:, None]"),
    "rare: exponents above 0": ("tl.exp2(-tl.abs(total - _middle", "tl.exp2((total - _middle"),
    "rare: one halving is left out": ("HALVINGS = tl.constexpr(6)", "HALVINGS = tl.constexpr(5)"),
    "rare: pairs of all halves": (">> halving == 1)", ">> halving >= 1)"),
    "a query does not see its own token": ("own += tl.sum(keys * queries, axis=1)", "own += 0.0"),
    "updates decay since the start of the block": ("(keys * until)", "(keys * since)"),
    "queries do not decay": ("(queries * since)", "queries"),
    "the state decays by one channel": ("tl.exp2(end))", "tl.exp2(end + 0 * at_k) * 0 + tl.exp2(tl.max(end, axis=0)))"),
    "updates are not decayed keys": ("tl.trans(left)", "tl.trans(keys)"),
    "a value is not gated": ("gates + at * (C + KT) + i, write)", "gates + at * (C + KT) + i, write * 0 + 1)"),
}  # fmt: skip
CHUNK_FAULTS = {
    "a token decays by its own gate, too": ("(i > j)[:, None], forget", "(i >= j)[:, None], forget"),
    "the neighbouring channel in pairs": (
        "head) + at_k[None, :], mask=inside, other=0.0)  # [C, KT]\n    write",
        "head) + (at_k ^ 1)[None, :], mask=inside, other=0.0)\n    write"),
    "queries do not decay": ("tl.dot(since * queries,", "tl.dot(queries,"),
    "keys do not decay": ("tl.dot(since * keys,", "tl.dot(keys,"),
    "updates do not decay": ("tl.trans(keys * until),", "tl.trans(keys),"),
    "the state decays by the mean": ("axis=0))[:, None] * state", "axis=0) * 0 + tl.sum(forget) / K)[:, None] * state"),
}  # fmt: skip


@few(3)
@interpreted
@pytest.mark.parametrize("fault", [*BLOCK_FAULTS, *(f"fp32: {one}" for one in CHUNK_FAULTS)])
def test_fault_in_a_prompt_exceeds_its_bound(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault in BLOCK_FAULTS:
        planted = planted_kernels("gdn_prefill.chunk64", (BLOCK_FAULTS[fault],), tmp_path, monkeypatch)
        monkeypatch.setattr(planted, "SLICE", 16)  # two steps over the channels
        regime = next((one for one in REGIMES if fault.startswith(f"{one}: ")), "usual")
        (found,) = errors_of_prompts(planted.blocks, regime, (80,), SMALL)
        assert not (found[0] <= 2 * FACTOR * found[2] and found[1] <= 2 * FACTOR * found[3])
    else:
        text = CHUNK_FAULTS[fault.removeprefix("fp32: ")]
        planted = planted_kernels("gdn_prefill.chunk16_fp32", (text,), tmp_path, monkeypatch)
        (found,) = errors_of_prompts(planted.chunk, "usual", (20,), SMALL)
        assert not (found[0] <= 10 * FP32 and found[1] <= 10 * FP32)


