"""A farm: each trial gets one result though workers die, and results that cannot be merged are refused by name.

Leaves out: the merge of each command's results (its own tests), and network file systems.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from instep.campaign import farm as farming
from instep.campaign.farm import ATTEMPTS, Claim, Ended, Farm, Taken
from instep.campaign.fuzz import campaign as fuzz
from instep.campaign.fuzz import result_document
from instep.campaign.runner import TrialRunner
from instep.campaign.soak import totals
from instep.cli import farm_options
from instep.report.result import Result
from instep.setting import Setting
from instep.verdict import Exit
from instep_reference.contract.errors import BadInput
from support.running import farm_trials
from support.running.command import Runner, complaint
from support.running.covering import WHOLE
from support.running.farm_trials import SOURCE, ended, run

TINY = Path(__file__).resolve().parents[2] / "fixtures" / "tiny"
RUN_TRIAL, SOURCE_OF = farming.run_trial, farming.source_of
ELSEWHERE = "another-machine"
Trials = Callable[[], Iterable[tuple[str, ...]]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run, and no process waits long."""
    monkeypatch.setattr(farming, "run_trial", run)
    monkeypatch.setattr(farming, "source_of", lambda words: SOURCE)


def worker(folder: Path, trials: int = 4, host: str = ELSEWHERE, **more: Any) -> Farm:
    record = {"command": "toy", "source": SOURCE, **more.pop("record", {})}
    given: dict[str, Any] = {"total": trials, "limit_s": 60.0, "poll_s": 0.002, **more}
    one = Farm(folder, record, lambda: (("toy", str(number)) for number in range(trials)), host=host, **given)
    one.open()
    return one


def work(one: Farm, jobs: int = 2, executor: Executor | None = None, seconds: float | None = None) -> TrialRunner:
    with ThreadPoolExecutor(jobs) as pool, TrialRunner(seconds) as runner:
        one.work(runner, executor or pool, jobs)
    return runner


def numbers(one: Farm) -> list[int]:
    return [json.loads(path.read_text())["found"] for path in one.results()]


def claims(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "claims").iterdir())


