"""A trace on disk: typed JSON lines, closed by a digest, and a safetensors file of what was recorded.

    line 1        `Header`
    then          one event per line, in the contract's own wire format
    last line     `Footer`: the number of events, and the sha256 of all lines before

The file `<trace>.safetensors` belongs to the trace. It holds the prompts, the recording engine's own choices at every
event, and a checksum per line, so that an error can name the edited line. The header holds a digest of the prompts and
choices. Nothing is executed, unknown fields are refused, and either both files are written or none.
Leaves out: whether the events are legal (`event_rules.py`).
"""

import hashlib
import re
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from instep_reference.contract.engine import Admit, AnyEvent, Commit, Draft, Forward
from instep_reference.contract.errors import BadInput, bytes_of

from ..atomic_write import STDOUT, writable, write_atomically
from .header import SCHEMA, FirstHeader, Header, sound

READERS: Mapping[int, type[Header]] = {1: FirstHeader, SCHEMA: Header}  # schema -> how its first line is read
RECORDING = "recording.json"  # next to a recording's events (`instep.audit`), which have no header line
CHECKSUMS = "line_crc32"  # tensor in the safetensors file: int64, one per line before the footer


class Footer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last line. If it is missing the trace was cut; if its digest is another one the trace was edited."""

    events: int
    sha256: str


class _Version(msgspec.Struct, frozen=True):
    """The version of the format; it is read first."""

    schema: int


@dataclass(frozen=True)
class Trace:
    """A trace as read. `recorded`: tensors with the names of `drive.recorded`; `where(i)` names event i in errors."""

    path: Path
    header: Header
    events: tuple[AnyEvent, ...]
    recorded: Mapping[str, torch.Tensor]
    sha256: str

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the files, for readers of a verdict on this trace."""
        if self.header.tensors_sha256 is not None:
            return ()
        return (f"{self.path.name} has no digest of its tensors, so damage to {beside(self.path).name} can go "
                f"unnoticed; add one with: instep show {shlex.quote(str(self.path))} --stamp",)  # fmt: skip

    def where(self, index: int) -> str:
        return f"{self.path.name} line {index + 2}"


def beside(path: Path) -> Path:
    """The safetensors file of a trace."""
    return path.with_name(path.name + ".safetensors") if path.suffix != ".jsonl" else path.with_suffix(".safetensors")


def read(path: Path) -> Trace:
    """Read both files; anything unexpected in them is a `BadInput`."""
    lines = bytes_of(path, "a readable trace").splitlines(keepends=True)
    if not lines:
        raise BadInput(f"{path.name} line 1", found="nothing", expected="a header")
    if not lines[-1].endswith(b"\n"):
        raise BadInput(f"{path.name} line {len(lines)}", found="no end of the line", expected="a whole line",
                       hint="the trace was cut")
    header = _header(path.name, lines[0])
    footer, sha256 = _footer(path.name, lines), hashlib.sha256(b"".join(lines[:-1])).hexdigest()
    recorded = _recorded(path, footer.sha256)
    if footer.sha256 != sha256 or footer.events != len(lines) - 2 or len(recorded[CHECKSUMS]) != len(lines) - 1:
        raise _edited(path.name, lines, recorded[CHECKSUMS])
    _undamaged(path, header, lines[:-1], recorded)
    events = tuple(decode(line, AnyEvent, f"{path.name} line {n}") for n, line in enumerate(lines[1:-1], start=2))
    trace = Trace(path, header, events, recorded, sha256)
    for name in recorded.keys() - {CHECKSUMS}:
        _possible(trace, name)
    return trace


def replaceable(path: Path) -> None:
    """Refuse a place where a trace cannot be written, or where it would replace a file that is no trace."""
    for file in (path, beside(path)):
        writable(file)
        if path == STDOUT or (file.exists() and not file.is_file()):
            raise BadInput(str(file), found="no regular file", expected="the name of one", hint="a trace is two files")
    trace = _is_trace(path)
    for file, ours in ((path, trace), (beside(path), trace or _is_tensors(beside(path)))):
        if not ours and file.exists() and file.stat().st_size:
            raise BadInput(str(file), found="a file that is not of a trace", expected="a trace, or no file",
                           hint="it would be overwritten")


