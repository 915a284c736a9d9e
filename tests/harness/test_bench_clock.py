"""The clock of `instep bench`: whose turn it is, what is timed of a turn, and what floors are made of.

Leaves out: figures, which need a card.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest
import torch

from instep.bench import clock
from instep.bench.clock import SAMPLES, Times, less, timed

CPU = torch.device("cpu")


def test_arms_are_timed_in_turn_and_a_part_is_taken_off() -> None:
    calls = list[str]()
    found = timed({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, 4)
    assert "".join(calls[:8]) in ("abbaabba", "baabbaab") and len(found["a"].samples) == 4
    assert less(Times((3.0, 5.0), "graph"), Times((1.0, 1.0), "graph"), 2).samples == (1.0, 2.0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on a card: events are recorded, and waited for, in turn with the work between them."""
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
    """What a clock asks of a card. late: how often it had to begin before all was launched"""

    def __init__(self, said: list[str], late: int = 0) -> None:
        self.said, self.late = said, late
        self.wait, self.hold = partial(said.append, "idle"), partial(said.append, "hold")

    def release(self) -> float | None:
        self.said.append("release")
        self.late -= 1
        return None if self.late >= 0 else 1.0


def test_on_a_card_a_sample_stands_right_behind_the_same_work(said: list[str]) -> None:
    """The device does not begin before all is launched. Work that waits for the device would wait for itself then."""
    card: Any = Held(said)
    assert clock._between_events(lambda: said.append("work"), card, 2) == 1e-3
    assert said == ["idle", "hold", "work", "work", "event", "work", "event", "release", "wait"]
    said.clear()
    clock._between_events(lambda: said.append("work"), None, 1)
    assert said == ["work", "event", "work", "event", "wait"]


@pytest.mark.parametrize(("late", "turns"), [(1, 2), (9, clock.TRIES)])
def test_a_sample_for_which_the_host_was_late_is_taken_again(said: list[str], late: int, turns: int) -> None:
    card: Any = Held(said, late)
    clock._between_events(lambda: said.append("work"), card, 1)
    assert said.count("release") == turns and said[-1] == "wait"


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
    sample, told = clock._ready(lambda: said.append("work"), card)
    said.clear()
    sample(1)
    assert told == how and ("hold" in said) is not waits and said.count("work" if waits else "replay") == 2


def on_a_card(work: Callable[[], object], card: object) -> tuple[Callable[[int], float], str]:
    """Each sample says which of all turns of this work it was."""
    turn = count()
    return lambda before: float([next(turn) for _ in range(before + 1)][-1]), "graph"


@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_work_that_differs_every_few_turns_is_seen_at_each_alike(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `lazy_rerun` does, which stores its states every few rounds."""
    monkeypatch.setattr(clock, "_ready", on_a_card)
    turns = [int(turn) for turn in timed({"a": lambda: None}, CPU)["a"].samples]
    seen = Counter(turn % every for turn in turns)
    assert len(seen) == every and max(seen.values()) - min(seen.values()) <= 1
    assert len(turns) == SAMPLES and all(after - turn > 1 for turn, after in pairwise(turns))


def test_a_floor_is_made_of_the_fastest_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tensor is read twice as fast as the first."""
    took = {"copy": 4.0, "product": 1.0, "read 0": 2.0, "read 1": 1.0, "read 2": 3.0}
    monkeypatch.setattr(clock, "timed", lambda works, *_: {name: Times((took[name],), "called") for name in works})
    found = clock.rates(CPU, torch.float32)
    assert found.read == 4.0 * 2**23 and found.copy == found.read / 2
