"""The clocks of the gate on a simulated host and GPU: each sees its side, all a true slow-down, none stops too soon.

A test that is marked gpu looks at a real card. Leaves out: how often the gate is wrong on one (`--calibrate`).
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from statistics import median
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from instep.bundled import model
from instep.report.html.write_page import page_of
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract.errors import BadInput
from instep_speed.gate import gpu_operations, input_and_result, power
from instep_speed.gate.calibration_files import setting
from instep_speed.gate.clock import CLOCKS, NOTHING, Clock, Reading
from instep_speed.gate.gate import ARMS, as_samples, judge, laps_of, resolved
from instep_speed.gate.gpu_operations import HELD_S
from instep_speed.gate.input_and_result import Question, Report
from instep_speed.gate.power import Power, tried
from instep_speed.gate.result_data import of
from instep_speed.gate.statistics import FEWEST_PAIRS, Say, Spread, ratio
from support.inputs.outcomes import shown
from support.running.planting import planted_here

STEP = 1e-7  # what it takes to read a clock
LAUNCHED = 2e-6  # what the device takes to begin a kernel of the card, in seconds


class Machine:
    """`host` and `launch` are what work is made of. now: the host's time;  cpu: its computing time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.cpu = self.free = 0.0
        self._queue: list[tuple[float, Callable[[float], float | None]]] = []
        patch.setattr(time, "perf_counter", lambda: self.host(STEP).now)
        patch.setattr(time, "process_time", lambda: self.host(STEP).cpu)
        patch.setattr(torch.cuda, "synchronize", lambda *_: self.wait())
        patch.setattr(torch.cuda, "Event", lambda **_: Event(self))
        patch.setattr(gpu_operations, "_hold", Kernel(self._hold))
        patch.setattr(gpu_operations, "_drag", Kernel(self._drag))
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *shape, dtype, **_: zeros(*shape, dtype=dtype))
        self.clock = Clock("cuda")

    def host(self, seconds: float) -> "Machine":
        """The host computes."""
        self.now += seconds
        self.cpu += seconds
        self._run()
        return self

    def launch(self, seconds: float) -> None:
        """The device computes, as soon as everything before has ended."""
        self.push(lambda begin: begin + seconds)

    def push(self, work: Callable[[float], float | None]) -> None:
        """work: when it begins -> when it ends; None: that is not known yet"""
        self._queue.append((self.now, work))
        self._run()

    def wait(self) -> None:
        """Until the device has ended; the driver spins meanwhile."""
        while self._queue:  # what is held back ends by itself
            self.host(1e-5)
        self.host(max(0.0, self.free - self.now))

    def _run(self) -> None:
        while self._queue:
            launched, work = self._queue[0]
            ended = work(max(launched, self.free))
            if ended is None:
                return
            self.free = ended
            del self._queue[0]

    def _hold(self, go: torch.Tensor, since: torch.Tensor, longest: int, **_: int) -> None:
        def held(begin: float) -> float | None:
            until = begin + 1e-9 * longest
            if not int(go[0]) and self.now < until:
                return None
            ended = min(max(begin, self.now), until)
            since[0] = round(1e9 * ended)
            return ended

        self.push(held)

    def _drag(self, since: torch.Tensor, part: float, launch: int, **_: int) -> None:
        def dragged(begin: float) -> float:
            begin += LAUNCHED
            return begin + max(0.0, part * (begin - 1e-9 * int(since[0])) - 1e-9 * launch)

        self.push(dragged)


class Event:
    """Of torch.cuda."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._at = machine, -1.0

    def record(self) -> None:
        self._at = -1.0

        def passed(begin: float) -> float:
            self._at = begin
            return begin

        self._machine.push(passed)

    def query(self) -> bool:
        return 0 <= self._at <= self._machine.now

    def elapsed_time(self, later: "Event") -> float:
        if not (self.query() and later.query()):
            raise RuntimeError("the device has not come so far")
        return 1e3 * (later._at - self._at)


class Kernel:
    """A function as Triton's decorator returns it: kernel[grid](...)"""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run


