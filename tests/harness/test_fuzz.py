"""The fuzzer finds a planted fault and writes a trace that shows it; without the fault it finds nothing.

Leaves out: whether the checks name the fault rightly (their own tests).
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

from instep.campaign.fuzz import campaign as fuzzing
from instep.campaign.fuzz import hypothesis_machine
from instep.campaign.fuzz.campaign import Settings, campaign, place
from instep.campaign.fuzz.drawn_run import Example
from instep.setting import Setting
from instep.trace.file import read
from instep.verdict import Exit
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.plant import planted, run
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few
from support.running.event_clock import count_events
from support.running.planting import planted_here
from support.wrong import subjects

SEED = "1"

# The commit reads snapshots with a row stride of the current window instead of the pool's: right while the widest
# step count is in force, wrong from the first switch down on, for every row but the first.
CALLER_STRIDE = Edit(
    "instep_optimized/commit/snapshot.py",
    "source=pair.snapshots.at(accepted.rows, accepted.nodes),",
    """source=Units(
                        pair.snapshots.pool.as_strided(pair.snapshots.pool.shape, (
                            pair.snapshots.pool.stride(0) - pair.snapshots.pool.stride(1)
                            * (pair.snapshots.pool.stride(0) // pair.snapshots.pool.stride(1)
                               - pair.snapshots.pool.shape[1]),
                            *pair.snapshots.pool.stride()[1:],
                        )),
                    ).at(accepted.rows, accepted.nodes),""",
)


def divergence(output: str) -> list[str]:
    """Place and diagnosis of the message; the command below names another path."""
    lines = output.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("DIVERGED"))
    return lines[begin : begin + 3]


@WHOLE
def test_the_caller_stride_is_found_and_its_trace_shows_it(
    instep: Runner, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_events(monkeypatch)
    trace = tmp_path / "found" / f"fuzz-ledger-{SEED}.jsonl"
    with planted_here(CALLER_STRIDE):
        found = instep("fuzz", "--checkpoint", model, "--ops", "ledger", "--examples", 400, "--strategy", "snapshot",
                       "--conv", "windows", "--seed", SEED, "--shrink", 100, "--out", tmp_path / "found")
        again = instep("replay", trace, "--no-ladder")
    assert found.code == Exit.DIVERGED, found
    told = re.search(r"found in run (\d+), shrunk to (\d+) events", found.out)
    assert told is not None, found.out
    assert int(told[1]) <= 400, f"found in run {told[1]}, which is beyond 400"
    assert int(told[2]) <= 15, f"the smallest run has {told[2]} events"
    assert str(trace) in found.out
    assert again.code == Exit.DIVERGED, again
    assert divergence(again.out) == divergence(found.out)
    assert "commit" in divergence(again.out)[1]
    assert instep("replay", trace, "--no-ladder").code == Exit.AGREED, "without the fault"


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("ops", "examples", "seed"), [("ledger", 2, 14), ("plain", 2, 14)])
def test_nothing_is_found_without_a_fault(
    ops: str, examples: int, seed: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing, "EVENTS", 9)  # such runs of this seed meet the conditions below
    result = campaign(Settings(Setting(ops), model, examples, seed, tmp_path / "found"))
    assert result.exit == Exit.AGREED, None if result.found is None else result.found.verdict.findings[0]
    assert result.examples >= examples and result.elements > 0
    assert not (tmp_path / "found").exists()
    for condition in ("several requests in one forward", "accepted: ragged", "a verify after a switch"):
        assert result.coverage.counts()[condition] > 0, condition


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_clock_ends_it_no_time_is_inconclusive_and_bad_input_one_line(
    instep: Runner, model: Path, tmp_path: Path
) -> None:
    none = instep("fuzz", "--checkpoint", model, "--ops", "ledger", "--minutes", 0, "--out", tmp_path / "found")
    assert none.code == Exit.INCONCLUSIVE and "nothing was compared" in none.out, none
    assert not (tmp_path / "found").exists()
    assert "nowhere" in complaint(instep("fuzz", "--checkpoint", tmp_path / "nowhere"))
    folder = planted(tmp_path / "planted")
    some = run(folder, "fuzz", "--checkpoint", str(model), "--ops", "ledger", "--minutes", "0.02")
    assert some.returncode == Exit.AGREED and "ledger agrees: " in some.stdout, some.stdout + some.stderr
    assert not (folder / "fuzz").exists() and not (folder / ".hypothesis").exists()


def test_ctrl_c_keeps_what_ran(instep: Runner, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin = [], fuzzing._Host.begin

    def pressed_at_the_third(host: fuzzing._Host, choose: object) -> Example:
        begun.append(host.settings.setting.name)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return begin(host, choose)  # type: ignore[arg-type]

    monkeypatch.setattr(fuzzing._Host, "begin", pressed_at_the_third)
    told, out = tmp_path / "told.json", tmp_path / "out"
    ran = instep("fuzz", "--checkpoint", model, "--examples", 9, "--seed", SEED, "--json", told, "--out", out)
    (one,) = json.loads(told.read_text())["campaigns"]
    assert begun == ["ledger"] * 3, "no further op set begins"
    assert ran.code == Exit.AGREED and "interrupted" in ran.out, ran
    assert one["interrupted"] and one["examples"] == 2 and one["elements"] > 0


def test_file_of_a_finding_has_no_colon() -> None:
    settings = Settings(Setting("mine:OPS"), Path("model"), 1, 7, Path("out"))
    assert place(settings) == Path("out/fuzz-mine-OPS-7.jsonl")


def test_a_harness_that_fails_is_not_a_finding(
    instep: Runner, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counting = "self.elements += verdict.elements"
    broken = Edit("instep/campaign/fuzz/drawn_run.py", counting, 'raise RuntimeError("a broken check")')
    with planted_here(broken):
        done = instep("fuzz", "--checkpoint", model, "--ops", "ledger", "--examples", 20)
    assert done.code == Exit.HARNESS_FAILED, done
    assert "a broken check" in done.err and not (tmp_path / "fuzz").exists()


def test_a_drawer_that_fails_ends_it_at_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis would shrink its error, too, for minutes."""
    calls = []

    def commit(*given: object) -> None:
        calls.append(given)
        raise RuntimeError("a broken drawer")

    monkeypatch.setattr(hypothesis_machine.draw_events, "commit", commit)
    with pytest.raises(RuntimeError, match="a broken drawer"):
        campaign(Settings(Setting("ledger"), model, 50, int(SEED), tmp_path / "found"))
    assert len(calls) == 1


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("subject", "shrink"), [("LOUDER", 0.0), ("LOUDER", 0.3), ("SLOW", 0.5)])
def test_a_shrink_that_is_cut_short_reports_the_smallest_so_far(
    instep: Runner, model: Path, tmp_path: Path, subject: str, shrink: float
) -> None:
    """When the time ends within an example, Hypothesis must not take that for a test that cannot be relied on."""
    ops = f"support.wrong.subjects:{subject}"
    ran = instep("fuzz", "--checkpoint", model, "--ops", ops, "--examples", 20, "--seed", SEED, "--shrink", shrink,
                 "--out", tmp_path / "found")
    trace = tmp_path / "found" / f"fuzz-{ops.replace(':', '-')}-{SEED}.jsonl"
    assert ran.code == Exit.DIVERGED, ran
    assert "shrinking was cut short: its time was over" in ran.out and "not again" not in ran.out
    told = re.search(r"shrunk to (\d+) events", ran.out)
    assert told is not None and len(read(trace).events) == int(told[1])
    assert instep("replay", trace, "--no-ladder").code == Exit.DIVERGED


