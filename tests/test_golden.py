"""Golden files: each belongs to one test, a difference is shown with the command that accepts it, nothing else passes.

Leaves out: what the files hold.
"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.running.golden import CHANGED, FOLDER, MEASURED, VERSION, Golden, names, normal

NODE = "tests/test_it.py::test_it[a b]"


def test_every_golden_file_has_one_call_and_every_call_its_file() -> None:
    calls = Counter(names())
    assert calls.keys() == {file.stem for file in FOLDER.iterdir()}, "delete the file that no test uses"
    assert not [name for name, count in calls.items() if count > 1], "a name is given by two calls"


def test_names_are_found_anywhere_in_a_file_and_must_be_literals(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text('def test_it(golden):\n    if True:\n        golden("it", "text", P=1)\n')
    assert list(names(tmp_path)) == ["it"]
    (tmp_path / "test_it.py").write_text('def test_it(golden):\n    golden(f"it-{1}", "text")\n')
    with pytest.raises(ValueError, match=r"test_it\.py line 2: .* literal"):
        list(names(tmp_path))


@pytest.mark.parametrize("held", [None, "one\nthree\n", ""], ids=["no file", "other text", "empty"])
def test_a_difference_fails_with_a_diff_and_the_command_that_accepts_it(tmp_path: Path, held: str | None) -> None:
    node = SimpleNamespace(nodeid=NODE, user_properties=[])
    if held is not None:
        (tmp_path / "it.txt").write_text(held)
    with pytest.raises(pytest.fail.Exception) as failed:
        Golden(node, False, tmp_path)("it", "one\ntwo\n")
    said = str(failed.value)
    assert "+two\n" in said and ("-three\n" in said) is (held == "one\nthree\n")
    assert said.endswith(f"python -m pytest '{NODE}' --update-golden")
    assert (tmp_path / "it.txt").exists() is (held is not None)
    Golden(node, True, tmp_path)("it", "one\ntwo\n")
    [(name, shown)] = node.user_properties
    assert name == CHANGED and "+two" in shown
    Golden(node, False, tmp_path)("it", "one\ntwo\n")
    Golden(node, True, tmp_path)("it", "one\ntwo\n")
    assert len(node.user_properties) == 1, "an equal file is not written again"


@pytest.mark.parametrize(("text", "expected"), [
    ("took 1.5 s, 12.25 s", "took # s, # s"),
    ("loss   -1.5e-07  3  a1.5 1.2.3 nan", "loss # 3  a1.5 1.2.3 #"),
    ("│ took 1.5 s  │  10.25 │ 3 │", "│ took # s    │ #      │ 3 │"),  # as wide as it was
    ("torch 2.13.0+cpu", "torch 2.13.0+cpu"),
    ("/a/model/x of /a  \n\n", "MODEL/x of TOP"),
])
def test_only_text_that_differs_between_machines_is_hidden(text: str, expected: str) -> None:
    assert normal(text, MEASURED, MODEL=Path("/a/model"), TOP=Path("/a")) == f"{expected}\n"
    assert normal("torch 2.13.0+cpu", VERSION) == "torch #\n"
