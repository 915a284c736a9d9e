"""Every block of the documentation that can be pasted runs, and prints what the page shows; pages stay short.

Leaves out: links, tables and commands within a sentence (`test_readme.py`).
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from documentation.blocks import blocks_of, missing, paste, unclear
from documentation.site import TOP, sources
from support.running.covering import WHOLE
from support.running.processes import warm_shell

WRITTEN = [
    TOP / source for source in sources()
    if source.suffix == ".md" and source.name != "LOG.md" and source.parent.name != "api"
]  # fmt: skip
PASTED = [page for page in WRITTEN if any(block.runs for block in blocks_of(page))]
LONGEST, SHORTER = 150, {"README.md": 120, "docs/architecture.md": 120}  # lines
GENERATED = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- end -->\n", re.DOTALL)
INSTALLED = ("README.md", "reference/README.md")  # run the installed commands from their start
RESULTS = ("results", "speed", "peers", "found/README")  # pages that are tables of results


@pytest.fixture(scope="module")
def commands() -> Iterator[Path]:
    """`instep` and `python` in processes that need not import torch."""
    with warm_shell() as folder:
        yield folder


def name(page: Path) -> str:
    return str(page.relative_to(TOP))


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_every_block_is_marked_as_run_or_not_run(page: Path) -> None:
    assert unclear(blocks_of(page)) == []
    outside = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert not re.search(r"^    (instep|python|make|pip|export|cd) ", outside, re.MULTILINE), "a block without a fence"


@WHOLE
@pytest.mark.parametrize("page", PASTED, ids=name)
def test_every_block_of_a_page_runs_and_prints_what_it_shows(page: Path, commands: Path, tmp_path: Path) -> None:
    assert not paste(page, tmp_path, None if name(page) in INSTALLED else commands)


TYPED = (  # shell commands that end, read and write in each way that a block can
    "python -c 'import sys; print(sys.argv, sys.path, sys.stdin.read()); sys.exit(3)' a 'b c' < words",
    "cd inner && python -c 'import sys, os; print(os.getcwd(), os.environ[\"A\"]); import within'",
    "A=2 PYTHONPATH=inner python -c 'import os, sys, within; print(os.environ[\"A\"], sys.path)'",
    "python -m inner.within x | cat; python inner/within.py y 2> errors; cat errors",
    "python -m nothing 2>&1 | grep -o 'No mod.*'",
    *(f"python -c 'import os; os.kill(os.getpid(), {number})'" for number in (9, 15)),
    "PYTHONUNBUFFERED=1 python -c 'print(1); 1 / 0' 2>&1 | sed -n '1p;$p'",
    "PYTHONUNBUFFERED= python -c 'print(1); 1 / 0' 2>&1 | sed -n '1p;$p'",
    "python -c 'import atexit; atexit.register(print, 5)'", "python -c 'import sys; sys.exit(\"no\")'",
    "instep --version | cat", "instep nothing", "python -m json.tool --no-ensure-ascii words",
)  # fmt: skip


@WHOLE
def test_a_warm_shell_runs_each_command_like_the_installed_one(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "within.py").write_text("import sys\nprint(__name__, sys.argv)\nprint(2, file=sys.stderr)\n")
    (tmp_path / "words").write_text("one two")
    for line in TYPED:
        installed, warm = (
            subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=tmp_path, text=True, capture_output=True,
                           check=False, env=os.environ | {"PATH": f"{first}{os.pathsep}{os.environ['PATH']}", "A": "1"})
            for first in (Path(sys.executable).parent, commands))  # fmt: skip
        assert vars(installed) == vars(warm), line
        assert installed.stdout + installed.stderr or installed.returncode < 0, line


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_a_page_answers_one_question(page: Path) -> None:
    if name(page) == "CHANGELOG.md":
        return
    text = page.read_text()
    if name(page).removeprefix("docs/").startswith(RESULTS):
        text = GENERATED.sub("", text)
    assert len(text.splitlines()) <= SHORTER.get(name(page), LONGEST)


@pytest.mark.parametrize(("block", "says"), [
    ("```\nx\n```", "the language ''"), ("```text\nx\n```", "no block before it prints"), ("```json\n{}\n```", "data"),
    ("<!-- runs: no -->\n```sh\nx\n```", "the notes ['runs']"), ("```sh\nx\n```\n```text\ny\n```", ""),
    ("<!-- shown: why -->\n```text\nx\n```", ""), ("<!-- file: x.json -->\n```json\n{}\n```", ""),
])  # fmt: skip
def test_a_block_without_its_marks_is_found(block: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("documentation.blocks.TOP", tmp_path)
    (tmp_path / "page.md").write_text(block + "\n")
    found = unclear(blocks_of(tmp_path / "page.md"))
    assert len(found) == bool(says) and says in "".join(found)


@pytest.mark.parametrize(("blocks", "says"), [
    ("```sh\necho a; exit 1\n```", "exit code 1, expected 0"), ("<!-- exit: 1 -->\n```sh\nfalse\n```", ""),
    ("```sh\necho one two; echo 3\n```\n```text\none ...\n3\n```", ""),
    ("```sh\necho one\n```\n```text\ntwo\n```", "not printed: two"),
    ("<!-- file: a.py -->\n```python\nB = 1\n```\n```python\nimport a\n\nassert a.B == 2\n```", "AssertionError"),
])  # fmt: skip
def test_a_page_that_is_wrong_is_found(blocks: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top, folder = tmp_path / "top", tmp_path / "folder"
    top.mkdir(), folder.mkdir()
    monkeypatch.setattr("documentation.blocks.TOP", top)
    (top / "page.md").write_text(blocks + "\n")
    found = paste(top / "page.md", folder)
    assert len(found) == bool(says) and says in "".join(found)


def test_lines_are_looked_for_in_their_order() -> None:
    assert missing("b\na", "a\nb") == ["a"] and missing("a ... c\n...\nd", "a b c\nx\nd  ") == []
