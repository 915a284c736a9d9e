"""A plain file of prompts and answers: one request per line, {"prompt": [..], "tokens": [..]}, as token numbers.

A request that sampled has `sampling`, as an admission in a trace, and `uniforms`, one per token. `request` is its name,
and other fields of a line are ignored. Leaves out: text, because it becomes tokens only with the tokenizer and the chat
template.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from instep_reference.contract.errors import BadInput
from instep_reference.contract.sampling import Sampling
from instep_reference.sampling import Drawing

from ..generate.drawn_tokens import Drawn
from ..trace.file import decode
from .recording import Recorded
from .texts import Origin, Text, Told


class Line(msgspec.Struct, frozen=True):
    """prompt: at least one token; tokens: the answer; request: its name, or "line N".

    sampling, uniforms: how each of its tokens was drawn, and the uniforms; none: argmax
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    request: str | None = None
    sampling: Sampling | None = None
    uniforms: tuple[float, ...] = ()

    def drawn(self, where: str) -> tuple[Drawn | None, ...]:
        """The drawing and the node of each token; None: argmax."""
        for field, found, expected in () if self.sampling is None else self.sampling.wrong():
            _must(False, f"{where}: sampling.{field}", found, expected)
        if self.sampling is None or not self.sampling.draws:
            _must(not self.uniforms, f"{where}: uniforms", f"{len(self.uniforms)}, and no sampling", "none")
            return (None,) * len(self.tokens)
        count = len(self.tokens)
        _must(len(self.uniforms) == count, f"{where}: uniforms", len(self.uniforms), f"{count}, one per token")
        for number, u in enumerate(self.uniforms):
            _must(0 <= u < 1, f"{where}: uniforms[{number}]", u, "a number from 0 to below 1")
        return tuple((Drawing.alone(self.sampling, (u,)), 0) for u in self.uniforms)


def _must(holds: bool, field: str, found: object, expected: str) -> None:
    if not holds:
        raise BadInput(field, found=found, expected=expected)


def read(file: Path) -> Recorded:
    """Read the requests of a file. A last line that was cut off is skipped, with a note."""
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
            notes.append(f"{where} was cut off, so it is skipped")
            continue
        origins = tuple(Origin(number, "line") for _ in one.tokens)
        name = one.request or f"line {number}"
        texts.append(Text(name, one.prompt, one.tokens, origins, drawn=one.drawn(where)))
    if not texts:
        raise BadInput(file.name, found="no request", expected='one per line: {"prompt": [tokens], "tokens": [tokens]}')
    return Recorded(file, "its answers", told=Told(texts), notes=tuple(notes))
