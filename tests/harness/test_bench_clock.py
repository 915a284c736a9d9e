"""The clock of `instep bench`: whose turn it is, what is timed of a turn, which periods work has, and what floors are.

Leaves out: figures, which need a card.
"""

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.errors import Unsupported
from instep_speed.bench import interleaved_timing
from instep_speed.bench.drawn_rows import Rows
from instep_speed.bench.interleaved_timing import SAMPLES, TRIES, Times, less, timed
from instep_speed.bench.kinds import strategies
from instep_speed.bench.peers import sglang
from support.inputs.bench_runs import CPU, ground
from support.running.covering import few


def test_arms_are_timed_in_turn_and_a_part_is_taken_off() -> None:
    calls = list[str]()
    found = timed({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, 4)
    assert "".join(calls[:8]) in ("abbaabba", "baabbaab") and len(found["a"].samples) == 4
    assert less(Times((3.0, 5.0), "graph"), Times((1.0, 1.0), "graph"), 2).samples == (1.0, 2.0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A log of a card: events are recorded and waited for, in turn with the work between them."""
    happened = list[str]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            pass

        def record(self) -> None:
            happened.append("event")

        def synchronize(self) -> None:
            happened.append("wait")

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return happened


class Held:
    """A fake card for a clock. late: how often it had to start before all was launched"""

    def __init__(self, said: list[str], late: int = 0) -> None:
        self.said, self.late = said, late
        self.wait, self.hold = partial(said.append, "idle"), partial(said.append, "hold")

    def release(self) -> float | None:
        self.said.append("release")
        self.late -= 1
        return None if self.late >= 0 else 1.0


def test_sample_on_a_card_directly_follows_the_same_work(said: list[str]) -> None:
    """The device does not begin before all is launched. Work that waits for the device would wait for itself then."""
    card: Any = Held(said)
    between = interleaved_timing._between_events(lambda: said.append("work"), card, 2)
    assert between == 1e-3  # two turns before: three have no half
    assert said == ["idle", "hold", "work", "work", "event", "work", "event", "release", "wait"]
    said.clear()
    interleaved_timing._between_events(lambda: said.append("work"), None, 1)
    assert said == ["work", "event", "work", "event", "wait"]


@pytest.mark.parametrize(("late", "turns", "seconds"), [(1, 2, 1e-3), (TRIES, TRIES, None)])
def test_a_sample_for_which_the_host_was_late_is_taken_again_or_left_out(
    said: list[str], late: int, turns: int, seconds: float | None
) -> None:
    card: Any = Held(said, late)
    assert interleaved_timing._between_events(lambda: said.append("work"), card, 1) == seconds
    assert said.count("release") == turns and (said[-1] == "wait") is (seconds is not None)


@pytest.mark.parametrize(("waits", "how"), [(False, "graph"), (True, "launched")])
def test_work_that_waits_for_the_host_is_not_held_back(
    waits: bool, how: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be captured, and would wait for a device that waits for it."""

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    @contextmanager
    def captured(graph: Graph) -> Iterator[None]:
        yield
        if waits:
            raise RuntimeError("operation not permitted when stream is capturing")

    for name, fake in (("synchronize", lambda: None), ("CUDAGraph", Graph), ("graph", captured)):
        monkeypatch.setattr(torch.cuda, name, fake)
    card: Any = Held(said)
    sample, told, replay = interleaved_timing._ready(lambda: said.append("work") or "left", card, 1)
    said.clear()
    sample()
    assert told == how and ("hold" in said) is not waits and said.count("work" if waits else "replay") == 2
    assert (replay and replay()) == (None if waits else "left")


class Turns:
    """Work that counts its calls, on a card for which the host is late `late` times.

    A sample is the number of the timed call: the last one when a hold is released.
    """

    def __init__(self, late: Callable[[], bool]) -> None:
        self.turn, self.late, self.timed = 0, late, list[int]()

    def work(self) -> None:
        self.turn += 1

    def wait(self) -> None:
        pass

    hold = wait

    def release(self) -> float | None:
        return None if self.late() else 1.0

    def ready(self, work: Callable[[], object], card: object, period: int) -> tuple[Any, str, None]:
        held: Any = self

        def sample() -> float | None:
            return None if interleaved_timing._between_events(self.work, held, period) is None else float(self.turn)

        return sample, "graph", None


@pytest.mark.parametrize("late", [0.0, 0.1, 0.5], ids=["never", "at times", "often"])
@pytest.mark.parametrize("period", range(1, 31))
def test_every_phase_of_a_period_is_timed_alike(
    period: int, late: float, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of repeated or dropped samples, and next to arms of other periods."""
    draw = random.Random(period)
    arms = {f"of {one}": (one, Turns(lambda: draw.random() < late)) for one in (period, 1, 13)}
    monkeypatch.setattr(interleaved_timing, "_ready", lambda work, card, period: work().ready(work, card, period))
    works = {name: (lambda turns=turns: turns) for name, (_, turns) in arms.items()}
    found = timed(works, CPU, periods={name: one for name, (one, _) in arms.items()})
    for name, (one, _) in arms.items():
        turns = [int(turn) for turn in found[name].samples]
        due = -(-SAMPLES // one) * one
        seen = Counter(turn % one for turn in turns)
        assert len(seen) in (one, 0) and len(set(seen.values())) <= 1, (name, seen)
        assert len(turns) + found[name].lacking == due and (late == 0.5 or len(turns) == due)
        assert late or all(after - turn > 1 for turn, after in pairwise(turns))


def test_dropped_samples_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved_timing, "_ready", lambda work, card, period: (work, "graph", None))
    turn = iter(range(1000))
    found = timed({"never": lambda: None, "rarely": lambda: [None, 2.0][next(turn) % 6 == 0]}, CPU)
    assert found["never"].data() == {"samples": 0, "how": "graph, 20 of 20 left out: the host was late"}
    assert found["rarely"].data() == Times((2.0,) * 10, "graph, 10 of 20 left out: the host was late").data()
    both = less(found["rarely"], found["never"], 1)
    assert not both.samples and both.lacking == SAMPLES
    monkeypatch.setattr(interleaved_timing, "timed", lambda works, *_: {name: Times((), "graph", 5) for name in works})
    with pytest.raises(Unsupported, match="the host was late"):
        interleaved_timing.rates(CPU, torch.float32)


# Periods that arms declare

AT = {"batch": 2, "heads": 4, "state": "float32"}


def repeats(seen: list[Any]) -> int:
    """After how many turns a list repeats itself."""
    return next(turns for turns in range(1, len(seen)) if seen[turns:] == seen[:-turns])


@few(4)
@pytest.mark.parametrize("window", range(1, 9))
def test_strategy_stores_once_per_period(window: int) -> None:
    stored = list[tuple[int, ...]]()

    def gdn(*, parts: Any, **given: Any) -> torch.Tensor:
        stored.extend(tuple(one.settled.units.tolist()) for one in parts if one.settled is not None)
        return PLAIN.gdn(parts=parts, **given)

    due = dict[str, int]()
    cell = strategies.make(ground(peers=False, it=replace(PLAIN, gdn=gdn)), {**AT, "window": window})
    for arm in cell.arms:
        assert arm.work is not None
        stored.clear()
        for _ in range(3 * arm.period):
            arm.work()
        rounds = stored[arm.period * arm.units :: arm.units]  # without the first period, in which a ring fills
        due[arm.name] = arm.period
        assert not rounds or len(rounds) == 2 * arm.period
        assert not rounds or (repeats([*rounds, *rounds]) == arm.period and max(max(one) for one in rounds) > 0)
    spare = max(16, 4 * window) - 2 * window
    lazy = spare // strategies.accepted_of(window) + 1
    assert due == {"snapshot": 1, "columns": 1, "rerun": 1, "lazy_rerun": lazy}
    assert window not in (2, 4) or lazy == {2: 13, 4: 3}[window]


def cursors(write_pos: Any, cache_base: Any, is_flush: Any, accepted: Any, index: Any, size: int, widest: int) -> None:
    """ReplaySSM's rule, as SGLang 0.5.23 has it, for where SGLang is not installed."""
    write_pos[1:] += accepted
    is_flush[1:] = (write_pos[1:] + 2 * widest > size).to(torch.int8)


def finished(*, write_pos: torch.Tensor, is_flush: torch.Tensor, **given: Any) -> None:
    write_pos[is_flush != 0] = 0
    is_flush.zero_()


@pytest.mark.parametrize("window", range(1, 9))
def test_replayssm_folds_once_per_period(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, folds = "sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode", list[list[int]]()
    try:
        with warnings.catch_warnings(action="ignore"):
            sglang._kernels()
            module: Any = import_module(name)
    except ImportError:
        module = ModuleType(name)
        module.commit_gdn_replayssm_spec, module.commit_gdn_replayssm_circular = cursors, finished
        monkeypatch.setattr(sglang, "_kernels", lambda: None)
        for depth in range(1, name.count(".") + 1):
            monkeypatch.setitem(sys.modules, name.rsplit(".", depth)[0], ModuleType("package"))
        monkeypatch.setitem(sys.modules, name, module)

    fold = module.commit_gdn_replayssm_circular

    def folded(*, is_flush: torch.Tensor, **given: Any) -> None:
        folds.append(is_flush[1:].tolist())
        fold(is_flush=is_flush, **given)

    monkeypatch.setattr(module, "commit_gdn_replayssm_circular", folded)
    monkeypatch.setattr(module, "gdn_replayssm_spec_decode", lambda *, out, **given: out, raising=False)
    at, on = {**AT, "window": window}, ground(peers=False)
    config = on.config(4, 1)
    arm = sglang.replay(on, at, "it", [Rows.drawn(on, config, 2 * window)], config)
    assert arm.work is not None
    for _ in range(3 * arm.period):
        arm.work()
    rounds = folds[arm.period :]
    assert repeats([*rounds, *rounds]) == arm.period and [1, 1] in rounds
    assert window not in (2, 4) or arm.period == {2: 13, 4: 3}[window]


def test_a_floor_is_made_of_the_fastest_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tensor is read twice as fast as the first."""
    took = {"copy": 4.0, "product": 1.0, "read 0": 2.0, "read 1": 1.0, "read 2": 3.0}
    monkeypatch.setattr(
        interleaved_timing, "timed", lambda works, *_: {name: Times((took[name],), "called") for name in works}
    )
    found = interleaved_timing.rates(CPU, torch.float32)
    assert found.read == 4.0 * 2**23 and found.copy == found.read / 2
