"""Dumps of SGLang's own dumper (`sglang.srt.debug_utils.dumper`, 0.5.10 to 0.5.23), read as texts and windows.

    step=3___rank=0___dump_index=41___name=input_ids___recompute_status=disabled.pt
    forward_pass_id=3___rank=0___name=positions___dump_index=8.pt          older releases

Each step needs only `input_ids`, `positions`, `seq_lens` and `rids`, which the dumper writes by default
(`DUMPER_ENABLE=1`, without graphs, overlap and radix cache). A token that a decode reads was chosen one step before.
The files are pickles: torch opens them for tensors and plain values only, and anything else is refused. A prompt's last
chunk of one token looks like a decode, so the token after the widest chunk is not judged.
Leaves out: engines with a draft model, as the dumper does not mark the draft model's steps. Use `write.py` for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from instep_reference.contract.engine import Path as Accepted
from instep_reference.contract.errors import BadInput

from ..subject.guarded_calls import WHOLE
from .recording import Recorded
from .token_origins import Origin, Text, Told, counted

NEEDED = ("input_ids", "positions", "seq_lens")
READ = (*NEEDED, "rids", "req_pool_indices")
STEP, OLD_STEP = "step", "forward_pass_id"


def is_dump(directory: Path) -> bool:
    return next(directory.glob("*___name=input_ids*.pt"), None) is not None


def read(directory: Path) -> Recorded:
    """Read all steps of the first rank, in order."""
    requests, notes = _Requests(), list[str]()
    steps = _steps(directory)
    for number, files in sorted(steps.items()):
        missing = [name for name in NEEDED if name not in files]
        if missing and number == max(steps):
            notes.append(f"step {number} was cut off ({missing[0]} is missing), so it is skipped")
            continue
        if missing:
            raise BadInput(f"{directory.name}: step {number}", found=f"no {missing[0]}", expected=", ".join(NEEDED))
        shown = {name: _value(file) for name, file in files.items()}
        for row in _rows(f"{directory.name}: step {number}", number, shown):
            requests.take(row)
    told = requests.told()
    if not told.texts:
        raise BadInput(directory.name, found="no request with a generated token", expected="prompts and decode steps")
    return Recorded(directory, "SGLang's dumper", told=told, notes=(*notes, *requests.notes))


@dataclass(frozen=True)
class _Row:
    """The tokens of one request in one step. verify: whether they are a window. where: the step, for errors."""

    where: str
    step: int
    request: str
    start: int
    tokens: tuple[int, ...]
    verify: bool


@dataclass
class _Request:
    """A request so far: committed tokens, the origins of those after the prompt, and its open window."""

    prompt: int
    chunk: int  # the width of the prompt's last part
    tokens: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    window: _Row | None = None
    last: int = 0  # the step before


class _Requests:
    def __init__(self) -> None:
        self.live: dict[str, _Request] = {}
        self.over: list[tuple[str, _Request]] = []
        self.found, self.notes, self.widest = Told(), list[str](), 0

    def take(self, row: _Row) -> None:
        if row.start == 0 and row.request in self.live:
            self.over.append((row.request, self.live.pop(row.request)))
        known = self.live.setdefault(row.request, _Request(0, 0))
        if known.window is not None:
            self._accepted(row, known, known.window)
            known.window = None
        elif known.origins or (known.prompt and (row.verify or len(row.tokens) == 1)):
            known.origins.append(Origin(known.last, "step"))
        if row.start != len(known.tokens):
            hint = "record without a radix cache" if not known.tokens else "are steps of a draft model in between?"
            raise BadInput(f'{row.where}: request "{row.request}"', found=f"tokens at position {row.start}",
                           expected=f"position {len(known.tokens)}", hint=hint)  # fmt: skip
        if row.verify:
            known.tokens.append(row.tokens[0])
            known.window = row
        else:
            if known.origins and len(row.tokens) != 1:
                raise BadInput(f'{row.where}: request "{row.request}"', found=f"{len(row.tokens)} tokens of its text",
                               expected="one token, or a window", hint="are steps of a draft model in between?")
            known.tokens += row.tokens
            if not known.origins:
                known.prompt, known.chunk = len(known.tokens), len(row.tokens)
                self.widest = max(self.widest, known.chunk)
        known.last = row.step

    def _accepted(self, row: _Row, known: _Request, window: _Row) -> None:
        """Read the accepted drafts from the next row, which begins after them, with the bonus."""
        drafts, count = window.tokens[1:], row.start - window.start - 1
        if not 0 <= count <= len(drafts):
            raise BadInput(f'{row.where}: request "{row.request}"', found=f"tokens at position {row.start}",
                           expected=f"{window.start + 1} to {window.start + len(window.tokens)}, within its window")
        known.tokens += drafts[:count]
        roles = [f"accepted draft {number} of {len(drafts)}" for number in range(1, count + 1)]
        known.origins += [Origin(window.step, "step", role) for role in (*roles, "bonus")]
        path = Accepted(tuple(range(1, count + 1)), row.tokens[0])
        parents = tuple(range(-1, len(drafts)))
        compared = counted(window.step, "step", row.request, window.tokens, parents, path)
        self.found.add_window(compared, len(drafts), count)

    def told(self) -> Told:
        for name, known in (*self.over, *self.live.items()):
            prompt, said = known.tokens[: known.prompt], known.tokens[known.prompt :]
            unsure = int(bool(said) and known.chunk == self.widest and known.chunk % 64 == 0)
            if unsure:
                self.notes.append(f'the first token of request "{name}" may be its prompt\'s last: not judged')
            if len(said) > unsure:
                self.found.texts.append(Text(name, tuple(prompt), tuple(said), tuple(known.origins), unsure))
        return self.found


def _steps(directory: Path) -> dict[int, dict[str, Path]]:
    """Step -> name -> its first file, of rank 0."""
    steps: dict[int, dict[str, Path]] = {}
    for file in sorted(directory.glob("*.pt")):
        tags = dict(part.split("=", 1) for part in file.stem.split("___") if "=" in part)
        step = tags.get(STEP, tags.get(OLD_STEP, ""))
        if step.isdigit() and tags.get("rank", "0") == "0" and tags.get("name") in READ:
            steps.setdefault(int(step), {}).setdefault(tags["name"], file)
    return steps


def _value(file: Path) -> Any:
    """The tensor or list in a file. Nothing in it is executed."""
    try:
        found = torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises several kinds, none narrower
        raise BadInput(file.name, found=f"what torch does not open safely ({type(error).__name__})",
                       expected="a tensor or a list of names", hint="a pickle that runs code is never opened") from None
    return found["value"] if isinstance(found, dict) and "value" in found else found


def _rows(where: str, step: int, shown: dict[str, Any]) -> Iterator[_Row]:
    """The batch of one step. Rows end at their lengths; in a verify all begin there and have the same width."""
    for name in NEEDED:
        if not isinstance(shown[name], torch.Tensor) or shown[name].dim() != 1 or shown[name].dtype not in WHOLE:
            raise BadInput(f"{where}: {name}", found=type(shown[name]).__name__, expected="a vector of integers")
    ids, at, lengths = (shown[name].tolist() for name in NEEDED)
    named = shown.get("rids", shown.get("req_pool_indices"))
    flat = isinstance(named, (list, tuple)) or (isinstance(named, torch.Tensor) and named.dim() == 1)
    if named is None or not flat or len(named) != len(lengths) or len(ids) != len(at):
        raise BadInput(where, found=f"{len(ids)} tokens, {len(at)} positions, {len(lengths)} lengths",
                       expected="a position per token, and an entry of rids or req_pool_indices per length")
    names = [str(int(name) if isinstance(name, torch.Tensor) else name) for name in named]
    sizes, verify = _extended(at, lengths), False
    if sizes is None:
        sizes, verify = _window(at, lengths), True
    if sizes is None:
        raise BadInput(f"{where}: positions", found=f"{at[:8]}.. for lengths {lengths[:8]}",
                       expected="rows that end at their lengths, or windows that begin there")
    begin = 0
    for name, size in zip(names, sizes, strict=True):
        yield _Row(where, step, name, at[begin], tuple(ids[begin : begin + size]), verify)
        begin += size


def _extended(at: Sequence[int], lengths: Sequence[int]) -> list[int] | None:
    sizes, begin = [], 0
    for length in lengths:
        if begin >= len(at) or length <= at[begin]:
            return None
        sizes.append(length - at[begin])
        if list(at[begin : begin + sizes[-1]]) != list(range(at[begin], length)):
            return None
        begin += sizes[-1]
    return sizes if begin == len(at) else None


def _window(at: Sequence[int], lengths: Sequence[int]) -> list[int] | None:
    width = len(at) // max(len(lengths), 1)
    right = [length + node for length in lengths for node in range(width)]
    return [width] * len(lengths) if width > 1 and right == list(at) else None
