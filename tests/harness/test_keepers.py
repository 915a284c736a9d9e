"""Commit strategies of an op set: those of `docs/keepers.md`, the page's broken ones, and invalid ones.

Leaves out: built-in strategies (`tests/optimized/test_strategies.py`), and a strategy added to the product
(`test_new_strategy.py`).
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from instep import adapters
from instep.diagnose import locate
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier
from instep_reference.contract.errors import BadInput
from support.inputs.few_channels import few_channels
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, each_value, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # whole replays or commands

pytest_plugins = ["pytester"]
TOP = Path(__file__).resolve().parents[2]
PAGE = "".join((TOP / "docs" / f"keepers{name}.md").read_text() for name in ("", "-contract", "-fold"))
RAGGED = "ragged"  # the trace of the page
TEXTS = dict(zip(("mine", "folded"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))
OPTIONS = {
    "mine": {"ops": "mine:OPS", "strategy": "sglang", "conv": "sglang_conv"},
    "folded": {"ops": "folded:OPS", "strategy": "folded"},
}
# The breaks on the page: (old, new, message).
BROKEN = [
    tuple(re.findall(r"`([^`]+)`", line)) for line in PAGE.splitlines() if re.match(r"\| `.+` \| `.+` \| `event", line)
]
EXACT = (Tier.IDENTITY, Tier.BITWISE)  # for what an event may write
Write = Callable[..., dict[str, str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """`write("mine", (old, new))`: a file of the page, with that changed, where Python finds it -> its options."""

    def written(name: str, *edits: tuple[str, str]) -> dict[str, str]:
        text = TEXTS[name]
        for old, new in edits:
            assert text.count(old) == 1, (old, text.count(old))
            text = text.replace(old, new)
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return OPTIONS[name]

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield written
    for name in TEXTS:
        sys.modules.pop(name, None)


def typed(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


# The page


@pytest.mark.parametrize(("name", "op"), [("mine", "scatter"), ("folded", "fold")])
def test_the_files_of_the_page_agree_in_all_tiers_and_their_op_is_counted(
    name: str, op: str, write: Write, instep: Runner, tmp_path: Path
) -> None:
    words = typed(write(name))
    ran = instep("replay", few_channels(RAGGED, 2).path, *words, "--json", tmp_path / "found.json")
    (run,) = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert ran.code == 0 and {one["tier"] for one in run["tiers"]} == {tier.value for tier in Tier}, ran
    layers, commits = 1, 2
    assert run["calls"][op] == layers * commits * (2 if name == "mine" else 1), "of states and of conv windows"
    assert (run["strategy"], run["events"]) == (OPTIONS[name]["strategy"], run["of"])


@few(2)
@pytest.mark.parametrize(("old", "new", "says"), [edit[:3] for edit in BROKEN], ids=[edit[1][:40] for edit in BROKEN])
def test_every_break_on_the_page_is_found_where_it_says(
    old: str, new: str, says: str, write: Write, instep: Runner
) -> None:
    name = next(name for name, text in TEXTS.items() if old in text)
    words = (*typed(write(name, (old, new))), "--no-ladder", "--drafter", "external")
    ran = instep("replay", few_channels(RAGGED, 2).path, *words)
    more = next(edit[3:] for edit in BROKEN if edit[:2] == (old, new))
    assert ran.code == 1 and all(part in ran.out for part in (says, *more)), ran.out


def test_page_lists_five_breaks_with_their_messages(write: Write, instep: Runner) -> None:
    assert len(BROKEN) == 5 and all(len(edit) > 3 for edit in BROKEN)
    words = typed({**write("mine", BROKEN[0][:2]), "conv": "windows"})
    ran = instep("replay", few_channels(RAGGED, 2).path, *words)
    said = re.search(r"With `--conv windows`.*?`(holds [^`]+)`", PAGE, re.DOTALL)[1]
    assert said in ran.out and re.search(r"`(cause: event [^`]+)`", PAGE)[1] in ran.out, ran.out


# All of it, in an engine and in labels


@pytest.mark.parametrize(("name", "options"), [
    pytest.param("mine", {"graphs": True}, marks=WHOLE),
    pytest.param("mine", {"layout": "KV", "overlap": True}, marks=WHOLE),
    pytest.param("folded", {}, marks=WHOLE),
    ("folded", {"graphs": True, "layout": "KV", "overlap": True}),
], ids=str)  # fmt: skip
def test_it_agrees_through_preemption_abort_reload_and_step_counts(
    name: str, options: dict[str, Any], write: Write, trace: Trace
) -> None:
    agreed(Replay(trace, Setting(**write(name), **options, drafter="external")).run(), events=len(trace.events))


def test_any_op_set_serves_with_a_strategy_of_a_file_and_labels_show_its_address(write: Write, trace: Trace) -> None:
    named = {"ops": "ledger", "strategy": "mine:STATES", "conv": "mine:WINDOWS", "drafter": "external"}
    write("mine")
    assert Replay(trace, Setting(**named)).run().verdict.exit is Exit.AGREED
    write("mine", ("rows=accepted.rows", "rows=accepted.rows.flip(0)"))
    first = Replay(trace, Setting(**named)).run().verdict.findings[0]
    assert (first.kind, first.place.component, first.tier) == ("commit", "conv", Tier.IDENTITY)


# The op

OTHER = """

