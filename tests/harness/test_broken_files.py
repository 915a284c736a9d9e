"""Broken files of every kind: a reader refuses them in one line, or reads them.

Leaves out: the text of each refusal (`test_bad_input.py`). `python -m support.inputs.broken_files` draws any number.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from instep.trace.file import decode
from instep_reference.contract.errors import BadInput
from support.inputs import broken_files
from support.inputs.broken_files import Kind
from support.running.covering import PART, WHOLE


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return broken_files.kinds(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize(("count", "use"), [
    pytest.param(150, 0.0, marks=PART), pytest.param(3000, 0.05, marks=WHOLE)])
def test_broken_files_are_refused_in_one_line_or_read(
    kinds: dict[str, Kind], tmp_path: Path, count: int, use: float
) -> None:
    with broken_files.limited():
        found = list(broken_files.trials(1, range(count), kinds, tmp_path / "file", use))
    assert not [one for one in found if one.failed]
    assert len({one.kind for one in found if one.outcome == "refused"}) == len({one.kind for one in found}) >= 25


def test_sound_files_of_every_kind_are_read(kinds: dict[str, Kind], tmp_path: Path) -> None:
    """A kind that is refused as it is would test nothing."""
    for name, kind in kinds.items():
        found = broken_files.trial(0, name, kind, kind.files, tmp_path / "file", used=False)
        assert found.outcome == "read", found


def fails_with(error: BaseException) -> Callable[[Path], object]:
    def read(at: Path) -> None:
        raise error

    return read


def test_text_that_is_nested_too_deep_is_refused() -> None:
    with pytest.raises(BadInput, match="nested too deep"):
        decode(b"[" * 100_000, list, "p.jsonl line 1")


def test_reader_that_does_not_return_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken_files, "LIMIT_S", 0.05)

    def computes(at: Path) -> None:
        while True:
            pass

    with broken_files.limited():
        found = broken_files.trial(7, "x", Kind({"a": b""}, computes), {"a": b""}, tmp_path / "a", used=False)
    assert found.outcome == "hangs" and found.failed


@pytest.mark.parametrize(("error", "outcome", "failed"), [
    (BadInput("x", found=1, expected=2), "refused", False),
    (BadInput("x", found="a\nb", expected=2), "more than", True), (KeyError("x"), "KeyError", True),
    (UserWarning("x"), "UserWarning", True), (MemoryError(), "MemoryError", True),
    (broken_files.Hangs(), "hangs", True),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_other_exceptions_of_a_reader_are_failures(
    tmp_path: Path, error: BaseException, outcome: str, failed: bool
) -> None:
    found = broken_files.trial(7, "x", Kind({"a": b""}, fails_with(error)), {"a": b""}, tmp_path / "a", used=False)
    assert found.outcome.startswith(outcome) and found.failed is failed
    *_, last = broken_files.report([found])
    assert last == f"1 files, {failed:d} failed"
