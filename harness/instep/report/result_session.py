"""One session of a command that adds to a result file: date, revision, machine, duration.

Leaves out: the fields of each command that resumes or joins results.
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
        """A session that begins now."""
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), commit, machine(device))