PIECES, HOST, DEVICE = 4, 1e-4, 5e-5  # of one piece of work, in seconds
QUESTION = Question("plain", "plain", model(), ("commit",))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question cannot be about a card that is not here."""
    monkeypatch.setattr(input_and_result, "judged", lambda device: CLOCKS)


def work(machine: Machine, host: float = 1.0, device: float = 1.0) -> Callable[[], None]:
    """Launches one kernel after the other; the device is done with each before the host has the next."""

    def run() -> None:
        for _ in range(PIECES):
            machine.host(host * HOST)
            machine.launch(device * DEVICE)

    return run


def read(machine: Machine, run: Callable[[], None], drag: float = 0.0) -> Reading:
    """By every way, twice: the second run does not include anything left by the first."""
    return [sum_of(*(way(run, drag) for way in machine.clock.ways)) for _ in range(2)][-1]


def sum_of(*readings: Reading) -> Reading:
    total = NOTHING
    for one in readings:
        total = total.plus(one)
    return total


def close(found: float, truth: float) -> bool:
    return found == pytest.approx(truth, rel=0.005)


def test_every_clock_sees_its_own_part(machine: Machine) -> None:
    """The host waits after its last launch only. The device alone has no gap between its kernels."""
    found = read(machine, work(machine))
    assert close(found.wall, PIECES * HOST + DEVICE)
    assert close(found.cpu, PIECES * HOST), "the driver's spinning afterwards is not computing"
    assert close(found.device, PIECES * DEVICE)


@pytest.mark.parametrize(("slower", "seen"), [
    ({"host": 1.1}, ("cpu", "wall")), ({"device": 1.1}, ("device",)), ({"host": 1.1, "device": 1.1}, CLOCKS),
], ids=str)  # fmt: skip
def test_a_slow_down_is_seen_on_its_side(machine: Machine, slower: dict[str, float], seen: tuple[str, ...]) -> None:
    """If the device is faster than the host, the user waits for the host, and wall does not see the device."""
    before, after = read(machine, work(machine)), read(machine, work(machine, **slower))
    rises = {clock: getattr(after, clock) / getattr(before, clock) for clock in CLOCKS}
    assert {clock for clock, rise in rises.items() if rise > 1.05} == set(seen), rises
    assert all(rise < 1.02 for clock, rise in rises.items() if clock not in seen), rises


@pytest.mark.parametrize("bound", ["host", "device"])
def test_drag_slows_every_clock(machine: Machine, bound: str) -> None:
    run = work(machine, **{bound: 5.0})
    plain, dragged = read(machine, run), read(machine, run, 0.08)
    for clock in CLOCKS:
        assert getattr(dragged, clock) / getattr(plain, clock) == pytest.approx(1.08, abs=0.003), clock


def test_a_device_that_is_slow_to_begin_is_not_dragged_further(machine: Machine) -> None:
    """Launching the drag takes longer than the drag: the work is slower by the launch, and by nothing more."""
    short = 1e-5
    plain, dragged = (read(machine, lambda: machine.launch(short), drag).device for drag in (0.0, 0.08))
    assert close(dragged - plain, 2e-6)


# The source text, and the planted text: each must break a claim above.
CLOCK, CARD = "instep_speed/gate/clock.py", "instep_speed/gate/gpu_operations.py"
WAITED, COMPUTED = "waited = time.perf_counter() - wall", "computed = time.process_time() - cpu"
TAKEN = "return None if late else 1e-3 * float(self._begun.elapsed_time(self._ended))"
FAULTS = {
    "wall stops before the device ended": (Edit(CLOCK, f"self._wait()\n{WAITED}", WAITED),),
    "cpu counts the driver that spins": (Edit(CLOCK, f"{COMPUTED}\nself._wait()", f"self._wait()\n{COMPUTED}"),),
    "the device is read before it ended": (Edit(CARD, f"self.wait()\n{TAKEN}", TAKEN),),
    "the device is not held back": (Edit(CARD, "self._word[0] = 0", "self._word[0] = 1"),),
    "the end is noted before the work": (
        Edit(CARD, "self._begun.record()", "self._begun.record()\nself._ended.record()"),
        Edit(CARD, "self._ended.record()\nlate = self._begun.query()", "late = self._begun.query()"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_clock_that_is_wrong_is_seen(machine: Machine, fault: str) -> None:
    with planted_here(*FAULTS[fault]), pytest.raises((AssertionError, RuntimeError)):
        test_every_clock_sees_its_own_part(machine)
    machine.wait()
    test_every_clock_sees_its_own_part(machine)


def test_device_clock_is_not_read_when_work_waits_for_the_device(machine: Machine) -> None:
    def run() -> None:
        work(machine)()
        machine.wait()
        work(machine)()

    begun = machine.now
    found = read(machine, run)
    assert isnan(found.device) and close(found.wall, 2 * (PIECES * HOST + DEVICE))
    assert machine.now - begun < 3 * HELD_S, "it is held back for no longer than that"


@pytest.mark.gpu
def test_a_real_card_is_held_back_and_dragged() -> None:
    """A slow host changes nothing on the device; a drag has its requested length; a hold that ends early is late."""
    x, (by_host, by_device) = torch.ones(1 << 24, device="cuda"), Clock("cuda").ways

    def run(pause: float = 0.0) -> None:
        for _ in range(20):
            x.mul_(1.0)
            time.sleep(pause)

    def taken(run: Callable[[], object], drag: float = 0.0) -> float:
        return median(by_device(run, drag).device for _ in range(9))

    taken(run)  # warms up
    plain = taken(run)
    assert taken(lambda: run(2e-4)) == pytest.approx(plain, rel=0.02)
    assert taken(run, 0.08) / plain == pytest.approx(1.08, abs=0.01)
    assert by_host(lambda: run(2e-4), 0.0).wall > max(plain, 20 * 2e-4) * 0.98
    assert isnan(by_device(lambda: (x.mul_(1.0), torch.cuda.synchronize()), 0.0).device)


# The verdict


def drawn(generator: np.random.Generator, pairs: int = FEWEST_PAIRS, names: tuple[str, ...] = ARMS) -> dict[str, Any]:
    """As an H200 among others was measured: a host that scatters by a fifth, a device by half a percent."""
    noise = np.array([0.2, 0.2, 0.005])
    return {arm: 1e-3 * np.exp(noise * generator.standard_normal((pairs, 1, len(CLOCKS)))) for arm in names}


def reported(samples: dict[str, Any]) -> Report:
    accepted = dict.fromkeys(("before", "after"), 1.5)
    return Report(QUESTION, judged=judge(QUESTION, samples, 1), acceptance=accepted)


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize(("slower", "says"), [
    ((1.0, 1.0, 1.0), Say.HELD), ((1.0, 1.0, 1.08), Say.SLOWER), ((1.6, 1.6, 1.0), Say.SLOWER),
], ids=str)  # fmt: skip
def test_any_clock_may_find_a_slow_down(slower: tuple[float, ...], says: Say) -> None:
    samples = drawn(np.random.default_rng(0))
    samples["after"] *= slower
    report = reported(samples)
    assert [one.clock for one in report.judged] == list(CLOCKS) and report.says("commit") is says
    told = shown(of(report))
    assert ("too noisy to tell by the other clocks (wall" in told) is (says is Say.HELD)


@pytest.mark.usefixtures("on_a_card")
def test_pairs_with_an_unread_clock_are_dropped() -> None:
    samples = drawn(np.random.default_rng(0), 2 * FEWEST_PAIRS)
    samples["after"][::3, 0, 2] = np.nan
    samples["again"][:, 0, :2] *= 2.0  # the host's clocks resolve nothing
    *_, device = judge(QUESTION, samples, 1)
    assert (device.change.pairs, device.same.pairs) == (80, 120) and device.says is Say.HELD
    assert len(device.samples) and not np.isnan(device.samples).any() and not isnan(device.after.median)
    samples["after"][..., 2] = np.nan
    samples["again"][..., 2] = np.nan
    report = reported(samples)
    assert report.says("commit") is Say.NOISY and report.judged[-1].change.pairs == 0
    assert "device never read; 3% cannot be seen here" in shown(of(report))
    for told in (of(report).data(), json.loads(json.dumps(of(report).data(), allow_nan=False))):
        assert told["judged"][-1]["change"]["value"] == "nan" and b"nan (nan-nan)" in page_of(told)
    assert isnan(Spread.of(np.array([np.nan])).median)
    assert ratio(np.array([np.nan]), np.array([1.0]), np.random.default_rng(0)).pairs == 0


@pytest.mark.usefixtures("on_a_card")
def test_a_clock_that_misses_one_pair_gets_more_of_them() -> None:
    samples = drawn(np.random.default_rng(0), FEWEST_PAIRS)
    samples["again"][:, 0, 1] = samples["before"][:, 0, 1]
    assert resolved(QUESTION, samples)  # by both clocks that are not wall
    samples["after"][7, 0, 2] = np.nan
    assert not resolved(QUESTION, samples)


@pytest.mark.usefixtures("on_a_card")
def test_nothing_is_held_when_the_change_removed_a_clock() -> None:
    samples = drawn(np.random.default_rng(0), FEWEST_PAIRS)
    for arm in ("after", "again"):
        samples[arm][:, 0, 1] = samples["before"][:, 0, 1]
    assert reported(samples).says("commit") is Say.HELD
    samples["after"][..., 2] = np.nan
    report = reported(samples)
    assert report.says("commit") is Say.NOISY and "device never read" in shown(of(report))


@pytest.mark.usefixtures("on_a_card")
def test_a_clock_that_leaves_it_open_is_not_outvoted() -> None:
    """Wall resolves 3% in A/A and shows a change that may be more; the device alone shows none."""
    samples = drawn(np.random.default_rng(0), FEWEST_PAIRS)
    for arm in ("after", "again"):
        samples[arm][:, 0, :2] = samples["before"][:, 0, :2]
    samples["after"][::2, 0, 0] *= 1.05
    report = reported(samples)
    assert [one.says for one in report.judged] == [Say.NOISY, Say.HELD, Say.HELD]
    assert report.says("commit") is Say.NOISY and "after / before is wall 1.000-1.050" in shown(of(report))


def test_too_few_pairs_are_the_printed_reason() -> None:
    samples = {arm: one[:48, :, :] for arm, one in drawn(np.random.default_rng(0)).items()}
    for arm in ("after", "again"):
        samples[arm] = samples["before"] * 1.0001
    told = shown(of(reported(samples)))
    assert "commit: inconclusive: of 48 pairs, and 60 are the fewest; --pairs 60 would take them" in told
    assert "cannot be seen here" not in told


def test_nan_passes_between_processes() -> None:
    told = msgspec.json.decode(msgspec.json.encode({"commit": Reading(1.0, 2.0, float("nan"))}))
    one = as_samples({"before": [[told["commit"]]]})["before"]
    assert one.shape == (1, 1, len(CLOCKS)) and one[0, 0, :2].tolist() == [1.0, 2.0] and isnan(one[0, 0, 2])


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize(("noise", "enough"), [
    ((0.0, 0.3, 0.3), True), ((0.3, 0.0, 0.0), True), ((0.3, 0.3, 0.0), False), ((0.3, 0.0, 0.3), False),
], ids=str)  # fmt: skip
def test_pairs_are_enough_when_host_and_device_are_both_resolved(noise: tuple[float, ...], enough: bool) -> None:
    generator = np.random.default_rng(0)
    taken = {arm: np.exp(noise * generator.standard_normal((FEWEST_PAIRS, 1, len(CLOCKS)))) for arm in ARMS}
    assert resolved(QUESTION, taken) is enough


def test_host_decides_the_length_of_a_sample() -> None:
    """A device's time of 0, as on a CPU, or one that cannot be read."""

    class Told:
        class source:
            said = "told"

        def ask(self, do: str, **given: Any) -> dict[str, Any]:
            return {"seconds": {"commit": [5e-4, 4e-4, None]}}

    assert laps_of({"before": Told()}, QUESTION) == 5  # type: ignore[dict-item]


