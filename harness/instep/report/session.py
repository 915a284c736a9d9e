"""One call of a command that adds to a result: when, on which source and machine, and how long.

Leaves out: what it added; each command that goes on, or joins, has fields of its own.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Self

import msgspec

from .machine import machine


class Session(msgspec.Struct, forbid_unknown_fields=True):
    date: str
    commit: str | None
    machine: dict[str, str | None]
    seconds: float = 0.0

    @classmethod
    def now(cls, device: str, commit: str | None) -> Self:
        """One that begins now."""
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), commit, machine(device))
