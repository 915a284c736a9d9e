"""The page of a replay: its text, the escaping of texts from traces, its size and its charts.

Leaves out: the words, which are those of the terminal (`test_report.py`).
"""

import gzip
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.report.divergence_message import divergence
from instep.report.html import heat_map
from instep.report.html.heat_map import HEAD, TABLE, Row
from instep.report.html.replay import page_of, pooled
from instep.report.html.timeline import lanes_of
from instep.report.html.write_page import ASSETS
from instep.trace.file import read
from instep.verdict import Comparison, Skipped, Tier
from instep_proof.faults.catalogue import TRACES, by_id
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from support.inputs.outcomes import comparison, outcome
from support.running.browser import Browser
from support.running.command import Runner, complaint
from support.running.covering import WHOLE
from support.running.pages import HOSTILE, KINDS, PLAN, Read, round_of, trace_of

EXACT: Mapping[str, Any] = {"check": "bytes", "tier": Tier.BITWISE, "worst": 0.0, "allowed": 0.0}


def test_page_is_readable_without_javascript() -> None:
    found = comparison(
        event=5, worst=0.9996, request="a", slot=3, head=2, columns=(8, 15),
        diagnosis="holds the state after 2 tokens; 3 tokens were accepted",
    )
    told = outcome(comparison(event=2), comparison(event=3, **EXACT), found, plan=PLAN, of=7)
    page = page_of([told], trace_of(*round_of("a", "b"))).decode()
    read_page = Read(page)
    assert read_page.texts["pre"][0] == divergence(told) and read_page.texts["span"] == ["DIVERGED"]
    cells_of_tables = read_page.texts["td"]
    command = "instep replay fixtures/traces/adaptive.jsonl --ops plain --until 5 --layer 3"
    assert found.diagnosis in cells_of_tables and command in cells_of_tables
    assert [text for text in cells_of_tables if text in ("T1", "T2d", "exact")] == ["T1", "exact", "T2d"]
    assert not re.search(r"(src|href)=|@import|url\(", re.sub(r"(?s)<script.*?</script>", "", page)), "not one file"


def test_texts_of_traces_and_findings_are_escaped() -> None:
    found = comparison(event=4, worst=1.0, request=HOSTILE, slot=3, diagnosis=HOSTILE + "<!--\u2028&amp;")
    told = outcome(found, plan=PLAN, name=HOSTILE, trace=Path(HOSTILE.replace("/", "|")), of=6)
    told.verdict.add([Skipped("poison", 4, HOSTILE)])
    page = page_of([told], trace_of(*round_of(HOSTILE))).decode()
    harmless = outcome(comparison(event=4, worst=1.0), plan=PLAN, of=6)
    harmless.verdict.add([Skipped("poison", 4, "a reason")])
    plain = page_of([harmless], trace_of(*round_of("a"))).decode()
    hostile = Read(page)
    assert hostile.tags == Read(plain).tags and "img" not in hostile.tags and page.count("</script>") == 3
    assert hostile.data["requests"] == [HOSTILE] and hostile.data["runs"][0]["findings"][0]["says"] == found.diagnosis
    assert hostile.data["runs"][0]["notes"] == [[4, "poison", HOSTILE, ""]]
    assert "script-src 'sha256-" in page and "default-src 'none'" in page