@pytest.mark.usefixtures("on_a_card")
def test_unrequested_clocks_are_not_read(machine: Machine) -> None:
    def seen(*clocks: str) -> tuple[bool, ...]:
        machine.clock = Clock("cuda", clocks=clocks)
        return tuple(number > 0 for number in read(machine, work(machine)))

    assert seen("device") == (False, False, True)
    assert seen("cpu") == seen("wall", "cpu") == (True, True, False)
    assert seen() == seen("wall", "device") == (True, True, True)


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize(("clocks", "noise", "enough"), [
    (("device",), (0.3, 0.3, 0.0), True), (("device",), (0.0, 0.0, 0.3), False),
    (("wall",), (0.0, 0.3, 0.3), True), (("wall",), (0.3, 0.0, 0.0), False),
    (("cpu", "device"), (0.0, 0.3, 0.0), False), (("cpu", "device"), (0.3, 0.0, 0.0), True),
], ids=str)  # fmt: skip
def test_pairs_are_enough_when_the_requested_clocks_are_resolved(
    clocks: tuple[str, ...], noise: tuple[float, ...], enough: bool
) -> None:
    generator, asked = np.random.default_rng(0), replace(QUESTION, clocks=clocks)
    taken = {arm: np.exp(noise * generator.standard_normal((FEWEST_PAIRS, 1, len(CLOCKS)))) for arm in ARMS}
    assert resolved(asked, taken) is enough
    assert [one.clock for one in judge(asked, as_samples(taken), 1)] == list(clocks)