def write(path: Path, header: Header, events: Sequence[AnyEvent], recorded: Mapping[str, torch.Tensor]) -> Trace:
    """Write both files or neither. A file that is no part of a trace is never replaced."""
    replaceable(path)
    header = msgspec.structs.replace(header, tensors_sha256=digest_of(recorded))
    encode = msgspec.json.Encoder().encode
    lines = [header.line(), *(encode(event) + b"\n" for event in events)]
    return Trace(path, header, tuple(events), *_put(path, lines, recorded))


def stamp(path: Path) -> Trace:
    """Write a trace again with a digest of its tensors in the header; all else in its lines stays as it is."""
    trace = read(path)
    replaceable(path)
    first, *others = path.read_bytes().splitlines(keepends=True)[:-1]
    stamped = msgspec.json.decode(first) | {"tensors_sha256": digest_of(trace.recorded)}
    _put(path, [msgspec.json.encode(stamped) + b"\n", *others], trace.recorded)
    return read(path)


def _put(path: Path, lines: list[bytes], recorded: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    sha256 = hashlib.sha256(b"".join(lines)).hexdigest()
    tensors = {**recorded, CHECKSUMS: torch.tensor([zlib.crc32(line) for line in lines])}
    text = b"".join([*lines, msgspec.json.encode(Footer(len(lines) - 1, sha256)) + b"\n"])
    # The tensors first, so that a reader who finds the trace also finds its tensors.
    write_atomically({beside(path): save(tensors, {"trace_sha256": sha256}), path: text})
    return tensors, sha256


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 of the names, dtypes, shapes and bytes of all tensors but the checksums of lines, in the order of names.

    The checksums cannot be among them: one is that of the header, which holds this digest.
    """
    total = hashlib.sha256()
    for name in sorted(tensors.keys() - {CHECKSUMS}):
        tensor = tensors[name].contiguous()
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


class _Opening(msgspec.Struct, frozen=True):
    """The fields that the first line has in every schema."""

    schema: int
    checkpoint: dict[str, Any]
    capacity: dict[str, Any]


def _is_trace(file: Path) -> bool:
    """Whether the file begins as a trace does. It may be cut, edited, or of another schema."""
    try:
        with file.open("rb") as opened:
            msgspec.json.decode(opened.readline(), type=_Opening)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _is_tensors(file: Path) -> bool:
    """Whether the file was written as the tensors of a trace."""
    try:
        with safe_open(str(file), framework="pt") as stored:
            return "trace_sha256" in (stored.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _header(name: str, line: bytes) -> Header:
    where = f"{name} line 1"
    version = decode(line, _Version, where).schema
    if version not in READERS:
        raise BadInput(f"{where}: schema", found=version, expected=f"{min(READERS)} to {SCHEMA}",
                       hint="a newer instep wrote it" if version > SCHEMA else "record the trace again")  # fmt: skip
    header: Header = decode(line, READERS[version], where, f"a line of schema {version}")
    if isinstance(header, FirstHeader):
        header = header.today()
    sound(header, where)
    return header


def _footer(name: str, lines: list[bytes]) -> Footer:
    where = f"{name} line {len(lines)}"
    try:
        footer: Footer = decode(lines[-1], Footer, where)
        return footer
    except BadInput:
        hint = "the trace was cut"
        raise BadInput(where, found="no footer", expected="the number of events and a sha256", hint=hint) from None


def _recorded(path: Path, sha256: str) -> dict[str, torch.Tensor]:
    file = beside(path)
    if not file.is_file():
        raise BadInput(str(file), found="no such file", expected="the tensors of the trace, next to it")
    try:
        with safe_open(str(file), framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        expected = "safetensors; nothing else is opened"
        raise BadInput(str(file), found=f"unreadable ({error})", expected=expected) from None
    if metadata.get("trace_sha256") != sha256:
        raise BadInput(
            f"{file.name}: trace_sha256", found=metadata.get("trace_sha256"), expected=sha256,
            hint=f"the two files of {path.name} are not of one recording",
        )
    if CHECKSUMS not in tensors or tensors[CHECKSUMS].dtype != torch.int64 or tensors[CHECKSUMS].dim() != 1:
        raise BadInput(f"{file.name}: {CHECKSUMS}", found="no such int64 vector", expected="one checksum per line")
    return tensors


def _undamaged(path: Path, header: Header, lines: list[bytes], recorded: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not the recorded ones, as far as the header has their digest."""
    where, hint = beside(path).name, "the file was damaged or edited"
    if recorded[CHECKSUMS].tolist() != [zlib.crc32(line) for line in lines]:
        raise BadInput(f"{where}: {CHECKSUMS}", found="other checksums", expected=f"those of {path.name}", hint=hint)
    stated, found = header.tensors_sha256, digest_of(recorded)
    if stated is not None and stated != found:
        raise BadInput(f"{where}: tensors", found=f"the digest {found[:12]}..",
                       expected=f"{stated[:12]}.., as in {path.name} line 1", hint=hint)  # fmt: skip


def _possible(trace: Trace, name: str) -> None:
    """Refuse a tensor that belongs to no event, or holds a value that no recorder can have written."""
    tensor, where = trace.recorded[name], f"{beside(trace.path).name}: {name}"
    hint = "the file was damaged or edited"
    kind, _, number = name.partition(".")
    event = trace.events[int(number)] if number.isdecimal() and int(number) < len(trace.events) else None
    if not isinstance(event, {"prompt": Admit, "own": Draft | Forward | Commit}.get(kind, ())):
        raise BadInput(where, found="a tensor", hint=hint, expected="prompt.N for an admit event N, or own.N for a "
                       "draft, forward or commit event N")
    if tensor.dtype != torch.int64 or tensor.dim() != 1:
        found = f"{tensor.dtype} of shape {list(tensor.shape)}"
        raise BadInput(where, found=found, expected="an int64 vector", hint=hint)
    values = tensor.tolist()
    if isinstance(event, Admit):
        if values != list(event.prompt):
            raise BadInput(where, found="other tokens", expected=f"the prompt of {trace.where(int(number))}",
                           hint="the trace was edited")
        return
    ranges = _ranges(trace.header, event, len(values))
    for at, (value, (least, end, what)) in enumerate(zip(values, ranges, strict=True)):
        if not least <= value < end:
            raise BadInput(f"{where}[{at}]", found=value, expected=f"{what}, {least} to {end - 1}", hint=hint)


def _ranges(header: Header, event: AnyEvent, count: int) -> list[tuple[int, int, str]]:
    """The least value, the end and the meaning of each of an engine's own choices (`drive.own_say`)."""
    room, vocab = header.room(), header.checkpoint.vocab
    token, none = (0, vocab, "a token of the vocabulary"), (-1, vocab, "a token of the vocabulary or -1")
    nodes = max(room.widest(max((*header.candidates, header.num_steps))), 1)
    if isinstance(event, Commit):
        return [(0, nodes, "a number of accepted drafts")] * (count // 2) + [token] * (count - count // 2)
    if isinstance(event, Draft) and room.topk is not None:
        return [none] * (count // 2) + [(-1, nodes, "a parent in the tree")] * (count - count // 2)
    return [none if isinstance(event, Draft) else token] * count


def _edited(name: str, lines: list[bytes], checksums: torch.Tensor) -> BadInput:
    """The error that names the first line which was changed after recording."""
    known = checksums.tolist()
    for number, line in enumerate(lines[:-1], start=1):
        if number > len(known) or zlib.crc32(line) != known[number - 1]:
            return BadInput(f"{name} line {number}", found="another line", expected="the line recorded here",
                            hint="the trace was edited")
    return BadInput(f"{name} line {len(lines)}", found=f"{len(lines) - 1} lines before it", expected=len(known),
                    hint="the trace was cut")


def _uncapitalised(text: str) -> str:
    """A message of the decoder with a small first letter, except where it begins with an abbreviation."""
    return text if text[:2].isupper() else text[0].lower() + text[1:]


def decode(text: bytes, kind: Any, where: str, otherwise: str = f"a line of schema {SCHEMA}") -> Any:
    """Decode strictly. An error names the field, what was found and what was expected (by default `otherwise`)."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise BadInput(where, found="lists or objects nested too deep", expected=otherwise) from None
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        if isinstance(error, UnicodeDecodeError) or str(error).startswith("Invalid UTF-8"):  # msgspec from 0.23 on
            raise BadInput(where, found="bytes that are not UTF-8", expected="JSON") from None
        said, _, place = str(error).partition(" - at `$")
        field = where + (f": {place.rstrip('`').lstrip('.')}" if place else "")
        parts = re.fullmatch(r"Expected (.*), got (.*)", said)
        expected, found = parts.groups() if parts else (otherwise, _uncapitalised(said))
        raise BadInput(field, found=found, expected=expected) from None