@pytest.mark.slow
def test_difference_is_reported_as_found_once(
    instep: Runner, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects.ONCE.gated_norm, "calls", 0)
    ran = instep("fuzz", "--checkpoint", model, "--ops", "support.wrong.subjects:ONCE", "--examples", 20,
                 "--seed", SEED, "--out", tmp_path / "found",
                 "--html", tmp_path / "page.html", "--json", tmp_path / "found.json")
    assert ran.code == Exit.DIVERGED, ran
    (told,) = json.loads((tmp_path / "found.json").read_text())["campaigns"]
    assert ran.out.startswith(f"seed {SEED}\n"), "said before anything else"
    assert told["findings"] and not told["again"] and told["exit"] == 1 and f" in {told['examples']} runs" in ran.out
    assert instep("page", tmp_path / "found.json", "--html", tmp_path / "again.html").code == Exit.AGREED
    assert "found once, but not when its trace was replayed" in ran.out
    assert "did not part the sides every time" in ran.out
    assert divergence(ran.out)[1].startswith("  event ") and "gated" in divergence(ran.out)[1]
    assert len(list((tmp_path / "found").glob("*.jsonl"))) == 1
    page = (tmp_path / "page.html").read_text()
    assert divergence(ran.out)[1].strip() in unescape(page) and '"runs":[{' in page, "with its events"


