"""Result files of all commands: exit code, command, date, revision, versions, device. `read` reads old files too.

Leaves out: the fields that each command adds.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import msgspec

from instep_reference.contract.errors import BadInput, bytes_of

from ..atomic_write import write_atomically
from .command_lines import typed
from .machine import machine

SCHEMA = 2
OLD = {"headroom": "used"}  # field of schema 1 -> its name today


@dataclass(frozen=True)
class Result:
    """The result of one run of a command.

    exit    its exit code;  device: the device that it ran on
    found   the fields of this command, as values that msgspec encodes; `machine` may be among them, with more about it
    commit  the revision of the source, as the caller knows it
    """

    exit: int
    device: str
    found: Mapping[str, Any]
    commit: str | None = None

    def data(self, *, of_file: bool = True) -> dict[str, Any]:
        """The content of the file. of_file: with the machine, which takes a quarter of a second and is not printed."""
        made = {"machine": machine(self.device)} if of_file else {}
        return {
            "schema": SCHEMA, "exit": int(self.exit), "command": as_json(typed(sys.argv)),
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": self.commit,
            **made, **as_json(msgspec.to_builtins(self.found, str_keys=True)),
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """Write the file; after an error no part of it is there."""
        write_atomically({path: content_of(self.data())})


def content_of(data: Mapping[str, Any]) -> bytes:
    """The bytes of a result file."""
    return msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"


class Session(msgspec.Struct, forbid_unknown_fields=True):
    """One session of a command that adds to a result file: date, revision, machine, duration."""

    date: str
    commit: str | None
    machine: dict[str, str | None]
    seconds: float = 0.0

    @classmethod
    def now(cls, device: str, commit: str | None) -> Self:
        """A session that begins now."""
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), commit, machine(device))


def as_json(value: Any) -> Any:
    """Builtin values as in a file: lists, valid UTF-8, and as text the numbers that JSON does not have.

    File names and messages of exceptions may contain half a character.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {as_json(name): as_json(inner) for name, inner in value.items()}
    return [*map(as_json, value)] if isinstance(value, list | tuple) else value


def read(path: Path) -> dict[str, Any]:
    """Read a result file of any schema so far, with the field names of today."""
    expected = "a result file, as --json writes it"
    text = bytes_of(path, expected)
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(str(path), found=f"invalid JSON ({error})", expected=expected) from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        newer = type(schema) is int and schema > SCHEMA
        raise BadInput(str(path), found=f"schema {schema}", expected=f"a result file of schema 1 to {SCHEMA}",
                       hint="a newer instep wrote it" if newer else "")  # fmt: skip
    return {**_today(found), "schema": SCHEMA} if schema < SCHEMA else found


def runs_of(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The runs of a result, each with the fields that all runs share.

    An audit has findings of tokens and counts outside of its runs. They form one more run, the first.
    """
    shared = {name: found[name] for name in ("exit", "ops", "model", "recording") if name in found}
    beside = [{name: value for name, value in found.items() if name != "runs"}] if "findings" in found else []
    return [{**shared, **run} for run in (*beside, *found.get("runs", ()))]


def _today(value: Any) -> Any:
    """A value of schema 1 with the names of today."""
    if isinstance(value, dict):
        return {OLD.get(name, name): _today(inner) for name, inner in value.items()}
    return [_today(inner) for inner in value] if isinstance(value, list) else value
