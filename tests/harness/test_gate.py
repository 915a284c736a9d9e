"""`instep gate` end to end on a small model, its timed engine, its decisions, and its statistics on known samples.

The machine of a test is shared and blurred a true 20% to 14%. So the slow-down that is planted end to end is far above
the allowed 10%, and A against A may be inconclusive, but never slower; known samples find 8%.
Leaves out: the combination of clocks (`test_gate_clocks.py`).
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from instep.bundled import model
from instep.run.build_compared_engines import bare
from instep.run.replay import Replay
from instep.setting import Setting
from instep.verdict import Exit
from instep_optimized import load
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.plant import planted
from instep_reference.contract.errors import BadInput, InstepError
from instep_speed.gate import result_data
from instep_speed.gate.cases import CASES, Course, Walk, lay
from instep_speed.gate.clock import CLOCKS, Clock
from instep_speed.gate.gate import ARMS, MOST_TIMES, ORDERS, PROBES, _timed, asked_of, checked, gate, judge
from instep_speed.gate.input_and_result import SAMPLES, Question, Report
from instep_speed.gate.power import Power
from instep_speed.gate.process import Source
from instep_speed.gate.reference_check import Yardstick
from instep_speed.gate.result_data import of
from instep_speed.gate.statistics import FEWEST_PAIRS, Ratio, Samples, Say, Spread, middles, ratio, ratios, say
from instep_speed.gate.worker import Worker
from support.inputs.outcomes import shown
from support.running.command import Runner, complaint
from support.running.covering import WHOLE

TOP = Path(__file__).resolve().parents[2]
ALLOWED = 0.1

DONE = "        for p in plan:\n            p.ran()\n"
NAMED = "requests = self._named([row.request for row in rows])\n"
ROOTED = "chosen = Roots([p.request.name for p in plan if p.rooted], roots)\n"
# Computes for as long again as the event took, on the clock of the process, under any load.
SLOWER_FORWARD = (
    Edit("instep_optimized/engine.py", NAMED, f"import time\nbegun = time.process_time()\n{NAMED}"),
    Edit(
        "instep_optimized/engine.py", ROOTED,
        "until = begun + 2 * (time.process_time() - begun)\n"
        "while time.process_time() < until:\n"
        "    pass\n"
        f"{ROOTED}",
    ),
)
ONE_TOKEN_LESS = Edit(
    "instep_optimized/commit/snapshot.py", "accepted.rows, accepted.nodes",
    "accepted.rows, (accepted.nodes - 1).clamp_min(0)",
)


def run(before: str | Path, after: str | Path, model: Path, folder: Path) -> Report:
    return gate(Question(str(before), str(after), model, ("verify",), allowed=ALLOWED, batch=2, rounds=1), folder)


@WHOLE
@pytest.mark.timing
def test_a_against_a_is_silent(model: Path, tmp_path: Path, instep: Runner) -> None:
    """A name against the checkout that the name is served from; the arms are processes as a user's are."""
    file = tmp_path / "gate.json"
    small = ["--batch", "2", "--rounds", "1", "--checkpoint", str(model), "--case", "commit"]
    done = instep("gate", "plain", TOP, "--allowed", ALLOWED, *small, "--json", file, "--html", tmp_path / "page.html")
    assert done.code in (Exit.AGREED, Exit.INCONCLUSIVE), done
    found = json.loads(file.read_text())
    assert (found["exit"], found["refused"]) == (done.code, None)
    for one in found["judged"]:
        assert f"{one['case']}: " in done.out
    assert {one["says"] for one in found["judged"]} <= {"held", "inconclusive"}
    assert all(one["change"]["pairs"] >= FEWEST_PAIRS for one in found["judged"])
    assert found["served"]["before"] == found["served"]["after"]
    assert found["acceptance"]["before"] == found["acceptance"]["after"]
    assert found["elements"] > 10_000
    page = (tmp_path / "page.html").read_text()
    assert found["command"] in page and all(f"{one['change']['value']:.3f} (" in page for one in found["judged"])
    assert found["machine"]["cores"] and found["machine"]["torch"]


