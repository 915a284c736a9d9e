"""The player: without observers it serves the event and nothing else; observers look on from the outside inwards.

Leaves out: what comparisons make of it (`test_lockstep.py`, `test_relations.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from instep.player import Observer, Player, Side
from instep.watch.player_observers import LastStates, OnHost, States, Within
from instep_reference.contract import engine as e

EVENTS: list[tuple[e.Event, str, tuple[Any, ...]]] = [
    (e.Admit("a", (1, 2)), "admit", ("a", (1, 2))),
    (e.Draft(("a",), ((3,),)), "draft", (("a",), ((3,),), None)),
    (e.Forward((e.Row("a", "verify"),)), "forward", ((e.Row("a", "verify"),),)),
    (e.Commit(("a",), (e.Path((1,), 4),)), "commit", (("a",), (e.Path((1,), 4),))),
    (e.SetNumSteps(2), "set_num_steps", (2,)),
    (e.Save("a", "kept"), "save", ("a", "kept")),
    (e.Load("a", "kept"), "load", ("a", "kept")),
    (e.Preempt("a"), "preempt", ("a",)),
    (e.Resume("a"), "resume", ("a",)),
    (e.Idle(), "idle", ()),
    (e.Finish("a"), "finish", ("a",)),
    (e.Abort("a"), "abort", ("a",)),
]


class Asked:
    """An engine that records every attribute access and every call, and gives prepared answers."""

    def __init__(self, answer: Any = None, error: Exception | None = None) -> None:
        known = object.__getattribute__(self, "__dict__")
        known.update(log=[], reply=answer, error=error)

    def __getattribute__(self, name: str) -> Any:
        known = object.__getattribute__(self, "__dict__")
        known["log"].append(name)

        def called(*given: Any, **named: Any) -> Any:
            assert not named
            known["log"].append(given)
            if known["error"] is not None:
                raise known["error"]
            return known["reply"]

        return called

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError(f"{name} is set from outside")


def log_of(engine: Asked) -> list[Any]:
    return list(object.__getattribute__(engine, "__dict__")["log"])


@pytest.mark.parametrize(("event", "method", "given"), EVENTS, ids=[method for _, method, _ in EVENTS])
def test_player_without_observers_only_serves_the_event(event: e.Event, method: str, given: tuple[Any, ...]) -> None:
    answer = object()
    engine = Asked(answer)
    side = Player("bare", engine).serve(event)
    assert log_of(engine) == [method, given]
    assert side == Side("bare", answer if method in ("draft", "forward", "commit") else None)


def test_recording_engine_notices_an_observer() -> None:
    """The stub does see a question: without this the test of a bare player could not fail."""
    engine = Asked()
    Player("asking", engine, [States(engine)]).serve(e.Idle())
    assert log_of(engine) == ["idle", (), "next_num_steps", (1, 1)]


class Noting(Observer):
    """raises: in this method."""

    def __init__(self, name: str, log: list[str], raises: str = "") -> None:
        self.name, self.log, self.raises = name, log, raises

    def before(self, event: e.Event) -> None:
        self._note("before")

    def after(self, event: e.Event, side: Side) -> Side:
        self._note("after")
        return side

    def failed(self, event: e.Event, error: BaseException) -> None:
        self._note("failed")

    def _note(self, what: str) -> None:
        if what == self.raises:
            raise ValueError("no")
        self.log.append(f"{self.name} {what}")


@pytest.mark.parametrize(("middle", "error", "order", "served"), [
    ("", None, "outer before, middle before, inner before, inner after, middle after, outer after", True),
    ("", ValueError("no"), "outer before, middle before, inner before, inner failed, middle failed, outer failed",
     True),
    ("before", None, "outer before, outer failed", False),
    ("after", None, "outer before, middle before, inner before, inner after, outer failed", True),
], ids=["served", "the engine raises", "an observer raises before", "an observer raises after"])  # fmt: skip
def test_the_first_observer_is_the_outermost_and_a_failure_reaches_those_that_began(
    middle: str, error: Exception | None, order: str, served: bool
) -> None:
    log, engine = list[str](), Asked(error=error)
    observers = [Noting("outer", log), Noting("middle", log, middle), Noting("inner", log)]
    with pytest.raises(ValueError, match="no") if middle or error else nullcontext():
        Player("p", engine, observers).serve(e.Idle())
    assert log == order.split(", ")
    assert bool(log_of(engine)) is served


@pytest.mark.parametrize("error", [None, ValueError("no")], ids=["served", "raised"])
def test_context_observer_exits_after_success_and_failure(error: Exception | None) -> None:
    log: list[Any] = []

    @contextmanager
    def context() -> Iterator[None]:
        log.append("in")
        try:
            yield
        finally:
            log.append("out")

    answer = e.Drafted(torch.zeros(1, 1), torch.zeros(1, 1))
    player = Player("p", Asked(answer, error), [Within(context(), lambda event, answer: log.append(answer))])
    if error is None:
        player.serve(e.Draft(("a",)))
        assert log == ["in", answer, "out"]
    else:
        with pytest.raises(ValueError, match="no"):
            player.serve(e.Draft(("a",)))
        assert log == ["in", "out"]


class Stateful:
    """An engine whose states count how often they were read."""

    def __init__(self) -> None:
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None

    def state(self, request: str) -> e.RequestState:
        self.asked += 1
        return e.RequestState(self.asked, None, None, None, {}, {}, {}, {})

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return 7


def test_states_follow_the_requests_that_are_there() -> None:
    engine: Any = Stateful()
    player = Player("p", engine, [States(engine)])
    first, second, third = (player.serve(event) for event in (e.Admit("a", (1,)), e.Preempt("a"), e.Abort("a")))
    assert (dict(first.before), {n: s.length for n, s in first.after.items()}) == ({}, {"a": 1})
    assert first.wanted_num_steps == 7
    assert second.before == first.after and second.after["a"].length == 2, "a preempted request is read as well"
    assert third.before == second.after and not third.after and engine.asked == 2


def test_last_states_are_read_before_the_finish_on_request() -> None:
    engine: Any = Stateful()
    last = LastStates(engine, lambda state: state.length, {"a"})
    player = Player("p", engine, [last])
    for event in (e.Admit("a", (1,)), e.Admit("b", (1,)), e.Finish("b"), e.Finish("a")):
        player.serve(event)
    assert last.found == {"a": 1} and engine.asked == 1


def test_answer_is_copied_to_the_host_completely() -> None:
    answer = e.Drafted(torch.zeros(1, 2, device="meta"), torch.zeros(1, 2))
    with pytest.raises(NotImplementedError):  # a meta tensor has no data, so copying it raises
        Player("p", Asked(answer), [OnHost()]).serve(e.Draft(("a",)))
