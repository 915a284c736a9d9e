"""A plain file of prompts and answers: one line a request, {"prompt": [..], "tokens": [..]}, both as token numbers.

Anybody can write it. Further fields of a line are ignored, but `request` names it. Leaves out: text. To make tokens of
it one must know the tokenizer, and what a chat template put around it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from instep_reference.contract.errors import BadInput

from ..trace.file import decode
from .recording import Recorded
from .texts import Origin, Text, Told


class Line(msgspec.Struct, frozen=True):
    """prompt: at least one token; tokens: what was said; request: its name, or "line N"."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    request: str | None = None


def read(file: Path) -> Recorded:
    """The requests of a file. A last line that was cut off is left out, and that is said."""
    try:
        lines = file.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise BadInput(str(file), found=error.strerror, expected="a readable file") from None
    texts, notes = list[Text](), list[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file.name} line {number}"
        try:
            one: Line = decode(line, Line, where, 'a line {"prompt": [tokens], "tokens": [tokens]}')
        except BadInput:
            if number < len(lines) or line.endswith(b"\n"):
                raise
            notes.append(f"{where} was cut off, and left out")
            continue
        origins = tuple(Origin(number, "line") for _ in one.tokens)
        texts.append(Text(one.request or f"line {number}", one.prompt, one.tokens, origins))
    if not texts:
        raise BadInput(file.name, found="no request", expected='one a line: {"prompt": [tokens], "tokens": [tokens]}')
    return Recorded(file, "its answers", told=Told(texts), notes=tuple(notes))