@pytest.mark.timing
@pytest.mark.usefixtures("warm")
def test_twice_the_time_is_found(model: Path, tmp_path: Path) -> None:
    report = run("plain", planted(tmp_path / "planted", *SLOWER_FORWARD), model, tmp_path)
    assert report.exit is Exit.DIVERGED, text(report)
    assert report.says("verify") is Say.SLOWER
    assert report.served["before"]["instep_optimized"] != report.served["after"]["instep_optimized"]
    assert "verify: SLOWER by" in text(report)
    found = result_data.of(report).data()
    assert (found["exit"], found["says"]["verify"]) == (1, "slower")


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_wrong_arm_is_refused_and_nothing_is_timed(model: Path, tmp_path: Path) -> None:
    report = run("plain", planted(tmp_path / "planted", ONE_TOKEN_LESS), model, tmp_path)
    assert report.exit is Exit.DIVERGED
    assert report.judged == []
    assert "accepted" in report.refused and "DIVERGED" in report.refused
    assert "ms" not in text(report).split()
    assert result_data.of(report).data()["judged"] == []


@WHOLE
@pytest.mark.usefixtures("warm")
def test_a_wrong_arm_cannot_pass_by_its_own_checks(model: Path, tmp_path: Path) -> None:
    """Its harness looks at nothing but lengths; the gate's own reference still does."""
    blind = Edit(
        "instep/checks/__init__.py",
        "return (Played(), Identity(), Bytes(oracle), *structure(), *arithmetic, *free, Grown())",
        "return (Identity(),)",
    )
    report = run(planted(tmp_path / "planted", ONE_TOKEN_LESS, blind), "plain", model, tmp_path)
    assert report.exit is Exit.DIVERGED
    assert report.refused.startswith("before") and "after the course" in report.refused


def test_an_arm_is_asked_for_no_option_at_its_default() -> None:
    """A tree of before `--kept-dtype` builds an engine; one that is asked for int8 says that it cannot."""
    assert asked_of(Setting()) == {"device": "cpu"}
    chosen = Setting(graphs=True, kept_dtype="int8", strategy="snapshot", drafter="vanilla")
    assert Setting(**asked_of(chosen)) == chosen
    assert asked_of(chosen).keys() == {"device", "graphs", "kept_dtype", "strategy", "drafter"}
    usual = asked_of(Setting(), ("strategy", "overlap"))
    assert usual == {"device": "cpu", "strategy": "rerun", "overlap": False}, "a tree may have other defaults"


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_tree_that_builds_no_engine_is_bad_input(model: Path, tmp_path: Path) -> None:
    broken = Edit("instep_optimized/memory_addresses.py", "import torch\n", "raise ValueError('planted')\n")
    with pytest.raises(BadInput, match=r"AFTER .*its process ended.*planted"):
        run("plain", planted(tmp_path / "planted", broken), model, tmp_path)


@pytest.mark.slow
def test_a_tree_with_other_module_names_is_refused_with_a_remedy(model: Path, tmp_path: Path) -> None:
    for package in ("instep", "instep_optimized"):
        (tmp_path / "old" / package).mkdir(parents=True)
        (tmp_path / "old" / package / "__init__.py").write_text("")
    with pytest.raises(BadInput, match=r"AFTER .*No module named 'instep\.\w+.*its own instep instead"):
        run("plain", tmp_path / "old", model, tmp_path)


def test_silent_arm_is_ended(model: Path, tmp_path: Path) -> None:
    """For any reason that it does not answer: the gate never waits forever."""
    setting = Question("plain", "plain", model, batch=2, patience_s=0.05)
    with pytest.raises(BadInput, match=r"BEFORE plain: .*no answer to `build` within 0.05 s"):
        gate(setting, tmp_path)


