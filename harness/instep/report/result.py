"""A result file: what a command found, and how: command, date, revision, versions, device.

Leaves out: the content of what was found; every command has fields of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ..atomic_write import write_atomically
from .command import typed
from .machine import machine

SCHEMA = 1


@dataclass(frozen=True)
class Result:
    """The result of one run of a command.

    exit    its exit code;  device: the device that it ran on
    found   the command's own fields. `machine` may be among them, with more about the machine
    commit  the revision of the source, as the caller knows it
    """

    exit: int
    device: str
    found: Mapping[str, Any]
    commit: str | None = None

    def data(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "schema": SCHEMA, "exit": int(self.exit), "command": typed(sys.argv),
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": self.commit,
            "machine": machine(self.device), **self.found,
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """Write the file; after an error no part of it is there."""
        write_atomically({path: msgspec.json.format(msgspec.json.encode(self.data()), indent=1) + b"\n"})
