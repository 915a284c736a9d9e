"""A recording on disk: the directory that `write.py` makes, or a plain file of prompts and answers.

The directory has the engine, its model and rounding, and every event with its choices:

    recording.json            `Stated`: written first, and again with the number of events when the engine ends
    events.jsonl              one event per line, in the grammar of a trace
    batches.jsonl             optional: the engine's batch rows and slots of the forwards (`Batch`)
    tensors/000012.safetensors  the recorded tensors of event 12: logits, final rows, states, by request

A plain file has one request per line: {"prompt": [..], "tokens": [..]}, as token numbers. It has no text, because text
becomes tokens only with the tokenizer and the chat template.
Leaves out: writing, and the dumps of SGLang (`sglang_dumps.py`). Nothing is executed.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from instep_reference.contract.controllers import Controlled
from instep_reference.contract.declared_rounding import Product, checked
from instep_reference.contract.engine import Admit, AnyEvent, Commit, Draft, Forward, SetNumSteps
from instep_reference.contract.errors import BadInput, bytes_of
from instep_reference.contract.sampling import Sampling
from instep_reference.contract.shards import Shard
from instep_reference.sampling import Drawing

from ..checks.check_interface import counted
from ..generate.decode import Drawn
from ..setting import WIDTHS
from ..subject.declared_rounding import Declared, declared
from ..trace.file import RECORDING, decode
from ..trace.header import Header, Model, Room
from ..verdict import Comparison, Skipped
from .token_origins import Origin, Text, Told

OF_A_RECORDING = "a file of a recording"
SCHEMA = 1
META, EVENTS, TENSORS, BATCHES = RECORDING, "events.jsonl", "tensors", "batches.jsonl"
SHOWS = ("logits", "final", "states")
SLOT = "slot"  # a recorded number of the engine's slot; its name ends with that of the request
LONG = 12  # characters; requests get short names if a name is longer
PAGE = 1 << 20  # positions of a page: a recording has no addresses of memory, so each request has one page


class Attached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The choice of `instep attach`, and what it left out (`attach/recorder.py`).

    layers         recurrent layers whose states were recorded, at some events
    triggers, every, before, after   when states were written: the options of `attach.Options`
    written, dropped   the number of events whose states were written, or dropped
    left_out       requests that were not recorded, because they have a grammar, an adapter, an image or embeddings
    missing        hook -> why this release does not have it;  names: the release whose names were used
    no_states      why no states were recorded;  folded: how states of a ring were computed
    stopped        why recording stopped; empty: it did not
    """

    layers: tuple[int, ...]
    triggers: tuple[str, ...] = ()
    every: int = 0
    before: int = 0
    after: int = 0
    written: int = 0
    dropped: int = 0
    left_out: int = 0
    missing: dict[str, str] = {}
    names: str = ""
    no_states: str = ""
    folded: str = ""
    stopped: str = ""

    def notes(self) -> list[str]:
        """Sentences for the user about parts that are not in the recording."""
        found = [f"the recorder stopped: {self.stopped}"] if self.stopped else []
        found += [f"the engine has no {name} that the recorder knows: {why}" for name, why in self.missing.items()]
        if self.left_out:
            found.append(f"not recorded: {counted(self.left_out, 'request')} with a grammar, an adapter, an image or "
                         "embeddings")  # fmt: skip
        if self.no_states:
            return [*found, f"no states were recorded: {self.no_states}"]
        layers = ", ".join(map(str, self.layers))
        return [*found, f"states of layers {layers} were written at {self.written} events and dropped at "
                        f"{self.dropped}"]  # fmt: skip


