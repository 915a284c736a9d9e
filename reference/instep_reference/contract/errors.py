"""What becomes exit code 2: bad input, and combinations that are refused.

Leaves out: divergences (a result, not an error) and faults of the harness itself (exit code 4).
"""

from __future__ import annotations


class InstepError(Exception):
    """Something the user can mend; its text is the one line that is shown."""


class BadInput(InstepError):
    """A value from outside that cannot be used.

    field: where it stands ("adaptive.jsonl line 7: rows[0].tokens"); found, expected: both sides
    of the disagreement; hint: what to do next, if there is something to do.
    """

    def __init__(self, field: str, *, found: object, expected: object, hint: str = "") -> None:
        self.field, self.found, self.expected, self.hint = field, found, expected, hint
        super().__init__(f"{field}: found {found}, expected {expected}" + (f"; {hint}" if hint else ""))


class Unsupported(InstepError):
    """A combination that is legal in itself but that this side does not serve."""


class OutOfCapacity(InstepError):
    """The pools cannot hold what an event asks for: a slot, a page, or a window is missing."""
