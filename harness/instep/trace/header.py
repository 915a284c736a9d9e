"""The first line of a trace: its model, the capacity that it needs, and the sentence that it proves.

Leaves out: the events (their wire format is the contract's) and how the file is kept (`file.py`).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.block_drafter import FOLDER
from instep_reference.contract.capacity import MOST_NODES
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.drafters import BLOCK, heads_of
from instep_reference.contract.engine import Capacity
from instep_reference.contract.errors import BadInput
from instep_reference.contract.grown_draft_tree import MOST_BEAMS

SCHEMA = 2  # version of the wire format; it stays when an optional field is added


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that the tokens were chosen with.

    near    its place, relative to the trace; the option `--checkpoint` overrides it
    digest  sha256 of configuration and weights; config_sha256: of the configuration alone
    """

    near: str
    digest: str
    config_sha256: str
    vocab: int
    mtp_layers: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, directory: Path, near: str) -> Model:
        config = checkpoint.config
        return cls(near, checkpoint.digest, config_digest(directory), config.vocab, config.mtp_layers)

    @classmethod
    def of_block(cls, checkpoint: Checkpoint, directory: Path | None, near: str) -> Model | None:
        """Describe the block drafter of a checkpoint; None if it was opened without one.

        directory: of the target; None: the model is in memory.  near: as that of the target
        """
        if checkpoint.config.block is None:
            return None
        digest = checkpoint.block_digest
        config = digest if directory is None else config_digest(directory / FOLDER)
        return cls(f"{near}/{FOLDER}", digest, config, checkpoint.config.vocab, 0)

    def must_be(self, checkpoint: Checkpoint, directory: Path | None, field: str) -> None:
        """Refuse a directory with another configuration or other weights. None: the model is in memory."""
        self._must_have(checkpoint.digest, directory, field, "checkpoint")
        for name, says, is_so in (
            ("vocab", self.vocab, checkpoint.config.vocab),
            ("mtp_layers", self.mtp_layers, checkpoint.config.mtp_layers),
        ):
            if says != is_so:
                where = directory or "memory"
                raise BadInput(f"{field}: checkpoint.{name}", found=says, expected=f"{is_so}, as in {where}")

    def must_be_block(self, checkpoint: Checkpoint, directory: Path | None, field: str) -> None:
        """Do `must_be` for the block drafter. directory: of the target."""
        self._must_have(checkpoint.block_digest, None if directory is None else directory / FOLDER, field, "drafter")

    def _must_have(self, digest: str, directory: Path | None, field: str, what: str) -> None:
        config = self.config_sha256 if directory is None else config_digest(directory)
        for name, found, expected in (("config_sha256", config, self.config_sha256), ("digest", digest, self.digest)):
            if found != expected:
                raise BadInput(
                    f"{field}: {what}.{name}", found=f"{found[:12]}.. in {directory or 'memory'}",
                    expected=f"{expected[:12]}..", hint=f"the trace was recorded with another {what}",
                )


