"""The fuzzer finds a planted fault and writes a trace that shows it, and its coverage counts what a run met.

Leaves out: whether the checks name the fault rightly (their own tests).
"""

import json
import re
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from instep.bundled import fixtures
from instep.campaign.fuzz import campaign as fuzzing
from instep.campaign.fuzz import hypothesis_machine, result_document
from instep.campaign.fuzz.campaign import Settings, campaign, place
from instep.campaign.fuzz.coverage import PROMPT_GRAPHS, TRANSFERS, TREES, Coverage
from instep.campaign.fuzz.drawn_run import Example
from instep.campaign.fuzz.result_document import of
from instep.campaign.soak import totals
from instep.setting import Setting
from instep.trace.event_rules import EventRules
from instep.trace.file import read
from instep.trace.header import SCHEMA, Header, Model, Part, Room
from instep.verdict import Exit
from instep_proof.faults.catalogue import by_id
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.plant import planted, run
from instep_reference.contract import engine as e
from instep_reference.contract.checkpoint import Checkpoint
from support.inputs.checkpoints import write
from support.inputs.outcomes import shown
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
@pytest.mark.parametrize(("ops", "examples", "seed"), [("ledger", 2, 3), ("plain", 2, 3)])
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


@WHOLE
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
    ran = instep("fuzz", "--checkpoint", model, "--examples", 3, "--seed", SEED, "--json", told, "--out", out)
    stays, one = json.loads(told.read_text())["campaigns"]
    assert stays["rounds"] == 15 and stays["elements"] > 0 and not stays["interrupted"]
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