def test_workers_share_all_trials_and_each_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[str]()
    monkeypatch.setattr(farming, "run_trial", lambda words, more: (ran.append(words[1]), run(words))[1])
    workers = [worker(tmp_path, 12, f"host {number}") for number in range(3)]
    threads = [threading.Thread(target=work, args=(one,)) for one in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(map(int, ran)) == [*range(12)]
    assert [numbers(one) for one in workers] == [[*range(12)]] * 3 and not workers[0].left()
    work(worker(tmp_path, 12))
    assert len(ran) == 12, "a worker that comes late runs nothing"
    work(worker(tmp_path, 14))
    assert numbers(workers[0]) == [*range(14)], "a longer list of the same campaign continues it"


def test_campaign_without_an_end_runs_until_its_time_is_over(tmp_path: Path) -> None:
    one = worker(tmp_path, total=None)
    one.trials = lambda: (("toy", str(number)) for number in count())
    work(one, seconds=0.05)
    assert numbers(one) == [*range(len(numbers(one)))] and not one.left()


@pytest.mark.parametrize("stale", [False, True], ids=["a new trial", "a stale one"])
def test_one_of_many_workers_gets_a_claim(stale: bool, tmp_path: Path) -> None:
    workers = [worker(tmp_path, 1, f"host {number}", limit_s=0.0) for number in range(8)]
    if stale:
        assert workers[0]._claim_next()[0] is not None
        for one in workers:
            assert one._claim_next() == (None, True), "it is first seen now"
    begin, got = threading.Barrier(len(workers)), list[Taken | None]()

    def claim(one: Farm) -> None:
        begin.wait()
        got.append(one._claim_next()[0])

    threads = [threading.Thread(target=claim, args=(one,)) for one in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (taken,) = filter(None, got)
    assert taken.path.name.endswith(".2" if stale else ".1")
    assert len(claims(tmp_path)) == 1 + stale, "nothing is left of the others"


def test_result_that_came_before_the_claim_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This worker listed the results, then another one finished the trial, then this one took its claim."""
    work(worker(tmp_path, 1, "other"))
    one, listed = worker(tmp_path, 1), Farm.done
    with monkeypatch.context() as once:
        once.setattr(Farm, "done", lambda self: once.undo() or set())
        assert one._claim_next() == (None, True) and Farm.done is listed
    assert [farming._claim(tmp_path / "claims" / name).ended for name in claims(tmp_path)] == [
        farming.KEPT, farming.GIVEN_BACK
    ]
    assert one._claim_next() == (None, False)


def test_claim_of_a_dead_process_of_this_machine_is_free_at_once(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    one = worker(tmp_path, 1)
    taken, _ = one._claim_next()
    assert taken is not None and one._claim_next() == (None, True)
    taken.claim.pid = dead.pid
    one._write(taken)
    assert "toy 0: free (its worker died)" in one.left()[0]
    work(one)
    assert numbers(one) == [0] and [name[-2:] for name in claims(tmp_path)] == [".1", ".2"]


def test_claim_of_a_worker_with_this_number_before_a_restart_is_free_at_once(tmp_path: Path) -> None:
    assert worker(tmp_path, 1)._claim_next()[0] is not None
    work(one := worker(tmp_path, 1))
    assert numbers(one) == [0] and len(claims(tmp_path)) == 2


@pytest.mark.parametrize("hours", [-1, 1])
def test_wrong_clock_frees_no_claim_and_keeps_none(
    hours: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what a worker itself sees for the claim's limit counts."""
    now = [100.0]
    other, one = worker(tmp_path, 1, "other"), worker(tmp_path, 1, "mine")
    taken, _ = other._claim_next()
    assert taken is not None
    taken.claim.time = f"2026-01-01T{12 + hours}:00:00+00:00"
    other._write(taken)
    monkeypatch.setattr(farming.time, "monotonic", lambda: now[0])
    for _ in range(5):
        assert one._claim_next() == (None, True)
        now[0] += 50
        taken.claim.beats += 1
        other._write(taken)
    assert one._claim_next() == (None, True), "it was renewed"
    now[0] += 500
    taken.claim.beats += 1
    other._write(taken)
    assert one._claim_next() == (None, True), "this worker did not look for longer than the limit, and it was renewed"
    now[0] += 60
    assert one._claim_next() == (None, True), "exactly its limit"
    now[0] += 0.1
    assert one._claim_next()[0] is not None
    assert numbers(one) == [] and f"process {os.getpid()} of mine" in one.left()[0]
    other._keep(taken, ended(0, date="late"))
    assert numbers(one) == [0], "the result of a worker that was only slow counts"


def test_worker_waits_for_the_claims_of_others_and_takes_over_a_stale_one(tmp_path: Path) -> None:
    taken, _ = worker(tmp_path, 1, "other", limit_s=0.05)._claim_next()
    work(one := worker(tmp_path, 1))
    assert taken is not None and numbers(one) == [0] and len(claims(tmp_path)) == 2


def test_running_trial_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, beats = worker(tmp_path, 1, limit_s=0.0), list[int]()

    def watched(words: Sequence[str], more: object) -> Ended:
        (path,) = (tmp_path / "claims").iterdir()
        while not beats or beats[-1] < 3:
            beats.append(farming._claim(path).beats)
        return run(words)

    monkeypatch.setattr(farming, "run_trial", watched)
    work(one)
    assert beats[-1] >= 3 and numbers(one) == [0]


def damage(path: Path, kind: str) -> None:
    """Damage the result of trial 1, or put another one next to it."""
    content = path.read_bytes()
    found = json.loads(content)

    def written(name: str, **changes: object) -> None:
        text = json.dumps({**found, **changes}).encode()
        (path.parent / f"{name}-{farming.digest_of(text)}.json").write_bytes(text)

    name = path.name.partition("-")[0]
    if kind == "edited":
        path.write_bytes(content.replace(b'"found": 1', b'"found": 7'))
    elif kind == "half":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "source":
        written("f" * 16, trial={**found["trial"], "source": "another"})
    elif kind == "trial":
        written("f" * 16)
    elif kind == "conflict":
        written(name, found=7)
    else:
        written(name, machine="of another machine", date="today", seconds=9)


@pytest.mark.parametrize(("kind", "says"), [
    ("edited", "was edited or written in part"), ("half", "was edited or written in part"),
    ("empty", "was edited or written in part"), ("source", "is of source another, this campaign of 0123456789abcdef"),
    ("trial", "is of another trial, `instep toy 1`"), ("conflict", "are different results of `instep toy 1`"),
])  # fmt: skip
def test_results_that_cannot_be_merged_are_named(kind: str, says: str, tmp_path: Path) -> None:
    work(one := worker(tmp_path))
    damage(one.results()[1], kind)
    with pytest.raises(BadInput, match=says) as refused:
        one.results()
    with pytest.raises(BadInput, match="delete the wrong files"):
        worker(tmp_path)
    if kind != "conflict":
        (wrong,) = [path for path in (tmp_path / "results").iterdir() if path.name in str(refused.value)]
        wrong.unlink()
        work(one)
        assert numbers(one) == [*range(4)]


def test_equal_results_of_two_workers_are_one(tmp_path: Path) -> None:
    work(one := worker(tmp_path))
    damage(one.results()[1], "again, elsewhere")
    assert len([*(tmp_path / "results").iterdir()]) == 5 and numbers(one) == [*range(4)]


@pytest.mark.parametrize("field", ["command", "source"])
def test_folder_of_another_campaign_or_source_is_refused(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(worker(tmp_path))
    with pytest.raises(BadInput, match=rf"a campaign with {field} .*, expected {field} other.*another folder"):
        worker(tmp_path, record={field: "other"})
    with monkeypatch.context() as patched, pytest.raises(BadInput, match="claims, which cannot be written"):
        patched.setattr(os, "access", lambda path, mode: False)
        worker(tmp_path)
    (tmp_path / "campaign" / "record.json").write_text("{")
    with pytest.raises(BadInput, match="a campaign with command None"):
        worker(tmp_path)


@pytest.mark.parametrize(("end", "says"), [
    (Ended(4, b"", "instep: the harness itself failed", SOURCE), "exit code 4 without a result: instep: the harness"),
    (Ended(-9, b'{"exit": 0, "fou', "", SOURCE), "exit code -9 without a result"),
    (Ended(0, b"[1]", "", SOURCE), "exit code 0 without a result"),
    (RuntimeError("worker died"), "RuntimeError: worker died"),
])  # fmt: skip
def test_trial_that_always_fails_is_lost_and_named(
    end: Ended | Exception, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(words: Sequence[str], more: object) -> Ended:
        if words[1] != "1":
            return run(words)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(farming, "run_trial", failing)
    work(one := worker(tmp_path))
    assert numbers(one) == [0, 2, 3]
    (line,) = one.left()
    assert line.startswith(f"instep toy 1: lost after {ATTEMPTS} attempts ({says}")
    pattern = Path(line.rpartition("delete ")[2])
    assert pattern.name.endswith(".*")
    for path in pattern.parent.glob(pattern.name):
        (path / "record.json").unlink()
        path.rmdir()
    monkeypatch.setattr(farming, "run_trial", run)
    work(one)
    assert numbers(one) == [*range(4)] and not one.left()


def test_damaged_claim_becomes_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = worker(tmp_path, 1)
    taken, _ = one._claim_next()
    assert taken is not None
    (taken.path / "record.json").write_bytes(b'{"host": "other')
    assert farming._claim(taken.path) == Claim() and one._claim_next() == (None, True)
    seen, since = one._seen[taken.path]
    one._seen[taken.path] = seen, since - farming.LIMIT_S - 1
    assert one._claim_next()[0] is not None


def test_bad_input_of_a_trial_and_a_changed_source_end_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (end, says) in enumerate((
        (Ended(2, b"", "instep: --ops: found nothing", SOURCE), "instep toy 0: found --ops: found nothing"),
        (ended()._replace(source="edited"), "source edited after a trial.*change no source"),
    )):  # fmt: skip
        monkeypatch.setattr(farming, "run_trial", lambda words, more, end=end: end)
        one = worker(tmp_path / str(number))
        with pytest.raises(BadInput, match=says):
            work(one, 1)
        assert not one.results()
        assert [farming._claim(path).ended for path in (one.folder / "claims").iterdir()] == [farming.GIVEN_BACK]


def test_ctrl_c_gives_claims_back_without_an_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, stop = worker(tmp_path), threading.Event()

    def pressed(self: Farm, running: object) -> None:
        stop.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(farming, "run_trial", lambda words, more: (stop.wait(30), run(words))[1])
    child, ended = SimpleNamespace(terminate=lambda: ended.append(True)), list[bool]()
    monkeypatch.setattr(farming, "_children", [child])
    for _ in range(ATTEMPTS):
        with monkeypatch.context() as patched:
            patched.setattr(Farm, "_collect", pressed)
            assert work(one).interrupted
    assert ended == [True] * ATTEMPTS
    assert not numbers(one) and "free (given back)" in one.left()[0]
    work(one)
    assert numbers(one) == [*range(4)]


def test_divergence_of_any_worker_ends_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(words: Sequence[str], more: object) -> Ended:
        return ended(int(words[1]), code=int(words[1] == "2"))

    monkeypatch.setattr(farming, "run_trial", found)
    for one in (worker(tmp_path, 9, until_found=True), worker(tmp_path, 9, until_found=True)):
        work(one, 1)
        assert numbers(one) == [0, 1, 2] and len(claims(tmp_path)) == 3
    work(one := worker(tmp_path, 9), 1)
    assert numbers(one) == [*range(9)]


class Losing(ThreadPoolExecutor):
    """Runs the first trial, and loses its result."""

    lost = 0

    def submit(self, *given: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = super().submit(*given, **named)
        if not self.lost:
            self.lost += 1
            future.result()
            future = Future()
            future.cancel()
        return future


def test_result_that_an_executor_lost_is_made_again(tmp_path: Path) -> None:
    with Losing(1) as executor:
        work(one := worker(tmp_path), 1, executor)
    assert executor.lost == 1 and numbers(one) == [*range(4)] and len(claims(tmp_path)) == 5


@WHOLE
def test_dask_runs_trials_though_a_worker_dies_and_a_result_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    monkeypatch.setattr(farming, "run_trial", farm_trials.killed_once)
    one = worker(tmp_path / "farm")
    one.trials = lambda: (("toy", str(number), str(tmp_path)) for number in range(4))
    with (distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
          distributed.Client(cluster) as client, client.get_executor(pure=False) as executor):
        submit, lost = executor.submit, list[Future[Any]]()

        def losing(*given: Any) -> Future[Any]:
            future: Future[Any] = submit(*given)
            if not lost:
                lost.append(future)
                future.cancel()
            return future

        monkeypatch.setattr(executor, "submit", losing)
        work(one, 2, executor)
    assert (tmp_path / "died").exists() and lost
    assert numbers(one) == [*range(4)] and not one.left()


def test_source_of_a_trial_has_the_modules_of_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farming, "source_of", SOURCE_OF)
    whole = SOURCE_OF(())
    monkeypatch.setattr(farming, "PACKAGES", farming.PACKAGES[:1])
    assert len({whole, SOURCE_OF(())}) == 2, "every package of instep counts"
    monkeypatch.chdir(tmp_path)
    (mine := tmp_path / "mine.py").write_text("OPS = 1")
    lines = ("--ops", "mine:OPS"), ("--ops", "mine.py:OPS"), ("--ops", "plain", "--state-rounding", "stochastic:7")
    before = [SOURCE_OF(words) for words in lines]
    assert before == [SOURCE_OF(words) for words in lines] and before[2] == SOURCE_OF(())
    one = worker(tmp_path / "farm", 1)
    one.trials = lambda: [lines[0]]
    monkeypatch.setattr(farming, "run_trial", lambda words, more: ended()._replace(source=SOURCE_OF(words)))
    work(one)
    assert len(one.results()) == 1
    mine.write_text("OPS = 2")
    after = [SOURCE_OF(words) for words in lines]
    assert before[0] != after[0] and before[1] != after[1] and before[2] == after[2]
    assert len(one.results()) == 1, "this worker began with the source before"
    with pytest.raises(BadInput, match=f"is of source {before[0]}, this campaign of {after[0]}"):
        worker(tmp_path / "farm", 1)


# ---- the commands

class Told:
    """Runs no trial, and answers with the result that `answer` makes of its words."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Callable[[dict[str, str]], Result]) -> None:
        self.ran, self.answer = list[str](), answer
        monkeypatch.setattr(farming, "run_trial", self)

    def __call__(self, words: Sequence[str], more: Sequence[str] = ()) -> Ended:
        self.ran.append(" ".join(words))
        options = dict(zip(words[1::2], words[2::2], strict=False))
        content = msgspec.json.encode(self.answer(options).data())
        return Ended(0, content, "", farming.source_of(words))


def drawn(options: dict[str, str]) -> Result:
    """A campaign of `fuzz` with one event per run; seed 2 of plain diverges."""
    setting, seed, runs = Setting(options["--ops"]), int(options["--seed"]), int(options["--examples"])
    one = fuzz.Result(fuzz.Settings(setting, Path("model"), None, seed, Path("out")))
    one.examples = one.events = one.elements = runs
    one.coverage.events["commit"] = runs
    found = result_document.of([one])
    if (setting.ops, seed) == ("plain", 2):
        (data,) = found.found["campaigns"]
        data |= {"exit": 1, "message": "DIVERGED there", "trace": "fuzz-plain-2.jsonl", "shrunk": 3, "again": True}
        found = replace(found, exit=Exit.DIVERGED)
    return found


def test_fuzz_shares_its_seeds_and_adds_up_their_runs(
    tmp_path: Path, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, words = Told(monkeypatch, drawn), ("fuzz", "--farm", tmp_path / "farm", "--model", TINY)
    ran = instep(*words, "--ops", "ledger", "--examples", 500, "--json", tmp_path / "all.json")
    assert ran.code == Exit.AGREED and "3 of 3 trials are there" in ran.out, ran
    assert told.ran == [f"fuzz --model {TINY} --examples 200 --ops ledger --seed {seed}" for seed in range(3)]
    told_all = json.loads((tmp_path / "all.json").read_text())
    (one,), (machine,) = told_all["campaigns"], told_all["machines"]
    assert machine == {"trials": 3, **told_all["machine"]}
    assert (one["examples"], one["elements"], one["kinds"], one["trials"]) == (600, 600, {"commit": 600}, 3)
    assert "600 runs, 600 events; 3 trials from --seed 0" in ran.out
    again = instep(*words, "--ops", "ledger", "--examples", 500, "--jobs", 0)
    assert again == ran, "a merge changes nothing"
    more = instep(*words, "--ops", "ledger", "--ops", "plain", "--examples", 900, "--jobs", 0)
    assert more.code == Exit.INCONCLUSIVE and more.out.count("not claimed") == 7, more
    assert len(told.ran) == 3, "--jobs 0 runs none"
    found = instep(*words, "--ops", "plain", "--seed", 1, "--minutes", 1)
    assert found.code == Exit.DIVERGED and "--seed 2" in told.ran[-1] and len(told.ran) == 5, found
    assert "DIVERGED there" in found.out and "ledger agrees: 600 numbers" in found.out
    for other in (("--trees", 8), ("--examples", 7)):
        assert "a campaign with command fuzz --model" in complaint(instep(*words, *other)), "7: seeds drawn twice"


def test_ctrl_c_in_a_campaign_without_an_end_is_inconclusive(
    tmp_path: Path, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(options: dict[str, str]) -> Result:
        if options["--seed"] == "2":
            raise KeyboardInterrupt
        return drawn(options)

    Told(monkeypatch, pressed)
    ran = instep("fuzz", "--farm", tmp_path, "--model", TINY, "--ops", "ledger", "--minutes", 1)
    assert ran.code == Exit.INCONCLUSIVE and "2 trials are there" in ran.out and "interrupted" in ran.out, ran


def test_sigterm_does_what_ctrl_c_does() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), farm_options._terminated():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is before


def test_merged_runs_have_tested_what_one_of_them_tested(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for number, (path, untested) in enumerate(zip(paths, (["a", "b"], ["a", "b", "c"], ["a"]), strict=True)):
        found = drawn({"--ops": "ledger", "--seed": str(number), "--examples": "5"})
        (data,) = found.found["campaigns"]
        data |= {"untested": untested, "exit": 3, "pairs": 7 - number, "met": {"a condition": number}}
        found.write(path)
    (one,) = result_document.joined(paths, ()).found["campaigns"]
    assert (one["untested"], one["exit"], one["pairs"], one["met"]) == (["a"], 3, 7, {"a condition": 3})
    drawn({"--ops": "ledger", "--seed": "3", "--examples": "5"}).write(path := tmp_path / "3.json")
    (one,) = result_document.joined([*paths, path], ()).found["campaigns"]
    assert (one["untested"], one["exit"], one["examples"]) == ([], 0, 20)


@WHOLE
def test_soak_shares_its_seeds_and_sums_them(
    tmp_path: Path, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def served(options: dict[str, str]) -> Result:
        one = totals.Soaked(Setting(options["--ops"]).data(), "", int(options["--seed"]), 20, 200)
        one.sessions.append(totals.Session("", None, {}, 60.0, int(options["--rounds"]), 7, 7))
        return totals.result([one], None)

    told, out = Told(monkeypatch, served), tmp_path / "all.json"
    words = ("soak", "--farm", tmp_path / "farm", "--model", TINY, "--rounds", 4500, "--ops", "ledger", "--json", out)
    ran = instep(*words, "--seed", 9, "--jobs", 2)
    assert ran.code == Exit.AGREED, ran
    assert [(run["seeds"], run["rounds"]) for run in json.loads(out.read_text())["runs"]] == [([9, 10, 11], 6000)]
    assert instep(*words, "--seed", 9).code == Exit.AGREED and len(told.ran) == 3
    assert "to join serves nothing" in complaint(instep(*words, "--join", out))


@pytest.mark.parametrize("words", [("--jobs", 2), ("--executor", "tcp://nowhere:1")])
def test_options_of_a_farm_need_one(words: tuple[object, ...], instep: Runner) -> None:
    assert "found no --farm" in complaint(instep("fuzz", *words))


def test_executor_without_its_package_or_scheduler_is_refused(
    tmp_path: Path, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("fuzz", "--farm", tmp_path, "--examples", 1, "--executor", "tcp://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert "pip install 'instep[dask]'" in complaint(instep(*words))

    class Nowhere:
        @staticmethod
        def Client(address: str, timeout: float) -> object:
            raise OSError(f"nothing answers at {address}")

    monkeypatch.setitem(sys.modules, "distributed", Nowhere)  # type: ignore[arg-type]
    assert "nothing answers at tcp://127.0.0.1:1, expected the address of a Dask" in complaint(instep(*words))


@WHOLE
def test_killed_worker_is_replaced_and_its_trial_runs_again(
    tmp_path: Path, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes of the worker are killed between the claim and the result."""
    monkeypatch.setattr(farming, "run_trial", RUN_TRIAL)
    monkeypatch.setattr(farming, "source_of", SOURCE_OF)
    words = ("soak", "--farm", str(tmp_path), "--model", str(TINY), "--rounds", "1", "--ops", "ledger")
    killed = subprocess.Popen([sys.executable, "-m", "instep", *words], start_new_session=True)
    while not [*tmp_path.glob("claims/*.1")]:
        assert killed.poll() is None
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    ran = instep(*words, "--json", tmp_path / "all.json")
    assert ran.code in (Exit.AGREED, Exit.INCONCLUSIVE) and "1 of 1 trials are there" in ran.out, ran
    assert [name[-2:] for name in claims(tmp_path)] == [".1", ".2"]
    assert json.loads((tmp_path / "all.json").read_text())["runs"][0]["rounds"] == 1
