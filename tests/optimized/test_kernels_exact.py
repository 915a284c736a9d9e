"""Kernels that must be exact bit for bit, and the difficult numerics, against fp64.

Leaves out: the shared op cases (`test_kernels.py`). Every body runs interpreted on a CPU, native on a GPU.
"""

from dataclasses import replace

import pytest
import torch

from instep.kit.cases.case import Draw, at
from instep.kit.cases.conv_and_gdn import Heads
from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from support.worlds.rings import delta_rows

HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []
H, HV, K, V = 2, 4, 32, 16
SLOTS, ROWS_KEPT, WIDEST = 9, 3, 5
ONCE = 1e-6  # a few roundings of fp32, relative


def gdn_rows(rows: int, seed: int, decay: tuple[float, float] = (-1.5, -1e-4), shared: float = 0.0) -> GdnInputs:
    """Normalised inputs; `shared` mixes one common direction into every key."""
    return delta_rows(Draw(seed, HERE), Heads(H, HV, K, V), rows, decay, shared=shared)


def states(seed: int) -> torch.Tensor:
    """A `VK` pool seen as [slot, HV, K, V]."""
    return Draw(seed, HERE).normal(SLOTS, HV, V, K).transpose(2, 3)


def part(form: str, slots: list[int], count: list[int], pool: torch.Tensor, **more: object) -> Part:
    """Requests packed one after the other, in place by default."""
    draw = Draw(0, HERE)
    here = Address(pool, draw.ints(slots))
    begin = [sum(count[:i]) for i in range(len(count))]
    fields = {"store": here, **more}
    fresh = torch.zeros(len(slots), dtype=torch.bool, device=HERE)
    return Part(form, draw.ints(begin), draw.ints(count), max(count), here, fresh, **fields)  # type: ignore[arg-type]


def run(inputs: GdnInputs, *parts: Part) -> torch.Tensor:
    return TRITON.gdn(inputs=inputs, parts=parts, dtype=torch.float32, to=at("core"))


def some(inputs: GdnInputs, rows: slice) -> GdnInputs:
    return GdnInputs(*(x[rows].contiguous() for x in inputs))


def test_window_equals_decoding_its_tokens_one_by_one() -> None:
    inputs, pool, again = gdn_rows(5, 1), states(2), states(2)
    core = run(inputs, part("window", [4], [5], pool))
    for t in range(5):
        one = run(some(inputs, slice(t, t + 1)), part("window", [4], [1], again))
        assert same_bits(one[0], core[t])
    assert same_bits(pool, again)
    assert not same_bits(pool, states(2))


def test_column_t_of_a_verify_is_the_state_after_t_plus_1_tokens() -> None:
    inputs, pool = gdn_rows(8, 3), states(4)
    kept = Draw(5, HERE).normal(ROWS_KEPT, WIDEST, HV, V, K).transpose(3, 4)
    untouched = kept.clone()
    each = Address(kept, Draw(0, HERE).ints([2, 0]))
    run(inputs, part("window", [6, 3], [5, 3], pool, store=None, per_row=each))
    assert same_bits(pool, states(4))
    for row, slot, first, count in ((2, 6, 0, 5), (0, 3, 5, 3)):
        again = states(4)
        for t in range(count):
            run(some(inputs, slice(first + t, first + t + 1)), part("window", [slot], [1], again))
            assert same_bits(kept[row, t], again[slot])
    assert same_bits(kept[0, 3:], untouched[0, 3:]) and same_bits(kept[1], untouched[1])


def test_later_rows_and_other_requests_do_not_reach_earlier_rows() -> None:
    inputs = gdn_rows(7, 6)
    other = GdnInputs(*(torch.cat([x[:2], y[2:]]) for x, y in zip(inputs, gdn_rows(7, 7), strict=True)))
    pools = states(8), states(8)
    wide = run(inputs, part("window", [1, 2], [4, 3], pools[0]))
    changed = run(other, part("window", [1, 2], [4, 3], pools[1]))
    assert same_bits(wide[:2], changed[:2])
    assert not torch.equal(wide[2:], changed[2:])
    alone = run(some(inputs, slice(0, 4)), part("window", [1], [4], states(8)))
    assert same_bits(alone, wide[:4])