class Stated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`recording.json`.

    engine    the recorded engine and its version
    weights   sha256 of the model's weights, as `write.digest` counts it; None: not known, and not checked
    config    the config.json that the engine loaded; None: not known, and not checked
    model     sha256 of config.json and the tensor files, in recordings of older writers
    dtype     of hidden rows, conv windows and KV; state: of recurrent states
    rounds    component -> its storage dtype, if that differs from `dtype`; products: as op sets declare them
    layout    order of the axes of recorded states, after the head: KV or VK
    shows     the kinds of tensors that were recorded
    controller  the controller of the step count, if every request of the engine is recorded, or the rounds of all;
                None: it is not judged
    num_steps   the initial step count; overlap: whether rounds overlapped, so that their results came a round late
    attached  the choices of an attached recorder, and what it left out; None: every event shows what `shows` has
    rank, ranks  of an engine with several ranks: the rank that recorded this, and their number
    run       a word that all ranks of the run have, and no other run
    shards    name -> [heads, width] of each segment, for "conv" and "state": the parts of a rank. Empty: as the
              contract declares them
    events    the number of events; sha256: digest of their lines; None: the recording was not closed
    """

    schema: int
    engine: str
    weights: str | None = None
    config: dict[str, Any] | None = None
    model: str | None = None
    dtype: str = "float32"
    state: str = "float32"
    rounds: dict[str, str] = {}
    products: dict[str, dict[str, Any]] = {}
    layout: str = "KV"
    shows: tuple[str, ...] = ()
    controller: Controlled | None = None
    num_steps: int | None = None
    overlap: bool = False
    attached: Attached | None = None
    rank: int | None = None
    ranks: int | None = None
    run: str | None = None
    shards: dict[str, list[tuple[int, int]]] = {}
    events: int | None = None
    sha256: str | None = None


class Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A round of the engine, of all its requests, as the controller of the step count sees it.

    launch     the number of its launch, prefills counted too
    processed  its results were processed before the launch of this number: the next one, or with overlap the one after
    steps      the step count of its windows; 0: it has none; None: no row shows it
    accepted   the accepted drafts of each row after its prompt, also of requests that ended meanwhile; of vLLM, whose
               table does not read them, only of rows with drafts
    scheduled  the number of all its rows; None: those of `accepted`
    """

    launch: int
    processed: int
    steps: int | None
    accepted: tuple[int, ...]
    scheduled: int | None = None


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's batch of a forward. batch: its number of rows; rows, slots: of each request.

    rounds: those that the engine processed since the batch before, if the recorder states them
    """

    event: int
    batch: int
    rows: dict[str, int] = {}
    slots: dict[str, int] = {}
    rounds: tuple[Round, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """A recording of any format after reading.

    digest, weights, config  of the model, as in `Stated`; digest is its `model`
    events   empty for a format that has only texts; told: these texts
    notes    notes for the user on parts that could not be read
    layers   recurrent layers whose states are recorded, at some events; None: all of them, at every event
    tensors  event -> its recorded tensors, by name
    names    name of a request here -> its own name in the recording, if that is long
    batches  batch rows and slots of the engine, as far as they were recorded, in the order of events
    ranks    the recordings of the ranks, if it was merged;  differences: comparisons of them with rank 0
    """

    path: Path
    engine: str
    digest: str | None = None
    weights: str | None = None
    config: Mapping[str, Any] | None = None
    dtype: str | None = None
    declared: Declared | None = None
    layout: str = "KV"
    shows: tuple[str, ...] = ()
    controller: Controlled | None = None
    num_steps: int | None = None
    lag: int = 0
    layers: tuple[int, ...] | None = None
    events: tuple[AnyEvent, ...] = ()
    told: Told | None = None
    notes: tuple[str, ...] = ()
    tensors: Callable[[int], Mapping[str, torch.Tensor]] = lambda event: {}
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    batches: tuple[Batch, ...] = ()
    ranks: "Ranks | None" = None
    differences: tuple[Comparison, ...] = ()

    def slot(self, event: int, request: str | None) -> int | None:
        """The engine's slot of a request, if the last event up to this one that wrote its states has it."""
        wrote_it = [index for index, one in enumerate(self.events[: event + 1]) if request in wrote(one)]
        slot = self.tensors(wrote_it[-1]).get(f"{SLOT}.{request}") if wrote_it else None
        placed = self.batch(event, request)
        known = None if placed is None or request is None else placed.slots.get(request)
        return known if slot is None else int(slot)

    def batch(self, event: int, request: str | None) -> Batch | None:
        """The last recorded batch up to an event that has the request."""
        return next((one for one in reversed(self.batches) if one.event <= event and request in one.rows), None)

    def header(self, model: Model) -> Header:
        """The header of a trace in which these events are legal: there is room for everything.

        Its adaptive file only makes the recorded step counts legal. No wish is compared: `step_counts.py` does that.
        """
        requests = max(sum(isinstance(event, Admit) for event in self.events), 1)
        steps = {event.num_steps for event in self.events if isinstance(event, SetNumSteps)}
        widths = (max(map(len, event.picks)) for event in self.events if isinstance(event, Draft) and event.picks)
        first = next(widths, 0) if self.num_steps is None else self.num_steps
        known = sorted({*steps, first} - {0}) or [0]
        shapes = [tree for event in self.events if isinstance(event, Draft) for tree in event.parents or ()]
        trees = any(tree != tuple(range(len(tree))) for tree in shapes)
        units = tuple(range(1, requests + 1))
        room = Room(units, units, PAGE, PAGE, PAGE, known[-1] + 1 if trees else None)
        return Header(
            schema=2, name=self.path.name, claim="A recording.", checkpoint=model, capacity=room, num_steps=first,
            candidates=tuple(known), adaptive={"candidate_steps": known} if known[1:] and not trees else None,
            lag=0, seed=0, stop=None, replay=(), created={},
        )


