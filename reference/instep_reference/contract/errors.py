"""Errors with exit code 2: bad input, and combinations that are refused.

Leaves out: divergences (a result and not an error), and errors of the harness itself (exit code 4).
"""

from pathlib import Path


class InstepError(Exception):
    """An error that the user can fix. Its text is the one line that the user sees."""


class BadInput(InstepError):
    """A value from outside that cannot be used.

    field     the place of the value, as in "adaptive.jsonl line 7: rows[0].tokens"
    found     the value;  expected: what would be right
    hint      what the user can do next, if anything
    """

    def __init__(self, field: str, *, found: object, expected: object, hint: str = "") -> None:
        self.field, self.found, self.expected, self.hint = field, found, expected, hint
        super().__init__(f"{field}: found {found}, expected {expected}" + (f"; {hint}" if hint else ""))


def bytes_of(path: Path, expected: str = "a readable file") -> bytes:
    """The content of a file. expected: for the error if it cannot be read"""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(str(path), found=error.strerror, expected=expected) from None


class Unsupported(InstepError):
    """A legal combination that this engine does not support."""


class OutOfCapacity(InstepError):
    """The pools cannot hold what an event needs: a slot, a page, or a window is missing."""