def test_the_slot_and_the_pitch_change_no_bit() -> None:
    inputs, narrow = gdn_rows(3, 9), states(10)
    wide = torch.full((SLOTS, HV, V + 3, K + 16), torch.nan, device=HERE)[:, :, :V, :K].transpose(2, 3)
    wide[7] = narrow[2]
    run(inputs, part("window", [2], [3], narrow))
    run(inputs, part("window", [7], [3], wide))
    assert same_bits(narrow[2], wide[7])


def test_a_conv_window_is_its_tokens_one_by_one_in_place() -> None:
    C, W = 40, 4
    draw = Draw(11, HERE)
    x, weight, memory = draw.normal(6, C), draw.normal(C, W), draw.normal(SLOTS, C, W - 1)
    whole, single = memory.clone(), memory.clone()
    mixed = TRITON.conv(x=x, weight=weight, parts=(part("chunk", [5], [6], whole),), to=at("mixed"))
    for t in range(6):
        one = TRITON.conv(x=x[t : t + 1], weight=weight, parts=(part("window", [5], [1], single),), to=at("mixed"))
        assert same_bits(one[0], mixed[t])
    assert same_bits(whole, single)
    assert same_bits(whole[5], x[3:].t())


def test_columns_written_over_the_read_column_have_the_right_windows() -> None:
    C, W = 40, 4
    draw = Draw(12, HERE)
    x, weight, memory = draw.normal(4, C), draw.normal(C, W), draw.normal(2, 4, C, W - 1)
    line = torch.cat([memory[1, 2].t(), x])
    units = draw.ints([1])
    both = replace(
        part("window", [0], [4], memory), read=Address(memory, units, draw.ints([2])), store=None,
        per_row=Address(memory, units),
    )  # fmt: skip
    TRITON.conv(x=x, weight=weight, parts=(both,), to=at("mixed"))
    for t in range(4):
        assert same_bits(memory[1, t], line[t + 1 : t + W].t())


REGIMES = {
    "long memory": ((-1e-3, -1e-5), 0.0),
    "strong decay": ((-60.0, -1e-4), 0.0),
    "correlated keys": ((-1e-2, -1e-4), 3.0),
    "no decay": ((0.0, 0.0), 1.0),
}


@pytest.mark.parametrize("form", ["chunk", "window"])
@pytest.mark.parametrize("regime", REGIMES)
def test_many_tokens_match_the_recurrence(regime: str, form: str) -> None:
    decay, shared = REGIMES[regime]
    count = [33, 1, 65] if form == "chunk" else [9, 1, 17]
    inputs = gdn_rows(sum(count), 13, decay, shared)
    truth_inputs = GdnInputs(*(x.double() for x in inputs))
    pool, plain, truth = states(14), states(14), states(14).double()
    core = run(inputs, part(form, [8, 2, 5], count, pool))
    narrow = PLAIN.gdn(inputs=inputs, parts=(part(form, [8, 2, 5], count, plain),), dtype=torch.float32, to=at("core"))
    wanted = PLAIN.gdn(
        inputs=truth_inputs, parts=(part(form, [8, 2, 5], count, truth),), dtype=torch.float64, to=at("core")
    )
    for ours, twin, right in ((core, narrow, wanted), (pool[5], plain[5], truth[5]), (pool[8], plain[8], truth[8])):
        error, allowed = (float((x - right).norm() / right.norm()) for x in (ours, twin))
        assert error <= 3 * allowed + ONCE / 2, f"{error:.1e} against {allowed:.1e} of the recurrence"


@pytest.mark.parametrize("form", ["window", "chunk"])
def test_widths_need_not_be_powers_of_two(form: str) -> None:
    heads, wide, tall = 3, 48, 80
    draw = Draw(16, HERE)
    q, k = (torch.nn.functional.normalize(draw.normal(9, 1, wide), dim=-1) for _ in range(2))
    gates = draw.uniform(9, heads, low=-1.0, high=-0.1), draw.uniform(9, heads, low=0.1, high=0.9)
    inputs = GdnInputs(q, k, draw.normal(9, heads, tall), *gates)
    start = draw.normal(4, heads, wide, tall)
    ours, twin = start.clone(), start.clone()
    core, wanted = (
        ops.gdn(inputs=inputs, parts=(part(form, [3, 1], [4, 5], pool),), dtype=torch.float32, to=at("core"))
        for ops, pool in ((TRITON, ours), (PLAIN, twin))
    )
    assert float((core - wanted).abs().max() / wanted.abs().max()) <= 2 * ONCE
    assert float((ours - twin).abs().max() / twin.abs().max()) <= 2 * ONCE
    assert same_bits(ours[[0, 2]], start[[0, 2]])


