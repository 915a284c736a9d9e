"""An exception of the subject is its finding in every call, with the op, the line and the traceback.

Leaves out: wrong values in answers of the right type.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.campaign.fuzz.campaign import Settings, campaign
from instep.cli import main
from instep.report import outcome_data
from instep.report.divergence_message import divergence
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit
from instep_optimized import OptimizedEngine
from support.inputs.traces import recording
from support.running.command import Runner
from support.wrong import raising, subjects

trace = recording()


def replayed(trace: Trace, name: str, module: str = "raising") -> Outcome:
    return Replay(trace, Setting(f"support.wrong.{module}:{name}")).run()


@pytest.mark.parametrize("method", raising.METHODS)
def test_exception_of_the_engine_is_its_finding_in_every_call(trace: Trace, method: str) -> None:
    outcome = replayed(trace, f"RAISING_{method}")
    assert outcome.verdict.exit is Exit.DIVERGED
    first = outcome.verdict.findings[0]
    assert first.check == "interface" and f"`{method}` of the engine raised LookupError (nobody is at home)" in (
        first.diagnosis
    )
    assert first.raised is not None and first.raised.function == "_raises"
    assert first.raised.file.endswith("support/wrong/raising.py")


@pytest.mark.slow
def test_engine_may_write_memory_made_for_an_answer(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks run in inference mode: what is made there could not be written outside."""
    regions, commit, notes = OptimizedEngine.regions, OptimizedEngine.commit, []

    def shown(self: Any) -> list[Any]:
        notes.append(torch.zeros(1))
        return regions(self)

    def committed(self: Any, *given: Any) -> Any:
        for note in notes:
            note.add_(1)
        return commit(self, *given)

    monkeypatch.setattr(OptimizedEngine, "regions", shown)
    monkeypatch.setattr(OptimizedEngine, "commit", committed)
    outcome = Replay(trace, Setting("ledger")).run()
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]


@pytest.mark.parametrize(("method", "says"), [
    ("may_change", "may_change returned a list (['slot 1']); the contract expects region names with the units"),
    ("regions", "regions returned None; the contract expects a list of `Region`"),
    ("budget", "budget returned a dict ({'state': 0.5}); the contract expects region names with their bytes"),
    ("slots", "slots returned None; the contract expects requests with their slots"),
    ("pages", "pages returned a dict ({'a': 3}); the contract expects requests with the list of their pages"),
    ("state", "state returned None; the contract expects a `RequestState`"),
    ("next_num_steps", "next_num_steps returned a str ('three'); the contract expects a whole number"),
    ("draft", "draft returned None; the contract expects a `Drafted`"),
    ("forward", "forward returned a int (7); the contract expects a `Forwarded`"),
    ("commit", "commit returned a tuple (()); the contract expects a `Committed`"),
])  # fmt: skip
def test_answer_of_a_wrong_type_is_a_finding(trace: Trace, method: str, says: str) -> None:
    first = replayed(trace, f"GARBAGE_{method}").verdict.findings[0]
    assert first.diagnosis.startswith(says)
    assert first.raised is None


@pytest.mark.parametrize(("name", "says"), [
    ("BY_PAIR", "regions: 'state': by returned a str ('pair'); the contract expects one of slot, row, page"),
    ("ANOTHER_AXIS", "regions: 'state': means returned a Meaning"),
    ("NO_COMPONENT", "regions: 'state': means returned a Meaning"),
    ("SCRATCH_NONE", "regions: 'state': scratch returned None; the contract expects a set of units"),
    ("SCRATCH_BEYOND", "regions: 'state': scratch returned a frozenset (frozenset({1000000})); the contract expects"),
])  # fmt: skip
def test_invalid_region_is_a_finding(trace: Trace, name: str, says: str) -> None:
    first = Replay(trace, Setting(f"support.wrong.declared_regions:{name}")).run().verdict.findings[0]
    assert first.check == "interface" and first.diagnosis.startswith(says), first.diagnosis


