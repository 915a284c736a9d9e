"""No number in a table is cut or broken, whatever the width of the console; there is one way to make a table.

Leaves out: what the tables say.
"""

import ast
import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

import instep
from instep.cli import doctor, memory
from instep.report import outcome_data, terminal_tables
from instep.report.document import Listing
from instep.verdict import Tier
from instep_proof.calibrate.graded_errors import NUMBERS, Limit
from instep_proof.calibrate.tables import Calibration, Rate
from instep_proof.commands import calibrate
from support.inputs.outcomes import comparison, outcome, shown
from support.inputs.traces import policy, recorded
from support.running.command import Runner
from support.running.covering import each_value

WIDTHS = (120, 80, 60, 20)
NUMBER = re.compile(r"[-+±\d.,%e→]*\d[-+±\d.,%e→kMG]*")


def table(made: Listing) -> Table:
    return terminal_tables.table_of(made, made.heads)


def printed(made: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    terminal_tables.show(made, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def numbers(made: Table) -> set[str]:
    """Every number in a column that is right-justified, as it was put in."""
    cells = [str(cell) for column in made.columns if column.justify == "right" for cell in column.cells]
    return {found for cell in cells for found in NUMBER.findall(cell)}


def crowded() -> Table:
    made = terminal_tables.table("a title that is much longer than the table itself is wide, with 1,234 words", {
        "name": "word", "a text": "text", "elements": "number", "upper bound of the rate (95%)": "number",
    }, framed=True)  # fmt: skip
    made.add_row("a-long-name-that-is-typed-again", "some text that may be broken " * 3, "802,123,456", "1.5e-07")
    made.add_row("short", Text("DIVERGED", style="red"), Text("17% → 100%", style="red"), "1.037 (1.036-1.038)")
    return made


def rates() -> Table:
    some = Calibration("cpu", ran=[{}])
    for tier in Tier:
        by = "ledger, with a long form, states bfloat16"
        some.rates[tier.value, "float32"] = Rate(tier.value, "float32", 10**6, 123_456_789, 10**9, 0, 12_345, 0.97, by)
    return table(calibrate._rates(some))


def limits() -> Table:
    found = dict.fromkeys(NUMBERS, 1e-6)
    return table(calibrate._limits(Calibration("cpu", limits=[Limit("trunk.0.in", "float32", 1.2e-7, found, 3, {})])))


def needs() -> Table:
    from instep.campaign.shapes import sized_like
    from instep.subject.memory_per_request import needs
    from instep_optimized import Options

    every = list(needs(sized_like("qwen3.5-9b"), Options(), 8, 4096))
    return table(memory._table(every, "requests of 4096 tokens", 2**36))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("make", [crowded, rates, limits, needs])
def test_every_number_is_whole_on_one_line(make: Callable[..., Any], width: int) -> None:
    made = make()
    wanted, found = numbers(made), set(NUMBER.findall(printed(made, width)))
    assert wanted and wanted <= found, wanted - found
    assert "…" not in printed(make(), width)


def test_a_table_that_fits_is_no_wider_than_the_console() -> None:
    for width in (160, 100):
        assert max(map(len, printed(crowded(), width).splitlines())) <= width
    assert max(map(len, printed(needs(), 80).splitlines())) <= 80


def test_rows_of_runs_keep_their_lines_at_80_columns() -> None:
    lines = shown(outcome_data.of([outcome(comparison(), of=115)]), 80).splitlines()
    assert max(map(len, lines)) <= 80
    for cell in ("triton", "T2d", "42 of 115 events", "rerun, windows", "reference 1.0 s", "subject 0.5 s"):
        assert any(cell in line for line in lines), cell


def test_doctor_takes_two_lines_a_part_at_most_at_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    found = {**dict.fromkeys(doctor.NEEDED_FOR), "device": doctor.CPU, "kernels": "interpreted by Triton"}
    doctor._show(found, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    begins = [number for number, line in enumerate(lines) if line[1:2].strip()]
    assert len(begins) == len(found) + 2, "a heading, a rule, and a line that begins each part"
    assert all(after - before <= 2 for before, after in itertools.pairwise(begins)), lines


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("tables"), policy(deeds=(), rounds=2)).path


@pytest.mark.slow
@pytest.mark.parametrize(("words", "width"), each_value(
    [("replay", "--ops", "support.wrong.subjects:right"), ("relations", "unseen")], (80, 60),
))  # fmt: skip
def test_narrow_console_keeps_every_number(
    instep: Runner, trace: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], width: int
) -> None:
    def rows(columns: int) -> list[str]:
        monkeypatch.setattr("rich.console.Console.width", columns)
        out = instep(words[0], trace, *words[1:]).out
        times = re.sub(r"\d+\.\d s?", "", out)  # seconds differ from run to run
        return sorted(NUMBER.findall(times))

    assert rows(width) == rows(200)


@pytest.mark.slow
def test_tables_are_made_in_one_place() -> None:
    root = Path(instep.__file__).parent
    makers = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if "Table" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Table"
    }  # fmt: skip
    assert makers == {"report/terminal_tables.py"}