def test_gates_keep_their_digits_with_long_memory() -> None:
    a = torch.linspace(-25, 25, 512, device=HERE).view(-1, 1)
    A_log, bias = torch.full((1,), -1.5, device=HERE), torch.full((1,), 0.25, device=HERE)
    mixed = torch.zeros(512, 48, device=HERE)
    served = TRITON.gdn_inputs(mixed=mixed, a=a, b=a, A_log=A_log, dt_bias=bias, key_heads=1, key_dim=16, to=(at("q"),))
    x = a.double() + 0.25
    wanted = -A_log.double().exp() * (x.clamp(min=0) + torch.log1p((-x.abs()).exp()))
    assert float(((served.log_decay - wanted) / wanted).abs().max()) <= 4 * ONCE
    assert float(((served.beta - a.double().sigmoid()) / a.double().sigmoid()).abs().max()) <= 4 * ONCE
    assert not served.q.any() and not served.k.any()


def test_rotation_is_right_far_into_a_text() -> None:
    draw = Draw(15, HERE)
    inputs = {
        "projected": draw.normal(4, 2, 2, 32), "key_raw": draw.normal(4, 1, 32),
        "positions": draw.ints([0, 4095, 99_999, 262_143]), "q_norm": draw.normal(32), "k_norm": draw.normal(32),
    }  # fmt: skip
    served = TRITON.attention_inputs(**inputs, eps=1e-6, rotary_dim=16, theta=1e7, to=(at("query"), at("key")))
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    truth = PLAIN.attention_inputs(**wide, eps=1e-6, rotary_dim=16, theta=1e7, to=(at("query"), at("key")))
    for ours, right in zip(served, truth, strict=True):
        assert float((ours - right).abs().max() / right.abs().max()) <= ONCE


def test_rotation_turns_whatever_the_position() -> None:
    """This includes rows that are all before a text: no position means that the angles exist already."""
    draw = Draw(16, HERE)
    inputs = {
        "projected": draw.normal(16, 2, 2, 32), "key_raw": draw.normal(16, 1, 32), "q_norm": draw.normal(32),
        "k_norm": draw.normal(32), "eps": 1e-6, "rotary_dim": 16, "theta": 1e7, "to": (at("query"), at("key")),
    }  # fmt: skip
    for position in (-2, -1, 0, 1):
        given = inputs | {"positions": draw.ints([position] * 16)}
        for ours, right in zip(TRITON.attention_inputs(**given), PLAIN.attention_inputs(**given), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_offsets_pass_2_to_the_31() -> None:
    pitch = 1 << 30
    memory = torch.empty(2 * pitch + 64, dtype=torch.uint8, device=HERE)  # never touched but at both ends
    pool = memory.as_strided((3, 64), (pitch, 1))
    pool[0], pool[2] = 3, 5
    units = Draw(0, HERE).ints
    TRITON.move(source=Address(pool, units([2])), target=Address(pool, units([0])))
    assert bool((pool[0] == 5).all())
    TRITON.move(source=Address(torch.full_like(pool[:1], 7), units([0])), target=Address(pool, units([2])))
    assert bool((pool[2] == 7).all()) and bool((pool[0] == 5).all())


def test_a_move_keeps_the_payload_of_a_nan_and_the_sign_of_zero() -> None:
    bits = torch.tensor([0x7FC00123, -0x80000000, 0x7F800001, 1], dtype=torch.int32, device=HERE)
    pool = torch.zeros(2, 4, device=HERE)
    pool[0].view(torch.int32).copy_(bits)
    units = Draw(0, HERE).ints
    TRITON.move(source=Address(pool, units([0])), target=Address(pool, units([1])))
    assert torch.equal(pool[1].view(torch.int32), bits)