def cells_by_place(compared: list[Comparison]) -> dict[tuple[int, str], list[list[Any]]]:
    """(event, label of the row) -> the lines of that cell, with the names of their checks."""
    rows = heat_map.rows_of(4, compared, ())
    made, at = heat_map.data(compared, rows, {"a": 0}), 0
    found = {}
    for step, lines in zip(made["at"], made["of"], strict=True):
        at += step
        told = [[made["checks"][line[0]][0], *line[1:]] for line in (made["lines"][number] for number in lines)]
        found[at // len(rows), rows[at % len(rows)].label(KINDS)] = told
    return found


def test_cell_has_a_line_per_check_with_its_tightest_comparison() -> None:
    tight = comparison(event=2, worst=0.4, request="a", slot=3)
    wrong = comparison(event=2, place=Place("chain.1", 0, "key"), worst=float("nan"))
    found = cells_by_place([comparison(event=2), tight, comparison(event=2, **EXACT), wrong, comparison(
        event=2, place=Place("trunk", STAGE_LEVEL, "length"), **EXACT,
    )])
    assert found == {
        (2, "slots, pages, lengths"): [["bytes", 1, 64]],
        (2, "layer 3 attention"): [["directed", 2, 128, 0, 0, 3, 0.4, 0.5, 1], ["bytes", 1, 64]],
        (2, "draft step 2"): [["directed", 1, 64, 1, -1, -1, "nan", 0.5, 0]],
    }


def test_rows_follow_the_data_flow() -> None:
    places = (
        ("chain.10", 0, "key"), ("chain.2", AFTER_LAYERS, "pick"), ("extend.1", 1, "key"),
        ("trunk", AFTER_LAYERS, "pick"),
    )
    compared = [comparison(place=Place(*place)) for place in places]
    rows = heat_map.rows_of(2, compared, [Row("extend", 0)])
    assert rows[:5] == [Row("trunk", level) for level in (TABLE, STAGE_LEVEL, 0, 1, HEAD)]
    assert [row.label(KINDS) for row in rows[4:]] == [
        "final rows, logits", "draft extend", "draft extend 1", "draft step 3", "draft step 11",
    ]


def test_computing_cell_without_comparison_is_not_judged() -> None:
    due = lanes_of(trace_of(*round_of("a")), ("gdn", "attention")).due
    assert {event: sorted({row.stage for row in rows}) for event, rows in due.items()} == {
        1: ["extend", "trunk"], 2: ["chain.1", "chain.2", "chain.3"], 3: ["trunk"], 4: ["extend", "trunk"],
    }
    assert Row("trunk", HEAD) in due[1] & due[3] and due[4] == {Row("extend", 0), Row("trunk", 0)}, "GDN alone"
    compared = [comparison(event=1, place=Place("trunk", 0, "state"))]
    rows = heat_map.rows_of(2, compared, {row for event in due.values() for row in event})
    missing = [divmod(at, len(rows)) for at in heat_map.not_judged(due, rows, compared, 2)]
    assert [(event, rows[row].label(("gdn", "attention"))) for event, row in missing] == [
        (1, "embedding"), (1, "layer 1 attention"), (1, "final rows, logits"), (1, "draft extend"),
    ], "event 2 was not served"


@pytest.mark.parametrize(("trace", "stages"), [
    ("grown", "chain.1 chain.2 extend trunk"), ("several", "extend trunk"), ("handed", "trunk"),
    ("branching", "chain.1 chain.2 chain.3 chain.4 extend trunk"),
])  # fmt: skip
def test_draft_has_a_cell_for_each_step_of_its_drafter(trace: str, stages: str) -> None:
    due = lanes_of(read(TRACES / f"{trace}.jsonl"), KINDS).due
    assert sorted({row.stage for rows in due.values() for row in rows}) == stages.split()


def test_large_tensor_is_reduced_to_largest_differences() -> None:
    right = torch.arange(100 * 200.0).view(100, 200)
    found = right.clone()
    found[99, 199] += 5
    found[50, 7] = float("nan")
    small, expected = pooled(found, right)
    assert small.shape == expected.shape == (34, 67) and not (small - expected)[:16].any()
    assert (small - expected)[-1, -1] == 5 and small[16, 2].isnan() and expected[16, 2] == right[50, 7]


def test_timeline_has_the_effect_of_every_event() -> None:
    lanes = lanes_of(read(TRACES / "branching.jsonl"), KINDS)
    assert list(lanes.requests) == ["a", "b", "c"] and lanes.steps == [[0, 3]]
    at = {(event, request): (what, number, of, tree) for event, request, what, number, of, tree in lanes.marks}
    assert at[3, 2] == ("prefill", 7, 27, -1) and at[5, 0][:3] == ("verify", 7, 7)
    what, accepted, of, tree = at[6, 0]
    assert (what, accepted, of, lanes.trees[tree]) == ("commit", 3, 6, [(-1, 0, 0, 1, 2, 1, 4), (2, 4, 6)])
    kept = lanes_of(read(TRACES / "kept.jsonl"), KINDS)
    whats = {mark[2] for mark in kept.marks}
    assert whats >= {"admit", "save", "load", "preempt", "resume"}
    assert -1 in {slot for _, slot, _, _ in kept.stays}


def test_charts_library_has_its_licences_and_build_steps() -> None:
    code = gzip.decompress((ASSETS / "echarts.js.gz").read_bytes()).decode()
    licences, made = ((ASSETS / f"echarts.{name}").read_text() for name in ("licenses.txt", "txt"))
    assert code.startswith("/*!\n" + licences) and "The Apache Software Foundation" in licences
    named = {(name.lower(), version) for name, version in re.findall(r"(?m)^(?:Apache )?(\w+) (\d[\d.]+)$", licences)}
    assert named == {(name, version) for name, version in re.findall(r"(\w+)@([\d.]+)", made) if name != "esbuild"}
    assert {name for name, _ in named} == {"echarts", "zrender", "tslib"}


@pytest.mark.parametrize(("words", "said"), [
    (("--html", "-", "--json", "-"), "another file"), (("--html", "."), "found a folder"),
    (("--trail", "t", "--html", "t"), "another file"), (("--html", "none/page.html"), "no such folder"),
    (("--html", TRACES / "ragged.jsonl"), "another file"),
])  # fmt: skip
def test_page_never_replaces_an_input(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in complaint(instep("replay", TRACES / "ragged.jsonl", *words)) and not list(tmp_path.iterdir())


@pytest.fixture
def shown(looked: Browser) -> Callable[..., dict[str, str]]:
    """`shown(page, fragment)` -> the data attributes of a page that a browser drew, and `dom`: its HTML."""

    def show(page: Path, fragment: str = "") -> dict[str, str]:
        drawn = looked.open(page, "document.documentElement.dataset.rendered", fragment=fragment)
        return {**drawn, "dom": looked.ask("document.documentElement.outerHTML")}

    return show


@pytest.mark.slow
def test_browser_draws_a_planted_fault_that_can_be_clicked(
    instep: Runner, plant: Callable[..., None], tmp_path: Path, shown: Callable[..., dict[str, str]], looked: Browser
) -> None:
    fault, file = by_id()["stale-tile"], tmp_path / "page.html"
    plant(*fault.edits)
    words = ("--ops", "plain", "--strategy", "snapshot", "--no-ladder", "--html", file)
    ran = instep("replay", TRACES / "ragged.jsonl", *words)
    assert ran.code == 1 and "DIVERGED" in ran.out
    data = Read(file.read_text()).data
    run, first = data["runs"][0], data["runs"][0]["findings"][0]
    assert not run["not_judged"] and first["event"] == 5
    difference = torch.tensor(first["maps"]["difference"]).abs()
    outside = difference.clone()
    outside[:, 8:16] = 0
    assert difference.max() > 1e3 * outside.max(), "8 columns are wrong, and no others"
    drawn = shown(file)
    assert drawn["rendered"] == "true" and "failed" not in drawn, drawn
    measured = [lines for lines in run["of"] if any(len(run["lines"][line]) > 3 for line in lines)]
    assert int(drawn["cells"]) == len(measured) > 15
    assert int(drawn["findings"]) == len({(found["event"], found["row"]) for found in run["findings"]})
    assert int(drawn["marks"]) == len([mark for mark in data["marks"] if mark[0] <= int(drawn["events"].split("-")[1])])
    assert drawn["selected"] == f"5 {run['rows'][first['row']]}" and drawn["dom"].count(first["says"]) > 3
    looked.click("commit", "#chart")
    told = looked.ask("document.querySelector('.marks').innerText")
    assert looked.data()["selected"].isdigit() and "commit, " in told
    looked.click("bad-fill", "#chart")
    assert looked.data()["selected"].startswith("5 "), "the event of the findings"
    clicked = shown(file, "event=4&row=layer+1+GDN&zoom=3-7")
    assert clicked["selected"] == "4 layer 1 GDN" and clicked["events"] == "3-7"
    assert re.search(r"<td>T2 derived</td>", clicked["dom"]) and "--until 4 --layer 1" in clicked["dom"]


@pytest.mark.slow
def test_browser_executes_no_text_of_a_trace(tmp_path: Path, shown: Callable[..., dict[str, str]]) -> None:
    hostile = HOSTILE.replace("alert(1)", "document.documentElement.dataset.ran=1")
    found = comparison(event=4, worst=1.0, request=hostile, slot=3, diagnosis=hostile)
    file = tmp_path / "page.html"
    file.write_bytes(page_of([outcome(found, plan=PLAN, of=6)], trace_of(*round_of(hostile))))
    drawn = shown(file)
    assert drawn["rendered"] == "true" and drawn["findings"] == "1"
    assert "ran" not in drawn and "<img" not in drawn["dom"]


@WHOLE
def test_page_of_a_long_trace_is_built_and_drawn_fast(tmp_path: Path, shown: Callable[..., dict[str, str]]) -> None:
    """2,000 events of 64 layers; all cells have different numbers."""
    events = round_of("a")
    trace = trace_of(*(event for _ in range(400) for event in events))
    config = SimpleNamespace(mixers=KINDS * 16)
    plan = SimpleNamespace(**vars(PLAN) | {"checkpoint": SimpleNamespace(**vars(PLAN.checkpoint) | {"config": config})})
    places = [Place("trunk", layer, "state") for layer in range(64)]
    compared = [
        Comparison("directed", Tier.DIRECTED, event, "commit", place, 64, (1 + event * 64 + place.layer) / 1e6, 0.5)
        for event in range(2000) for place in places
    ]
    told = outcome(*compared, plan=plan, of=2400)
    told.verdict.events = 2000
    begun = time.process_time()
    page = page_of([told], trace)
    assert time.process_time() - begun < 12 and len(page) < 6.4e6
    (tmp_path / "page.html").write_bytes(page)
    drawn = shown(tmp_path / "page.html")
    assert drawn["rendered"] == "true" and 4000 < int(drawn["cells"]) < 10_000, "neighbouring events share a cell"
