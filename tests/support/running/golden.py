"""Golden files: what a command prints, held as a whole by `tests/golden/NAME.txt`.

`--update-golden` writes the files from the current output, and the end of that session shows how they changed.
Leaves out: place, event and tier of a finding, which tests assert in addition to the text.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest

from instep.report.command_lines import near

TESTS = Path(__file__).resolve().parents[2]
FOLDER = TESTS / "golden"
CHANGED = "golden file written again"  # the property of a test's report that holds the difference
# Patterns of text that differs between machines or runs, for `golden(name, text, PATTERN, ...)`. SECONDS always is.
SECONDS = r"\d+\.\d+ s\b"
MEASURED = r"(?<![\w.])-?\d+(?:\.\d+(?:e[+-]\d+)?|e[+-]\d+)(?![\w.]*\w)|(?<!\w)nan\b"
COUNTED = r"(?<= )\d[\d.]*[kMG]?(?= +(?:\d[\d.]*[kMG]? +)*exact\b)"  # counts in rows of exact tiers
VERSION = r"\d+\.\d+\.\d+\S*"


@dataclass
class Golden:
    """`golden("replay-agrees", ran.out, TRACE=trace.path)` in one test. anew: write instead of comparing."""

    node: Any  # the test: a pytest.Item
    anew: bool
    folder: Path = FOLDER

    def __call__(self, name: str, text: str, *hidden: str, **paths: Path) -> None:
        """hidden: patterns of numbers that become `#`; paths: name -> path that becomes this name"""
        file, found = self.folder / f"{name}.txt", normal(text, *hidden, **paths)
        held = file.read_text("utf-8") if file.is_file() else ""
        if held == found:
            return
        shown = "".join(unified_diff(
            held.splitlines(keepends=True), found.splitlines(keepends=True), f"golden/{file.name}", "printed now"
        ))  # fmt: skip
        if self.anew:
            file.write_text(found, "utf-8")
            self.node.user_properties.append((CHANGED, shown))
            return
        again = f"python -m pytest {shlex.quote(self.node.nodeid)} --update-golden"
        pytest.fail(f"{shown}If this is intended, write the file again:\n  {again}", pytrace=False)


def sections(texts: Mapping[str, str]) -> str:
    """Several texts in one file, each below its title."""
    return "\n".join(f"=== {title}\n{text.rstrip()}\n" for title, text in texts.items())


def normal(text: str, *hidden: str, **paths: Path) -> str:
    """The text as it is on every machine: no blanks at the ends of lines, nothing hidden, every path by its name."""
    for name, path in sorted(paths.items(), key=lambda pair: -len(str(pair[1]))):
        for spelled in {str(path), near(path)} - {"."}:
            text = text.replace(spelled, name)
    return "\n".join(_line(line.rstrip(), (SECONDS, *hidden)) for line in text.strip("\n").splitlines()) + "\n"


def _line(line: str, hidden: Sequence[str]) -> str:
    """Replace every hidden number by one `#`. A cell of a framed table keeps its width; elsewhere blanks are merged."""
    framed = "│" in line
    for pattern in hidden:
        line = re.sub(rf"(?P<before> *)(?:{pattern})(?P<after> *)", lambda found: _hidden(found, framed), line)
    return line.rstrip()


def _hidden(found: re.Match[str], framed: bool) -> str:
    unit = " s" if found[0].rstrip().endswith(" s") else ""
    cell = f"{found['before'][:1]}#{unit}{found['after'][:1]}"
    return cell.ljust(len(found[0])) if framed else cell


def names(folder: Path = TESTS) -> Iterator[str]:
    """The name that every call of `golden` in the tests gives; a name that is no literal is a ValueError."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "golden" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "golden":
                if not (node.args and isinstance(node.args[0], ast.Constant)):
                    raise ValueError(f"{path.name} line {node.lineno}: the name of a golden file must be a literal")
                yield str(node.args[0].value)
