"""Pages of audit, fuzz, faults, relations, bench and gate: their text, clicks in a browser, and pages of files.

Leaves out: the page of a replay (`test_page.py`), and the words of messages (`test_printed.py`).
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.audit import result as audits
from instep.audit.audit import audit
from instep.audit.recording import EVENTS
from instep.audit.result import charts_of as audited
from instep.campaign.fuzz import result_document as fuzz
from instep.campaign.fuzz.campaign import Result as Drawn
from instep.campaign.fuzz.campaign import Settings
from instep.campaign.relations import result as relations
from instep.report.html.replay import charts_of
from instep.report.html.write_page import page_of, page_of_file
from instep.report.result import Result
from instep.setting import Setting
from instep.verdict import Tier
from instep_optimized.ops.plain import PLAIN
from instep_proof.faults import result_data as faults
from instep_proof.faults.compare_with_control import Result as Campaign
from instep_reference.contract.errors import BadInput
from instep_reference.contract.place_names import Place
from instep_reference.contract.sampling import Sampling
from instep_speed.bench.interleaved_timing import Rates
from instep_speed.bench.run import Asked, Bench
from instep_speed.gate import result_data as gate
from instep_speed.gate.calibration_files import result as of_power
from instep_speed.gate.input_and_result import Judged as Clocked
from instep_speed.gate.input_and_result import Question, Report
from instep_speed.gate.power import Power
from instep_speed.gate.statistics import Ratio, Say, Spread
from support.inputs.outcomes import comparison, held, judged, outcome
from support.inputs.recordings import TINY, edited, lines, recorded
from support.running.browser import Browser
from support.running.command import Runner, complaint
from support.running.covering import WHOLE
from support.running.pages import HOSTILE, PLAN, Read, gate_report, relation_run, round_of, trace_of

pytestmark = pytest.mark.slow  # results of every command as pages

TRACE = Path("fixtures/traces/adaptive.jsonl")
ALONE = "\ud800"  # a lone surrogate, which has no UTF-8
Made = Mapping[str, tuple[Result, Mapping[str, Any]]]


def of_relations() -> Result:
    wrong = comparison(worst=1.0, request=HOSTILE, slot=5, diagnosis=f"the runs differ {HOSTILE}{ALONE}")
    exact = comparison(tier=Tier.BITWISE, worst=0.0, allowed=0.0, place=Place("chain.1", 0, "key"))
    each = held("slots", exact, wrong), held("alone", comparison()), held("drift", lacks="labels have no error")
    return relations.of(relation_run(*each))


def of_faults() -> Result:
    every = (
        judged("commit-index-minus-one"), judged("row-for-slot", f"differs {HOSTILE}{ALONE}"),
        replace(judged("row-for-slot", layer=3)), judged("dirty-slot", void="it never fired"),
    )
    return faults.of(Campaign(every))


def of_bench() -> Result:
    asked = Asked({"plain": PLAIN}, "cpu", torch.float32, ("pick",))
    time = {"us": 20.0, "lower": 19.0, "upper": 21.0, "mean": 20.5, "of_floor": 2.0, "how": "calls"}
    right, wrong = {"peer": "", "finding": "", **time}, {"peer": "", "finding": f"row 3 is off {HOSTILE}{ALONE}"}
    peer = {**right, "peer": "torch 2", "finding": "picks the last of equals", "us": 5.0}
    rows = [
        {"kind": "pick", "cell": {"rows": rows}, "floor_us": 10.0, "arms": arms, "absent": {"fla": "not here"}}
        for rows, arms in ((4, {"plain": wrong, "torch": peer}), (1, {"plain": right, "torch": peer}))
    ]
    work = {"work": {"products": 12.0, "norms": 8.0}, "launches": 3, "gap_us": 1.0}
    work = {name: value for name, value in right.items() if name != "of_floor"} | work
    rows.append({"kind": "rounds", "cell": {"batch": 1}, "floor_us": None, "arms": {"plain": work}, "absent": {}})
    return Bench(asked, Rates(1e10, 2e10, 1e11), rows, wanted=[("rounds", {})]).result()


def of_gate(*says: tuple[str, str, Say]) -> Result:
    question, refused = Question("plain", f"mine:{HOSTILE}{ALONE}", Path("model")), f"after: {HOSTILE}{ALONE}"
    return gate.of(gate_report(question, *says, refused="" if says else refused, pairs=((1.0, 1.25, 0.5),)))


def power() -> Power:
    says = {"A/A": {"verify": Counter(held=198, slower=2)}, "slowed": {"verify": Counter(slower=190, held=10)}}
    return Power(Report(Question("plain", "plain", Path("model"), ("verify",))), 12_345, 200, says,
                 {"verify": {"wall": 1.081}})  # fmt: skip


def of_fuzz() -> tuple[Result, Mapping[str, Any]]:
    found = outcome(comparison(event=3, worst=1.0, request=HOSTILE, diagnosis=f"{HOSTILE}{ALONE}"), plan=PLAN, of=6)
    found.verdict.events = 4
    drawn = Drawn(Settings(Setting("plain"), Path("tiny"), 400, 7, Path("found")), examples=37, events=1234,
                  elements=5_000_000, seconds=2.5, found=found, cut="its time was over")  # fmt: skip
    drawn.coverage.met.update({"accepted: ragged": 12})
    agreed = replace(drawn, settings=replace(drawn.settings, setting=Setting("ledger")), found=None, cut="")
    return fuzz.of([agreed, drawn]), charts_of([found], trace_of(*round_of(HOSTILE)))


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Mapping[str, Any]]:
    """The audit of sampled text in which one commit has a wrong bonus token."""
    made = recorded(tmp_path_factory.mktemp("recordings") / "drawn", tokens=10, sampling=Sampling(0.9, top_k=20))
    number, event = next((n, event) for n, event in enumerate(lines(made / EVENTS)) if event.get("accepted"))
    path = event["accepted"][0]
    edited(made, number, accepted=[path | {"bonus": (path["bonus"] + 1) % 256}, *event["accepted"][1:]])
    found = audit(made, TINY, level=1)
    return audits.of(found), audited(found)


@pytest.fixture(scope="module")
def made(spoilt: tuple[Result, Mapping[str, Any]]) -> Made:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "known", lambda *asked: power().data() | {"date": "2026-11-22T00:00:00"})
        slower = of_gate(("verify", "wall", Say.SLOWER), ("verify", "cpu", Say.HELD), ("commit", "wall", Say.NOISY))
        refused = of_gate()
    return {
        "relations": (of_relations(), {}), "faults": (of_faults(), {}), "bench": (of_bench(), {}),
        "gate": (slower, {}), "refused": (refused, {}), "power": (of_power(power()), {}), "fuzz": of_fuzz(),
        "audit": spoilt,
    }


TOLD = {  # text without JavaScript: the verdict, a sentence of the head or a message, cells and notes
    "relations": ("DIVERGED", "1 of 3 relations hold", (
        "slots", "1.0, allowed 0.5", "drift does not apply: labels have no error")),
    "faults": ("FAILED", "3 of 3 faults found, 2 located", ("rollback", "slots", "void: it never fired", "NO")),
    "bench": ("WRONG", "on cpu: 3 cells, 1 wrong answers of ours", (
        f"WRONG: row 3 is off {HOSTILE}\\ud800", "0 of 2", "picks the last of equals", "2.00",
        "pick, rows 4: no fla: not here (and 1 cells more)")),
    "gate": ("SLOWER", "verify: SLOWER by 20.0%, at least 10.0% (wall)", ("12.5 ±0.5", "inconclusive")),
    "refused": ("REFUSED", f"REFUSED  after: {HOSTILE}", ()),
    "power": ("fit for this machine", "verify: false alarms 1.0%, at most 3.1%", ("A/A", "198", "8.1% (wall)")),
    "fuzz": ("DIVERGED", "--seed 7 draws the same runs", ("1,234", "never", "fuzz-plain-7.jsonl, 6 events")),
    "audit": ("DIVERGED", "tokens of 3 requests judged", ("sampled tokens",)),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_pages_are_readable_without_javascript(made: Made, name: str) -> None:
    result, charts = made[name]
    page = page_of(result.data(), charts).decode()
    found, (verdict, said, cells) = Read(page), TOLD[name]
    assert found.texts["span"] == [verdict] and any(said in text for text in found.texts["p"] + found.texts["pre"])
    told = ["".join(cell) for cell in found.cells] + found.texts["p"]
    assert not [cell for cell in cells if cell not in told], told[:40]
    assert result.data()["command"] in found.texts["pre"] and any("torch 2." in text for text in found.texts["p"])
    if name == "gate":
        assert [row["dots"] for row in found.data["plots"][0]["rows"]] == [[1.25], [0.5]] * 3, "a pair is a dot"
    assert page.count("</script>") == 3 and "img" not in found.tags and "script-src 'sha256-" in page
    assert ALONE not in page and page.encode(), "the half of a pair is written as its number"


def test_unjudged_arm_is_inconclusive_and_not_refused() -> None:
    told = gate.of(Report(Question("plain", "plain", Path("m"), ("verify",)), "before cannot be judged", unjudged=True))
    found = Read(page_of(told.data()).decode())
    assert found.texts["span"] == ["INCONCLUSIVE"]
    assert any("INCONCLUSIVE  before" in text for text in found.texts["pre"])


def test_nan_and_infinity_are_shown() -> None:
    """A ratio without samples, a time of zero, an infinite part of an allowance."""
    nothing = Ratio(math.nan, math.nan, math.inf, 0)
    clocked = [Clocked("verify", clock, Spread(0.0, 0.0, math.nan), Spread(0.0, 0.0, 0.0), nothing, nothing, Say.NOISY)
               for clock in ("wall", "cpu")]  # fmt: skip
    question = Question("plain", "plain", Path("m"), ("verify",))
    told = gate.of(Report(question, "", clocked, acceptance={"before": math.nan}))
    page = Read(page_of(told.data()).decode())
    assert "nan (nan-inf)" in ["".join(cell) for cell in page.cells]
    assert page.data["plots"][0]["rows"][0]["low"] == "nan"
    each = held("slots", comparison(worst=math.nan), comparison(tier=Tier.BITWISE, allowed=0.0))
    wrong = relations.of(relation_run(each))
    assert Read(page_of(wrong.data()).decode()).data["plots"][0]["cells"][0][2] == "found"


@pytest.mark.parametrize("name", ["relations", "faults", "bench", "power", "audit"])
def test_result_file_gives_the_same_page(made: Made, instep: Runner, tmp_path: Path, name: str) -> None:
    data = json.loads(json.dumps(made[name][0].data()))
    file = tmp_path / "r.json"
    file.write_text(json.dumps(data))
    ran = instep("page", file, "--html", tmp_path / "p.html")
    assert ran.code == 0, ran
    assert (tmp_path / "p.html").read_bytes() == page_of(data)


def test_every_committed_result_has_a_page_or_is_refused() -> None:
    without = set()
    for file in sorted(Path("fixtures/results").glob("*.json")):
        try:
            assert b"<h2>" in page_of_file(file), file
        except BadInput as refused:
            assert "no page can be made" not in str(refused), refused
            without.add(file.stem)
    own = {"calibration", "combinations", "controllers", "harness-mutants", "live",
           "live-cost", "memory-9b", "one-sided", "parity", "peers", "peers-native", "settings-cpu",
           "soak"}  # fmt: skip
    assert without <= own


# A number beyond the range of floats.
BEYOND = {"schema": 2, "exit": 0, "runs": [{"findings": [], "name": "t", "ops": "plain", "elements": 10**400}]}


def test_style_of_pages_breaks_long_words_and_scrolls_tables_alone(made: Made) -> None:
    style, wraps = Path("harness/instep/report/html/assets/page.css").read_text(), r" \{[^}]*overflow-wrap: anywhere"
    for rule in (rf"h1, h2, h3, p, summary, footer{wraps}", rf"pre{wraps}", r"\.wide \{ overflow-x: auto",
                 r"max-width: 600px\) \{[^@]*\.bar span \{ white-space: normal"):  # fmt: skip
        assert re.search(rule, style), rule
    for result, charts in made.values():
        page = page_of(result.data(), charts).decode()
        assert page.count("<table>") == page.count('<div class="wide"><table>')


def test_damaged_and_unknown_results_are_refused(made: Made, instep: Runner, tmp_path: Path) -> None:
    for number, (content, said) in enumerate((
        ({"schema": 2, "command": "instep memory m"}, "what `instep memory m` wrote"),
        ({"schema": 2, "exit": 0, "fired": 1}, "KeyError"), (BEYOND, "a damaged result"),
        ({"schema": 2, "runs": [7]}, "wrote"),
        ({"schema": 2, "exit": 0, "runs": [{"findings": 1}]}, "a damaged result"), ({"exit": 0}, "schema None"),
    )):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(content))
        assert said in complaint(instep("page", file, "--html", tmp_path / "p.html"))
    file.write_text(json.dumps({**of_bench().data(), "machine": None}))
    assert "another file" in complaint(instep("page", file, "--html", file)) and not (tmp_path / "p.html").exists()


@pytest.mark.parametrize(("work", "words"), [
    ("instep.audit.audit.audit", ("audit", "nowhere", "--model", "nowhere")),
    ("instep.campaign.relations.hold", ("relations", TRACE)),
    ("instep.campaign.soak.soak.campaign", ("fuzz",)),
    ("instep_proof.faults.campaign.campaign", ("faults", "stale-tile")),
    ("instep_speed.bench.run.bench", ("bench", "--kind", "pick")),
    ("instep_speed.gate.gate.gate", ("gate", "plain", "plain")),
], ids=lambda words: words[0])  # fmt: skip
def test_unwritable_page_is_refused_before_any_work(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, words: tuple[object, ...]
) -> None:
    monkeypatch.setattr(work, lambda *given, **named: pytest.fail("it began"))
    assert "found a folder" in complaint(instep(*words, "--html", tmp_path))
    assert "no such folder" in complaint(instep(*words, "--html", tmp_path / "none" / "page.html"))


def test_faults_write_the_page_of_their_result(instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [judged("stale-tile")]
    monkeypatch.setattr("instep_proof.faults.campaign.campaign", lambda *given, **named: found)
    monkeypatch.setattr("instep_proof.faults.plant.warm", nullcontext)  # nothing runs, so nothing is prepared
    ran = instep("faults", "stale-tile", "--html", tmp_path / "p.html")
    page = Read((tmp_path / "p.html").read_text())
    assert ran.code == 0 and page.texts["span"] == ["all found"] and "instep faults stale-tile" in page.texts["pre"]
    assert any("1 of 1 faults found" in text and text in ran.out for text in page.texts["p"]), "as the terminal says"


# in a browser


Opened = Callable[..., dict[str, str]]


@pytest.fixture
def opened(made: Made, looked: Browser, tmp_path: Path) -> Opened:
    """`opened("faults")` -> data attributes of the page, once all plots are drawn."""

    def show(name: str, **how: Any) -> dict[str, str]:
        result, charts = made[name]
        page = page_of(result.data(), charts)
        (tmp_path / f"{name}.html").write_bytes(page)
        drawn = Read(page.decode()).data
        plots, root = drawn.get("plots") or (), "document.documentElement.dataset"
        count = sum(how.get("fragment", "") in ("", f"group={plot.get('group')}") for plot in plots)
        until = [f'{root}.plots === "{count}"'] * bool(plots) + [f"{root}.rendered"] * ("runs" in drawn)
        said = looked.open(tmp_path / f"{name}.html", " && ".join(until), **how)
        assert "failed" not in said and "ran" not in said, said
        return said

    return show


@pytest.mark.parametrize("name", sorted(TOLD.keys() - {"refused"}))
def test_no_page_scrolls_sideways_on_a_phone(opened: Opened, looked: Browser, name: str) -> None:
    with looked.width(400):
        opened(name)
        assert looked.ask("document.documentElement.scrollWidth") <= 400
        if name == "faults":  # its cells are large enough for a finger
            looked.click("good", "#plots")
            assert looked.data()["told"].startswith("commit-index-minus-one, ")


def panel(looked: Browser) -> str:
    return str(looked.ask("document.getElementById('detail').innerText"))


def test_click_on_a_relation_shows_where_its_runs_differ(opened: Opened, looked: Browser) -> None:
    opened("relations")
    assert looked.seen("bad-fill", "#plots") > 100 < looked.seen("exact", "#plots")
    looked.click("bad-fill", "#plots")
    assert looked.data()["told"] == "slots, layer 3 attention"
    assert "DIVERGED  adaptive" in panel(looked) and "1 findings" in panel(looked) and HOSTILE in panel(looked)
    assert looked.ask("document.images.length") == 0


def test_faults_are_grouped_by_family_and_can_be_clicked(opened: Opened, looked: Browser) -> None:
    opened("faults")
    rows = "[...document.querySelectorAll('tr[data-group]')].filter((row) => row.offsetParent).length"
    assert looked.ask(rows) == 4 and looked.ask("document.querySelectorAll('#cards .card').length") == 2
    spot = looked.ask("(() => { const {x, y, width, height} = document.querySelector('[data-group=rollback]')"
                      ".getBoundingClientRect(); return [x + width / 2, y + height / 2]; })()")  # fmt: skip
    looked.press(*spot)
    assert looked.data()["group"] == "rollback" and looked.ask(rows) == 1
    assert looked.ask("location.hash") == "#group=rollback"
    looked.click("good", "#plots")
    assert looked.data()["told"].startswith("commit-index-minus-one, ") and "Nothing is wrong." in panel(looked)
    opened("faults", fragment="group=slots")
    assert looked.ask(rows) == 3 and looked.seen("bad", "#plots") and looked.seen("unsure", "#plots")


def test_wrong_answer_shows_its_finding_instead_of_a_time(opened: Opened, looked: Browser) -> None:
    opened("bench")
    assert looked.seen("line-0", ".curves") > 50 and looked.seen("line-1", ".bars") > 500
    looked.click("bad-fill", ".curves")
    assert looked.data()["told"] == "plain, pick, rows 4" and "no speed is shown" in panel(looked)
    assert f"WRONG: row 3 is off {HOSTILE}" in panel(looked)
    legend = looked.ask("document.querySelector('.curves').innerText")
    assert {"floor", "plain", "torch"} <= set(legend.split())
    looked.click("line-1", ".bars")
    assert looked.data()["told"] == "plain: norms" and "3 launches" in panel(looked)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_intervals_are_drawn_over_the_allowed_band(opened: Opened, looked: Browser, dark: bool) -> None:
    opened("gate", dark=dark)
    assert looked.seen("stay", ".intervals") > 1000, "the band"
    assert min(looked.seen(color, ".intervals") for color in ("bad", "good", "unsure", "hatch")) > 50
    looked.click("bad", ".intervals")
    assert looked.data()["told"] == "verify, wall" and "1.200 (1.100-1.300): slower" in panel(looked)
    looked.click("line-3", ".bars")
    assert looked.data()["told"] == "verify, slowed: slower" and "190 trials" in panel(looked)
    looked.scheme(dark=not dark)
    looked.until(looked.counting("stay", ".intervals") + " > 1000")  # wait until it is redrawn
    looked.scheme(dark=dark)
    ground = looked.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


@WHOLE
def test_findings_of_fuzz_and_audit_are_drawn_at_their_events(opened: Opened, looked: Browser) -> None:
    said = opened("fuzz")
    assert said["findings"] == "1" and said["selected"] == "3 layer 3 attention" and int(said["marks"]) == 6
    assert said["wrong"] == "1" and looked.seen("bad", "#charts") > 50, "the mark of the wrong request"
    assert looked.seen("bad-fill", "#charts") > 100 < looked.seen("verify", "#charts")
    said = opened("audit")
    assert int(said["findings"]) >= 1 and "final rows, logits" in said["selected"] and int(said["marks"]) > 30
    assert looked.seen("draft", "#plots") > 1000, "tokens that were drawn"
    looked.click("bad-fill", "#plots")
    assert ", token " in looked.data()["told"] and "the model's logits draw" in panel(looked)