@WHOLE
@pytest.mark.usefixtures("warm")
def test_an_arm_that_ends_while_it_is_timed_is_refused(model: Path, tmp_path: Path) -> None:
    mortal = Edit(
        "instep_optimized/engine.py", DONE,
        "        self.served = getattr(self, 'served', 0) + 1\n"
        f"        assert self.served < 24, 'tired'\n{DONE}",
    )
    report = run("plain", planted(tmp_path / "planted", mortal), model, tmp_path)
    assert report.exit is Exit.DIVERGED and report.judged == []
    assert "failed while it was timed: AssertionError: tired" in report.refused


@pytest.mark.parametrize("name", ["ledger", "nobody", "instep:nobody"])
def test_untimeable_arm_is_bad_input(name: str) -> None:
    with pytest.raises(InstepError, match=name):
        Source.of(name, "plain")
    with pytest.raises(InstepError, match=name):
        Source.of(str(TOP), name)


@pytest.mark.parametrize(("words", "says"), [
    (["/no/tree", "plain"], "BEFORE /no/tree: found '/no/tree' (no such name); no such folder, expected a source tree"),
    (["plain", "/dev/null"], "AFTER /dev/null: found '/dev/null' (no such name); that is no folder"),
    (["plain", "plain", "--ops", "nope"], "--ops: found nope, and no source tree"),
    (["plain", "plain", "--seed", "-1"], "--seed: found -1"),
    (["plain", "plain", "--patience", "inf"], "--patience: found inf"),
    (["plain", "plain", "--patience", "nan"], "--patience: found nan"),
    (["plain", "plain", "--keep", "/proc/x"], "--keep: found /proc/x"),
    (["plain", "plain", "--keep", "/dev/null"], "--keep: found /dev/null: File exists"),
    (["plain", "plain", "--keep", "/proc"], "/proc/course."),
    (["plain", "plain", "--model", "nowhere"], "nowhere: found no such directory"),
    (["plain", "plain", "--baselines", "nowhere"], "--baselines: found nowhere: no such folder"),
])  # fmt: skip
def test_untimeable_setting_is_refused_in_one_line(instep: Runner, words: list[str], says: str) -> None:
    assert says in complaint(instep("gate", *words, "--batch", "1", "--rounds", "1", "--num-steps", "1"))


