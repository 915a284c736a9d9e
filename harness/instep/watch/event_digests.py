"""One digest per event over everything the subject answers and holds: answers, places, states, pools.

Two runs of a trace have the same digests if no byte of them differs. Leaves out: whether any of it is right.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ..verdict import Comparison, Skipped, Tier
from .event_context import EventContext
from .memory_changes import bits

DIGEST_BYTES = 16


class EventDigests:
    """A check that compares nothing: it records a digest of every event for comparison with another run."""

    name = "trail"
    tier = Tier.BITWISE

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, context: EventContext) -> Iterator[Comparison | Skipped]:
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        subject = context.subject
        for part in (subject.answer, subject.places, subject.after, subject.wanted_num_steps, context.subject_slots,
                     context.subject_pages, [(each.units, each.gaps) for each in context.regions]):  # fmt: skip
            feed(digest, part)
        self.lines.append(f"{context.index} {context.kind} {digest.hexdigest()}")
        yield from ()


def feed(digest: Any, value: Any) -> None:
    """Add a value to a digest; for a tensor its dtype, shape and bytes."""
    digest.update(type(value).__name__.encode() + b"\0")
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(bits(value).contiguous().cpu().numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            feed(digest, key)
            feed(digest, value[key])
    elif is_dataclass(value):
        for each in fields(value):
            feed(digest, getattr(value, each.name))
    elif isinstance(value, list | tuple):
        for one in value:
            feed(digest, one)
    else:
        digest.update(repr(value).encode() + b"\0")
