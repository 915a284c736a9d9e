"""The visible result of a command: its exit code and both outputs, and how a refusal must look.

Leaves out: running it (the fixture `instep` of the harness's tests does).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Runner = Callable[..., Ran]


def advances(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int | None]]:
    """Record the updates of the commands' progress bar in this test: text, amount done, total."""
    seen: list[tuple[str, int, int | None]] = []

    @contextmanager
    def recorded(first: str) -> Iterator[Callable[[str, int, int | None], None]]:
        yield lambda what, done, of: seen.append((what, done, of))

    for module in ("instep.cli.progress", "instep.cli.op", "instep.cli.audit", "instep_speed.commands.gate"):
        monkeypatch.setattr(f"{module}.progress", recorded)
    return seen


def complaint(ran: Ran) -> str:
    """The one line of a refusal: exit code 2, nothing else on stderr, no traceback."""
    assert ran.code == 2, ran
    lines = ran.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("instep: "), ran.err
    assert "Traceback" not in ran.out + ran.err
    return lines[0]