@dataclass(frozen=True)
class Ranks:
    """The recordings of all ranks, that of rank 0 first. shards: of conv windows and states"""

    every: tuple[Recorded, ...]
    shards: Mapping[str, Shard]

    @property
    def size(self) -> int:
        return len(self.every)


def with_short_names(recorded: Recorded, words: Told) -> tuple[Recorded, Told]:
    """The recording and its texts with requests named in the order of admission, unless their own names are short."""
    own = list(dict.fromkeys(event.request for event in recorded.events if isinstance(event, Admit)))
    own = own or list(dict.fromkeys(text.request for text in words.texts))
    if all(len(name) <= LONG for name in own):
        return recorded, words
    letters = [chr(ord("a") + number) for number in range(26)]
    short = dict(zip(own, letters if len(own) <= len(letters) else [f"r{n}" for n in range(1, len(own) + 1)],
                     strict=False))  # fmt: skip

    def renamed(event: int) -> dict[str, torch.Tensor]:
        return {_with_short_name(name, short): tensor for name, tensor in recorded.tensors(event).items()}

    texts = [replace(text, request=short[text.request]) for text in words.texts]
    counts = [replace(one, where=short[one.where]) if isinstance(one, Skipped) else
              replace(one, request=short[one.request or ""]) for one in words.counts]  # fmt: skip
    return replace(
        recorded, events=tuple(_of_short_names(event, short) for event in recorded.events), tensors=renamed,
        names={name: long for long, name in short.items()}, batches=tuple(
            msgspec.structs.replace(one, rows=_short(one.rows, short), slots=_short(one.slots, short))
            for one in recorded.batches),
    ), replace(words, texts=texts, counts=counts)


def _short(numbers: Mapping[str, int], short: Mapping[str, str]) -> dict[str, int]:
    return {short.get(name, name): number for name, number in numbers.items()}


def _with_short_name(tensor: str, short: Mapping[str, str]) -> str:
    kind, _, request = tensor.partition(".")
    request, dot, layer = request.rpartition(".") if kind in ("conv", "state") else (request, "", "")
    return f"{kind}.{short.get(request, request)}{dot}{layer}"


def _of_short_names(event: AnyEvent, short: Mapping[str, str]) -> AnyEvent:
    if isinstance(event, Forward):
        return Forward(tuple(msgspec.structs.replace(row, request=short[row.request]) for row in event.rows))
    if hasattr(event, "requests"):
        return msgspec.structs.replace(event, requests=tuple(short[name] for name in event.requests))
    if hasattr(event, "request"):
        return msgspec.structs.replace(event, request=short[event.request])
    return event


def stated_of(directory: Path) -> Stated:
    """Read `recording.json` of a directory."""
    meta = directory / META
    stated: Stated = decode(bytes_of(meta, OF_A_RECORDING), Stated, meta.name, f"a recording of schema {SCHEMA}")
    return stated


def read(directory: Path) -> Recorded:
    """Read a directory that `write.py` made, up to where it was cut."""
    stated = stated_of(directory)
    if stated.schema != SCHEMA:
        raise BadInput(f"{META}: schema", found=stated.schema, expected=SCHEMA)
    for name in stated.shows:
        if name not in SHOWS:
            raise BadInput(f"{META}: shows", found=repr(name), expected=f"some of {', '.join(SHOWS)}")
    if stated.controller is not None:
        stated.controller.check(stated.num_steps, f"{META}: controller")
    if stated.layout not in ("KV", "VK"):
        raise BadInput(f"{META}: layout", found=repr(stated.layout), expected="KV or VK")
    events, notes = _events(directory / EVENTS, stated)
    if stated.attached is not None:
        notes = *notes, *stated.attached.notes()
    elif stated.events is None and "states" in stated.shows and _lacks_states(directory, len(events) - 1, events[-1]):
        notes = *notes, f"{EVENTS} line {len(events)} is skipped: its states come after it and are missing"
        events = events[:-1]
    return Recorded(
        directory, stated.engine, stated.model, stated.weights, stated.config, stated.dtype, _declared(stated),
        stated.layout, stated.shows, stated.controller, stated.num_steps, int(stated.overlap),
        None if stated.attached is None else stated.attached.layers, events, None, notes,
        lambda event: _tensors(directory, event), batches=_batches(directory / BATCHES),
    )