@pytest.mark.slow
def test_a_finding_is_written_as_it_comes_and_survives_what_follows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness raises while it shrinks a finding: the finding is kept, on the disk and in the report."""
    settings = Settings(Setting("support.wrong.subjects:LOUDER"), model, 20, int(SEED), tmp_path / "found")
    served = Example.serve
    sizes: list[int] = []

    def fragile(self: Example, event: object) -> None:
        if place(settings).exists():
            sizes.append(len(read(place(settings)).events))
            if len(sizes) > 30:
                raise RuntimeError("a wheel came off")
        served(self, event)

    monkeypatch.setattr(Example, "serve", fragile)
    result = campaign(settings)
    assert result.exit is Exit.DIVERGED and result.found is not None and result.again
    assert result.cut == "the harness itself failed: RuntimeError: a wheel came off"
    assert sizes == sorted(sizes, reverse=True) and len(read(place(settings)).events) <= sizes[-1] <= sizes[0]


def test_unwritable_folder_is_refused_before_the_run(instep: Runner, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / f"fuzz-ledger-{SEED}.jsonl").write_text("a log\n")
    for out, said in (("file", "no folder"), (Path("file") / "below", "no folder"), ("", "not of a trace")):
        words = ("--ops", "ledger", "--seed", SEED, "--out", tmp_path / out)
        assert said in complaint(instep("fuzz", "--checkpoint", model, *words))


PAGE_KEPT = Edit(  # pages are handed out request by request, so that a refused forward has taken the first one's
    "instep_optimized/memory/__init__.py", "self.pages.grow(wants)",
    "[new for want in wants for new in self.pages.grow([want])]",
)
CLAIM = "        self._claim(request, 0, sampling)\n"
ENTER = "        self._requests[request] = Request(request, prompt, ints(prompt, self._device), sampling)\n"
NAME_KEPT = Edit("instep_optimized/engine.py", CLAIM + ENTER, ENTER + CLAIM)  # entered before the slot is claimed
LATE_CHECK = Edit("instep_optimized/engine.py", "self._refusals.forward(rows)", "None")
REFUSED = Path(__file__).resolve().parents[2] / "fixtures" / "traces" / "lifecycle" / "refused.jsonl"


# Each with a seed that finds it within 3 runs; others take up to some hundreds. How small it gets is not looked at.
@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("edit", "seed", "most", "shows"), [
    (PAGE_KEPT, 5, 3, "pages are"), (NAME_KEPT, 12, 3, ""), (LATE_CHECK, 9, 3, "refused"),
], ids=["a page", "a name", "late"])  # fmt: skip
def test_a_refused_event_that_left_something_is_found(
    edit: Edit, seed: int, most: int, shows: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_events(monkeypatch)
    settings = Settings(Setting("ledger"), model, most, seed, tmp_path / "found", shrink_s=0.5)
    with planted_here(edit):
        found = campaign(settings).found
    assert found is not None and shows in found.verdict.findings[0].diagnosis
    assert '"event":"refused"' in place(settings).read_text()


def test_the_committed_trace_shows_it(instep: Runner) -> None:
    with planted_here(LATE_CHECK):
        found = instep("replay", REFUSED, "--ops", "ledger", "--no-ladder")
    assert found.code == Exit.DIVERGED and " refused, " in found.out, found
