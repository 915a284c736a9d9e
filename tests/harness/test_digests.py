"""Digests detect one changed bit at any place, and a trail of digests is the same for the same run only.

Leaves out: their uses (`test_memory.py`; `test_faults.py`: whether a planted fault fired).
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Comparison, Exit, Tier
from instep.watch.digests import bits, digests, together, words
from instep.watch.event_context import EventContext
from instep.watch.event_digests import EventDigests
from instep.watch.memory_changes import bits as bits_of
from support.running.command import Runner


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pool(request: pytest.FixtureRequest) -> torch.Tensor:
    """Guarded states of five slots, seen transposed."""
    drawn = torch.randn(5, 2 * 4 * 6 + 16, generator=torch.Generator().manual_seed(1)).to(request.param)
    return drawn[:, : 2 * 4 * 6].unflatten(1, (2, 6, 4)).mT


def digest(pool: torch.Tensor, blocks: int = 1) -> list[list[int]]:
    return digests(words(pool, blocks)).tolist()


def test_words_are_the_same_memory_as_wide_as_it_comes(pool: torch.Tensor) -> None:
    lines = words(pool)
    assert lines.shape == (5, 1, 24) and lines.dtype is torch.int64
    lines[3] = 0
    assert not pool[3].any() and pool[4].all()


@pytest.mark.parametrize("bit", [0, 1, 22, 23, 30, 31])
def test_any_single_bit_is_seen(pool: torch.Tensor, bit: int) -> None:
    before = digest(pool)
    view = bits(pool)
    for at in ((0, 0, 0, 0), (2, 1, 3, 5), (4, 1, 0, 3)):
        view[at] ^= -(1 << 31) if bit == 31 else 1 << bit
        now = digest(pool)
        assert [number for number in range(5) if now[number] != before[number]] == [at[0]]
        view[at] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert digest(pool) == before


def test_changes_that_cancel_in_a_sum_are_seen(pool: torch.Tensor) -> None:
    before = digest(pool)
    pool[1] *= -1  # every sign: an even number of top bits
    pool[2, 0], pool[2, 1] = pool[2, 1].clone(), pool[2, 0].clone()
    pool[3, 0, 0, 0], pool[3, 0, 0, 2] = pool[3, 0, 0, 2].clone(), pool[3, 0, 0, 0].clone()
    now = digest(pool)
    assert [number for number in range(5) if now[number] != before[number]] == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_a_word_and_its_complement_differ(dtype: torch.dtype) -> None:
    numbers = torch.arange(8, dtype=dtype)[None]
    for at in range(8):
        other = numbers.clone()
        other[0, at] = ~other[0, at]
        assert digest(other) != digest(numbers)
    nothing = torch.zeros_like(numbers)
    assert digest(~numbers) != digest(numbers) and digest(nothing) != digest(~nothing)


def test_signs_of_any_two_elements_do_not_cancel() -> None:
    zeros = torch.zeros(1, 64)
    before, seen = digest(zeros), set()
    for one in range(64):
        for other in range(one):
            flipped = zeros.clone()
            flipped[0, one] = flipped[0, other] = -0.0
            seen.add(digest(flipped)[0][0])
    assert len(seen) == 64 * 63 // 2 and before[0][0] not in seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_positions_of_a_unit_have_digests_of_their_own(dtype: torch.dtype) -> None:
    rows = torch.arange(3 * 4 * 5).view(3, 4, 5).to(dtype)
    before = torch.tensor(digest(rows, 4))
    rows[1, 2, 3] += 1
    changed = torch.tensor(digest(rows, 4)) != before
    assert changed.nonzero().tolist() == [[1, 2]]


def test_units_with_holes_are_read_all_the_same() -> None:
    wide = torch.arange(60).view(3, 4, 5)
    assert digest(wide[:, :, :3]) == digest(wide[:, :, :3].contiguous())


def test_side_by_side_or_one_by_one_is_the_same(pool: torch.Tensor) -> None:
    with pool.device:  # on which the others are made, too
        blocks = torch.arange(72, dtype=torch.float64).view(3, 4, 6)
        many = [words(pool), words(pool[:2]), words(torch.arange(12).view(3, 4)), words(pool.flip(0)), words(blocks, 4),
                words(torch.arange(9, dtype=torch.uint8).view(3, 3)), words(torch.ones(2, 0)),
                words(torch.rand(2, 9000)), words(torch.full((1, 3), -(2**62)))]  # fmt: skip
    assert {lines.device for lines in many} == {pool.device}
    assert [found.tolist() for found in together(many)] == [digests(lines).tolist() for lines in many]


class Spoiler:
    """Flips one bit of a pool after the last event, before the trail is written."""

    name, tier = "spoiler", Tier.BITWISE

    def __init__(self, last: int) -> None:
        self.last = last

    def __call__(self, context: EventContext) -> Iterator[Comparison]:
        if context.index == self.last:
            units = bits_of(context.regions[0].units)
            units[(0,) * units.dim()] ^= 1
        yield from ()


@pytest.mark.slow
def test_digests_repeat_and_differ_for_one_bit(trace: Trace) -> None:
    first, again, spoiled = EventDigests(), EventDigests(), EventDigests()
    replay = Replay(trace, Setting("ledger"), checks=lambda plan: ())  # whether anything is right is not asked
    for also in ([first], [again], [Spoiler(len(trace.events) - 1), spoiled]):
        replay.run(also=also)
    assert first.lines == again.lines and len(first.lines) == len(trace.events)
    assert first.lines[:-1] == spoiled.lines[:-1] and first.lines[-1] != spoiled.lines[-1]


@pytest.mark.slow
def test_replay_writes_it(trace: Trace, instep: Runner, tmp_path: Path) -> None:
    out = tmp_path / "a.trail"
    assert instep("replay", trace.path, "--ops", "ledger", "--until", 2, "--trail", out).code == Exit.AGREED
    written = out.read_text().splitlines()
    assert [line.split()[:3] for line in written[:2]] == [["ledger", "0", "admit"], ["ledger", "1", "admit"]]
    assert len(written) == 3 and len({line.split()[3] for line in written}) == 3
