"""docs/reading-a-divergence.md matches the tool: its messages word for word, its table of checks, its constants.

Leaves out: the README's message (`tests/test_blocks.py`), and whether the checks are right.
"""

import json
import re
from pathlib import Path
from typing import cast

import pytest

from documentation.blocks import blocks_of
from instep import tier_allowances
from instep.campaign.streams.run_stamped_trace import Stream, streamed
from instep.checks import for_labels, for_numbers, of_ranks
from instep.diagnose import confirm_cause, diagnose
from instep.oracle.oracle import Oracle
from instep.oracle.recomputation import DRAWS, FEWEST_DRAWS
from instep.report import outcome_data
from instep.report.divergence_message import divergence
from instep.report.outcome_data import FINDINGS
from instep.run.replay import Outcome, RecordedChoices, Replay
from instep.run.run_variants import Variant, patch_of
from instep.setting import Setting
from instep.trace.file import Trace
from instep_proof.faults.catalogue import FAMILIES
from support.inputs.traces import committed

TOP = Path(__file__).resolve().parents[2]
READING, CHECKS = (TOP / "docs" / f"{name}.md" for name in ("reading-a-divergence", "checks"))
PAGE, DERIVED = READING.read_text(), CHECKS.read_text()
SHOWN = [block.text.rstrip("\n") for block in blocks_of(READING) if block.language == "text"]
MESSAGE, _, RESULT, _, STREAM = SHOWN  # in their order on the page
OPS, STRATEGY = "support.wrong.stream_ops:BEFORE", "snapshot"


ragged = committed("faults/ragged")


@pytest.fixture(scope="module")
def replay(ragged: Trace) -> Replay:
    return Replay(ragged, Setting(OPS, strategy=STRATEGY))


@pytest.fixture(scope="module")
def outcome(replay: Replay) -> Outcome:
    return diagnose(replay, ladder=True)


@pytest.mark.slow
def test_message_on_the_page_is_a_replays_output(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TOP)
    assert divergence(outcome) == MESSAGE
    assert f"instep replay fixtures/traces/faults/ragged.jsonl --ops {OPS} --strategy {STRATEGY}" in PAGE
    assert "(line 7 of the file" in PAGE
    seventh = outcome.trace.read_text().splitlines()[6]
    assert json.loads(seventh)["event"] == outcome.verdict.findings[0].kind


@pytest.mark.slow
def test_result_file_has_the_data_of_the_page(outcome: Outcome, tmp_path: Path) -> None:
    outcome_data.of([outcome]).write(tmp_path / "result.json")
    lines = iter((tmp_path / "result.json").read_text().splitlines())
    missing = [line for line in RESULT.splitlines() if line.strip() != "..." and line not in lines]
    assert not missing


@pytest.mark.slow
def test_manual_steps_of_the_page_give_its_results(replay: Replay, outcome: Outcome) -> None:
    assert outcome.located is not None and outcome.located.options == ("--swap move=plain",)
    patched = replay.run(until=6, judged_from=3, layers=[0], variant=Variant(patch=(patch_of("trunk.0.conv@5"),)))
    first, other = patched.verdict.findings[0], next(f for f in outcome.verdict.findings if f.place.layer == 1)
    diagnosis = "holds the state after 2 tokens; 3 tokens were accepted"
    assert (first.place.component, first.diagnosis) == ("state", diagnosis)
    assert other.diagnosis == outcome.verdict.findings[0].diagnosis
    for typed in ("--swap move=plain", "--graft trunk.0.conv@5 --layer 0", "--until 5 --layer 1"):
        assert f"\n{typed} " in PAGE


def test_streams_print_what_the_page_shows(ragged: Trace) -> None:
    assert STREAM in divergence(streamed(ragged, Setting(OPS, strategy=STRATEGY), "op"))


def test_the_table_names_every_check_in_order_with_its_tier() -> None:
    labels, numbers = for_labels(), for_numbers(cast(Oracle, None), uncalibrated="")
    ranks = (*of_ranks(2), *of_ranks(1, 2)[1:], *of_ranks(1, 1, 2)[1:])  # in runs of both kinds, before all others
    by_name = {check.name: check for check in (labels[0], labels[2], *numbers, *ranks)}
    labels, numbers = (*labels, *ranks), (*numbers, *ranks)
    told = [(name, tier, column) for name, tier, column, _, _ in table()]
    assert told == [
        (name, check.tier.value, on({c.name for c in labels}, {c.name for c in numbers}, name))
        for name, check in by_name.items()
    ]
    assert all(compares.strip() for _, _, _, compares, _ in table())
    assert all(f"`{name}`" in DERIVED for name in (RecordedChoices.name, Stream.name, "serves", "undecidable", "ties"))


def test_the_faults_of_a_check_are_those_that_it_is_meant_to_see() -> None:
    meant: dict[str, set[str]] = {}
    for fault in (fault for family in FAMILIES.values() for fault in family):
        for check in fault.seen_by:
            meant.setdefault(check, set()).add(fault.kind)
    for name, _, _, _, faults in table():
        kinds = set(re.findall(r"`([^`]+)`", faults))
        assert kinds <= meant.get(name, set()), f"{name}: {sorted(kinds - meant.get(name, set()))}"
        assert kinds or name not in meant, f"{name} is meant to see {sorted(meant[name])}; the page names none"


def test_the_numbers_are_the_constants() -> None:
    flowing = " ".join((PAGE + DERIVED).split())
    for told in (
        f"{FEWEST_DRAWS} to {DRAWS} times", f"{tier_allowances.YARDSTICK_FACTOR:g} times the largest draw's",
        f"{tier_allowances.ULPS:g} ulp of the stored dtype", f"per head and {tier_allowances.COLUMNS} columns of V",
        f"at most 1/{1 / tier_allowances.PROJECTION_ERROR:g}", f"{tier_allowances.MORE_DRAWS} of them before anything",
        f"drawn up to {tier_allowances.REDRAWS} times more", f"over {tier_allowances.TIES_CAP:.0%} of all choices",
        f"and over {tier_allowances.TIES_ALWAYS}, they are", f"up to {confirm_cause.BEYOND} events on",
        f"the first {FINDINGS} are written out", f"beyond {tier_allowances.CONSTANT_ULPS:g} ulp",
        f"beyond {tier_allowances.one_sided_limit(1):.1f} times the root",
        f"a probability of {tier_allowances.ONE_SIDED_RISK:g} per head",
    ):
        assert told in flowing
    limits = tier_allowances.PROJECTION_LIMIT, tier_allowances.UNDECIDED_CAP, tier_allowances.MARGIN_ERRORS
    assert limits == (0.5, 0.5, 2.0)
    assert {"contracts", "capacity", "hostreads"} <= set(confirm_cause.DIRECT)


def test_page_quotes_the_ladders_sentences() -> None:
    source = Path(confirm_cause.__file__).read_text()
    for words in (
        "cause: work that depends on time", "cause: the CUDA graph (run eagerly, ", "cause: the call itself",
        "(with the ", "this place", " places",
        "(with the reference's ", ", the rest of the event agrees", "the reads from memory", " writes wrong memory",
        "corrupts it again", "not confirmed: ",
    ):
        assert words in PAGE and words in source, words


def table() -> list[tuple[str, ...]]:
    """Name without its marks, tier, what it runs on, what it compares, faults."""
    text = DERIVED.partition("<!-- checks -->\n")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    return [(row[0].strip("`"), *row[1:]) for row in rows]


def on(labels: set[str], numbers: set[str], name: str) -> str:
    return "both" if name in labels & numbers else "labels" if name in labels else "numbers"
