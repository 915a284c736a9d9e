"""A result of `instep bench` with anything wrong in it: it is refused by file and field, or serves whole.

Leaves out: what becomes of files that are right (`test_bench_resume.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from instep_reference.contract.errors import BadInput
from instep_speed.bench import plots
from instep_speed.bench.resume import joined
from support.build.outcomes import shown
from support.running.command import Runner, complaint
from support.running.covering import few

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


@few(2)
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
            shown(found.result()), list(plots.pictures(found.rows))
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