def test_region_that_becomes_invalid_is_a_finding(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was right before is looked at again."""
    right, commit = OptimizedEngine.regions, OptimizedEngine.commit

    def then(self: OptimizedEngine, *given: object) -> object:
        monkeypatch.setattr(
            OptimizedEngine, "regions", lambda self: [replace(region, by="pair") for region in right(self)]
        )
        return commit(self, *given)

    monkeypatch.setattr(OptimizedEngine, "commit", then)
    first = Replay(trace, Setting("ledger")).run().verdict.findings[0]
    assert (first.check, first.kind) == ("interface", "commit") and "by returned a str ('pair')" in first.diagnosis


@pytest.mark.parametrize(("name", "says"), [
    ("SHOWS_meta", "see: trunk layer 0 normed returned a meta Tensor"),
    ("SHOWS_sparse", "see: trunk layer 0 residual returned a sparse Tensor"),
    ("SHOWS_whole", "see: trunk layer 0 k returned a Tensor (8, 2, 8) of int64; the contract expects a dense tensor"),
    ("SHOWS_scalar", "see: trunk layer 0 mixed returned a Tensor () of float32; the contract expects rows"),
    ("SHOWS_complex", "pick returned a Tensor (1,) of complex64; the contract expects a dense tensor of int32 or int"),
    ("SHOWS_none", "see: trunk layer 0 gated returned None"),
    ("SHOWS_turned", "as it showed before"),
    ("HOLDS_meta", "state: values of layer 1 returned a meta Tensor"),
    ("HOLDS_whole", "state: state of layer 0 returned a Tensor (4, 8, 16) of int64"),
    ("HOLDS_sparse", "state: keys of layer 1 returned a sparse Tensor"),
    ("HOLDS_flat", "state: conv of layer 0 returned a Tensor (288,) of float32; the contract expects 2 axes"),
    ("HOLDS_heads", "(7, 4, 16); expected (7, 2, 16)"),
    ("HOLDS_channels", "has (95, 3); expected ("),
    ("HOLDS_double", "is torch.float64; expected torch.float32"),
    ("HOLDS_complex", "state: conv of layer 0 returned a Tensor (96, 3) of complex64"),
])  # fmt: skip
def test_tensor_that_cannot_be_compared_is_a_finding(trace: Trace, name: str, says: str) -> None:
    found = replayed(trace, name).verdict
    assert found.exit is Exit.DIVERGED and says in found.findings[0].diagnosis, found.findings[0].diagnosis


def test_undeclared_narrow_place_is_granted_no_rounding(trace: Trace) -> None:
    """An engine without declarations computes in fp32: logits of 16 bits would hide their unrounded values."""
    first = replayed(trace, "SHOWS_bfloat16").verdict.findings[0]
    assert (first.check, first.place.component) == ("derived", "logits")
    assert first.diagnosis.startswith("is torch.bfloat16, torch.float32 is declared; relative error")


def test_region_that_disappears_is_a_finding(trace: Trace) -> None:
    """An engine that hides a pool for one event could write into it unseen."""
    found = replayed(trace, "HIDING", "declared_regions").verdict
    first = found.findings[0]
    assert found.exit is Exit.DIVERGED and (first.check, first.kind) == ("interface", "commit")
    assert first.diagnosis == "`regions` omits regions that it showed before: state (layer 0)"


@pytest.mark.parametrize(("name", "says"), [
    ("silent", "raised Silent (no message); the event is legal"),
    ("panicking", "raised Panic (no message); the event is legal"),
    ("panic", "`state` of the engine raised Panic (no message)"),
])  # fmt: skip
def test_exceptions_without_a_message_are_findings(trace: Trace, name: str, says: str) -> None:
    outcome = replayed(trace, f"ODD_{name}")
    first = outcome.verdict.findings[0]
    assert outcome.verdict.exit is Exit.DIVERGED and first.diagnosis.startswith(says)
    assert first.raised is not None and first.raised.function == "_throws.<locals>.method"
    assert "_throws" in divergence(outcome)


@pytest.mark.parametrize(("maker", "says"), [
    ("raises", "the engine, while it was built, raised AssertionError (no such card)"),
    ("none", "`make` returned None, which has no admit, draft,"),
    ("exits", "the engine, while it was built, raised SystemExit (0)"),
])  # fmt: skip
def test_a_maker_that_makes_nothing_is_a_finding_of_the_first_event(trace: Trace, maker: str, says: str) -> None:
    outcome = replayed(trace, f"MAKER_{maker}")
    first = outcome.verdict.findings[0]
    assert outcome.verdict.exit is Exit.DIVERGED and outcome.verdict.events == 0
    assert first.event == 0 and first.diagnosis.startswith(says)
    assert "--until 0" in divergence(outcome)


def test_a_maker_that_raises_is_a_finding_of_fuzz_too(trace: Trace, tmp_path: Path) -> None:
    directory = trace.path.parent / trace.header.checkpoint.near
    told = Settings(Setting("support.wrong.raising:MAKER_raises"), directory, 2, 0, tmp_path, shrink_s=2.0)
    found = campaign(told)
    assert found.exit is Exit.DIVERGED and found.found is not None
    assert "no such card" in found.found.verdict.findings[0].diagnosis


def test_an_exception_in_an_op_names_the_op_its_place_and_the_line(trace: Trace) -> None:
    first = replayed(trace, "IN_AN_OP").verdict.findings[0]
    assert first.diagnosis.startswith("op attend (trunk.1.attended) raised IndexError (index 99 is out of bounds")
    assert first.place == ("trunk", 1, "attended")
    assert first.raised is not None and first.raised.function == "_in_the_target"


def test_traceback_is_in_every_output(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = replayed(trace, "IN_AN_OP")
    told = divergence(outcome)
    line = 'given["query"][:, 99]'
    assert "support/wrong/raising.py line" in told and "in _in_the_target" in told and line in told
    assert "lockstep.py" not in told
    monkeypatch.setenv("INSTEP_TRACEBACK", "1")
    assert "run/build_compared_engines.py" in divergence(outcome) and line in divergence(outcome)
    outcome_data.of([outcome]).write(tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())["runs"][0]["findings"][0]["raised"]
    assert found["error"] == "IndexError" and found["line"] > 0 and line in found["traceback"]


def test_exception_outside_ops_is_placed_after_the_last_place(trace: Trace) -> None:
    outcome = Replay(trace, Setting("support.wrong.subjects:refusing")).run()
    first = outcome.verdict.findings[0]
    assert first.diagnosis == "raised IndexError (row 3 of 2); the event is legal and the reference served it"
    assert first.raised is not None and first.raised.file.endswith("support/wrong/subjects.py")


def test_lone_surrogate_in_an_exception_is_written_to_every_file(
    trace: Trace, instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone surrogate, as in a file's name that is no UTF-8: no output can hold it as it is."""
    monkeypatch.setattr(subjects, "SAID", "row \ud800 of 2")
    files = {name: tmp_path / f"found.{name}" for name in ("json", "sarif", "html")}
    ran = instep("replay", trace.path, "--ops", "support.wrong.subjects:refusing", "--annotate",
                 *(word for name, file in files.items() for word in (f"--{name}", file)))  # fmt: skip
    assert ran.code == 1, ran
    for name, file in files.items():
        assert r"row \\ud800 of 2" in file.read_text() or r"row \ud800 of 2" in file.read_text(), name


def test_a_maker_that_raises_is_no_failure_of_the_harness_in_relations(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["instep", "relations", str(trace.path), "--ops", "support.wrong.raising:MAKER_raises"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    told = capsys.readouterr().out
    assert "DIVERGED  the engine, while it was built, raised AssertionError (no such card)" in told
    assert "support/wrong/raising.py line" in told