@few(1)
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
@few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("edit", "seed", "most", "shows"), [
    (PAGE_KEPT, 79, 3, "pages are"), (NAME_KEPT, 4, 3, ""), (LATE_CHECK, 57, 3, "refused"),
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


HEADER = Header(
    schema=SCHEMA, name="by hand", claim="", checkpoint=Model(".", "", "", 64, 1),
    capacity=Room((2, 1, 4), tuple(range(1, 31)), 4, 96), num_steps=2, candidates=(1, 2, 3), adaptive=None, lag=0,
    seed=0, stop=None, replay=(Part("ledger"),), created={},
)
ALWAYS = {"slots in no order"}  # of this room
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


OTHER = "other tokens accepted in one batch"


def met(*events: e.AnyEvent, header: Header = HEADER) -> set[str]:
    """The conditions that the last of these events met."""
    rules, coverage, known = EventRules(header), Coverage(), dict[str, int]()
    for event in events:
        before = rules.table.as_it_stands()
        rules.apply(event)
        known = dict(coverage.counts())
        coverage.note(before, event, rules.table)
    return {name for name, count in coverage.counts().items() if count > known.get(name, 0)} - ALWAYS


def test_every_condition_is_met_by_a_committed_trace() -> None:
    """Those of `fixtures/long` are too long to be replayed by a test: `fixtures/results/long-cpu.json` is their run."""
    coverage = Coverage()
    for file in sorted(file for file in FIXTURES.rglob("*.jsonl") if "live" not in file.parts):
        trace = read(file)
        rules = EventRules(trace.header)
        coverage.begin(overlap=trace.header.recording.overlap, heads=trace.header.heads,
                       transfers=trace.header.receiver is not None)  # fmt: skip
        for event in trace.events:
            at = rules.serving(event)
            before = at.table.as_it_stands()
            at.apply(event)
            coverage.note(before, event, at.table)
    assert set(TRANSFERS) < set(coverage.counts())
    assert [name for name, count in coverage.counts().items() if not count] == []


def path(count: int) -> e.Path:
    return e.Path(tuple(range(1, count + 1)), 9)


ENTERED = (
    e.Admit("a", (1, 2, 3)), e.Admit("b", (4,)),
    e.Forward((e.Row("a", "prefill", 3, 5), e.Row("b", "prefill", 1, 6))),
)
VERIFIED = (*ENTERED, e.Draft(("a", "b"), ((7, 7), (8, 8))), e.Forward((e.Row("b", "verify"), e.Row("a", "verify"))))


def test_a_forward_is_seen_with_its_chunks_and_order() -> None:
    assert met(*ENTERED) == {
        "several requests in one forward", "batch order is not slot order", "a chunk of 1", "a chunk of 3",
        "a last chunk as long as a window",
    }
    assert met(*VERIFIED) == {"several requests in one forward"}


def test_accepted_counts_are_distinguished() -> None:
    requests = ("a", "b")
    assert met(*VERIFIED, e.Commit(requests, (path(0), path(0)))) == {"accepted: none"}
    assert met(*VERIFIED, e.Commit(requests, (path(2), path(2)))) == {"accepted: all", OTHER}
    assert met(*VERIFIED, e.Commit(requests, (path(2), path(1)))) == {"accepted: ragged", OTHER}
    plain = e.Forward((e.Row("a", "decode", root=3),))
    assert met(*VERIFIED, e.Commit(requests, (path(2), path(0))), plain) == {"a plain step after several accepted"}
    assert met(*VERIFIED, e.Commit(requests, (path(0), path(2))), plain) == set()


def test_step_counts_and_what_comes_after_them() -> None:
    down, up, none, back = (e.SetNumSteps(n) for n in (1, 3, 0, 2))
    assert met(*ENTERED, down) == {"steps down"}
    assert met(*ENTERED, up) == {"steps up"}
    assert met(*ENTERED, none) == {"steps to 0"}
    assert met(*ENTERED, none, back) == {"steps back from 0"}
    behind = (none, e.Forward((e.Row("a", "decode", root=3),)), back, e.Draft(("a",), ((1, 1),)))
    assert met(*ENTERED, *behind) == {"drafts after plain steps at 0"}
    verify = e.Forward((e.Row("a", "verify"),))
    assert met(*ENTERED, *behind, verify) == {"a verify after a switch", "a window that begins a page"}


def test_coming_and_going() -> None:
    assert met(*ENTERED, e.Preempt("a")) == {"preempted", "preempted behind a root"}
    assert met(*ENTERED, e.Preempt("a"), e.Resume("a")) == set()
    taken = (e.Preempt("a"), e.Admit("c", (1,)), e.Resume("a"))
    assert met(*ENTERED, *taken) == {"resumed in another slot", "every slot taken"}
    assert met(*ENTERED, e.Save("a", "kept")) == {"saved", "saved behind a root"}
    assert met(*ENTERED, e.Save("a", "kept"), e.Admit("c", (1, 2, 3)), e.Load("c", "kept")) >= {"loaded"}
    assert met(*ENTERED, e.Finish("b")) == {"finished"}
    assert met(*ENTERED, e.Finish("b"), e.Admit("c", (1,))) == {"a slot used again"}
    assert met(e.Admit("a", (1,)), e.Abort("a")) == {"aborted in its prompt", "aborted before its prompt"}
    assert met(*VERIFIED[:-1], e.Abort("a")) == {"aborted after a draft"}
    assert met(*VERIFIED, e.Abort("a")) == {"aborted after a verify"}
    assert met(e.Idle()) == {"idle"}


SAVED = (*ENTERED, e.Save("a", "kept"), e.Admit("c", (1, 2, 3)), e.Load("c", "kept"))
OF_A = (e.Draft(("a",), ((7, 7),)), e.Forward((e.Row("a", "verify"),)), e.Commit(("a",), (path(2),)))
OF_B = (e.Draft(("b",), ((7, 7),)), e.Forward((e.Row("b", "verify"),)), e.Commit(("b",), (path(1),)))
AGAIN = e.Draft(("a",), ((7, 7),))
UNREAD = (e.Admit("a", (1, 2, 3, 4, 5, 6)), e.Admit("b", (4,)))
BOTH = e.Commit(("a", "b"), (path(2), path(0)))


def chunk(tokens: int) -> e.Forward:
    return e.Forward((e.Row("a", "prefill", tokens),))


@pytest.mark.parametrize(("events", "condition", "holds"), [
    ((*ENTERED, *OF_A, *OF_B, AGAIN), "absent from a round, tokens pending", True),
    ((*ENTERED, *OF_A, AGAIN), "absent from a round, tokens pending", False),
    ((*ENTERED, *OF_A, *OF_B, AGAIN), "absent from several rounds, tokens pending", False),
    ((*ENTERED, *OF_A, *OF_B, *OF_B, AGAIN), "absent from several rounds, tokens pending", True),
    ((*ENTERED, *OF_A, e.SetNumSteps(1)), "steps below what is pending", True),
    ((*ENTERED, *OF_B, e.SetNumSteps(1)), "steps below what is pending", False),
    ((*VERIFIED, BOTH), "all, none and some accepted in one batch", False),
    ((*VERIFIED, BOTH, *OF_A), "a smaller batch", True),
    (SAVED, "loaded into another slot", True),
    (SAVED, "loaded twice", False),
    ((*SAVED[:-1], e.SetNumSteps(1), SAVED[-1]), "loaded under another step count", True),
    ((*SAVED, e.Finish("b"), e.Admit("d", (1, 2, 3)), e.Load("d", "kept")), "loaded twice", True),
    ((*UNREAD, e.Preempt("a")), "preempted before its prompt", True),
    ((*UNREAD, chunk(3), e.Preempt("a")), "preempted in its prompt", True),
    ((*UNREAD, chunk(3), e.Save("a", "kept")), "saved in its prompt", True),
    ((*UNREAD, chunk(3)), "a chunk that ends in a page", True),
    ((*UNREAD, chunk(4)), "a chunk that ends in a page", False),
    ((*UNREAD, chunk(4)), "a chunk that ends with a page", True),
    ((*ENTERED, e.Abort("a")), "aborted between rounds", True),
    ((*ENTERED, e.Preempt("a"), e.Abort("a")), "aborted while preempted", True),
    ((*UNREAD, e.Refused(e.Admit("a", (1,)))), "refused: a name, a phase or a number", True),
    ((*UNREAD, e.Refused(e.Admit("a", (1,)))), "refused: no slot is free", False),
    ((*UNREAD, e.Admit("c", (1,)), e.Refused(e.Admit("d", (1,)))), "refused: no slot is free", True),
    ((*ENTERED, e.Refused(e.Draft(("a", "d"), ((7, 7), (7, 7))))), "refused: after a request that may be named", True),
    ((*ENTERED, e.Refused(e.Draft(("d", "a"), ((7, 7), (7, 7))))), "refused: after a request that may be named", False),
])  # fmt: skip
def test_condition_is_met_by_its_event(events: tuple[e.AnyEvent, ...], condition: str, holds: bool) -> None:
    assert (condition in met(*events)) is holds


def test_trees_have_conditions_of_their_own_where_there_may_be_any() -> None:
    room = structs.replace(HEADER, capacity=structs.replace(HEADER.capacity, num_draft_tokens=4))
    drafted = (*ENTERED, e.Draft(("a", "b"), ((7, 7, 8), (8, 8)), ((0, 0, 1), (0, 1))))
    commit = e.Commit(("a", "b"), (e.Path((1, 3), 9), path(2)))
    alone = e.Commit(("a", "b"), (path(0), path(0)))
    forward = e.Forward((e.Row("a", "verify"), e.Row("b", "verify")))
    shown = met(*drafted, forward, header=room)
    assert "a tree next to a chain" in shown
    assert not {"trees of different shapes in one batch", "a tree next to a prompt"} & shown
    beside = (*ENTERED, e.Admit("c", (4, 5)), e.Draft(("a", "b"), ((7, 8, 8), (7, 8)), ((0, 0, 1), (0, 0))))
    mixed = met(*beside, e.Forward((*forward.rows, e.Row("c", "prefill", 1))), header=room)
    assert {"trees of different shapes in one batch", "a tree next to a prompt"} <= mixed
    assert "a tree next to a chain" not in mixed
    left_out, last = "an accepted path that is not 1, 2, ...", "the last node of a tree accepted"
    assert {left_out, last} <= met(*drafted, forward, commit, header=room)
    assert met(*drafted, forward, alone, header=room) == {"accepted: none", "nothing of a tree accepted"}
    assert not set(TREES) & set(Coverage().counts())


@pytest.mark.slow
def test_campaign_of_overlapped_rounds_is_labelled(tmp_path: Path) -> None:
    model = write(tmp_path / "model", num_hidden_layers=2, full_attention_interval=2)
    counts = campaign(Settings(Setting("ledger", overlap=True), model, 2, 1, tmp_path / "found")).coverage.counts()
    assert counts["finished while rounds overlap"] == counts["finished"] > 0


OVERLAPS, LONG, UP, ZERO = "finished while rounds overlap", "a position past 512", "steps up", "steps to 0"
NO_SLOT, GROWN, LATER = "refused: no slot is free", "trees grown for several requests", "a verify after a switch"


@pytest.mark.parametrize(("how", "more", "without", "may"), [
    ({}, {}, {OVERLAPS: "without --overlap", LONG: "in short runs"}, (NO_SLOT, UP, ZERO, LATER, GROWN)),
    ({"overlap": True}, {}, {NO_SLOT: "with --overlap"}, (OVERLAPS, UP)),
    ({}, {"transfers": True}, {NO_SLOT: "with --transfers"}, (UP,)),
    ({}, {"trees": 5}, {UP: "with --trees", ZERO: "with --trees", LATER: "with --trees"}, (NO_SLOT, GROWN)),
    ({"stages": 2}, {"trees": 5}, {GROWN: "without a drafter that grows trees"}, (NO_SLOT,)),
    ({"drafter": "vanilla"}, {}, {UP: "with one draft at most"}, (ZERO, LATER)),
    ({"ops": "support.wrong.subjects:without_numbers"}, {},
     {ZERO: "without the argument `controlled` of `make`"}, (UP, LATER)),
    ({"graphs": True, "prompt_graphs": "96"}, {}, {
        "a prompt in a graph other than the narrowest": "with one width in --prompt-graphs",
        "a prompt with more rows than the widest graph": "with so wide a graph"}, ("a prompt in a graph",)),
])  # fmt: skip
def test_conditions_that_a_setting_excludes_have_its_name(
    how: dict[str, Any], more: dict[str, Any], without: dict[str, str], may: tuple[str, ...], model: Path,
    tmp_path: Path,
) -> None:
    settings = Settings(Setting(**{"ops": "ledger", **how}), model, 2, 3, tmp_path / "found", **more)
    found = fuzzing.impossible(settings, Checkpoint.open(model, settings.setting.mode))
    assert found | without == found and not {*may} & found.keys()


def test_impossible_conditions_are_not_listed_as_never_met(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = campaign(Settings(Setting("ledger"), model, 2, 3, tmp_path / "found"))
    assert not {OVERLAPS, LONG, GROWN} & result.coverage.counts().keys() and not result.coverage.met[OVERLAPS]
    assert {*result.coverage.impossible} >= {OVERLAPS, LONG} and GROWN not in result.coverage.impossible
    assert f"impossible without --overlap: {OVERLAPS}" in shown(of([result]))
    coverage = Coverage()
    coverage.offers(True)
    assert NO_SLOT in coverage.counts()
    coverage.offers(False)
    assert coverage.impossible[NO_SLOT] == "with an engine that refuses nothing"
    runs = [totals.Soaked(Setting("ledger", overlap=on).data(), "", seed, conditions={UP: 1},
                          impossible={} if on else {OVERLAPS: "without --overlap"})
            for seed, on in enumerate((False, True))]  # fmt: skip
    for some, never in ((runs[:1], False), (runs, True)):
        (note, *others) = totals.document(some, None).notes
        assert (OVERLAPS in note) is never and LONG in note and UP not in note
        assert others == [f"ledger: impossible without --overlap: {OVERLAPS}"] * (not never)
    one = of([result]).data(of_file=False)["campaigns"][0]
    monkeypatch.setattr(result_document, "read", lambda path: {"campaigns": [json.loads(json.dumps(one))]})
    both = result_document.joined([Path("a"), Path("b")], []).data(of_file=False)["campaigns"][0]
    assert both["met"] == {name: 2 * count for name, count in one["met"].items()} and 0 in both["met"].values()


def test_forwards_with_prompts_are_counted_by_the_graph_that_they_fill() -> None:
    trace, coverage = read(fixtures() / "traces" / "faults" / "prompts.jsonl"), Coverage()
    assert not set(PROMPT_GRAPHS) & set(coverage.counts())
    coverage.begin(buckets=(16, 64))
    rules = EventRules(trace.header)
    for event in trace.events:
        before = rules.table.as_it_stands()
        rules.apply(event)
        coverage.note(before, event, rules.table)
    assert {name: coverage.counts()[name] for name in PROMPT_GRAPHS} == {
        "a prompt in a graph": 7, "a prompt in a graph without padding": 1,
        "a prompt in a graph other than the narrowest": 4, "a prompt in a graph next to a window": 5,
        "a prompt in a graph next to a decode": 1, "a later chunk in a graph": 5,
        "a prompt with more rows than the widest graph": 1,
    }


@WHOLE
@pytest.mark.slow
def test_campaign_in_graphs_of_prompts_agrees_and_counts_them(model: Path, tmp_path: Path) -> None:
    setting = Setting("plain", graphs=True, prompt_graphs="4,16")
    result = campaign(Settings(setting, model, 4, 3, tmp_path / "found"))
    assert result.exit is Exit.AGREED
    assert result.coverage.counts()["a prompt in a graph"] > 0


def test_conditions_of_a_drafter_are_met_and_counted_where_it_drafts() -> None:
    coverage = Coverage()
    assert not [name for name in coverage.counts() if "handed in" in name or "several MTP" in name]
    for heads, said in ((0, "handed in"), (3, "several MTP layers")):
        coverage.begin(heads=heads)
        rules = EventRules(HEADER)
        for event in (*VERIFIED, e.Commit(("a", "b"), (path(2), path(0)))):
            before = rules.table.as_it_stands()
            rules.apply(event)
            coverage.note(before, event, rules.table)
        assert coverage.counts()[f"{said}: accepted: ragged"] == 1
        assert coverage.counts()[f"{said}: resumed or loaded after a root"] == 0


@WHOLE
def test_campaign_of_two_engines_agrees_and_counts_transfers(model: Path, tmp_path: Path) -> None:
    result = campaign(Settings(Setting("ledger"), model, 10, 3, tmp_path / "found", transfers=True))
    assert result.exit is Exit.AGREED
    counts = result.coverage.counts()
    assert counts["loaded after it was sent"] > 0 and counts["a verify after a transfer"] > 0
    assert not set(TRANSFERS) & set(Coverage().counts())


@WHOLE
def test_campaign_of_two_engines_finds_a_wrong_transfer(model: Path, tmp_path: Path) -> None:
    settings = Settings(Setting("ledger"), model, 40, 3, tmp_path / "found", shrink_s=5.0, transfers=True)
    with planted_here(*by_id()["transfer-values-for-keys"].edits):
        result = campaign(settings)
        assert result.exit is Exit.DIVERGED and result.found is not None
        assert result.found.verdict.findings[0].kind == "load at the receiver" and result.again
        assert read(place(settings)).header.receiver is not None


@WHOLE
def test_campaign_of_replicas_finds_answers_of_another_replica(model: Path, tmp_path: Path) -> None:
    settings = Settings(Setting("ledger", dp=2), model, 20, 3, tmp_path / "found", shrink_s=5.0)
    with planted_here(*by_id()["group-answer-of-another-replica"].edits):
        result = campaign(settings)
        assert result.exit is Exit.DIVERGED and result.found is not None and result.again
        assert "--dp 2" in shown(of([result]))


@pytest.mark.parametrize(("how", "moves", "says"), [
    pytest.param({"stages": 2, "micro_batches": 2}, False, "no event had several micro-batches", marks=WHOLE),
    pytest.param({"dp": 2}, False, "no event had rows of several replicas", marks=WHOLE),
    ({}, True, "no request was loaded by the engine to which it was sent"),
])  # fmt: skip
def test_campaign_that_did_not_test_an_option_is_inconclusive(
    how: dict[str, Any], moves: bool, says: str, model: Path, tmp_path: Path
) -> None:
    result = campaign(Settings(Setting("ledger", **how), model, 1, 1, tmp_path, transfers=moves))
    assert result.elements and result.exit is Exit.INCONCLUSIVE and says in shown(of([result]))
    met = Counter({"a commit relayed to the other stages": 1, "several micro-batches in flight": 1,
                   "rows of several replicas": 1, "loaded after it was sent": 1})  # fmt: skip
    assert result.coverage.met["a commit relayed to the other stages"] == (4 if "stages" in how else 0)
    soaked = totals.Soaked(Setting("ledger", stages=2).data(), "", 0, 20, 200, sessions=[totals.Session(
        "2026-01-01", None, {}, elements=1)])  # fmt: skip
    assert soaked.exit is Exit.INCONCLUSIVE
    result.coverage.met, soaked.conditions = met, dict(met)
    assert result.exit is soaked.exit is Exit.AGREED


def test_trees_of_two_engines_are_refused(instep: Runner, model: Path) -> None:
    ran = instep("fuzz", "--model", model, "--transfers", "--trees", 5)
    assert ran.code == 2 and "--transfers: found --trees, too" in ran.err