class Room(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`Capacity` on the wire. An unknown field is an error.

    Old traces have no max_positions: there a request may have as many positions as all pages hold. Only traces whose
    windows may be trees have num_draft_tokens. Only traces that track prefixes have track_interval, and `tracked` if
    the device has room for a limited number. Only traces whose drafter grows trees have topk. Only traces in which a
    commit gives pages back have trim, and only those in which the device alone knows widths have device_widths.
    """

    slots: tuple[int, ...]
    pages: tuple[int, ...]
    page_size: int
    max_tokens: int
    max_positions: int | None = None
    num_draft_tokens: int | None = None
    track_interval: int | None = None
    topk: int | None = None
    tracked: int | None = None
    trim: bool = False
    device_widths: bool = False

    def capacity(self) -> Capacity:
        return Capacity(**msgspec.structs.asdict(self))


class Receiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The second engine of a trace, to which requests move from the first one, and from which they may come back.

    It has the model and the setting of the first engine, apart from these fields.
    num_steps    its step count, which never changes
    ranks        of our own engine; None: as many as the first one. An engine of a user decides that itself
    state_dtype  the storage of its states; None: as in the first one
    """

    capacity: Room
    num_steps: int
    ranks: int | None = None
    state_dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One op set that `instep replay` runs if the command names none. `until`: its last event; None: the whole trace.

    strategy, conv  how the engine commits states and conv windows; None: its defaults
    """

    ops: str
    until: int | None = None
    strategy: str | None = None
    conv: str | None = None


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a setting on which the recorded tokens depend. A replay must have the same.

    drafter  how drafts were made: eagle, vanilla, external, block
    dtype    the dtype of the recording engine
    overlap  whether rounds overlapped: then a request ended, and a step count changed, one round later
    """

    drafter: str = "eagle"
    dtype: str = "float64"
    overlap: bool = False


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """schema      version of the format
    claim       the sentence that the trace proves
    candidates  the step counts that may be in force, 0 aside
    adaptive    the adaptive file of SGLang 0.5.12 as written, or None: no controller, or another one
    controller  the controller with its dialect, if it is not that of `adaptive`; old traces have none
    lag         by how many rounds the results are late from which a controller decides (`contract/controllers.py`)
    stop        the token at which a path ends, or None
    created     names and versions of the recorder
    recording   the part of the recording engine's setting on which its choices depend
    tensors_sha256  digest of the tensors in the safetensors file, `file.digest_of`; None: the trace was written before
                there was one
    drafter     the block drafter, if it drafted; in the folder `block` of the checkpoint. Other traces have none
    receiver    the second engine, if requests move to another engine. Other traces have none
    """

    schema: int
    name: str
    claim: str
    checkpoint: Model
    capacity: Room
    num_steps: int
    candidates: tuple[int, ...]
    adaptive: dict[str, Any] | None
    lag: int
    seed: int
    stop: int | None
    replay: tuple[Part, ...]
    created: dict[str, str]
    recording: Recording = Recording()
    tensors_sha256: str | None = None
    controller: Controlled | None = None
    drafter: Model | None = None
    receiver: Receiver | None = None

    def of_receiver(self) -> Header:
        """Return the header that the second engine would have alone."""
        assert self.receiver is not None
        steps = self.receiver.num_steps
        return msgspec.structs.replace(self, capacity=self.receiver.capacity, num_steps=steps, candidates=(steps,),
                                       adaptive=None, controller=None, receiver=None)  # fmt: skip

    def near(self, model: Path, folder: Path) -> Header:
        """Return the header of a trace in `folder`. model: the folder of the model"""
        near = os.path.relpath(model.resolve(), folder.resolve())
        drafter = self.drafter and msgspec.structs.replace(self.drafter, near=f"{near}/{FOLDER}")
        return msgspec.structs.replace(self, drafter=drafter,
                                       checkpoint=msgspec.structs.replace(self.checkpoint, near=near))  # fmt: skip

    def must_have_one_engine(self, field: str) -> None:
        """Refuse a trace whose requests move to a second engine."""
        if self.receiver is not None:
            raise BadInput(f"{field}: receiver", found="a second engine", expected="a trace of one engine",
                           hint="`instep replay` serves traces of two engines")

    def room(self) -> Capacity:
        return replace(self.capacity.capacity(), block=self.drafter is not None)

    @property
    def heads(self) -> int:
        """How many MTP layers are in use, as recorded."""
        return heads_of(self.recording.drafter, self.checkpoint.mtp_layers)

    @property
    def proposes(self) -> bool:
        """Whether the engine can draft by itself, as recorded."""
        return self.heads > 0 or self.drafter is not None

    def adaptive_file(self, field: str) -> AdaptiveFile | None:
        return None if self.adaptive is None else AdaptiveFile.of(self.adaptive, field=f"{field}: adaptive")

    def steps(self, field: str) -> dict[str, Any]:
        """Return the fields of a plan about step counts: the initial count, and the controller with its lag."""
        return {"num_steps": self.num_steps, "adaptive": self.adaptive_file(field), "controlled": self.controller,
                "lag": self.lag}  # fmt: skip

    def line(self) -> bytes:
        """Return the first line of a trace. Without fields that were added later it is the same as before them."""
        data = msgspec.to_builtins(self)
        later = ("controller", "drafter", "receiver")
        return msgspec.json.encode({name: data[name] for name in data if name not in later or data[name]}) + b"\n"


class _FirstPart(Part, frozen=True, forbid_unknown_fields=True):
    """A part in schema 1, where it also named the drafter."""

    drafter: str | None = None


class FirstHeader(Header, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The header of schema 1; `today` converts it to the present schema."""

    replay: tuple[_FirstPart, ...]

    def today(self) -> Header:
        """The header in the present schema. In schema 1 `created.reference` is the dtype; a part has the drafter."""
        usual = Recording()
        drafters = sorted({part.drafter or usual.drafter for part in self.replay})
        if len(drafters) > 1:
            raise BadInput("replay", found=f"the drafters {' and '.join(drafters)}", expected="one for all parts",
                           hint="the drafter belongs to the recorded tokens; record the trace again")  # fmt: skip
        recording = Recording(drafters[0] if drafters else usual.drafter, self.created.get("reference", usual.dtype))
        fields = {name: getattr(self, name) for name in Header.__struct_fields__}
        parts = tuple(Part(part.ops, part.until, part.strategy, part.conv) for part in self.replay)
        return Header(**{**fields, "schema": SCHEMA, "replay": parts, "recording": recording})


def sound(header: Header, field: str) -> None:
    """Refuse a header whose numbers contradict each other. `field`: its file and line, for the error."""
    room, steps = header.room(), max((*header.candidates, header.num_steps))
    nodes, widest = room.num_draft_tokens, room.widest(steps)
    rules: tuple[tuple[str, object, bool, str], ...] = (
        ("checkpoint.vocab", header.checkpoint.vocab, header.checkpoint.vocab > 0, "at least 1"),
        ("capacity.page_size", room.page_size, room.page_size > 0, "at least 1"),
        ("capacity.slots", room.slots, _units(room.slots), "different slots, each at least 1 (slot 0 is reserved)"),
        ("capacity.pages", room.pages, _units(room.pages), "different pages, each at least 1 (page 0 is reserved)"),
        ("candidates", header.candidates, min(header.candidates, default=0) >= 0, "step counts of at least 0"),
        ("num_steps", header.num_steps, header.num_steps in {0, *header.candidates}, "0 or one of the candidates"),
        ("capacity.max_tokens", room.max_tokens, room.max_tokens >= widest, f"at least {widest}, the widest window"),
        ("capacity.pages", f"room for {room.total_positions} tokens",
         room.total_positions >= widest, f"at least {widest}, the widest window"),
        ("capacity.max_positions", room.max_positions, widest <= room.request_positions <= room.total_positions,
         f"{widest}, the widest window, to {room.total_positions}, what all pages hold"),
        ("capacity.num_draft_tokens", nodes, nodes is None or steps < nodes <= MOST_NODES,
         f"{steps + 1}, a chain of the largest step count and its root, to {MOST_NODES}"),
        ("capacity.track_interval", room.track_interval, (room.track_interval or 1) > 0, "at least 1"),
        ("capacity.tracked", room.tracked,
         room.tracked is None or (room.tracked > 0 and room.track_interval is not None),
         "at least 1, with capacity.track_interval"),
        ("capacity.topk", room.topk, room.topk is None or _grows(header, room, steps),
         f"1 to {min(MOST_BEAMS, header.checkpoint.vocab)} children per node, with capacity.num_draft_tokens, eagle "
         f"drafting, at most {MOST_BEAMS} rows of the draft head, and room for them"),
        ("capacity.device_widths", room.device_widths,
         not room.device_widths or not (header.heads or room.trees or room.track_interval),
         "chains of a block drafter or of given drafts, without capacity.track_interval"),
        ("adaptive", "step counts that change, and trees", nodes is None or not _varies(header),
         "no controller where windows may be trees: adaptive step counts are for chains"),
        ("drafter", "nothing" if header.drafter is None else header.drafter.near,
         (header.drafter is not None) == (header.recording.drafter == BLOCK),
         f"a block drafter in a trace whose recording.drafter is {BLOCK}, and in no other"),
        ("drafter.vocab", header.drafter and header.drafter.vocab,
         header.drafter is None or (header.drafter.vocab, header.drafter.mtp_layers) == (header.checkpoint.vocab, 0),
         f"{header.checkpoint.vocab}, as in the checkpoint, and no MTP layers"),
        ("adaptive", "a file and a controller", header.adaptive is None or header.controller is None,
         "one of them; a controller has its own `file`"),
        ("replay", [part.until for part in header.replay], all((part.until or 0) >= 0 for part in header.replay),
         "last events of at least 0"),
        ("lag", header.lag, header.lag >= int(header.recording.overlap), "at least 0, and 1 where rounds overlapped"),
        ("stop", header.stop, header.stop is None or 0 <= header.stop < header.checkpoint.vocab,
         f"a token below {header.checkpoint.vocab}"),
    )
    for name, found, holds, expected in rules:
        if not holds:
            raise BadInput(f"{field}: {name}", found=found, expected=expected)
    header.adaptive_file(field)
    if header.receiver is not None:
        if header.receiver.ranks is not None and header.receiver.ranks < 1:
            raise BadInput(f"{field}: receiver.ranks", found=header.receiver.ranks, expected="at least 1")
        if header.receiver.capacity.track_interval != room.track_interval:
            raise BadInput(f"{field}: receiver.capacity.track_interval", found=header.receiver.capacity.track_interval,
                           expected=f"{room.track_interval}, as in the capacity of the first engine")
        sound(header.of_receiver(), f"{field}: receiver")
    if header.controller is not None:
        header.controller.check(header.num_steps, f"{field}: controller")


def _varies(header: Header) -> bool:
    """Whether a controller may change the step count."""
    return header.adaptive is not None if header.controller is None else header.controller.varies


def _grows(header: Header, room: Capacity, steps: int) -> bool:
    """Whether a drafter may grow trees in this room."""
    eagle = header.checkpoint.mtp_layers == 1 and header.recording.drafter == "eagle"
    topk, rows = room.topk or 0, room.drafted(steps, 0)
    fits = room.drafted(steps, room.grown(steps)) < room.request_positions and rows <= MOST_BEAMS
    few = 1 <= topk <= min(MOST_BEAMS, header.checkpoint.vocab)
    return room.trees and few and eagle and fits


def _units(units: tuple[int, ...]) -> bool:
    return bool(units) and min(units) > 0 and len(set(units)) == len(units)


def config_digest(directory: Path) -> str:
    """sha256 of the configuration file."""
    return hashlib.sha256((directory / "config.json").read_bytes()).hexdigest()