@pytest.mark.usefixtures("on_a_card")
def test_a_slow_host_is_not_looked_at_where_the_device_alone_is_judged() -> None:
    asked, samples = replace(QUESTION, clocks=("device",)), drawn(np.random.default_rng(0), FEWEST_PAIRS)
    for slowed, says in ((1, Say.HELD), (2, Say.SLOWER)):
        found = {arm: one.copy() for arm, one in samples.items()}
        found["after"][..., :slowed] *= 2
        found["after"][..., 2] *= 1.08 if slowed == 2 else 1
        assert Report(asked, judged=judge(asked, found, 1)).says("commit") is says


@pytest.mark.usefixtures("on_a_card")
def test_calibration_of_some_clocks_has_a_separate_file() -> None:
    every, one = setting(QUESTION), setting(replace(QUESTION, clocks=("device",)))
    assert every == setting(replace(QUESTION, clocks=CLOCKS)) and "clocks" not in every
    assert one == {**every, "clocks": ["device"]}


def test_clock_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--clock.*device.*expected some of wall, cpu"):
        replace(QUESTION, clocks=("device",))


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize(
    ("slowed", "found"), [((1.08, 1.08, 1.08), 1.0), ((1.08, 1.08, 1.0), 0.1), ((1.0, 1.0, 1.08), 1.0)]
)
def test_trials_on_a_card(slowed: tuple[float, ...], found: float) -> None:
    """If only the device is resolved, a slow host is not found, and the device holds A/A."""
    generator = np.random.default_rng(1)
    trials = [drawn(generator, names=power.ARMS) for _ in range(20)]
    for trial in trials:
        trial["slowed"] *= slowed
    known = tried(Power(Report(QUESTION)), trials)
    part = known.part("slowed", "commit", Say.SLOWER)
    assert part == found if found == 1.0 else part <= found
    assert known.part("A/A", "commit", Say.SLOWER) == 0 and known.part("A/A", "commit", Say.HELD) == 1.0