def late(*, steps, **given):
    scatter(steps=steps * 0, **given)


OPS = replace(OPS, own={"scatter": late})
"""


def test_an_op_of_a_strategy_is_swapped_and_named_as_the_cause(write: Write, instep: Runner) -> None:
    """The op set replaces the strategy's form of an op by a kernel, which is wrong."""
    last = TEXTS["mine"].splitlines()[-1]
    words = (few_channels(RAGGED, 2).path, *typed(write("mine", (last, last + OTHER))))
    ran = instep("replay", *words)
    said = re.search(r"``(cause: op `scatter` .+?)``", PAGE)[1]
    assert ran.code == 1 and said in ran.out and "--swap scatter=plain" in ran.out, ran.out
    assert instep("replay", *words, "--swap", "scatter=plain").code == 0
    assert "which has no such op" in complaint(instep("replay", *words, "--swap", "scatter=triton"))
    assert "'scatter'" not in complaint(instep("replay", *words, "--swap", "gather=plain"))


@pytest.mark.parametrize(("slots", "says"), [
    ("accepted.slots * 0", "slot 0, which is reserved"), ("accepted.slots + 99", "there are"),
    ("accepted.slots.int()", "not int64"),
])  # fmt: skip
def test_the_slots_of_an_op_are_looked_at(slots: str, says: str, write: Write) -> None:
    named = write("mine", ("slots=accepted.slots", f"slots={slots}"))
    found = Replay(few_channels(RAGGED, 2), Setting(**named)).run(until=5, tiers=EXACT).verdict.findings
    assert any("scatter" in one.diagnosis and says in one.diagnosis for one in found if one.check == "contracts"), found


# Names


@WHOLE
def test_every_command_knows_it_by_the_same_name(write: Write, instep: Runner, tmp_path: Path) -> None:
    named = write("mine")
    ran = instep("memory", "fixtures/tiny", "--ops", "mine:OPS", "--json", tmp_path / "m.json")
    pairs = {(one["strategy"], one["conv"]) for one in json.loads((tmp_path / "m.json").read_text())["strategies"]}
    assert ran.code == 0 and len(pairs) == 5 * 3 and ("sglang", "sglang_conv") in pairs
    alone = instep("memory", "fixtures/tiny", "--strategy", "mine:STATES", "--conv", "windows")
    assert alone.code == 0 and "mine:STATES  windows" in alone.out and "rerun" not in alone.out
    setting = Setting("mine:OPS")
    assert [setting.strategies(name)[-1] for name in ("strategy", "conv")] == ["sglang", "sglang_conv"], "fuzz draws"
    words, trace = typed(named), few_channels(RAGGED, 2).path
    model = ("--checkpoint", trace.parents[2] / "tiny")
    ran = instep("fuzz", *words, *model, "--examples", "1", "--seed", "1", "--out", tmp_path / "fuzz")
    assert ran.code == 0 and "mine:OPS agrees: " in ran.out, ran
    ran = instep("relations", trace, "strategies", *words, "--until", "5")
    assert ran.code == 0 and "sglang, sglang_conv" in ran.out, ran
    ran = instep("streams", trace, "--ops", "mine:OPS", "--level", "op", "--until", "5", "--conv", "sglang_conv")
    assert ran.code == 0 and ran.out.count("agrees:") == 5, "every strategy, its own too"


def test_the_plugin_knows_it(write: Write, pytester: pytest.Pytester) -> None:
    named = write("mine", BROKEN[0][:2])
    words = [f"--instep-{name}={value}" for name, value in named.items()]
    ran = pytester.runpytest_inprocess("-p", "no:benchmark", f"--instep-traces={few_channels(RAGGED, 2).path}", *words)
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["*holds the window after 4 tokens; 3 tokens were accepted*"])