def test_an_op_set_that_is_timed_may_be_named_twice(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a result has the op set of BEFORE, and the revision."""
    asked = list[Question]()

    def answer(question: Question, *_: object) -> Report:
        asked.append(question)
        return Report(question, refused="so it is")

    monkeypatch.setattr("instep_speed.gate.gate.gate", answer)
    for words in (["--ops", "invariant"], []):
        instep("gate", "invariant", "plain", "--commit", "abc", "--json", file := tmp_path / "gate.json", *words)
        told = json.loads(file.read_text())
        assert (told["commit"], told["setting"]["ops"], len(asked)) == ("abc", "invariant", 1)
        asked.clear()


@WHOLE
@pytest.mark.usefixtures("warm")
def test_a_batch_that_is_too_small_to_judge_is_inconclusive(tmp_path: Path, instep: Runner) -> None:
    """A correct engine with states in fp8 and one request: most wrong states cannot be separated from right ones."""
    file, small = tmp_path / "gate.json", ["--batch", "1", "--num-steps", "2", "--rounds", "1"]
    done = instep("gate", "plain", "plain", *small, "--state-dtype", "float8_e4m3fn", "--json", file)
    told = json.loads(file.read_text())
    assert done.code == told["exit"] == Exit.INCONCLUSIVE and told["judged"] == [] and told["says"] == {}
    assert "INCONCLUSIVE  before (plain) cannot be judged" in done.out and "a larger --batch" in done.out
    assert "DIVERGED" not in done.out and "could not be distinguished from the right one" in told["refused"]


def test_wrong_arm_is_reported_before_an_unjudged_one() -> None:
    class Answers:
        source = Source("plain", "plain", (), frozenset())

        def __init__(self, exit: Exit, undecided: bool) -> None:
            message = "DIVERGED  gate\n  event 1: so\n  instep replay gate"
            self.answer = {"exit": int(exit), "message": message, "undecided": undecided}

        def tell(self, do: str) -> None: ...

        def hear(self) -> dict[str, object]:
            return self.answer

    report = Report(Question("plain", "plain", Path("model")))
    arms: dict[str, Any] = {"before": Answers(Exit.DIVERGED, True), "after": Answers(Exit.DIVERGED, False)}
    report.refused = checked(arms, report)
    assert report.refused == "after (plain) does not pass\nDIVERGED  gate\n  event 1: so"
    assert not report.unjudged and report.exit is Exit.DIVERGED
    arms["after"] = Answers(Exit.AGREED, False)
    report.refused = checked(arms, report)
    assert report.refused.startswith("before (plain) cannot be judged\n  event 1: so\n  nothing wrong was found")
    assert report.unjudged and report.exit is Exit.INCONCLUSIVE is Power(report).exit


def test_a_checkout_and_a_flat_copy_are_source_trees() -> None:
    source = Source.of(str(TOP), "plain")
    assert {root.name for root in source.roots} == {"reference", "optimized", "harness"}
    flat = Source.of(str(TOP / "optimized"), "plain")
    assert flat.packages == {"instep_optimized"} and flat.roots == (TOP / "optimized",)


def test_the_arms_take_turns_in_going_first() -> None:
    assert [order.index("before") < order.index("after") for order in ORDERS] == [True, False] * 3
    for place in range(3):
        assert sorted(order[place] for order in ORDERS) == sorted([*ARMS, *ARMS])


def test_the_verdict_on_samples_that_are_too_few_or_too_noisy() -> None:
    generator = np.random.default_rng(0)
    setting = Question("plain", "plain", Path("model"))

    def says(pairs: int, noise: float, slowdown: float = 0.0) -> Exit:
        drawn = {arm: np.exp(noise * generator.standard_normal((pairs, 2, len(CLOCKS)))) for arm in ARMS}
        drawn["after"] *= 1 + slowdown
        return Report(setting, judged=judge(setting, drawn, 4)).exit

    assert says(FEWEST_PAIRS, 0.01) is Exit.AGREED
    assert says(FEWEST_PAIRS, 0.01, 0.2) is Exit.DIVERGED
    assert says(FEWEST_PAIRS, 1.0) is Exit.INCONCLUSIVE
    assert says(FEWEST_PAIRS - 1, 0.01) is Exit.INCONCLUSIVE
    assert says(FEWEST_PAIRS - 1, 0.01, 0.2) is Exit.INCONCLUSIVE
    assert Report(setting).exit is Exit.INCONCLUSIVE  # nothing was timed


def test_a_result_keeps_samples_of_pairs() -> None:
    drawn = {arm: 0.25 * (1 + number + np.arange(3.0 * SAMPLES))[:, None, None] * np.ones((1, 2, len(CLOCKS)))
             for number, arm in enumerate(ARMS)}  # fmt: skip
    for one in judge(Question("plain", "plain", Path("model")), drawn, 4):
        assert len(one.samples) == SAMPLES, "at most this many"
        first, second = (np.array(one.samples[at]) * 16 for at in (0, 1))
        assert {*first} == {1.0, 2.0, 3.0} and (second - first == 3.0).all(), "in their order"
        assert first[0] == 1.0 + ARMS.index("before") and first[1] == 1.0 + ARMS.index("after")


def text(report: Report) -> str:
    return shown(result_data.of(report))


SETTING = Setting("plain", strategy="columns", conv="widened", graphs=True, overlap=True, guarded=False)


@pytest.fixture(scope="module")
def course(model: Path) -> Course:
    return lay(model, model / "course.jsonl", batch=2, rounds=1, num_steps=3)


@pytest.mark.slow
def test_timed_engine_is_not_instrumented(model: Path, course: Course) -> None:
    worker = Worker()
    worker.build(str(course.trace.path), str(model), SETTING.data())
    engine: Any = worker.walk.player.engine
    assert engine._ops is engine._base is load("plain")
    assert engine.graphs is not None
    options = engine._options
    assert (options.strategy, options.conv, options.overlap, options.guarded) == ("columns", "widened", True, False)


@pytest.mark.slow
def test_checked_engine_has_the_setting_of_the_timed_one(model: Path, course: Course) -> None:
    worker = Worker()
    worker.build(str(course.trace.path), str(model), SETTING.data())
    assert worker.replay.plan.setting == SETTING.recorded(course.trace.header.recording)
    assert worker.check()["exit"] == Exit.AGREED


class Recorder:
    """Replaces an engine, and records every access to it."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.asked = engine, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.engine, name)


def test_lap_calls_only_the_events_of_an_engine(model: Path, course: Course) -> None:
    recorder = Recorder(bare(Replay(course.trace, SETTING, checkpoint=model).plan))
    walk = Walk(recorder, course)  # type: ignore[arg-type]
    recorder.asked.clear()

    walk.laps(1, Clock("cpu"))
    assert set(recorder.asked) == {"abort", "admit", "load", "draft", "forward", "commit"}


@pytest.mark.slow
def test_block_drafter_is_judged_and_its_proposals_are_timed(tmp_path: Path) -> None:
    course = lay(Path(model()), tmp_path / "course.jsonl", batch=2, rounds=1, num_steps=3, drafter="block")
    replay = Replay(course.trace, Setting(drafter="block"), checkpoint=Path(model()))
    walk, yardstick = Walk(bare(replay.plan), course), Yardstick(replay.plan, course)
    spent = walk.laps(1, Clock("cpu"))
    assert all(spent[case].wall > 0 for case in CASES)
    right = walk.show()
    assert yardstick.judge(right).exit is Exit.AGREED
    rows = right.states["r1"].block_keys
    rows[0] = rows[0].roll(1, 0)
    wrong = yardstick.judge(right)
    assert wrong.exit is Exit.DIVERGED
    assert (wrong.findings[0].request, wrong.findings[0].place.component) == ("r1", "keys")


QUESTION = Question("plain", "plain", model(), ("commit",))


class Told:
    """An arm of one case that takes so long as is written down, in turn, by wall and cpu."""

    def __init__(self, seconds: list[float]) -> None:
        self.source, self.seconds = SimpleNamespace(said="told"), iter(seconds)

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        taken = next(self.seconds)
        return {"seconds": {"commit": [taken, taken, 0.0]}}


def played(*after: tuple[float, int], alike: bool = True) -> tuple[Report, str]:
    """A gate over arms of 5 ms, whose after / before alternates in stretches: (the two ratios' middle, pairs)."""
    each = [middle + (0.03 if number % 2 else -0.03) for middle, pairs in after for number in range(pairs)]
    many, probes = MOST_TIMES * FEWEST_PAIRS, [5e-3] * PROBES
    same = [1 + (0.001 if alike else 0.2) * (-1) ** number for number in range(many)]
    arms: Any = {name: Told([*probes, *(5e-3 * one for one in ratios)])
                 for name, ratios in {"before": [1.0] * many, "after": each, "again": same}.items()}  # fmt: skip
    report = Report(QUESTION, acceptance=dict.fromkeys(("before", "after"), 1.5))
    samples = _timed(arms, QUESTION, report, lambda what, done, of: None)
    report.judged = judge(QUESTION, samples, 1, report.decided)
    return report, shown(of(report))


def test_open_case_gets_pairs_that_only_decide_held() -> None:
    """An interval that goes beyond 3% is not held, although A/A is quiet. More pairs may bring it within."""
    report, told = played((1.015, 60), (0.985, 180))
    assert report.decided == 60 < report.judged[0].change.pairs and report.says("commit") is Say.HELD
    assert "commit: no slow-down beyond 3%" in told
    report, told = played((1.01, 240))
    assert report.says("commit") is Say.NOISY and report.exit is Exit.INCONCLUSIVE
    assert report.judged[0].change.pairs == 240 and report.judged[0].change.high > 1.03
    assert "after / before is wall 0.980-1.040" in told and "--pairs 240 would narrow it" in told


def test_slow_down_in_later_pairs_only_is_not_called_slower() -> None:
    """Repeated looks find a slow-down too often. The message names the --pairs that decide on all of them."""
    report, told = played((1.01, 60), (1.2, 180))
    assert report.decided == 60 and report.says("commit") is Say.NOISY and all(map(report.late, report.judged))
    assert "but 60 pairs did not show more than 3%" in told and "--pairs 240 decides on all of them" in told
    assert of(report).data()["decided"] == 60
    report, _ = played((1.2, 240))
    assert report.says("commit") is Say.SLOWER and report.judged[0].change.pairs == report.decided == 60


def test_noisy_case_gets_no_further_pairs() -> None:
    report, told = played((1.0, 240), alike=False)
    assert report.decided == 240 and "before against itself gives wall 0.800-1.200" in told


def test_a_spread_is_printed_as_half_of_the_range_between_quartiles() -> None:
    samples = {arm: np.linspace(1.0, 3.0, 81)[:, None, None] * 1e-3 * np.ones((1, 1, len(CLOCKS))) for arm in ARMS}
    report = Report(QUESTION, judged=judge(QUESTION, samples, 1), acceptance={"before": 1.5, "after": 1.5})
    assert "2 ±0.5" in shown(of(report))


LIMIT = 0.03
TRIALS = 200


def samples(
    generator: np.random.Generator, slowdown: float, *, noise: float = 0.03, trials: int = TRIALS, shared: float = 0.1
) -> tuple[Samples, Samples]:
    """Pairs as a shared machine gives them: every tenth sample is interrupted, and both arms drift together."""
    drift = np.exp(shared * generator.standard_normal((trials, FEWEST_PAIRS)))

    def arm(factor: float) -> Samples:
        own = np.exp(noise * generator.standard_normal(drift.shape))
        interrupted = np.where(generator.random(drift.shape) < 0.1, 2.0, 1.0)
        return np.asarray(5e-3 * factor * drift * own * interrupted)

    return arm(1.0), arm(1.0 + slowdown)


def lower_bounds(slowdown: float, **how: float) -> Samples:
    generator = np.random.default_rng(1)
    before, after = samples(generator, slowdown, **how)  # type: ignore[arg-type]
    return ratios(before, after, generator)[1]


def test_a_against_a_never_fails() -> None:
    assert (lower_bounds(0.0) > 1 + LIMIT).sum() == 0


@pytest.mark.slow
def test_barely_allowed_slow_down_fails_no_more_often_than_the_bound() -> None:
    assert (lower_bounds(LIMIT) > 1 + LIMIT).mean() <= 0.04  # 1% is promised; of 200 trials, 8 are 4 deviations


@pytest.mark.slow
@pytest.mark.parametrize(("slowdown", "power"), [(0.08, 0.9), (0.2, 1.0)])
def test_a_real_slowdown_is_found(slowdown: float, power: float) -> None:
    assert (lower_bounds(slowdown) > 1 + LIMIT).mean() >= power


@pytest.mark.slow
def test_common_disturbance_cancels() -> None:
    """The machine drifts by a factor of 1.5 between pairs; 8% within them is still seen."""
    assert (lower_bounds(0.08, shared=0.4) > 1 + LIMIT).mean() >= 0.9


@pytest.mark.slow
def test_the_interval_covers_the_truth() -> None:
    generator = np.random.default_rng(2)
    before, after = samples(generator, 0.1)
    value, low, high = ratios(before, after, generator)
    assert abs(float(np.median(value)) - 1.1) < 0.01
    assert ((low <= 1.1) & (high >= 1.1)).mean() >= 0.94


@pytest.mark.parametrize("pairs", [1, 2, 3, 60, 61])
def test_middle_of_a_resample_has_the_rank_of_resampling(pairs: int) -> None:
    """Against resamples that are drawn in full: how often each pair of places is the middle, within 5 deviations."""
    generator, draws = np.random.default_rng(5), 40_000
    drawn = np.sort(generator.integers(pairs, size=(draws, pairs)), axis=1)[:, [(pairs - 1) // 2, pairs // 2]]
    placed = np.stack(middles(pairs, draws, generator), axis=1)
    assert (placed[:, 0] <= placed[:, 1]).all() and (pairs % 2 == 0 or (placed[:, 0] == placed[:, 1]).all())
    counts = [np.bincount(one @ [pairs, 1], minlength=pairs * pairs) for one in (drawn, placed)]
    assert (np.abs(counts[0] - counts[1]) <= 5 * np.sqrt(1 + counts[0] + counts[1])).all()


def test_the_same_seed_gives_the_same_interval() -> None:
    before, after = (arm[0] for arm in samples(np.random.default_rng(3), 0.05, trials=1))
    first, second = (ratio(before, after, np.random.default_rng(7)) for _ in range(2))
    assert first == second
    assert first.low < first.value < first.high


def quiet(low: float = 0.99, high: float = 1.01, pairs: int = FEWEST_PAIRS) -> Ratio:
    return Ratio((low + high) / 2, low, high, pairs)


@pytest.mark.parametrize(("change", "same", "expected"), [
    (quiet(), quiet(), Say.HELD),
    (quiet(1.02, 1.09), quiet(), Say.NOISY),  # what is allowed lies inside: neither is shown
    (quiet(1.029, 1.4), quiet(), Say.NOISY),
    (quiet(0.9, 1.031), quiet(), Say.NOISY),
    (quiet(0.9, 1.029), quiet(), Say.HELD),
    (quiet(1.05, 1.09), quiet(), Say.SLOWER),
    (quiet(0.8, 0.9), quiet(), Say.HELD),  # faster
    (quiet(), quiet(0.95, 1.05), Say.NOISY),  # A/A is too wide
    (quiet(), quiet(1.04, 1.05), Say.NOISY),  # A/A is off to one side
    (quiet(1.05, 1.09), quiet(0.92, 1.06), Say.NOISY),  # as far out as A/A itself
    (quiet(1.07, 1.09), quiet(0.92, 1.02), Say.NOISY),  # as far out as A/A in the other direction
    (quiet(1.035, 1.09), quiet(0.971, 1.02), Say.SLOWER),  # A/A is resolved: what is allowed decides
    (quiet(1.15, 1.25), quiet(0.92, 1.06), Say.SLOWER),  # exceeds the noise
    (quiet(pairs=FEWEST_PAIRS - 1), quiet(pairs=FEWEST_PAIRS - 1), Say.NOISY),
    (quiet(1.5, 1.6, FEWEST_PAIRS - 1), quiet(), Say.NOISY),
    (quiet(float("nan"), float("nan")), quiet(), Say.NOISY),
    (quiet(), quiet(float("nan"), float("nan")), Say.NOISY),
    (quiet(1.5, 1.6), quiet(float("nan"), float("nan")), Say.NOISY),
])  # fmt: skip
def test_verdict_of_two_ratios(change: Ratio, same: Ratio, expected: Say) -> None:
    assert say(change, same, LIMIT) is expected


def test_a_noisy_machine_is_undecided_not_failed() -> None:
    generator = np.random.default_rng(4)
    before, after = samples(generator, 0.0, noise=0.5, trials=20)
    again, _ = samples(generator, 0.0, noise=0.5, trials=20)
    for one in range(20):
        change, same = (ratio(before[one], other[one], generator) for other in (after, again))
        assert say(change, same, LIMIT) is Say.NOISY


def test_a_spread_is_median_and_quartiles() -> None:
    assert Spread.of(np.array([4.0, 1.0, 2.0, 3.0, 5.0])) == Spread(3.0, 2.0, 4.0)
