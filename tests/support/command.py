"""What a user sees of a command: its exit code and both outputs, and how a refusal must look.

Leaves out: running it (the fixture `instep` of the harness's tests does).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ran(NamedTuple):
    code: int
    out: str
    err: str


Runner = Callable[..., Ran]


def complaint(ran: Ran) -> str:
    """The one line of a refusal: exit code 2, nothing else on stderr, no traceback."""
    assert ran.code == 2, ran
    lines = ran.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("instep: "), ran.err
    assert "Traceback" not in ran.out + ran.err
    return lines[0]