def test_a_package_offers_one_under_a_name(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "theirs"

        def load(self) -> Any:
            import mine  # type: ignore[import-not-found]

            return mine.STATES

    write("mine")
    monkeypatch.setattr(adapters, "entry_points", lambda group: [Point()] if group == "instep.keepers" else [])
    assert Setting("plain", strategy="theirs").strategies("strategy")[-1] == "theirs"
    with pytest.raises(BadInput, match="theirs, which keeps state, expected a `StrategySpec` of the component conv"):
        Setting("plain", conv="theirs")


# Refusals and findings

REFUSED = [
    (('"sglang": STATES', '"rerun": STATES'), "found the name 'rerun', expected a name other than snapshot"),
    (('"sglang": STATES', '"sglang": States'), "found"),
    (("{\"scatter\": scatter})\nWINDOWS", "{\"gdn\": scatter})\nWINDOWS"), "an op 'gdn', as another one is called"),
    (("    def peek", "    def look"), "without peek, expected the methods bind, commit, peek, restore, claim"),
    (('table({"snapshot_state": "row"}, "state")', "None"), "may: found None"),
    (('{"snapshot_state": "row"}', '{"snapshot_state": "slot"}'), "snapshot_state by 'slot', expected row"),
    (('"row"}, "state")', '"row"}, "state") | {"draft": {"snapshot_state": "row"}}'),
     "draft: snapshot_state by row, expected batch rows in prefill, verify"),
    (('{"snapshot_state": "row"}', '{"snapshots": "row"}'), "the pool 'snapshots', expected a pool that it demands"),
    (('return {"verify": verify', 'return {"check": verify'), "may: found the action 'check'"),
    (("return units(cls", "return None, units(cls"), "expected a tuple of `Demand`"),
    (("return units(cls", 'return replace(units(cls.component, config, sizes), name="keys"), units(cls'),
     "pools: found two with the name 'keys'"),
    (("return units(cls", 'return replace(units(cls.component, config, sizes), name="a", by="head"), units(cls'),
     "units by slot, row, page or request"),
    (("config, sizes), snap", 'config, sizes), replace(units(cls.component, config, sizes), '
      'name="huge_" + cls.component, units=2**40), snap'),
     "the largest pool is huge_state, of "),
]  # fmt: skip


UNKNOWN = [
    ({"strategy": "none"},
     "found 'none' (no such name), expected snapshot, columns, rerun, lazy_rerun, sglang, or module"),
    ({"conv": "sglang"}, "--conv: found 'sglang' (no such name), expected windows, widened, sglang_conv, or module"),
    ({"strategy": "mine:NONE"}, "AttributeError"), ({"strategy": "nowhere:X"}, "ModuleNotFoundError"),
    ({"strategy": "mine:OPS"}, "mine:OPS, a Ops, expected a `StrategySpec`"),
    ({"strategy": "mine:WINDOWS"}, "which keeps conv, expected a `StrategySpec` of the component state"),
]


@pytest.mark.parametrize(("edits", "options", "says"), [
    *(((edit,), OPTIONS["mine"], says) for edit, says in REFUSED),
    *(((), {"ops": "mine:OPS", **options}, says) for options, says in UNKNOWN),
], ids=[says[:30] for _, says in (*REFUSED, *UNKNOWN)])  # fmt: skip
def test_invalid_strategy_is_refused_in_one_line(
    edits: tuple[tuple[str, str], ...], options: dict[str, str], says: str, write: Write, instep: Runner
) -> None:
    write("mine", *edits)
    assert says in complaint(instep("replay", few_channels(RAGGED, 2).path, *typed(options)))


FALLS = "raise ValueError('no')\n        "
FALLEN = {
    **{
        method: (before, FALLS + before) for method, before in (
            ("demands", "return units(cls"), ("make", "live, kept = memory"), ("bind", "return BoundStrategy"),
            ("commit", "for live, kept in self"), ("claim", "pass\n"), ("peek", "return {layer: taken"),
            ("restore", "for layer, (live, _) in self.layers.items() if length"),
        )
    },
    "bind_none": ("return BoundStrategy", "return None; BoundStrategy"),
    "peek_nothing": ("return {layer: taken", "return {}; {layer: taken"),
    "peek_flat": ("taken(live[slot], length)", "taken(live[slot], length).flatten()"),
    "may": ('    may = table({"snapshot_state": "row"}, "state")', "    may = property(lambda self: 1 / 0)"),
    "op": ("    busy = slots >= 0\n", "    raise ValueError('no')\n    busy = slots >= 0\n"),
}


@few(4)
@pytest.mark.parametrize(("method", "command"), each_value(FALLEN, (
    ("replay", "--no-ladder"), ("relations", "strategies", "unseen"), ("streams", "--level", "op"),
)), ids=lambda words: words if isinstance(words, str) else words[0])  # fmt: skip
def test_exception_in_a_keeper_is_its_finding_in_every_command(
    command: tuple[str, ...], method: str, write: Write, instep: Runner, trace: Trace
) -> None:
    name, *more = command
    ran = instep(name, trace.path, *more, *typed(write("mine", FALLEN[method])))
    assert ran.code == 1 and "DIVERGED" in ran.out and "harness itself" not in ran.err, ran


def test_a_peek_of_another_shape_names_its_layer(write: Write, trace: Trace) -> None:
    found = Replay(trace, Setting(**write("mine", FALLEN["peek_flat"]))).run(until=4).verdict.findings[0]
    assert re.search(r"peek gave \[\d+\] for layer 0; expected \[", found.diagnosis), found


# The rows that a verify may overwrite

ROLLED = 'table({"snapshot_conv": "row", "conv": "slot"}, "conv")'
BINDS = "        return BoundStrategy("
WIDER = {
    "a live window that the table does not name": ((ROLLED, 'table({"snapshot_conv": "row"}, "conv")'), "conv slot"),
    "the live window of another request": ((BINDS, f"        self.stray(batch)\n{BINDS}"), "conv slot"),
    "a row of nobody's": ((BINDS, f"        self.spill(batch)\n{BINDS}"), "snapshot_conv row"),
}
HELPERS = '''
    def stray(self, batch):
        """Of slots 1 and 3 the one that this verify does not name."""
        if self.component == "conv" and [group.kind for group in batch.groups] == ["verify"] and len(batch.slots) == 1:
            for live, _ in self.layers.values():
                live[4 - batch.slots] = 1

    def spill(self, batch):
        """The rows of the buffer behind those of the batch."""
        for _, kept in self.layers.values() if self.component == "conv" else ():
            kept[len(batch.slots):] = 1

    def claim'''


@few(2)
@pytest.mark.parametrize("what", WIDER)
def test_a_verify_that_writes_more_is_found_at_the_verify(what: str, write: Write, longer: Trace) -> None:
    edit, region = WIDER[what]
    replay = Replay(longer, Setting(**write("mine", edit, ("\n    def claim", HELPERS)), drafter="external"))
    first = replay.run(tiers=EXACT).verdict.findings[0]
    assert first.kind == "forward" and first.check in ("bytes", "tails") and region in first.diagnosis, first


def test_undeclared_pool_is_compared_whole_and_reported(write: Write, trace: Trace) -> None:
    plain = "snapshots(cls.component, config, sizes)"
    setting = Setting(**write("mine", (plain, f"replace({plain}, means=None)")), drafter="external")
    verdict = agreed(Replay(trace, setting).run(tiers=EXACT))
    assert any("snapshot_state" in one.reason and "as a whole" in one.reason for one in verdict.skipped)


def test_commit_may_clear_rows_that_its_table_names(write: Write, trace: Trace) -> None:
    kept, clears = "snapshots(cls.component, config, sizes)", "kept[accepted.rows] *= 0\n    def peek"
    edits = [(kept, f"replace({kept}, means=None)"), ("\n    def peek", f"            {clears}")]
    replayed = Replay(trace, Setting(**write("mine", *edits), drafter="external"))
    first = replayed.run(tiers=EXACT).verdict.findings[0]
    assert "snapshot_conv row 0, which this event may not write" in first.diagnosis
    table = '    return {"verify": verify, **{\n', "    rows = {f'snapshot_{component}': 'row', component: 'slot'}\n"
    told = write("mine", *edits, (table[0], table[1] + table[0]), ("    }}\n", '    }, "commit": rows}\n'))
    assert Replay(trace, Setting(**told, drafter="external")).run(tiers=EXACT).verdict.exit is Exit.AGREED


def test_message_names_the_op_that_wrote_the_pool(write: Write) -> None:
    replay = Replay(few_channels(RAGGED, 2), Setting(**write("mine", BROKEN[-2][:2])))
    located = locate(replay, replay.run())
    assert located.cause == "memory" and located.op == "scatter" and "(op scatter)" in located.says
