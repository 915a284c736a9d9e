"""Resumed results of `instep bench`: a full grid continues its file, and several calls become one file.

A file with anything wrong in it is refused by file and field, or serves whole. Leaves out: answers and times
(`test_bench.py`).
"""

import json
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instep.campaign.runner import TrialRunner
from instep.report.svg import picture
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.errors import BadInput
from instep_speed.bench.interleaved_timing import Rates
from instep_speed.bench.kinds import pick
from instep_speed.bench.result_document import pictures
from instep_speed.bench.resume import going_on, joined
from instep_speed.bench.run import Asked, Bench, bench
from support.inputs.bench_runs import FP32, text
from support.inputs.outcomes import shown
from support.running.command import Runner, complaint
from support.running.covering import few

PICK = Asked({"it": PLAIN}, "cpu", FP32, ("pick",), "tiny", peers=False)


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cells that were built; the full grid is small."""
    cells, real = list[Any](), pick.KIND.make
    monkeypatch.setitem(pick.ROWS, "full", (1, 2, 3))

    def make(ground: Any, at: Any) -> Any:
        if len(cells) == 2 and at["rows"] == 3 and sys.modules.get("interrupted") is not None:
            raise KeyboardInterrupt
        cells.append(at["rows"])
        return real(ground, at)

    monkeypatch.setattr(pick, "KIND", replace(pick.KIND, make=make))
    return cells


def full(file: Path, **more: Any) -> Bench:
    asked: dict[str, Any] = {"sets": {"it": PLAIN}, "commit": "a1", "peers": False} | more
    asked |= {"device": "cpu", "dtype": FP32, "kinds": ("pick",), "size": "full"}
    now = Asked(**asked)
    found = going_on(file, now) if file.exists() else Bench(now)
    with TrialRunner(None, keep=lambda: found.result().write(file)) as run:
        bench(now, run, found)
    return found


def test_full_grid_continues_from_its_file(made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "full.json"
    with monkeypatch.context() as interrupted:
        interrupted.setitem(sys.modules, "interrupted", ModuleType("interrupted"))
        assert full(file).left == {"pick": 1}
    first = json.loads(file.read_text())["rows"]
    assert made == [1, 2] and [row["cell"]["rows"] for row in first] == [1, 2]
    assert [row["cell"]["rows"] for row in full(file).rows] == [1, 2, 3] and made == [1, 2, 3]
    assert json.loads(file.read_text())["rows"][:2] == first
    full(file)
    assert made == [1, 2, 3], "a cell was computed twice"


def test_full_grid_still_lacks_the_cells_of_other_kinds(made: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "full.json"
    full(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"left_out": {"pick": 1, "decode": 2}}))
    assert full(file).left == {"decode": 80} and made == [1, 2, 3]
    with pytest.raises(BadInput, match="begun with --at all cells"):
        full(file, at={"rows": ("1",)})


def test_a_full_grid_needs_a_file_that_keeps_it(instep: Runner) -> None:
    for words in ((), ("--json", "-"), ("--json", "/dev/null")):
        assert "full without a file" in complaint(instep("bench", "--device", "cpu", "--grid", "full", *words))


def test_interrupted_call_keeps_its_cells_and_counts_the_rest(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instep: Runner
) -> None:
    monkeypatch.setitem(pick.ROWS, "tiny", (1, 2, 3))
    monkeypatch.setitem(sys.modules, "interrupted", ModuleType("interrupted"))
    file = tmp_path / "stopped.json"
    file.write_text("what stood there before")
    ran = instep("bench", "--device", "cpu", "--kind", "pick", "--json", file)
    found = json.loads(file.read_text())
    assert "pick: 1 cells left out, since the call was interrupted" in ran.out
    assert made == [1, 2] and [row["cell"]["rows"] for row in found["rows"]] == [1, 2]
    assert found["left_out"] == {"pick": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("more", "says"), [
    ({"sets": {"other": PLAIN}}, "op sets"), ({"commit": "b2"}, "commit b2"), ({}, "machine device_name"),
])  # fmt: skip
def test_different_setting_is_not_resumed(more: dict[str, Any], says: str, made: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "full.json"
    full(file)
    data = json.loads(file.read_text())
    if not more:
        data["machine"]["device_name"] = "another"
    file.write_text(json.dumps(data))
    with pytest.raises(BadInput, match=says.replace("commit b2", "commit")):
        full(file, **more)
    for content, found in (
        ("[]", "schema None"), ('{"schema": 99}', "a newer instep"), ('{"schema": 2}', "a result of"),
    ):  # fmt: skip
        file.write_text(content)
        with pytest.raises(BadInput, match=found):
            full(file)


@pytest.mark.slow
def test_results_of_several_calls_are_one_in_which_rows_keep_their_date(tmp_path: Path, instep: Runner) -> None:
    def called(name: str, *kinds: str, **named: str) -> dict[str, Any]:
        words = [word for option, value in named.items() for word in (f"--{option}", value)]
        asked = [word for one in kinds for word in ("--kind", one)]
        ran = instep("bench", "--device", "cpu", *asked, "--json", tmp_path / name, "--commit", name, *words)
        assert ran.code == 0, ran.err
        found: dict[str, Any] = json.loads((tmp_path / name).read_text())
        return found

    one, other = called("one", "pick", "conv"), called("other", "pick")
    other["date"] = other["sessions"][0]["date"] = "2999-01-01T00:00:00+00:00"
    other["machine"]["load"], other["left_out"] = "9", {"decode": 3}
    (tmp_path / "other").write_text(json.dumps(other))
    ran = instep("bench", "--json", tmp_path / "one", "--join", tmp_path / "other", "--commit", "joined")
    found = json.loads((tmp_path / "one").read_text())
    assert ran.code == 0 and found["commit"] == "joined" and "decode: 2 cells left out" in ran.out
    of = {name: [row for row in found["rows"] if row["kind"] == name] for name in ("pick", "conv")}
    assert [row["arms"] for row in of["pick"]] == [row["arms"] for row in other["rows"]], "the latest"
    assert [row["arms"] for row in of["conv"]] == [row["arms"] for row in one["rows"] if row["kind"] == "conv"]
    commits = {name: {found["sessions"][row["session"]]["commit"] for row in rows} for name, rows in of.items()}
    assert commits == {"pick": {"other"}, "conv": {"one"}} and found["setting"] == one["setting"]
    assert found["sessions"][0]["rates"] and len(found["rows"]) == len(one["rows"])
    for change, says in (({"dtype": "bfloat16"}, "begun with dtype bfloat16"), ({"ops": ["a"]}, "begun with op sets")):
        (tmp_path / "odd").write_text(json.dumps(other | {"setting": other["setting"] | change}))
        refused = instep("bench", "--json", tmp_path / "one", "--join", tmp_path / "odd")
        assert says in complaint(refused) and json.loads((tmp_path / "one").read_text()) == found
    for number in ({}, {"session": 9}):
        rows = [{"kind": row["kind"], "cell": row["cell"]} | number for row in other["rows"]]
        (tmp_path / "odd").write_text(json.dumps(other | {"rows": rows}))
        assert "rows[0]" in complaint(instep("bench", "--json", tmp_path / "one", "--join", tmp_path / "odd"))
    assert "no file" in complaint(instep("bench", "--json", tmp_path / "one", "--join", tmp_path / "none"))
    assert "--json" in complaint(instep("bench", "--join", tmp_path / "one"))
    for more in (("--kind", "pick"), ("--ops", "plain")):
        refused = instep("bench", "--json", tmp_path / "one", "--join", tmp_path / "other", *more)
        assert "to join measures nothing" in complaint(refused)


def test_existing_file_is_plotted_without_measuring_or_writing(
    tmp_path: Path, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kept.json"
    bench(Asked({"it": PLAIN}, "cpu", FP32, ("pick",), "tiny", peers=False)).result().write(file)
    before = file.read_text()
    monkeypatch.setattr("instep_speed.bench.run.rates", None)  # measuring raises
    done = instep("bench", "--join", file, "--plots", tmp_path / "p", "--html", tmp_path / "page.html")
    assert done.code == 0 and "pick: " in done.out, done.err
    assert [one.name for one in (tmp_path / "p").iterdir()] == ["pick.svg"]
    assert '"title":"pick"' in (tmp_path / "page.html").read_text() and file.read_text() == before
    refused = instep("bench", "--json", file, "--join", file, "--plots", tmp_path / "p")
    assert "another file" in complaint(refused)
    assert "--plots or --html" in complaint(instep("bench", "--join", file))
    for more in (("--minutes", "6"), ("--peers",), ("--at", "rows=1")):
        refused = instep("bench", "--join", file, "--html", tmp_path / "page.html", *more)
        assert "to join measures nothing" in complaint(refused)


@pytest.mark.usefixtures("quick")
def test_cells_left_out_are_those_that_some_call_requested(tmp_path: Path) -> None:
    grid, one, other = (tmp_path / f"{name}.json" for name in ("grid", "one", "other"))
    bench(PICK).result().write(grid)
    edited(grid, lambda data: (data["rows"].pop(), data.update(left_out={"pick": 9, "decode": 9})))
    for file, rows in ((one, "1"), (other, "3")):
        bench(replace(PICK, at={"rows": (rows,)})).result().write(file)
        assert joined([file], None).left == {}
    for files in ([grid], [grid, one]):
        assert joined(files, None).left == {"pick": 1, "decode": 2}, "counted, not what a file says"
    found = joined([grid, other], None)
    assert [row["cell"]["rows"] for row in found.rows] == [1, 3] and found.left == {"decode": 2}
    assert "at" not in found.result().found["setting"]


def test_a_file_that_was_joined_later_does_not_bring_older_rows_back(tmp_path: Path) -> None:
    asked = Asked({"it": PLAIN}, "cpu", FP32, ("pick",), "tiny", peers=False, at={"rows": ("1",)})
    files = [tmp_path / name for name in ("joined.json", "measured.json")]
    for file, measured, written in zip(files, (1, 2), (3, 2), strict=True):
        bench(asked).result().write(file)
        data = json.loads(file.read_text()) | {"date": f"2026-01-0{written}T00:00:00+00:00"}
        data["sessions"][0] |= {"date": f"2026-01-0{measured}T00:00:00+00:00", "commit": file.stem}
        file.write_text(json.dumps(data))
    for order in (files, files[::-1]):
        assert [session.commit for session in joined(order, None).sessions] == ["measured"]


@pytest.mark.usefixtures("quick")
def test_differences_that_affect_a_speed_are_reported(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    bench(replace(PICK, at={"rows": ("1",)})).result().write(one)
    bench(replace(PICK, at={"rows": ("3",)})).result().write(other)
    assert "differ" not in text(joined([one, other], None))
    for name, value in (("torch", "1.0"), ("kernels_syntax", "f" * 64)):
        data = json.loads(other.read_text())
        data["sessions"][0]["machine"][name] = value
        other.write_text(json.dumps(data))
        assert f"differ in {name}: " in text(joined([one, other], None))
    assert "ffffffffffff in 1" in text(joined([one, other], None))


@pytest.mark.usefixtures("quick")
def test_a_full_grid_with_peers_does_not_go_on_without(made: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "full.json"
    full(file)
    assert json.loads(file.read_text())["setting"]["peers"] is False
    with pytest.raises(BadInput, match="begun with peers left out, expected included"):
        full(file, peers=True)
    edited(file, lambda data: (data["setting"].pop("peers"), data["sessions"][0].pop("peers")))  # as files were before
    with pytest.raises(BadInput, match="begun with peers not known"):
        full(file)
    found = joined([file], None)
    assert found.asked.peers is None and [session.peers for session in found.sessions] == [None]


def test_a_call_that_measured_nothing_leaves_no_session_and_no_rates(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, speeds = tmp_path / "full.json", iter((1e10, 2e10, 3e10))
    monkeypatch.setattr("instep_speed.bench.run.rates", lambda device, dtype: Rates(next(speeds), 1e10, 1e11))
    full(file)
    found = full(file)
    assert len(found.sessions) == 1 and found.rates.copy == found.result().data()["rates"]["copy"] == 1e10
    edited(file, lambda data: (data["rows"].pop(), data["sessions"][0].update(date="2020-01-01T00:00:00+00:00")))
    found = full(file)
    assert [row["session"] for row in found.rows] == [0, 0, 1] and found.rates.copy == 3e10
    assert [session.rates.copy for session in found.sessions if session.rates] == [1e10, 3e10]


@pytest.mark.usefixtures("quick")
def test_a_join_keeps_which_cells_were_chosen(tmp_path: Path) -> None:
    one, other, whole = (tmp_path / f"{name}.json" for name in ("one", "other", "whole"))
    bench(replace(PICK, at={"rows": ("1",)}, kinds=("pick", "decode"))).result().write(one)
    found = joined([one], None)
    assert found.asked.at == {"rows": ("1",)} and found.left == {"decode": 2}
    assert "pick: only cells with rows=1" in text(found) and "none has rows=1" in text(found)
    bench(replace(PICK, at={"rows": ("3",)})).result().write(other)
    found = joined([one, other], None)
    assert not found.asked.at and not found.left and "pick: only cells with rows=1; rows=3" in text(found)
    assert [session.at for session in found.sessions] == [{"rows": ("1",)}, {"rows": ("3",)}]
    edited(one, lambda data: data["sessions"][0].pop("at"))  # as files were before
    assert [session.at for session in joined([one, other], None).sessions] == [session.at for session in found.sessions]
    # Joined files of chosen cells have no more information about the others than each of them.
    found.result().write(one)
    edited(one, lambda data: data["rows"].pop())
    bench(PICK).result().write(whole)
    edited(whole, lambda data: (data["rows"].clear(), data.update(left_out={"pick": 2}, date="2020-01-01T00:00:00")))
    found = joined([one, whole], None)
    assert found.left == {"pick": 1} and [row["cell"]["rows"] for row in found.rows] == [1]


RESULTS = sorted(Path("fixtures/results").glob("bench-*.json"))
GONE = object()
# Values, of which some are wrong in any place.
WRONG: tuple[object, ...] = (GONE, None, "text", {"a": [1]}, 10**30)
SPEAKING = ("pick", "prefill", "rounds", "decoding")  # kinds whose arms tell different things


def small(name: str = "pick") -> dict[str, Any]:
    """A result with one arm of a kind."""
    data: dict[str, Any] = json.loads(Path("fixtures/results/bench-native.json").read_text())
    row = next(row for row in data["rows"] if row["kind"] == name)
    row |= {"arms": {"triton": {**next(iter(row["arms"].values())), "above": "more"}}, "session": 0}
    data["sessions"][0] |= {"at": {"rows": ["1"]}, "peers": True}
    setting = data["setting"] | {"at": {"rows": ["1"]}, "peers": True}
    return data | {"rows": [row], "sessions": data["sessions"][:1], "setting": setting,
                   "left_out": {"pick": 3}}  # fmt: skip


def places(value: Any, *at: Any) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield (*at, name)
        yield from places(one, *at, name)


def put(data: Any, place: tuple[Any, ...], value: object) -> None:
    for name in place[:-1]:
        data = data[name]
    if value is GONE:
        del data[place[-1]]
    else:
        data[place[-1]] = value


def test_every_result_that_is_kept_can_be_joined() -> None:
    assert len(RESULTS) >= 3
    for file in RESULTS:
        found, data = joined([file], None), json.loads(file.read_text())
        peers = {session.get("peers") for session in data["sessions"]}
        assert found.asked.peers is (peers.pop() if len(peers) == 1 else None)
        assert len(found.rows) == len(data["rows"]) and found.result().found["rates"]


@few(1)
@pytest.mark.parametrize("name", SPEAKING)
def test_a_file_with_any_field_spoilt_is_refused_by_name_or_serves_whole(name: str, tmp_path: Path) -> None:
    data, file, served = small(name), tmp_path / "spoilt.json", 0
    every = [place for place in places(data) if place[0] == "rows" or name == SPEAKING[0]]
    file.write_text(json.dumps(data))
    assert joined([file], None).rows, "as it was written"
    for place in every:
        for value in WRONG:
            other = deepcopy(data)
            put(other, place, value)
            file.write_text(json.dumps(other))
            try:
                found = joined([file], "a1")
            except BadInput as refused:
                assert refused.field.startswith(str(file)), (place, value, refused)
                continue
            served += 1
            shown(found.result()), list(map(picture, pictures(found.rows)))
            found.result().write(tmp_path / "again.json")
    assert served < 2 * len(every), "the rest is valid by coincidence: optional fields, texts, numbers"


@pytest.mark.parametrize(("place", "value", "says"), [
    (("rows", 0, "kind"), "speed", "rows[0]: kind: found invalid enum value 'speed'"),
    (("rows", 0, "arms"), GONE, "rows[0]: found object missing required field `arms`"),
    (("rows", 0, "floor_us"), GONE, "missing required field `floor_us`"),
    (("rows", 0, "floor_us"), None, "no `floor_us`, and an arm with `of_floor`"),
    (("rows", 0, "absent"), GONE, "missing required field `absent`"),
    (("rows", 0, "arms", "triton", "us"), "1.5", "rows[0]: arms[...].us: found `str`, expected `float`"),
    (("rows", 0, "arms", "triton", "lower"), GONE, "no `lower` beside `us`"),
    (("rows", 0, "cell", "rows"), "many", "`cell.rows` 'many', which is no number"),
    (("rows", 0, "cell", "rows"), 10**400, "which is no number that can be drawn"),
    (("rows", 0, "session"), -1, "rows[0]: found `session` -1"), (("rows", 0, "session"), 1, "one of 1 sessions"),
    (("rows",), [], "rows: found none, expected a cell"), (("rates",), GONE, "missing required field `rates`"),
    (("rates", "copy"), "fast", "rates.copy: found `str`"), (("rates", "copy"), 0, "not above 0"),
    (("setting", "minutes"), 0, "setting: found `minutes` 0, which"),
    (("setting", "dtype"), "float33", "setting.dtype: found invalid"),
    (("setting", "device"), GONE, "missing required field `device`"), (("setting", "grid"), "large", "setting.grid"),
    (("setting", "ops"), [], "setting: found no op set"),
    (("left_out", "speed"), 3, "'speed'"), (("date",), "today", "`date` 'today'"),
    (("sessions", 0, "date"), "today", "sessions[0]: found invalid isoformat string: 'today'"),
    (("machine", "device_name"), GONE, "no `machine.device_name`"),
    (("left_out", "pick"), -1, "`left_out.pick` -1"),
])  # fmt: skip
def test_invalid_field_is_reported_with_file_and_name(
    place: tuple[Any, ...], value: object, says: str, tmp_path: Path, instep: Runner
) -> None:
    data, file, out = small(), tmp_path / "spoilt.json", tmp_path / "out.json"
    put(data, place, value)
    file.write_text(json.dumps(data))
    said = complaint(instep("bench", "--join", file, "--json", out))
    assert said.startswith(f"instep: {file}: ") and says in said and not out.exists()


def test_rows_of_two_processors_are_not_put_together(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    data = small()
    data["setting"]["device"] = "cpu"
    one.write_text(json.dumps(data))
    for place in (("machine",), ("sessions", 0, "machine")):
        differs = deepcopy(data)
        put(differs, (*place, "processor"), "another")
        other.write_text(json.dumps(differs))
        with pytest.raises(BadInput, match="begun with machine processor another"):
            joined([one, other], None)
    for file, its in ((one, data), (other, differs)):
        its["setting"]["device"] = "cuda"
        file.write_text(json.dumps(its))
    assert joined([one, other], None).rows, "a card's times have little of the host's processor"