def _batches(file: Path) -> tuple[Batch, ...]:
    """The recorded batches; a last line that was cut off is skipped."""
    lines = bytes_of(file, OF_A_RECORDING).splitlines(keepends=True) if file.is_file() else []
    return tuple(decode(line, Batch, f"{file.name} line {number}", "a batch: event, batch, rows, slots, rounds")
                 for number, line in enumerate(lines, 1) if line.endswith(b"\n"))  # fmt: skip


def _events(file: Path, stated: Stated) -> tuple[tuple[AnyEvent, ...], tuple[str, ...]]:
    content = bytes_of(file, OF_A_RECORDING)
    lines = content.splitlines(keepends=True)
    notes = []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        notes.append(f"{file.name} was cut within line {len(lines) + 1}: only the lines before it were read")
    if not lines:
        raise BadInput(file.name, found="no event", expected="one event per line")
    whole = b"".join(lines)
    if stated.events is None:
        notes.append("the recording was not closed: the engine did not end normally")
    elif len(lines) < stated.events:
        notes.append(f"{file.name} was cut: {len(lines)} of {stated.events} events are there")
    elif len(lines) > stated.events or hashlib.sha256(whole).hexdigest() != stated.sha256:
        raise BadInput(file.name, found="other lines", expected=f"the {stated.events} that were recorded",
                       hint="the recording was edited")
    return tuple(decode(line, AnyEvent, f"{file.name} line {n}", "an event of a trace")
                 for n, line in enumerate(lines, 1)), tuple(notes)  # fmt: skip


def wrote(event: AnyEvent) -> list[str]:
    """The requests that have other states after the event."""
    if isinstance(event, Forward):
        return [row.request for row in event.rows if row.kind != "verify"]
    return list(event.requests) if isinstance(event, Commit) else []


def _lacks_states(directory: Path, index: int, event: AnyEvent) -> bool:
    """Whether the engine ended before all states of its last event were written."""
    shown = _tensors(directory, index)
    return not all(any(name.startswith(f"state.{request}.") for name in shown) for request in wrote(event))


def _declared(stated: Stated) -> Declared:
    activation, state = (width(word, f"{META}: {name}") for name, word in (("dtype", stated.dtype),
                                                                          ("state", stated.state)))  # fmt: skip
    try:
        products = checked({form: Product(**given) for form, given in stated.products.items()})
    except TypeError:
        raise BadInput(f"{META}: products", found=stated.products, expected="a format, and a block, per form") from None
    rounds = {name: width(word, f"{META}: rounds.{name}") for name, word in stated.rounds.items()}
    return as_usual(activation, state, rounds, products)


def as_usual(
    activation: torch.dtype, state: torch.dtype, rounds: Mapping[str, torch.dtype], products: Mapping[str, Product]
) -> Declared:
    """The rounding of an engine in these widths: that of `plain` (all but gates, q, k, v and logits), with changes."""
    from instep_optimized import load

    usual = load("plain")
    engine = replace(usual, rounds=lambda a, s: {**usual.rounds(a, s), **rounds}, products=products)
    return declared(engine, activation, state)


def width(word: str, field: str) -> torch.dtype:
    if word not in WIDTHS:
        raise BadInput(field, found=repr(word), expected=f"one of {', '.join(WIDTHS)}")
    return WIDTHS[word]


def _tensors(directory: Path, event: int) -> Mapping[str, torch.Tensor]:
    """The recorded tensors of one event. NaN and infinite numbers in them are findings, and not bad input."""
    file = directory / TENSORS / f"{event:06d}.safetensors"
    if not file.is_file():
        return {}
    try:
        with safe_open(str(file), framework="pt") as stored:
            found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise BadInput(str(file), found=f"unreadable ({error})", expected="a whole safetensors file") from None
    for name, tensor in found.items():
        if not tensor.is_floating_point() and not name.startswith(f"{SLOT}."):
            raise BadInput(f"{file.name}: {name}", found=str(tensor.dtype), expected="floating-point numbers")
    return found


class PlainLine(msgspec.Struct, frozen=True):
    """A request of a plain file; other fields of its line are ignored.

    prompt              at least one token; tokens: the answer; request: its name, or "line N"
    sampling, uniforms  how each of its tokens was drawn, as in an admission of a trace, and the uniforms; none: argmax
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


def read_plain(file: Path) -> Recorded:
    """Read a plain file of prompts and answers. A last line that was cut off is skipped, with a note."""
    lines = bytes_of(file).splitlines(keepends=True)
    texts, notes = list[Text](), list[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file.name} line {number}"
        try:
            one: PlainLine = decode(line, PlainLine, where, 'a line {"prompt": [tokens], "tokens": [tokens]}')
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
